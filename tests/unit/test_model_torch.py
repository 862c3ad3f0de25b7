"""A PyTorch module on flat buffers: shared memory, PyTorch's own numbers, and what is refused."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; make test-torch runs this")
from torch import nn  # noqa: E402

import shoal.torch  # noqa: E402
from shoal.backend import numpy_backend  # noqa: E402
from shoal.errors import InputError  # noqa: E402

BACKEND = numpy_backend()
GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(12, 6, generator=GENERATOR).numpy()
Y = np.arange(12) % 3
DATA = SimpleNamespace(name="t", sample_shape=(6,), sample_dtype=np.dtype("f4"), target_shape=(), classes=3)


class Net(nn.Module):
    """Batch norm, dropout, a frozen layer, an unused one, a shared weight, and buffers of all kinds."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(rate)
        self.square, self.again = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.again.weight = self.square.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(5, 7)
        self.last = nn.Linear(8, 3)
        self.register_buffer("level", torch.zeros(3))
        self.register_buffer("steps", torch.tensor(40))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x):
        x = self.drop(torch.relu(self.norm(self.first(x))))
        y = self.last(self.frozen(self.again(torch.relu(self.square(x)))))
        if self.training:
            self.level = 0.5 * self.level + 0.5 * y.detach().mean(0)
            self.steps += 1
        return y


def module(rate=0.0):
    torch.manual_seed(2)
    return Net(rate)


def bound(own, loss="cross-entropy", seed=1, data=DATA):
    """A model on buffers of its own, with the values that the module has."""
    model = shoal.torch.Model(own, loss)
    model.prepare(data, BACKEND, seed)
    weights, gradient = BACKEND.zeros(model.layout.size), BACKEND.zeros(model.layout.parameters)
    model.initialise(weights, 0)
    model.bind(weights, gradient)
    return model, weights, gradient


def plain_step(own, x=X, y=Y):
    """The loss and the gradients by PyTorch alone."""
    own.train()
    loss = nn.functional.cross_entropy(own(torch.from_numpy(x.copy())), torch.from_numpy(y))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in own.named_parameters() if p.requires_grad}


def test_the_module_s_tensors_are_the_buffers():
    own = module()
    model, weights, gradient = bound(own)
    model.gradient(X, Y)
    values, gradients = model.layout.views(weights), model.layout.views(gradient)
    for name, parameter in own.named_parameters():
        assert parameter.data_ptr() == values[name].ctypes.data, name
        if parameter.requires_grad:
            assert parameter.grad.data_ptr() == gradients[name].ctypes.data, name
    for name in ("norm.running_mean", "norm.running_var", "level"):
        assert own.get_buffer(name).data_ptr() == values[name].ctypes.data, name
    weights[:] = 7
    assert all((p == 7).all() for p in own.parameters())


def test_other_buffers_take_their_place_and_back():
    own = module()
    model, weights, gradient = bound(own)
    first = model.bind(weights, gradient)
    other, out, apart = weights.copy(), BACKEND.zeros(gradient.size), BACKEND.zeros(weights.size)
    other_aligned = BACKEND.zeros(weights.size)
    other_aligned[:], apart[:] = other, weights
    read_only = other_aligned.view()
    read_only.flags.writeable = False
    second = model.bind(read_only, out, apart)
    before = other_aligned.copy()
    loss = model.gradient(X, Y)
    assert np.array_equal(other_aligned, before), "the weights are never written"
    assert np.array_equal(weights, before)
    parameters = model.layout.parameters
    assert np.array_equal(apart[:parameters], before[:parameters]) and not np.array_equal(apart, before)
    model.use(first)
    assert model.gradient(X, Y) == loss and np.array_equal(gradient, out) and np.array_equal(weights, apart)
    model.use(second)
    assert own.first.weight.data_ptr() == model.layout.views(other_aligned)["first.weight"].ctypes.data


def test_loss_gradient_and_statistics_are_those_of_pytorch():
    own, reference = module(), module()
    model, weights, gradient = bound(own)
    gradient.fill(np.nan)
    model.bind(weights, gradient)
    loss, expected = plain_step(reference)
    assert model.gradient(X, Y) == loss
    found = model.layout.views(gradient)
    assert set(found) == set(expected)
    for name, made in expected.items():
        unused = name.startswith("unused")
        assert (made is None) == unused
        assert np.array_equal(found[name], np.zeros_like(found[name]) if unused else made.numpy()), name
    covered = np.zeros(gradient.size, bool)
    for one in model.layout.tensors:
        if one.kind != "statistic":
            covered[one.offset : one.offset + one.size] = True
    assert not gradient[~covered].any(), "the gaps hold 0"
    values = model.layout.views(weights)
    for name, tensor in reference.state_dict().items():
        name = "square.weight" if name == "again.weight" else name
        assert np.array_equal(values[name], tensor.numpy()), name
    assert values["steps"] == 41 and values["norm.num_batches_tracked"] == 1


