"""Whole nets: right gradients, no memory a step, and bits that depend on weights and batch only."""

from __future__ import annotations

import functools
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from shoal.backend import numpy_backend
from shoal.data.order import SampleOrder
from shoal.data.sets import open_set
from shoal.errors import InputError
from shoal.model import (
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
    build,
    check_fit,
    resnet18,
    resnet20,
    senet18,
)

BACKEND = numpy_backend()
IMAGE = (8, 8, 1)


def options(net, batchnorm=False, hidden=(40, 33), width=4):
    return SimpleNamespace(net=net, batchnorm=batchnorm, hidden=list(hidden), width=width, dropout=0.0)


def residual():
    block = Sequential(Conv2d(4, 4, padding=1, bias=False), BatchNorm(4), ReLU(), Conv2d(4, 4, padding=1))
    wider = Sequential(BatchNorm(4), ReLU(), Conv2d(4, 6, stride=2, padding=1))
    joined = Residual(wider, shortcut=Conv2d(4, 6, 1, stride=2))
    return Sequential(Conv2d(1, 4, padding=1), Residual(block), joined, GlobalPool(), head=Linear(6, 3))


NETS = {
    "mlp": lambda: build(options("mlp"), IMAGE, 3),
    "mlp-norm": lambda: build(options("mlp", batchnorm=True), IMAGE, 3),
    "sigmoid": lambda: Sequential(Flatten(), Linear(64, 40), Sigmoid(), Linear(40, 3)),
    "convnet-s": lambda: build(options("convnet-s"), IMAGE, 3),
    "convnet-s-norm": lambda: build(options("convnet-s", batchnorm=True), IMAGE, 3),
    "residual": residual,
    **{make.__name__: functools.partial(make, 2, 3, 1) for make in (resnet18, resnet20, senet18)},
}


def bound(net, loss="cross-entropy", dtype=np.float32, seed=1, shape=IMAGE):
    model = Model(net, shape, loss, BACKEND, dtype)
    weights = FlatBuffer(model.layout, BACKEND, dtype)
    gradient = BACKEND.empty(model.layout.parameters, dtype)
    model.initialise(weights.flat, seed)
    model.bind(weights.flat, gradient)
    return model, weights, gradient


def batch(count, seed=0, loss="cross-entropy", shape=IMAGE, outputs=3):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, *shape)).astype(np.float32)
    if loss == "mse":
        return x, rng.normal(size=(count, outputs)).astype(np.float32)
    return x, rng.integers(0, outputs, count)


@pytest.mark.parametrize("loss", ["cross-entropy", "mse"])
@pytest.mark.parametrize("name", NETS)
def test_gradient_of_whole_nets_along_random_directions(name, loss):
    model, weights, gradient = bound(NETS[name](), loss, np.float64)
    x, y = batch(5, loss=loss)
    rng = np.random.default_rng(3)
    count, step = model.layout.parameters, 1e-6
    start = weights.flat.copy()
    model.gradient(x, y)
    exact = gradient.copy()
    for _ in range(3):
        direction = rng.normal(size=count)
        values = []
        for sign in (1, -1):
            weights.flat[:count] = start[:count] + sign * step * direction
            values.append(model.gradient(x, y))
        expected = (values[0] - values[1]) / (2 * step)
        assert float(exact @ direction) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("make", "width", "count"), [
    (resnet18, 64, 11_173_962), (senet18, 64, 11_260_354), (resnet20, 16, 272_474),
])  # fmt: skip
def test_the_papers_nets_have_the_published_numbers_of_parameters(make, width, count):
    model = Model(make(width), (32, 32, 3), "cross-entropy", BACKEND)
    assert sum(one.size for one in model.layout.tensors if one.kind != "statistic") == count
    named = build(options(make.__name__, width=width), (32, 32, 3), 10)
    assert Model(named, (32, 32, 3), "cross-entropy", BACKEND).layout.describe() == model.layout.describe()


