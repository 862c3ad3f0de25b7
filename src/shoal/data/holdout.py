"""Choosing samples by key: a class-stratified part of a set, and labels to randomise."""

from __future__ import annotations

import numpy as np

from shoal.data.keyed import permutation, raw


def stratified(strata: np.ndarray, count: int, seed: int, purpose: str) -> np.ndarray:
    """Choose `count` samples, of each class its share; returns the choice as bool (N,).

    `strata` is int64 (N,), the samples' labels (zeros to choose without regard to class).  Shares are
    proportional, rounded by largest remainder, so that exactly `count` samples are chosen.
    """
    classes, members = np.unique(strata, return_counts=True)
    quota, rest = np.divmod(count * members, len(strata))
    quota[np.argsort(-rest, kind="stable")[: count - int(quota.sum())]] += 1
    chosen = np.zeros(len(strata), bool)
    for label, size, share in zip(classes, members, quota, strict=True):
        where = np.flatnonzero(strata == label)
        chosen[where[permutation(seed, purpose, int(label), int(size))[:share]]] = True
    return chosen


def randomised(labels: np.ndarray, share: float, classes: int, seed: int) -> np.ndarray:
    """Return a copy of `labels`, int64 (N,), with round(share * N) of them replaced at random.

    A replacement is uniform over all classes, so that it may be the true label (one in `classes` is).
    """
    chosen = permutation(seed, "noise-samples", 0, len(labels))[: round(share * len(labels))]
    drawn = raw(seed, "noise-labels", 0, 0, len(labels)) % np.uint64(classes)
    result = labels.copy()
    result[chosen] = drawn[chosen].astype(np.int64)
    return result
