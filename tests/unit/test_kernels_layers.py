"""The C loops of layers have the bits of their NumPy twins, at any shape, and refuse what does not fit."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import kernels
from shoal.kernels import layer_twins as twins
from shoal.kernels import layers as loops
from shoal.kernels.compiled import cpu

compiled = pytest.mark.skipif(cpu is None, reason=f"nothing to compare: {kernels.backing()}")
types = st.sampled_from([np.float32, np.float64])
ODD = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -3e-45, 3e38, -1.0]


def numbers(shape: tuple[int, ...], dtype: Any, seed: int, odd: bool = False) -> np.ndarray:
    """Random numbers of several magnitudes; if `odd`, some of the odd kinds."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)
    if odd:
        at = rng.random(shape) < 0.05
        x[at] = rng.choice(ODD, int(at.sum()))
    return x.astype(dtype)


def agree(call: Callable[[Any], None], *outputs: np.ndarray) -> None:
    """`call(module)` leaves the same bits in the outputs, whatever was there, by the kernels and by the twins."""
    before = [output.copy() for output in outputs]
    call(loops)
    mine = [output.copy() for output in outputs]
    for output, old in zip(outputs, before, strict=True):
        output[...] = old
    with np.errstate(all="ignore"):
        call(twins)
    for left, right in zip(mine, outputs, strict=True):
        nan = np.isnan(left)
        whole = np.dtype(f"u{left.dtype.itemsize}")
        assert np.array_equal(nan, np.isnan(right))
        assert np.array_equal(left.view(whole)[~nan], right.view(whole)[~nan])


@st.composite
def cases_of_windows(draw: st.DrawFn) -> tuple[tuple[int, ...], loops.Windows, loops.Block, Any]:
    """Images, windows that fit them, a block of the output, a type."""
    kernel, stride, padding = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(0, 4))
    least = max(1, kernel - 2 * padding)
    height, width = draw(st.integers(least, least + 7)), draw(st.integers(least, least + 7))
    images, channels = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 5, 8, 16, 19]))
    windows = loops.Windows(kernel, stride, padding)
    image = draw(st.integers(0, images - 1))
    line = draw(st.integers(0, windows.along(height) - 1))
    count, lines = draw(st.integers(1, images - image)), draw(st.integers(1, windows.along(height) - line))
    return (images, height, width, channels), windows, loops.Block(image, count, line, lines), draw(types)


@compiled
@settings(max_examples=150, deadline=None)
@given(cases_of_windows())
def test_windows_have_the_twins_bits(case: Any) -> None:
    shape, windows, block, dtype = case
    x = numbers(shape, dtype, 1, odd=True)
    rows = block.images * block.lines * windows.along(shape[2])
    out = numbers((rows, windows.kernel**2 * shape[3]), dtype, 2)
    agree(lambda by: by.unfold(np, x, windows, block, out), out)
    agree(lambda by: by.fold(np, out, windows, block, x), x)


@settings(max_examples=60, deadline=None)
@given(cases_of_windows())
def test_unfold_reads_the_padded_image_and_fold_is_its_transpose(case: Any) -> None:
    shape, windows, block, _ = case
    x, padding, kernel = numbers(shape, np.float64, 1), windows.padding, windows.kernel
    columns = windows.along(shape[2])
    rows = np.empty((block.images * block.lines * columns, kernel**2 * shape[3]))
    loops.unfold(np, x, windows, block, rows)
    padded = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    parts = rows.reshape(block.images, block.lines, columns, -1)
    for image, line, column in np.ndindex(parts.shape[:3]):
        top, left = (block.line + line) * windows.stride, column * windows.stride
        expected = padded[block.image + image, top : top + kernel, left : left + kernel]
        assert np.array_equal(parts[image, line, column], expected.ravel())
    weights, back = numbers(rows.shape, np.float64, 3), np.zeros(shape)
    loops.fold(np, weights, windows, block, back)
    assert float((back * x).sum()) == pytest.approx(float((weights * rows).sum()), rel=1e-9, abs=1e-9)


@compiled
@settings(max_examples=80, deadline=None)
@given(cases_of_windows(), st.booleans())
def test_max_pooling_has_the_twins_bits(case: Any, ties: bool) -> None:
    (images, height, width, channels), windows, _, dtype = case
    windows = loops.Windows(min(windows.kernel, height, width), windows.stride)
    x = numbers((images, height, width, channels), dtype, 1, odd=True)
    x = np.sign(x) if ties else x
    y = np.zeros((images, windows.along(height), windows.along(width), channels), dtype)
    winner, dy = np.zeros(y.shape, np.int16), numbers(y.shape, dtype, 2)
    agree(lambda by: by.max_pool(np, x, windows, y, None), y)
    agree(lambda by: by.max_pool(np, x, windows, y, winner), y, winner)
    agree(lambda by: by.max_pool_gradient(np, dy, winner, windows, x), x)


