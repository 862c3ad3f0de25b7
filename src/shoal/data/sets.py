"""Data sets by name, each checked when it is opened.

A DataSet is three arrays of samples in the form they were stored in (bytes stay bytes) and the one affine
map that makes a batch of them:

    batch = (x - shift) * scale        in float32

The validation set is held out of the training set, by key and class by class; only then are labels
randomised where a set asks for it, so that test and validation labels are always the true ones.
"""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shoal.data import checks
from shoal.data.formats import CIFAR10_CLASSES, Arrays, read_cifar10, read_hdf5
from shoal.data.holdout import randomised, stratified
from shoal.data.keyed import raw
from shoal.errors import InputError

DIGITS_FILE = Path(__file__).with_name("digits.h5")
DIGITS_CLASSES = 10
SYNTHETIC_CLASSES = 10
_SAMPLES_AT_A_TIME = 64


@dataclass(frozen=True, eq=False)
class Split:
    """Samples and their targets.

    x: uint8, float32 or float64 (N, ...), C-contiguous.
    y: labels, int64 (N,), or regression targets, float32 (N, ...) with at least two axes.
    """

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.x)

    def take(self, chosen: np.ndarray) -> Split:
        """Return the samples chosen by a bool (N,) or an index array, as a copy."""
        return Split(self.x[chosen], self.y[chosen])


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set ready for training; `train` is without the validation set.

    classes: number of classes, 0 for regression.  caption: what a figure says of the data.
    shift, scale: float32, broadcastable to one sample.
    """

    name: str
    caption: str
    train: Split
    test: Split
    validation: Split | None
    classes: int
    shift: np.ndarray
    scale: np.ndarray

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.train.x.shape[1:]

    @property
    def sample_dtype(self) -> np.dtype[Any]:
        """The dtype of samples in a batch."""
        return np.dtype(np.float32)

    @property
    def target_shape(self) -> tuple[int, ...]:
        """The shape of one target; () for a label."""
        return self.train.y.shape[1:]

    @property
    def outputs(self) -> int:
        """How many outputs a net for this set has: one a class, or one a regression target."""
        return self.classes or int(np.prod(self.target_shape))

    def checksum(self) -> str:
        """Of all samples and targets, and how samples are mapped."""
        splits = [split for split in (self.train, self.test, self.validation) if split is not None]
        total = 0
        for array in (self.shift, self.scale, *(array for split in splits for array in (split.x, split.y))):
            total = zlib.crc32(np.ascontiguousarray(array).data, zlib.crc32(repr(array.shape).encode(), total))
        return f"{total:08x}"


class DataOptions(Protocol):
    """What `open_set` reads of a config's [data] section; `classes` is None where it is not stated."""

    @property
    def set(self) -> str: ...
    @property
    def root(self) -> str | None: ...
    @property
    def noise(self) -> float: ...
    @property
    def validation(self) -> float: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def classes(self) -> int | None: ...
    @property
    def train(self) -> int: ...
    @property
    def test(self) -> int: ...


