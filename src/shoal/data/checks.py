"""What must hold of the arrays of a data set before anything is trained on them.

Each check either returns the array in the form the rest of shoal relies on, or raises an InputError of
one sentence that names the array, the first offending sample and value, the rule and the way out.
`name` is how the user knows the array: "y_train", or "/data/mine.h5: y_train".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.errors import InputError


def as_array(values: Any, name: str) -> np.ndarray:
    """Return `values` as an array; a ragged list is an InputError."""
    try:
        return np.asarray(values)
    except ValueError as error:
        raise InputError(
            f"{name} is not a rectangular array ({error}), but every sample must have the same shape; "
            f"pad or crop the samples."
        ) from error


def features(values: Any, name: str) -> np.ndarray:
    """Return the inputs, C-contiguous uint8, float32 or float64 of shape (N, ...); float16 is widened.

    Raises InputError for another dtype, no samples, a missing sample axis, or a value that is not finite
    in float32, in which the network computes.
    """
    x = as_array(values, name)
    x = x.astype(np.float32 if x.dtype == np.float16 else x.dtype.newbyteorder("="), copy=False)
    if x.dtype not in (np.uint8, np.float32, np.float64):
        raise InputError(f"{name} has dtype {x.dtype}, but inputs must be uint8, float32 or float64; convert it.")
    if x.ndim < 2:
        raise InputError(
            f"{name} has shape {x.shape}, but inputs need a sample axis and at least one more, "
            f"(N, ...); reshape it, to (N, 1) if a sample is one number."
        )
    _not_empty(x, name)
    if x.dtype != np.uint8:
        _finite(x, name)
    return np.ascontiguousarray(x)


def targets(values: Any, name: str) -> np.ndarray:
    """Return the targets: labels as int64 (N,), regression targets as float32 (N, ...).

    One regression target per sample, shape (N,), becomes (N, 1), the shape of a network's output.
    Raises InputError for another dtype or shape, no samples, or a target that is not finite.
    """
    y = as_array(values, name)
    if y.dtype.kind not in "iuf":
        raise InputError(
            f"{name} has dtype {y.dtype}, but must hold integer labels or floating-point targets; convert it."
        )
    integers = y.dtype.kind in "iu"
    if y.ndim < 1 or (integers and y.ndim > 1):
        raise InputError(
            f"{name} has shape {y.shape}, but labels must have shape (N,) and regression targets (N, ...) "
            f"and be floating point; reshape or convert it."
        )
    _not_empty(y, name)
    if integers:
        if y.dtype == np.uint64:
            labels(y, 2**63, name)
        return np.ascontiguousarray(y, dtype=np.int64)
    _finite(y, name)
    return np.ascontiguousarray(y.reshape(len(y), -1) if y.ndim == 1 else y, dtype=np.float32)


def same_length(x: np.ndarray, y: np.ndarray, x_name: str, y_name: str) -> None:
    """Raise InputError unless `x` and `y` hold the same number of samples."""
    if len(x) != len(y):
        raise InputError(
            f"{x_name} holds {len(x)} samples and {y_name} {len(y)}, but each input needs one target; "
            f"make them equally long."
        )


def same_form(train: np.ndarray, test: np.ndarray, train_name: str, test_name: str) -> None:
    """Raise InputError unless both sets' samples have the same shape and dtype."""
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        raise InputError(
            f"{test_name} holds {test.dtype} samples of shape {test.shape[1:]} and {train_name} "
            f"{train.dtype} samples of shape {train.shape[1:]}, but both sets must be of one form; "
            f"convert one of them."
        )


def labels(y: np.ndarray, classes: int, name: str) -> None:
    """Raise InputError unless all labels, integers (N,), lie in 0 ... classes - 1."""
    bad = (y < 0) | (y >= classes)
    if bad.any():
        first = int(np.argmax(bad))
        raise InputError(
            f"{name}[{first}] is {y[first]}, but with {classes} classes labels must lie in "
            f"0 ... {classes - 1}; correct the data or the number of classes."
        )


def count_classes(y: np.ndarray, name: str) -> int:
    """Return the number of classes that training labels imply, where nobody has stated it.

    Every class must then occur: a label beyond a gap is more likely damage than a class.  Raises
    InputError naming the first such label, or a negative one.
    """
    present, first = np.unique(y, return_index=True)
    strays = np.flatnonzero(present != np.arange(len(present)))
    if len(strays):
        k = int(strays[0])
        raise InputError(
            f"{name}[{first[k]}] is {present[k]}, but labels must run from 0 without a gap and none is {k}; "
            f"correct the data, or state the number of classes if one does not occur."
        )
    return len(present)


def _not_empty(array: np.ndarray, name: str) -> None:
    if array.size == 0:
        raise InputError(
            f"{name} has shape {array.shape} and so is empty, but a set needs at least one sample; add data."
        )


def _finite(array: np.ndarray, name: str) -> None:
    with np.errstate(over="ignore"):
        finite = np.isfinite(array.astype(np.float32, copy=False))
    if not finite.all():
        first = np.unravel_index(int(np.argmin(finite)), array.shape)
        place = ", ".join(str(int(i)) for i in first)
        raise InputError(
            f"{name}[{place}] is {array[first]}, but values must be finite in float32; remove or replace the sample."
        )
