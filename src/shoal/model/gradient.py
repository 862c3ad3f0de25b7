"""A net with its loss: from a flat buffer of weights and a batch to a flat gradient.

A Model works on a copy of the net it is given, so one net can be the description of many models. It reads
the weights from, and writes the gradient to, the flat buffers it is bound to, and can go back to buffers that it
was bound to before; several learners share a Model. The same weights and batch give the same bits, whatever ran
before.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from shoal.backend import ALIGNMENT_BYTES, Array, Backend, address
from shoal.data.keyed import uniform
from shoal.errors import InputError
from shoal.model.dropout import Dropout
from shoal.model.flat import Layout, Piece, Shape, Tensor
from shoal.model.layer import Layer, Scratch, check_layer
from shoal.model.losses import find_loss
from shoal.model.normalisation import BatchNorm


@dataclass(frozen=True)
class Binding:
    """The views of one set of buffers: of each layer its tensors and their gradients, by its own names."""

    layers: tuple[tuple[Layer, dict[str, Array], dict[str, Array]], ...]
    gradient: Array | None


class Model:
    """A net for samples of `sample_shape`, its `layout`, and its loss by name.

    `output_shape` is the shape of one output sample, `outputs` the count of its numbers; `seed` keys what layers
    draw in training. InputError where
    the layers do not fit the samples or each other.
    """

    def __init__(
        self, net: Layer, sample_shape: Shape, loss: str, backend: Backend, dtype: Any = np.float32, seed: int = 0
    ) -> None:
        check_layer(net, "Model")
        self.net = copy.deepcopy(net)
        self.net.rename("")
        self._layers = tuple(self.net.walk())
        _check_distinct(self._layers)
        self._dropouts = tuple(layer for layer in self._layers if isinstance(layer, Dropout))
        for dropout in self._dropouts:
            dropout.seed = seed
        self.sample_shape = tuple(sample_shape)
        self.output_shape = self.net.output_shape(self.sample_shape)
        self.outputs = math.prod(self.output_shape)
        self.backend, self.dtype = backend, np.dtype(dtype)
        self.loss = find_loss(loss)(backend, self.dtype, self.output_shape)
        self.net.prepare(backend, self.dtype)
        self._scratch = Scratch(backend, self.dtype)
        self._gradient: Array | None = None
        self.layout = Layout(
            Tensor(_full_name(layer, one), one.shape, one.kind, one.initial)
            for layer in self._layers
            for one in layer.tensors()
        )

    def initialise(self, flat: Array, seed: int) -> None:
        """Set the whole of `flat` (layout.size) to the start that `seed` gives.

        Weights are uniform within sqrt(6 / fan_in) of 0 (K. He et al., arXiv 1502.01852), keyed by the
        tensor's name, so they do not depend on the other layers or on any order; all else is constant.
        """
        flat.fill(0)
        views = self.layout.views(flat)
        for tensor in self.layout.tensors:
            view = views[tensor.name]
            if tensor.kind == "weight":
                bound = math.sqrt(6 / tensor.fan_in)
                values = (2 * uniform(seed, f"initial {tensor.name}", 0, 0, tensor.size) - 1) * bound
                view[...] = self.backend.xp.asarray(values.astype(self.dtype).reshape(tensor.shape))
            else:
                view.fill(tensor.initial)

    def bind(self, weights: Array, gradient: Array | None = None, statistics: Array | None = None) -> Binding:
        """Work on these aligned buffers from now on; returns what `use` takes to come back to them.

        weights (layout.size) is not written, but for the running statistics, which are those of `statistics`
        (layout.size) where it is given. gradient (layout.parameters) is cleared; without one the model can only
        evaluate."""
        layout = self.layout
        for flat, size in ((weights, layout.size), (gradient, layout.parameters), (statistics, layout.size)):
            aligned = flat is None or not size or address(flat) % ALIGNMENT_BYTES == 0
            if flat is not None and (flat.shape != (size,) or flat.dtype != self.dtype or not aligned):
                raise ValueError(f"a flat buffer must be aligned, {self.dtype} and have {size} elements")
        values, gradients = layout.views(weights), {}
        if statistics is not None:
            apart = layout.views(statistics)
            values |= {one.name: apart[one.name] for one in layout.tensors if one.kind == "statistic"}
        if gradient is not None:
            gradient.fill(0)
            gradients = layout.views(gradient)
        binding = Binding(
            tuple((layer, _own(layer, values), _own(layer, gradients)) for layer in self._layers), gradient
        )
        self.use(binding)
        return binding

    def use(self, binding: Binding) -> None:
        """Work on the buffers of an earlier `bind`, as they are."""
        self._gradient = binding.gradient
        for layer, values, gradients in binding.layers:
            layer.bind(values, gradients)

    def gradient(self, x: Array, y: Array, position: int = 0, whole: bool = True) -> float:
        """The mean loss of a batch, whose gradient is then in `pieces`; moves the running statistics.

        position: that of the batch's first sample in the sample order, which keys what layers draw.
        whole: whether the gradient must be in the gradient buffer; these layers always make it there."""
        self._draw_at(position)
        with np.errstate(over="ignore", invalid="ignore"):
            outputs = self.net.forward(self._taken(x), True)
            loss = float(self.loss.per_sample(outputs, y).sum()) / len(outputs)
            self.net.backward(self.loss.gradient(y), False)
        self.net.scratch.pool.release_all()
        return loss

    @property
    def pieces(self) -> list[Piece]:
        """The last gradient; the gaps of the layout may be left out. Valid until the next."""
        assert self._gradient is not None
        return [(slice(0, self.layout.parameters), self._gradient)]

    def evaluate(self, x: Array, y: Array) -> tuple[float, int]:
        """The sum of the samples' losses, in float64, and how many are classified right (0 for mse)."""
        with np.errstate(over="ignore", invalid="ignore"):
            outputs = self.net.forward(self._taken(x), False)
            return float(self.loss.per_sample(outputs, y).sum()), self.loss.correct(outputs, y)

    def predict(self, x: Array) -> Array:
        """The outputs for a batch in evaluation, as a new array (batch, *output_shape)."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self.net.forward(self._taken(x), False).copy()

    def recalibrate(self, batches: Iterable[Array]) -> None:
        """Set the running statistics to the mean of the batch statistics over these batches, of equal weight."""
        self._draw_at(None)
        norms = [layer for layer in self._layers if isinstance(layer, BatchNorm)]
        if not norms:
            return
        try:
            for seen, x in enumerate(batches):
                for norm in norms:
                    norm.share = 1 / (seen + 1)
                self.net.forward(self._taken(x), True)
        finally:
            for norm in norms:
                norm.share = norm.momentum

    def _draw_at(self, position: int | None) -> None:
        for dropout in self._dropouts:
            dropout.position = position

    @property
    def scratch_bytes(self) -> int:
        """The working memory held now; it grows only with batch sizes not met before."""
        parts = [self._scratch, self.loss.scratch, *(layer.scratch for layer in self._layers)]
        return self.net.scratch.pool.total_bytes + sum(part.total_bytes for part in parts)

    def _taken(self, x: Array) -> Array:
        """The batch in aligned memory of the model's dtype: no bit may depend on where the caller's x lies."""
        if x.shape[1:] != self.sample_shape or len(x) == 0:
            raise InputError(
                f"a batch of shape {x.shape} for a net that takes samples of shape {self.sample_shape}: "
                "give it (batch, *sample_shape)"
            )
        taken = self._scratch("x", x.shape)
        self.backend.xp.copyto(taken, x, casting="same_kind")
        return taken


def _own(layer: Layer, views: dict[str, Array]) -> dict[str, Array]:
    """Those of the views that are of this layer's own tensors, by their own names."""
    names = {one.name: _full_name(layer, one) for one in layer.tensors()}
    return {own: views[full] for own, full in names.items() if full in views}


