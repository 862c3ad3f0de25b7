"""A whole reduction among ranks that share memory, as one call: arrive, wait, the moves, arrive, wait.

Each rank does the moves of its own slice. Or, where a line of the board that is no member's is given as `hub`,
whoever arrives last does the moves, which are then those of everything: one wait a rank instead of two, and the
shorter way for short arrays where ranks share cores. The compiled form alone can do that (`can_claim`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.kernels.barrier import Barrier
from shoal.kernels.compiled import cpu
from shoal.kernels.terms import Terms

SUM, STATISTICS, DISPLACEMENT, PER_RATE = range(4)
"""The rules: what becomes of d = scale * sum. In the order of cpu/kernels.h."""

NO_HUB = -1


@dataclass(frozen=True)
class Move:
    """One pass: `rule` on the terms and on `arrays`, first those that are read, then those that are written:
    (out), (a, a_out), (a, v, a_out, v_out), (a, v, a_out, v_out).

    With a `decay`, the parts are the gradients of a local step from a, with that weight decay and without momentum,
    and what it displaces is to be added. They may be overwritten."""

    terms: Terms
    rule: int
    arrays: tuple[Any, ...]
    decay: float | None = None


class Meeting(Protocol):
    """Made by `kernels.meeting`, for as long as the arrays lie where they do."""

    def run(self, sequence: int, mu: float, rate: float, spins: int, yields: int, deadline_s: float, /) -> int:
        """Meet at `sequence` and at `sequence` + 1, with the moves in between; waits as `Barrier.wait` does.

        Returns -1, or a member that is missing when a wait took `deadline_s`: called again with the same number,
        it goes on where it was."""


class TwinMeeting:
    """The same in NumPy, without a hub."""

    def __init__(self, barrier: Barrier, moves: Sequence[Move], apply: Callable[[Move, float, float], None]) -> None:
        self._barrier, self._moves, self._apply = barrier, tuple(moves), apply
        self._at = (0, False)
        """the sequence number at which this rank has arrived, and whether it has done its moves"""

    def run(self, sequence: int, mu: float, rate: float, spins: int, yields: int, deadline_s: float, /) -> int:
        """As `Meeting.run`."""
        barrier = self._barrier
        if self._at[0] != sequence:
            self._at = (sequence, False)
            barrier.arrive(sequence)
        if not self._at[1]:
            if (missing := barrier.wait(sequence, spins, yields, deadline_s)) >= 0:
                return missing
            for move in self._moves:
                self._apply(move, mu, rate)
            self._at = (sequence, True)
            barrier.arrive(sequence + 1)
        return barrier.wait(sequence + 1, spins, yields, deadline_s)


def can_claim() -> bool:
    """Whether meetings of this process can have a hub; all members must be able to."""
    return cpu is not None
