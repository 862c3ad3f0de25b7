"""Keyed dropout: which numbers are dropped depends on the seed, the layer and the sample's position alone."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.backend import numpy_backend
from shoal.errors import InputError
from shoal.model import BatchNorm, Dropout, Flatten, Linear, Model, Sequential

SHAPE = (5, 7)


def prepared(rate, seed=3, name="2", dtype=np.float32):
    layer = Dropout(rate)
    layer.prepare(numpy_backend(), dtype)
    layer.name, layer.seed = name, seed
    return layer


def masks(layer, position, count, shape=SHAPE):
    """The factors of samples [position, position + count)."""
    layer.position = position
    return layer.forward(np.ones((count, *shape), np.float32), True).copy()


@pytest.mark.parametrize("shape", [SHAPE, (1,), (16,), (3, 3, 2)])
def test_a_sample_has_its_mask_in_whatever_batch(shape):
    layer = prepared(0.4)
    whole = masks(layer, 11, 20, shape)
    for start, count in ((0, 1), (3, 4), (7, 13), (19, 1)):
        assert np.array_equal(masks(layer, 11 + start, count, shape), whole[start : start + count])


def test_other_samples_layers_and_seeds_have_other_masks():
    reference = masks(prepared(0.5), 0, 8, (64,))
    assert len({row.tobytes() for row in reference}) == 8
    for other in (prepared(0.5, seed=4), prepared(0.5, name="3")):
        assert not np.array_equal(masks(other, 0, 8, (64,)), reference)
    far = masks(prepared(0.5), 2**40, 8, (64,))
    assert not np.array_equal(far, reference)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_that_is_kept_and_the_factor(rate):
    drawn = masks(prepared(rate), 0, 400, (100,))
    kept = drawn > 0
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / kept.size)
    assert np.allclose(drawn[kept], 1 / (1 - rate), rtol=1e-4)


def test_forward_and_backward_have_one_mask():
    layer = prepared(0.3)
    factors = masks(layer, 5, 6)
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=(6, *SHAPE)).astype(np.float32) for _ in (0, 1))
    assert np.array_equal(layer.forward(x, True), x * factors)
    assert np.array_equal(layer.backward(dy), dy * factors)


@pytest.mark.parametrize(("rate", "position", "training"), [(0.5, 1, False), (0.5, None, True), (0.0, 1, True)])
def test_it_is_the_identity_in_evaluation_in_recalibration_and_at_rate_0(rate, position, training):
    layer = prepared(rate)
    layer.position = position
    x = np.random.default_rng(0).normal(size=(6, *SHAPE)).astype(np.float32)
    assert np.array_equal(layer.forward(x, training), x) and np.array_equal(layer.backward(x), x)


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5, "0.5", True, float("nan")])
def test_a_wrong_rate_is_refused(rate):
    with pytest.raises(InputError, match="Dropout with rate="):
        Dropout(rate)


def model_of(seed=1, rate=0.5):
    net = Sequential(Flatten(), Linear(35, 16), BatchNorm(16), Dropout(rate), Linear(16, 3))
    backend = numpy_backend()
    model = Model(net, SHAPE, "cross-entropy", backend, seed=seed)
    weights, gradient = backend.zeros(model.layout.size), backend.zeros(model.layout.parameters)
    model.initialise(weights, 0)
    model.bind(weights, gradient)
    return model, weights, gradient


def test_a_model_drops_by_position_and_seed():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(8, *SHAPE)).astype(np.float32), rng.integers(0, 3, 8)
    found = []
    for seed, position in ((1, 0), (1, 8), (1, 0), (2, 0)):
        model, _, gradient = model_of(seed)
        model.gradient(x, y, 99)
        found.append((model.gradient(x, y, position), gradient.tobytes()))
    assert found[0] == found[2] and len(set(found)) == 3


def test_evaluation_and_recalibration_drop_nothing():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(8, *SHAPE)).astype(np.float32), rng.integers(0, 3, 8)
    dropping, keeping = model_of(rate=0.5), model_of(rate=0.0)
    for model, _, _ in (dropping, keeping):
        model.recalibrate([x[:4], x[4:]])
    assert np.array_equal(dropping[1], keeping[1])
    assert dropping[0].evaluate(x, y) == keeping[0].evaluate(x, y)
