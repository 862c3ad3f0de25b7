"""Readers: both layouts each, and every way in which a file can be wrong."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from shoal.data import sets
from shoal.data.formats import CIFAR10_FOLDER, CIFAR10_TEST, CIFAR10_TRAIN, read_cifar10, read_hdf5
from shoal.data.sets import DIGITS_FILE, open_set
from shoal.errors import InputError

RECORDS = 4
RNG = np.random.default_rng(0)


def write_cifar10(folder: Path) -> dict[str, np.ndarray]:
    """Write six files of RECORDS records in the official layout; returns their records by file name."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name in (*CIFAR10_TRAIN, CIFAR10_TEST):
        rows = RNG.integers(0, 256, (RECORDS, 3073), dtype=np.uint8)
        rows[:, 0] = RNG.integers(0, 10, RECORDS)
        rows.tofile(folder / name)
        files[name] = rows
    return files


@pytest.mark.parametrize("below", [CIFAR10_FOLDER, "."])
def test_cifar10_is_read_in_nhwc_order(tmp_path: Path, below: str) -> None:
    files = write_cifar10(tmp_path / below)
    data = read_cifar10(tmp_path, RECORDS)
    assert data.x_train.shape == (5 * RECORDS, 32, 32, 3) and data.x_test.shape == (RECORDS, 32, 32, 3)
    third = files["data_batch_3.bin"]
    assert np.array_equal(data.y_train[2 * RECORDS : 3 * RECORDS], third[:, 0])
    # Row 7, column 11 of record 1: red, then green, then blue plane.
    planes = [third[1, 1 + plane * 1024 + 7 * 32 + 11] for plane in range(3)]
    assert data.x_train[2 * RECORDS + 1, 7, 11].tolist() == planes
    assert np.array_equal(data.y_test, files[CIFAR10_TEST][:, 0])
    assert data.x_test[0, 0, 1].tolist() == files[CIFAR10_TEST][0, [2, 1026, 2050]].tolist()


def test_cifar10_set_opens_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path)
    monkeypatch.setattr(sets, "read_cifar10", lambda root: read_cifar10(root, RECORDS))
    options = SimpleNamespace(set="cifar10", root=str(tmp_path), validation=0.0)
    data = open_set(options, 1)
    assert data.classes == 10 and data.sample_shape == (32, 32, 3)
    assert float(data.shift) == 0 and float(data.scale) == np.float32(1 / 255)


def test_cifar10_in_full_size_where_it_was_made(request: pytest.FixtureRequest) -> None:
    made = request.config.rootpath / "runs" / "cifar10"
    if not made.is_dir():
        pytest.skip("no CIFAR-10 files in runs/cifar10")
    data = read_cifar10(made)
    assert np.bincount(data.y_train).tolist() == [5000] * 10
    assert np.bincount(data.y_test).tolist() == [1000] * 10
    assert np.allclose(data.x_train[::50].mean((0, 1, 2)) / 255, [0.4914, 0.4822, 0.4465], atol=0.02)


def cut(path: Path, n_bytes: int) -> None:
    """Remove the file's last `n_bytes`."""
    path.write_bytes(path.read_bytes()[:-n_bytes])


def test_cifar10_files_that_are_wrong_are_named(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    with pytest.raises(InputError, match=r"data_batch_1\.bin is truncated: it has 12292 bytes.*30730000"):
        read_cifar10(tmp_path)
    with pytest.raises(InputError, match=r"data_batch_1\.bin is not made of CIFAR-10's records"):
        read_cifar10(tmp_path, RECORDS - 1)
    bad = tmp_path / "data_batch_2.bin"
    rows = np.fromfile(bad, np.uint8)
    rows[2 * 3073] = 10
    rows.tofile(bad)
    with pytest.raises(InputError, match=r"data_batch_2\.bin: label\[2\] is 10"):
        read_cifar10(tmp_path, RECORDS)
    cut(tmp_path / "data_batch_1.bin", 1)
    with pytest.raises(InputError, match=r"data_batch_1\.bin is truncated: it has 12291"):
        read_cifar10(tmp_path, RECORDS)
    (tmp_path / "data_batch_1.bin").unlink()
    with pytest.raises(InputError, match=r"data_batch_1\.bin cannot be read \(No such file"):
        read_cifar10(tmp_path, RECORDS)


def test_cifar10_folders_that_are_wrong_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere does not exist"):
        read_cifar10(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"holds neither cifar-10-batches-bin nor test_batch\.bin"):
        read_cifar10(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is not a folder"):
        read_cifar10(tmp_path / "file")
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(InputError, match="holds the Python version"):
        read_cifar10(tmp_path)


@pytest.mark.parametrize("names", ["x_train y_train x_test y_test", "train/x train/y test/x test/y"])
def test_hdf5_is_read_in_both_layouts(tmp_path: Path, names: str) -> None:
    values = [np.arange(6.0).reshape(3, 2), np.arange(3), np.ones((2, 2)), np.zeros(2, np.int8)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, array in zip(names.split(), values, strict=True):
            file[name] = array
    for got, array in zip(read_hdf5(tmp_path / "a.h5"), values, strict=True):
        assert got.dtype == array.dtype and np.array_equal(got, array)


def test_hdf5_files_that_are_wrong_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with pytest.raises(InputError, match=r"a\.h5 does not exist"):
        read_hdf5(path)
    with pytest.raises(InputError, match="is a folder"):
        read_hdf5(tmp_path)
    path.write_text("no HDF5")
    with pytest.raises(InputError, match=r"a\.h5 cannot be read as HDF5"):
        read_hdf5(path)
    with h5py.File(path, "w") as file:
        file["x_train"] = np.zeros((3, 2))
        file.create_group("y_train")
    with pytest.raises(InputError, match=r"no dataset y_train or train/y \(it holds x_train, y_train\)"):
        read_hdf5(path)


def test_hdf5_cut_anywhere_is_an_input_error(tmp_path: Path) -> None:
    whole = DIGITS_FILE.read_bytes()
    path = tmp_path / "cut.h5"
    for size in (0, 1, 100, 2000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match="truncated, damaged"):
            read_hdf5(path)


def test_hdf5_with_a_damaged_sample_is_an_input_error(tmp_path: Path) -> None:
    with h5py.File(DIGITS_FILE) as file:
        chunk = file["x_train"].id.get_chunk_info(0)
    damaged = bytearray(DIGITS_FILE.read_bytes())
    damaged[chunk.byte_offset + chunk.size // 2] ^= 0xFF
    path = tmp_path / "damaged.h5"
    path.write_bytes(damaged)
    with pytest.raises(InputError, match=r"damaged\.h5 cannot be read as HDF5"):
        read_hdf5(path)


def test_hdf5_with_any_byte_changed_gives_input_errors_only(tmp_path: Path) -> None:
    whole, path, chance, refused = DIGITS_FILE.read_bytes(), tmp_path / "changed.h5", random.Random(1), 0
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[chance.randrange(2048)] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            read_hdf5(path)
        except InputError:
            refused += 1
    assert refused >= 5
