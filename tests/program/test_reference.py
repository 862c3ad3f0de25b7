"""shoal against the plain reference: parameters after 20 rounds, and the losses on the way, to 1e-5."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import reference
from reference import Options

from shoal.config import from_tree
from shoal.data.order import SampleOrder
from shoal.job import prepare

SAMPLES = 160
RATE = 0.05
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """20 rounds of shoal, as a config, and of the reference: how many rounds with which (P, K, B, rate)."""

    options: Options
    rounds: list[tuple[int, tuple[int, int, int, float]]]
    learning_rate: dict[str, Any] = field(default_factory=dict)
    hidden: tuple[int, ...] = (16,)

    @property
    def flat_rounds(self) -> list[tuple[int, int, int, float]]:
        return [one for count, one in self.rounds for _ in range(count)]

    @property
    def config(self) -> dict[str, Any]:
        o, stages, position = self.options, [], 0
        for count, (learners, steps, batch, _) in self.rounds:
            table = {"at": position / SAMPLES, "learners": learners, "steps": steps, "batch": batch}
            position += count * learners * steps * batch
            if not stages or {**table, "at": 0} != {**stages[-1], "at": 0}:
                stages.append(table)
        return {
            "data": {"set": "synthetic", "train": SAMPLES, "test": 20},
            "model": {"net": "mlp", "hidden": self.hidden},
            "learners": {"schedule": stages},
            "averaging": {"momentum": o.mu, "velocity": "per_rate" if o.per_rate else "displacement"},
            "train": {
                "epochs": position / SAMPLES,
                "local_momentum": o.beta,
                "nesterov": o.nesterov,
                "local_momentum_at_reduction": "average" if o.average else "reset",
                "weight_decay": o.weight_decay,
            },
            "learning_rate": {"base": RATE, **self.learning_rate},
        }


def _constant(learners: int, steps: int, batch: int = 5) -> list[tuple[int, tuple[int, int, int, float]]]:
    return [(20, (learners, steps, batch, RATE))]


DECAYED = [(10, (4, 4, 5, RATE)), (5, (4, 4, 5, 0.1 * RATE)), (5, (4, 4, 5, 0.1 * 2.0 * RATE))]
DECAY = {"decay": [[5, 0.1], [7.5, 2.0]]}
ELASTIC = [(8, (2, 4, 5, RATE)), (8, (5, 4, 5, RATE)), (4, (3, 4, 5, RATE))]

CASES = {
    "SGD": Case(Options(), _constant(1, 1)),
    "large-batch SGD": Case(Options(), _constant(8, 1)),
    "K-AVG": Case(Options(), _constant(4, 4)),
    "K-AVG, elastic": Case(Options(), ELASTIC),
    "K-AVG, two hidden layers": Case(Options(), _constant(3, 4), hidden=(16, 12)),
    "M-AVG": Case(Options(mu=0.5), _constant(4, 4)),
    "M-AVG, elastic": Case(Options(mu=0.5), ELASTIC),
    "M-AVG, K and B change": Case(Options(mu=0.7), [(8, (2, 4, 5, RATE)), (6, (4, 1, 10, RATE)), (6, (8, 5, 2, RATE))]),
    "M-AVG across a decay": Case(Options(mu=0.6), DECAYED, DECAY),
    "SlowMo across a decay": Case(Options(mu=0.6, per_rate=True), DECAYED, DECAY),
    "synchronous momentum": Case(Options(beta=0.9), _constant(4, 1)),
    "synchronous Nesterov momentum": Case(Options(beta=0.9, nesterov=True), _constant(4, 1)),
    "synchronous momentum, weight decay": Case(Options(beta=0.9, weight_decay=0.01), _constant(4, 1)),
    "synchronous momentum with M-AVG": Case(Options(mu=0.5, beta=0.5), _constant(4, 1)),
    "momentum reset": Case(Options(beta=0.9), _constant(4, 4)),
    "Nesterov momentum reset": Case(Options(beta=0.9, nesterov=True), _constant(3, 5)),
    "momentum averaged": Case(Options(beta=0.8, average=True), _constant(4, 4)),
    "momentum averaged, M-AVG, weight decay": Case(
        Options(mu=0.4, beta=0.5, average=True, nesterov=True, weight_decay=0.01), _constant(3, 4)
    ),
    "momentum averaged, K = 1 then 4": Case(
        Options(beta=0.8, average=True), [(10, (4, 1, 5, RATE)), (10, (2, 4, 5, RATE))]
    ),
    "momentum reset, K = 1 then 4": Case(Options(beta=0.8), [(10, (4, 1, 5, RATE)), (10, (2, 4, 5, RATE))]),
    "momentum reset, K = 4 then 1": Case(Options(beta=0.8), [(10, (4, 4, 5, RATE)), (10, (2, 1, 5, RATE))]),
    "weight decay": Case(Options(weight_decay=0.05), _constant(4, 4)),
}


def _of_batch(learners: str, mu: float = 0.0, **train: Any) -> dict[str, Any]:
    return {
        "data": {"set": "synthetic", "train": SAMPLES, "test": 20},
        "model": {"net": "convnet-s", "width": 4},
        "learners": {"schedule": learners},
        "averaging": {"momentum": mu},
        "train": {"epochs": 2.5, "batch": 24, "batch_mode": "global", **train},
        "learning_rate": {"base": RATE},
    }


SGD = {"mu": 0.5}
MOMENTUM = {"local_momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
SAME_BATCH = {
    f"{learners} of {kind}": _of_batch(learners, **options)
    for kind, options in (("SGD", SGD), ("momentum", MOMENTUM))
    for learners in ("0:1", "0:4", "0:12", "0:2, 1:8, 2:3")
}


@pytest.fixture(scope="module")
def trained(train_many: Any) -> Any:
    return train_many(2, {**{name: case.config for name, case in CASES.items()}, **SAME_BATCH})


def test_the_reference_has_the_right_gradient() -> None:
    """By central differences, along every coordinate of a small net."""
    draw = np.random.default_rng(0)
    w = [draw.standard_normal(shape) for shape in ((6, 5), (5,), (5, 4), (4,), (4, 3), (3,))]
    x, y = draw.standard_normal((7, 6)), draw.integers(0, 3, 7)
    _, found = reference.gradient(w, x, y)
    for array, slope in zip(w, found, strict=True):
        for at in np.ndindex(array.shape):
            before, values = array[at], []
            for move in (1e-6, -1e-6):
                array[at] = before + move
                values.append(reference.gradient(w, x, y)[0])
            array[at] = before
            assert abs((values[0] - values[1]) / 2e-6 - slope[at]) < 1e-7


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_losses_after_20_rounds(trained: Any, name: str) -> None:
    case = CASES[name]
    rounds = [event for event in trained.histories[name] if event["event"] == "round"]
    settings = [(event["learners"], event["steps"], event["batch"]) for event in rounds]
    assert settings == [one[:3] for one in case.flat_rounds] and len(rounds) == 20
    assert np.allclose([event["rate"] for event in rounds], [one[3] for one in case.flat_rounds], rtol=1e-12)

    job = prepare(from_tree(case.config, name))
    initial = np.zeros(job.model.layout.size, np.float32)
    job.model.initialise(initial, job.config.seed)
    views = job.model.layout.views(initial)
    names = sorted(views, key=lambda tensor: (int(tensor.split(".")[0]), tensor.endswith("bias")))
    order = SampleOrder(SAMPLES, job.config.seed).indices(0, rounds[-1]["consumed"])
    x = (job.data.train.x.astype(float) - job.data.shift) * job.data.scale
    found, losses = reference.train(
        [views[tensor] for tensor in names], x, job.data.train.y, order, case.flat_rounds, case.options
    )
    for tensor, expected, start in zip(names, found, (views[tensor] for tensor in names), strict=True):
        assert np.abs(trained.parameters[name][tensor] - expected).max() <= TOLERANCE, tensor
        assert np.abs(expected - start).max() > 100 * TOLERANCE, "this case does not train"
    assert np.abs(np.array([event["loss"] for event in rounds]) - losses).max() <= TOLERANCE


@pytest.mark.parametrize("kind", ["SGD", "momentum"])
@pytest.mark.parametrize("learners", ["0:4", "0:12", "0:2, 1:8, 2:3"])
def test_many_learners_are_one_with_the_whole_batch(trained: Any, learners: str, kind: str) -> None:
    """With K = 1: P learners of batch B are one learner of batch P*B, and switches of P change nothing."""
    one, many = trained.parameters[f"0:1 of {kind}"], trained.parameters[f"{learners} of {kind}"]
    for tensor, array in one.items():
        assert np.abs(many[tensor] - array).max() <= TOLERANCE, tensor
    assert trained.histories[f"{learners} of {kind}"][-1]["learner_steps"] > len(trained.histories[f"0:1 of {kind}"])
