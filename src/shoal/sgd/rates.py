"""The learning rate: a pure function of the position and of the switches of P before it.

    rate = base * scaling(P) * warm-up * decay

It is evaluated at a round's start and held through the round; nothing is ever multiplied in place, so a
resume, a return to an old P or a repeated call cannot compound it. It is always > 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from msgspec import Struct

from shoal.config import LearningRate

_LEAST = 1e-30
"""No product of decays may round to 0: the rate divides, where velocity = "per_rate"."""


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
    scale = _ramped_scale(options, position + round_samples, samples, history)
    warmup = 1.0
    if options.warmup_epochs:
        warmup = min(1.0, (position + round_samples) / (options.warmup_epochs * samples))
    return max(_LEAST, options.base * scale * warmup * _decay(options, position, samples, end))


def _ramped_scale(options: LearningRate, until: int, samples: int, history: Sequence[Switch]) -> float:
    """The scaling factor; after a growth it ramps from where it stood, which may itself be on a ramp."""
    scale = _scale(options, history[-1].learners)
    if not options.growth_warmup_epochs or len(history) < 2 or history[-1].learners <= history[-2].learners:
        return scale
    switch = history[-1].position
    before = _ramped_scale(options, switch, samples, history[:-1])
    return before + (scale - before) * min(1.0, (until - switch) / (options.growth_warmup_epochs * samples))


def _scale(options: LearningRate, learners: int) -> float:
    ratio = learners / options.base_learners
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[options.scaling]


def _decay(options: LearningRate, position: int, samples: int, end: int) -> float:
    if not isinstance(options.decay, str):
        return math.prod(factor for epoch, factor in options.decay if position >= Fraction(repr(epoch)) * samples)
    remaining = (end - position) / end
    if options.decay == "cosine":
        left = math.sin(math.pi / 2 * remaining) ** 2
    elif options.decay == "polynomial":
        left = remaining**options.power
    else:
        return 1.0
    return options.floor + (1 - options.floor) * left
