"""The reducer on MPI: the NumPy tree's bits, whatever the learners and ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.backend import numpy_backend
from shoal.comm.group import ranks_for
from shoal.comm.reducer import Reducer

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


def _mean(reducer: Reducer, group: Any, values: list[np.ndarray]) -> np.ndarray:
    reducer.start()
    for learner in group.learners_here(len(values)):
        reducer.slot()[...] = values[learner]
        reducer.add(learner)
    out = np.full_like(values[0], np.nan)
    reducer.mean(group, len(values), out)
    return out


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, 100_003])
def test_the_canonical_mean_has_the_bits_of_the_tree(world: Any, size: int) -> None:
    """On the group that a run would use, twice, and with one reducer through all resizes."""
    reducer = Reducer(numpy_backend(), size, np.float32, reproducible=True)
    for learners in LEARNERS:
        values = _values(learners, size)
        group = world.split(ranks_for(learners, world.order))
        if group is None:
            continue
        expected = (tree_sum(values) * np.float32(1 / learners)).tobytes()
        assert _mean(reducer, group, values).tobytes() == expected
        assert _mean(reducer, group, values).tobytes() == expected
        group.close()


def test_learners_change_while_the_group_stays(world: Any) -> None:
    reducer = Reducer(numpy_backend(), 333, np.float32, reproducible=True)
    group = world.split(world.order)
    for learners in (world.size, 3 * world.size, 2 * world.size, world.size):
        values = _values(learners, 333)
        expected = tree_sum(values) * np.float32(1 / learners)
        assert _mean(reducer, group, values).tobytes() == expected.tobytes()
    group.close()


@pytest.mark.parametrize("size", [1, 1000])
def test_the_native_mean_agrees(world: Any, size: int) -> None:
    reducer = Reducer(numpy_backend(), size, np.float32, reproducible=False)
    for learners in LEARNERS:
        values = _values(learners, size)
        group = world.split(ranks_for(learners, world.order))
        if group is None:
            continue
        exact = np.mean(values, axis=0, dtype=np.float64)
        assert np.abs(_mean(reducer, group, values) - exact).max() <= 1e-6
        group.close()
