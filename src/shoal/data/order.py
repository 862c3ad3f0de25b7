"""The endless order in which training samples are used.

Epoch e is a permutation of the samples keyed by (seed, e), and the epochs follow one another without a
gap.  A position in this sequence is all that the learners need to agree on: whoever takes the positions
[c, c + n) takes the same samples, and every sample of a whole epoch is used exactly once however the
sequence is cut into rounds, steps and batches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from shoal.data.keyed import permutation
from shoal.errors import InputError

EPOCHS_KEPT = 2
"""A round may cross an epoch's end; what is drawn for a whole epoch is kept for both."""


class SampleOrder:
    """Maps positions of the endless sequence to indices of the training set of `samples` samples."""

    def __init__(self, samples: int, seed: int) -> None:
        if samples < 1:
            raise InputError(f"The training set has {samples} samples, but needs at least 1; add data.")
        self.samples = samples
        self.seed = seed
        self._epoch = functools.lru_cache(EPOCHS_KEPT)(self._permutation)

    def parts(self, position: int, count: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (epoch, indices) for each epoch that the positions [position, position + count) lie in.

        indices: int64 (n,), a read-only view.  Any number of epochs may be crossed.
        """
        if position < 0 or count < 0:
            raise ValueError(f"position {position} and count {count} must not be negative")
        while count:
            epoch, start = divmod(position, self.samples)
            indices = self._epoch(epoch)[start : start + count]
            yield epoch, indices
            position, count = position + len(indices), count - len(indices)

    def indices(self, position: int, count: int) -> np.ndarray:
        """Return the sample indices at positions [position, position + count): int64 (count,)."""
        return np.concatenate([np.empty(0, np.int64), *(indices for _, indices in self.parts(position, count))])

    def _permutation(self, epoch: int) -> np.ndarray:
        order = permutation(self.seed, "order", epoch, self.samples)
        order.flags.writeable = False
        return order
