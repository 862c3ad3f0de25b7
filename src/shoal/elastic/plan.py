"""A schedule worked out for one training: positions in samples, and everything a stage sets.

A Plan is a pure function of the config and the size of the training set. It answers what holds at a
position, and `forecast` walks it without training: rounds, rate, learner-steps, serial steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from shoal.config import Config, Train
from shoal.elastic.schedule import Schedule
from shoal.errors import InputError
from shoal.sgd.rates import Switch, learning_rate


@dataclass(frozen=True)
class StagePlan:
    """What holds from position `start` (in samples) on: P, K, mu and the batch B of one learner's step."""

    start: int
    epoch: Fraction
    learners: int
    steps: int
    momentum: float
    batch: int

    @property
    def round_samples(self) -> int:
        """P*K*B, the samples of one round."""
        return self.learners * self.steps * self.batch

    def for_learners(self, learners: int, train: Train) -> StagePlan:
        """The same with another number of learners. Raises InputError where `batch_refusal` says why."""
        whole = self.batch * self.learners if train.batch_mode == "global" else self.batch
        return replace(self, learners=learners, batch=_batch(whole, train.batch_mode, learners))


@dataclass(frozen=True)
class Plan:
    """The stages of one training of `end` samples (E epochs) over a set of `samples`."""

    stages: tuple[StagePlan, ...]
    samples: int
    end: int

    def at(self, position: int) -> StagePlan:
        """The stage that a round starting at `position` belongs to."""
        return [stage for stage in self.stages if stage.start <= position][-1]


@dataclass(frozen=True)
class StageForecast:
    """One stage as it will run: whole rounds, the rate of its first and last round, and its cost in steps."""

    stage: StagePlan
    rounds: int
    consumed: int
    rates: tuple[float, float]

    @property
    def serial_steps(self) -> int:
        """K per round."""
        return self.rounds * self.stage.steps

    @property
    def learner_steps(self) -> int:
        """P*K per round."""
        return self.serial_steps * self.stage.learners


def make_plan(config: Config, samples: int) -> Plan:
    """The plan of `config` over a training set of `samples` samples. Raises InputError."""
    schedule = Schedule.of(config)
    total = Fraction(repr(config.train.epochs))
    end = math.ceil(total * samples)
    starts = [stage.start.epochs(total) for stage in schedule.stages]
    for i, start in enumerate(starts):
        if i and start <= starts[i - 1]:
            raise InputError(
                f"schedule {schedule}: the stage at {schedule.stages[i].start} does not start after the stage "
                f"at {schedule.stages[i - 1].start}; put the stages in increasing order"
            )
        if start >= total:
            raise InputError(
                f"schedule {schedule}: the stage at {schedule.stages[i].start} starts at or after the end of "
                f"{config.train.epochs:g} epochs; start it earlier, or raise train.epochs"
            )
    stages = []
    for stage, start in zip(schedule.stages, starts, strict=True):
        stages.append(
            StagePlan(
                start=math.ceil(start * samples),
                epoch=start,
                learners=stage.learners,
                steps=stage.steps or config.averaging.steps,
                momentum=config.averaging.momentum if stage.momentum is None else stage.momentum,
                batch=_batch(stage.batch or config.train.batch, config.train.batch_mode, stage.learners),
            )
        )
    plan = Plan(tuple(stages), samples, end)
    for planned, rounds, _ in _walk(plan):
        _check_length(plan, planned, rounds)
    return plan


def forecast(plan: Plan, config: Config) -> list[StageForecast]:
    """What training would do, stage by stage, without training."""
    rows: list[StageForecast] = []
    history: list[Switch] = []
    position = 0
    for stage, rounds, consumed in _walk(plan):
        if not history or history[-1].learners != stage.learners:
            history.append(Switch(position, stage.learners))
        last = consumed - stage.round_samples
        rates = [
            learning_rate(config.learning_rate, at, plan.samples, plan.end, history, stage.round_samples)
            for at in (position, last)
        ]
        rows.append(StageForecast(stage, rounds, consumed, (rates[0], rates[1])))
        position = consumed
    return rows


def warnings(plan: Plan) -> list[str]:
    """What is allowed but worth a second look."""
    return [
        f"at epoch {float(stage.epoch):g}, a round of {stage.learners} learners x {stage.steps} steps x batch "
        f"{stage.batch} is {stage.round_samples} of {plan.samples} samples: fewer than 4 rounds an epoch"
        for stage in plan.stages
        if 4 * stage.round_samples > plan.samples
    ]


def effective_step(config: Config, stage: StagePlan, rate: float) -> float:
    """The rate that plain SGD would need for the same long-run displacement per step.

    rate/(1-mu) for the reduction momentum, times 1/(1-beta) for local momentum that lives through a
    reduction. Reset after every K steps, m never fills up: the mean over the K steps of
    (1 - beta^k)/(1-beta) takes the place of 1/(1-beta).
    """
    beta, steps = config.train.local_momentum, stage.steps
    gain = 1 / (1 - beta)
    if steps > 1 and config.train.local_momentum_at_reduction == "reset":
        gain *= sum(1 - beta**k for k in range(1, steps + 1)) / steps
    return rate * gain / (1 - stage.momentum)


def batch_refusal(train: Train, learners: int) -> str:
    """Why so many learners cannot share a batch, or an empty text."""
    try:
        _batch(train.batch, train.batch_mode, learners)
    except InputError as error:
        return str(error)
    return ""


def _batch(batch: int, mode: str, learners: int) -> int:
    if mode == "per_learner":
        return batch
    if batch % learners:
        raise InputError(
            f'a batch of {batch} with train.batch_mode "global" cannot be dealt to {learners} learners evenly; '
            f"use a multiple of {learners}, e.g. {math.ceil(batch / learners) * learners}"
        )
    return batch // learners


def _ends(plan: Plan) -> Sequence[int]:
    return [*(stage.start for stage in plan.stages[1:]), plan.end]


def _walk(plan: Plan) -> Iterator[tuple[StagePlan, int, int]]:
    """(stage, its rounds, position after it): a round belongs to the stage that holds at its start."""
    position = 0
    for stage, end in zip(plan.stages, _ends(plan), strict=True):
        rounds = max(0, -(-(end - position) // stage.round_samples))
        position += rounds * stage.round_samples
        yield stage, rounds, position


def _check_length(plan: Plan, stage: StagePlan, rounds: int) -> None:
    length = _ends(plan)[plan.stages.index(stage)] - stage.start
    if length < stage.round_samples or not rounds:
        raise InputError(
            f"schedule: the stage at epoch {float(stage.epoch):g} lasts {length} samples, and one round of "
            f"{stage.learners} learners x {stage.steps} steps x batch {stage.batch} takes {stage.round_samples}"
            f"{'' if rounds else ' and the round before it runs past its end'}; make the stage longer, or use "
            "fewer learners or steps or a smaller batch there"
        )
