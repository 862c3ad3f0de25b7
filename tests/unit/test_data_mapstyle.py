"""Map-style datasets: the batches, what random items depend on, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from shoal.backend import address, numpy_backend
from shoal.data.mapstyle import MapData
from shoal.data.order import SampleOrder
from shoal.errors import InputError


class Items:
    """A dataset of functions of the index; `reads` are the indices asked for."""

    def __init__(self, count: int, x: Any, y: Any = lambda i: i % 3) -> None:
        self.count, self.x, self.y, self.reads = count, x, y, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return self.x(index), self.y(index)


def plain(index: int) -> np.ndarray:
    return np.full((2, 3), index, np.float32)


def noisy(index: int) -> np.ndarray:
    return np.array([index, np.random.rand(), random.random()])


def data_of(x: Any = plain, y: Any = lambda i: i % 3, **options: Any) -> MapData:
    return MapData(Items(20, x, y), Items(7, x, y), **{"classes": 3, **options})


def batches_of(data: MapData, seed: int = 1) -> Any:
    return data.batches(SampleOrder(len(data.train), seed), numpy_backend())


def test_training_follows_the_order_and_reads_nothing_else() -> None:
    data = data_of()
    data.train.dataset.reads.clear()  # type: ignore[attr-defined]
    x, y = batches_of(data).training(17, 8)
    chosen = SampleOrder(20, 1).indices(17, 8)
    assert np.array_equal(x, np.stack([plain(i) for i in chosen])) and np.array_equal(y, chosen % 3)
    assert x.dtype == np.float32 and y.dtype == np.int64 and address(x) % 64 == 0
    assert data.train.dataset.reads == chosen.tolist()  # type: ignore[attr-defined]
    assert (data.sample_shape, data.classes, data.outputs, data.target_shape) == ((2, 3), 3, 3, ())


def test_chunks_of_other_splits() -> None:
    data = data_of(validation=Items(5, plain))
    x, y = batches_of(data).chunk(data.test, 4, 7)
    assert x[:, 0, 0].tolist() == [4, 5, 6] and y.tolist() == [1, 2, 0]
    assert data.validation is not None and len(data.validation) == 5


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float64, bool])
def test_samples_keep_their_dtype(dtype: Any) -> None:
    x, _ = batches_of(data_of(lambda i: np.full(4, i % 2, dtype))).training(0, 4)
    assert x.dtype == dtype


@pytest.mark.parametrize(("target", "shape"), [(0.5, ()), (np.ones(2), (2,)), (np.float32(3), ())])
def test_regression_targets_are_float32(target: Any, shape: Any) -> None:
    data = data_of(y=lambda i: target, classes=None)
    _, y = batches_of(data).training(0, 4)
    assert data.classes == 0 and y.dtype == np.float32 and y.shape == (4, *shape)


def test_random_items_depend_on_the_position_alone() -> None:
    reference = batches_of(data_of(noisy)).training(30, 12)[0].copy()
    random.seed(8)
    np.random.seed(8)
    other = batches_of(data_of(noisy))
    other.training(3, 5)
    for start, count in ((4, 3), (0, 12), (11, 1)):
        got, _ = other.training(30 + start, count)
        assert np.array_equal(got, reference[start : start + count])
    assert len({row[1] for row in reference}) == 12 and len({row[2] for row in reference}) == 12
    next_epoch = {row[0]: row[1] for row in other.training(20, 20)[0]}
    assert all(next_epoch[row[0]] != row[1] for row in other.training(0, 20)[0]), "another epoch draws anew"
    assert not np.array_equal(batches_of(data_of(noisy), seed=2).training(30, 12)[0][:, 1], reference[:, 1])


def test_evaluated_items_are_the_same_each_time() -> None:
    data = data_of(noisy)
    batches = batches_of(data)
    first = batches.chunk(data.test, 0, 7)[0].copy()
    batches.training(0, 7)
    assert np.array_equal(batches.chunk(data.test, 0, 7)[0], first)


def test_making_it_leaves_the_generators_alone() -> None:
    random.seed(3)
    np.random.seed(3)
    expected = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    data_of(noisy)
    assert (random.random(), np.random.rand()) == expected


def test_the_checksum_knows_other_data() -> None:
    sums = [
        data_of().checksum(),
        data_of(lambda i: plain(i) + 1).checksum(),
        data_of(y=lambda i: (i + 1) % 3).checksum(),
        MapData(Items(21, plain), Items(7, plain), classes=3).checksum(),
        data_of(lambda i: plain(i).reshape(3, 2)).checksum(),
    ]
    assert len(set(sums)) == 5 and data_of(noisy).checksum() == data_of(noisy).checksum()


class Listed(Items):
    classes = ("a", "b", "c", "d")


def test_classes_are_stated_or_listed() -> None:
    assert MapData(Listed(20, plain), Items(7, plain)).classes == 4
    with pytest.raises(InputError, match="does not list its classes; say how many"):
        MapData(Items(20, plain), Items(7, plain))


REFUSED: dict[str, tuple[Any, str]] = {
    "no dataset": (lambda: MapData(iter([1]), Items(7, plain), classes=3), "training set is a list_iterator"),
    "empty": (lambda: MapData(Items(20, plain), Items(0, plain), classes=3), "test set is empty"),
    "no pair": (lambda: MapData([1, 2, 3], [1, 2], classes=3), "sample 0 of the training set is a int"),
    "no numbers": (lambda: data_of(lambda i: "text"), "is a str; let the dataset return numbers"),
    "a text label": (lambda: data_of(y=lambda i: "cat"), "target of dtype <U3"),
    "several labels": (lambda: data_of(y=lambda i: [1, 2]), "give an integer label"),
    "classes of regression": (lambda: data_of(y=lambda i: 0.5), "leave it out for regression"),
    "unlike test": (lambda: MapData(Items(20, plain), Items(7, lambda i: [1.0]), classes=3), "test set has samples"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_data_are_refused(case: str) -> None:
    make, pattern = REFUSED[case]
    with pytest.raises(InputError, match=pattern):
        make()


@pytest.mark.parametrize(
    ("x", "y", "pattern"),
    [
        (lambda i: np.zeros(2 + i // 19), lambda i: 0, r"sample 19 of the training set has shape \(3,\)"),
        (plain, lambda i: i // 19 * 3, "sample 19 of the training set has label 3, but there are 3 classes"),
        (plain, lambda i: -(i // 19), "has label -1"),
    ],
)
def test_a_bad_item_is_named_when_it_is_read(x: Any, y: Any, pattern: str) -> None:
    with pytest.raises(InputError, match=pattern):
        batches_of(data_of(x, y)).training(0, 20)
