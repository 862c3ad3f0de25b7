"""A PyTorch module in the place of a net of shoal's layers: its tensors become views of the flat buffers.

    layout     trained parameters | statistics: buffers (running statistics) and parameters that are frozen
    step       p.data and buffers are views of the weights; p.grad is the gradient's piece, or a view of the gradient

A step begins with p.grad as None, so that autograd hands over the gradient it has made. The local step reads it where
it is. Where the gradient must be whole, it is put into the view at once, while it is in the cache, which costs less
than clearing the view first and adding to it. A parameter without a gradient gets zeros. Buffers of whole numbers or
truth values are float32 in the layout, averaged as all statistics, and rounded to what they are.

The generators that dropout and the like draw from are seeded before each step by the position of its first sample,
so the same learners give the same bits on any ranks.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.backend import ALIGNMENT_BYTES, Array, Backend, address
from shoal.data import generators
from shoal.data.keyed import raw
from shoal.errors import InputError
from shoal.model.flat import Layout, Piece, Shape
from shoal.model.module import Buffer, buffers, declared
from shoal.model.trainable import ModelData, OwnModel

_WORDS = 2**64
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_LOSSES: dict[str, tuple[Any, ...]] = {
    "cross-entropy": (nn.functional.cross_entropy, nn.CrossEntropyLoss),
    "mse": (nn.functional.mse_loss, nn.MSELoss),
}
_OF_USERS_CODE = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AttributeError)


@dataclass(frozen=True)
class Binding:
    """The views of one set of buffers, each beside the module's tensor that it is for.

    whole: numbers in the layout beside the array that holds them as what they are."""

    values: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    gradient: Array | None
    gradients: dict[torch.Tensor, torch.Tensor]
    whole: tuple[tuple[Array, Array], ...]


class Model(OwnModel):
    """A module and its loss, for `shoal.train(model=shoal.torch.Model(module, loss), ...)`.

    module: built on every rank; the master's values are what training starts from, as with DistributedDataParallel.
      It is trained in place: after `shoal.train` it has the final parameters, on every rank.
    loss: "cross-entropy", "mse", or a function of (outputs, targets) or torch.nn loss that gives the batch's mean.
    channels: where images have their channels, "first", or "last" as in shoal's own sets; the module is then handed
      a view with channels first.
    """

    def __init__(self, module: nn.Module, loss: str | Loss = "cross-entropy", channels: str = "first") -> None:
        if not isinstance(module, nn.Module):
            raise InputError(f"module is a {type(module).__name__}; give a torch.nn.Module, built")
        if channels not in ("first", "last"):
            raise InputError(f"channels is {channels!r}; give first, or last for images (height, width, channels)")
        self.module, self._loss, self.loss_name = module, *_find_loss(loss)
        self._channels_last = channels == "last"
        self._tensors: dict[str, torch.Tensor] = {}
        self._trained: tuple[tuple[slice, torch.Tensor], ...] = ()
        self._buffers: list[Buffer] = []
        self._binding: Binding | None = None
        self._whole_gradient = True
        self._hooks: list[Any] = []
        self._was_training = module.training

    # --- before and after training

    def prepare(self, data: ModelData, backend: Backend, seed: int) -> None:
        self.backend, self.sample_shape = backend, tuple(data.sample_shape)
        self._step_word, self._evaluation_word = (int(word) for word in raw(seed, "module", 0, 0, 2))
        self._was_training, self._proven = self.module.training, False
        self._tensors = self.module.state_dict(keep_vars=True)
        self.layout = Layout(declared(self.module, self._tensors))
        self._buffers = buffers(self.module, self._tensors)
        self._whole = {
            dtype: backend.zeros(stop - start, dtype) for dtype, (start, stop) in self._whole_spans().items()
        }
        self._initial = np.zeros(self.layout.size, np.float32)
        for name, view in self.layout.views(self._initial).items():
            view[...] = self._tensors[name].detach().cpu().numpy()
        self._check_fit(data)
        self._trained = tuple(
            (slice(one.offset, one.offset + one.size), self._tensors[one.name])
            for one in self.layout.tensors
            if one.kind != "statistic"
        )
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._put) for _, parameter in self._trained]

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for tensor in self._tensors.values():
            tensor.data = tensor.data.clone()
            tensor.grad = None
        self._binding, self._trained = None, ()
        self.module.train(self._was_training)

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        with torch.no_grad():
            for name, values in parameters.items():
                target, source = self._tensors[name], torch.from_numpy(values)
                target.copy_(source if target.is_floating_point() else source.round())

    def _check_fit(self, data: ModelData) -> None:
        """InputError where the module does not take the samples, or its outputs do not suit the targets."""
        sample = self.backend.zeros((1, *data.sample_shape), data.sample_dtype)
        try:
            outputs = self._outputs(sample)
        except _OF_USERS_CODE as error:
            raise InputError(
                f"the module does not take samples of shape {data.sample_shape} and dtype {data.sample_dtype} as data "
                f'set {data.name!r} has ({_said(error)}); fit one to the other (channels="last" if these are last)'
            ) from error
        if not isinstance(outputs, torch.Tensor) or outputs.shape[:1] != (1,):
            raise InputError(
                f"the module gives {_described(outputs)} for one sample; let it return one tensor (batch, ...)"
            )
        self.output_shape: Shape = tuple(outputs.shape[1:])
        if self.loss_name == "cross-entropy" and not data.classes:
            raise InputError(f"loss cross-entropy needs labels, and data set {data.name!r} has regression targets")
        if self.loss_name == "cross-entropy" and (outputs.ndim != 2 or outputs.shape[1] < data.classes):
            raise InputError(
                f"the module's outputs for a sample have shape {self.output_shape}, and data set {data.name!r} has "
                f"{data.classes} classes: give it a last layer with an output for each"
            )
        if self.loss_name == "mse" and (data.classes or self.output_shape != data.target_shape):
            targets = "labels" if data.classes else f"targets of shape {data.target_shape}"
            raise InputError(
                f"loss mse compares outputs of shape {self.output_shape} with {targets} in data set {data.name!r}: "
                "they must have one shape"
            )

    # --- what training calls; shoal.model.gradient.Model says what each does

    def initialise(self, flat: Array, seed: int) -> None:
        """Set the whole of `flat` to the module's values as they were before training."""
        flat[...] = self.backend.xp.asarray(self._initial)

    def bind(self, weights: Array, gradient: Array | None = None, statistics: Array | None = None) -> Binding:
        layout = self.layout
        for flat, size in ((weights, layout.size), (gradient, layout.parameters), (statistics, layout.size)):
            aligned = flat is None or not size or address(flat) % ALIGNMENT_BYTES == 0
            if flat is not None and (flat.shape != (size,) or flat.dtype != np.float32 or not aligned):
                raise ValueError(f"a flat buffer must be aligned, float32 and have {size} elements")
        measured = weights if statistics is None else statistics
        values, apart = layout.views(_shared(weights)), layout.views(_shared(measured))
        values |= {one.name: apart[one.name] for one in layout.tensors if one.kind == "statistic"}
        gradients = {}
        if gradient is not None:
            gradient.fill(0)
            gradients = layout.views(_shared(gradient))
        spans = self._whole_spans()
        binding = Binding(
            tuple((self._tensors[name], view) for name, view in self._as_they_are(values).items()),
            gradient,
            {self._tensors[name]: view for name, view in gradients.items()},
            tuple((measured[slice(*spans[dtype])], array) for dtype, array in self._whole.items()),
        )
        self.use(binding)
        return binding

    def use(self, binding: Binding) -> None:
        """Work on the buffers of an earlier `bind`, as they are."""
        if binding is not self._binding:
            for tensor, view in binding.values:
                tensor.data = view
            self._binding = binding

    def gradient(self, x: Array, y: Array, position: int = 0, whole: bool = True) -> float:
        self._whole_gradient = whole
        generators.seed((self._step_word + position) % _WORDS)
        for _, parameter in self._trained:
            parameter.grad = None
        self._enter(True)
        try:
            with torch.enable_grad():
                loss = self._loss(self.module(self._input(x)), _tensor(y))
                loss.backward()
        except _OF_USERS_CODE as error:
            if self._proven:
                raise
            raise InputError(
                f"the module and its loss cannot take a step on a batch of shape {x.shape} with targets of shape "
                f"{y.shape}: {_said(error)}"
            ) from error
        self._proven = True
        for _, parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                self._put(parameter)
        self._leave()
        return loss.item()

    @property
    def pieces(self) -> list[Piece]:
        """As the native one; a trained parameter each, unless the gradient is whole."""
        assert self._binding is not None
        if self._whole_gradient:
            assert self._binding.gradient is not None
            return [(slice(0, self.layout.parameters), self._binding.gradient)]
        return [(at, self._flat(_dense(parameter.grad))) for at, parameter in self._trained]

    def evaluate(self, x: Array, y: Array) -> tuple[float, int]:
        outputs, targets = self._outputs(x), _tensor(y)
        labelled = not targets.is_floating_point() and outputs.ndim == 2
        correct = int((outputs.argmax(1) == targets).sum()) if labelled else 0
        with torch.no_grad():
            return float(self._loss(outputs, targets)) * len(x), correct

    def predict(self, x: Array) -> Array:
        return self.backend.xp.asarray(self._outputs(x)).copy()

    def recalibrate(self, batches: Iterable[Array]) -> None:
        """As the native one; other layers than batch norm work as in evaluation."""
        norms = [one for one in self.module.modules() if isinstance(one, _BatchNorm) and one.track_running_stats]
        if not norms:
            return
        momenta = [norm.momentum for norm in norms]
        self._enter(False)
        try:
            for seen, x in enumerate(batches):
                for norm in norms:
                    norm.momentum = 1 / (seen + 1)
                    norm.train()
                with torch.no_grad():
                    self.module(self._input(x))
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
                norm.eval()

    @property
    def scratch_bytes(self) -> int:
        """What is held here between steps; PyTorch's own is not known."""
        return sum(array.nbytes for array in self._whole.values())

    # --- how

    def _outputs(self, x: Array) -> torch.Tensor:
        """In evaluation."""
        generators.seed(self._evaluation_word)
        self._enter(False)
        with torch.no_grad():
            outputs: torch.Tensor = self.module(self._input(x))
        return outputs

    def _enter(self, training: bool) -> None:
        if self.module.training != training:
            self.module.train(training)
        for numbers, array in self._binding.whole if self._binding else ():
            self.backend.xp.copyto(array, self.backend.xp.rint(numbers), casting="unsafe")

    def _put(self, parameter: torch.Tensor) -> None:
        """The gradient that autograd has made into its view, which takes its place, if it must be whole."""
        if self._whole_gradient:
            assert self._binding is not None
            view = self._binding.gradients[parameter]
            parameter.grad = view.copy_(_dense(parameter.grad))

    def _leave(self) -> None:
        """Keep the buffers that the step has moved, those too that it has replaced."""
        for buffer in self._buffers:
            buffer.settle()
        for numbers, array in self._binding.whole if self._binding else ():
            self.backend.xp.copyto(numbers, array, casting="unsafe")

    def _flat(self, tensor: torch.Tensor) -> Array:
        """The same memory as a flat array."""
        xp = self.backend.xp
        array: Array = tensor.numpy() if xp is np else xp.from_dlpack(tensor)
        return array.reshape(-1)

    def _input(self, x: Array) -> torch.Tensor:
        samples = _tensor(x)
        return samples.permute(0, 3, 1, 2) if self._channels_last and samples.ndim == 4 else samples

    def _whole_spans(self) -> dict[str, tuple[int, int]]:
        """Where in the layout the tensors of each dtype but float32 lie, one after another."""
        spans: dict[str, tuple[int, int]] = {}
        for one in self.layout.tensors:
            if one.dtype != "float32":
                start, _ = spans.get(one.dtype, (one.offset, 0))
                spans[one.dtype] = start, one.offset + one.size
        return spans

    def _as_they_are(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The views by name, of whole numbers those in their own arrays."""
        spans, found = self._whole_spans(), dict(values)
        for one in self.layout.tensors:
            if one.dtype != "float32":
                start = one.offset - spans[one.dtype][0]
                found[one.name] = _shared(self._whole[one.dtype])[start : start + one.size].reshape(one.shape)
        return found


def _find_loss(loss: str | Loss) -> tuple[Loss, str]:
    """The function and its name in a config."""
    if isinstance(loss, str):
        if loss not in _LOSSES:
            near = difflib.get_close_matches(loss, _LOSSES, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"give {' or '.join(_LOSSES)}, or a function"
            raise InputError(f"loss {loss!r} is not known: {hint}")
        return _LOSSES[loss][0], loss
    if not callable(loss) or isinstance(loss, type):
        raise InputError(f"loss is {loss!r}; give a name, or a function of (outputs, targets) that gives the mean")
    if (reduction := getattr(loss, "reduction", "mean")) != "mean":
        raise InputError(f"the loss has reduction={reduction!r}, and learners average: give reduction='mean'")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise InputError("the loss has parameters, which would not be trained; put them in the module")
    named = (name for name, (function, kind) in _LOSSES.items() if loss is function or type(loss) is kind)
    return loss, next(named, OwnModel.loss_name)


def _dense(gradient: torch.Tensor | None) -> torch.Tensor:
    """As a tensor that has all its numbers: those of an embedding may have a few rows."""
    assert gradient is not None
    return gradient if gradient.layout == torch.strided else gradient.to_dense()


def _shared(array: Array) -> torch.Tensor:
    """The same memory as a tensor, of an array too that must not be written."""
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def _tensor(batch: Array) -> torch.Tensor:
    """A batch for the module, which may write into it."""
    if isinstance(batch, np.ndarray) and not batch.flags.writeable:
        batch = batch.copy()
    return _shared(batch)


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _described(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
