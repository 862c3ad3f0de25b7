"""One contiguous buffer holds every tensor of a net, each as a named view.

So averaging, updating, sending and saving a model is one call on one array. The buffer is laid out as

    [ weights, which decay | biases and norms, which need not | statistics of batch norm ]

with every tensor's start on a 64-byte boundary; the gaps hold 0 and stay 0. The gradient has the first two
parts only. Offsets and sizes count elements, and are the same for every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from shoal.backend import Array, Backend

Shape = tuple[int, ...]
Piece = tuple[slice, Array]
"""A range of a flat buffer, and what belongs there, flat."""
Kind = Literal["weight", "bias", "norm", "statistic"]

ALIGNMENT_ELEMENTS = 16
"""64 bytes of float32; a multiple of 64 bytes for wider types."""


@dataclass(frozen=True)
class Tensor:
    """A named tensor of a net and where it lies.

    `kind` says what it is to training: a "weight" decays and starts at random (its last axis runs over the
    outputs, all others are summed over), a "bias" and a "norm" are trained and start at `initial`, a
    "statistic" is measured, or constant, and starts at `initial`. `offset` is in elements; a Layout sets it.
    `aliases` are other names of the same tensor; `dtype` is what it has outside of the buffer.
    """

    name: str
    shape: Shape
    kind: Kind
    initial: float = 0.0
    offset: int = -1
    aliases: tuple[str, ...] = ()
    dtype: str = "float32"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def fan_in(self) -> int:
        """How many inputs enter one output."""
        return math.prod(self.shape[:-1])


class Layout:
    """Where every tensor of a net lies in its flat buffer.

    `tensors` are in the order of the buffer; `decayed` is the end of the weights that decay, `parameters`
    the end of what is trained (the length of a gradient), `size` the length of the whole.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        declared = tuple(tensors)
        placed: list[Tensor] = []
        end = 0
        ends = []
        for part in (("weight",), ("bias", "norm"), ("statistic",)):
            for tensor in (one for one in declared if one.kind in part):
                placed.append(replace(tensor, shape=tuple(int(side) for side in tensor.shape), offset=end))
                end += -(-tensor.size // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
            ends.append(end)
        self.tensors = tuple(placed)
        self.decayed, self.parameters, self.size = ends
        self.names = tuple(tensor.name for tensor in placed)
        if len(set(self.names)) < len(self.names):
            raise ValueError(f"two tensors share a name: {sorted(self.names)}")

    def views(self, flat: Array) -> dict[str, Array]:
        """The tensors in `flat` by name: all of them in a whole buffer, the trained ones in a gradient."""
        if flat.shape not in ((self.size,), (self.parameters,)):
            raise ValueError(f"a flat buffer of {self.size} or {self.parameters} elements, not {flat.shape}")
        held = (tensor for tensor in self.tensors if tensor.offset + tensor.size <= flat.shape[0])
        return {one.name: flat[one.offset : one.offset + one.size].reshape(one.shape) for one in held}

    def table(self) -> list[tuple[str, Shape, int, Kind, str]]:
        """A row for each name of a tensor: name, shape, offset, kind, dtype outside of the buffer."""
        return [
            (name, one.shape, one.offset, one.kind, one.dtype)
            for one in self.tensors
            for name in (one.name, *one.aliases)
        ]

    def describe(self) -> str:
        """A stable text of names, kinds, shapes and offsets: equal texts mean interchangeable buffers."""
        lines = (f"{one.name} {one.kind} {one.shape} @{one.offset}" for one in self.tensors)
        return "\n".join([*lines, f"{self.decayed} {self.parameters} {self.size}"])


class FlatBuffer:
    """An aligned array of `layout.size` elements, all 0 at first, and its tensors by name in `views`."""

    def __init__(self, layout: Layout, backend: Backend, dtype: Any = np.float32) -> None:
        self.layout = layout
        self.flat = backend.zeros(layout.size, dtype)
        self.views = layout.views(self.flat)
