"""Gathering a batch: the C loop has its twin's bits, and both are what padding, cropping and mirroring give."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import kernels
from shoal.kernels.compiled import cpu
from shoal.kernels.gather import twin

compiled = pytest.mark.skipif(cpu is None, reason=f"nothing to compare: {kernels.backing()}")
both = pytest.mark.parametrize("by", [kernels.gather, twin])


def samples_of(shape: tuple[int, ...], dtype: Any, count: int = 6) -> np.ndarray:
    rng = np.random.default_rng(1)
    whole = rng.integers(0, 256, (count, *shape))
    return whole.astype(dtype) if dtype == np.uint8 else (whole * rng.standard_normal(whole.shape)).astype(dtype)


def map_of(shape: tuple[int, ...], shift: Any = 0.3, scale: Any = 1 / 3) -> kernels.SampleMap:
    return kernels.SampleMap(np, shape, np.asarray(shift, np.float32), np.asarray(scale, np.float32))


def gathered(by: Any, x: np.ndarray, indices: Any, moves: Any, how: kernels.SampleMap) -> np.ndarray:
    out = np.full((len(indices), *x.shape[1:]), np.nan, np.float32)
    by(np, x, np.asarray(indices), moves, how, out)
    assert not np.isnan(out).any()
    return out


@compiled
@settings(max_examples=150, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 37), st.integers(1, 5)),
    dtype=st.sampled_from([np.uint8, np.float32, np.float64]),
    per_channel=st.booleans(),
    moved=st.lists(st.tuples(st.integers(0, 5), st.integers(-12, 12), st.integers(-40, 40), st.booleans()), max_size=5),
)
def test_the_compiled_loop_has_the_twins_bits(
    sizes: tuple[int, int, int], dtype: Any, per_channel: bool, moved: list[tuple[int, int, int, bool]]
) -> None:
    x = samples_of(sizes, dtype)
    channels = np.arange(1, sizes[2] + 1)
    how = map_of(sizes, 0.7 * channels, 1 / (3 + channels)) if per_channel else map_of(sizes)
    indices = np.array([index for index, *_ in moved], np.int64)
    moves = np.array([move for _, *move in moved], np.int64).reshape(-1, 3)
    out = np.full((len(moved), *sizes), np.nan, np.float32)
    assert cpu is not None and how.row is not None
    assert cpu.gather(x, indices, moves, *how.row, out)
    assert out.tobytes() == gathered(twin, x, indices, moves, how).tobytes()
    assert cpu.gather(x, indices, None, *how.row, out)
    assert out.tobytes() == gathered(twin, x, indices, None, how).tobytes()


@both
@pytest.mark.parametrize("shape", [(5, 7, 3), (4, 4, 1), (1, 9, 2), (8, 1, 1)])
def test_it_is_padding_cropping_and_mirroring(by: Any, shape: tuple[int, int, int]) -> None:
    x, pad = samples_of(shape, np.uint8), 2
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    how = map_of(shape, 10 * np.arange(1, shape[2] + 1), 0.1)
    for top, left, mirrored in np.ndindex(2 * pad + 1, 2 * pad + 1, 2):
        crop = padded[:, top : top + shape[0], left : left + shape[1]]
        expected = crop[:, :, ::-1] if mirrored else crop
        moves = np.tile([top - pad, left - pad, mirrored], (len(x), 1))
        got = gathered(by, x, np.arange(len(x)), moves, how)
        assert np.array_equal(got, (expected.astype(np.float32) - how.shift) * how.scale)


@both
@pytest.mark.parametrize("shape", [(), (4,), (3, 4), (2, 3, 4), (2, 2, 3, 4)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_samples_of_any_shape_are_mapped_element_by_element(by: Any, shape: tuple[int, ...], dtype: Any) -> None:
    x = samples_of((*shape, 5), dtype)
    how = map_of(x.shape[1:], np.arange(5), 0.1)
    got = gathered(by, x, [3, 3, 0], None, how)
    assert np.array_equal(got, (x[[3, 3, 0]].astype(np.float32) - how.shift) * how.scale)


@both
def test_a_map_may_differ_from_row_to_row(by: Any) -> None:
    x = samples_of((3, 2, 2), np.uint8)
    how = map_of((3, 2, 2), np.arange(12).reshape(3, 2, 2), 2.0)
    assert np.array_equal(gathered(by, x, [1, 2], None, how), (x[[1, 2]].astype(np.float32) - how.shift) * 2)
    moved = gathered(by, x, [1], np.array([[1, 0, 0]]), how)[0]
    assert np.array_equal(moved, (np.concatenate([x[1, 1:], 0 * x[1, :1]]).astype(np.float32) - how.shift) * 2)


@both
@pytest.mark.parametrize("index", [6, 2**40])
def test_a_sample_that_is_not_there_is_refused(by: Any, index: int) -> None:
    x = samples_of((2, 2, 1), np.uint8)
    with pytest.raises(IndexError):
        gathered(by, x, [0, index], None, map_of((2, 2, 1)))


@both
def test_sizes_that_differ_are_refused(by: Any) -> None:
    x, out = samples_of((2, 2, 1), np.uint8), np.zeros((3, 2, 2, 1), np.float32)
    for indices, moves in ((np.arange(2), None), (np.arange(3), np.zeros((2, 3), np.int64))):
        with pytest.raises((ValueError, IndexError)):
            by(np, x, indices, moves, map_of((2, 2, 1)), out)
    assert not out.any()


@compiled
def test_calls_allocate_nothing() -> None:
    x = samples_of((16, 16, 3), np.uint8)
    how, indices, moves = map_of((16, 16, 3)), np.arange(6), np.ones((6, 3), np.int64)
    out = np.empty((6, 16, 16, 3), np.float32)
    kernels.gather(np, x, indices, moves, how, out)
    tracemalloc.start()
    try:
        for _ in range(20):
            kernels.gather(np, x, indices, moves, how, out)
        assert tracemalloc.get_traced_memory()[1] < 2048
    finally:
        tracemalloc.stop()
