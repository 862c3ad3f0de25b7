"""Pooling: the largest or the mean value of each channel over windows, or the mean over the whole image.

A window that would reach beyond the image is left out, so samples (h, w, c) become (h', w', c) with
h' = (h - size) // stride + 1. All windows are handled at once, one place within the window after another.
"""

from __future__ import annotations

import numpy as np

from shoal.backend import Array
from shoal.kernels import layers as loops
from shoal.kernels.layer_twins import pixels_of
from shoal.model.flat import Shape
from shoal.model.layer import Layer, check_sizes


class _Windows(Layer):
    """What max and average pooling share: the windows. `stride` is `size` where it is not given."""

    def __init__(self, size: int, stride: int | None = None) -> None:
        check_sizes(type(self).__name__, size=size, stride=size if stride is None else stride)
        self.size = size
        self.stride = size if stride is None else stride
        self.windows = loops.Windows(self.size, self.stride)

    def details(self) -> str:
        return f"{self.size}, stride={self.stride}"

    def output_shape(self, input_shape: Shape) -> Shape:
        if len(input_shape) != 3:
            self.refuse(input_shape, "it takes images, whose axes are height, width and channels")
        height, width, channels = input_shape
        if min(height, width) < self.size:
            self.refuse(input_shape, "its window is larger than the image; use a smaller one")
        return (self.windows.along(height), self.windows.along(width), channels)

    def _outputs(self, x: Array) -> Array:
        """Scratch memory for the outputs of x."""
        batch, height, width, channels = self._shape = x.shape
        return self.scratch("y", (batch, self.windows.along(height), self.windows.along(width), channels))


class MaxPool(_Windows):
    """The largest value of each window; its gradient goes to the first place that holds that value.

    `_winner` numbers that place for each window.
    """

    def forward(self, x: Array, training: bool) -> Array:
        y = self._outputs(x)
        self._winner = self.scratch("winner", y.shape, np.int16) if training else None
        loops.max_pool(self.xp, x, self.windows, y, self._winner)
        return y

    def backward(self, dy: Array, want_dx: bool = True) -> Array | None:
        dx = self.scratch.lend(self._shape)
        loops.max_pool_gradient(self.xp, dy, self._winner, self.windows, dx)
        return dx


class AveragePool(_Windows):
    """The mean of each window."""

    def forward(self, x: Array, training: bool) -> Array:
        y = self._outputs(x)
        places = pixels_of(x, self.windows)
        self.xp.copyto(y, next(places))
        for place in places:
            self.xp.add(y, place, out=y)
        return self.xp.multiply(y, 1 / self.size**2, out=y)

    def backward(self, dy: Array, want_dx: bool = True) -> Array | None:
        dx = self.scratch.lend(self._shape)
        dx.fill(0)
        share = self.xp.multiply(dy, 1 / self.size**2, out=self.scratch("share", dy.shape))
        for target in pixels_of(dx, self.windows):
            self.xp.add(target, share, out=target)
        return dx


class GlobalPool(Layer):
    """The mean of each channel over the image: samples (h, w, c) become (c,)."""

    def output_shape(self, input_shape: Shape) -> Shape:
        if len(input_shape) != 3:
            self.refuse(input_shape, "it takes images, whose axes are height, width and channels")
        return input_shape[2:]

    def forward(self, x: Array, training: bool) -> Array:
        self._shape = batch, height, width, channels = x.shape
        y = self.scratch("y", (batch, channels))
        x.reshape(batch, height * width, channels).sum(axis=1, out=y)
        return self.xp.multiply(y, 1 / (height * width), out=y)

    def backward(self, dy: Array, want_dx: bool = True) -> Array | None:
        batch, height, width, channels = self._shape
        dx = self.scratch.lend(self._shape)
        flat = dx.reshape(batch, height * width, channels)
        self.xp.multiply(dy[:, None, :], 1 / (height * width), out=flat)
        return dx
