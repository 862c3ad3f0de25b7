"""Batches: samples gathered and mapped into buffers that are used again.

    x = (samples - shift) * scale        float32, element by element

so a sample has the same bits in whatever batch, chunk or process it appears.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from shoal.backend import Array, Backend
from shoal.data.order import SampleOrder
from shoal.data.sets import DataSet, Split


class BatchSource(Protocol):
    """What gives batches; `Batches` says what each call does."""

    def training(self, position: int, count: int) -> tuple[Array, Array]: ...

    def chosen(self, indices: np.ndarray) -> tuple[Array, Array]: ...

    def chunk(self, split: Any, start: int, stop: int) -> tuple[Array, Array]: ...


class Batches:
    """Gives training batches by position in the sample order, and chunks of any split by index.

    The training set is kept where the backend keeps its arrays; splits that are only evaluated stay on
    the host and go over chunk by chunk.  After the first call with a given count nothing is allocated.
    """

    def __init__(self, data: DataSet, order: SampleOrder, backend: Backend) -> None:
        if order.samples != len(data.train):
            raise ValueError(f"an order of {order.samples} samples for a set of {len(data.train)}")
        xp = backend.xp
        self._order = order
        self._backend = backend
        self._x = xp.asarray(data.train.x)
        self._y = xp.asarray(data.train.y)
        self._scale = xp.asarray(data.scale)
        self._shift = xp.asarray(data.shift) if data.shift.any() else None
        self._buffers: dict[tuple[str, int], Array] = {}

    def training(self, position: int, count: int) -> tuple[Array, Array]:
        """Return the samples at positions [position, position + count) of the order.

        x is float32 (count, *sample_shape); y is int64 (count,), or float32 (count, ...) for regression.
        Both are buffers, valid until the next call with the same count.
        """
        return self.chosen(self._order.indices(position, count))

    def chosen(self, indices: np.ndarray) -> tuple[Array, Array]:
        """Return the training samples of these indices, int64 (count,), as `training` does."""
        xp, count = self._backend.xp, len(indices)
        chosen = xp.asarray(indices)
        gathered = xp.take(self._x, chosen, axis=0, out=self._buffer("gathered", self._x, count))
        y = xp.take(self._y, chosen, axis=0, out=self._buffer("targets", self._y, count))
        return self._mapped("training", gathered), y

    def chunk(self, split: Split, start: int, stop: int) -> tuple[Array, Array]:
        """Return samples [start, stop) of `split`, as `training` does; x has buffers of its own."""
        xp = self._backend.xp
        return self._mapped("chunk", xp.asarray(split.x[start:stop])), xp.asarray(split.y[start:stop])

    def _mapped(self, use: str, samples: Array) -> Array:
        xp = self._backend.xp
        out = self._buffer(use, samples, len(samples), xp.float32)
        # The dtype is that of the arithmetic; NumPy 1 would otherwise work on bytes in float16.
        in_float32 = {"out": out, "dtype": xp.float32, "casting": "same_kind"}
        if self._shift is None:
            return xp.multiply(samples, self._scale, **in_float32)
        xp.subtract(samples, self._shift, **in_float32)
        return xp.multiply(out, self._scale, **in_float32)

    def _buffer(self, use: str, like: Array, count: int, dtype: object = None) -> Array:
        """The buffer for `count` samples shaped as those of `like`."""
        buffer = self._buffers.get((use, count))
        if buffer is None:
            buffer = self._backend.empty((count, *like.shape[1:]), dtype or like.dtype)
            self._buffers[use, count] = buffer
        return buffer
