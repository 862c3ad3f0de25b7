"""Allreduce on the ranks of this job, ours beside MPI's own: `shoal launch -n 2 bench/allreduce.py [--json] ...`.

    shared      the sum in the node's shared memory: `us` at the kernel call, `call_us` at `Reducer.reduce`
    reduction   the same with reduction momentum and the new anchor, in the same pass
    private     as MPI's: `shared` with a copy in from each rank's own array and one out to it
    exchange    the canonical sum through messages
    native      MPI_Allreduce of the MPI that mpi4py loads, into an array that is there
    floor       the loops of `shared` over the same bytes, without barriers: the memory's own time

How times are taken and checked is in timing.py. `shared` and `reduction` leave one result that all ranks of the
node read, the others one in each rank's own memory.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import timing
from shoal import environment, kernels
from shoal.backend import numpy_backend
from shoal.comm.algorithms import Exchange, slices
from shoal.comm.group import Group
from shoal.comm.places import HOMES, Sizes
from shoal.comm.reducer import Passes, Reducer, TermsAt
from shoal.comm.setting import Setting
from shoal.comm.shared import BARRIERS, NodeMemory, share
from shoal.comm.tuning import Tuner
from shoal.comm.world import World

MU = 0.5
LATE_S = 0.02


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


Timed = tuple[Callable[[], Any], Callable[[], Callable[[], Any]], Callable[[], int]]
"""The call at Python, what makes the call at the kernel, and how many results are wrong after either."""


class Shared:
    """The sum, or the whole reduction, in the node's memory."""

    def __init__(self, case: Case, momentum: bool) -> None:
        size, group = case.size, case.group
        memory = share(case.world, Sizes(size, size if momentum else 0, size, group.size, np.dtype(case.dtype)))
        assert isinstance(memory, NodeMemory), memory
        self._memory, self._case, self._momentum = memory, case, momentum
        self._reducer = Reducer(numpy_backend(), size, case.dtype, Tuner(), memory)
        self._passes = Passes(self._moves, (MU, 1.0))
        self._round = 0
        self._terms: dict[int, TermsAt] = {}
        for _ in (0, 1):
            self._bring(case.mine)
            self.python()

    def _bring(self, mine: np.ndarray | None = None) -> None:
        """What this rank brings, or for a reduction what that made two rounds before; a sum leaves it as it is."""
        self._reducer.start(*((self._case.group, self._round) if self._momentum else ()))
        slot = self._reducer.slot()
        if mine is not None:
            slot[...] = mine
        self._reducer.add(self._case.group.rank)

    def python(self) -> None:
        """The call that training makes."""
        group = self._case.group
        if self._momentum:
            self._bring()
        self._reducer.reduce(group, group.size, self._round, self._update, self._passes)
        self._round += 1

    def kernel(self) -> Callable[[], Any]:
        """The compiled call alone."""
        memory, here = self._memory, self._memory.members(self._case.group.ids)
        alone = memory.one_for_all(len(here), self._case.size)
        span = slice(0, self._case.size) if alone else self._span()
        meetings = [memory.meeting(here, self._at(now, span, self._terms[now]), alone) for now in (0, 1)]

        runs, patience = [meeting.run for meeting in meetings], memory.patience

        def call() -> None:
            k = self._round
            self._round = k + 1
            while runs[k & 1](BARRIERS * k + 1, MU, 1.0, *patience) >= 0:
                pass

        return call

    def loops(self) -> Callable[[], Any]:
        """The moves alone, of this rank's slice: it meets nobody."""
        alone = kernels.barrier(numpy_backend().zeros(8, np.int64), (0,), 0)
        run = kernels.meeting(np, alone, self._moves(self._span(), self._terms[self._round % 2])).run
        count = itertools.count(1, 2)
        return lambda: run(next(count), MU, 1.0, 0, 0, 0.0)

    def _span(self) -> slice:
        return slices(self._case.size, self._case.group.size)[self._case.group.rank]

    def _update(self, span: slice, terms: TermsAt) -> None:
        self._terms[self._round % 2] = terms
        for move in self._moves(span, terms):
            kernels.apply(np, move, MU, 1.0)

    def _moves(self, span: slice, terms: TermsAt) -> list[kernels.Move]:
        return self._at(self._round % 2, span, terms)

    def _at(self, now: int, span: slice, terms: TermsAt) -> list[kernels.Move]:
        if span.start == span.stop:
            return []
        summed = terms(span.start, span.stop)
        versions = [self._memory.versions[k] for k in (now, 1 - now)]
        if not self._momentum:
            return [kernels.Move(summed, kernels.SUM, (versions[1]["anchor"][span],))]
        arrays = tuple(one[name][span] for one in versions for name in ("anchor", "velocity"))
        return [kernels.Move(summed, kernels.DISPLACEMENT, arrays)]

    @property
    def slot(self) -> np.ndarray:
        """What this rank brings, where it is read."""
        return self._memory.array(HOMES)

    @property
    def result(self) -> np.ndarray:
        """What the last call made, which all ranks read."""
        return self._memory.versions[self._round % 2]["anchor"]

    def wrong(self) -> int:
        """Of the sum; the reduction's bits are the unit tests' matter."""
        if self._momentum:
            return 0
        return timing.wrong(self.result, self._case.group.size, 1 / self._case.group.size)


def shared(case: Case) -> Timed:
    """The mean over the ranks."""
    made = Shared(case, momentum=False)
    return made.python, made.kernel, made.wrong


