"""The sample order: every sample once an epoch, however the sequence is sliced."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.keyed import permutation
from shoal.data.order import SampleOrder
from shoal.errors import InputError

FIXED = settings(derandomize=True, deadline=None)


@FIXED
@given(
    samples=st.integers(1, 40),
    seed=st.integers(0, 2**64 - 1),
    rounds=st.lists(st.tuples(st.integers(1, 7), st.integers(1, 5), st.integers(1, 6)), max_size=25),
)
def test_each_sample_once_an_epoch_for_any_rounds(samples: int, seed: int, rounds: list[tuple[int, int, int]]) -> None:
    """Rounds of P learners, K steps and batch B, each learner taking its own positions."""
    order = SampleOrder(samples, seed)
    used: dict[int, int] = {}
    consumed = 0
    for learners, steps, batch in rounds:
        for j in range(learners):
            for k in range(steps):
                start = consumed + (k * learners + j) * batch
                for offset, index in enumerate(order.indices(start, batch)):
                    assert start + offset not in used
                    used[start + offset] = int(index)
        consumed += learners * steps * batch
    assert sorted(used) == list(range(consumed))
    sequence = [used[position] for position in range(consumed)]
    for epoch in range(consumed // samples):
        assert sorted(sequence[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


@FIXED
@given(
    samples=st.integers(1, 12),
    asks=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 60)), min_size=1, max_size=12),
)
def test_indices_do_not_depend_on_what_was_asked_before(samples: int, asks: list[tuple[int, int]]) -> None:
    order = SampleOrder(samples, 5)
    whole = np.concatenate([permutation(5, "order", epoch, samples) for epoch in range(161 // samples + 1)])
    for position, count in asks:
        indices = order.indices(position, count)
        assert indices.dtype == np.int64 and indices.shape == (count,)
        assert np.array_equal(indices, whole[position : position + count])
        parts = list(order.parts(position, count))
        epochs = [epoch for epoch, part in parts for _ in part]
        assert epochs == [at // samples for at in range(position, position + count)]
        assert np.array_equal(np.concatenate([part for _, part in parts] or [indices]), indices)


def test_epochs_and_seeds_differ() -> None:
    order = SampleOrder(100, 1)
    assert not np.array_equal(order.indices(0, 100), order.indices(100, 100))
    assert not np.array_equal(order.indices(0, 100), SampleOrder(100, 2).indices(0, 100))


def test_an_epochs_order_cannot_be_written() -> None:
    order = SampleOrder(10, 1)
    for _, indices in order.parts(8, 5):
        with pytest.raises(ValueError, match="read-only"):
            indices[0] = 3


def test_no_samples_is_refused() -> None:
    with pytest.raises(InputError, match="has 0 samples"):
        SampleOrder(0, 1)


def test_memory_does_not_grow_with_epochs() -> None:
    order = SampleOrder(10, 1)
    order.indices(0, 1000)
    tracemalloc.start()
    try:
        for epoch in range(100, 400):
            for _ in order.parts(10 * epoch, 10):
                pass
        assert tracemalloc.get_traced_memory()[0] < 20_000
    finally:
        tracemalloc.stop()
