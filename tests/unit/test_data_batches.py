"""Batches: which samples, mapped how, in whose memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from shoal import kernels
from shoal.backend import address, numpy_backend
from shoal.data.augmentation import Augmentation
from shoal.data.batches import Batches
from shoal.data.order import SampleOrder
from shoal.data.sets import DataSet, Split, from_arrays

RNG = np.random.default_rng(0)


def data_of(x: np.ndarray, shift: object = 0.0, scale: object = 1.0) -> DataSet:
    """A set with these training inputs, its labels counting 0, 1, 2, 0, ..."""
    y = np.arange(len(x)) % 3
    split = Split(x, y)
    return DataSet("t", "t", split, split, None, 3, np.asarray(shift, np.float32), np.asarray(scale, np.float32))


def batches_of(data: DataSet) -> Batches:
    return Batches(data, SampleOrder(len(data.train), 1), numpy_backend())


INPUTS: list[tuple[Any, Any, Any]] = [
    (RNG.integers(0, 256, (20, 4, 4, 3), dtype=np.uint8), [125.0, 123.0, 114.0], [0.1, 0.2, 1 / 3]),
    (RNG.integers(0, 256, (20, 5), dtype=np.uint8), 0.0, 1 / 255),
    (RNG.normal(size=(20, 5)).astype(np.float32), 0.0, 1.0),
    (RNG.normal(size=(20, 5)), 0.5, 3.0),
]


@pytest.mark.parametrize(("x", "shift", "scale"), INPUTS)
@pytest.mark.parametrize(("position", "count"), [(0, 8), (17, 8), (3, 50)])
def test_training_gives_the_mapped_samples_of_the_order(
    x: np.ndarray, shift: object, scale: object, position: int, count: int
) -> None:
    data = data_of(x, shift, scale)
    got, y = batches_of(data).training(position, count)
    chosen = SampleOrder(20, 1).indices(position, count)
    assert got.dtype == np.float32 and got.shape == (count, *x.shape[1:])
    assert np.array_equal(got, (x[chosen].astype(np.float32) - data.shift) * data.scale)
    assert np.array_equal(y, data.train.y[chosen])


@pytest.mark.parametrize(("x", "shift", "scale"), INPUTS)
def test_a_sample_has_the_same_bits_in_any_batch_or_chunk(x: np.ndarray, shift: object, scale: object) -> None:
    data = data_of(x, shift, scale)
    batches = batches_of(data)
    whole = batches.chunk(data.train, 0, 20)[0].copy()
    for start, stop in ((0, 7), (7, 20), (19, 20)):
        chunk, y = batches.chunk(data.test, start, stop)
        assert np.array_equal(chunk, whole[start:stop]) and np.array_equal(y, data.test.y[start:stop])
    got, _ = batches.training(0, 20)
    assert np.array_equal(got, whole[SampleOrder(20, 1).indices(0, 20)])


def test_buffers_are_used_again_and_aligned() -> None:
    batches = batches_of(data_of(INPUTS[0][0]))
    x, y = batches.training(0, 8)
    again, y_again = batches.training(8, 8)
    assert again is x and y_again is y and address(x) % 64 == 0
    other, _ = batches.training(0, 4)
    assert not np.shares_memory(other, x)


def test_evaluation_leaves_a_training_batch_alone() -> None:
    data = data_of(INPUTS[0][0])
    batches = batches_of(data)
    x, _ = batches.training(3, 8)
    before = x.copy()
    batches.chunk(data.test, 0, 8)
    assert np.array_equal(x, before)


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_step_allocates_no_batch(prefetch: bool) -> None:
    x = RNG.integers(0, 256, (300, 32, 32, 3), dtype=np.uint8)
    moves = Augmentation(300, 1, 4, True)
    batches = Batches(data_of(x), SampleOrder(300, 1), numpy_backend(), moves, prefetch)
    size_bytes = batches.training(0, 50, 50)[0].nbytes
    for position in range(50, 300, 50):
        batches.training(position, 50, position + 50)
    tracemalloc.start()
    try:
        for position in range(300, 900, 50):
            batches.training(position, 50, position + 50)
        assert tracemalloc.get_traced_memory()[1] < size_bytes / 10
    finally:
        tracemalloc.stop()
        batches.close()


@pytest.mark.parametrize("prefetch", [False, True])
def test_what_goes_wrong_reaches_who_asks(prefetch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(data_of(INPUTS[0][0]), SampleOrder(20, 1), numpy_backend(), prefetch=prefetch)
    batches.training(0, 4, None)

    def fail(*arguments: Any) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(kernels, "gather", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        batches.training(4, 4, 8)
    batches.close()


def test_regression_targets_come_as_float32() -> None:
    x = np.ones((6, 2), np.float32)
    y = np.arange(12.0).reshape(6, 2)
    data = from_arrays(x, y, x, y)
    _, got = batches_of(data).training(2, 6)
    assert got.dtype == np.float32
    assert np.array_equal(got, y[SampleOrder(6, 1).indices(2, 6)])


def test_an_order_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="an order of 3 samples"):
        Batches(data_of(INPUTS[0][0]), SampleOrder(3, 1), numpy_backend())