def test_a_gradient_in_pieces_has_the_bits_of_the_whole():
    class Rows(Net):
        """With an embedding, whose gradient is a few rows."""

        def __init__(self):
            super().__init__()
            self.rows = nn.Embedding(5, 6, sparse=True)

        def forward(self, x):
            return super().forward(x + self.rows((x[:, 0] > 0).long()))

    torch.manual_seed(2)
    model, weights, gradient = bound(Rows())
    start, gaps = weights.copy(), BACKEND.zeros(gradient.size)
    loss = model.gradient(X, Y)
    assert [(at, piece.ctypes.data) for at, piece in model.pieces] == [(slice(0, gradient.size), gradient.ctypes.data)]
    whole, weights[:] = gradient.copy(), start
    gradient.fill(np.nan)
    assert model.gradient(X, Y, whole=False) == loss and np.isnan(gradient).all(), "the buffer is left alone"
    pieces = model.pieces
    for at, piece in pieces:
        gaps[at] = piece
    assert len(pieces) == len(model.layout.views(gradient)) and gaps.tobytes() == whole.tobytes()
    model.release()
    assert not model.module.first.weight._post_accumulate_grad_hooks


def test_what_decays_and_what_does_not():
    model, _, _ = bound(module())
    kinds = {one.name: one.kind for one in model.layout.tensors}
    assert {name for name, kind in kinds.items() if kind == "weight"} == {
        f"{name}.weight" for name in ("first", "square", "unused", "last")
    }
    assert kinds["first.bias"] == "bias" and kinds["norm.weight"] == "norm" and kinds["norm.bias"] == "bias"
    assert kinds["frozen.weight"] == kinds["frozen.bias"] == kinds["mask"] == "statistic"
    assert {one.name: one.aliases for one in model.layout.tensors if one.aliases} == {
        "square.weight": ("again.weight",)
    }
    layer_norm, _, _ = bound(
        nn.Sequential(nn.Unflatten(1, (2, 3)), nn.LayerNorm((2, 3)), nn.Flatten(), nn.Linear(6, 3))
    )
    assert {one.name: one.kind for one in layer_norm.layout.tensors}["1.weight"] == "norm"


def test_whole_numbers_are_averaged_and_rounded():
    own = module()
    model, weights, _ = bound(own)
    values = model.layout.views(weights)
    values["steps"][...] = 99.7
    values["mask"][:] = 0.2, 0.9
    model.gradient(X, Y)
    assert own.steps.item() == 101 == values["steps"] and own.mask.tolist() == [False, True]
    assert own.steps.dtype == torch.int64 and own.mask.dtype == torch.bool


@pytest.mark.parametrize("noise", ["torch", "numpy", "python"])
def test_what_a_step_draws_depends_on_its_position_and_the_seed(noise):
    class Noisy(Net):
        def forward(self, x):
            draw = {"torch": torch.rand, "numpy": lambda n: np.random.rand(), "python": lambda n: random.random()}
            return super().forward(x) * (1 + float(draw[noise](1)) if self.training else 1)

    found = []
    for seed, position in ((1, 16), (1, 32), (1, 16), (2, 16)):
        torch.manual_seed(5)
        model, _, gradient = bound(Noisy(0.5), seed=seed)
        for other in range(len(found)):
            model.gradient(X, Y, other)
            torch.rand(3), np.random.rand(), random.random()
        found.append((model.gradient(X, Y, position), gradient.tobytes()))
    assert found[0] == found[2] and len(set(found)) == 3


def test_evaluation_is_that_of_pytorch():
    own, reference = module(0.5), module(0.5).eval()
    model, _, _ = bound(own)
    with torch.no_grad():
        outputs = reference(torch.from_numpy(X))
        loss = nn.functional.cross_entropy(outputs, torch.from_numpy(Y)).item()
    assert model.evaluate(X, Y) == (loss * 12, int((outputs.argmax(1).numpy() == Y).sum()))
    assert np.array_equal(model.predict(X), outputs.numpy())
    assert np.array_equal(model.predict(X), model.predict(X))


def test_recalibration_takes_the_mean_of_batches():
    own = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model, weights, _ = bound(own)
    model.gradient(X, Y)
    model.recalibrate([X[:6], X[6:]])
    views = model.layout.views(weights)
    assert np.allclose(views["1.running_mean"], (X[:6].mean(0) + X[6:].mean(0)) / 2, atol=1e-6)
    variance = (X[:6].var(0, ddof=1) + X[6:].var(0, ddof=1)) / 2
    assert np.allclose(views["1.running_var"], variance, atol=1e-6)
    assert own[1].momentum == 0.1 and model.predict(X).shape == (12, 3) and not own[1].training


