"""Dropout whose mask is a function of the sample, so that it is the same on whichever rank computes it.

In training each number of a sample is kept with probability 1 - rate and divided by that, or becomes 0 (N.
Srivastava et al., JMLR 15, 2014). Which ones is decided by 16 bits each of a word keyed by (seed, the layer's name,
the sample's position in the sample order); the position stands for (epoch, sample). In evaluation, and where
statistics are recalibrated, dropout is the identity.
"""

from __future__ import annotations

import math

import numpy as np

from shoal.backend import Array
from shoal.data.keyed import rows
from shoal.errors import InputError
from shoal.model.layer import Layer

_LEVELS = 2**16
_DRAWS_PER_WORD = 4


class Dropout(Layer):
    """Samples of any shape keep it. The rate is rounded to 16 bits, and the factor is exact for that.

    The Model sets `seed`, and before each step `position`: that of the batch's first sample, None for no dropout.
    """

    seed = 0
    position: int | None = None

    def __init__(self, rate: float = 0.5) -> None:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise InputError(f"Dropout with rate={rate!r}: give a number in [0, 1), the share that is dropped")
        self.rate = rate
        self._dropped_levels = min(round(rate * _LEVELS), _LEVELS - 1)

    def details(self) -> str:
        return f"{self.rate:g}"

    def forward(self, x: Array, training: bool) -> Array:
        self._mask = self._draw(x) if training and self.position is not None and self._dropped_levels else None
        return x if self._mask is None else self.xp.multiply(x, self._mask, out=self.scratch("y", x.shape))

    def _draw(self, x: Array) -> Array:
        """0 where a number is dropped, else 1 / (1 - rate)."""
        assert self.position is not None
        count, size = len(x), math.prod(x.shape[1:])
        words = rows(self.seed, f"dropout {self.name}", self.position, count, -(-size // _DRAWS_PER_WORD))
        draws = np.ascontiguousarray(words, "<u8").view("<u2")[:, :size].reshape(x.shape)
        kept = self.scratch("kept", x.shape, bool)
        self.xp.greater_equal(self.xp.asarray(draws), self._dropped_levels, out=kept)
        mask = self.scratch("mask", x.shape)
        self.xp.copyto(mask, kept)
        return self.xp.multiply(mask, _LEVELS / (_LEVELS - self._dropped_levels), out=mask)

    def backward(self, dy: Array, want_dx: bool = True) -> Array | None:
        return dy if self._mask is None else self.xp.multiply(dy, self._mask, out=self.scratch("dx", dy.shape))
