"""Augmentation: how each training image is moved and mirrored in each epoch.

    crop         the image is moved by up to `pad` pixels each way; what comes in from beyond its edge is 0
    crop-flip    the same, then mirrored left to right half of the time

(Cropping the padded image at a random place, as it is usually told.)  A move is a function of (seed, epoch,
sample), one raw word for each: it does not depend on who asks, when, or in which batch.
"""

from __future__ import annotations

import functools
from typing import Protocol

import numpy as np

from shoal.data.keyed import raw
from shoal.data.order import EPOCHS_KEPT
from shoal.errors import InputError

_BITS = 31
"""of a word for each direction; the top bit says whether to mirror"""


class AugmentOptions(Protocol):
    """What of a config's [data] section says how to augment."""

    @property
    def augment(self) -> str: ...
    @property
    def pad(self) -> int: ...


class Augmentation:
    """The moves of a training set of `samples` images in any epoch; an epoch's are drawn at once and kept."""

    def __init__(self, samples: int, seed: int, pad: int, flip: bool) -> None:
        self._samples, self._seed, self._pad, self._flip = samples, seed, pad, flip
        self._epoch = functools.lru_cache(EPOCHS_KEPT)(self._draw)

    def moves(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        """Return (top, left, mirrored) of these samples in this epoch, int64 (count, 3), as kernels.gather takes it."""
        return self._epoch(epoch)[indices]

    def _draw(self, epoch: int) -> np.ndarray:
        words = raw(self._seed, "augment", epoch, 0, self._samples)
        moves = np.zeros((self._samples, 3), np.int64)
        for axis in range(2):
            part = (words >> np.uint64(_BITS * axis)) & np.uint64(2**_BITS - 1)
            moves[:, axis] = (part * np.uint64(2 * self._pad + 1)) >> np.uint64(_BITS)
            moves[:, axis] -= self._pad
        if self._flip:
            moves[:, 2] = words >> np.uint64(63)
        return moves


def augmentation(
    options: AugmentOptions, samples: int, sample_shape: tuple[int, ...], seed: int
) -> Augmentation | None:
    """The augmentation that a config asks for, or None; InputError where the samples are not images of that size."""
    if options.augment == "none":
        return None
    if len(sample_shape) != 3:
        raise InputError(
            f'data.augment is "{options.augment}", which takes images (height, width, channels), and the samples have '
            f'the shape {sample_shape}; reshape them, or set data.augment = "none"'
        )
    if options.pad >= min(sample_shape[:2]):
        raise InputError(
            f"data.pad is {options.pad}, but images of {sample_shape[0]} x {sample_shape[1]} pixels can be moved by "
            f"less than {min(sample_shape[:2])}; set a smaller data.pad"
        )
    return Augmentation(samples, seed, options.pad, options.augment == "crop-flip")
