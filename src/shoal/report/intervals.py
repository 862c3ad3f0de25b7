"""The median of repeated measurements, and an interval that holds the true median with 95% at least.

The interval is between two of the ordered values, so it supposes nothing of their distribution: the k-th smallest and
the k-th largest of n miss the median with the chance 2 * P(fewer than k heads in n throws). Up to 5 values are too few
for 95%; then it is their whole range, and `coverage` says what that holds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95


@dataclass(frozen=True)
class Median:
    """low and high: the interval; coverage: the chance that it holds the median of all there could be."""

    value: float
    low: float
    high: float
    coverage: float

    @staticmethod
    def of(values: Sequence[float]) -> Median:
        """Of one value or more."""
        ordered, n = sorted(values), len(values)
        k, tail = 0, 0.5**n  # the values left out on a side, and the chance that the median is among them or beyond
        while 2 * (tail + math.comb(n, k + 1) * 0.5**n) <= 1 - LEVEL:
            k += 1
            tail += math.comb(n, k) * 0.5**n
        return Median(statistics.median(ordered), ordered[k], ordered[n - 1 - k], max(0.0, 1 - 2 * tail))
