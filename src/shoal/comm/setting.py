"""What an allreduce is made for, and how the ranks beyond a power of two are folded onto their neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.backend import Array, Backend
from shoal.comm.transport import Transport
from shoal.comm.tree import blocks

_SLICE_ITEMS = 16
"""Slices begin at multiples of this, so that no two ranks write to one cache line."""


class Allreduce(Protocol):
    """An algorithm, made for one setting with the work memory that it needs."""

    def __call__(self, parts: Sequence[Array], out: Array, scale: float) -> None:
        """out = scale * (sum over all learners), the same bits on every rank.

        parts: this rank's subtree sums (see `tree.cover`), each (size,); out: (size,), no part. Collective."""


@dataclass(frozen=True)
class Setting:
    """`learners` arrays of `size` numbers, dealt in blocks over a transport.

    wire: how numbers travel, "float32" (as they are, float64 too), "float16" or "bfloat16" (float32 arrays only)."""

    transport: Transport
    learners: int
    size: int
    backend: Backend
    dtype: Any
    wire: str = "float32"

    def empty(self, *shape: int) -> Array:
        """Work memory of the arrays' dtype."""
        return self.backend.empty(shape, self.dtype)

    @property
    def dealt(self) -> list[range]:
        """The learners of each rank, contiguous; ranks for which there are none have an empty range."""
        dealt, ranks = blocks(self.learners, self.transport.size), self.transport.size
        return dealt + [range(self.learners, self.learners)] * (ranks - len(dealt))


@dataclass(frozen=True)
class Fold:
    """Ranks 2i and 2i+1 act as one for i < extra = ranks - power: the first gives its sum to the second at the
    start, and takes the result at the end. What is left are `power` ranks, a power of two, with an `index` each that
    grows with the rank."""

    rank: int
    power: int
    extra: int

    @classmethod
    def of(cls, rank: int, ranks: int) -> Fold:
        power = 1 << ranks.bit_length() - 1
        return cls(rank, power, ranks - power)

    @property
    def gives_to(self) -> int | None:
        return self.rank + 1 if self.rank < 2 * self.extra and self.rank % 2 == 0 else None

    @property
    def takes_from(self) -> int | None:
        return self.rank - 1 if self.rank < 2 * self.extra and self.rank % 2 else None

    @property
    def index(self) -> int:
        return self.rank // 2 if self.rank < 2 * self.extra else self.rank - self.extra

    def ranks(self, index: int) -> range:
        """The rank or ranks behind an index; the last one acts."""
        if index < self.extra:
            return range(2 * index, 2 * index + 2)
        return range(index + self.extra, index + self.extra + 1)

    def partners(self) -> list[tuple[int, int]]:
        """(bit, rank) of those this one exchanges with, nearest first: their index differs in that one bit."""
        bits = [1 << k for k in range(self.power.bit_length() - 1)]
        return [(bit, self.ranks(self.index ^ bit)[-1]) for bit in bits]


def slices(size: int, ranks: int) -> list[slice]:
    """`size` numbers cut into one contiguous slice a rank; trailing ones may be empty."""
    step = on_line(-(-size // ranks))
    return [slice(min(r * step, size), min((r + 1) * step, size)) for r in range(ranks)]


def on_line(items: int) -> int:
    """`items` rounded up so that what follows begins on a cache line of its own."""
    return items + -items % _SLICE_ITEMS


def length(at: slice) -> int:
    """The elements of a slice with both ends given."""
    return int(at.stop - at.start)