def test_loss_values_are_the_plain_formulas():
    x, y = batch(6)
    model, _, _ = bound(NETS["mlp"]())
    scores = model.predict(x).astype(np.float64)
    chances = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    losses = -np.log(chances[np.arange(6), y])
    assert model.gradient(x, y) == pytest.approx(losses.mean(), rel=1e-6)
    total, correct = model.evaluate(x, y)
    assert total == pytest.approx(losses.sum(), rel=1e-6)
    assert correct == (scores.argmax(axis=1) == y).sum()
    x, y = batch(6, loss="mse")
    model, _, _ = bound(NETS["mlp"](), "mse")
    squares = (model.predict(x) - y.astype(np.float64)) ** 2
    assert model.gradient(x, y) == pytest.approx(squares.mean(), rel=1e-6)
    assert model.evaluate(x, y) == (pytest.approx(squares.mean(axis=1).sum(), rel=1e-6), 0)


def test_huge_scores_give_a_finite_loss_and_nan_weights_a_nan_without_warnings(recwarn):
    model, weights, _ = bound(NETS["mlp"]())
    x, y = batch(4)
    weights.flat *= 1e6
    assert np.isfinite(model.gradient(x, y))
    weights.flat.fill(np.nan)
    assert np.isnan(model.gradient(x, y))
    assert np.isnan(model.evaluate(x, y)[0])
    assert not recwarn.list


@pytest.mark.parametrize("name", NETS)
def test_a_step_allocates_nothing_after_the_first(name):
    """With 1024 samples every array of a layer is above 128 KB; NumPy's own loop buffers are below 100 KB."""
    model, _, _ = bound(NETS[name]())
    x, y = batch(1024)
    model.gradient(x, y)
    held = model.scratch_bytes
    tracemalloc.start()
    try:
        for _ in range(5):
            model.gradient(x, y)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 128 * 1024
    assert model.scratch_bytes == held > 0


@pytest.mark.parametrize("name", NETS)
def test_a_batch_gives_the_same_bits_whatever_ran_before(name):
    x, y = batch(8)
    model, weights, gradient = bound(NETS[name]())
    start = weights.flat.copy()

    def results():
        weights.flat[:] = start
        loss = model.gradient(x, y)
        return loss, gradient.tobytes(), weights.flat.tobytes(), model.evaluate(x, y)

    fresh = results()
    for count in (3, 8, 21, 8):
        other_x, other_y = batch(count, seed=count)
        model.gradient(other_x * 100, other_y)
        model.evaluate(other_x, other_y)
        assert results() == fresh
    again, weights, gradient = bound(NETS[name]())
    assert again.gradient(x, y) == fresh[0]
    assert gradient.tobytes() == fresh[1]


def test_bits_do_not_depend_on_where_the_batch_lies():
    x, y = batch(8)
    model, _, gradient = bound(NETS["mlp"]())
    model.gradient(x, y)
    expected = gradient.tobytes()
    for shift in (1, 3, 7):
        raw = np.empty(x.size + shift, np.float32)
        moved = raw[shift:].reshape(x.shape)
        moved[...] = x
        model.gradient(moved, y)
        assert gradient.tobytes() == expected


@pytest.mark.parametrize("name", ["convnet-s", "residual"])
def test_learners_that_share_a_model_train_as_with_a_model_each(name):
    steps, learners = 4, 3

    def train(model, weights, gradient, step, learner):
        model.gradient(*batch(4, seed=10 * step + learner))
        weights.flat[: model.layout.parameters] -= np.float32(0.05) * gradient

    alone = []
    for learner in range(learners):
        own = bound(NETS[name](), seed=learner)
        for step in range(steps):
            train(*own, step, learner)
        alone.append(own[1].flat.tobytes())
    shared = bound(NETS[name]())
    model, weights, _ = shared
    states = [weights.flat.copy() for _ in range(learners)]
    for learner, state in enumerate(states):
        model.initialise(state, learner)
    for step in range(steps):
        for learner, state in enumerate(states):
            weights.flat[:] = state
            train(*shared, step, learner)
            state[:] = weights.flat
    assert [state.tobytes() for state in states] == alone


