"""`shoal.train` in a script of the user's own: the same result on every rank, at any number of ranks."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jobs
import pytest

SCRIPT = '''
"""Trains a classifier and a regression with nets and arrays of its own; each rank writes what it got."""
import hashlib, json, sys
from pathlib import Path
import numpy as np
import shoal
from mpi4py import MPI

here, words = Path(__file__).parent, sys.argv[1:]
rank = MPI.COMM_WORLD.rank
out = {"argv": words, "size": MPI.COMM_WORLD.size}

def report(name, result, events):
    digest = hashlib.sha256()
    for key in sorted(result.parameters):
        digest.update(key.encode() + result.parameters[key].tobytes())
    out[name] = {
        "parameters": digest.hexdigest(),
        "shapes": {key: list(value.shape) for key, value in result.parameters.items()},
        "kinds": sorted({str(value.dtype) for value in result.parameters.values()}),
        "history": result.history,
        "events": events,
        "accuracy": result.accuracy if result.accuracy == result.accuracy else None,
        "status": result.status,
        "reason": result.reason,
    }

rng = np.random.default_rng(5)
centres = 3 * rng.normal(size=(3, 6, 6, 2))
y = np.arange(240) % 3
x = (centres[y] + rng.normal(size=(240, 6, 6, 2))).astype(np.float32)
net = shoal.Sequential(
    shoal.Conv2d(2, 4, 3, padding=1), shoal.BatchNorm(4), shoal.ReLU(), shoal.MaxPool(2),
    shoal.Residual(shoal.Conv2d(4, 4, 3, padding=1)), shoal.GlobalPool(), shoal.Linear(4, 3),
)
events = []
result = shoal.train(
    net, (x[:180], y[:180], x[180:], y[180:]),
    learners=[{"at": 0, "learners": 1}, {"at": 2, "learners": 4, "momentum": 0.25}],
    averaging=shoal.Averaging(steps=2, momentum=0.5),
    learning_rate=shoal.LearningRate(base=0.1, decay=((5.0, 0.5),)),
    epochs=6, batch=5, seed=3, name="mine", weight_decay=1e-4, validation=0.1,
    out=here / f"run-{MPI.COMM_WORLD.size}", on_event=events.append, progress=False,
)
report("classes", result, events)

x = rng.normal(size=(200, 5))
y = (x[:, :2] * x[:, 2:4]).astype(np.float32)
net = shoal.Sequential(shoal.Linear(5, 24), shoal.Sigmoid(), shoal.Linear(24, 2))
events = []
result = shoal.train(
    net, (x[:160], y[:160], x[160:], y[160:]), learners="0:2, 50%:3", loss="mse", learning_rate=0.5, epochs=20,
    batch=4, on_event=events.append, progress=False,
)
report("targets", result, events)
(here / f"rank-{MPI.COMM_WORLD.size}-{rank}.json").write_text(json.dumps(out))
'''
WORDS = ("--lr", "0.5", "-n", "7", "--out", "there", "--", "-h", "a b")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("api") / "my_training.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def ran(script: Path) -> Any:
    """ran(n): what each rank wrote, the script being started by `shoal launch -n n`; ran(1) plainly."""

    @cache
    def run(n: int) -> list[dict[str, Any]]:
        plain = jobs.Job(script.parent, [sys.executable, script, *WORDS])
        assert jobs.done(plain if n == 1 else jobs.launch(script.parent, n, script, *WORDS)) == ""
        return [json.loads((script.parent / f"rank-{n}-{rank}.json").read_text()) for rank in range(n)]

    return run


def test_the_script_has_its_own_arguments(ran: Any) -> None:
    for n in (1, 3, 4):
        assert [(one["argv"], one["size"]) for one in ran(n)] == [(list(WORDS), n)] * n


@pytest.mark.parametrize("name", ["classes", "targets"])
@pytest.mark.parametrize("n", [3, 4])
def test_every_rank_gets_the_same(ran: Any, name: str, n: int) -> None:
    """With 4 ranks, some are reserves for half of the time."""
    first, *others = (rank[name] for rank in ran(n))
    for other in others:
        assert {**other, "events": []} == {**first, "events": []}
    ranks = [event["ranks"] for event in first["history"] if event["event"] == "round"]
    assert (ranks[0], ranks[-1]) == {"classes": (1, 2 if n == 3 else 4), "targets": (2, 3)}[name]


@pytest.mark.parametrize("name", ["classes", "targets"])
def test_any_number_of_ranks_gives_the_same(ran: Any, name: str) -> None:
    reference = ran(1)[0][name]
    for n in (3, 4):
        mine = ran(n)[0][name]
        assert mine["parameters"] == reference["parameters"]
        for kind in ("round", "evaluation", "stage", "end"):
            assert jobs.figures(mine["history"], kind) == jobs.figures(reference["history"], kind), kind


@pytest.mark.parametrize("name", ["classes", "targets"])
def test_events_come_to_the_master_alone_and_are_the_history(ran: Any, name: str) -> None:
    for n in (1, 3, 4):
        first, *others = (rank[name] for rank in ran(n))
        assert first["events"] == first["history"]
        assert [one["events"] for one in others] == [[]] * (n - 1)


def test_the_history_is_the_log(script: Path, ran: Any) -> None:
    for n in (1, 3):
        history = ran(n)[0]["classes"]["history"]
        assert history == jobs.history(script.parent / f"run-{n}")
        assert history[-1]["event"] == "end" and (script.parent / f"run-{n}" / "DONE").exists()


def test_what_was_asked_for_was_done(ran: Any) -> None:
    classes, targets = ran(3)[0]["classes"], ran(3)[0]["targets"]
    assert (classes["status"], classes["reason"]) == (0, "6 epochs done")
    header = classes["history"][0]
    assert (header["name"], header["seed"], header["samples"], header["validation_samples"]) == ("mine", 3, 162, 18)
    assert header["config"]["train"]["weight_decay"] == 1e-4
    stages = [e for e in classes["history"] if e["event"] == "stage"]
    assert [(e["learners"], e["steps"], e["momentum"]) for e in stages] == [(1, 2, 0.5), (4, 2, 0.25)]
    rounds = [e for e in classes["history"] if e["event"] == "round"]
    assert {e["batch"] for e in rounds} == {5} and {e["rate"] for e in rounds} == {0.1, 0.05}
    assert all("validation" in e for e in classes["history"] if e["event"] == "evaluation")
    assert [e["learners"] for e in targets["history"] if e["event"] == "stage"] == [2, 3]


def test_it_has_learned(ran: Any) -> None:
    assert ran(3)[0]["classes"]["accuracy"] >= 0.95
    losses = [e["test"]["loss"] for e in ran(3)[0]["targets"]["history"] if e["event"] == "evaluation"]
    assert losses[-1] < 0.6 * losses[0]


def test_the_parameters_have_names_and_shapes(ran: Any) -> None:
    classes = ran(3)[0]["classes"]
    assert classes["kinds"] == ["float32"]
    assert classes["shapes"] == {
        "0.weight": [3, 3, 2, 4],
        "0.bias": [4],
        **{f"1.{name}": [4] for name in ("gamma", "beta", "mean", "variance")},
        "4.body.weight": [3, 3, 4, 4],
        "4.body.bias": [4],
        "6.weight": [4, 3],
        "6.bias": [3],
    }


WRONG = {
    "unknown option": ("batchs=4", r"shoal\.train: train\.batchs is not a known key; did you mean batch\?"),
    "a bad value": ("epochs=-1", r"train\.epochs = -1.*> 0"),
    "a bad schedule": ('learners="1:2"', r"starts at epoch 1, and must start at 0"),
    "a bad rate": ('learning_rate="fast"', r"learning_rate\.base = 'fast'.*float"),
    "labels out of range": ("data=(x, y + 1, x, y)", r"y_train\[0\] is 1.*|y_train.*without a gap"),
    "three arrays": ("data=(x, y, x)", r"data has 3 parts"),
    "no net": ("model=len", r"model is a builtin_function_or_method"),
    "a net that does not fit": ("model=shoal.Linear(7, 2)", r"7.*(8|\(8,\))"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_one_sentence(tmp_path: Path, case: str) -> None:
    setting, pattern = WRONG[case]
    script = tmp_path / "wrong.py"
    script.write_text(
        "import numpy as np, shoal\n"
        "x, y = np.ones((12, 8), np.float32), np.arange(12) % 2\n"
        "settings = dict(model=shoal.Linear(8, 2), data=(x, y, x, y), out='run')\n"
        f"shoal.train(**(settings | dict({setting})))\n"
    )
    with jobs.launch(tmp_path, 3, script) as job:
        ended = job.end()
    assert ended.status == 2, ended
    said = [line for line in ended.output.splitlines() if line.startswith("shoal: ")]
    assert len(said) == 1 and "Traceback" not in ended.output, ended.output
    assert re.search(pattern, said[0]), said[0]
    assert not (tmp_path / "run").exists()


STOPPED = """
import sys, numpy as np, shoal
from mpi4py import MPI
x, y = np.random.default_rng(0).normal(size=(96, 8)).astype("float32"), np.arange(96) % 2
result = shoal.train(
    shoal.Sequential(shoal.Linear(8, 8), shoal.BatchNorm(8), shoal.ReLU(), shoal.Linear(8, 2)), (x, y, x, y),
    learners="0:2, 2:5", averaging=shoal.Averaging(steps=2, momentum=0.5), epochs=float(sys.argv[2]), batch=2,
    out=sys.argv[1], resume=True, progress=False,
)
if MPI.COMM_WORLD.rank == 0:
    print(result.history[-1]["digest"])
