"""What training needs of a model, whether it is made of shoal's layers or the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from shoal.backend import Array, Backend
from shoal.model.flat import Layout, Piece, Shape


class Trainable(Protocol):
    """A model that is laid out in flat buffers; `shoal.model.gradient.Model` says what each call does."""

    layout: Layout
    sample_shape: Shape

    def initialise(self, flat: Array, seed: int) -> None: ...

    def bind(self, weights: Array, gradient: Array | None = None, statistics: Array | None = None) -> Any: ...

    def use(self, binding: Any) -> None: ...

    def gradient(self, x: Array, y: Array, position: int = 0, whole: bool = True) -> float: ...

    @property
    def pieces(self) -> Sequence[Piece]: ...

    def evaluate(self, x: Array, y: Array) -> tuple[float, int]: ...

    def predict(self, x: Array) -> Array: ...

    def recalibrate(self, batches: Iterable[Array]) -> None: ...

    @property
    def scratch_bytes(self) -> int: ...


class ModelData(Protocol):
    """What a model reads of a data set before training; `classes` is 0 for regression."""

    @property
    def name(self) -> str: ...
    @property
    def sample_shape(self) -> Shape: ...
    @property
    def sample_dtype(self) -> np.dtype[Any]: ...
    @property
    def target_shape(self) -> Shape: ...
    @property
    def classes(self) -> int: ...


class OwnModel(Trainable):
    """The base of models that the user brings, which have memory of their own before and after training."""

    loss_name = "own"
    """the loss as [model] loss names it"""

    def prepare(self, data: ModelData, backend: Backend, seed: int) -> None:
        """Become a Trainable for this data set. Raises InputError where they do not fit together."""
        raise NotImplementedError

    def release(self) -> None:
        """Take memory of its own again, with the values of now, and let go of all buffers."""
        raise NotImplementedError

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        """Take these values, by tensor name, where it is released."""
        raise NotImplementedError