def test_a_model_goes_back_and_forth_between_buffers_and_may_keep_its_statistics_apart():
    model, weights, gradient = bound(NETS["residual"]())
    one = model.bind(weights.flat, gradient)
    own, other, apart = (
        FlatBuffer(model.layout, BACKEND),
        BACKEND.zeros(gradient.size),
        FlatBuffer(model.layout, BACKEND),
    )
    model.initialise(own.flat, 2)
    apart.flat[:] = own.flat
    two = model.bind(BACKEND.read_only(own.flat), other, apart.flat)
    start, results = weights.flat.copy(), {}
    x, y = batch(6)
    for binding, array in ((one, gradient), (two, other), (one, gradient), (two, other)):
        weights.flat[:], apart.flat[model.layout.parameters :] = start, own.flat[model.layout.parameters :]
        model.use(binding)
        result = model.gradient(x, y), array.tobytes(), model.predict(x).tobytes()
        assert results.setdefault(id(array), result) == result
    assert results[id(gradient)] != results[id(other)]
    assert np.array_equal(apart.flat[: model.layout.parameters], own.flat[: model.layout.parameters])
    assert not np.array_equal(apart.flat, own.flat)


def test_initial_weights_are_keyed_bounded_and_independent_of_the_rest_of_the_net():
    model, weights, gradient = bound(NETS["convnet-s-norm"](), seed=5)
    for tensor in model.layout.tensors:
        view = weights.views[tensor.name]
        if tensor.kind == "weight":
            limit = np.sqrt(6 / tensor.fan_in)
            assert 0.5 * limit < np.abs(view).max() <= np.float32(limit)
            assert abs(view.mean()) < 0.5 * limit
        else:
            assert np.all(view == (1 if tensor.name.endswith(("gamma", "variance")) else 0))
    assert not gradient.any()
    again = np.full_like(weights.flat, np.nan)
    model.initialise(again, 5)
    assert again.tobytes() == weights.flat.tobytes()
    model.initialise(again, 6)
    assert again.tobytes() != weights.flat.tobytes()
    _, longer, _ = bound(Sequential(*NETS["convnet-s-norm"]().children.values(), ReLU(), Linear(3, 2)), seed=5)
    assert np.array_equal(longer.views["0.weight"], weights.views["0.weight"])


def test_recalibration_takes_the_mean_of_the_batch_statistics():
    model, weights, _ = bound(Sequential(BatchNorm(64, momentum=0.3)), "mse", np.float64, shape=(64,))
    weights.views["0.mean"].fill(7)
    batches = [batch(6, seed=s)[0].reshape(6, 64).astype(np.float64) for s in range(4)]
    model.recalibrate(batches)
    np.testing.assert_allclose(weights.views["0.mean"], np.mean([x.mean(axis=0) for x in batches], axis=0))
    np.testing.assert_allclose(weights.views["0.variance"], np.mean([x.var(axis=0, ddof=1) for x in batches], axis=0))
    before = weights.views["0.mean"].copy()
    model.gradient(batches[0], np.zeros((6, 64)))
    np.testing.assert_allclose(weights.views["0.mean"], 0.7 * before + 0.3 * batches[0].mean(axis=0))


def test_a_net_is_a_description_and_can_be_used_by_many_models():
    net = NETS["convnet-s-norm"]()
    x, y = batch(4)
    one, _, first = bound(net, seed=1)
    two, _, second = bound(net, seed=2)
    three, _, third = bound(one.net, seed=1)
    one.gradient(x, y)
    expected = first.tobytes()
    two.gradient(x, y)
    three.gradient(x, y)
    assert first.tobytes() == expected == third.tobytes() != second.tobytes()


def test_predictions_are_the_callers_own():
    model, _, _ = bound(NETS["mlp"]())
    outputs = model.predict(batch(4, seed=1)[0])
    before = outputs.copy()
    model.predict(batch(4, seed=2)[0])
    assert np.array_equal(outputs, before)


