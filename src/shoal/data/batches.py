"""Batches: samples gathered, augmented and mapped in one pass, into buffers that are used again.

    x = (samples - shift) * scale        float32, element by element

so a sample has the same bits in whatever batch, chunk or process it appears.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from shoal import kernels
from shoal.backend import Array, Backend
from shoal.data.augmentation import Augmentation
from shoal.data.order import SampleOrder
from shoal.data.prefetch import Prefetch
from shoal.data.sets import DataSet, Split

Batch = tuple[Array, Array]
"""x: float32 (count, *sample_shape). y: int64 (count,), or float32 (count, ...) for regression."""


class BatchSource(Protocol):
    """What gives batches; `Batches` says what each call does."""

    def training(self, position: int, count: int, following: int | None = None) -> Batch: ...

    def chosen(self, indices: np.ndarray) -> Batch: ...

    def chunk(self, split: Any, start: int, stop: int) -> Batch: ...

    def close(self) -> None: ...


class Batches:
    """Gives training batches by position in the sample order, and chunks of any split by index.

    The training set is kept where the backend keeps its arrays; splits that are only evaluated stay on
    the host and go over chunk by chunk.  After the first calls with a given count no batch is allocated.
    """

    def __init__(
        self,
        data: DataSet,
        order: SampleOrder,
        backend: Backend,
        augmentation: Augmentation | None = None,
        prefetch: bool = False,
    ) -> None:
        if order.samples != len(data.train):
            raise ValueError(f"an order of {order.samples} samples for a set of {len(data.train)}")
        self._order, self._backend, self._augmentation = order, backend, augmentation
        self._x = backend.xp.asarray(data.train.x, order="C")
        self._y = backend.xp.asarray(data.train.y)
        self._map = kernels.SampleMap(backend.xp, data.sample_shape, data.shift, data.scale)
        self._kept: dict[tuple[str, int], Batch] = {}
        self._prefetch = Prefetch(self._fill, self._memory) if prefetch else None

    def training(self, position: int, count: int, following: int | None = None) -> Batch:
        """Return the samples at positions [position, position + count) of the order, augmented.

        following: the position that will be asked for next with this count, if it is known: with prefetch it is
        prepared meanwhile.  The arrays are buffers, valid until the next call.
        """
        if self._prefetch:
            return self._prefetch.take(position, count, following)
        batch = self._buffers("training", count)
        self._fill(position, count, batch)
        return batch

    def chosen(self, indices: np.ndarray) -> Batch:
        """Return the training samples of these indices, int64 (count,), as they are: not augmented."""
        x, y = self._buffers("chosen", len(indices))
        self._gather(indices, None, x, y)
        return x, y

    def chunk(self, split: Split, start: int, stop: int) -> Batch:
        """Return samples [start, stop) of `split`, as `chosen` does."""
        xp, (x, _) = self._backend.xp, self._buffers("chunk", stop - start)
        samples = xp.asarray(split.x[start:stop])
        kernels.gather(xp, samples, np.arange(stop - start), None, self._map, x)
        return x, xp.asarray(split.y[start:stop])

    def close(self) -> None:
        """End the thread, if there is one."""
        if self._prefetch:
            self._prefetch.close()

    def _fill(self, position: int, count: int, batch: Batch) -> None:
        """Make the batch at `position` in these arrays."""
        filled = 0
        for epoch, indices in self._order.parts(position, count):
            here = slice(filled, filled + len(indices))
            moves = self._augmentation.moves(epoch, indices) if self._augmentation else None
            self._gather(indices, moves, *(array[here] for array in batch))
            filled = here.stop

    def _gather(self, indices: np.ndarray, moves: np.ndarray | None, x: Array, y: Array) -> None:
        xp = self._backend.xp
        kernels.gather(xp, self._x, indices, moves, self._map, x)
        xp.take(self._y, xp.asarray(indices), axis=0, out=y)

    def _memory(self, count: int) -> Batch:
        x, y = self._x, self._y
        empty = self._backend.empty
        return empty((count, *x.shape[1:]), np.float32), empty((count, *y.shape[1:]), y.dtype)

    def _buffers(self, use: str, count: int) -> Batch:
        """The memory for `count` samples of this use."""
        if (use, count) not in self._kept:
            self._kept[use, count] = self._memory(count)
        return self._kept[use, count]
