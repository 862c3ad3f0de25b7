"""The reducer on MPI: the NumPy tree's bits, whatever the learners and ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal import kernels
from shoal.backend import numpy_backend
from shoal.comm.group import ranks_for
from shoal.comm.places import OwnMemory, Sizes
from shoal.comm.reducer import Reducer, TermsAt
from shoal.comm.shared import NodeMemory, share
from shoal.comm.tuning import Tuner, measure
from shoal.comm.world import World
from shoal.errors import DeadlineError

pytestmark = pytest.mark.mpi

LEARNERS = (1, 2, 3, 4, 5, 7, 8, 12, 17)


def tree_sum(values: list[np.ndarray]) -> np.ndarray:
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return tree_sum(values[:half]) + tree_sum(values[half:])


def _values(learners: int, size: int, dtype: Any = np.float32) -> list[np.ndarray]:
    draw = np.random.default_rng((learners, size))
    return [draw.standard_normal(size).astype(dtype) for _ in range(learners)]


class Means:
    """A reducer whose update is to keep the mean, in the node's memory or in this rank's own."""

    def __init__(self, world: Any, size: int, shared: bool, **how: Any) -> None:
        sizes = Sizes(size, 0, size, max(LEARNERS), np.dtype(np.float32))
        memory = share(world, sizes) if shared else None
        self._memory = memory if isinstance(memory, NodeMemory) else OwnMemory(numpy_backend(), sizes)
        self.tuner = Tuner(**how)
        self.reducer = Reducer(numpy_backend(), size, np.float32, self.tuner, self._memory)

    def __call__(self, group: Any, values: list[np.ndarray], round: int) -> np.ndarray:
        out = self._memory.versions[1 - round % 2]["anchor"]
        reducer = self.reducer
        reducer.start(group, round)
        for learner in group.learners_here(len(values)):
            reducer.slot()[...] = values[learner]
            reducer.add(learner)

        def keep(span: slice, terms: TermsAt) -> None:
            if span.start < span.stop:
                kernels.canonical_sum(np, terms(span.start, span.stop), out[span])

        reducer.reduce(group, len(values), round, keep)
        return out


@pytest.mark.parametrize("shared", [False, True], ids=["messages", "shared memory"])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 100_003])
def test_the_canonical_mean_has_the_bits_of_the_tree(world: Any, size: int, shared: bool) -> None:
    """On the group that a run would use, twice, and with one reducer through all resizes."""
    mean = Means(world, size, shared)
    for n, learners in enumerate(LEARNERS):
        values = _values(learners, size)
        world.meet()  # as a decision does: nobody is in the group before
        group = world.group(ranks_for(learners, world.order))
        if group is None:
            continue
        expected = (tree_sum(values) * np.float32(1 / learners)).tobytes()
        assert mean(group, values, 2 * n).tobytes() == expected
        assert mean(group, values, 2 * n + 1).tobytes() == expected
        group.close()


@pytest.mark.parametrize("shared", [False, True], ids=["messages", "shared memory"])
def test_learners_change_while_the_group_stays(world: Any, shared: bool) -> None:
    mean = Means(world, 333, shared)
    group = world.group(world.order)
    for n, learners in enumerate((world.size, 3 * world.size, 2 * world.size, world.size)):
        values = _values(learners, 333)
        expected = tree_sum(values) * np.float32(1 / learners)
        assert mean(group, values, n).tobytes() == expected.tobytes()
    group.close()


@pytest.mark.parametrize("shared", [False, True], ids=["messages", "shared memory"])
@pytest.mark.parametrize("name", ["ring", "recursive-doubling", "rabenseifner", "native"])
def test_the_mean_in_any_order_agrees(world: Any, name: str, shared: bool) -> None:
    for size in (1, 1000):
        mean = Means(world, size, shared, reproducible=False, algorithm=name)
        for n, learners in enumerate(LEARNERS):
            values = _values(learners, size)
            world.meet()  # as a decision does: nobody is in the group before
            group = world.group(ranks_for(learners, world.order))
            if group is None:
                continue
            exact = np.mean(values, axis=0, dtype=np.float64)
            assert np.abs(mean(group, values, n) - exact).max() <= 1e-6
            assert mean.reducer.choice.algorithm == name
            group.close()


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_the_mean_over_a_narrow_wire_agrees(world: Any, wire: str) -> None:
    mean = Means(world, 1000, False, reproducible=False, wire=wire)
    group = world.group(world.order)
    values = _values(world.size, 1000)
    got = mean(group, values, 0)
    assert len(set(world.comm.allgather(got.tobytes()))) == 1
    assert np.abs(got - np.mean(values, axis=0, dtype=np.float64)).max() <= (2e-3 if wire == "float16" else 2e-2)
    assert group.size == 1 or mean.reducer.choice.wire == wire
    group.close()


NODES = {2: [[0, 1]], 3: [[0, 0, 1], [0, 1, 1], [0, 1, 0]], 4: [[0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 0, 1]]}


@pytest.mark.parametrize("name", ["hierarchical", "exchange", "tree", "auto"])
def test_nodes_do_not_change_the_bits(comm: Any, name: str) -> None:
    """Several nodes played on one machine."""
    for nodes in NODES.get(comm.size, []):
        world = World(comm, numpy_backend(), 10.0, nodes)
        assert world.nodes == len(set(nodes))
        for size in (1, 17, 1000, 5003):
            mean = Means(world, size, True, algorithm=name)
            for n, learners in enumerate(LEARNERS):
                values = _values(learners, size)
                world.meet()  # as a decision does: nobody is in the group before
                group = world.group(ranks_for(learners, world.order))
                if group is None:
                    continue
                expected = (tree_sum(values) * np.float32(1 / learners)).tobytes()
                for k in (0, 1, 2):
                    assert mean(group, values, 3 * n + k).tobytes() == expected, (nodes, size, learners, k)
                over = len({world.node_of[rank] for rank in group.ranks}) > 1
                if name in ("hierarchical", "auto"):
                    kinds = ("hierarchical", "exchange", "tree") if over and name == "auto" else (name,)
                    assert mean.reducer.choice.algorithm in (kinds if over else ("shared",))
                group.close()
        world.close()


def test_a_group_that_mixes_nodes_has_the_bits_too(comm: Any) -> None:
    for nodes in NODES.get(comm.size, []):
        world = World(comm, numpy_backend(), 10.0, nodes)
        mean = Means(world, 333, True)
        group = world.group(list(range(comm.size)))
        values = _values(comm.size, 333)
        expected = tree_sum(values) * np.float32(1 / comm.size)
        assert mean(group, values, 0).tobytes() == expected.tobytes()
        group.close()
        world.close()


def test_links_are_measured_alike(comm: Any) -> None:
    for nodes in NODES.get(comm.size, []):
        world = World(comm, numpy_backend(), 10.0, nodes)
        links = measure(world)
        assert len(set(comm.allgather(links))) == 1
        assert links.step_s > 0 and links.message_s >= 0 and links.crossing_byte_s >= 0
        world.close()


def test_a_rank_that_does_not_come_to_a_reduction_is_named(world: Any) -> None:
    world.waiter.timeout_s = 0.3
    memory = share(world, Sizes(10, 0, 10, 1, np.dtype(np.float32)))
    if isinstance(memory, NodeMemory) and world.rank:
        with pytest.raises(DeadlineError, match="world rank 0, which"):
            memory.barrier(tuple(range(world.size)), 1)
    world.waiter.timeout_s = 30.0
