"""The hot loops of layers: windows of images as the rows of a matrix, and passes over the features of rows.

As in the rest of the package: C where it was compiled, for C-contiguous float32 or float64 NumPy arrays of any shape,
and the twin, which says what is computed, for all else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.kernels import layer_twins as twins
from shoal.kernels.compiled import cpu


@dataclass(frozen=True)
class Windows:
    """Square windows of `kernel` pixels a side, one every `stride` pixels of an image with `padding` around it."""

    kernel: int
    stride: int = 1
    padding: int = 0

    def along(self, side: int) -> int:
        """How many there are along a side of so many pixels."""
        return (side + 2 * self.padding - self.kernel) // self.stride + 1


@dataclass(frozen=True)
class Block:
    """Output pixels: whole lines from `line` on of each of `images` images from `image` on."""

    image: int
    images: int
    line: int
    lines: int


def unfold(xp: Any, x: Any, windows: Windows, block: Block, out: Any) -> None:
    """out = the windows of x, one a row (im2col): see `layer_twins.unfold`."""
    if cpu is None or xp is not np or not cpu.unfold(x, out, _numbers(windows, block)):
        twins.unfold(xp, x, windows, block, out)


def fold(xp: Any, rows: Any, windows: Windows, block: Block, x: Any) -> None:
    """Add each row to its window of x (col2im): see `layer_twins.fold`."""
    if cpu is None or xp is not np or not cpu.fold(rows, x, _numbers(windows, block)):
        twins.fold(xp, rows, windows, block, x)


def max_pool(xp: Any, x: Any, windows: Windows, y: Any, winner: Any | None) -> None:
    """y = the largest of each window, winner = its place: see `layer_twins.max_pool`."""
    if cpu is None or xp is not np or not cpu.max_pool(x, windows.kernel, windows.stride, y, winner):
        twins.max_pool(xp, x, windows, y, winner)


def max_pool_gradient(xp: Any, dy: Any, winner: Any, windows: Windows, dx: Any) -> None:
    """Add dy to the winners: see `layer_twins.max_pool_gradient`."""
    if cpu is None or xp is not np or not cpu.max_pool_gradient(dy, winner, windows.kernel, windows.stride, dx):
        twins.max_pool_gradient(xp, dy, winner, windows, dx)


def mirror(xp: Any, w: Any, out: Any) -> None:
    """out = the weights of the convolution that takes gradients back: see `layer_twins.mirror`."""
    if cpu is None or xp is not np or not cpu.mirror(w, out):
        twins.mirror(xp, w, out)


def moments(xp: Any, x: Any, sums: Any) -> None:
    """sums = the sums of x and of x*x: see `layer_twins.moments`."""
    if cpu is None or xp is not np or not cpu.moments(x, sums):
        twins.moments(xp, x, sums)


def affine(xp: Any, x: Any, scale: Any, shift: Any | None, beside: Any | None, out: Any, relu: bool = False) -> None:
    """out = x * scale + shift + beside, cut at 0 if `relu`: see `layer_twins.affine`."""
    if cpu is None or xp is not np or not cpu.affine(x, scale, shift, beside, out, relu):
        twins.affine(xp, x, scale, shift, beside, out, relu)


def masked(xp: Any, dy: Any, y: Any, dz: Any) -> None:
    """dz = dy where y > 0: see `layer_twins.masked`."""
    if cpu is None or xp is not np or not cpu.masked(dy, y, dz):
        twins.masked(xp, dy, y, dz)


def gradient_moments(xp: Any, dy: Any, x: Any, y: Any | None, dz: Any | None, sums: Any) -> None:
    """sums = the sums of dz and of dz*x, dz = dy where y > 0: see `layer_twins.gradient_moments`."""
    if cpu is None or xp is not np or not cpu.gradient_moments(dy, x, y, dz, sums):
        twins.gradient_moments(xp, dy, x, y, dz, sums)


def affine_gradient(xp: Any, dy: Any, x: Any, y: Any | None, factors: Any, dx: Any) -> None:
    """dx = dz * factors[0] + (x * factors[1] + factors[2]): see `layer_twins.affine_gradient`."""
    if cpu is None or xp is not np or not cpu.affine_gradient(dy, x, y, factors, dx):
        twins.affine_gradient(xp, dy, x, y, factors, dx)


def _numbers(windows: Windows, block: Block) -> tuple[int, ...]:
    return (windows.kernel, windows.stride, windows.padding, block.image, block.images, block.line, block.lines)
