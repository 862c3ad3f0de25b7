"""A least-squares fit of positive parameters to times, on the logarithm: relative errors count alike at 10 us and 1 s.

Levenberg and Marquardt's steps on the logarithms of the parameters, from many starting points, since a minimum of two
straight lines has valleys of its own. Deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Model = Callable[[np.ndarray], np.ndarray]
"""From positive parameters (k,) to the times of all points (n,)."""

_STARTS, _ITERATIONS, _SPREAD = 40, 200, 1.0
_STEP, _LONGEST = 1e-5, 1.0
_TINY = 1e-12


@dataclass(frozen=True)
class Fit:
    """The parameters, and the relative errors of the points: predicted over given, less 1."""

    parameters: np.ndarray
    errors: np.ndarray


def fit(model: Model, times: np.ndarray, guess: np.ndarray, starts: int = _STARTS) -> Fit:
    """The parameters near `guess` (k,) that describe `times` (n,) best, in the mean square of the logarithms."""
    rng, wanted = np.random.default_rng(0), np.log(times)

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.log(np.maximum(model(np.exp(logs)), _TINY)) - wanted

    spread = rng.normal(0, _SPREAD, (starts, len(guess)))
    spread[0] = 0
    found = [_descend(residuals, np.log(guess) + start) for start in spread]
    best = np.exp(min(found, key=lambda logs: float(np.sum(residuals(logs) ** 2))))
    return Fit(best, model(best) / times - 1)


def _descend(residuals: Model, logs: np.ndarray) -> np.ndarray:
    damping, unit = 1e-2, np.eye(len(logs))
    now = residuals(logs)
    for _ in range(_ITERATIONS):
        slopes = np.array([(residuals(logs + _STEP * axis) - now) / _STEP for axis in unit]).T
        step = np.linalg.solve(slopes.T @ slopes + damping * unit, -slopes.T @ now)
        there = logs + np.clip(step, -_LONGEST, _LONGEST)
        after = residuals(there)
        gained = now @ now - after @ after
        if gained > 0:
            logs, now, damping = there, after, damping / 3
        else:
            damping *= 4
        if 0 < gained < _TINY or damping > 1 / _TINY:
            break
    return logs
