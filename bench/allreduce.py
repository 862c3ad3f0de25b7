"""Allreduce on the ranks of this job, ours beside MPI's own: `shoal launch -n 2 bench/allreduce.py [--json] ...`.

    shared      the sum in the node's shared memory: `us` at the kernel call, `call_us` at `Reducer.reduce`
    reduction   the same with reduction momentum and the new anchor, in the same pass
    exchange    the canonical sum through messages
    native      MPI_Allreduce of the MPI that mpi4py loads, into an array that is there
    floor       the loops of `shared` over the same bytes, without barriers: the memory's own time

How times are taken and checked is in timing.py. `shared` and `reduction` leave one result that all ranks of the
node read, the others one in each rank.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import timing
from mpi4py import MPI

from shoal import environment, kernels
from shoal.backend import numpy_backend
from shoal.comm.algorithms import Exchange, slices
from shoal.comm.group import Group
from shoal.comm.reducer import Reducer, TermsAt
from shoal.comm.shared import NodeMemory, Sizes, share
from shoal.comm.world import World

MU = 0.5


@dataclass(frozen=True)
class Case:
    """One size on all ranks of the group."""

    world: World
    group: Group
    size: int
    dtype: Any

    @property
    def mine(self) -> np.ndarray:
        """What this rank brings."""
        return timing.contribution(self.size, self.group.rank, self.dtype)


Timed = tuple[Callable[[], Any], Callable[[], Any], Callable[[], int]]
"""The call at the kernel, the call at Python, and how many results are wrong after it."""


class Shared:
    """The sum, or the whole reduction, in the node's memory."""

    def __init__(self, case: Case, momentum: bool) -> None:
        size, group = case.size, case.group
        memory = share(case.world, Sizes(size, size if momentum else 0, size, group.size, np.dtype(case.dtype)))
        assert isinstance(memory, NodeMemory), memory
        self.memory, self._case, self._momentum = memory, case, momentum
        self._reducer = Reducer(numpy_backend(), size, case.dtype, True, memory)
        self._here, self._round = memory.members(group.ranks), 0
        self._reducer.start()
        self._reducer.slot()[...] = case.mine
        self._reducer.add(group.rank)

    def python(self) -> None:
        """The call that training makes."""
        self._reducer.reduce(self._case.group, self._case.group.size, self._round, self._update)
        self._round += 1

    def kernel(self) -> None:
        """The calls of compiled code alone."""
        self.memory.barrier(self._here, 2 * self._round + 1)
        self._pass()
        self.memory.barrier(self._here, 2 * self._round + 2)
        self._round += 1

    def prepare(self) -> Callable[[], Any]:
        """The kernel's pass over this rank's slice."""
        self.python()
        terms = self._terms
        span = slices(self._case.size, self._case.group.size)[self._case.group.rank]
        self._pass = functools.partial(self._update, span, lambda lo, hi: terms)
        return self.kernel

    def _update(self, span: slice, terms: TermsAt) -> None:
        if span.start == span.stop:
            self._terms = None
            return
        self._terms = terms(span.start, span.stop)
        now, after = self.memory.versions[self._round % 2], self.memory.versions[1 - self._round % 2]
        if not self._momentum:
            kernels.canonical_sum(np, self._terms, after["anchor"][span])
            return
        pairs = [(one["anchor"][span], one["velocity"][span]) for one in (now, after)]
        kernels.reduce_displacement(np, self._terms, *pairs, MU)

    def wrong(self) -> int:
        """Of the sum; the reduction's bits are the unit tests' matter."""
        if self._momentum:
            return 0
        result = self.memory.versions[self._round % 2]["anchor"]
        return timing.wrong(result, self._case.group.size, 1 / self._case.group.size)


def shared(case: Case) -> Timed:
    """The mean over the ranks."""
    made = Shared(case, momentum=False)
    return made.prepare(), made.python, made.wrong


def reduction(case: Case) -> Timed:
    """The mean, the new velocity and the new anchor."""
    made = Shared(case, momentum=True)
    return made.prepare(), made.python, made.wrong


def floor(case: Case) -> Timed:
    """The loops alone."""
    made = Shared(case, momentum=False)
    made.prepare()

    def loops() -> None:
        made._pass()
        made._round += 1

    return loops, loops, lambda: 0


def exchange(case: Case) -> Timed:
    """Through MPI's messages."""
    out, mine = numpy_backend().empty(case.size, case.dtype), case.mine
    call = Exchange(case.group.transport, case.group.size, case.size, numpy_backend(), case.dtype)
    timed = functools.partial(call, [mine], out, 1 / case.group.size)
    return timed, timed, lambda: timing.wrong(out, case.group.size, 1 / case.group.size)


def native(case: Case) -> Timed:
    """The MPI library's."""
    out, mine = numpy_backend().empty(case.size, case.dtype), case.mine
    timed = functools.partial(case.group.transport.comm.Allreduce, mine, out)
    return timed, timed, lambda: timing.wrong(out, case.group.size)


ALGORITHMS = {one.__name__: one for one in (shared, reduction, exchange, native, floor)}


def measure(case: Case, name: str) -> dict[str, Any]:
    """The row of one algorithm, on all ranks."""
    comm = case.world.comm
    n_bytes = case.size * np.dtype(case.dtype).itemsize
    kernel, python, wrong = ALGORITHMS[name](case)
    us = []
    for call in (kernel, python):
        case.world.meet()
        times = timing.durations_ns(call, timing.iterations(n_bytes))
        us.append(timing.microseconds(np.array(comm.allgather(times))))
    bad = sum(comm.allgather(wrong()))
    return timing.row("shoal", name, (n_bytes, case.dtype), case.group.size, (us[0], us[1]), bad)


def rows(world: World, options: Any) -> Iterator[dict[str, Any]]:
    """All sizes with all algorithms. Collective."""
    group = world.split(world.order)
    assert group is not None
    for n_bytes in options.sizes:
        for name in options.algorithms:
            yield measure(Case(world, group, n_bytes // np.dtype(options.dtype).itemsize, options.dtype), name)
    group.close()


def main(arguments: list[str]) -> None:
    """Collective over the ranks."""
    parser = timing.parser(__doc__.splitlines()[0])
    parser.add_argument("--algorithms", nargs="*", choices=sorted(ALGORITHMS), default=list(ALGORITHMS))
    options = parser.parse_args(arguments)
    world = World(MPI.COMM_WORLD, numpy_backend())
    header = {"bench": "allreduce", **environment.describe(), "ranks": world.size, "mpi": world.library}
    if world.is_master:
        timing.show(header, rows(world, options), options.json)
    else:
        for _ in rows(world, options):
            pass
    world.close()


if __name__ == "__main__":
    main(sys.argv[1:])
