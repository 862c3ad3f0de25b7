"""The plan: who trains at which position, by closed form and by walking round after round."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config import Config, from_tree
from shoal.data.order import SampleOrder
from shoal.elastic.plan import Plan, StagePlan, effective_step, forecast, make_plan, warnings
from shoal.errors import InputError
from shoal.sgd.rates import Switch, learning_rate

FIXED = settings(derandomize=True, deadline=None)

stages = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 12), st.integers(1, 5), st.integers(1, 8)),
    min_size=1,
    max_size=5,
    unique_by=lambda stage: stage[0],
)


def _config(schedule: Any, epochs: float, **sections: Any) -> Config:
    return from_tree({"train": {"epochs": epochs}, "learners": {"schedule": schedule}, **sections}, "test")


def _tables(chosen: list[tuple[int, int, int, int]]) -> list[dict[str, Any]]:
    """Stages at multiples of 1/40 of an epoch; the first at 0."""
    ordered = sorted(chosen)
    return [
        {"at": (at - ordered[0][0]) / 40, "learners": learners, "steps": steps, "batch": batch}
        for at, learners, steps, batch in ordered
    ]


def _walk(plan: Plan) -> list[tuple[int, StagePlan]]:
    """Rounds one by one: (position, stage) of each, as training takes them."""
    position, rounds = 0, []
    while position < plan.end:
        stage = plan.at(position)
        rounds.append((position, stage))
        position += stage.learners * stage.steps * stage.batch
    return rounds


def _possible(chosen: list[tuple[int, int, int, int]], samples: int, epochs: float) -> tuple[Config, Plan] | None:
    """The plan of these stages, where it is one that can be carried out."""
    config = _config(_tables(chosen), epochs)
    try:
        return config, make_plan(config, samples)
    except InputError:
        return None


def test_what_holds_in_each_stage() -> None:
    config = _config(
        [
            {"at": 0, "learners": 2},
            {"at": 1.5, "learners": 4, "steps": 2, "momentum": 0.25},
            {"at": "50%", "learners": 8},
        ],
        4.0,
        averaging={"steps": 3, "momentum": 0.75},
    )
    plan = make_plan(config, 333)
    assert plan.stages == (
        StagePlan(0, Fraction(0), 2, 3, 0.75, 8),
        StagePlan(500, Fraction(3, 2), 4, 2, 0.25, 8),
        StagePlan(666, Fraction(2), 8, 3, 0.75, 8),
    )
    assert plan.samples == 333 and plan.end == 1332
    assert [plan.at(position).learners for position in (0, 499, 500, 665, 666, 1331)] == [2, 2, 4, 4, 8, 8]
    assert [stage.round_samples for stage in plan.stages] == [48, 64, 192]


@pytest.mark.parametrize(("epochs", "samples", "end"), [(0.1, 30, 3), (1.1, 10, 11), (2.5, 3, 8), (0.7, 10, 7)])
def test_an_epoch_is_counted_in_decimals(epochs: float, samples: int, end: int) -> None:
    """0.1 is a tenth, not the binary fraction near it, which would end one sample later."""
    plan = make_plan(_config([{"at": 0, "learners": 1, "steps": 1, "batch": 1}], epochs), samples)
    assert plan.end == end


@FIXED
@given(stages, st.integers(1, 120), st.integers(1, 12))
def test_rounds_by_closed_form_equal_a_walk(chosen: list[tuple[int, int, int, int]], samples: int, epochs: int) -> None:
    """Also the steps counted, the positions where stages begin, and the rates of the first and last round."""
    planned = _possible(chosen, samples, epochs)
    if planned is None:
        return
    config, plan = planned
    walked = _walk(plan)
    rows = forecast(plan, config)
    counts = Counter(stage.start for _, stage in walked)
    assert [row.rounds for row in rows] == [counts[stage.start] for stage in plan.stages]
    for row in rows:
        mine = [position for position, stage in walked if stage == row.stage]
        assert row.consumed == mine[-1] + row.stage.round_samples
        assert row.serial_steps == len(mine) * row.stage.steps
        assert row.learner_steps == len(mine) * row.stage.steps * row.stage.learners
        assert mine[0] >= row.stage.start > mine[0] - max(stage.round_samples for stage in plan.stages)
    last, stage = walked[-1]
    assert rows[-1].consumed == last + stage.round_samples
    assert 0 <= rows[-1].consumed - plan.end < stage.round_samples


@FIXED
@given(stages, st.integers(1, 60), st.integers(1, 12), st.integers(0, 5))
def test_every_sample_of_each_epoch_is_used_once(
    chosen: list[tuple[int, int, int, int]], samples: int, epochs: int, seed: int
) -> None:
    """The positions [c + kPB + jB, +B) of all rounds, whatever P(t), K, B; rounds may be longer than an epoch."""
    planned = _possible(chosen, samples, epochs)
    if planned is None:
        return
    plan, order = planned[1], SampleOrder(samples, seed)
    positions, used = [], []
    for c, at in _walk(plan):
        for k in range(at.steps):
            for j in range(at.learners):
                start = c + k * at.learners * at.batch + j * at.batch
                positions.extend(range(start, start + at.batch))
                used.append(order.indices(start, at.batch))
    assert sorted(positions) == list(range(len(positions)))
    by_position = np.empty(len(positions), int)
    by_position[positions] = np.concatenate(used)
    assert len(positions) >= epochs * samples
    for epoch in range(len(positions) // samples):
        assert sorted(by_position[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


def test_a_round_may_be_longer_than_an_epoch() -> None:
    plan = make_plan(_config([{"at": 0, "learners": 8, "steps": 4, "batch": 8}], 8.0), 100)
    assert [position for position, _ in _walk(plan)] == [0, 256, 512, 768]
    assert len(warnings(plan)) == 1 and "fewer than 4 rounds an epoch" in warnings(plan)[0]


def test_the_most_that_four_rounds_an_epoch_allow() -> None:
    tables = [{"at": 0, "learners": 5, "steps": 1, "batch": 5}]
    assert warnings(make_plan(_config(tables, 2.0), 100)) == []
    assert len(warnings(make_plan(_config(tables, 2.0), 99))) == 1


def test_a_stage_of_less_than_a_round_is_refused() -> None:
    tables = [
        {"at": 0, "learners": 1, "steps": 1, "batch": 1},
        {"at": 0.4, "learners": 4, "steps": 3, "batch": 2},
        {"at": 0.64, "learners": 1, "steps": 1, "batch": 1},
    ]
    make_plan(_config(tables, 2.0), 100)
    tables[1]["at"] = 0.401
    with pytest.raises(InputError) as caught:
        make_plan(_config(tables, 2.0), 100)
    assert "epoch 0.401 lasts 23 samples" in str(caught.value)
    assert "4 learners x 3 steps x batch 2 takes 24" in str(caught.value)


def test_a_stage_that_the_round_before_it_runs_past_is_refused() -> None:
    """Rounds of 32 samples begin at 0 and 32, so the second stage has samples 64 to its end."""
    tables = [
        {"at": 0, "learners": 2, "steps": 4, "batch": 4},
        {"at": 0.4, "learners": 1, "steps": 1, "batch": 1},
        {"at": 0.65, "learners": 1, "steps": 2, "batch": 1},
    ]
    config = _config(tables, 2.0)
    assert [row.rounds for row in forecast(make_plan(config, 100), config)] == [2, 1, 68]
    tables[2]["at"] = 0.64
    with pytest.raises(InputError, match=r"epoch 0\.4 lasts 24 samples.*runs past its end"):
        make_plan(_config(tables, 2.0), 100)


@FIXED
@given(st.integers(1, 16), st.integers(1, 300))
def test_a_global_batch_is_dealt_evenly_or_refused(learners: int, batch: int) -> None:
    config = _config(f"0:{learners}", 50.0, train={"epochs": 50.0, "batch": batch, "batch_mode": "global"})
    if batch % learners == 0:
        (stage,) = make_plan(config, 1000).stages
        assert stage.batch * learners == batch and stage.round_samples == batch
    else:
        with pytest.raises(InputError) as caught:
            make_plan(config, 1000)
        assert f"batch of {batch}" in str(caught.value) and f"{learners} learners" in str(caught.value)


def test_every_stage_deals_the_global_batch() -> None:
    config = _config("0:2, 1:4, 2:3", 4.0, train={"epochs": 4.0, "batch": 12, "batch_mode": "global"})
    assert [stage.batch for stage in make_plan(config, 240).stages] == [6, 3, 4]
    config = _config("0:2, 1:4, 2:5", 4.0, train={"epochs": 4.0, "batch": 12, "batch_mode": "global"})
    with pytest.raises(InputError, match=r"multiple of 5, e\.g\. 15"):
        make_plan(config, 240)


@pytest.mark.parametrize(
    ("train", "steps", "mu", "gain"),
    [
        ({}, 4, 0.0, 1.0),
        ({}, 4, 0.5, 2.0),
        ({"local_momentum": 0.9}, 1, 0.0, 10.0),
        ({"local_momentum": 0.9, "local_momentum_at_reduction": "average"}, 4, 0.5, 20.0),
        # m after k steps from 0 under a constant gradient is (1 - beta^k)/(1 - beta): 1, 1.9, 2.71, 3.439
        ({"local_momentum": 0.9}, 4, 0.0, (1 + 1.9 + 2.71 + 3.439) / 4),
    ],
)
def test_the_effective_step(train: dict[str, Any], steps: int, mu: float, gain: float) -> None:
    config = _config("0:2", 4.0, train=train, averaging={"steps": steps, "momentum": mu})
    (stage,) = make_plan(config, 1000).stages
    assert math.isclose(effective_step(config, stage, 0.1), 0.1 * gain)


def test_a_forecast_has_the_rates_of_the_run() -> None:
    """A stage that keeps P is no growth: the ramp of the growth before it goes on, as in training."""
    tables = [
        {"at": 0, "learners": 2},
        {"at": 3, "learners": 8},
        {"at": 5, "learners": 8, "steps": 2},
    ]
    rate = {"scaling": "linear", "growth_warmup_epochs": 4.0, "decay": "cosine", "warmup_epochs": 1.0}
    config = _config(tables, 10.0, learning_rate=rate)
    plan = make_plan(config, 1000)
    history: list[Switch] = []
    rates: dict[int, list[float]] = {}
    for position, stage in _walk(plan):
        if not history or history[-1].learners != stage.learners:
            history.append(Switch(position, stage.learners))
        rates.setdefault(stage.start, []).append(
            learning_rate(config.learning_rate, position, 1000, plan.end, history, stage.round_samples)
        )
    expected = [(rates[stage.start][0], rates[stage.start][-1]) for stage in plan.stages]
    assert [row.rates for row in forecast(plan, config)] == expected
