"""The C loops have the bits of their NumPy twins, allocate nothing, let other threads run, and refuse what differs."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import kernels
from shoal.comm import tree
from shoal.kernels import twins
from shoal.kernels.compiled import cpu

compiled = pytest.mark.skipif(cpu is None, reason=f"nothing to compare: {kernels.backing()}")

SIZES = [0, 1, 2, 3, 15, 16, 17, 1000, 65537]
DTYPES = [np.float32, np.float64]
ODD = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-310, -1e-310, 1e-40, -3e-45, 3e38, -3e38, 1.7e308, 1.0, -1.0]


def numbers(size: int, dtype: Any, seed: int, odd: bool = True) -> np.ndarray:
    """Random magnitudes over many binary orders; every seventh or so is a number of the odd kinds."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(size) * 2.0 ** rng.integers(-40, 40, size)
    if odd:
        at = rng.random(size) < 0.15
        x[at] = rng.choice(ODD, int(at.sum()))
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal bit for bit; a NaN equals any NaN at the same place."""
    nan = np.isnan(left)
    whole = np.uint32 if left.dtype == np.float32 else np.uint64
    return bool(
        np.array_equal(nan, np.isnan(right)) and np.array_equal(left.view(whole)[~nan], right.view(whole)[~nan])
    )


def agree(call: Callable[[Any, list[np.ndarray]], None], arrays: list[np.ndarray]) -> None:
    """`call(module, arrays)` leaves the same bits in all arrays whether the module is the kernels or the twins."""
    mine, oracle = [a.copy() for a in arrays], [a.copy() for a in arrays]
    call(kernels, mine)
    with np.errstate(all="ignore"):
        call(twins, oracle)
    for left, right in zip(mine, oracle, strict=True):
        assert same_bits(left, right)


def canonical_joins(parts: int) -> list[int]:
    """The joins of the canonical tree over so many learners."""
    joins: list[int] = []
    stack: list[tuple[int, int]] = []
    for learner in range(parts):
        before = len(stack) + 1
        tree.push(stack, (0, learner), lambda left, _: (left[0] + 1, left[1] // 2), lambda vertex: vertex)
        joins.append(before - len(stack))
    joins[-1] += len(stack) - 1
    return joins


@st.composite
def any_joins(draw: st.DrawFn) -> list[int]:
    """Any order of additions over 1 to 12 parts."""
    joins, depth = [], 0
    for _ in range(draw(st.integers(0, 11))):
        depth += 1
        joins.append(draw(st.integers(0, depth - 1)))
        depth -= joins[-1]
    return [*joins, depth]


REDUCTIONS: dict[str, Callable[[Any, kernels.Terms, list[np.ndarray]], None]] = {
    "sum": lambda by, terms, x: by.canonical_sum(np, terms, x[0]),
    "statistics": lambda by, terms, x: by.reduce_statistics(np, terms, x[0], x[2]),
    "displacement": lambda by, terms, x: by.reduce_displacement(np, terms, (x[0], x[1]), (x[2], x[3]), 0.7),
    "displacement in place": lambda by, terms, x: by.reduce_displacement(np, terms, (x[0], x[1]), (x[0], x[1]), 0.7),
    "per rate": lambda by, terms, x: by.reduce_per_rate(np, terms, (x[0], x[1]), (x[2], x[3]), (0.7, 0.03)),
    "per rate in place": lambda by, terms, x: by.reduce_per_rate(np, terms, (x[0], x[1]), (x[0], x[1]), (0.7, 0.03)),
    "statistics in place": lambda by, terms, x: by.reduce_statistics(np, terms, x[0], x[0]),
}


def check_reduction(name: str, joins: list[int], size: int, dtype: Any, seed: int = 0) -> None:
    parts = [numbers(size, dtype, seed + i) for i in range(len(joins))]
    terms = kernels.Terms(np, parts, joins, 1 / len(parts))
    assert cpu is None or terms.compiled is not None
    state = [numbers(size, dtype, seed + 100 + i) for i in range(4)]
    agree(lambda by, x: REDUCTIONS[name](by, terms, x), state)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_have_the_twins_bits(name: str, size: int, dtype: Any) -> None:
    for parts in (1, 2, 3, 8):
        check_reduction(name, canonical_joins(parts), size, dtype, parts)


@compiled
@settings(max_examples=60, deadline=None)
@given(any_joins(), st.integers(0, 1200), st.sampled_from(DTYPES), st.sampled_from(sorted(REDUCTIONS)))
def test_any_order_of_additions_has_the_twins_bits(joins: list[int], size: int, dtype: Any, name: str) -> None:
    check_reduction(name, joins, size, dtype, len(joins))


@compiled
@pytest.mark.parametrize("name", ["sum", "displacement", "displacement in place", "per rate"])
def test_outputs_that_go_past_the_caches_have_the_twins_bits(name: str) -> None:
    check_reduction(name, canonical_joins(3), (32 << 20) // 12 + 5, np.float32)
    big = [numbers((32 << 20) // 12 + 5, np.float32, i) for i in range(3)]
    agree(lambda by, x: by.delta(np, x[0][1:], x[1][1:], x[2][1:]), big)


@pytest.mark.parametrize("by", [kernels, twins])
@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8, 17])
def test_sum_follows_the_canonical_tree(by: Any, parts: int) -> None:
    arrays = [numbers(300, np.float32, i, odd=False) for i in range(parts)]
    out = np.empty(300, np.float32)
    by.canonical_sum(np, kernels.Terms(np, arrays, canonical_joins(parts), 0.25), out)
    expected = [tree.sum_scalars([a[i] for a in arrays]) for i in range(300)]
    assert same_bits(out, np.array(expected, np.float32) * np.float32(0.25))


@pytest.mark.parametrize("by", [kernels, twins])
def test_sum_may_replace_a_part(by: Any) -> None:
    parts = [np.full(5000, float(i), np.float32) for i in (1, 2, 4)]
    by.canonical_sum(np, kernels.Terms(np, parts, [0, 1, 1], 2.0), parts[0])
    assert (parts[0] == 14).all() and (parts[1] == 2).all()


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_delta_has_the_twins_bits(size: int, dtype: Any) -> None:
    agree(lambda by, x: by.delta(np, *x), [numbers(size, dtype, i) for i in range(3)])


STEPS = [
    kernels.LocalStep(0.1),
    kernels.LocalStep(0.1, weight_decay=3e-4),
    kernels.LocalStep(0.1, 0.9),
    kernels.LocalStep(0.1, 0.9, nesterov=True),
    kernels.LocalStep(0.1, 0.9, weight_decay=3e-4),
    kernels.LocalStep(0.1, 0.9, nesterov=True, weight_decay=1e-60),
]


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("step", STEPS)
def test_local_step_has_the_twins_bits(step: kernels.LocalStep, size: int, dtype: Any) -> None:
    """In place, to other memory, and to the displacement from an origin that takes the gradient's place."""
    arrays = [numbers(size, dtype, i) for i in range(6)]
    for decayed in {0, size // 3, size}:
        by = kernels.LocalStep(step.rate, step.beta, step.nesterov, step.weight_decay, decayed)
        for w_out, m_out, origin in ((0, 1, None), (3, 4, None), (3, 1, 5), (2, 1, 0), (2, 4, 5), (0, 1, 0)):

            def call(module: Any, x: list[np.ndarray]) -> None:
                momenta = (x[1], x[m_out]) if by.beta else (None, None)  # noqa: B023
                a = None if origin is None else x[origin]  # noqa: B023
                module.local_step(np, (x[0], momenta[0]), x[2], (x[w_out], momenta[1]), by, a)  # noqa: B023

            agree(call, arrays)


def test_local_step_is_the_textbook_step() -> None:
    w, g, m = (numbers(50, np.float32, i, odd=False) for i in range(3))
    step = kernels.LocalStep(0.1, 0.9, nesterov=True, weight_decay=0.01, decayed=20)
    f = np.float32
    decayed = g.copy()
    decayed[:20] += w[:20] * f(0.01)
    expected_m = m * f(0.9) + decayed
    expected_w = w - (expected_m * f(0.9) + decayed) * f(0.1)
    kernels.local_step(np, (w, m), g, (w, m), step)
    assert same_bits(w, expected_w) and same_bits(m, expected_m)


def test_local_step_leaves_what_it_starts_from() -> None:
    w, g, m, w_out, m_out = (numbers(5000, np.float32, i, odd=False) for i in range(5))
    before = [one.tobytes() for one in (w, g, m)]
    step = kernels.LocalStep(0.1, 0.9, weight_decay=0.01, decayed=20)
    kernels.local_step(np, (w, m), g, (w_out, m_out), step)
    assert [one.tobytes() for one in (w, g, m)] == before
    moved = w_out - w
    kernels.local_step(np, (w, m), g, (w_out, m_out), step, origin=w)
    assert same_bits(w_out, moved) and [one.tobytes() for one in (w, g, m)] == before


def every_float32_of_interest() -> np.ndarray:
    """All upper halves with lower halves at and beside the midpoints of rounding; all halves and their midpoints."""
    lower = [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    upper = (np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | np.array(lower, np.uint32)
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    near = halves[:, None] + np.array([-1, 0, 1, 0xFFF, 0x1000, 0x1001], np.int32).view(np.uint32)
    return np.concatenate([upper.ravel(), near.ravel()]).view(np.float32)


@pytest.mark.parametrize("by", [kernels, twins])
def test_pack_to_half_is_numpys_cast(by: Any) -> None:
    x = every_float32_of_interest()
    out = np.empty(x.size, np.float16)
    by.pack(np, x, out)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    nan = np.isnan(x)
    assert np.array_equal(np.isnan(out), nan)
    assert np.array_equal(out.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])


@pytest.mark.parametrize("by", [kernels, twins])
def test_unpack_from_half_is_numpys_cast(by: Any) -> None:
    packed = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    out = np.empty(packed.size, np.float32)
    by.unpack(np, packed, out)
    assert same_bits(out, packed.astype(np.float32))


@pytest.mark.parametrize("by", [kernels, twins])
def test_pack_to_bfloat_rounds_the_bits_to_nearest_even(by: Any) -> None:
    x = every_float32_of_interest()
    out, back = np.empty(x.size, np.uint16), np.empty(x.size, np.float32)
    by.pack(np, x, out)
    wide = x.view(np.uint32).astype(np.uint64)
    expected = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
    nan = np.isnan(x)
    assert np.array_equal(out[~nan], expected[~nan])
    by.unpack(np, out, back)
    assert np.array_equal(np.isnan(back), nan)
    assert np.array_equal(back.view(np.uint32), out.astype(np.uint32) << 16)


@compiled
@pytest.mark.parametrize("size", SIZES)
def test_pack_of_any_size_has_the_twins_bits(size: int) -> None:
    x = numbers(size, np.float32, 1)
    for dtype in (np.float16, np.uint16):
        mine, oracle = np.zeros(size, dtype), np.zeros(size, dtype)
        kernels.pack(np, x, mine)
        twins.pack(np, x, oracle)
        assert np.array_equal(mine.view(np.uint16), oracle.view(np.uint16))


def test_strided_and_mixed_arrays_are_the_twins() -> None:
    w, a, out = np.arange(20.0)[::2], np.ones(10), np.zeros(10, np.float32)
    kernels.delta(np, w, a, out)
    assert np.array_equal(out, np.arange(0, 20, 2) - 1)
    terms = kernels.Terms(np, [w, a], [0, 1], 0.5)
    total = np.zeros(10)
    kernels.canonical_sum(np, terms, total)
    assert np.array_equal(total, (w + a) / 2)


@pytest.mark.parametrize("by", [kernels, twins])
def test_sizes_that_differ_are_refused(by: Any) -> None:
    x, y = np.zeros(4, np.float32), np.zeros(5, np.float32)
    terms = kernels.Terms(np, [x, x], [0, 1], 1.0)
    calls: list[Callable[[], None]] = [
        lambda: by.delta(np, x, x, y),
        lambda: by.local_step(np, (x, None), y, (x, None), kernels.LocalStep(0.1)),
        lambda: by.local_step(np, (x, y), x, (x, y), kernels.LocalStep(0.1)),
        lambda: by.local_step(np, (x, None), x, (x, None), kernels.LocalStep(0.1), y),
        lambda: by.local_step(np, (x, x), x, (x, x), kernels.LocalStep(0.1, weight_decay=0.1, decayed=5)),
        lambda: by.canonical_sum(np, terms, y),
        lambda: by.reduce_displacement(np, terms, (x, x), (x, y), 0.5),
        lambda: by.reduce_displacement(np, terms, (y, y), (y, y), 0.5),
        lambda: by.pack(np, x, np.zeros(5, np.float16)),
        lambda: by.delta(np, x[0:0], x, x),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"elements|shapes"):
            call()
    assert not x.any() and not y.any()


def test_outputs_that_are_read_only_are_refused() -> None:
    x, out = np.ones(4, np.float32), np.zeros(4, np.float32)
    out.setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        kernels.delta(np, x, x, out)


@pytest.mark.parametrize("joins", [[], [0, 0], [1, 0], [0, 2], [0, -1], [0, 1, 1], [0]])
def test_joins_that_do_not_leave_one_sum_are_refused(joins: list[int]) -> None:
    x = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="the joins"):
        kernels.Terms(np, [x, x], joins, 1.0)


def test_more_open_sums_than_the_stack_holds_are_refused() -> None:
    x = np.ones(4, np.float32)
    out = np.empty(4, np.float32)
    kernels.canonical_sum(np, kernels.Terms(np, [x] * 64, [0] * 63 + [63], 1.0), out)
    assert (out == 64).all()
    with pytest.raises(ValueError, match="64 open"):
        kernels.Terms(np, [x] * 65, [0] * 64 + [64], 1.0)


def test_terms_hold_their_parts() -> None:
    parts = [np.full(10_000, 1.0), np.full(10_000, 2.0)]
    terms = kernels.Terms(np, parts, [0, 1], 1.0)
    del parts
    out = np.empty(10_000)
    kernels.canonical_sum(np, terms, out)
    assert (out == 3).all()


@compiled
def test_calls_allocate_nothing() -> None:
    w, g, m, out = (numbers(100_000, np.float32, i, odd=False) for i in range(4))
    terms, step = kernels.Terms(np, [w, g], [0, 1], 0.5), kernels.LocalStep(0.01, 0.9, True, 1e-4, 1000)
    half = np.empty(w.size, np.float16)

    def once() -> None:
        kernels.delta(np, w, g, out)
        kernels.local_step(np, (w, m), g, (w, m), step)
        kernels.canonical_sum(np, terms, out)
        kernels.reduce_displacement(np, terms, (out, m), (out, m), 0.5)
        kernels.pack(np, g, half)

    once()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in range(20):
            once()
        assert tracemalloc.get_traced_memory()[1] - before < 4096
    finally:
        tracemalloc.stop()


@compiled
def test_another_thread_runs_during_a_call() -> None:
    x = numbers(4 << 20, np.float32, 0, odd=False)
    out = np.empty_like(x)
    terms = kernels.Terms(np, [x] * 64, canonical_joins(64), 1.0)
    done, ticks = threading.Event(), []

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    time.sleep(0.01)
    began = time.monotonic()
    kernels.canonical_sum(np, terms, out)
    ended = time.monotonic()
    done.set()
    thread.join()
    assert any(began < at < ended for at in ticks)


def test_backing_says_which_form_runs() -> None:
    if cpu is None:
        assert kernels.backing().startswith("NumPy twins (")
    else:
        assert kernels.backing() == f"C ({cpu.COMPILER}, {cpu.FLAGS})"