@pytest.mark.parametrize("shape", [(8, 8, 1), (32, 32, 3), (28, 28, 1), (2, 3, 2)])
@pytest.mark.parametrize("batchnorm", [False, True])
def test_convnet_s_fits_images_of_all_sizes(shape, batchnorm):
    net = build(options("convnet-s", batchnorm, width=0), shape, 10)
    model, _, gradient = bound(net, shape=shape)
    model.gradient(*batch(2, shape=shape, outputs=10))
    assert np.isfinite(gradient).all()
    assert model.outputs == 10
    assert model.layout.decayed < 50_000


@pytest.mark.parametrize("batchnorm", [False, True])
def test_convnet_s_learns_digits(batchnorm):
    source = SimpleNamespace(set="digits", root=None, noise=0.0, validation=0.0)
    data = open_set(source, seed=1)
    model, weights, gradient = bound(build(options("convnet-s", batchnorm, width=16), IMAGE, 10))

    def taken(split, chosen):
        return (split.x[chosen].astype(np.float32) - data.shift) * data.scale, split.y[chosen]

    samples = len(data.train.x)
    order = SampleOrder(samples, 1)
    for position in range(0, 5 * samples, 8):
        model.gradient(*taken(data.train, order.indices(position, 8)))
        weights.flat[: model.layout.parameters] -= np.float32(0.1) * gradient
    _, correct = model.evaluate(*taken(data.test, np.arange(len(data.test.x))))
    assert correct / len(data.test.x) > 0.96


def test_wrong_use_is_refused():
    relu = ReLU()
    with pytest.raises(InputError, match="more than once"):
        Model(Sequential(Flatten(), relu, Residual(relu)), IMAGE, "mse", BACKEND)
    with pytest.raises(InputError, match="did you mean 'cross-entropy'"):
        Model(Flatten(), IMAGE, "cross_entropy", BACKEND)
    with pytest.raises(InputError, match="one axis of class scores"):
        Model(MaxPool(2), IMAGE, "cross-entropy", BACKEND)
    with pytest.raises(InputError, match="did you mean 'convnet-s'"):
        build(options("convnet-x"), IMAGE, 3)
    with pytest.raises(InputError, match="use net mlp"):
        build(options("convnet-s"), (64,), 3)
    model, weights, gradient = bound(NETS["mlp"]())
    x, y = batch(4)
    with pytest.raises(InputError, match=r"\(4, 8, 8\)"):
        model.gradient(x[..., 0], y)
    with pytest.raises(InputError, match="one a sample"):
        model.gradient(x, y[:, None])
    with pytest.raises(ValueError, match="aligned"):
        model.bind(weights.flat, gradient[:-1])
    model, _, _ = bound(NETS["mlp"](), "mse")
    with pytest.raises(InputError, match="one number an output"):
        model.gradient(x, y)


def dataset(**changes):
    return SimpleNamespace(**{"name": "set", "sample_shape": IMAGE, "classes": 3, "target_shape": (3,), **changes})


def test_check_fit_names_what_does_not_fit():
    scores = bound(NETS["mlp"]())[0]
    numbers = bound(NETS["mlp"](), "mse")[0]
    check_fit(dataset(), scores)
    check_fit(dataset(classes=2), scores)
    check_fit(dataset(classes=0), numbers)
    for data, model, said in [
        (dataset(sample_shape=(8, 8, 3)), scores, r"\(8, 8, 1\), but data set 'set' has \(8, 8, 3\)"),
        (dataset(classes=4), scores, "3 outputs.*4 classes"),
        (dataset(classes=0), scores, "use loss 'mse'"),
        (dataset(), numbers, "use loss 'cross-entropy'"),
        (dataset(classes=0, target_shape=(4,)), numbers, r"targets of shape \(4,\)"),
    ]:
        with pytest.raises(InputError, match=said):
            check_fit(data, model)
