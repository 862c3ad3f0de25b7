"""Data sets by name, the hold-out, label noise, and the checks on what is opened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.holdout import randomised, stratified
from shoal.data.keyed import raw
from shoal.data.sets import DIGITS_FILE, from_arrays, open_set
from shoal.errors import InputError

FIXED = settings(derandomize=True, deadline=None)


@dataclass(frozen=True)
class Options:
    set: str = "digits"
    root: str | None = None
    noise: float = 0.2
    validation: float = 0.0
    shape: tuple[int, ...] = (8, 8, 1)
    classes: int | None = None
    train: int = 100
    test: int = 30


def arrays(**changes: Any) -> dict[str, Any]:
    """A small valid set of 12 training and 6 test samples in 3 classes, with changes."""
    good: dict[str, Any] = {
        "x_train": np.arange(48, dtype=np.uint8).reshape(12, 2, 2),
        "y_train": np.arange(12) % 3,
        "x_test": np.arange(24, dtype=np.uint8).reshape(6, 2, 2),
        "y_test": np.arange(6) % 3,
    }
    return good | changes


def changed(name: str, place: Any, value: Any) -> dict[str, Any]:
    """The small set with one element of one array changed."""
    array = arrays()[name].copy()
    array[place] = value
    return {name: array}


def test_digits_is_the_whole_bundled_set() -> None:
    import h5py

    data = open_set(Options(), 1)
    assert data.train.x.shape == (1437, 8, 8, 1) and data.train.x.dtype == np.uint8
    assert data.test.x.shape == (360, 8, 8, 1) and data.test.y.dtype == np.int64
    assert (data.classes, data.outputs, data.sample_shape) == (10, 10, (8, 8, 1))
    assert data.validation is None and data.caption == "digits"
    assert data.train.x.max() == 16 and float(data.scale) == 1 / 16 and float(data.shift) == 0
    with h5py.File(DIGITS_FILE) as file:
        index = np.concatenate([file["index_train"][()], file["index_test"][()]])
        assert "10.24432/C50P49" in file.attrs["attribution"] and "CC BY 4.0" in file.attrs["licence"]
    assert sorted(index.tolist()) == list(range(1797))
    assert DIGITS_FILE.stat().st_size < 100_000


def test_digits_split_is_class_stratified_and_shuffled() -> None:
    data = open_set(Options(), 1)
    whole = np.bincount(data.train.y) + np.bincount(data.test.y)
    assert np.abs(np.bincount(data.test.y) - whole * 360 / 1797).max() < 1
    assert len(np.unique(data.train.y[:100])) == 10 and (np.diff(data.train.y) != 0).mean() > 0.8


def test_digits_are_scikit_learns_samples() -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn's copy to compare with")
    import h5py

    source = datasets.load_digits()
    with h5py.File(DIGITS_FILE) as file:
        for part in ("train", "test"):
            index = file[f"index_{part}"][()]
            assert np.array_equal(file[f"x_{part}"][()][..., 0], source.images[index])
            assert np.array_equal(file[f"y_{part}"][()], source.target[index])


@pytest.mark.parametrize("noise", [0.0, 0.07, 0.2, 1.0])
def test_digits_noisy_changes_only_training_labels(noise: float) -> None:
    clean = open_set(Options(validation=0.1), 3)
    noisy = open_set(Options(set="digits-noisy", noise=noise, validation=0.1), 3)
    assert clean.validation is not None and noisy.validation is not None
    assert np.array_equal(noisy.train.x, clean.train.x)
    assert np.array_equal(noisy.test.y, clean.test.y)
    assert np.array_equal(noisy.validation.y, clean.validation.y)
    changed = (noisy.train.y != clean.train.y).mean()
    assert abs(changed - 0.9 * noise) < 0.03
    assert noisy.caption == f"digits, {round(100 * noise)}% of training labels randomised"


def test_noise_and_hold_out_are_keyed_by_the_seed() -> None:
    options = Options(set="digits-noisy", validation=0.1)
    first, again, other = open_set(options, 3), open_set(options, 3), open_set(options, 4)
    assert np.array_equal(first.train.y, again.train.y) and np.array_equal(first.train.x, again.train.x)
    assert not np.array_equal(first.train.x, other.train.x)
    plain = replace(options, validation=0.0)
    assert not np.array_equal(open_set(plain, 3).train.y, open_set(plain, 4).train.y)


@FIXED
@given(share=st.floats(0, 1), samples=st.integers(1, 300), seed=st.integers(0, 9))
def test_exactly_the_share_of_labels_is_drawn_anew(share: float, samples: int, seed: int) -> None:
    # With labels outside the range of the draw, every randomised label shows.
    labels = np.full(samples, 99)
    result = randomised(labels, share, 10, seed)
    touched = result != 99
    assert touched.sum() == round(share * samples)
    assert ((result[touched] >= 0) & (result[touched] < 10)).all()
    assert (labels == 99).all()


def test_randomised_labels_are_uniform_and_may_be_true() -> None:
    labels = np.zeros(20_000, np.int64)
    counts = np.bincount(randomised(labels, 1.0, 10, 1), minlength=10)
    assert np.abs(counts - 2000).max() < 200


@FIXED
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=80),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
)
def test_hold_out_takes_exactly_its_count_and_each_class_its_share(labels: list[int], share: float, seed: int) -> None:
    strata = np.array(labels)
    count = round(share * len(strata))
    chosen = stratified(strata, count, seed, "test")
    assert chosen.sum() == count
    for label in np.unique(strata):
        members = strata == label
        assert abs(chosen[members].sum() - count * members.sum() / len(strata)) < 1


def test_validation_comes_out_of_the_training_set() -> None:
    whole, held = open_set(Options(), 1), open_set(Options(validation=0.1), 1)
    assert held.validation is not None
    assert len(held.validation) == 144 and len(held.train) == 1437 - 144
    rows = [*held.train.x.reshape(-1, 64), *held.validation.x.reshape(-1, 64)]
    assert sorted(r.tobytes() for r in rows) == sorted(r.tobytes() for r in whole.train.x.reshape(-1, 64))
    assert np.array_equal(held.test.x, whole.test.x)


def test_synthetic_has_the_shape_asked_for_and_is_keyed() -> None:
    options = Options(set="synthetic", shape=(5, 3), classes=7, train=101, test=9)
    data, again, other = open_set(options, 1), open_set(options, 1), open_set(options, 2)
    assert data.train.x.shape == (101, 5, 3) and data.test.x.shape == (9, 5, 3) and data.classes == 7
    assert set(data.train.y.tolist()) == set(range(7)) and data.test.y.max() < 7
    assert np.array_equal(data.train.x, again.train.x) and np.array_equal(data.test.y, again.test.y)
    assert not np.array_equal(data.train.x, other.train.x)
    larger = open_set(replace(options, train=200), 1)
    assert np.array_equal(larger.train.x[:101], data.train.x)


def test_synthetic_bytes_are_the_same_on_every_machine() -> None:
    data = open_set(Options(set="synthetic", shape=(4,), train=3, test=1), 1)
    words = raw(1, "synthetic-x", 0, 0, 2).tolist()
    assert data.train.x.tobytes() == b"".join(word.to_bytes(8, "little") for word in words)[:12]


def test_bytes_are_scaled_and_floats_are_not() -> None:
    assert from_arrays(**arrays()).scale == np.float32(1 / 255)
    x = {name: np.ones((n, 2), np.float64) for name, n in (("x_train", 12), ("x_test", 6))}
    data = from_arrays(**arrays(**x))
    assert float(data.scale) == 1 and data.train.x is x["x_train"]


def test_class_number_is_counted_or_stated() -> None:
    assert from_arrays(**arrays()).classes == 3
    assert from_arrays(**arrays(), classes=5).classes == 5


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_regression_targets_have_an_output_axis(shape: tuple[int, ...]) -> None:
    y = {"y_train": np.zeros((12, *shape)), "y_test": np.zeros((6, *shape), np.float16)}
    data = from_arrays(**arrays(**y))
    assert data.classes == 0 and data.train.y.dtype == np.float32
    assert data.train.y.shape == (12, *(shape or (1,)))
    assert data.outputs == max(1, int(np.prod(shape)))


def test_other_byte_orders_and_half_precision_are_converted() -> None:
    x = {"x_train": np.ones((12, 2), ">f4"), "x_test": np.ones((6, 2), np.float16)}
    data = from_arrays(**arrays(**x))
    assert data.train.x.dtype == np.float32 and data.test.x.dtype == np.float32
    assert data.train.x.dtype.isnative and (data.train.x == 1).all()


FLOATS = {"x_train": np.zeros((12, 4), np.float32), "x_test": np.zeros((6, 4), np.float32)}
NAN_AT_2_1 = FLOATS["x_train"].copy()
NAN_AT_2_1[2, 1] = np.nan

BAD_ARRAYS = [
    (changed("y_train", 7, 9), r"y_train\[7\] is 9, but labels must run from 0 without a gap and none is 3"),
    (changed("y_train", 4, -2), r"y_train\[4\] is -2"),
    (changed("y_test", 3, 3), r"y_test\[3\] is 3, but with 3 classes labels must lie in 0 \.\.\. 2"),
    ({"y_test": np.array([0, 1, 2, 0, 1, 2**64 - 1], np.uint64)}, r"y_test\[5\] is 18446744073709551615"),
    ({"y_train": np.arange(11) % 3}, "x_train holds 12 samples and y_train 11"),
    ({"y_test": np.arange(7) % 3}, "x_test holds 6 samples and y_test 7"),
    ({"x_test": np.zeros((6, 2, 3), np.uint8)}, r"x_test holds uint8 samples of shape \(2, 3\)"),
    ({"x_test": np.zeros((6, 2, 2), np.float32)}, "x_test holds float32 samples"),
    ({"y_test": np.zeros(6, np.float32)}, "y_test holds float32 samples"),
    ({"x_train": np.zeros((12, 2, 2), np.int64)}, "x_train has dtype int64"),
    ({"x_train": np.array([["a"]] * 12)}, "x_train has dtype <U1"),
    ({"x_train": [[1, 2], [3]]}, "x_train is not a rectangular array"),
    ({"y_train": np.zeros(12, bool)}, "y_train has dtype bool"),
    ({"y_train": np.zeros((12, 3), np.int64)}, r"y_train has shape \(12, 3\)"),
    ({"y_train": np.float32(3)}, r"y_train has shape \(\)"),
    ({"x_train": np.zeros(12, np.uint8)}, r"x_train has shape \(12,\)"),
    ({"x_train": np.zeros((0, 2, 2), np.uint8)}, r"x_train has shape \(0, 2, 2\) and so is empty"),
    ({"y_test": np.zeros(0, np.int64)}, "y_test .* empty"),
    (FLOATS | {"x_train": NAN_AT_2_1}, r"x_train\[2, 1\] is nan"),
    (FLOATS | {"x_test": np.full((6, 4), 1e300)}, r"x_test\[0, 0\] is 1e\+300"),
    ({"y_train": np.full(12, np.inf), "y_test": np.zeros(6)}, r"y_train\[0\] is inf"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ARRAYS)
def test_bad_arrays_are_named(changes: dict[str, Any], message: str) -> None:
    from_arrays(**arrays())
    with pytest.raises(InputError, match=message) as caught:
        from_arrays(**arrays(**changes))
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


BAD_OPTIONS = [
    (Options(set="digit"), r"data.set is 'digit'.*did you mean 'digits'\?"),
    (Options(set="imagenet"), "known sets are digits, digits-noisy, cifar10, hdf5, synthetic"),
    (Options(set="digits-noisy", noise=1.5), "data.noise is 1.5"),
    (Options(validation=1.0), "data.validation is 1.0"),
    (Options(validation=1e-6), "holds out 0 of 1437"),
    (Options(set="cifar10"), "data.root is not set"),
    (Options(set="hdf5", root=""), "data.root is not set"),
    (Options(set="synthetic", shape=(0,)), r"data.shape is \[0\]"),
    (Options(set="synthetic", shape=()), r"data.shape is \[\]"),
    (Options(set="synthetic", train=0), "data.train is 0"),
    (Options(set="synthetic", classes=0), "data.classes is 0"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_are_named(options: Options, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_set(options, 1)


def test_labels_with_stated_classes_must_be_integers() -> None:
    with pytest.raises(InputError, match="y_train holds floating-point targets, but with 3 classes"):
        from_arrays(**arrays(y_train=np.zeros(12), y_test=np.zeros(6)), classes=3)


def test_hdf5_set_opens_by_name_and_names_the_file_in_errors(tmp_path: Path) -> None:
    import h5py

    path = tmp_path / "mine.h5"
    with h5py.File(path, "w") as file:
        for name, values in arrays().items():
            file[name] = values
    data = open_set(Options(set="hdf5", root=str(path), validation=0.25), 1)
    assert data.name == "mine" and data.classes == 3 and len(data.train) == 9
    with pytest.raises(InputError, match=r"mine\.h5: y_train\[2\] is 2, but with 2 classes"):
        open_set(Options(set="hdf5", root=str(path), classes=2), 1)
