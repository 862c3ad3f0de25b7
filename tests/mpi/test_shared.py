"""The node's shared memory on MPI: many reductions leave everything as it was, and all forms have the same bits."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import kernels
from shoal.backend import numpy_backend
from shoal.comm.group import ranks_for
from shoal.comm.places import Sizes
from shoal.comm.reducer import Passes, Reducer, TermsAt
from shoal.comm.shared import NodeMemory, share
from shoal.comm.tuning import Tuner

pytestmark = pytest.mark.mpi

ROUNDS = 500
LEARNERS = 5
MU = 0.5


class Momentum:
    """Reductions with momentum in the node's memory, of contributions that change from round to round."""

    def __init__(self, world: Any, size: int, learners: int) -> None:
        memory = share(world, Sizes(size, size, size, learners, np.dtype(np.float32)))
        assert isinstance(memory, NodeMemory), memory
        self.memory, self._learners, self._size = memory, learners, size
        self._reducer = Reducer(numpy_backend(), size, np.float32, Tuner(), memory)

    def round(self, group: Any, round: int, fused: bool) -> None:
        """One round. Collective."""
        self._round = round
        self._reducer.start(group, round)
        for learner in group.learners_here(self._learners):
            self._reducer.slot()[...] = np.sin(np.arange(self._size) * (round + 1) + learner)
            self._reducer.add(learner)
        passes = Passes(self._moves, (MU, 1.0)) if fused else None
        self._reducer.reduce(group, self._learners, round, self._update, passes)

    def state(self, round: int) -> bytes:
        """After so many rounds."""
        return b"".join(self.memory.versions[round % 2][name].tobytes() for name in ("anchor", "velocity"))

    def _update(self, span: slice, terms: TermsAt) -> None:
        for move in self._moves(span, terms):
            kernels.apply(np, move, MU, 1.0)

    def _moves(self, span: slice, terms: TermsAt) -> list[kernels.Move]:
        if span.start == span.stop:
            return []
        versions = [self.memory.versions[(self._round + k) % 2] for k in (0, 1)]
        arrays = tuple(one[name][span] for one in versions for name in ("anchor", "velocity"))
        return [kernels.Move(terms(span.start, span.stop), kernels.DISPLACEMENT, arrays)]


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("size", [1, 17, 1000, 100_003])
def test_one_call_has_the_bits_of_its_steps(world: Any, size: int, crowded: bool) -> None:
    """On groups that change, with several learners a rank, and by one rank for all where ranks share cores."""
    if world.size == 1:
        pytest.skip("one rank shares nothing")
    world.waiter.crowded = crowded
    ways = [Momentum(world, size, LEARNERS) for _ in (0, 1)]
    done = 0
    for living in (world.order, world.order[:2], world.order):
        group = world.group(ranks_for(LEARNERS, living))
        for _ in range(6):
            if group is not None:
                for fused, way in enumerate(ways):
                    way.round(group, done, fused=bool(fused))
            done += 1
        world.meet()
        assert ways[0].state(done) == ways[1].state(done)
        assert np.frombuffer(ways[0].state(done), np.float32).any()
        if group is not None:
            group.close()
        world.meet()


def test_many_reductions_leave_memory_descriptors_and_files_as_they_were(world: Any) -> None:
    if world.size == 1:
        pytest.skip("one rank shares nothing")
    group = world.group(world.order)
    way = Momentum(world, 1000, world.size)
    for round in range(10):
        way.round(group, round, fused=True)
    world.meet()
    gc.collect()
    before = holdings()
    for round in range(10, 10 + ROUNDS):
        way.round(group, round, fused=True)
    world.meet()
    gc.collect()
    after = holdings()
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 1 << 20
    group.close()


def holdings() -> tuple[int, int, int, list[str]]:
    """Resident bytes, descriptors, mappings of this process; the files in /dev/shm that it has mapped."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = sorted({line.split()[-1] for line in maps if "/dev/shm" in line})
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), len(shared), shared  # noqa: PTH208
