"""What every layer is: a step of the forward pass that can also be walked backwards.

A layer is first a description: it knows its sizes and declares its tensors. A Model then names it, gives it
memory (`prepare`) and views of the flat weights and gradients (`bind`). Arrays are NHWC with the batch
first; shapes of samples have no batch axis. The rules that keep a net right and free of allocation:

- a layer never writes into an array it was handed, only into its scratch;
- what `forward` returns is valid until the next call with the same shape; what `backward` returns is best lent
  (`scratch.lend`), and whoever called releases it when it has been used: a few arrays then serve the whole net;
- `backward` belongs to the last `forward`, and overwrites the gradients of its tensors.

To write a layer of your own, derive from Layer as ReLU in layers.py does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import numpy as np

from shoal.backend import Array, Backend
from shoal.errors import InputError
from shoal.model.flat import Shape, Tensor

Kept = TypeVar("Kept")


class Pool:
    """Aligned memory that the layers of a net lend from, all of it free at the end of a step.

    Arrays are as long as the longest that any layer keeps, where that is enough, so that one serves as another's and
    no step needs more of them than the first; a system gives memory to what is touched only. The last released is
    the first to be lent again, while it is in the cache.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._least_bytes = 0
        self._lent: dict[int, _Memory] = {}
        self._free: dict[int, list[_Memory]] = {}

    def expect(self, n_bytes: int) -> None:
        """A layer keeps an array of this length."""
        if n_bytes > self._least_bytes:
            self._least_bytes = n_bytes
            self._free = {size: free for size, free in self._free.items() if size >= n_bytes}

    def lend(self, shape: Shape, dtype: Any) -> Array:
        """An array of any values, the caller's until it is released."""
        size = max(math.prod(shape) * dtype.itemsize, self._least_bytes)
        free = self._free.get(size)
        memory = free.pop() if free else _Memory(self.backend, size)
        self._lent[memory.key] = memory
        return memory.array(shape, dtype)

    def release(self, array: Array) -> None:
        """Take back a lent array, or a view of it; any other is left alone."""
        memory = self._lent.pop(id(array.base), None)
        if memory is not None and memory.size >= self._least_bytes:
            self._free.setdefault(memory.size, []).append(memory)

    def release_all(self) -> None:
        """Take back what is still lent."""
        for memory in tuple(self._lent.values()):
            self.release(memory.bytes)

    @property
    def total_bytes(self) -> int:
        """The memory held now."""
        return sum(one.size for one in (*self._lent.values(), *(one for free in self._free.values() for one in free)))


