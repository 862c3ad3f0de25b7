"""The method in plain NumPy, in float64, in one process: what shoal is compared with. It uses nothing of shoal.

The net is a multilayer perceptron with ReLU and softmax cross-entropy: parameters [W1, b1, W2, b2, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Parameters = list[np.ndarray]


@dataclass(frozen=True)
class Options:
    """mu and beta are the reduction and the local momentum; `average` is of local momentum at a reduction."""

    mu: float = 0.0
    per_rate: bool = False
    beta: float = 0.0
    nesterov: bool = False
    average: bool = False
    weight_decay: float = 0.0


def gradient(w: Parameters, x: np.ndarray, y: np.ndarray) -> tuple[float, Parameters]:
    """The mean loss of a batch x (n, features), y (n,), and its gradient."""
    inputs = [x.reshape(len(x), -1)]
    for weight, bias in zip(w[:-2:2], w[1:-2:2], strict=True):
        inputs.append(np.maximum(inputs[-1] @ weight + bias, 0))
    scores = inputs[-1] @ w[-2] + w[-1]
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    loss = -np.log(chances[rows, y]).mean()
    chances[rows, y] -= 1
    back, found = chances / len(y), []
    for weight, value in zip(w[-2::-2], reversed(inputs), strict=True):
        found += [back.sum(axis=0), value.T @ back]
        back = (back @ weight.T) * (value > 0)
    return float(loss), found[::-1]


def train(
    initial: Parameters,
    x: np.ndarray,
    y: np.ndarray,
    order: np.ndarray,
    rounds: Sequence[tuple[int, int, int, float]],
    options: Options,
) -> tuple[Parameters, list[float]]:
    """The parameters after `rounds` of (P, K, B, rate), taking samples in `order`, and each round's mean loss."""
    o, c, losses = options, 0, []
    a = [np.array(array, float) for array in initial]
    v, m = [0 * p for p in a], [0 * p for p in a]
    for learners, steps, batch, rate in rounds:
        models, momenta, gradients, seen = [], [], [], []
        for j in range(learners):
            w, own = [p.copy() for p in a], [p.copy() for p in m]
            for k in range(steps):
                start = c + k * learners * batch + j * batch
                chosen = order[start : start + batch]
                loss, g = gradient(w, x[chosen], y[chosen])
                g = [one + o.weight_decay * p if p.ndim == 2 else one for one, p in zip(g, w, strict=True)]
                own, step = _momentum(own, g, o)
                w = [p - rate * one for p, one in zip(w, step, strict=True)]
                seen.append(loss)
            models, momenta, gradients = [*models, w], [*momenta, own], [*gradients, g]
        d = [one - p for one, p in zip(_mean(models), a, strict=True)]
        if steps == 1 and o.beta:
            m, step = _momentum(m, _mean(gradients), o)
            d = [-rate * one for one in step]
        else:
            m = _mean(momenta) if o.average else [0 * p for p in a]
        scale = rate if o.per_rate else 1.0
        v = [o.mu * old + new / scale for old, new in zip(v, d, strict=True)]
        a = [p + scale * one for p, one in zip(a, v, strict=True)]
        c += learners * steps * batch
        losses.append(float(np.mean(seen)))
    return a, losses


def _momentum(m: Parameters, g: Parameters, o: Options) -> tuple[Parameters, Parameters]:
    """m <- beta*m + g, and the step: m, or g + beta*m."""
    m = [o.beta * old + new for old, new in zip(m, g, strict=True)]
    return m, [new + o.beta * one for new, one in zip(g, m, strict=True)] if o.nesterov else m


def _mean(models: Sequence[Parameters]) -> Parameters:
    return [np.mean(arrays, axis=0) for arrays in zip(*models, strict=True)]
