"""Readers of data set files: HDF5 with training and test arrays, and CIFAR-10's binary layout.

A reader answers for the file: that it exists, is whole and holds what its format promises.  What must
hold of any arrays, wherever they come from, is in `checks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.data import checks
from shoal.errors import InputError

CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR10_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR10_TEST = "test_batch.bin"
CIFAR10_CLASSES = 10
CIFAR10_RECORDS = 10_000
CIFAR10_RECORD_BYTES = 1 + 3 * 32 * 32

# What h5py or NumPy may raise, depending on which part of a file is damaged.
_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError)


class Arrays(NamedTuple):
    """A data set as read: inputs (N, ...) and targets (N, ...) of the training and the test set."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def read_hdf5(path: str | Path) -> Arrays:
    """Read x_train, y_train, x_test, y_test, or train/x, train/y, test/x, test/y, from an HDF5 file.

    Raises InputError where the file is missing, is not HDF5, is truncated or damaged, or lacks one of
    the four datasets.
    """
    import h5py

    path = Path(path)
    if path.is_dir() or not path.exists():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise InputError(f"{path} {what}, but the hdf5 set needs an HDF5 file; correct data.root.")
    try:
        # A reader needs no lock, and many clusters' file systems refuse one.
        with h5py.File(path, "r", locking=False) as file:
            return Arrays(*(_dataset(file, path, kind, part) for part in ("train", "test") for kind in "xy"))
    except _DAMAGE as error:
        raise InputError(
            f"{path} cannot be read as HDF5 ({_one_line(error)}): it is truncated, damaged or of another "
            f"format; copy or write it again."
        ) from error


def _dataset(file: Any, path: Path, kind: str, part: str) -> np.ndarray:
    import h5py

    for name in (f"{kind}_{part}", f"{part}/{kind}"):
        if isinstance(file.get(name), h5py.Dataset):
            return np.asarray(file[name][()])
    found = ", ".join(sorted(map(str, file))) or "nothing"
    raise InputError(
        f"{path} has no dataset {kind}_{part} or {part}/{kind} (it holds {found}), but the hdf5 set needs "
        f"x and y for training and test; add the dataset or name another file as data.root."
    )


def read_cifar10(root: str | Path, records: int = CIFAR10_RECORDS) -> Arrays:
    """Read CIFAR-10's binary version: x uint8 (N, 32, 32, 3), y uint8 (N,).

    `root` is the folder that holds the six .bin files, or the one above it.  Each file must hold exactly
    `records` records of 3073 bytes: the label, then the red, green and blue planes, row by row.
    Raises InputError where the folder or a file is missing, or a file has another size or a wrong label.
    """
    folder = _cifar10_folder(Path(root))
    parts = [_cifar10_file(folder / name, records) for name in (*CIFAR10_TRAIN, CIFAR10_TEST)]
    x_train = np.empty((len(CIFAR10_TRAIN) * records, 32, 32, 3), np.uint8)
    y_train = np.empty(len(x_train), np.uint8)
    for i, part in enumerate(parts[:-1]):
        x_train[i * records : (i + 1) * records] = _pixels(part)
        y_train[i * records : (i + 1) * records] = part[:, 0]
    return Arrays(x_train, y_train, np.ascontiguousarray(_pixels(parts[-1])), parts[-1][:, 0].copy())


def _pixels(rows: np.ndarray) -> np.ndarray:
    """View the records' planes as (N, 32, 32, 3)."""
    return rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _cifar10_folder(root: Path) -> Path:
    for folder in (root / CIFAR10_FOLDER, root):
        if (folder / CIFAR10_TEST).exists() or (folder / CIFAR10_TRAIN[0]).exists():
            return folder
    if not root.is_dir():
        problem = "is not a folder" if root.exists() else "does not exist"
    elif (root / "cifar-10-batches-py").exists() or (root / "test_batch").exists():
        problem = "holds the Python version, which shoal does not unpickle"
    else:
        problem = f"holds neither {CIFAR10_FOLDER} nor {CIFAR10_TEST}"
    raise InputError(
        f"{root} {problem}, but cifar10 needs the binary version's files; correct data.root or download "
        f"them with `shoal data cifar10 --root {root}`."
    )


def _cifar10_file(path: Path, records: int) -> np.ndarray:
    expected_bytes = records * CIFAR10_RECORD_BYTES
    again = "download it again with `shoal data cifar10`"
    try:
        found = np.fromfile(path, np.uint8)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}), but cifar10 needs it; {again}.") from error
    if len(found) != expected_bytes:
        what = "truncated" if len(found) < expected_bytes else "not made of CIFAR-10's records"
        raise InputError(
            f"{path} is {what}: it has {len(found)} bytes, but must have {expected_bytes}, "
            f"{records} records of {CIFAR10_RECORD_BYTES} bytes; {again}."
        )
    rows = found.reshape(records, CIFAR10_RECORD_BYTES)
    checks.labels(rows[:, 0], CIFAR10_CLASSES, f"{path}: label")
    return rows


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