def open_set(options: DataOptions, seed: int) -> DataSet:
    """Open the set that `options.set` names; the same options and seed give the same bits.

    Raises InputError for an unknown name, and for whatever is wrong with the set's files or contents.
    """
    opener = _OPENERS.get(options.set)
    if opener is None:
        close = difflib.get_close_matches(options.set, _OPENERS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "name one of them."
        raise InputError(f"data.set is {options.set!r}, but the known sets are {', '.join(_OPENERS)}; {hint}")
    return opener(options, seed)


def from_arrays(
    x_train: Any,
    y_train: Any,
    x_test: Any,
    y_test: Any,
    name: str = "arrays",
    classes: int | None = None,
    validation: float = 0.0,
    seed: int = 0,
) -> DataSet:
    """Make a DataSet of arrays: x (N, ...), and y either integer labels (N,) or float targets (N, ...).

    Bytes are scaled to 0 ... 1, floats are used as they are.  `classes` is counted if not stated.
    Arrays that already have the right form are not copied.  Raises InputError as `open_set` does.
    """
    data = _checked(Arrays(x_train, y_train, x_test, y_test), "", name, classes)
    return _hold_out(data, validation, seed)


def normalised(data: DataSet) -> DataSet:
    """Return the set with each channel (the last axis) mapped to mean 0 and standard deviation 1 over `train`.

    A channel that does not vary by more than float32 can tell is only shifted.
    """
    x = data.train.x
    values = x.size // x.shape[-1]
    mean = _channel_sum(x, 0.0, 1) / values
    deviation = np.sqrt(_channel_sum(x, mean, 2) / values)
    varies = deviation > np.finfo(np.float32).eps * np.abs(mean)
    return _mapped(data, mean, 1 / np.where(varies, deviation, 1))


def _digits(options: DataOptions, seed: int) -> DataSet:
    data = _checked(read_hdf5(DIGITS_FILE), f"{DIGITS_FILE}: ", "digits", DIGITS_CLASSES)
    return _hold_out(_mapped(data, 0.0, 1 / 16), options.validation, seed)


def _digits_noisy(options: DataOptions, seed: int) -> DataSet:
    if not 0 <= options.noise <= 1:
        raise InputError(f"data.noise is {options.noise}, but must lie in 0 ... 1; it is a share of the labels.")
    data = _digits(options, seed)
    noisy = Split(data.train.x, randomised(data.train.y, options.noise, data.classes, seed))
    caption = f"digits, {100 * options.noise:g}% of training labels randomised"
    return replace(data, name="digits-noisy", train=noisy, caption=caption)


def _cifar10(options: DataOptions, seed: int) -> DataSet:
    root = _root(options, "the folder that holds the binary version")
    data = _checked(read_cifar10(root), f"{root}: ", "cifar10", CIFAR10_CLASSES)
    return _hold_out(data, options.validation, seed)


def _hdf5(options: DataOptions, seed: int) -> DataSet:
    path = _root(options, "the file")
    arrays = read_hdf5(path)
    classes = None if arrays.y_train.dtype.kind == "f" else options.classes
    data = _checked(arrays, f"{path}: ", path.stem, classes)
    return _hold_out(data, options.validation, seed)


def _synthetic(options: DataOptions, seed: int) -> DataSet:
    shape = tuple(options.shape)
    classes = SYNTHETIC_CLASSES if options.classes is None else options.classes
    for key, value in (("train", options.train), ("test", options.test), ("classes", classes)):
        if value < 1:
            raise InputError(f"data.{key} is {value}, but must be at least 1; synthetic data needs some.")
    if not shape or min(shape) < 1:
        raise InputError(f"data.shape is {list(shape)}, but needs one or more positive sizes, as in [8, 8, 1].")
    parts: list[np.ndarray] = []
    for part, samples in enumerate((options.train, options.test)):
        size = samples * int(np.prod(shape))
        words = raw(seed, "synthetic-x", part, 0, -(-size // 8)).astype("<u8", copy=False)
        y = raw(seed, "synthetic-y", part, 0, samples) % np.uint64(classes)
        parts += [words.view(np.uint8)[:size].reshape(samples, *shape), y]
    data = _checked(Arrays(*parts), "", "synthetic", classes)
    # Uniform bytes have mean 127.5 and standard deviation 73.9.
    return _hold_out(_mapped(data, 127.5, 1 / 73.9), options.validation, seed)


_OPENERS: dict[str, Callable[[DataOptions, int], DataSet]] = {
    "digits": _digits,
    "digits-noisy": _digits_noisy,
    "cifar10": _cifar10,
    "hdf5": _hdf5,
    "synthetic": _synthetic,
}


def _root(options: DataOptions, what: str) -> Path:
    if not options.root:
        raise InputError(f"data.root is not set, but set = {options.set!r} needs it to name {what}; set it.")
    return Path(options.root).expanduser()


def _checked(arrays: Arrays, source: str, name: str, classes: int | None) -> DataSet:
    """Make a DataSet of arrays that pass every check; `source` opens the arrays' names in errors."""
    x_train, y_train, x_test, y_test = (source + field for field in Arrays._fields)
    train = _split(arrays.x_train, arrays.y_train, x_train, y_train)
    test = _split(arrays.x_test, arrays.y_test, x_test, y_test)
    checks.same_form(train.x, test.x, x_train, x_test)
    checks.same_form(train.y, test.y, y_train, y_test)
    if train.y.dtype == np.int64:
        classes = classes or checks.count_classes(train.y, y_train)
        checks.labels(train.y, classes, y_train)
        checks.labels(test.y, classes, y_test)
    elif classes:
        raise InputError(
            f"{y_train} holds floating-point targets, but with {classes} classes it must hold integer "
            f"labels; convert it, or leave the number of classes out for regression."
        )
    unmapped = DataSet(name, name, train, test, None, classes or 0, np.zeros(()), np.ones(()))
    return _mapped(unmapped, 0.0, 1 / 255 if train.x.dtype == np.uint8 else 1.0)


def _split(x: Any, y: Any, x_name: str, y_name: str) -> Split:
    split = Split(checks.features(x, x_name), checks.targets(y, y_name))
    checks.same_length(split.x, split.y, x_name, y_name)
    return split


def _mapped(data: DataSet, shift: float | np.ndarray, scale: float | np.ndarray) -> DataSet:
    return replace(data, shift=np.asarray(shift, np.float32), scale=np.asarray(scale, np.float32))


def _channel_sum(x: np.ndarray, shift: float | np.ndarray, power: int) -> np.ndarray:
    """The sum over all but the last axis of (x - shift)**power, in float64, sample after sample."""
    total = np.zeros(x.shape[1:])
    for start in range(0, len(x), _SAMPLES_AT_A_TIME):
        part = x[start : start + _SAMPLES_AT_A_TIME].astype(np.float64) - shift
        total += (part**power).sum(axis=0)
    return total.reshape(-1, x.shape[-1]).sum(axis=0)


def _hold_out(data: DataSet, share: float, seed: int) -> DataSet:
    """Move a share of the training set, of each class alike, to a validation set."""
    if not 0 <= share < 1:
        raise InputError(f"data.validation is {share}, but must lie in [0, 1); it is a share of the training set.")
    if share == 0:
        return data
    samples = len(data.train)
    count = round(share * samples)
    if not 0 < count < samples:
        raise InputError(
            f"data.validation is {share}, which holds out {count} of {samples} training samples, but both "
            f"sets need at least one; choose another share."
        )
    strata = data.train.y if data.classes else np.zeros(samples, np.int64)
    chosen = stratified(strata, count, seed, "validation")
    return replace(data, train=data.train.take(~chosen), validation=data.train.take(chosen))
