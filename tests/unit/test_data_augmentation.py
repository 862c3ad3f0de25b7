"""Augmentation and normalisation: functions of the seed, the epoch and the sample, in whatever batch it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.backend import numpy_backend
from shoal.data.augmentation import Augmentation, augmentation
from shoal.data.batches import Batches
from shoal.data.keyed import raw
from shoal.data.order import SampleOrder
from shoal.data.sets import DataSet, from_arrays, normalised
from shoal.errors import InputError

SAMPLES = 23
X = np.random.default_rng(0).integers(1, 256, (SAMPLES, 6, 5, 3), dtype=np.uint8)


@dataclass(frozen=True)
class Options:
    augment: str = "crop-flip"
    pad: int = 2


def data_of(x: np.ndarray = X) -> DataSet:
    return from_arrays(x, np.arange(len(x)), x, np.arange(len(x)))


def batches_of(prefetch: bool = False, seed: int = 1) -> Batches:
    moves = Augmentation(SAMPLES, seed, 2, True)
    return Batches(normalised(data_of()), SampleOrder(SAMPLES, seed), numpy_backend(), moves, prefetch)


def sequence(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples at the first positions, one by one."""
    batches = batches_of()
    pairs = [tuple(array.copy() for array in batches.training(position, 1)) for position in range(count)]
    return tuple(np.concatenate(parts) for parts in zip(*pairs, strict=True))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    asks=st.lists(st.tuples(st.integers(0, 80), st.integers(1, 9), st.integers(0, 80)), min_size=1, max_size=20),
    prefetch=st.booleans(),
)
def test_a_batch_is_the_same_whoever_asks_in_whatever_order(asks: list[tuple[int, int, int]], prefetch: bool) -> None:
    x, y = sequence(90)
    batches = batches_of(prefetch)
    for position, count, following in asks:
        got_x, got_y = batches.training(position, count, following)
        assert got_x.tobytes() == x[position : position + count].tobytes()
        assert np.array_equal(got_y, y[position : position + count])
    batches.close()


def test_each_sample_comes_once_an_epoch_in_another_form_each_time() -> None:
    x, y = sequence(3 * SAMPLES)
    epochs = [y[e * SAMPLES : (e + 1) * SAMPLES] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(SAMPLES))
    forms = [{int(label): sample.tobytes() for label, sample in zip(y[at], x[at], strict=True)}
             for at in (slice(e * SAMPLES, (e + 1) * SAMPLES) for e in range(3))]  # fmt: skip
    changed = [sum(forms[a][label] != forms[b][label] for label in range(SAMPLES)) for a, b in ((0, 1), (1, 2), (0, 2))]
    assert min(changed) > SAMPLES // 2


def test_moves_are_keyed_by_seed_epoch_and_sample() -> None:
    moves, other, longer = Augmentation(50, 1, 4, True), Augmentation(50, 2, 4, True), Augmentation(80, 1, 4, True)
    first = moves.moves(3, np.arange(50))
    for epoch in (0, 4, 3, 9):
        moves.moves(epoch, np.arange(5))
    chosen = np.array([7, 7, 49, 0])
    assert np.array_equal(moves.moves(3, chosen), first[chosen])
    assert not np.array_equal(first, moves.moves(4, np.arange(50)))
    assert not np.array_equal(first, other.moves(3, np.arange(50)))
    assert np.array_equal(first, longer.moves(3, np.arange(50)))
    word = int(raw(1, "augment", 3, 0, 1)[0])
    low, high = word & (2**31 - 1), (word >> 31) & (2**31 - 1)
    assert first[0].tolist() == [low * 9 // 2**31 - 4, high * 9 // 2**31 - 4, word >> 63]


def test_moves_are_uniform() -> None:
    moves = Augmentation(50_000, 1, 4, True).moves(0, np.arange(50_000))
    # Binomial bounds of 5 standard deviations.
    assert abs(moves[:, 2].mean() - 0.5) < 5 * 0.5 / 50_000**0.5
    share = np.bincount((moves[:, 0] + 4) * 9 + moves[:, 1] + 4, minlength=81) / 50_000
    assert len(share) == 81 and np.abs(share - 1 / 81).max() < 5 * (1 / 81 / 50_000) ** 0.5
    assert abs(np.corrcoef(moves.T)[np.triu_indices(3, 1)]).max() < 5 / 50_000**0.5


def test_what_is_asked_for_is_done() -> None:
    every = np.arange(SAMPLES)
    assert augmentation(Options("none"), SAMPLES, (6, 5, 3), 1) is None
    crop = augmentation(Options("crop"), SAMPLES, (6, 5, 3), 1)
    flip = augmentation(Options("crop-flip", 0), SAMPLES, (6, 5, 3), 1)
    assert crop is not None and flip is not None
    assert not crop.moves(0, every)[:, 2].any() and crop.moves(0, every)[:, :2].any()
    assert flip.moves(0, every)[:, 2].any() and not flip.moves(0, every)[:, :2].any()


@pytest.mark.parametrize(
    ("shape", "pad", "message"),
    [
        ((64,), 4, r'data.augment is "crop-flip".*shape \(64,\)'),
        ((6, 5, 3), 5, "data.pad is 5, but images of 6 x 5 pixels"),
    ],
)
def test_what_cannot_be_moved_is_refused(shape: tuple[int, ...], pad: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        augmentation(Options(pad=pad), SAMPLES, shape, 1)


def test_neither_evaluation_nor_recalibration_is_augmented() -> None:
    batches, data = batches_of(), normalised(data_of())
    plain = (X.astype(np.float32) - data.shift) * data.scale
    assert np.array_equal(batches.chunk(data.test, 2, 9)[0], plain[2:9])
    assert np.array_equal(batches.chosen(np.array([4, 0]))[0], plain[[4, 0]])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(8, 8, 3), (5,), (2, 3, 4, 1)])
def test_channels_have_mean_0_and_deviation_1(dtype: Any, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(2).integers(0, 256, (301, *shape)).astype(dtype)
    data = normalised(from_arrays(x, np.zeros(301), x[:3] * 0, np.zeros(3)))
    assert data.shift.shape == data.scale.shape == (shape[-1],) and data.shift.dtype == np.float32
    axes = tuple(range(len(shape)))
    assert np.allclose(data.shift, x.mean(axes, np.float64), rtol=1e-6)
    assert np.allclose(1 / data.scale, x.std(axes, np.float64), rtol=1e-6)


def test_the_validation_and_the_test_set_do_not_count() -> None:
    x = np.random.default_rng(3).integers(0, 256, (40, 2, 2, 1), dtype=np.uint8)
    data = normalised(from_arrays(x, np.zeros(40, int), 0 * x, np.zeros(40, int), validation=0.5))
    assert np.allclose(data.shift, data.train.x.mean((0, 1, 2)), rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_a_channel_that_does_not_vary_is_only_shifted(value: float) -> None:
    x = np.full((1000, 3, 2), value, np.float32)
    x[:, :, 1] = np.random.default_rng(4).normal(size=(1000, 3))
    data = normalised(from_arrays(x, np.zeros(1000), x, np.zeros(1000)))
    assert data.scale[0] == 1 and abs(data.scale[1] - 1) < 0.1 and data.shift[0] == np.float32(value)
