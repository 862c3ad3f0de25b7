"""Losses: what the net's outputs cost, each sample counted in float64.

A Loss gives the mean over a batch with its gradient for training, and the sum over samples for evaluation,
whose order is the batch's own so that the same chunk of samples always gives the same bits.
"""

from __future__ import annotations

import difflib
import math
from typing import Any

import numpy as np

from shoal.backend import Array, Backend
from shoal.errors import InputError
from shoal.model.flat import Shape
from shoal.model.layer import Scratch


class Loss:
    """The base of losses. `name` is what configs call it; `output_shape` is that of one output sample."""

    name = ""

    def __init__(self, backend: Backend, dtype: Any, output_shape: Shape) -> None:
        self.xp = backend.xp
        self.scratch = Scratch(backend, dtype)
        self.output_shape = output_shape

    def per_sample(self, outputs: Array, y: Array) -> Array:
        """The loss of each sample, float64 (batch,), in scratch."""
        raise NotImplementedError

    def gradient(self, y: Array) -> Array:
        """The gradient of the mean of the last `per_sample` by the outputs, in the dtype of the outputs."""
        raise NotImplementedError

    def correct(self, outputs: Array, y: Array) -> int:
        """How many samples have their right class on top; 0 where there are no classes."""
        raise NotImplementedError


class CrossEntropy(Loss):
    """-log softmax(outputs)[y] for class scores (classes,) and labels y, int64 (batch,)."""

    name = "cross-entropy"

    def __init__(self, backend: Backend, dtype: Any, output_shape: Shape) -> None:
        super().__init__(backend, dtype, output_shape)
        if len(output_shape) != 1:
            raise InputError(
                f"loss cross-entropy on outputs of shape {output_shape}: it takes one axis of class scores; "
                "end the net with Flatten() or GlobalPool() and a Linear layer"
            )

    def per_sample(self, outputs: Array, y: Array) -> Array:
        batch = len(outputs)
        if y.shape != (batch,):
            raise InputError(f"labels of shape {y.shape} for a batch of {batch}: cross-entropy takes one a sample")
        column, xp = (batch, 1), self.xp
        scores = self.scratch("scores", outputs.shape, np.float64)
        xp.copyto(scores, outputs)
        top = scores.max(axis=1, keepdims=True, out=self.scratch("top", column, np.float64))
        xp.subtract(scores, top, out=scores)
        self._powers = xp.exp(scores, out=self.scratch("powers", outputs.shape, np.float64))
        self._totals = self._powers.sum(axis=1, keepdims=True, out=self.scratch("totals", column, np.float64))
        rows = self.scratch.keep("rows", (batch,), lambda shape: xp.arange(*shape))
        losses = xp.log(self._totals, out=self.scratch("losses", column, np.float64))[:, 0]
        return xp.subtract(losses, scores[rows, y], out=losses)

    def gradient(self, y: Array) -> Array:
        xp, chances = self.xp, self._powers
        batch = len(chances)
        xp.divide(chances, self._totals, out=chances)
        chances[self.scratch.keep("rows", (batch,), lambda shape: xp.arange(*shape)), y] -= 1
        xp.multiply(chances, 1 / batch, out=chances)
        dy = self.scratch("dy", chances.shape)
        xp.copyto(dy, chances, casting="same_kind")
        return dy

    def correct(self, outputs: Array, y: Array) -> int:
        return int((outputs.argmax(axis=1) == y).sum())


class MeanSquaredError(Loss):
    """The mean over a sample's outputs of (output - y)^2, for targets y of as many numbers a sample."""

    name = "mse"

    def per_sample(self, outputs: Array, y: Array) -> Array:
        xp, batch = self.xp, len(outputs)
        shape = (batch, math.prod(self.output_shape))
        if len(y) != batch or y.size != math.prod(shape):
            raise InputError(
                f"targets of shape {y.shape} for outputs of shape {outputs.shape}: mse takes one number an output"
            )
        self._difference = difference = self.scratch("difference", shape, np.float64)
        xp.copyto(difference, outputs.reshape(shape))
        xp.subtract(difference, y.reshape(shape), out=difference)
        squares = xp.multiply(difference, difference, out=self.scratch("squares", shape, np.float64))
        losses = squares.sum(axis=1, out=self.scratch("losses", (batch,), np.float64))
        return xp.multiply(losses, 1 / shape[1], out=losses)

    def gradient(self, y: Array) -> Array:
        xp, difference = self.xp, self._difference
        xp.multiply(difference, 2 / difference.size, out=difference)
        dy = self.scratch("dy", (len(difference), *self.output_shape))
        xp.copyto(dy.reshape(difference.shape), difference, casting="same_kind")
        return dy

    def correct(self, outputs: Array, y: Array) -> int:
        return 0


LOSSES: dict[str, type[Loss]] = {loss.name: loss for loss in (CrossEntropy, MeanSquaredError)}


def find_loss(name: str) -> type[Loss]:
    """The loss of this name."""
    if name not in LOSSES:
        near = difflib.get_close_matches(name, LOSSES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"the losses are {', '.join(LOSSES)}"
        raise InputError(f"loss {name!r} is not known: {hint}")
    return LOSSES[name]
