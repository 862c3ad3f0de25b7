"""From the learners' contributions to the next state: the only thing training knows of communication.

A round on a rank: `start`, then for each of its learners write into `slot()` and `add(learner)`, then `reduce`
with what is to be done with the sum. On one node all of it is one pass over shared memory, each rank for its
slice. Between nodes, or without shared memory, the mean is made first, then every rank (every node) updates its
own copy of the state. The group's size and the number of learners are looked up at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from shoal import kernels
from shoal.backend import Array, Backend
from shoal.comm.algorithms import Exchange, native, slices
from shoal.comm.group import Group
from shoal.comm.shared import NodeMemory
from shoal.comm.tree import SubtreeSums, blocks, cover, joins

TermsAt = Callable[[int, int], kernels.Terms]
"""terms(lo, hi): the mean over learners of elements [lo, hi) of their contributions, still to be computed"""


_UNSETTLED_ROUNDS = 2
"""In its first round a rank takes work arrays as it needs them; from the second on each learner has the same one
as in the round before. So after two rounds of a group all know where the others' sums lie."""


class Update(Protocol):
    """Computes elements `span` of the next state from the present one and the mean over learners."""

    def __call__(self, span: slice, terms: TermsAt) -> None: ...


@dataclass(frozen=True)
class Passes:
    """An update that is nothing but moves of the kernels, so that all of a reduction on one node is one call.

    moves(span, terms): those of elements `span`, the same for rounds of the same parity. numbers: mu, rate."""

    moves: Callable[[slice, TermsAt], list[kernels.Move]]
    numbers: tuple[float, float]


class Reducer:
    """Reduces contributions of `size` numbers; in the canonical order unless `reproducible` is off.

    memory: the node's shared memory, where the contributions and the state lie, or None."""

    def __init__(self, backend: Backend, size: int, dtype: Any, reproducible: bool, memory: NodeMemory | None) -> None:
        self._backend, self._size, self._dtype = backend, size, dtype
        self._reproducible, self._memory = reproducible, memory
        own: Callable[[int], Array] = lambda _: backend.empty(size, dtype)  # noqa: E731
        self._sums = SubtreeSums(backend.xp, memory.slot if memory is not None else own)
        self._mean: Array | None = None
        self._made: dict[Any, Any] = {}
        self._made_for: tuple[Group, int] | None = None
        self._here: tuple[int, ...] = ()
        self._parts: list[tuple[tuple[int, int], ...]] = []
        """where the subtree sums of the node's ranks lay in the first round of this group, and in the last"""

    def start(self) -> None:
        """Begin a round."""
        self._sums.start()

    def slot(self) -> Array:
        """(size,): where the next learner's contribution is to be written, all of it."""
        return self._sums.slot()

    def add(self, learner: int) -> None:
        """Take the slot as the contribution of `learner`; a rank gives its learners in order."""
        self._sums.add((0, learner))

    def reduce(self, group: Group, learners: int, round: int, update: Update, passes: Passes | None = None) -> None:
        """Update the state by the mean over the P learners. Collective over the group, the same bits on all.

        round: the number of the round, which grows from call to call. passes: what `update` does, where it can be
        written so; given on all ranks or on none."""
        if self._made_for != (group, learners):
            self._made, self._parts, self._made_for = {}, [], (group, learners)
            self._here = self._memory.members(group.ranks) if self._memory is not None else ()
        memory, here = self._memory, self._here
        if memory is not None and len(here) == group.size:
            if passes is not None and len(self._parts) == _UNSETTLED_ROUNDS:
                self._meet(memory, here, round, passes)
                return
            memory.publish(self._sums.numbers)
            memory.barrier(here, 2 * round + 1)
            parts = memory.parts(here)
            arrays = [memory.part(*part) for part in parts] if parts not in self._made else []
            update(self._span(here), self._terms(parts, arrays, self._order(group, learners), 1.0 / learners))
            memory.barrier(here, 2 * round + 2)
            self._parts = [*self._parts[:1], parts]
            return
        if group.size == 1:
            update(
                slice(0, self._size),
                self._terms(tuple(self._sums.numbers), self._sums.parts, self._order(group, learners), 1.0 / learners),
            )
            return
        mean = self._reduced(group, learners)
        terms = self._terms("mean", [mean], (0,), 1.0)
        if memory is None:
            update(slice(0, self._size), terms)
            return
        memory.barrier(here, 2 * round + 1)  # nobody on this node reads the version that is overwritten any more
        update(self._span(here), terms)
        memory.barrier(here, 2 * round + 2)

    def _meet(self, memory: NodeMemory, here: tuple[int, ...], round: int, passes: Passes) -> None:
        """The reduction as one call."""
        key = ("meeting", round % 2)
        if key not in self._made:
            assert self._made_for is not None
            group, learners = self._made_for
            parts = self._parts[-1]
            arrays = [memory.part(*part) for part in parts]
            terms = self._terms(parts, arrays, self._order(group, learners), 1.0 / learners)
            alone = memory.one_for_all(len(parts), self._size)
            moves = passes.moves(slice(0, self._size) if alone else self._span(here), terms)
            self._made[key] = memory.meeting(here, moves, alone)
        memory.meet(self._made[key], here, 2 * round + 1, passes.numbers)

    def _span(self, here: tuple[int, ...]) -> slice:
        """This rank's slice among the group's ranks of its node."""
        assert self._memory is not None
        return slices(self._size, len(here))[here.index(self._memory.me)]

    def _order(self, group: Group, learners: int) -> tuple[int, ...]:
        key = "order"
        if key not in self._made:
            self._made[key] = joins([v for block in blocks(learners, group.size) for v in cover(block)])
        return self._made[key]

    def _terms(self, key: Any, parts: list[Array], order: tuple[int, ...], scale: float) -> TermsAt:
        """The terms of any range, kept for as long as the parts lie where they do."""
        made = self._made.setdefault(key, {"parts": parts})

        def terms(lo: int, hi: int) -> kernels.Terms:
            if (lo, hi) not in made:
                made[lo, hi] = kernels.Terms(self._backend.xp, [part[lo:hi] for part in made["parts"]], order, scale)
            return made[lo, hi]

        return terms

    def _reduced(self, group: Group, learners: int) -> Array:
        """(size,): the mean over learners, on every rank. Collective."""
        if self._mean is None:
            self._mean = self._backend.empty(self._size, self._dtype)
        if not self._reproducible:
            native(group.transport, self._sums.parts, self._mean, 1.0 / learners)
            return self._mean
        if "exchange" not in self._made:
            self._made["exchange"] = Exchange(group.transport, learners, self._size, self._backend, self._dtype)
        self._made["exchange"](self._sums.parts, self._mean, 1.0 / learners)
        return self._mean
