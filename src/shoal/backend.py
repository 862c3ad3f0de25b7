"""The one place that knows which library holds the tensors: NumPy now, CuPy where there is a GPU.

A Backend gives the array module (`xp`) and aligned memory. Everything on the training path takes its
arrays from a Backend that was handed to it, and calls `xp`, never `numpy`, on tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

Array = Any
"""An array of the backend in use (numpy.ndarray or cupy.ndarray)."""

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Backend:
    """Where tensors live: `name` for logs, `xp` the array module."""

    name: str
    xp: ModuleType

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
        """An uninitialised C-contiguous array whose first byte is 64-byte aligned."""
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        n_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        raw = self.xp.empty(n_bytes + ALIGNMENT_BYTES, np.uint8)
        start = -address(raw) % ALIGNMENT_BYTES
        return raw[start : start + n_bytes].view(dtype).reshape(shape)

    def zeros(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
        """As `empty`, filled with zeros."""
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    def read_only(self, array: Array) -> Array:
        """The same memory as an array that refuses to be written, where the library has such (NumPy)."""
        if isinstance(array, np.ndarray):
            array = array.view()
            array.flags.writeable = False
        return array

    def to_host(self, array: Array) -> np.ndarray:
        """The array as NumPy: itself on the CPU, a copy from a GPU."""
        return array if isinstance(array, np.ndarray) else array.get()

    def synchronize(self) -> None:
        """Wait until the device has finished what was queued; nothing to do on the CPU."""


def address(array: Array) -> int:
    """The memory address of the array's first element."""
    interface = getattr(array, "__array_interface__", None) or array.__cuda_array_interface__
    return int(interface["data"][0])


def numpy_backend() -> Backend:
    """The CPU backend."""
    return Backend("numpy", np)