@compiled
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.sampled_from([1, 3, 16, 17, 40]), st.sampled_from([1, 2, 16, 33]), types)
def test_mirror_has_the_twins_bits_and_is_its_own_inverse(kernel: int, inputs: int, outputs: int, dtype: Any) -> None:
    w = numbers((kernel, kernel, inputs, outputs), dtype, 1, odd=True)
    out, again = np.empty((kernel, kernel, outputs, inputs), dtype), np.empty_like(w)
    agree(lambda by: by.mirror(np, w, out), out)
    loops.mirror(np, out, again)
    assert again.tobytes() == w.tobytes()


rows_of_features = st.tuples(
    st.integers(1, 3), st.sampled_from([0, 1, 7, 127, 128, 129, 300]), st.sampled_from([1, 2, 3, 8, 15, 16, 17, 40, 64])
)


@compiled
@settings(max_examples=120, deadline=None)
@given(rows_of_features, types, st.booleans(), st.booleans(), st.booleans())
def test_passes_over_features_have_the_twins_bits(shape: Any, dtype: Any, one: bool, two: bool, odd: bool) -> None:
    groups, _, features = shape
    x, dy, y = (numbers(shape, dtype, seed, odd) for seed in (1, 2, 3))
    scale, shift, out = numbers((groups, features), dtype, 4), numbers((groups, features), dtype, 5), np.zeros_like(x)
    sums, dz = np.full((2, groups, features), 7.0), np.zeros_like(x)
    agree(lambda by: by.moments(np, x, sums), sums)
    for relu in (False, True):
        agree(lambda by: by.affine(np, x, scale, shift if one else None, y if two else None, out, relu), out)  # noqa: B023
    agree(lambda by: by.gradient_moments(np, dy, x, y if one else None, dz if two else None, sums), sums, dz)
    agree(lambda by: by.masked(np, dy, y, dz), dz)
    factors = numbers((3, features), dtype, 6)
    agree(lambda by: by.affine_gradient(np, dy, x, y if one else None, factors, out), out)


def test_sums_are_float64_and_over_the_rows_of_each_group() -> None:
    x = np.float32(1e4) + numbers((3, 500, 18), np.float32, 1)
    sums = np.empty((2, 3, 18))
    loops.moments(np, x, sums)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(sums, np.stack([wide.sum(1), (wide**2).sum(1)]), rtol=1e-13)


@compiled
def test_what_does_not_fit_is_refused_and_other_kinds_are_the_twins() -> None:
    x, sums = np.ones((2, 4, 4, 3), np.float32), np.empty((2, 1, 3))
    windows, block = loops.Windows(3, padding=1), loops.Block(0, 2, 0, 4)
    rows = np.empty((32, 27), np.float32)
    for wrong in (
        lambda: loops.unfold(np, x, windows, loops.Block(1, 2, 0, 4), rows),
        lambda: loops.unfold(np, x, windows, loops.Block(0, 2, 1, 4), rows),
        lambda: loops.unfold(np, x, windows, block, rows[:-1]),
        lambda: loops.unfold(np, x, loops.Windows(7), block, rows),
        lambda: loops.moments(np, x, np.empty((2, 5, 3))),
        lambda: loops.moments(np, x, np.empty((1, 2, 3))),
        lambda: loops.affine(np, x, np.ones((1, 3), np.float32), np.ones((1, 4), np.float32), None, x),
        lambda: loops.affine(np, x, np.ones((1, 3), np.float32), None, x[:1], x),
        lambda: loops.affine_gradient(np, x, x, x[:1], np.ones((3, 3), np.float32), x),
        lambda: loops.gradient_moments(np, x, x, None, x[:1].copy(), sums),
        lambda: loops.masked(np, x, x[:1], x),
        lambda: loops.max_pool(np, x, loops.Windows(2), np.empty((2, 2, 2, 2), np.float32), None),
        lambda: loops.max_pool(np, x, loops.Windows(5), x, None),
        lambda: loops.mirror(np, x[:, :2], np.ones(5, np.float32)),
    ):
        with pytest.raises(ValueError):
            wrong()
    assert not cpu.moments(x.astype(np.float16), sums)
    assert not cpu.moments(x, sums.astype(np.float32))
    assert not cpu.moments(x[:, ::2], sums)
    loops.moments(np, x[:, ::2], sums)
    assert sums.tolist() == [[[16.0] * 3]] * 2


@compiled
def test_the_loops_allocate_nothing() -> None:
    x, sums = np.ones((8, 16, 16, 32), np.float32), np.empty((2, 1, 32))
    windows, block = loops.Windows(3, padding=1), loops.Block(0, 8, 0, 16)
    rows, scale = np.empty((8 * 256, 288), np.float32), np.ones((1, 32), np.float32)
    out = np.empty_like(x)
    tracemalloc.start()
    try:
        loops.unfold(np, x, windows, block, rows)
        loops.fold(np, rows, windows, block, out)
        loops.moments(np, x, sums)
        loops.affine(np, x, scale, scale, x, out, True)
        loops.gradient_moments(np, x, x, x, out, sums)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4096
