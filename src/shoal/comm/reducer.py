"""From the learners' contributions to the next state: the only thing training knows of communication.

A round on a rank: `start`, then for each of its learners write into `slot()` and `add(learner)`, then `reduce`
with what is to be done with the sum. The group's size and the number of learners are looked up at every call; how it
is done (strategies.py) is chosen (tuning.py) whenever they change.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from shoal.backend import Array, Backend
from shoal.comm.algorithms import make
from shoal.comm.group import Group
from shoal.comm.places import HOMES, OwnMemory
from shoal.comm.setting import Setting
from shoal.comm.shared import NodeMemory
from shoal.comm.strategies import Alone, ByMessages, OnNode, OverNodes, Passes, Strategy, TermsAt, Update
from shoal.comm.tree import SubtreeSums
from shoal.comm.tuning import Choice, Place, Tuner

__all__ = ["Passes", "Reducer", "TermsAt", "Update"]


class Reducer:
    """Reduces contributions of `size` numbers, in the way that `tuner` chooses.

    memory: where they and the state lie."""

    def __init__(self, backend: Backend, size: int, dtype: Any, tuner: Tuner, memory: NodeMemory | OwnMemory) -> None:
        self._backend, self._size, self._dtype = backend, size, dtype
        self._tuner, self._arrays = tuner, memory
        self._memory = memory if isinstance(memory, NodeMemory) else None
        self._sums = SubtreeSums(backend.xp, memory.array)
        self._made: tuple[Group, int, Strategy] | None = None
        self.choice: Choice | None = None
        """how the last reduction was done"""

    def start(self, group: Group | None = None, round: int = 0) -> None:
        """Begin a round. With a group, the next version of the state takes the place of what is brought."""
        self._sums.start(itertools.count(HOMES) if group is None else self._arrays.numbers(group, 1 - round % 2))

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
        self._strategy(group, learners, round)(self._sums, round, update, passes)

    def reads_each(self, group: Group, learners: int, round: int) -> bool:
        """Whether `reduce` will read what each learner brings as the learner left it, in one pass with the update."""
        return learners == group.size and isinstance(self._strategy(group, learners, round), OnNode)

    def _strategy(self, group: Group, learners: int, round: int) -> Strategy:
        """That of this group and number of learners, kept for as long as they stay."""
        if self._made is None or self._made[:2] != (group, learners):
            self._made = None  # its work memory is free before the next takes its own
            self._made = (group, learners, self._choose(group, learners, round))
        return self._made[2]

    def _choose(self, group: Group, learners: int, round: int) -> Strategy:
        nodes = group.on_nodes
        place = Place(learners, group.size, tuple(map(len, nodes)) if nodes else None, self._memory is not None)
        self.choice = choice = self._tuner.choose(place, self._size, np.dtype(self._dtype).itemsize)
        self._tuner.log(choice, place, round)
        setting = Setting(group.transport, learners, self._size, self._backend, self._dtype, choice.wire)
        if choice.algorithm == "alone":
            return Alone(setting)
        if self._memory is not None and choice.algorithm == "shared":
            return OnNode(self._memory, group, setting)
        if self._memory is not None and nodes is not None and choice.algorithm == "hierarchical":
            return OverNodes(self._memory, group, setting, nodes)
        return ByMessages(self._memory, group, setting, make(choice.algorithm, setting))