def _full_name(layer: Layer, tensor: Tensor) -> str:
    return f"{layer.name}.{tensor.name}" if layer.name else tensor.name


def _check_distinct(layers: tuple[Layer, ...]) -> None:
    """InputError where one layer object stands in two places: its memory and its last inputs are one."""
    seen: set[int] = set()
    for layer in layers:
        if id(layer) in seen:
            raise InputError(f"layer {layer.title} stands in the net more than once: make a layer for each place")
        seen.add(id(layer))


class FittingData(Protocol):
    """What `check_fit` reads of a data set."""

    @property
    def name(self) -> str: ...
    @property
    def sample_shape(self) -> Shape: ...
    @property
    def classes(self) -> int: ...
    @property
    def target_shape(self) -> Shape: ...


def check_fit(data: FittingData, model: Model) -> None:
    """InputError where the model cannot learn from this data set; `data.classes` is 0 for regression."""
    if tuple(data.sample_shape) != model.sample_shape:
        raise InputError(
            f"the net takes samples of shape {model.sample_shape}, but data set {data.name!r} has "
            f"{tuple(data.sample_shape)}: build the net for that shape"
        )
    if model.loss.name == "cross-entropy":
        if not data.classes:
            raise InputError(
                f"loss 'cross-entropy' needs class labels, but data set {data.name!r} has regression targets: "
                "use loss 'mse'"
            )
        if model.outputs < data.classes:
            raise InputError(
                f"the net has {model.outputs} outputs, but data set {data.name!r} has {data.classes} classes: "
                "give its last layer an output for each class"
            )
    elif data.classes:
        raise InputError(
            f"loss {model.loss.name!r} needs regression targets, but data set {data.name!r} has class labels: "
            "use loss 'cross-entropy'"
        )
    elif math.prod(data.target_shape) != model.outputs:
        raise InputError(
            f"the net has {model.outputs} outputs, but data set {data.name!r} has targets of shape "
            f"{data.target_shape}: give its last layer an output for each number"
        )