"""


def test_a_script_is_stopped_and_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED)
    epochs = 60
    with jobs.launch(tmp_path, 3, script, "run", epochs) as job:
        job.until(lambda: jobs.rounds(tmp_path / "run") >= 20, "round 20")
        job.process.terminate()
        ended = job.end()
    assert ended.status == 99, ended
    assert re.search(r"(?m)^shoal: stopped on request", ended.output) and "Traceback" not in ended.output
    again = jobs.done(jobs.launch(tmp_path, 2, script, "run", epochs))
    assert again == jobs.done(jobs.Job(tmp_path, [sys.executable, script, "whole", epochs]))


DATA = """
import sys, numpy as np, shoal
from mpi4py import MPI
shift = float(sys.argv[1]) if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1 else float(sys.argv[2])
x, y = np.arange(96, dtype="float32").reshape(12, 8) / 96 + shift, np.arange(12) % 2
shoal.train(shoal.Linear(8, 2), (x, y, x, y), epochs=2, batch=2, learners="0:2", out="run", resume=True)
"""


def test_other_data_are_refused(tmp_path: Path) -> None:
    """On one of the ranks, though the labels are alike; and at a resume."""
    script = tmp_path / "data.py"
    script.write_text(DATA)
    with jobs.launch(tmp_path, 3, script, 1, 0) as job:
        ended = job.end()
    assert ended.status == 2 and "on world rank 2 differs" in ended.output, ended
    assert not (tmp_path / "run").exists()
    jobs.done(jobs.launch(tmp_path, 3, script, 0, 0))
    with jobs.launch(tmp_path, 2, script, 1, 1) as job:
        ended = job.end()
    assert ended.status == 2 and "the run began with other training or test data" in ended.output, ended
