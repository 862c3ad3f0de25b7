"""The mean over learners: the only thing training knows of communication.

A round on a rank: `start`, then for each of its learners write into `slot()` and `add(learner)`, then `mean`.
The group's size and the number of learners are looked up at every call.
"""

from __future__ import annotations

from typing import Any

from shoal.backend import Array, Backend
from shoal.comm.algorithms import Exchange, native
from shoal.comm.group import Group
from shoal.comm.tree import SubtreeSums


class Reducer:
    """Sums arrays of `size` numbers over learners and ranks; canonical unless `reproducible` is off."""

    def __init__(self, backend: Backend, size: int, dtype: Any, reproducible: bool) -> None:
        self._backend, self._size, self._dtype = backend, size, dtype
        self._reproducible = reproducible
        self._sums = SubtreeSums(backend, size, dtype)
        self._exchange: tuple[Group, int, Exchange] | None = None

    def start(self) -> None:
        """Begin a round."""
        self._sums.start()

    def slot(self) -> Array:
        """(size,): where the next learner's contribution is to be written, all of it."""
        return self._sums.slot()

    def add(self, learner: int) -> None:
        """Take the slot as the contribution of `learner`; a rank gives its learners in order."""
        self._sums.add((0, learner))

    def mean(self, group: Group, learners: int, out: Array) -> None:
        """out = (1/P) * canonical sum over the P learners. Collective over the group; the same on all."""
        if not self._reproducible:
            native(group.transport, self._sums.parts(), out, 1.0 / learners)
        elif group.size == 1:
            out[...] = self._sums.total()
            out *= 1.0 / learners
        else:
            self._algorithm(group, learners)(self._sums.parts(), out, 1.0 / learners)

    def _algorithm(self, group: Group, learners: int) -> Exchange:
        """Work memory fits one group and one P; it is made anew when either changes."""
        if self._exchange is None or self._exchange[0] is not group or self._exchange[1] != learners:
            self._exchange = None
            exchange = Exchange(group.transport, learners, self._size, self._backend, self._dtype)
            self._exchange = (group, learners, exchange)
        return self._exchange[2]
