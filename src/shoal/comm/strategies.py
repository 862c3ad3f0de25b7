"""How a group of ranks turns its contributions into the next state: one class for each way its ranks may lie.

All are called alike, once a round: (sums of this rank, round, update). Ranks that share memory meet there three
times a round at most; the sequence numbers of these barriers grow with the round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shoal import kernels
from shoal.backend import Array
from shoal.comm.group import Group
from shoal.comm.hierarchical import Carrier
from shoal.comm.setting import Allreduce, Setting, slices
from shoal.comm.shared import BARRIERS, NodeMemory
from shoal.comm.tree import SubtreeSums, blocks, cover, joins

TermsAt = Callable[[int, int], kernels.Terms]
"""terms(lo, hi): the mean over learners of elements [lo, hi) of their contributions, still to be computed"""


class Update(Protocol):
    """Computes elements `span` of the next state from the present one and the mean over learners."""

    def __call__(self, span: slice, terms: TermsAt) -> None: ...


@dataclass(frozen=True)
class Passes:
    """An update that is nothing but moves of the kernels, so that all of a reduction on one node is one call.

    moves(span, terms): those of elements `span`, the same for rounds of the same parity and `kind`. numbers: mu,
    rate."""

    moves: Callable[[slice, TermsAt], list[kernels.Move]]
    numbers: tuple[float, float]
    kind: bool = False


class Strategy(Protocol):
    """Made for one group and number of learners."""

    def __call__(self, sums: SubtreeSums, round: int, update: Update, passes: Passes | None) -> None:
        """Update the state by the mean over learners. Collective over the group."""


class Alone:
    """One rank that has all learners, in memory of its own."""

    def __init__(self, setting: Setting) -> None:
        self._size = setting.size
        self._terms = _Terms(setting.backend.xp, joins(cover(setting.dealt[0])), 1.0 / setting.learners)

    def __call__(self, sums: SubtreeSums, round: int, update: Update, passes: Passes | None) -> None:
        """As `Strategy`."""
        update(slice(0, self._size), self._terms(tuple(sums.numbers), lambda: sums.parts))


class OnNode:
    """Ranks of one node: sum and update in one pass over their shared memory, each rank for its slice."""

    def __init__(self, memory: NodeMemory, group: Group, setting: Setting) -> None:
        self._memory, self._size = memory, setting.size
        self._meeting = _Meeting(memory, group, setting.size)
        dealt = blocks(setting.learners, group.size)
        order = joins([vertex for block in dealt for vertex in cover(block)])
        self._terms = _Terms(setting.backend.xp, order, 1.0 / setting.learners)
        self._lie: dict[int, tuple[Any, Callable[[], list[Array]]]] = {}
        """where the subtree sums of the node's ranks lie in even and in odd rounds, as they said in the first"""
        self._calls: dict[tuple[int, bool], kernels.Meeting] = {}

    def __call__(self, sums: SubtreeSums, round: int, update: Update, passes: Passes | None) -> None:
        """As `Strategy`."""
        if passes is not None and round % 2 in self._lie:
            self._in_one_call(round, passes)
            return
        meeting = self._meeting
        self._lie[round % 2] = lie = meeting.contributions(sums, round)
        update(meeting.span, self._terms(*lie))
        meeting.barrier(round, 3)

    def _in_one_call(self, round: int, passes: Passes) -> None:
        """Both barriers and the moves; one call for each of the two versions of the state and each kind of passes."""
        memory, here, key = self._memory, self._meeting.here, (round % 2, passes.kind)
        if key not in self._calls:
            lie = self._lie[round % 2]
            alone = memory.one_for_all(len(lie[0]), self._size)
            span = slice(0, self._size) if alone else self._meeting.span
            moves = passes.moves(span, self._terms(*lie))
            self._calls[key] = memory.meeting(here, moves, alone)
        memory.meet(self._calls[key], here, BARRIERS * round + 1, passes.numbers)


class OverNodes:
    """Several nodes with shared memory: the mean is made in each, and taken into the state section by section."""

    def __init__(self, memory: NodeMemory, group: Group, setting: Setting, nodes: Sequence[range]) -> None:
        self._meeting = _Meeting(memory, group, setting.size)
        self._carrier = Carrier(setting, nodes)
        self._scale = 1.0 / setting.learners
        self._terms = _Terms(setting.backend.xp, (0,), 1.0)

    def __call__(self, sums: SubtreeSums, round: int, update: Update, passes: Passes | None) -> None:
        """As `Strategy`."""
        meeting = self._meeting
        parts, arrays = meeting.contributions(sums, round)
        mean = self._terms(parts[:1], lambda: arrays()[:1])
        self._carrier(arrays(), self._scale, lambda at: update(at, mean))
        meeting.barrier(round, 3)


class ByMessages:
    """The mean by an allreduce, on every rank; then each rank, or the ranks of a node together, update the state."""

    def __init__(self, memory: NodeMemory | None, group: Group, setting: Setting, allreduce: Allreduce) -> None:
        self._meeting = _Meeting(memory, group, setting.size) if memory is not None else None
        self._allreduce, self._size, self._scale = allreduce, setting.size, 1.0 / setting.learners
        self._mean = setting.empty(setting.size)
        self._terms = _Terms(setting.backend.xp, (0,), 1.0)

    def __call__(self, sums: SubtreeSums, round: int, update: Update, passes: Passes | None) -> None:
        """As `Strategy`."""
        self._allreduce(sums.parts, self._mean, self._scale)
        terms = self._terms((), lambda: [self._mean])
        if self._meeting is None:
            update(slice(0, self._size), terms)
            return
        self._meeting.barrier(round, 1)  # nobody on this node reads the version that is overwritten any more
        update(self._meeting.span, terms)
        self._meeting.barrier(round, 3)


class _Meeting:
    """The group's ranks of this node in their memory; `span` is this rank's slice of the state."""

    def __init__(self, memory: NodeMemory, group: Group, size: int) -> None:
        self._memory, self.here = memory, memory.members(group.ids)
        self.span = slices(size, len(self.here))[self.here.index(memory.me)]

    def barrier(self, round: int, number: int) -> None:
        """Barrier 1, 2 or 3 of the round."""
        self._memory.barrier(self.here, BARRIERS * round + number)

    def contributions(self, sums: SubtreeSums, round: int) -> tuple[Any, Callable[[], list[Array]]]:
        """Barrier 1; then which arrays hold the subtree sums of all ranks here, in order, and the arrays."""
        memory = self._memory
        memory.publish(sums.numbers)
        self.barrier(round, 1)
        parts = memory.parts(self.here)
        return parts, lambda: [memory.part(*part) for part in parts]


class _Terms:
    """The terms of any range of some arrays, made once and kept: `key` says which arrays they are."""

    def __init__(self, xp: Any, order: tuple[int, ...], scale: float) -> None:
        self._xp, self._order, self._scale = xp, order, scale
        self._made: dict[Any, tuple[list[Array], dict[tuple[int, int], kernels.Terms]]] = {}

    def __call__(self, key: Any, arrays: Callable[[], Sequence[Array]]) -> TermsAt:
        if key not in self._made:
            self._made[key] = (list(arrays()), {})
        parts, made = self._made[key]

        def terms(lo: int, hi: int) -> kernels.Terms:
            if (lo, hi) not in made:
                made[lo, hi] = kernels.Terms(self._xp, [part[lo:hi] for part in parts], self._order, self._scale)
            return made[lo, hi]

        return terms
