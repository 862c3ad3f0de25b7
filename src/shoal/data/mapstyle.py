"""Map-style datasets, as PyTorch calls what has a length and gives the sample of an index: read when needed.

An item is (x, y): x a tensor or array, all of one shape and dtype, y a label from 0 (an integer) or a target (floating
point, of any shape). Items are stacked as they are, without shoal's scaling. Around each `dataset[index]` the process's
generators are seeded by the sample and the epoch (for training, by the position that stands for both), so that random
augmentation depends on neither ranks nor their number.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from shoal.backend import Array, Backend, numpy_backend
from shoal.data import generators
from shoal.data.keyed import permutation, rows
from shoal.data.order import SampleOrder
from shoal.errors import InputError

_CHECKED_SAMPLES = 16
"""so many of each set are compared between ranks, and at a resume"""


class MapStyle(Protocol):
    """What is asked of a dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class MapSplit:
    """One dataset with its name in errors; `x` and `y` are the shape and dtype of its items."""

    def __init__(self, dataset: MapStyle, name: str) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise InputError(
                f"the {name} set is a {type(dataset).__name__}, which has no length or no items; give a map-style "
                "dataset, with __len__ and __getitem__"
            )
        if not len(dataset):
            raise InputError(f"the {name} set is empty; give it at least one sample")
        self.dataset, self.name, self.classes = dataset, name, 0
        with generators.kept():
            generators.seed(0)
            x, y = self._read(0)
        if y.dtype.kind not in "iuf" or (y.dtype.kind != "f" and y.ndim):
            raise InputError(
                f"sample 0 of the {name} set has a target of dtype {y.dtype} and shape {y.shape}; give an integer "
                "label or a floating-point target"
            )
        self.x, self.y = (x.shape, x.dtype), (y.shape, np.dtype(np.float32 if y.dtype.kind == "f" else np.int64))

    def __len__(self) -> int:
        return len(self.dataset)

    def stack(self, indices: Iterable[int], words: Iterable[int], x: Array, y: Array) -> None:
        """Put the samples of these indices into x and y, each drawn with the generators seeded by its word."""
        for i, (index, word) in enumerate(zip(indices, words, strict=True)):
            generators.seed(word)
            x[i], y[i] = self._checked(index)

    def _checked(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = self._read(index)
        if (x.shape, x.dtype) != self.x or y.shape != self.y[0]:
            raise InputError(
                f"sample {index} of the {self.name} set has shape {x.shape}, dtype {x.dtype} and a target of shape "
                f"{y.shape}, but sample 0 {self.x[0]}, {self.x[1]} and {self.y[0]}; all must be alike"
            )
        if self.classes and not 0 <= y < self.classes:
            raise InputError(
                f"sample {index} of the {self.name} set has label {y}, but there are {self.classes} classes from 0"
            )
        return x, y

    def _read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        item = self.dataset[index]
        try:
            x, y = item
        except (TypeError, ValueError):
            raise InputError(
                f"sample {index} of the {self.name} set is a {type(item).__name__}; let the dataset return (x, y)"
            ) from None
        arrays = np.asarray(x), np.asarray(y)
        if arrays[0].dtype.kind not in "iufb":
            raise InputError(
                f"sample {index} of the {self.name} set is a {type(x).__name__}; let the dataset return numbers, as a "
                "tensor or an array (ToTensor())"
            )
        return arrays


class MapData:
    """Datasets for training, as `shoal.train(data=...)` takes them beside (train, test[, validation]).

    classes: the number of classes; left out, the length of the training set's `classes` where it has such, as those
    of torchvision do. Targets that are floating point have none.
    """

    def __init__(
        self,
        train: MapStyle,
        test: MapStyle,
        validation: MapStyle | None = None,
        *,
        classes: int | None = None,
        name: str = "datasets",
    ) -> None:
        self.name = self.caption = name
        self.train, self.test = MapSplit(train, "training"), MapSplit(test, "test")
        self.validation = MapSplit(validation, "validation") if validation is not None else None
        self.sample_shape, self.sample_dtype = self.train.x
        self.target_shape: tuple[int, ...] = self.train.y[0]
        self.classes = self._count(classes, getattr(train, "classes", ()))
        for split in self.splits:
            if (split.x, split.y) != (self.train.x, self.train.y):
                raise InputError(
                    f"the {split.name} set has samples and targets of {(*split.x, *split.y)} and the training set of "
                    f"{(*self.train.x, *self.train.y)}; make them alike"
                )
            split.classes = self.classes

    @property
    def splits(self) -> list[MapSplit]:
        """The sets there are."""
        return [split for split in (self.train, self.test, self.validation) if split is not None]

    @property
    def outputs(self) -> int:
        """How many outputs a net has: one a class, or one a target's number."""
        return self.classes or int(np.prod(self.target_shape))

    def _count(self, stated: int | None, listed: Any) -> int:
        if self.train.y[1] == np.float32:
            if stated:
                raise InputError(f"classes is {stated}, but targets are floating point; leave it out for regression")
            return 0
        count = stated or (len(listed) if isinstance(listed, list | tuple) else 0)
        if not count:
            raise InputError("the training set has labels and does not list its classes; say how many: classes=10")
        return count

    def checksum(self) -> str:
        """Of how many samples there are, and of some of them."""
        total = 0
        for split in self.splits:
            total = zlib.crc32(repr((len(split), split.x, split.y)).encode(), total)
            for index in permutation(0, "compared", 0, len(split))[:_CHECKED_SAMPLES]:
                generators.seed(int(index))
                for array in split._checked(int(index)):
                    total = zlib.crc32(np.ascontiguousarray(array).tobytes(), total)
        return f"{total:08x}"

    def batches(self, order: SampleOrder, backend: Backend) -> MapBatches:
        """What gives training its batches."""
        return MapBatches(self, order, backend)


class MapBatches:
    """As `shoal.data.batches.Batches`, of MapData. Items are read in the calling thread, whose generators they use."""

    def __init__(self, data: MapData, order: SampleOrder, backend: Backend) -> None:
        self._data, self._order, self._backend = data, order, backend
        self._buffers: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def training(self, position: int, count: int, following: int | None = None) -> tuple[Array, Array]:
        """The samples at positions [position, position + count) of the order; valid until the next call."""
        return self._stacked(self._data.train, self._order.indices(position, count), "item", position)

    def chosen(self, indices: np.ndarray) -> tuple[Array, Array]:
        """The training samples of these indices, which random augmentation meets as if in no epoch."""
        return self._stacked(self._data.train, indices, "chosen item", int(indices[0]))

    def chunk(self, split: MapSplit, start: int, stop: int) -> tuple[Array, Array]:
        """Samples [start, stop) of `split`."""
        return self._stacked(split, np.arange(start, stop), "evaluated item", start)

    def close(self) -> None:
        """Nothing to end."""

    def _stacked(self, split: MapSplit, indices: np.ndarray, purpose: str, first: int) -> tuple[Array, Array]:
        count = len(indices)
        if count not in self._buffers:
            host = numpy_backend()
            self._buffers[count] = (
                host.empty((count, *split.x[0]), split.x[1]),
                host.empty((count, *split.y[0]), split.y[1]),
            )
        x, y = self._buffers[count]
        words = rows(self._order.seed, purpose, first, count, 1)[:, 0].tolist()
        split.stack(indices.tolist(), words, x, y)
        return self._backend.xp.asarray(x), self._backend.xp.asarray(y)
