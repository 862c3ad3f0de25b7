"""Runs that are killed and resumed: the same run in the end, bit for bit, and no trace of the kills."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import time
from pathlib import Path

import jobs
import pytest

KILLS = 10
RANKS = 3
START_S = 1.0
"""a third of the kills come within this time, in the start of the job"""
LONGEST_ROUNDS = 50
"""the others come within so many rounds, so that ten leave the run unfinished"""
CONFIG = {
    "name": "killed",
    "data": {"set": "digits", "validation": 0.1},
    "model": {"net": "convnet-s", "width": 4, "batchnorm": True},
    "train": {"epochs": 8, "batch": 4, "local_momentum": 0.5, "local_momentum_at_reduction": "average"},
    "learners": {"schedule": "0:2, 0.7:7, 1.2:1, 1.6:12, 3:3, 5:2"},
    "averaging": {"steps": 2, "momentum": 0.5},
    "learning_rate": {"base": 0.05, "decay": "cosine"},
    "run": {"checkpoint_epochs": 0.13, "keep": 3},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.write_config(tmp_path_factory.mktemp("config") / "killed.toml", CONFIG)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, config: Path) -> Path:
    """A run directory."""
    return jobs.trained(tmp_path_factory.mktemp("uninterrupted"), RANKS, config)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, config: Path) -> Path:
    """A run directory after KILLS kills, the next start always at once and on another number of ranks."""
    folder, keyed, ends = tmp_path_factory.mktemp("killed"), random.Random(20260), contextlib.ExitStack()
    with ends:
        for kill in range(KILLS):
            n = 1 + (kill + keyed.randrange(1, 4)) % 4
            arguments = (config, "--out", folder / "run", *(["--resume"] if kill else []))
            bare = jobs.bare(folder, n, "train", *arguments) if kill % 2 else jobs.launch(folder, n, *arguments)
            job = ends.enter_context(bare)
            longest_s = keyed.uniform(0.05, START_S) if kill % 3 == 2 else jobs.DEADLINE_S
            _work(job, folder / "run", longest_s, keyed.randrange(LONGEST_ROUNDS))
            assert job.process.poll() is None, f"start {kill} ended by itself\n{job.output()}"
            job.process.kill()
    return folder / "run"


def _work(job: jobs.Job, run: Path, longest_s: float, more: int) -> None:
    """Until the job has done so many rounds more than it began with, or for so long at most."""
    before = None
    while time.monotonic() < job.started + longest_s and job.process.poll() is None:
        if before is None and re.search(r"run killed|resumed at round", job.output()):
            before = jobs.rounds(run)
        if before is not None and jobs.rounds(run) >= before + more:
            return
        time.sleep(jobs.POLL_S)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, config: Path, killed: Path) -> Path:
    """The killed run, taken on from a copy to its end."""
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copytree(killed, folder / "run")
    jobs.done(jobs.launch(folder, RANKS, config, "--out", folder / "run", "--resume"))
    return folder / "run"


def test_the_kills_came_in_the_middle(killed: Path, uninterrupted: Path) -> None:
    """Else the other tests would say little."""
    assert not (killed / "DONE").exists()
    resumes = [event["round"] for event in jobs.history(killed) if event["event"] == "resume"]
    assert len(set(resumes)) >= 4
    assert 0 < jobs.rounds(killed) < jobs.rounds(uninterrupted)


def test_a_killed_run_ends_as_if_it_had_not_been(resumed: Path, uninterrupted: Path) -> None:
    assert (resumed / "DONE").exists()
    assert jobs.digest(resumed) == jobs.digest(uninterrupted)


def test_its_history_is_whole(resumed: Path, uninterrupted: Path) -> None:
    mine, reference = jobs.history(resumed), jobs.history(uninterrupted)
    for kind in ("round", "evaluation", "stage", "checkpoint", "end"):
        assert jobs.figures(mine, kind) == jobs.figures(reference, kind), kind
    numbers = [event["round"] for event in mine if event["event"] == "round"]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [event["event"] for event in mine].count("header") == 1
    for counter in ("train_s", "busy_rank_s", "allocated_rank_s", "consumed", "learner_steps"):
        counts = [event[counter] for event in mine if event["event"] == "round"]
        assert counts == sorted(counts), counter


def test_the_kills_leave_nothing_in_the_run_directory(resumed: Path, uninterrupted: Path) -> None:
    assert set(jobs.contents(resumed)) == set(jobs.contents(uninterrupted))


def test_resuming_a_run_that_is_done_changes_nothing(config: Path, uninterrupted: Path) -> None:
    before = jobs.contents(uninterrupted.parent)
    output = jobs.done(jobs.launch(uninterrupted.parent, 2, config, "--out", uninterrupted, "--resume"))
    assert "8 epochs done" in output
    assert jobs.contents(uninterrupted.parent) == before


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, config: Path, killed: Path, uninterrupted: Path, damage: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(killed, run)
    newest = (run / "checkpoint.h5").read_bytes()
    middle = len(newest) // 2
    flipped = newest[:middle] + bytes([newest[middle] ^ 1]) + newest[middle + 1 :]
    (run / "checkpoint.h5").write_bytes({"cut": newest[:middle], "flipped": flipped}[damage])
    output = jobs.done(jobs.launch(tmp_path, RANKS, config, "--out", run, "--resume"))
    assert jobs.digest(run) == jobs.digest(uninterrupted)
    assert output.count(str(run / "checkpoint.h5")) == 1
    warnings = [event["text"] for event in jobs.history(run) if event["event"] == "warning"]
    assert sum(str(run / "checkpoint.h5") in text for text in warnings) == 1
    for kind in ("round", "evaluation", "checkpoint"):
        assert jobs.figures(jobs.history(run), kind) == jobs.figures(jobs.history(uninterrupted), kind)


def test_with_no_checkpoint_left_the_run_is_refused(tmp_path: Path, config: Path, killed: Path) -> None:
    shutil.copytree(killed, tmp_path / "run")
    for path in (tmp_path / "run").glob("checkpoint*.h5"):
        path.write_bytes(b"not a checkpoint")
    before = jobs.contents(tmp_path)
    with jobs.launch(tmp_path, 1, config, "--out", tmp_path / "run", "--resume") as job:
        ended = job.end()
    assert ended.status == 2
    assert ended.output.count("shoal: ") == 1 and "Traceback" not in ended.output
    after = jobs.contents(tmp_path)
    for name in before:
        assert name == "run/lease" or ".tmp-" in name or after[name] == before[name], name


def test_two_jobs_do_not_write_in_one_directory(tmp_path: Path, config: Path, uninterrupted: Path) -> None:
    """The second waits for the first, which is told to stop meanwhile, and goes on with its run."""
    arguments = (config, "--out", tmp_path / "run")
    with jobs.launch(tmp_path, 2, *arguments) as first:
        first.until(lambda: jobs.rounds(tmp_path / "run") > 5, "round 5")
        with jobs.launch(tmp_path, 3, *arguments, "--resume") as second:
            time.sleep(1)
            first.process.terminate()
            assert first.end().status == 99
            assert second.end().status == 0
    assert jobs.digest(tmp_path / "run") == jobs.digest(uninterrupted)
