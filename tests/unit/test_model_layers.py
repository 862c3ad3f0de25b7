"""Each layer: its gradient by central differences in float64, its values by a plain formula."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.backend import numpy_backend
from shoal.errors import InputError
from shoal.model import (
    AveragePool,
    BatchNorm,
    Conv2d,
    FlatBuffer,
    Flatten,
    GlobalPool,
    Linear,
    MaxPool,
    Model,
    ReLU,
    Residual,
    Sequential,
    Sigmoid,
    SqueezeExcitation,
)

STEP = 1e-5
DIRECTIONS = 5


def bound(layer, shape, seed=0):
    """A float64 model of one layer with random weights, and its weights and gradient buffers."""
    backend = numpy_backend()
    model = Model(layer, shape, "mse", backend, np.float64)
    weights = FlatBuffer(model.layout, backend, np.float64)
    gradient = backend.zeros(model.layout.parameters, np.float64)
    model.initialise(weights.flat, seed)
    rng = np.random.default_rng(seed)
    weights.flat[: model.layout.parameters] += 0.3 * rng.normal(size=model.layout.parameters)
    model.bind(weights.flat, gradient)
    return model, weights, gradient


def check_gradient(layer, shape, batch=3):
    """The layer's gradients by its inputs and tensors agree with differences along random directions."""
    model, weights, gradient = bound(layer, shape)
    rng = np.random.default_rng(1)
    count = model.layout.parameters
    x = rng.normal(size=(batch, *shape))
    start = weights.flat[:count].copy()
    c = rng.normal(size=(batch, *model.output_shape))

    def value(step, dx, dw):
        weights.flat[:count] = start + step * dw
        return float((model.net.forward(x + step * dx, True) * c).sum())

    for _ in range(DIRECTIONS):
        dx, dw = rng.normal(size=x.shape), rng.normal(size=count)
        gradient.fill(np.nan)
        value(0, dx, dw)
        by_x = model.net.backward(c).copy()
        views = model.layout.views(gradient)
        along = model.layout.views(dw)
        expected = (value(STEP, dx, dw) - value(-STEP, dx, dw)) / (2 * STEP)
        got = float((by_x * dx).sum()) + sum(float((views[name] * along[name]).sum()) for name in views)
        assert got == pytest.approx(expected, rel=1e-6, abs=1e-9)


