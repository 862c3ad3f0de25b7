"""Runs that are killed and resumed: the same run in the end, bit for bit, and no trace of the kills."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import jobs
import psutil
import pytest

KILLS = 10
RANKS = 3
LONGEST_S = 1.8
LONGEST_ROUNDS = 50
"""a kill comes after so long or so many rounds at most, so that ten leave the run unfinished"""
CONFIG = {
    "name": "killed",
    "data": {"set": "digits", "validation": 0.1},
    "model": {"net": "convnet-s", "width": 4, "batchnorm": True},
    "train": {"epochs": 9, "batch": 4, "local_momentum": 0.5, "local_momentum_at_reduction": "average"},
    "learners": {"schedule": "0:1, 2.5:3, 4:7, 5.3:12, 6:2"},
    "averaging": {"steps": 2, "momentum": 0.5},
    "learning_rate": {"base": 0.05, "decay": "cosine"},
    "run": {"checkpoint_epochs": 0.13, "keep": 3},
}
KINDS = ("header", "round", "evaluation", "stage", "checkpoint", "end")
FREE = ("host", "world", "config")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.write_config(tmp_path_factory.mktemp("config") / "killed.toml", CONFIG)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, config: Path) -> Path:
    """A run directory."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    jobs.done(jobs.launch(folder, RANKS, config, "--out", folder / "run"))
    return folder / "run"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, config: Path) -> Path:
    """A run directory after KILLS kills, each followed by a resume at once, on another number of ranks."""
    folder, keyed = tmp_path_factory.mktemp("killed"), random.Random(20260)
    for kill in range(KILLS):
        start, victim = (jobs.bare, "mpiexec") if kill % 2 else (jobs.launch, "launch")
        command = ("train",) if start is jobs.bare else ()
        resume = ["--resume"] if kill else []
        n = keyed.choice((1, 2, 3, 4))
        with start(folder, n, *command, config, "--out", folder / "run", *resume) as job:
            _wait(job, folder / "run", keyed.uniform(0.1, LONGEST_S), keyed.randrange(LONGEST_ROUNDS))
            assert job.process.poll() is None, f"kill {kill}: {victim} ended by itself\n{job.output()}"
            job.process.kill()
            # No job.gone(): the next one starts at once.
            orphans = job.alive()
            if kill % 3 == 0:
                _, alive = psutil.wait_procs(orphans, jobs.GONE_S)
                assert not alive
    return folder / "run"


def _wait(job: jobs.Job, run: Path, longest_s: float, more: int) -> None:
    """Until the job has done so many rounds more than it began with, or for so long at most."""
    import time

    before = None
    while time.monotonic() < job.started + longest_s:
        if before is None and "epoch" in job.output():
            before = jobs.rounds(run)
        if before is not None and jobs.rounds(run) >= before + more:
            return
        time.sleep(jobs.POLL_S)
