"""Residual blocks, and the gate that SENet puts at their end."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shoal.backend import Array
from shoal.errors import InputError
from shoal.kernels import layers as loops
from shoal.model.flat import Shape
from shoal.model.layer import Joint, Layer, check_layer, check_sizes
from shoal.model.layers import Linear, ReLU, Sequential, Sigmoid


class Residual(Layer):
    """y = body(x) + shortcut(x); without a shortcut, y = body(x) + x.

    `joint` is a layer at the body's end that adds too, in its own pass: y = joint(body(x)) + shortcut(x), and all
    of it through ReLU where the joint has one.
    """

    def __init__(self, body: Layer, shortcut: Layer | None = None, joint: Joint | None = None) -> None:
        parts = {"body": body, "joint": joint, "shortcut": shortcut}
        self._children = {name: layer for name, layer in parts.items() if layer is not None}
        for layer in self._children.values():
            check_layer(layer, "Residual")
        if joint is not None and not isinstance(joint, Joint):
            raise InputError(f"Residual was given the joint {joint!r}: give it a BatchNorm or a SqueezeExcitation")
        self.body, self.shortcut, self.joint = body, shortcut, joint
        self.rename("")

    @property
    def children(self) -> Mapping[str, Layer]:
        return self._children

    def output_shape(self, input_shape: Shape) -> Shape:
        through = self.body.output_shape(input_shape)
        through = self.joint.output_shape(through) if self.joint else through
        beside = self.shortcut.output_shape(input_shape) if self.shortcut else input_shape
        if through != beside:
            rule = f"its body gives {through} and its shortcut {beside}; give it a shortcut that gives {through}"
            self.refuse(input_shape, rule)
        return through

    def forward(self, x: Array, training: bool) -> Array:
        through = self.body.forward(x, training)
        beside = self.shortcut.forward(x, training) if self.shortcut else x
        if self.joint:
            return self.joint.join(through, beside, training)
        return self.xp.add(through, beside, out=self.scratch("y", through.shape))

    def backward(self, dy: Array, want_dx: bool = True) -> Array | None:
        into, over = self.joint.part(dy) if self.joint else (dy, dy)
        through = self.body.backward(into, want_dx)
        self.scratch.release(into, dy, through)
        beside = self.shortcut.backward(over, want_dx) if self.shortcut else over
        dx = None
        if want_dx:
            assert through is not None
            dx = self.xp.add(through, beside, out=self.scratch.lend(through.shape))
        for part in (through, beside, over):
            self.scratch.release(part, dy)
        return dx


class SqueezeExcitation(Joint):
    """y = x * sigmoid(fc2(relu(fc1(mean of x over the image)))), a factor for each channel of each image.

    Samples (h, w, features) keep their shape; fc1 goes to features / ratio. J. Hu et al., arXiv 1709.01507.
    """

    def __init__(self, features: int, ratio: int = 16) -> None:
        check_sizes("SqueezeExcitation", features=features, ratio=ratio)
        self.features = features
        squeezed = max(1, features // ratio)
        self.gate = Sequential(
            fc1=Linear(features, squeezed), relu=ReLU(), fc2=Linear(squeezed, features), sigmoid=Sigmoid()
        )
        self.rename("")

    @property
    def children(self) -> Mapping[str, Layer]:
        return {"gate": self.gate}

    def details(self) -> str:
        return f"{self.features}"

    def output_shape(self, input_shape: Shape) -> Shape:
        if len(input_shape) != 3 or input_shape[-1] != self.features:
            self.refuse(input_shape, f"it takes images of {self.features} channels")
        return input_shape

    def join(self, x: Array, beside: Array | None, training: bool) -> Array:
        sums, means = self._sums(x), self.scratch("means", (len(x), self.features))
        loops.moments(self.xp, x, sums)
        mean = self.xp.multiply(sums[0], len(x) * self.features / x.size, out=sums[0])
        self.xp.copyto(means, mean, casting="same_kind")
        self._x, self._scale = x, self.gate.forward(means, training)
        y = self.scratch("y", x.shape)
        loops.affine(self.xp, x, self._scale, None, beside, y)
        return y

    def part(self, dy: Array) -> tuple[Array, Array]:
        """dx = dy * scale + a pixel's share of the gradient that came through the mean."""
        sums, by_scale = self._sums(dy), self.scratch("by scale", self._scale.shape)
        loops.gradient_moments(self.xp, dy, self._x, None, None, sums)
        self.xp.copyto(by_scale, sums[1], casting="same_kind")
        by_mean = self.gate.backward(by_scale)
        assert by_mean is not None
        share = self.xp.multiply(by_mean, len(dy) * self.features / dy.size, out=by_scale)
        self.scratch.release(by_mean)
        dx = self.scratch.lend(dy.shape)
        loops.affine(self.xp, dy, self._scale, share, None, dx)
        return dx, dy

    def backward(self, dy: Array, want_dx: bool = True) -> Array | None:
        return self.part(dy)[0]

    def _sums(self, x: Array) -> Array:
        """Of each channel of each image of x."""
        return self.scratch("sums", (2, len(x), self.features), np.float64)