IMAGE = (7, 6, 3)
LAYERS = [
    (Linear(5, 4), (5,)),
    (Linear(5, 1, bias=False), (5,)),
    (ReLU(), (4, 3)),
    (Sigmoid(), (9,)),
    (Flatten(), IMAGE),
    (Sequential(), IMAGE),
    (Conv2d(3, 4), IMAGE),
    (Conv2d(3, 4, 3, padding=1), IMAGE),
    (Conv2d(3, 4, 3, stride=2, padding=1, bias=False), IMAGE),
    (Conv2d(3, 2, 3, stride=3), IMAGE),
    (Conv2d(3, 2, 2, stride=3, padding=2), IMAGE),
    (Conv2d(3, 2, 5, stride=2, padding=2), IMAGE),
    (Conv2d(3, 4, 1), IMAGE),
    (Conv2d(3, 4, 1, stride=2), IMAGE),
    (Conv2d(1, 2, 3, padding=1), (8, 9, 1)),
    (Conv2d(1, 2, 3, stride=2), (8, 9, 1)),
    (BatchNorm(5), (5,)),
    (BatchNorm(3), IMAGE),
    (MaxPool(2), IMAGE),
    (MaxPool(3, stride=2), IMAGE),
    (MaxPool(2, stride=3), IMAGE),
    (AveragePool(2), IMAGE),
    (AveragePool(3, stride=1), IMAGE),
    (GlobalPool(), IMAGE),
    (Residual(Sequential(Conv2d(3, 3, padding=1), BatchNorm(3), ReLU(), Conv2d(3, 3, padding=1))), IMAGE),
    (Residual(Sequential(ReLU(), Conv2d(3, 4, stride=2, padding=1)), Conv2d(3, 4, 1, stride=2)), IMAGE),
    (BatchNorm(3, relu=True), IMAGE),
    (BatchNorm(5, relu=True), (5,)),
    (SqueezeExcitation(3, ratio=2), IMAGE),
    (Residual(Conv2d(3, 3, padding=1), joint=BatchNorm(3, relu=True)), IMAGE),
    (Residual(Conv2d(3, 4, stride=2, padding=1), Conv2d(3, 4, 1, stride=2), BatchNorm(4)), IMAGE),
    (Residual(Conv2d(3, 3, padding=1), joint=SqueezeExcitation(3, ratio=1)), IMAGE),
    (Residual(Sequential(), Sequential(ReLU(), Flatten(), Linear(6, 6)), BatchNorm(6, relu=True)), (6,)),
    (Residual(Flatten(), shortcut=Sequential(Flatten(), Linear(6, 6))), (2, 3)),
]


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda one: repr(one))
def test_gradient_of_every_layer(layer, shape):
    check_gradient(layer, shape)


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda one: repr(one))
def test_output_shape_is_the_shape_of_the_outputs_and_no_input_is_written(layer, shape):
    model, _, _ = bound(layer, shape)
    rng = np.random.default_rng(2)
    for batch in (2, 5):
        x = rng.normal(size=(batch, *shape))
        x.setflags(write=False)
        for training in (True, False):
            y = model.net.forward(x, training)
            assert y.shape == (batch, *layer.output_shape(shape))
        model.net.forward(x, True)
        dy = rng.normal(size=y.shape)
        dy.setflags(write=False)
        assert model.net.backward(dy).shape == x.shape


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2))
def test_convolution_is_the_plain_sum_over_windows(height, width, channels, kernel, stride, padding):
    layer = Conv2d(channels, 2, kernel, stride, padding)
    if min(height, width) + 2 * padding < kernel:
        with pytest.raises(InputError, match="kernel is larger"):
            layer.output_shape((height, width, channels))
        return
    model, weights, _ = bound(layer, (height, width, channels))
    x = np.random.default_rng(0).normal(size=(2, height, width, channels))
    padded = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    y = model.net.forward(x, False)
    for i, j in np.ndindex(y.shape[1:3]):
        window = padded[:, i * stride : i * stride + kernel, j * stride : j * stride + kernel]
        expected = np.tensordot(window, weights.views["weight"], 3) + weights.views["bias"]
        np.testing.assert_allclose(y[:, i, j], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("size", "stride"), [(2, 2), (3, 2), (2, 1), (1, 2)])
def test_pools_are_plain_windows(size, stride):
    x = np.random.default_rng(0).normal(size=(2, 7, 5, 3))
    for layer, plain in ((MaxPool(size, stride), np.max), (AveragePool(size, stride), np.mean)):
        model, _, _ = bound(layer, x.shape[1:])
        for training in (True, False):
            y = model.net.forward(x, training)
            for i, j in np.ndindex(y.shape[1:3]):
                window = x[:, i * stride : i * stride + size, j * stride : j * stride + size]
                np.testing.assert_allclose(y[:, i, j], plain(window, axis=(1, 2)))


def test_max_pool_gives_the_gradient_of_a_tie_to_the_first_place():
    model, _, _ = bound(MaxPool(2), (2, 2, 1))
    x = np.array([1.0, 3.0, 3.0, 3.0]).reshape(1, 2, 2, 1)
    model.net.forward(x, True)
    assert model.net.backward(np.full((1, 1, 1, 1), 5.0)).ravel().tolist() == [0, 5, 0, 0]


def test_sigmoid_and_relu_values():
    x = np.array([[-800.0, -1.0, 0.0, 1.0, 800.0]])
    model, _, _ = bound(Sigmoid(), (5,))
    with np.errstate(all="raise"):
        y = model.net.forward(x, False)
    np.testing.assert_allclose(y, [[0, 1 / (1 + np.e), 0.5, np.e / (1 + np.e), 1]])
    model, _, _ = bound(ReLU(), (5,))
    assert model.net.forward(x, True).tolist() == [[0, 0, 0, 1, 800]]
    assert model.net.backward(np.ones((1, 5))).tolist() == [[0, 0, 0, 1, 1]]


