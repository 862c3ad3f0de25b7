"""The learning rate: a pure function of the position and of the switches of P before it.

    rate = base * scaling(P) * warm-up * decay

It is evaluated at a round's start and held through the round; nothing is ever multiplied in place, so a
resume, a return to an old P or a repeated call cannot compound it. It is always > 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from shoal.config import LearningRate


class Switch(Struct, frozen=True):
    """From `position` (in samples) on there were `learners` learners."""

    position: int
    learners: int


def learning_rate(
    options: LearningRate,
    position: int,
    samples: int,
    end: int,
    history: Sequence[Switch],
    round_samples: int,
) -> float:
    """The rate of the round that starts at `position`.

    samples, end: size of the training set and length of the whole training, in samples.
    history: the switches of P up to and with the present one, oldest first.
    round_samples: P*K*B; a warm-up counts the round under way, so that the first rate is above 0.
    """
    scale = _scale(options, history[-1].learners)
    if options.growth_warmup_epochs and len(history) > 1 and history[-1].learners > history[-2].learners:
        before = _scale(options, history[-2].learners)
        done = (position - history[-1].position + round_samples) / (options.growth_warmup_epochs * samples)
        scale = before + (scale - before) * min(1.0, done)
    warmup = 1.0
    if options.warmup_epochs:
        warmup = min(1.0, (position + round_samples) / (options.warmup_epochs * samples))
    return options.base * scale * warmup * _decay(options, position, samples, end)


def _scale(options: LearningRate, learners: int) -> float:
    ratio = learners / options.base_learners
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[options.scaling]


def _decay(options: LearningRate, position: int, samples: int, end: int) -> float:
    if not isinstance(options.decay, str):
        return math.prod(factor for epoch, factor in options.decay if position >= epoch * samples)
    progress = position / end
    if options.decay == "cosine":
        left = (1 + math.cos(math.pi * progress)) / 2
    elif options.decay == "polynomial":
        left = (1 - progress) ** options.power
    else:
        return 1.0
    return options.floor + (1 - options.floor) * left