def reduction(case: Case) -> Timed:
    """The mean, the new velocity and the new anchor."""
    made = Shared(case, momentum=True)
    return made.python, made.kernel, made.wrong


def private(case: Case) -> Timed:
    """The mean from and to arrays that no other rank sees."""
    made, mine = Shared(case, momentum=False), case.mine
    out = numpy_backend().empty(case.size, case.dtype)

    def copied(call: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> None:
            np.copyto(made.slot, mine)
            call()
            np.copyto(out, made.result)

        return timed

    wrong = functools.partial(timing.wrong, out, case.group.size, 1 / case.group.size)
    return copied(made.python), lambda: copied(made.kernel()), wrong


def floor(case: Case) -> Timed:
    """The loops alone."""
    loops = Shared(case, momentum=False).loops()
    return loops, lambda: loops, lambda: 0


def exchange(case: Case) -> Timed:
    """Through MPI's messages."""
    out, mine = numpy_backend().empty(case.size, case.dtype), case.mine
    call = Exchange(Setting(case.group.transport, case.group.size, case.size, numpy_backend(), case.dtype))
    timed = functools.partial(call, [mine], out, 1 / case.group.size)
    return timed, lambda: timed, lambda: timing.wrong(out, case.group.size, 1 / case.group.size)


def native(case: Case) -> Timed:
    """The MPI library's."""
    out, mine = numpy_backend().empty(case.size, case.dtype), case.mine
    kind = MPI.FLOAT if case.dtype == "float32" else MPI.DOUBLE
    timed = functools.partial(case.world.comm.Allreduce, [mine, kind], [out, kind])
    return timed, lambda: timed, lambda: timing.wrong(out, case.group.size)


ALGORITHMS = {one.__name__: one for one in (shared, reduction, private, exchange, native, floor)}


def measure(case: Case, name: str) -> dict[str, Any]:
    """The row of one algorithm, on all ranks."""
    comm = case.world.comm
    n_bytes = case.size * np.dtype(case.dtype).itemsize
    python, kernel, wrong = ALGORITHMS[name](case)
    us, bad = [], 0
    for call in (python, kernel()):
        waits = [_waits(case, call, late) for late in range(case.group.size)]
        if name != "floor" and not all(comm.allgather(all(waits))):
            bad += case.size
        case.world.meet()
        times = timing.durations_ns(call, timing.iterations(n_bytes))
        us.append(timing.microseconds(np.array(comm.allgather(times))))
        bad += sum(comm.allgather(wrong()))
    return timing.row("shoal", name, (n_bytes, case.dtype), case.group.size, (us[1], us[0]), bad)


def _waits(case: Case, call: Callable[[], Any], late: int) -> bool:
    """Whether a call here ends after the rank `late` has come to it: what was timed was no reduction otherwise."""
    case.world.meet()
    start = time.monotonic()
    if case.group.rank == late:
        time.sleep(LATE_S)
    call()
    return time.monotonic() - start > LATE_S / 2


def rows(world: World, options: Any) -> Iterator[dict[str, Any]]:
    """All sizes with all algorithms. Collective."""
    group = world.group(world.order)
    assert group is not None
    for n_bytes in options.sizes:
        for name in options.algorithms:
            yield measure(Case(world, group, n_bytes // np.dtype(options.dtype).itemsize, options.dtype), name)
    group.close()


def holdings() -> dict[str, int]:
    """What this process holds: resident KB, descriptors, mappings; and the files in /dev/shm, of whomever."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    files = [len(list(Path(folder).iterdir())) for folder in ("/proc/self/fd", "/dev/shm")]
    return {"resident_kb": int(status["VmRSS"].split()[0]), "mappings": mappings, "fds": files[0], "shm": files[1]}


def hold(world: World, reductions: int) -> dict[str, Any]:
    """What each rank holds before and after so many whole reductions of 64 KB. Collective."""
    group = world.group(world.order)
    assert group is not None
    made = Shared(Case(world, group, 16 * timing.KB, "float32"), momentum=True)
    held = []
    for count in (100, reductions):
        for _ in range(count):
            made.python()
        world.meet()
        held.append(world.comm.allgather(holdings()))
    group.close()
    return {"reductions": reductions, "before": held[0], "after": held[1]}


def main(arguments: list[str]) -> None:
    """Collective over the ranks."""
    parser = timing.parser(__doc__.splitlines()[0])
    parser.add_argument("--algorithms", nargs="+", choices=sorted(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument(
        "--hold", type=timing.positive, metavar="N", help="instead: what ranks hold before and after N reductions"
    )
    options = parser.parse_args(arguments)
    if any(size % np.dtype(options.dtype).itemsize for size in options.sizes):
        parser.error(f"--sizes are bytes of whole elements, which have {np.dtype(options.dtype).itemsize} each")
    if MPI.COMM_WORLD.size == 1:
        parser.error("one rank has nobody to reduce with; start it by `shoal launch -n 2`")
    world = World(MPI.COMM_WORLD, numpy_backend())
    timing.pin(world.rank, world.size)
    header = {"bench": "allreduce", **environment.describe(), "ranks": world.size, "mpi": world.library}
    if options.hold:
        held = hold(world, options.hold)
        if world.is_master:
            print(json.dumps({**header, **held}))
    elif world.is_master:
        timing.show(header, rows(world, options), options.json)
    else:
        for _ in rows(world, options):
            pass
    world.close()


if __name__ == "__main__":
    main(sys.argv[1:])
