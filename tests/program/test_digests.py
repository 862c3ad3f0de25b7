"""The same bits at any number of ranks: digests, losses and accuracies of whole runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from jobs import MEASURED

RANKS = (1, 2, 3, 4, 5, 8)

MLP = {"net": "mlp", "hidden": [16]}
CONVNET = {"net": "convnet-s", "width": 3, "batchnorm": True}
AUGMENTED = {"augment": "crop-flip", "pad": 2, "normalise": "channel"}
LOCAL = {"local_momentum": 0.9, "weight_decay": 1e-3}


def _case(schedule: Any, epochs: float = 2, batch: int = 3, steps: int = 1, mu: float = 0.0, **sections: Any) -> Any:
    """A config over 150 samples, evaluated in 7 chunks. `averaging` and `train` add to those sections, other
    keywords are sections."""
    return {
        "data": {"set": "synthetic", "train": 150, "test": 400, **sections.pop("data", {})},
        "model": sections.pop("model", MLP),
        "learners": {"schedule": schedule},
        "train": {"epochs": epochs, "batch": batch, **sections.pop("train", {})},
        "averaging": {"steps": steps, "momentum": mu, **sections.pop("averaging", {})},
        **sections,
    }


def _stages(*stages: tuple[float, int, int, float]) -> list[dict[str, Any]]:
    return [{"at": at, "learners": p, "steps": k, "momentum": mu} for at, p, k, mu in stages]


CASES: dict[str, Any] = {
    **{f"{p} learners": _case(f"0:{p}", epochs=1, mu=0.5, steps=4, batch=2) for p in (1, 3, 7, 8, 12)},
    "growing": _case("0:1, 0.5:3, 1:7, 1.3:8, 1.61:12", mu=0.5),
    "growing, K = 4": _case("0:1, 1:3, 2:7, 3.1:12", epochs=4, steps=4, mu=0.5, batch=2),
    "shrinking": _case("0:12, 0.5:8, 1:7, 1.3:3, 1.61:1"),
    "shrinking, K = 5": _case("0:12, 1.37:7, 2.5:1", epochs=3.5, steps=5, mu=0.75, batch=2),
    "up and down": _case("0:3, 0.4:8, 0.81:1, 1:7, 1.2:12, 1.7:3", mu=0.9),
    "round longer than an epoch": _case("0:12, 7:7, 50%:8", epochs=18, steps=5, batch=6, mu=0.5),
    "a preset": _case("paper-V", epochs=5, steps=4, batch=2, mu=0.5),
    "batch norm": _case("0:1, 0.5:7, 1:12, 1.5:3", model=CONVNET, mu=0.5, batch=4),
    "batch norm, K = 4": _case("0:3, 1:8, 2:1", epochs=2.5, steps=4, model=CONVNET, mu=0.5, batch=2),
    "dropout": _case("0:3, 1:8", model={**MLP, "dropout": 0.3}, mu=0.5),
    "dropout, K = 4, recalibrated": _case(
        "0:7, 1:3",
        model={**MLP, "dropout": 0.5, "batchnorm": True},
        steps=4,
        train={"batchnorm_eval": "recalibrate"},
    ),
    "recalibrated": _case("0:3, 1:7", model=CONVNET, train={"batchnorm_eval": "recalibrate"}),
    "convnet without batch norm": _case("0:3, 1:8", model={**CONVNET, "batchnorm": False}),
    "shared momentum": _case("0:3, 1:8", train=LOCAL),
    "shared Nesterov momentum": _case("0:7, 1:3", train={**LOCAL, "nesterov": True}, mu=0.5),
    "momentum reset": _case("0:3, 1:8", steps=4, train=LOCAL),
    "momentum averaged": _case("0:7, 1:3", steps=5, train={**LOCAL, "local_momentum_at_reduction": "average"}, mu=0.5),
    "momentum averaged, K = 1, 4, 1": _case(
        _stages((0, 3, 1, 0.5), (0.5, 7, 4, 0.0), (1.5, 2, 1, 0.75)),
        train={**LOCAL, "local_momentum_at_reduction": "average", "nesterov": True},
        model=CONVNET,
    ),
    "momentum reset, K = 4, 1, 5": _case(_stages((0, 8, 4, 0.5), (1, 3, 1, 0.5), (1.5, 5, 5, 0.0)), train=LOCAL),
    "per rate": _case(
        "0:2, 0.5:8, 1.5:3",
        averaging={"velocity": "per_rate"},
        mu=0.5,
        learning_rate={
            "decay": [[1, 0.5]],
            "warmup_epochs": 0.5,
            "scaling": "sqrt",
            "growth_warmup_epochs": 0.4,
            "base": 0.05,
        },
    ),
    "cosine, linear scaling": _case(
        "0:1, 1:7", learning_rate={"decay": "cosine", "scaling": "linear", "base_learners": 4}
    ),
    "global batch": _case("0:1, 0.5:3, 1:8, 1.5:12", batch=24, train={"batch_mode": "global"}, mu=0.5),
    "validation": _case("0:3, 1:7", data={"validation": 0.3}, epochs=3, train={"patience": 1}),
    "augmented": _case("0:3, 0.7:8, 1.3:2", steps=3, data=AUGMENTED, model=CONVNET, mu=0.5),
    "augmented, prefetch": _case(
        "0:3, 0.7:8, 1.3:2", steps=3, data=AUGMENTED, model=CONVNET, mu=0.5, run={"prefetch": True}
    ),
    "weight decay": _case("0:3, 0.7:5, 1:8", train={"weight_decay": 1e-2}, model=CONVNET, mu=0.5),
    "weight decay of all": _case("0:3, 1:2", train={"weight_decay": 1e-2, "decay_norms": True}, model=CONVNET),
    "K = 1, 4, 1 of as many learners": _case(_stages((0, 3, 1, 0.5), (0.7, 3, 4, 0.5), (1.4, 3, 1, 0.25))),
    "micro-batches": _case("0:3, 1:8", batch=5, train={"micro_batch": 2}, mu=0.5),
    "micro-batches, K = 4": _case("0:3, 1:2", batch=4, steps=4, train={**LOCAL, "micro_batch": 2}, model=CONVNET),
    "other seed": _case("0:1, 0.5:3, 1:7, 1.3:8, 1.61:12", mu=0.5, seed=2),
}
LOOSE = ("growing", "shrinking, K = 5", "batch norm", "momentum averaged", "global batch")
"""cases that also run in any order of adding"""

FREE = {f"{name}, any order": {**CASES[name], "run": {"reproducible": False}} for name in LOOSE}


@pytest.fixture(scope="module")
def trained(train_many: Any) -> Callable[[int], Any]:
    """trained(n): all cases by n ranks; each n is run once."""
    return cache(lambda n: train_many(n, {**CASES, **FREE}))


def _figures(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kinds = ("stage", "round", "evaluation", "end")
    return [
        {key: value for key, value in event.items() if key not in MEASURED}
        for event in history
        if event["event"] in kinds
    ]


def _rounds(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in history if event["event"] == "round"]


@pytest.mark.parametrize("n", RANKS)
def test_the_ranks_that_the_learners_need_take_part(trained: Any, n: int) -> None:
    """Else the other tests would compare one rank with itself."""
    for name in CASES:
        for event in _rounds(trained(n).histories[name]):
            p = event["learners"]
            assert event["ranks"] == -(-p // -(-p // n)), (name, event)


def test_the_cases_do_what_their_names_say(trained: Any) -> None:
    histories = trained(1).histories
    assert [e["learners"] for e in histories["up and down"] if e["event"] == "stage"] == [3, 8, 1, 7, 12, 3]
    assert {e["learners"] * e["steps"] * e["batch"] for e in _rounds(histories["round longer than an epoch"])} == {
        210,
        240,
        360,
    }
    assert any(e["event"] == "evaluation" and "validation" in e for e in histories["validation"])
    for name, history in histories.items():
        assert [event["event"] for event in history].count("evaluation") >= 1, name
        losses = [event["loss"] for event in _rounds(history)]
        assert len(losses) >= 2 and np.isfinite(losses).all(), name


@pytest.mark.parametrize("n", RANKS[1:])
@pytest.mark.parametrize("name", CASES)
def test_the_digest_is_one_and_the_same(trained: Any, name: str, n: int) -> None:
    assert trained(n).digest(name) == trained(1).digest(name)


@pytest.mark.parametrize("n", RANKS)
def test_prefetch_does_not_change_a_bit(trained: Any, n: int) -> None:
    assert trained(n).digest("augmented, prefetch") == trained(n).digest("augmented")
    plain, ahead = (trained(n).histories[name] for name in ("augmented", "augmented, prefetch"))
    assert _figures(plain)[-1] == _figures(ahead)[-1]


@pytest.mark.parametrize("n", RANKS[1:])
@pytest.mark.parametrize("name", CASES)
def test_the_figures_in_the_log_are_the_same_bits(trained: Any, name: str, n: int) -> None:
    """JSON carries a float64 whole, so equal numbers are equal bits."""
    mine, reference = _figures(trained(n).histories[name]), _figures(trained(1).histories[name])
    assert mine == reference


@pytest.mark.parametrize("n", RANKS[1:])
@pytest.mark.parametrize("name", CASES)
def test_the_parameters_handed_out_are_the_same_bits(trained: Any, name: str, n: int) -> None:
    mine, reference = trained(n).parameters[name], trained(1).parameters[name]
    assert {key: array.tobytes() for key, array in mine.items()} == {k: a.tobytes() for k, a in reference.items()}


NODES = ("0,0,1", "0,1,1", "0,1,0", "0,0,1,1", "0,1,1,1", "0,1,0,2,1")


@pytest.mark.parametrize("algorithm", ["auto", "hierarchical"])
@pytest.mark.parametrize("nodes", NODES)
def test_neither_nodes_nor_the_algorithm_change_the_digest(
    train_many: Any, trained: Any, nodes: str, algorithm: str
) -> None:
    cases = {name: {**CASES[name], "run": {"algorithm": algorithm}} for name in LOOSE}
    over = train_many(nodes.count(",") + 1, cases, nodes)
    used = {event["algorithm"] for h in over.histories.values() for event in h if event["event"] == "algorithm"}
    assert "hierarchical" in used if algorithm == "hierarchical" else used & {"hierarchical", "exchange", "tree"}
    for name in LOOSE:
        assert over.digest(name) == trained(1).digest(name), name


@pytest.mark.parametrize("algorithm", ["exchange", "tree"])
def test_messages_give_the_digest_of_shared_memory(train_many: Any, trained: Any, algorithm: str) -> None:
    over = train_many(3, {name: {**CASES[name], "run": {"algorithm": algorithm}} for name in LOOSE})
    for name in LOOSE:
        assert over.digest(name) == trained(1).digest(name), name


@pytest.mark.parametrize(
    ("how", "most"),
    [
        ({"algorithm": "ring"}, 1e-4),
        ({"algorithm": "native"}, 1e-4),
        ({"algorithm": "ring", "wire": "float16"}, 5e-2),  # rounding that training amplifies
    ],
    ids=["ring", "native", "float16"],
)
def test_any_order_over_nodes_agrees(train_many: Any, trained: Any, how: dict[str, Any], most: float) -> None:
    cases = {name: {**CASES[name], "run": {"reproducible": False, **how}} for name in LOOSE}
    over = train_many(3, cases, "0,1,1")
    for name in LOOSE:
        used = [event for event in over.histories[name] if event["event"] == "algorithm" and len(event["nodes"]) > 1]
        assert used and all(event[key] == value for event in used for key, value in how.items())
        for tensor, array in trained(1).parameters[name].items():
            assert np.abs(over.parameters[name][tensor] - array).max() <= most, (name, tensor)


def test_a_second_run_is_the_same_run(train_many: Any, trained: Any) -> None:
    again = train_many(2, {"growing": CASES["growing"]})
    assert again.digest("growing") == trained(2).digest("growing")


def test_other_cases_and_seeds_have_other_digests(trained: Any) -> None:
    others = [name for name in CASES if name != "augmented, prefetch"]  # which is "augmented", made ahead
    assert len({trained(1).digest(name) for name in others}) == len(others)
    assert trained(1).digest("augmented, prefetch") == trained(1).digest("augmented")


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("name", LOOSE)
def test_any_order_of_adding_agrees_to_1e_4(trained: Any, name: str, n: int) -> None:
    free, exact = trained(n).parameters[f"{name}, any order"], trained(1).parameters[name]
    for tensor, array in exact.items():
        assert np.abs(free[tensor] - array).max() <= 1e-4, tensor
