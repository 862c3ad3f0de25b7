"""resnet18, resnet20 and senet18 against PyTorch: the same weights give the same numbers, to rounding."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from shoal import kernels
from shoal.backend import numpy_backend
from shoal.model import FlatBuffer, Model, resnet18, resnet20, senet18

torch = pytest.importorskip("torch", reason="PyTorch is not installed here: nothing to compare with")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PEERS = Path(__file__).resolve().parents[2] / "bench/peers/torch_nets.py"
NETS = {"resnet18": resnet18, "resnet20": resnet20, "senet18": senet18}
WIDTH, BATCH, STEPS = 8, 16, 20
WITHIN, WITHIN_AFTER = 1e-4, 1e-3
TIGHT = 1e-9
"""in float64, which says that the formulas are the same: in float32 a value near 0 may pass one ReLU and not the
other, and a high rate makes that grow"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(threads)


def peers() -> Any:
    """The module that has the nets in PyTorch."""
    spec = importlib.util.spec_from_file_location("torch_nets", PEERS)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Pair:
    """The net in shoal and in PyTorch with the same weights, not those of a fresh net."""

    def __init__(self, name: str, dtype: Any) -> None:
        backend = numpy_backend()
        self.name, self.dtype = name, dtype
        self.model = Model(NETS[name](WIDTH), (32, 32, 3), "cross-entropy", backend, dtype)
        self.weights = FlatBuffer(self.model.layout, backend, dtype)
        self.gradient = backend.empty(self.model.layout.parameters, dtype)
        self.model.initialise(self.weights.flat, 1)
        rng = np.random.default_rng(2)
        for tensor in self.model.layout.tensors:
            if tensor.kind != "weight":
                self.weights.views[tensor.name] += rng.uniform(0, 0.3, tensor.shape).astype(dtype)
        self.model.bind(self.weights.flat, self.gradient)
        self.peers = peers()
        self.torch = self.peers.make(name, WIDTH).to(torch.float64 if dtype is np.float64 else torch.float32)
        state = self.torch.state_dict()
        assert len(state) == len(self.model.layout.names) + sum("num_batches" in key for key in state)
        for ours, theirs in self.pairs(self.weights.views, state):
            theirs.copy_(torch.from_numpy(ours))

    def pairs(self, views: Any, theirs: Any) -> Any:
        """(ours in PyTorch's order of axes, PyTorch's) for each tensor of the views."""
        for name, view in views.items():
            other = theirs[self.peers.torch_name(name, self.name)]
            yield self.peers.as_torch(view, other), other

    def batch(self, seed: int) -> tuple[np.ndarray, Any, np.ndarray]:
        """Images in our order of axes and in PyTorch's, and labels."""
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(BATCH, 32, 32, 3)).astype(self.dtype)
        return x, torch.from_numpy(x.transpose(0, 3, 1, 2).copy()), rng.integers(0, 10, BATCH)

    def step(self, seed: int) -> tuple[float, float]:
        """Both gradients of one batch; the losses."""
        x, same, y = self.batch(seed)
        ours = self.model.gradient(x, y)
        self.torch.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.torch(same), torch.from_numpy(y))
        loss.backward()
        return ours, loss.item()

    def outputs(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """In evaluation."""
        x, same, _ = self.batch(seed)
        self.torch.eval()
        with torch.no_grad():
            theirs = self.torch(same).numpy()
        self.torch.train()
        return self.model.predict(x), theirs


def distance(ours: np.ndarray, theirs: Any) -> float:
    """The norm of the difference over the norm; the gate of an image that ReLU closes has a gradient of 0."""
    other = theirs.detach().numpy() if hasattr(theirs, "detach") else theirs
    difference, scale = float(np.linalg.norm(ours - other)), float(np.linalg.norm(other))
    return difference / scale if difference else 0.0


@pytest.mark.parametrize(("dtype", "within"), [(np.float32, WITHIN), (np.float64, TIGHT)])
@pytest.mark.parametrize("name", NETS)
def test_outputs_loss_gradients_and_statistics(name: str, dtype: Any, within: float) -> None:
    pair = Pair(name, dtype)
    assert distance(*pair.outputs(1)) < within
    ours, theirs = pair.step(3)
    assert ours == pytest.approx(theirs, rel=within)
    gradients = {name: parameter.grad for name, parameter in pair.torch.named_parameters()}
    for name, view in pair.model.layout.views(pair.gradient).items():
        other = gradients[pair.peers.torch_name(name, pair.name)]
        assert distance(pair.peers.as_torch(view, other), other) < within, name
    for mine, other in pair.pairs(pair.weights.views, pair.torch.state_dict()):
        assert distance(mine, other) < within
    assert distance(*pair.outputs(4)) < within


@pytest.mark.parametrize(("dtype", "rate", "within"), [(np.float32, 0.001, WITHIN_AFTER), (np.float64, 0.02, TIGHT)])
@pytest.mark.parametrize("name", NETS)
def test_parameters_after_twenty_steps(name: str, dtype: Any, rate: float, within: float) -> None:
    pair, momentum, decay = Pair(name, dtype), 0.9, 5e-4
    optimizer = torch.optim.SGD(pair.torch.parameters(), lr=rate, momentum=momentum, weight_decay=decay)
    parameters = pair.weights.flat[: pair.model.layout.parameters]
    velocity = np.zeros_like(pair.gradient)
    step = kernels.LocalStep(rate, momentum, weight_decay=decay, decayed=parameters.size)
    for seed in range(STEPS):
        pair.step(seed)
        optimizer.step()
        kernels.local_step(np, (parameters, velocity), pair.gradient, (parameters, velocity), step)
    both = list(pair.pairs(pair.weights.views, pair.torch.state_dict()))
    ours, theirs = (np.concatenate([np.ravel(one[side]) for one in both]) for side in (0, 1))
    assert distance(ours, theirs) < within
