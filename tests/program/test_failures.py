"""One rank fails, wherever it is: the whole job ends soon, with that rank's traceback once."""

from __future__ import annotations

import re
import time
from pathlib import Path

import jobs
import pytest

from shoal.comm.library import OPEN_MPI, loaded

RANKS = 4
LIMIT_S = 10.0
"""from the failure to the end of the job"""
ORDERLY = (0, 2, 75, 99)
ULFM = pytest.mark.skipif(loaded().name != OPEN_MPI, reason="ULFM is Open MPI's")

SCRIPT = """
import os, sys, threading, time
from pathlib import Path
import numpy as np
import shoal
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank

def note():
    Path({folder!r}, "failed").write_text(str(time.time()))

def fail(kind=RuntimeError):
    note()
    raise kind("the reason")

class Failing(shoal.ReLU):
    '''Fails in the 40th step on one rank.'''
    def forward(self, x, training):
        self.steps = getattr(self, "steps", 0) + 1
        if rank == {rank} and self.steps == 40:
            fail()
        return super().forward(x, training)

def on_event(event):
    if event["event"] == "evaluation":
        fail()

def busy():
    a = np.ones((4000, 4000))
    while True:
        np.dot(a, a)

x, y = np.random.default_rng(0).normal(size=(64, 6)).astype("float32"), np.arange(64) % 3

def train(layer=None, **options):
    net = shoal.Sequential(shoal.Linear(6, 8), layer or shoal.ReLU(), shoal.Linear(8, 3))
    options = dict(epochs=2, batch=2, progress=False) | options
    shoal.train(net, (x, y, x, y), learners="0:2, 1:4", **options)

{body}
"""

FAILURES = {
    "before the training": (1, "if rank == 1: fail()\ntrain(epochs=10000)"),
    "before the training, the others compute": (3, "if rank == 3: fail()\nbusy()"),
    "in a step": (2, "train(Failing(), epochs=10000, out={folder!r} + '/run')"),
    "in a step of the master": (0, "train(Failing(), epochs=10000)"),
    "in on_event": (0, "train(on_event=on_event, epochs=10000, out={folder!r} + '/run')"),
    "in a thread": (1, "if rank == 1: threading.Timer(0.2, fail).start()\ntrain(epochs=10000)"),
    "in a thread of a rank that computes": (2, "if rank == 2: threading.Thread(target=fail).start()\nbusy()"),
    "after the training": (3, "train()\nif rank == 3: fail()"),
    "an input error of one rank": (1, "if rank == 1: fail(shoal.InputError)\ntrain(epochs=10000)"),
}
"""the rank that fails and how"""
BOTH = ("before the training, the others compute", "in a step", "in a thread of a rank that computes")


def _ended(tmp_path: Path, rank: int, body: str, *options: str) -> jobs.Ended:
    """The end of a job in which `rank` fails; the checks that hold for each."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path), rank=rank, body=body.format(folder=str(tmp_path))))
    with jobs.launch(tmp_path, RANKS, *options, script) as job:
        ended = job.end()
        lasted_s = time.time() - float((tmp_path / "failed").read_text())
    print(f"all gone {lasted_s:.2f} s after the failure")
    assert lasted_s < LIMIT_S
    assert ended.status not in ORDERLY, ended
    said = re.findall(r"(?m)^shoal: .*", ended.output)
    assert len(said) == 1 and re.fullmatch(rf"shoal: rank {rank} of {RANKS} on \S+ failed:", said[0]), ended.output
    return ended


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_ends_the_job(tmp_path: Path, case: str) -> None:
    rank, body = FAILURES[case]
    ended = _ended(tmp_path, rank, body)
    assert ended.output.count("Error: the reason") == 1, ended.output
    assert len(re.findall(r"Traceback \(most", ended.output)) == 1, ended.output


@ULFM
@pytest.mark.parametrize("case", BOTH)
def test_a_failure_ends_the_job_under_ulfm(tmp_path: Path, case: str) -> None:
    rank, body = FAILURES[case]
    ended = _ended(tmp_path, rank, body, "--ulfm")
    assert ended.output.count("Error: the reason") == 1, ended.output
    assert len(re.findall(r"Traceback \(most", ended.output)) == 1, ended.output


@pytest.mark.parametrize("code", ["3", "'no licence'"])
def test_an_exit_of_one_rank_ends_the_job(tmp_path: Path, code: str) -> None:
    ended = _ended(tmp_path, 2, f"if rank == 2:\n    note()\n    sys.exit({code})\ntrain(epochs=10000)")
    assert f"SystemExit: {code.strip(chr(39))}" in ended.output


@pytest.mark.parametrize("code", ["", "0"])
def test_an_exit_with_0_is_no_failure(tmp_path: Path, code: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path), rank=-1, body=f"train()\nsys.exit({code})"))
    assert jobs.done(jobs.launch(tmp_path, RANKS, script)) == ""


def test_a_checkpoint_that_cannot_be_written(tmp_path: Path) -> None:
    body = """
import shutil
def on_event(event):
    if event["event"] == "checkpoint":
        note()
        shutil.rmtree({folder!r} + "/run")
train(epochs=10000, on_event=on_event, out={folder!r} + "/run")
"""
    ended = _ended(tmp_path, 0, body)
    assert ended.output.count("FileNotFoundError: ") == 1 or ended.output.count("LeaseError: ") == 1, ended.output


def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    settings = [
        "--set",
        "train.epochs=10000",
        "--set",
        'learners.schedule="0:4"',
        "--set",
        "run.timeout_s=2",
        "--set",
        "run.heartbeat_s=60",
    ]
    with jobs.launch(tmp_path, RANKS, jobs.EXPERIMENTS / "digits.toml", "--out", tmp_path / "run", *settings) as job:
        job.until(lambda: jobs.rounds(tmp_path / "run") > 3, "round 3")
        job.rank(1).suspend()
        start = time.monotonic()
        ended = job.end()
    assert time.monotonic() - start < 2 + LIMIT_S
    assert ended.status not in ORDERLY, ended
    assert re.search(r"DeadlineError: waited \d s for world rank 1, which did not come", ended.output), ended.output
