"""A batch from samples in one pass over it: pick, move, mirror, turn into float32, shift and scale.

    out[n] = (moved(x[indices[n]]) - shift) * scale          in float32, element by element

`moves` is None or (top, left, mirrored) of each sample, an image of rows x width pixels with channels: its output
pixel (r, j) is the source pixel (r + top, j' + left), where j' is j, or width - 1 - j if mirrored, and 0 beyond the
edge, before the shift.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.kernels.compiled import cpu


class SampleMap:
    """shift and scale, float32 NumPy arrays broadcastable to a sample of `shape`, where a batch takes them.

    `row`: both as they are in each row of a sample, flat, for the compiled loop; None where rows differ.
    """

    __slots__ = ("row", "scale", "shift")

    def __init__(self, xp: Any, shape: tuple[int, ...], shift: np.ndarray, scale: np.ndarray) -> None:
        self.shift, self.scale = xp.asarray(shift, np.float32), xp.asarray(scale, np.float32)
        length = int(np.prod(shape[-2:]))
        wholes = [np.broadcast_to(array, shape).reshape(-1, length) for array in (shift, scale)]
        alike = all((whole == whole[0]).all() for whole in wholes)
        self.row = tuple(whole[0].astype(np.float32) for whole in wholes) if alike else None


def gather(xp: Any, x: Any, indices: Any, moves: Any | None, by: SampleMap, out: Any) -> None:
    """Write the samples of x (N, *shape) with these indices, int64 (count,), to out, float32 (count, *shape).

    moves: int64 (count, 3) or None. Raises IndexError where there is no such sample."""
    if cpu is None or xp is not np or by.row is None or not cpu.gather(x, indices, moves, *by.row, out):
        twin(xp, x, indices, moves, by, out)


def twin(xp: Any, x: Any, indices: Any, moves: Any | None, by: SampleMap, out: Any) -> None:
    """`gather` in NumPy, its oracle; allocates the chosen samples."""
    chosen = xp.take(x, xp.asarray(indices), axis=0)
    if moves is not None:
        chosen = _moved(xp, chosen, xp.asarray(moves))
    # The dtype is that of the arithmetic; NumPy 1 would otherwise work on bytes in float16.
    in_float32 = {"out": out, "dtype": np.float32, "casting": "same_kind"}
    xp.subtract(chosen, by.shift, **in_float32)
    xp.multiply(out, by.scale, **in_float32)


def _moved(xp: Any, images: Any, moves: Any) -> Any:
    """The images (count, rows, width, channels), moved."""
    count, rows, width, _ = images.shape
    top, left, mirrored = (moves[:, i, None] for i in range(3))
    row = xp.arange(rows) + top
    columns = xp.arange(width)
    column = xp.where(mirrored != 0, width - 1 - columns, columns) + left
    inside = ((row >= 0) & (row < rows))[:, :, None] & ((column >= 0) & (column < width))[:, None, :]
    row, column = xp.clip(row, 0, rows - 1), xp.clip(column, 0, width - 1)
    moved = images[xp.arange(count)[:, None, None], row[:, :, None], column[:, None, :]]
    return xp.where(inside[..., None], moved, images.dtype.type(0))
