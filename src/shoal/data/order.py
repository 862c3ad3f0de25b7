"""The endless order in which training samples are used.

Epoch e is a permutation of the samples keyed by (seed, e), and the epochs follow one another without a
gap.  A position in this sequence is all that the learners need to agree on: whoever takes the positions
[c, c + n) takes the same samples, and every sample of a whole epoch is used exactly once however the
sequence is cut into rounds, steps and batches.
"""

from __future__ import annotations

import numpy as np

from shoal.data.keyed import permutation
from shoal.errors import InputError

_EPOCHS_KEPT = 2


class SampleOrder:
    """Maps positions of the endless sequence to indices of the training set of `samples` samples."""

    def __init__(self, samples: int, seed: int) -> None:
        if samples < 1:
            raise InputError(f"The training set has {samples} samples, but needs at least 1; add data.")
        self.samples = samples
        self.seed = seed
        self._epochs: dict[int, np.ndarray] = {}

    def indices(self, position: int, count: int) -> np.ndarray:
        """Return the sample indices at positions [position, position + count): int64 (count,), read-only.

        The range may cross any number of epochs.  Inside one epoch the result is a view, not a copy.
        """
        if position < 0 or count < 0:
            raise ValueError(f"position {position} and count {count} must not be negative")
        epoch, start = divmod(position, self.samples)
        if start + count <= self.samples:
            return self._epoch(epoch)[start : start + count]
        parts = [self._epoch(epoch)[start:]]
        missing = count - len(parts[0])
        while missing > 0:
            epoch += 1
            parts.append(self._epoch(epoch)[:missing])
            missing -= len(parts[-1])
        result = np.concatenate(parts)
        result.flags.writeable = False
        return result

    def _epoch(self, epoch: int) -> np.ndarray:
        order = self._epochs.get(epoch)
        if order is None:
            order = permutation(self.seed, "order", epoch, self.samples)
            order.flags.writeable = False
            while len(self._epochs) >= _EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = order
        return order
