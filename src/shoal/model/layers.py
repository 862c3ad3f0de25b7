"""The layers without windows or statistics: linear maps, activations, and the containers that join layers.

    net = Sequential(Conv2d(1, 16, 3, padding=1), ReLU(), Flatten(), Linear(1024, 10))

A tensor's name is its layer's place in the net and its own name, as "0.weight" or "3.body.0.weight".
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shoal.backend import Array
from shoal.kernels import layers as loops
from shoal.model.flat import Shape, Tensor
from shoal.model.layer import Layer, check_layer, check_sizes


class Linear(Layer):
    """y = x W + b, with W of shape (inputs, outputs); samples of shape (inputs,) become (outputs,)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        check_sizes("Linear", inputs=inputs, outputs=outputs)
        self.inputs, self.outputs, self.bias = inputs, outputs, bias

    def details(self) -> str:
        return f"{self.inputs}, {self.outputs}" + ("" if self.bias else ", bias=False")

    def tensors(self) -> tuple[Tensor, ...]:
        weight = Tensor("weight", (self.inputs, self.outputs), "weight")
        return (weight, Tensor("bias", (self.outputs,), "bias")) if self.bias else (weight,)

    def output_shape(self, input_shape: Shape) -> Shape:
        if len(input_shape) != 1:
            self.refuse(input_shape, "it takes one axis; put Flatten() or GlobalPool() before it")
        if input_shape[0] != self.inputs:
            self.refuse(input_shape, f"it takes {self.inputs} inputs; write Linear({input_shape[0]}, ...)")
        return (self.outputs,)

    def forward(self, x: Array, training: bool) -> Array:
        self._x = x
        y = self.scratch("y", (x.shape[0], self.outputs))
        self.xp.matmul(x, self.values["weight"], out=y)
        if self.bias:
            self.xp.add(y, self.values["bias"], out=y)
        return y

    def backward(self, dy: Array, want_dx: bool = True) -> Array | None:
        self.xp.matmul(self._x.T, dy, out=self.gradients["weight"])
        if self.bias:
            self.xp.matmul(self.scratch("ones", dy.shape[:1], fill=1), dy, out=self.gradients["bias"])
        if not want_dx:
            return None
        return self.xp.matmul(dy, self.values["weight"].T, out=self.scratch.lend(self._x.shape))


class ReLU(Layer):
    """y = max(x, 0)."""

    def forward(self, x: Array, training: bool) -> Array:
        self._y = self.xp.maximum(x, 0, out=self.scratch("y", x.shape))
        return self._y

    def backward(self, dy: Array, want_dx: bool = True) -> Array | None:
        dx = self.scratch.lend(dy.shape)
        loops.masked(self.xp, dy, self._y, dx)
        return dx


class Sigmoid(Layer):
    """y = 1 / (1 + exp(-x)), taken as (1 + tanh(x/2)) / 2, which cannot overflow."""

    def forward(self, x: Array, training: bool) -> Array:
        xp = self.xp
        self._y = y = xp.multiply(x, 0.5, out=self.scratch("y", x.shape))
        xp.tanh(y, out=y)
        xp.multiply(y, 0.5, out=y)
        return xp.add(y, 0.5, out=y)

    def backward(self, dy: Array, want_dx: bool = True) -> Array | None:
        xp = self.xp
        dx = xp.subtract(1, self._y, out=self.scratch.lend(dy.shape))
        xp.multiply(dx, self._y, out=dx)
        return xp.multiply(dx, dy, out=dx)


class Flatten(Layer):
    """All axes of a sample become one."""

    def output_shape(self, input_shape: Shape) -> Shape:
        return (math.prod(input_shape),)

    def forward(self, x: Array, training: bool) -> Array:
        self._shape = x.shape
        return x.reshape(x.shape[0], -1)

    def backward(self, dy: Array, want_dx: bool = True) -> Array | None:
        return dy.reshape(self._shape)


class Sequential(Layer):
    """One layer after another; `Sequential(a, b, head=c)` names its parts "0", "1" and "head"."""

    def __init__(self, *layers: Layer, **named: Layer) -> None:
        self._children = {**{str(place): layer for place, layer in enumerate(layers)}, **named}
        for layer in self._children.values():
            check_layer(layer, "Sequential")
        self._layers = tuple(self._children.values())
        trainable = [place for place, layer in enumerate(self._layers) if layer.trainable]
        self._first_trainable = min(trainable, default=len(self._layers))
        self.rename("")

    @property
    def children(self) -> Mapping[str, Layer]:
        return self._children

    def output_shape(self, input_shape: Shape) -> Shape:
        for layer in self._layers:
            input_shape = layer.output_shape(input_shape)
        return input_shape

    def forward(self, x: Array, training: bool) -> Array:
        for layer in self._layers:
            x = layer.forward(x, training)
        return x

    def backward(self, dy: Array, want_dx: bool = True) -> Array | None:
        last = 0 if want_dx else self._first_trainable
        given: Array = dy
        by: Array | None = dy
        for place in range(len(self._layers) - 1, last - 1, -1):
            dx = self._layers[place].backward(by, want_dx or place > last)
            self.scratch.release(by, given, dx)
            by = dx
        if want_dx:
            return by
        self.scratch.release(by, given)
        return None