@pytest.mark.parametrize("shape", [(4,), (3, 2, 4)])
def test_batch_norm_has_the_values_and_statistics_of_the_plain_formula(shape):
    momentum, epsilon = 0.2, 1e-3
    model, weights, _ = bound(BatchNorm(4, momentum, epsilon), shape)
    rng = np.random.default_rng(0)
    running_mean, running_variance = np.zeros(4), np.ones(4)
    gamma, beta = weights.views["gamma"], weights.views["beta"]
    axes = tuple(range(len(shape)))
    for _ in range(3):
        x = 2 + 3 * rng.normal(size=(6, *shape))
        expected = gamma * (x - x.mean(axes)) / np.sqrt(x.var(axes) + epsilon) + beta
        np.testing.assert_allclose(model.net.forward(x, True), expected, rtol=1e-10, atol=1e-10)
        running_mean = (1 - momentum) * running_mean + momentum * x.mean(axes)
        running_variance = (1 - momentum) * running_variance + momentum * x.var(axes, ddof=1)
        np.testing.assert_allclose(weights.views["mean"], running_mean, rtol=1e-12)
        np.testing.assert_allclose(weights.views["variance"], running_variance, rtol=1e-12)
    expected = gamma * (x - running_mean) / np.sqrt(running_variance + epsilon) + beta
    before = weights.flat.copy()
    np.testing.assert_allclose(model.net.forward(x, False), expected, rtol=1e-10, atol=1e-10)
    assert np.array_equal(weights.flat, before), "evaluation moved the statistics"


def test_batch_norm_cannot_train_on_one_value():
    model, _, _ = bound(BatchNorm(4), (4,))
    with pytest.raises(InputError, match=r"BatchNorm\(4\).*batch >= 2"):
        model.net.forward(np.ones((1, 4)), True)


@pytest.mark.parametrize(
    ("make", "shape", "said"),
    [
        (lambda: Linear(5, 2), (6,), r"Linear\(5, 2\).*\(6,\).*5 inputs"),
        (lambda: Linear(5, 2), (2, 3), r"Linear\(5, 2\).*\(2, 3\).*Flatten"),
        (lambda: Conv2d(3, 2), (5,), "height, width and channels"),
        (lambda: Conv2d(3, 2), (8, 8, 1), r"3 channels; write Conv2d\(1, ...\)"),
        (lambda: Conv2d(3, 2, 9), (8, 8, 3), "kernel is larger"),
        (lambda: MaxPool(9), (8, 8, 3), "window is larger"),
        (lambda: AveragePool(2), (8,), "height, width and channels"),
        (lambda: GlobalPool(), (8, 2), "height, width and channels"),
        (lambda: BatchNorm(4), (8, 8, 3), "4 features"),
        (lambda: Residual(Linear(4, 3)), (4,), r"body gives \(3,\) and its shortcut \(4,\)"),
        (lambda: Sequential(Flatten(), Residual(Sequential(ReLU(), Linear(5, 5)))), (4,), r"layer 1.body.1 Linear"),
        (lambda: Linear(0, 3), (4,), "inputs=0"),
        (lambda: Conv2d(1, 2, kernel=2.5), (4, 4, 1), "kernel=2.5"),
        (lambda: Conv2d(1, 2, padding=-1), (4, 4, 1), "padding=-1"),
        (lambda: MaxPool(True), (4, 4, 1), "size=True"),
        (lambda: BatchNorm(4, momentum=0), (4,), "momentum=0"),
        (lambda: BatchNorm(4, epsilon=0), (4,), "epsilon=0"),
        (lambda: Sequential(Flatten(), ReLU), (4,), r"write ReLU\(...\)"),
        (lambda: Residual(np.tanh), (4,), "not a layer"),
        (lambda: Residual(ReLU(), joint=ReLU()), (4,), r"joint ReLU\(\).*BatchNorm"),
        (lambda: SqueezeExcitation(4), (4,), "images of 4 channels"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(make, shape, said):
    with pytest.raises(InputError, match=said) as caught:
        make().output_shape(shape)
    assert "\n" not in str(caught.value)
