"""Curves over seeds: mean and standard error at each position where any of the runs has a point.

The seeds of one config have their points at the same positions (`consumed`), so nothing is
interpolated; where a run has stopped early, the others make up the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal.report.runs import Group, Run, Series


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` seeds and its standard error; NaN where n is 0, or below 2 for the error."""

    mean: float
    error: float
    n: int


@dataclass(frozen=True)
class Curve:
    """`mean` and `error` (NaN with one seed) at positions `x`, all float64 (points,)."""

    x: np.ndarray
    mean: np.ndarray
    error: np.ndarray


Points = Callable[[Run, str], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""(run, axis) -> (consumed, x, y): a run's points, with the position that aligns them over seeds."""


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of `values` and its standard error, sqrt(variance / n) with n - 1 in the variance."""
    n = len(values)
    if n == 0:
        return Estimate(np.nan, np.nan, 0)
    error = float(np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else np.nan
    return Estimate(float(np.mean(values)), error, n)


def curve(group: Group, points: Points, axis: str) -> Curve:
    """The group's curve of `points` against the field `axis` of the log."""
    per_run = [points(run, axis) for run in group.runs]
    positions = np.unique(np.concatenate([consumed for consumed, _, _ in per_run]))
    x = np.full((len(per_run), len(positions)), np.nan)
    y = x.copy()
    for row, (consumed, run_x, run_y) in enumerate(per_run):
        column = np.searchsorted(positions, consumed)
        x[row, column], y[row, column] = run_x, run_y
    known = np.isfinite(y)
    count = known.sum(axis=0)
    keep = count > 0
    x, y, known, count = x[:, keep], y[:, keep], known[:, keep], count[keep]
    mean = np.where(known, y, 0.0).sum(axis=0) / count
    square = (np.where(known, y - mean, 0.0) ** 2).sum(axis=0)
    error = np.full(len(count), np.nan)
    several = count > 1
    error[several] = np.sqrt(square[several] / (count[several] - 1) / count[several])
    return Curve(np.where(known, x, 0.0).sum(axis=0) / count, mean, error)


def evaluated(field: str) -> Points:
    """The points of one field of the evaluations, e.g. "test_accuracy"."""

    def points(run: Run, axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        series = run.evaluations
        return series["consumed"], series[axis], series[field]

    return points


def training_loss(run: Run, axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean loss of the rounds up to each evaluation since the one before; of each round without any.

    Single rounds see a few dozen samples and scatter too much to compare.
    """
    rounds, ends = run.rounds, run.evaluations
    if not len(ends["consumed"]):
        return rounds["consumed"], rounds[axis], rounds["loss"]
    bins = np.searchsorted(ends["consumed"], rounds["consumed"])
    inside = bins < len(ends["consumed"])
    count = np.bincount(bins[inside], minlength=len(ends["consumed"]))
    total = np.bincount(bins[inside], rounds["loss"][inside], minlength=len(ends["consumed"]))
    mean = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
    return ends["consumed"], ends[axis], mean


def learners(rounds: Series, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """(x, learners): the learners from x[i] to x[i+1], to be drawn as a step line; x starts at 0."""
    x = np.concatenate([[0.0], rounds[axis]])
    return x, np.concatenate([rounds["learners"], rounds["learners"][-1:]])
