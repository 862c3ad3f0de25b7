"""The learning rate: pure, always above 0, and what each of its options says it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.config import LearningRate, from_tree
from shoal.sgd.rates import Switch, learning_rate

FIXED = settings(derandomize=True, deadline=None)
SAMPLES, EPOCHS = 1000, 20
END = SAMPLES * EPOCHS


def _options(**keys: Any) -> LearningRate:
    return from_tree({"learning_rate": keys}, "test").learning_rate


def _rate(
    options: LearningRate, position: int, history: Sequence[tuple[int, int]] = ((0, 1),), round_samples: int = 10
) -> float:
    switches = [Switch(*switch) for switch in history]
    return learning_rate(options, position, SAMPLES, END, switches, round_samples)


options = st.builds(
    LearningRate,
    base=st.floats(1e-6, 10),
    decay=st.one_of(
        st.sampled_from(["constant", "cosine", "polynomial"]),
        st.lists(st.tuples(st.floats(0, EPOCHS), st.floats(1e-3, 10)), max_size=4).map(tuple),
    ),
    floor=st.floats(0, 0.99),
    power=st.floats(0.1, 8),
    warmup_epochs=st.one_of(st.just(0.0), st.floats(0.01, EPOCHS)),
    growth_warmup_epochs=st.one_of(st.just(0.0), st.floats(0.01, EPOCHS)),
    scaling=st.sampled_from(["none", "linear", "sqrt"]),
    base_learners=st.integers(1, 64),
)
histories = st.lists(
    st.tuples(st.integers(0, END - 1), st.integers(1, 64)), min_size=1, max_size=4, unique_by=lambda switch: switch[0]
).map(lambda found: [(0, found[0][1]), *sorted(found)[1:]])


@FIXED
@given(options, histories, st.integers(0, END - 1), st.integers(1, 500))
def test_always_above_0_and_finite(
    chosen: LearningRate, history: list[tuple[int, int]], position: int, round_samples: int
) -> None:
    position = max(position, history[-1][0])
    rate = _rate(chosen, position, history, round_samples)
    assert 0 < rate < math.inf


@FIXED
@given(st.sampled_from(["cosine", "polynomial"]), st.integers(1, 10**12), st.integers(1, 10**6))
@example("cosine", 10**9, 1)
@example("polynomial", 10**12, 1)
def test_above_0_in_the_last_round_of_a_long_training(decay: str, end: int, before_end: int) -> None:
    position = max(0, end - before_end)
    assert learning_rate(_options(decay=decay), position, 10**6, end, [Switch(0, 1)], 1) > 0


@FIXED
@given(options, histories, st.lists(st.integers(0, END - 1), min_size=2, max_size=8))
def test_a_rate_does_not_depend_on_what_was_asked_before(
    chosen: LearningRate, history: list[tuple[int, int]], positions: list[int]
) -> None:
    asked = [max(position, history[-1][0]) for position in positions]
    forwards = [_rate(chosen, position, history) for position in asked]
    backwards = [_rate(chosen, position, history) for position in reversed(asked)]
    assert forwards == backwards[::-1]


def test_constant() -> None:
    assert {_rate(_options(base=0.3), position) for position in (0, 1, 777, END - 1)} == {0.3}


def test_step_decay_is_from_its_epoch_on() -> None:
    steps = _options(base=1.0, decay=[[1.5, 0.5], [3, 0.1]])
    positions = (0, 1499, 1500, 2999, 3000, END - 1)
    assert [_rate(steps, position) for position in positions] == [1, 1, 0.5, 0.5, 0.05, 0.05]


@pytest.mark.parametrize(("epoch", "position"), [(0.07, 70), (1.1, 1100), (4.35, 4350), (8.2, 8200), (0.57, 570)])
def test_step_decay_at_an_epoch_in_decimals(epoch: float, position: int) -> None:
    """As a stage of the schedule at that epoch; 0.07 * 100 is above 7 in binary."""
    for samples in (100, 1000):
        at = position * samples // 1000
        rates = [
            learning_rate(_options(base=1.0, decay=[[epoch, 0.5]]), here, samples, END, [Switch(0, 1)], 1)
            for here in (at - 1, at)
        ]
        assert rates == [1.0, 0.5]


def test_step_decay_in_any_order() -> None:
    assert _rate(_options(base=1.0, decay=[[3, 0.1], [1, 0.5]]), 2000) == 0.5


def test_cosine() -> None:
    cosine = _options(base=2.0, decay="cosine")
    assert _rate(cosine, 0) == 2.0
    assert math.isclose(_rate(cosine, END // 2), 1.0)
    assert math.isclose(_rate(cosine, END // 4), 1 + math.sqrt(0.5))
    assert _rate(cosine, END - 1) < 1e-7
    assert math.isclose(_rate(_options(base=2.0, decay="cosine", floor=0.25), END // 2), 2 * (0.25 + 0.75 / 2))


def test_polynomial() -> None:
    square = _options(base=2.0, decay="polynomial", power=2.0)
    assert [_rate(square, position) for position in (0, END // 2, END * 3 // 4)] == [2.0, 0.5, 0.125]
    assert math.isclose(_rate(_options(base=2.0, decay="polynomial", power=2.0, floor=0.5), END // 2), 1.25)


@pytest.mark.parametrize("decay", ["cosine", "polynomial"])
def test_a_decay_never_rises(decay: str) -> None:
    rates = [_rate(_options(decay=decay, floor=0.1), position) for position in range(0, END, 100)]
    assert all(a > b for a, b in pairwise(rates)) and rates[-1] > 0.1 * rates[0]


def test_warm_up_counts_the_round_under_way() -> None:
    """Two epochs of ten rounds each: a twentieth more a round, full in the last round of the second epoch."""
    warm = _options(base=1.0, warmup_epochs=2.0)
    rates = [_rate(warm, position, round_samples=100) for position in range(0, 3 * SAMPLES, 100)]
    expected = [min(1.0, (i + 1) / 20) for i in range(30)]
    assert all(math.isclose(a, b) for a, b in zip(rates, expected, strict=True))


def test_a_warm_up_multiplies_the_decay() -> None:
    both = _options(base=1.0, warmup_epochs=2.0, decay="cosine")
    assert math.isclose(_rate(both, 990), 0.5 * _rate(_options(base=1.0, decay="cosine"), 990))


@pytest.mark.parametrize(
    ("scaling", "base_learners", "expected"),
    [
        ("none", 1, [1, 1, 1]),
        ("none", 4, [1, 1, 1]),
        ("linear", 1, [1, 4, 9]),
        ("linear", 2, [0.5, 2, 4.5]),
        ("sqrt", 1, [1, 2, 3]),
        ("sqrt", 4, [0.5, 1, 1.5]),
    ],
)
def test_scaling(scaling: str, base_learners: int, expected: list[float]) -> None:
    scaled = _options(base=1.0, scaling=scaling, base_learners=base_learners)
    assert [_rate(scaled, 500, [(0, learners)]) for learners in (1, 4, 9)] == expected


@pytest.mark.parametrize("scaling", ["linear", "sqrt"])
@pytest.mark.parametrize("decay", ["constant", "cosine"])
def test_a_return_to_the_old_learners_is_a_return_to_the_old_rate(scaling: str, decay: str) -> None:
    """P 2 -> 8 -> 2: nothing compounds."""
    scaled = _options(base=0.3, scaling=scaling, decay=decay, growth_warmup_epochs=1.0)
    there, back = [(0, 2), (2000, 8)], [(0, 2), (2000, 8), (6000, 2)]
    for position in (6000, 7000, END - 10):
        assert _rate(scaled, position, back) == _rate(scaled, position, [(0, 2)])
    assert _rate(scaled, 5000, there) > _rate(scaled, 5000, [(0, 2)])
    again = [*back, (8000, 8)]
    assert _rate(scaled, 8000, again) / _rate(_options(decay=decay), 8000) == pytest.approx(
        _rate(scaled, 2000, there) / _rate(_options(decay=decay), 2000)
    )


def test_after_a_growth_the_factor_ramps() -> None:
    """From 2 to 8 learners over 2 epochs of ten rounds each; then it stays."""
    ramp = _options(base=1.0, scaling="linear", growth_warmup_epochs=2.0)
    history = [(0, 2), (5000, 8)]
    rates = [_rate(ramp, 5000 + 100 * i, history, 100) for i in range(30)]
    expected = [2 + 6 * min(1.0, (i + 1) / 20) for i in range(30)]
    assert all(math.isclose(a, b) for a, b in zip(rates, expected, strict=True))
    assert _rate(ramp, 4900, history[:1], 100) == 2.0


def test_no_ramp_after_a_shrinkage_nor_at_the_start() -> None:
    ramp = _options(base=1.0, scaling="linear", growth_warmup_epochs=2.0)
    assert _rate(ramp, 5000, [(0, 8), (5000, 2)]) == 2.0
    assert _rate(ramp, 0, [(0, 8)]) == 8.0


def test_a_growth_within_a_ramp_does_not_jump() -> None:
    """1 -> 4 -> 16 learners, the second growth a quarter into the first one's ramp: the rate goes on rising in
    steps as small as before, instead of leaping to the factor of 4 learners at once."""
    ramp = _options(base=1.0, scaling="linear", growth_warmup_epochs=4.0)
    first = _rate(ramp, 1900, [(0, 1), (1000, 4)], 100)
    second = _rate(ramp, 2000, [(0, 1), (1000, 4), (2000, 16)], 100)
    assert first < second < 1.5 * first
