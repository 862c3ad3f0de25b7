"""Where the arrays of a training lie: two versions of the state, of which each round reads one and writes the other,
and what learners bring.

The first two sums that the ranks of a node make in a round lie where its new anchor and velocity will: a reduction
reads an element of each and writes the new one in its place. So a round of two learners touches four arrays of the
model's size where it would touch six, and they stay in a cache that six do not fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.backend import Array, Backend
from shoal.comm.group import Group

HOMES = 4
"""Arrays 0 to 3 hold the anchor and the velocity of version 0, then those of version 1; a rank's own follow."""


@dataclass(frozen=True)
class Sizes:
    """What has to fit: lengths of the state's arrays, of a contribution, and the most learners there can be."""

    anchor: int
    velocity: int
    contribution: int
    learners: int
    dtype: np.dtype

    @property
    def slots(self) -> int:
        """Sums of its own that a rank may have open at a time: a block of P learners is covered by at most 2*log2(P)
        subtrees, and one more is being written."""
        return 2 * self.learners.bit_length() + 2

    @property
    def facts(self) -> int:
        """The most numbers that a rank tells of a round: one a learner, and a few."""
        return self.learners + 8


def numbers(version: int, place: int, places: int) -> Iterator[int]:
    """Which arrays the rank at `place` of the `places` of its node takes for its sums, in this order, in a round that
    writes the version."""
    homes = (2 * version, 2 * version + 1)
    return itertools.chain(homes if places == 1 else homes[place : place + 1], itertools.count(HOMES))


def versions(homes: Sequence[Array], momenta: Sequence[Array], sizes: Sizes) -> list[dict[str, Array]]:
    """The two versions of the state. homes: HOMES arrays as long as a contribution; momenta: one a version."""
    return [
        {
            "anchor": homes[2 * k][: sizes.anchor],
            "velocity": homes[2 * k + 1][: sizes.velocity],
            "momentum": momenta[k],
        }
        for k in (0, 1)
    ]


class OwnMemory:
    """The arrays of one rank that shares them with nobody."""

    def __init__(self, backend: Backend, sizes: Sizes) -> None:
        self._backend, self._sizes = backend, sizes
        self._homes = [backend.zeros(sizes.contribution, sizes.dtype) for _ in range(HOMES)]
        momenta = [backend.zeros(sizes.velocity, sizes.dtype) for _ in (0, 1)]
        self.versions = versions(self._homes, momenta, sizes)

    def array(self, number: int) -> Array:
        """Work array `number`, (contribution,): a new one, unless it is a home."""
        if number < HOMES:
            return self._homes[number]
        return self._backend.empty(self._sizes.contribution, self._sizes.dtype)

    def numbers(self, group: Group, version: int) -> Iterator[int]:
        """As `numbers`, for this rank."""
        return numbers(version, 0, 1)
