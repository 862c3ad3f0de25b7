"""PyTorch modules and datasets in whole jobs: the same bits on any ranks, through kills; what users do wrong."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jobs
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; make test-torch runs this")

JOB = Path(__file__).with_name("torch_job.py")
EXAMPLE = Path(__file__).parents[2] / "jobs" / "examples" / "torch_digits.py"
EPOCHS = {"datasets": 3, "arrays": 2}


def ended(output: str) -> Any:
    return json.loads(next(line for line in output.splitlines() if line.startswith("END "))[4:])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """trained(case, n): what n ranks make of it; each is run once."""
    folder = tmp_path_factory.mktemp("torch")
    return cache(lambda case, n: ended(jobs.done(jobs.launch(folder, n, JOB, case, EPOCHS[case]))))


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("case", EPOCHS)
def test_the_digest_is_one_and_the_same(trained: Any, case: str, n: int) -> None:
    assert trained(case, n) == trained(case, 1)


def test_the_log_names_pytorch(trained: Any) -> None:
    assert trained("arrays", 1)["torch"] == torch.__version__


def test_killed_and_resumed_on_other_ranks_it_is_the_same_run(tmp_path: Path, trained: Any) -> None:
    epochs = 40
    with jobs.launch(tmp_path, 2, JOB, "datasets", epochs, "run") as job:
        job.until(lambda: jobs.rounds(tmp_path / "run") >= 40, "round 40")
        job.process.kill()
        job.gone()
    assert jobs.rounds(tmp_path / "run") < 200
    again = ended(jobs.done(jobs.launch(tmp_path, 3, JOB, "datasets", epochs, "run")))
    assert again == ended(jobs.done(jobs.launch(tmp_path, 1, JOB, "datasets", epochs)))


def test_the_example_and_its_state_dict(tmp_path: Path) -> None:
    output = jobs.done(jobs.launch(tmp_path, 2, EXAMPLE, "--epochs", "2", "--out", "run"))
    accuracy = re.search(r"test accuracy ([\d.]+)%", output)
    assert accuracy and float(accuracy[1]) > 80, output
    jobs.done(jobs.Job(tmp_path, [*jobs.SHOAL, "export", "run", "-o", "model.pt"]))
    program = (
        "import importlib.util, sys, torch\n"
        f"spec = importlib.util.spec_from_file_location('example', {str(EXAMPLE)!r})\n"
        "example = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(example)\n"
        "net = example.Net()\n"
        "state = torch.load('model.pt')\n"
        "print(net.load_state_dict(state, strict=True))\n"
        "assert all(state[name].dtype == tensor.dtype for name, tensor in net.state_dict().items())\n"
        "test = example.digits()[1]\n"
        "x, y = torch.stack([x for x, _ in test]), torch.tensor([y for _, y in test])\n"
        "print(100 * (net.eval()(x).argmax(1) == y).float().mean().item())\n"
    )
    loaded = jobs.done(jobs.Job(tmp_path, [jobs.sys.executable, "-c", program])).splitlines()
    assert loaded[0] == "<All keys matched successfully>"
    assert abs(float(loaded[1]) - float(accuracy[1])) < 0.06, "the accuracy printed has one digit behind the point"


PLAIN = """
import numpy as np, torch, shoal, shoal.torch
from torch import nn
from shoal.data.order import SampleOrder
def build():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
rng = np.random.default_rng(0)
x, y = rng.normal(size=(96, 8)).astype("float32"), rng.integers(0, 3, 96)
own, plain = build(), build()
groups = [{"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": 1e-2},
          {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0}]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
order = SampleOrder(96, 1)
for step in range(60):
    chosen = torch.from_numpy(order.indices(8 * step, 8).copy())
    optimizer.zero_grad()
    nn.functional.cross_entropy(plain(torch.from_numpy(x)[chosen]), torch.from_numpy(y)[chosen]).backward()
    optimizer.step()
result = shoal.train(shoal.torch.Model(own, nn.CrossEntropyLoss()), (x, y, x, y), epochs=5, batch=8, seed=1,
                     learning_rate=0.1, local_momentum=0.9, weight_decay=1e-2, progress=False)
assert result.history[-1]["serial_steps"] == 60
print("END", max(float((a - b).abs().max()) for a, b in zip(own.state_dict().values(), plain.state_dict().values())))
"""


def test_one_learner_and_k_1_is_plain_sgd(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    difference = ended(jobs.done(jobs.launch(tmp_path, 1, tmp_path / "plain.py")))
    assert difference < 1e-4


WRONG = """
import sys, numpy as np, torch, shoal, shoal.torch
from torch import nn
from mpi4py import MPI
last = MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1
class Set(list):
    bad = False
    def __getitem__(self, index):
        if self.bad and last and index == 7:
            {fault}
        return torch.full((4,), float(index)), index % 2
train, test = Set(range(24)), Set(range(6))
train.bad = True
settings = dict(model=shoal.torch.Model(nn.Linear(4, 2)), data=(train, test), classes=2, epochs=40, batch=2,
                learners="0:3", out="run", progress=False)
shoal.train(**(settings | dict({setting})))
"""

CASES = {
    "a dataset that raises": ("raise KeyError('lost')", "", 1, "KeyError: 'lost'"),
    "a label out of range": ("return torch.zeros(4), 5", "", 1, "sample 7 of the training set has label 5"),
    "a rank with another module": ("", "model=shoal.torch.Model(nn.Linear(4, 3 if last else 2))", 2, "differs"),
    "a rank with a bad module": ("", "model=shoal.torch.Model(nn.Linear(5 if last else 4, 2))", 2, "does not take"),
    "a rank with another dataset": ("", "data=(train, Set(range(5)) if last else test)", 2, "differs"),
    "a module without a loss": ("", "model=nn.Linear(4, 2)", 2, r"give shoal\.torch\.Model\(module, loss\)"),
    "a loss beside the model": ("", "loss='mse'", 2, "give it there: Model"),
    "a share to hold out": ("", "validation=0.1", 2, r"give one as the third"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_on_one_rank_ends_all(tmp_path: Path, case: str) -> None:
    fault, setting, status, pattern = CASES[case]
    text = WRONG.replace("{fault}", fault or "pass").replace("{setting}", setting)
    (tmp_path / "wrong.py").write_text(text)
    with jobs.launch(tmp_path, 3, tmp_path / "wrong.py") as job:
        end = job.end()
    assert end.status == status, end
    assert re.search(pattern, end.output), end.output


def test_a_module_that_was_trained_is_trained_on(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(
        "import numpy as np, torch, shoal, shoal.torch\n"
        "torch.manual_seed(1)\n"
        "x, y = np.random.default_rng(0).normal(size=(40, 4)).astype('f4'), np.arange(40) % 2\n"
        "module = torch.nn.Linear(4, 2)\n"
        "options = dict(data=(x, y, x, y), epochs=2, batch=4, progress=False)\n"
        "losses = [shoal.train(shoal.torch.Model(module), **options).history[-1]['test']['loss'] for _ in range(3)]\n"
        "assert losses[0] > losses[1] > losses[2], losses\n"
    )
    jobs.done(jobs.launch(tmp_path, 1, tmp_path / "twice.py"))