class _Memory:
    """Bytes, and the arrays that they have been, which share one base: `key` is its id."""

    def __init__(self, backend: Backend, size: int) -> None:
        self.size, self.bytes = size, backend.empty(size, np.uint8)
        self.key = id(self.bytes.base)
        self._arrays: dict[tuple[Shape, Any], Array] = {}

    def array(self, shape: Shape, dtype: Any) -> Array:
        found = self._arrays.get((shape, dtype))
        if found is None:
            found = self.bytes[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            self._arrays[shape, dtype] = found
        return found


class Scratch:
    """Aligned working memory that is made at first use and then reused: `scratch(what, shape)`.

    Calls with the same `what` and shape return the same array. `fill` sets the values once, when the array
    is made; without it they are arbitrary. `keep` does the same for whatever `make` returns, such as views.
    """

    def __init__(self, backend: Backend, dtype: Any, pool: Pool | None = None) -> None:
        self.backend = backend
        self.dtype = np.dtype(dtype)
        self.pool = pool or Pool(backend)
        self._arrays: dict[tuple[str, Shape], Array] = {}
        self._kept: dict[tuple[str, Shape], Any] = {}

    def __call__(self, what: str, shape: Shape, dtype: Any = None, fill: float | None = None) -> Array:
        found = self._arrays.get((what, shape))
        if found is None:
            found = self.backend.empty(shape, self.dtype if dtype is None else dtype)
            if fill is not None:
                found.fill(fill)
            self._arrays[what, shape] = found
            self.pool.expect(found.nbytes)
        return found

    def lend(self, shape: Shape) -> Array:
        """An array of any values out of the net's pool."""
        return self.pool.lend(shape, self.dtype)

    def release(self, array: Array | None, *unless: Array | None) -> None:
        """Give back what was lent, `unless` it is the memory of one of these; what was not lent is left alone."""
        if array is None:
            return
        for other in unless:
            if other is not None and other.base is array.base:
                return
        self.pool.release(array)

    def keep(self, what: str, shape: Shape, make: Callable[[Shape], Kept]) -> Kept:
        """`make(shape)`, made once."""
        found: Kept | None = self._kept.get((what, shape))
        if found is None:
            found = self._kept[what, shape] = make(shape)
        return found

    @property
    def total_bytes(self) -> int:
        """The memory held now, without the pool's."""
        return sum(array.nbytes for array in self._arrays.values())


class Layer:
    """The base of all layers; see the module's text for the rules.

    `name` is the layer's place in the net, as "2" or "3.body.0". After `prepare`: `xp` and `scratch`. After
    `bind`: `values` and `gradients`, views by the tensors' own names.
    """

    name = ""
    xp: ModuleType
    scratch: Scratch
    values: Mapping[str, Array]
    gradients: Mapping[str, Array]

    @property
    def children(self) -> Mapping[str, Layer]:
        """The layers inside this one, by name."""
        return {}

    def tensors(self) -> tuple[Tensor, ...]:
        """This layer's own tensors (not its children's), with names of their own as "weight"."""
        return ()

    def output_shape(self, input_shape: Shape) -> Shape:
        """The shape of one output sample; InputError where samples of `input_shape` do not fit."""
        return input_shape

    def forward(self, x: Array, training: bool) -> Array:
        """The outputs for the batch `x`."""
        raise NotImplementedError

    def backward(self, dy: Array, want_dx: bool = True) -> Array | None:
        """From the loss's gradient by the outputs: writes that by the tensors, returns that by the inputs.

        `want_dx` False says that nobody needs the latter; then None may be returned. `dy` is the layer's to read
        until it returns; the caller releases what is returned.
        """
        raise NotImplementedError

    def prepare(self, backend: Backend, dtype: Any) -> None:
        """Take fresh scratch memory of `dtype`, here and in all children."""
        pool = Pool(backend)
        for layer in self.walk():
            layer.xp = backend.xp
            layer.scratch = Scratch(backend, dtype, pool)

    def bind(self, values: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        """Take views of this layer's own tensors; a gradient has no statistics."""
        self.values = values
        self.gradients = gradients

    def walk(self) -> Iterator[Layer]:
        """This layer and all within it, in the order of the net."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def rename(self, name: str) -> None:
        """Give this layer and all within it their names, from `name` down."""
        self.name = name
        for key, child in self.children.items():
            child.rename(f"{name}.{key}" if name else key)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a layer is its description, without the memory it was given."""
        given = ("xp", "scratch", "values", "gradients")
        return {key: value for key, value in self.__dict__.items() if key not in given}

    @property
    def trainable(self) -> bool:
        """Whether anything here or within has a gradient."""
        return any(tensor.kind != "statistic" for layer in self.walk() for tensor in layer.tensors())

    def details(self) -> str:
        """The arguments shown by repr."""
        return ", ".join(repr(child) for child in self.children.values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.details()})"

    @property
    def title(self) -> str:
        """The layer in an error message: its name in the net, if it has one, and its sizes."""
        return f"{self.name} {self!r}".strip()

    def refuse(self, shape: Shape, rule: str) -> NoReturn:
        """Raise the InputError of a shape that does not fit."""
        raise InputError(f"layer {self.title} does not fit samples of shape {shape}: {rule}")


class Joint(Layer):
    """A layer that can end a residual block: y = f(x) + beside, in one pass."""

    def join(self, x: Array, beside: Array | None, training: bool) -> Array:
        """f(x) + beside, or f(x) where that is None."""
        raise NotImplementedError

    def part(self, dy: Array) -> tuple[Array, Array]:
        """The loss's gradients by x and by beside, of which the second may be dy; the caller releases both."""
        raise NotImplementedError

    def forward(self, x: Array, training: bool) -> Array:
        return self.join(x, None, training)


def check_layer(value: object, owner: str) -> None:
    """InputError unless `value` is a layer; `owner` is the container it was put in."""
    if isinstance(value, Layer):
        return
    if isinstance(value, type) and issubclass(value, Layer):
        raise InputError(f"{owner} was given the class {value.__name__}: write {value.__name__}(...) to make it")
    raise InputError(f"{owner} was given {value!r}, which is not a layer: put layers of shoal.model in it")


def check_sizes(owner: str, least: int = 1, **sizes: object) -> None:
    """InputError unless every size is a whole number of at least `least`."""
    for what, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
            raise InputError(f"{owner} with {what}={value!r}: give a whole number of at least {least}")
