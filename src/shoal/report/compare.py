"""Runs side by side: accuracy and cost over seeds, and the cost of reaching a target.

Costs are counted (serial steps, learner-steps) or measured (rank-seconds); see the docs for the words.
The cost to a target is that of the first evaluation at or above it, on the validation set where the runs
hold one out, else on the test set. Its mean is over the seeds that reached the target; where not all
did, that is said ("2/3"), for such a mean flatters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.errors import InputError
from shoal.report.curves import Estimate, estimate
from shoal.report.runs import Group, Run, group_runs, load_runs, number

Value = Callable[[Run], "float | None"]


@dataclass(frozen=True)
class ToTarget:
    """What it took to reach `target` (a fraction) on the set `measure`; means over the seeds that did."""

    target: float
    measure: str
    seeds: int
    reached: int
    serial_steps: Estimate
    learner_steps: Estimate


@dataclass(frozen=True)
class Row:
    """One group: `seeds` runs of which `ended` have ended; accuracy in percent, costs as means over seeds.

    Where some runs have ended the figures are of these; where none has, of the last evaluations so far.
    """

    label: str
    seeds: int
    ended: int
    accuracy: Estimate
    serial_steps: Estimate
    learner_steps: Estimate
    allocated_rank_s: Estimate
    busy_rank_s: Estimate
    to_target: ToTarget | None


@dataclass(frozen=True)
class Paired:
    """Differences a - b over the seeds that both groups have a value for; mean and standard error."""

    seeds: tuple[int, ...]
    difference: Estimate


def compare(directories: Iterable[Path], target: float | None = None) -> list[Row]:
    """A row per config of the runs in `directories`; `target` is a fraction, or a percentage above 1."""
    return rows(group_runs(load_runs(directories)), target)


def rows(groups: Iterable[Group], target: float | None = None) -> list[Row]:
    """A row per group, in their order."""
    target = None if target is None else fraction(target)
    return [_row(group, target) for group in groups]


def fraction(target: float) -> float:
    """A target accuracy as a fraction: 0.97 and 97 are the same; InputError outside (0, 100]."""
    if not 0 < target <= 100:
        raise InputError(
            f"the target accuracy {target:g} is not between 0 and 100; "
            "give a fraction such as 0.97 or a percentage such as 97"
        )
    return target / 100 if target > 1 else target


def final_accuracy(run: Run) -> float | None:
    """The test accuracy at the end, in percent; of the last evaluation where the run has not ended."""
    last = number(((run.end or {}).get("test") or {}).get("accuracy"))
    series = run.evaluations["test_accuracy"]
    if np.isnan(last) and len(series):
        last = float(series[-1])
    return None if np.isnan(last) else 100 * last


def total(field: str) -> Value:
    """A run's cumulative cost at its last round: serial_steps, learner_steps, busy_rank_s, ..."""

    def value(run: Run) -> float | None:
        series = run.rounds[field]
        return float(series[-1]) if len(series) else None

    return value


def cost_to(target: float, field: str) -> Value:
    """The cost `field` at the first evaluation at or above `target` (a fraction); None if never."""

    def value(run: Run) -> float | None:
        reached = np.flatnonzero(run.evaluations[f"{run.measure}_accuracy"] >= target)
        return float(run.evaluations[field][reached[0]]) if len(reached) else None

    return value


def over_seeds(runs: Iterable[Run], value: Value) -> Estimate:
    """Mean and standard error of `value` over the runs that have one."""
    return estimate([number for run in runs if (number := value(run)) is not None])


def paired(group_a: Group, group_b: Group, value: Value = final_accuracy) -> Paired:
    """The difference a - b of `value` (default: final test accuracy in percent) seed by seed."""
    a = {run.seed: value(run) for run in group_a.runs}
    b = {run.seed: value(run) for run in group_b.runs}
    differences = {}
    for seed in sorted(a.keys() & b.keys()):
        left, right = a[seed], b[seed]
        if left is not None and right is not None:
            differences[seed] = left - right
    return Paired(tuple(differences), estimate(list(differences.values())))


def _row(group: Group, target: float | None) -> Row:
    ended = [run for run in group.runs if run.end is not None]
    counted = ended or list(group.runs)
    return Row(
        label=group.label,
        seeds=len(group.runs),
        ended=len(ended),
        accuracy=over_seeds(counted, final_accuracy),
        serial_steps=over_seeds(counted, total("serial_steps")),
        learner_steps=over_seeds(counted, total("learner_steps")),
        allocated_rank_s=over_seeds(counted, total("allocated_rank_s")),
        busy_rank_s=over_seeds(counted, total("busy_rank_s")),
        to_target=None if target is None else _to_target(counted, target),
    )


def _to_target(runs: list[Run], target: float) -> ToTarget:
    serial = over_seeds(runs, cost_to(target, "serial_steps"))
    learner = over_seeds(runs, cost_to(target, "learner_steps"))
    return ToTarget(target, runs[0].measure, len(runs), serial.n, serial, learner)
