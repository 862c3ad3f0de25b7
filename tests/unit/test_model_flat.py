"""The flat buffer: aligned, complete, in the promised order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.backend import ALIGNMENT_BYTES, address, numpy_backend
from shoal.model import BatchNorm, Conv2d, FlatBuffer, Flatten, Layout, Linear, Model, Sequential, Tensor

KINDS = ("weight", "bias", "norm", "statistic")
SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(KINDS)), max_size=12)


@given(TENSORS)
def test_tensors_are_aligned_apart_and_in_three_parts(declared):
    layout = Layout(Tensor(str(i), shape, kind) for i, (shape, kind) in enumerate(declared))
    buffer = FlatBuffer(layout, numpy_backend(), np.float32)
    assert len(buffer.views) == len(declared)
    for i, name in enumerate(layout.names, start=1):
        view = buffer.views[name]
        assert view.shape == declared[int(name)][0]
        assert address(view) % ALIGNMENT_BYTES == 0
        view += i
    ends = {"weight": layout.decayed, "bias": layout.parameters, "norm": layout.parameters}
    for i, tensor in enumerate(layout.tensors, start=1):
        assert tensor.offset + tensor.size <= ends.get(tensor.kind, layout.size)
        assert np.all(buffer.views[tensor.name] == i), "written by another tensor too"
    assert np.count_nonzero(buffer.flat) == sum(tensor.size for tensor in layout.tensors)
    parts = [{"weight": 0, "bias": 1, "norm": 1, "statistic": 2}[tensor.kind] for tensor in layout.tensors]
    assert parts == sorted(parts)


def test_names_say_where_a_tensor_stands():
    net = Sequential(Conv2d(1, 2), BatchNorm(2), Flatten(), head=Sequential(Linear(8, 3)))
    layout = Model(net, (4, 4, 1), "mse", numpy_backend()).layout
    assert layout.names == (
        "0.weight",
        "head.0.weight",
        "0.bias",
        "1.gamma",
        "1.beta",
        "head.0.bias",
        "1.mean",
        "1.variance",
    )
    assert Model(Linear(2, 2), (2,), "mse", numpy_backend()).layout.names == ("weight", "bias")


def test_a_gradient_has_views_of_what_is_trained_only():
    layout = Layout([Tensor("w", (3, 3), "weight"), Tensor("g", (2,), "norm"), Tensor("m", (2,), "statistic")])
    assert list(layout.views(np.zeros(layout.parameters, np.float32))) == ["w", "g"]
    assert list(layout.views(np.zeros(layout.size, np.float32))) == ["w", "g", "m"]
    with pytest.raises(ValueError, match="elements"):
        layout.views(np.zeros(layout.size + 1, np.float32))


def test_descriptions_tell_layouts_apart():
    def text(*shape):
        return Layout([Tensor("w", shape, "weight"), Tensor("b", (2,), "bias")]).describe()

    assert text(2, 8) == text(2, 8)
    assert text(2, 8) != text(8, 2)
    assert text(2, 8) != Layout([Tensor("w", (2, 8), "bias"), Tensor("b", (2,), "bias")]).describe()


def test_sizes_may_be_numpy_integers():
    def text(classes):
        return Model(Linear(4, classes), (4,), "mse", numpy_backend()).layout.describe()

    assert text(np.int64(3)) == text(3)


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(ValueError, match="share a name"):
        Layout([Tensor("w", (1,), "weight"), Tensor("w", (1,), "bias")])
