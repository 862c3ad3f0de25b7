"""The loops of layers in NumPy: what each computes, in the order of roundings written here.

The oracle for cpu/windows.c and cpu/features.c, and what runs without them. Images are (n, height, width, channels).
The features of an array are its last axis; its other axes are rows, in `groups` of equally many: the images of a
batch, or one group of all rows. Sums are float64 and go over 128 rows at a time, then over these sums. Every product
is rounded before it is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

SUM_ROWS = 128
"""Rows that are summed before they are added to the others: cpu/features.inc has the same number."""


def unfold(xp: Any, x: Any, windows: Any, block: Any, out: Any) -> None:
    """out = the windows of x for the output pixels of `block`, one a row: (rows, kernel * kernel * channels).

    What lies beyond the image is 0. `windows` is a `Windows`, `block` a `Block`."""
    out.fill(0)
    for place, pixels in _places(x, windows, block, out):
        xp.copyto(place, pixels)


def fold(xp: Any, rows: Any, windows: Any, block: Any, x: Any) -> None:
    """Add each row to the window of x that `unfold` reads it from; x keeps the rest."""
    for place, pixels in _places(x, windows, block, rows):
        xp.add(pixels, place, out=pixels)


def max_pool(xp: Any, x: Any, windows: Any, y: Any, winner: Any | None) -> None:
    """y = the largest pixel of each window, which has no padding; winner (int16, or None) = its place in the window.

    Of equals the first; a NaN stays."""
    places = pixels_of(x, windows)
    xp.copyto(y, next(places))
    if winner is not None:
        winner.fill(0)
    for number, place in enumerate(places, start=1):
        better = place > y
        if winner is not None:
            xp.copyto(winner, number, where=better)
        xp.copyto(y, place, where=better | (place != place))


def max_pool_gradient(xp: Any, dy: Any, winner: Any, windows: Any, dx: Any) -> None:
    """dx = 0 but for the winners, to which dy is added in the order of the windows."""
    dx.fill(0)
    places = list(pixels_of(dx, windows))
    for number in range(len(places) - 1, -1, -1):
        xp.add(places[number], xp.where(winner == number, dy, dy.dtype.type(0)), out=places[number])


def pixels_of(x: Any, windows: Any) -> Iterator[Any]:
    """For each place within windows without padding, the view of x that holds that place of every window."""
    kernel, stride = windows.kernel, windows.stride
    lines, columns = (stride * (windows.along(side) - 1) + 1 for side in x.shape[1:3])
    for i in range(kernel):
        for j in range(kernel):
            yield x[:, i : i + lines : stride, j : j + columns : stride]


def mirror(xp: Any, w: Any, out: Any) -> None:
    """out[i, j] = w[-1-i, -1-j] transposed; w is (kernel, kernel, inputs, outputs)."""
    xp.copyto(out, w[::-1, ::-1].transpose(0, 1, 3, 2))


def moments(xp: Any, x: Any, sums: Any) -> None:
    """sums = the sums of x and of x*x over the rows of each group: float64 (2, groups, features)."""
    sums.fill(0)
    for total, (part,) in _parts(sums, x):
        wide = part.astype(np.float64)
        total[0] += _sum(xp, wide)
        total[1] += _sum(xp, wide * wide)


def affine(xp: Any, x: Any, scale: Any, shift: Any | None, beside: Any | None, out: Any, relu: bool) -> None:
    """out = x * scale + shift + beside, and 0 where that is below 0 if `relu`; scale, shift: (groups, features)."""
    groups, features = scale.shape
    shape = (groups, -1, features)
    to = out.reshape(shape)
    xp.multiply(x.reshape(shape), scale[:, None], out=to)
    if shift is not None:
        xp.add(to, shift[:, None], out=to)
    if beside is not None:
        xp.add(to, beside.reshape(shape), out=to)
    if relu:
        xp.copyto(to, 0, where=to < 0)


def masked(xp: Any, dy: Any, y: Any, dz: Any) -> None:
    """dz = dy where y > 0, else 0: what ReLU lets back."""
    xp.copyto(dz, dy)
    xp.copyto(dz, 0, where=~(y > 0))


def gradient_moments(xp: Any, dy: Any, x: Any, y: Any | None, dz: Any | None, sums: Any) -> None:
    """dz = dy, or 0 where y is given and not above 0; sums = the sums of dz and of dz*x, as `moments` does it.

    dz is not written where it is None."""
    if dz is not None:
        xp.copyto(dz, dy) if y is None else masked(xp, dy, y, dz)
    sums.fill(0)
    for total, parts in _parts(sums, dy, x, *([] if y is None else [y])):
        wide, wide_x = parts[0].astype(np.float64), parts[1].astype(np.float64)
        if y is not None:
            xp.copyto(wide, 0, where=~(parts[2] > 0))
        total[0] += _sum(xp, wide)
        total[1] += _sum(xp, wide * wide_x)


def affine_gradient(xp: Any, dy: Any, x: Any, y: Any | None, factors: Any, dx: Any) -> None:
    """dx = dz * factors[0] + (x * factors[1] + factors[2]), dz as in `gradient_moments`; factors is (3, features)."""
    rows, to = x.reshape(-1, factors.shape[1]), dx.reshape(-1, factors.shape[1])
    dz = dy.reshape(to.shape)
    if y is not None:
        dz = xp.where(y.reshape(to.shape) > 0, dz, dz.dtype.type(0))
    xp.multiply(rows, factors[1], out=to)
    xp.add(to, factors[2], out=to)
    xp.add(dz * factors[0], to, out=to)


def _places(x: Any, windows: Any, block: Any, rows: Any) -> Iterator[tuple[Any, Any]]:
    """For each place within a window, the last first: where the rows hold it, and the pixels of x that it is."""
    _, height, width, channels = x.shape
    kernel, stride, padding = windows.kernel, windows.stride, windows.padding
    images = x[block.image : block.image + block.images]
    columns = windows.along(width)
    parts = rows.reshape(block.images, block.lines, columns, kernel, kernel, channels)
    for i in range(kernel - 1, -1, -1):
        lines, from_lines = _inside(i - padding, stride, height, block.line, block.lines)
        for j in range(kernel - 1, -1, -1):
            across, from_across = _inside(j - padding, stride, width, 0, columns)
            yield parts[:, lines, across, i, j], images[:, from_lines, from_across]


def _inside(shift: int, stride: int, side: int, first: int, count: int) -> tuple[slice, slice]:
    """Of the windows first .. first + count - 1 along a side, those whose pixel at `shift` is within it, counted from
    `first`; and those pixels."""
    low = max(first, -(shift // stride))
    high = max(low, min(first + count, (side - 1 - shift) // stride + 1))
    start = low * stride + shift
    return slice(low - first, high - first), slice(start, start + (high - low) * stride, stride)


def _parts(sums: Any, *arrays: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Each group's sums with the rows, at most SUM_ROWS at a time, that go into them."""
    _, groups, features = sums.shape
    shaped = [array.reshape(groups, -1, features) for array in arrays]
    for group in range(groups):
        for start in range(0, shaped[0].shape[1], SUM_ROWS):
            yield sums[:, group], [array[group, start : start + SUM_ROWS] for array in shaped]


def _sum(xp: Any, rows: Any) -> Any:
    """The sum over rows, one after another (NumPy adds up a single column in another order)."""
    return rows.sum(axis=0) if rows.shape[1] > 1 else xp.cumsum(rows, axis=0)[-1]