def test_released_it_has_its_values_in_memory_of_its_own():
    own = module().eval()
    model, weights, _ = bound(own)
    model.gradient(X, Y)
    model.release()
    assert not own.training and all(p.grad is None for p in own.parameters())
    kept = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    weights.fill(np.nan)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in own.state_dict().items())
    model.load({"last.bias": np.ones(3, np.float32), "steps": np.array(7.2, np.float32)})
    assert own.last.bias.tolist() == [1, 1, 1] and own.steps.item() == 7
    model.prepare(DATA, BACKEND, 1)
    start = BACKEND.zeros(model.layout.size)
    model.initialise(start, 0)
    assert model.layout.views(start)["steps"] == 7, "a second training starts from the first's end"


def test_channels_last_are_seen_first():
    data = SimpleNamespace(**{**vars(DATA), "sample_shape": (4, 5, 2)})
    torch.manual_seed(2)
    own = nn.Sequential(nn.Conv2d(2, 3, (4, 5)), nn.Flatten())
    model = shoal.torch.Model(own, channels="last")
    model.prepare(data, BACKEND, 1)
    x = np.random.default_rng(0).normal(size=(3, 4, 5, 2)).astype(np.float32)
    expected = own(torch.from_numpy(x.transpose(0, 3, 1, 2).copy())).detach().numpy()
    assert np.allclose(model.predict(x), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        ("mse", "mse"),
        (nn.functional.mse_loss, "mse"),
        (nn.MSELoss(), "mse"),
        (nn.SmoothL1Loss(), "own"),
        (lambda outputs, targets: (outputs - targets).abs().mean(), "own"),
    ],
)
def test_losses(loss, name):
    data = SimpleNamespace(**{**vars(DATA), "target_shape": (2,), "classes": 0})
    y = np.ones((12, 2), np.float32)
    model, _, gradient = bound(nn.Linear(6, 2), loss, data=data)
    assert model.loss_name == name and model.gradient(X, y) > 0 and gradient.any()
    total, correct = model.evaluate(X, y)
    assert total > 0 and correct == 0


def double():
    return nn.Linear(6, 3).double()


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"a": 1}

    def set_extra_state(self, state):
        pass


def far():
    own = nn.Linear(6, 3)
    own.register_buffer("hash", torch.tensor(2**24 + 1))
    return own


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


REFUSED = {
    "no module": (lambda: len, {}, "module is a builtin_function_or_method"),
    "a class": (lambda: nn.Linear, {}, "module is a type"),
    "channels": (lambda: nn.Linear(6, 3), {"channels": "middle"}, "channels is 'middle'"),
    "an unknown loss": (lambda: nn.Linear(6, 3), {"loss": "cross-entropi"}, "did you mean 'cross-entropy'"),
    "a sum": (lambda: nn.Linear(6, 3), {"loss": nn.MSELoss(reduction="sum")}, "reduction='sum'"),
    "a loss class": (lambda: nn.Linear(6, 3), {"loss": nn.MSELoss}, "function of"),
    "a trained loss": (lambda: nn.Linear(6, 3), {"loss": nn.Linear(1, 1)}, "loss has parameters"),
    "float64": (double, {}, r"weight of the module is torch.float64.*module.float\(\)"),
    "nothing to train": (lambda: nn.Linear(6, 3).requires_grad_(False), {}, "nothing to train"),
    "lazy": (lambda: nn.LazyLinear(3), {}, "lazy module"),
    "other state": (lambda: Extra(6, 3), {}, "_extra_state of the module is a dict"),
    "too large a number": (far, {}, "hash of the module holds a number beyond 16777216"),
    "another shape": (lambda: nn.Linear(7, 3), {}, r"does not take samples of shape \(6,\).*mat1 and mat2"),
    "two outputs": (lambda: Pair(6, 3), {}, "gives a tuple for one sample"),
    "too few outputs": (lambda: nn.Linear(6, 2), {}, "shape \\(2,\\).*3 classes"),
    "mse with labels": (lambda: nn.Linear(6, 3), {"loss": "mse"}, "with labels in data set 't'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_modules_are_refused(case):
    make, options, pattern = REFUSED[case]
    with pytest.raises(InputError, match=pattern):
        shoal.torch.Model(make(), **options).prepare(DATA, BACKEND, 1)


def test_a_first_step_that_fails_is_bad_input_and_a_later_one_is_not():
    model, _, _ = bound(module())
    with pytest.raises(InputError, match=r"cannot take a step on a batch of shape .*more than 1 value"):
        model.gradient(X[:1], Y[:1])
    model.gradient(X, Y)
    with pytest.raises(ValueError, match="more than 1 value"):
        model.gradient(X[:1], Y[:1])
