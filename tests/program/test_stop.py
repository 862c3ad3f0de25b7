"""A run that is asked to stop: it saves its state, says so by status 99, and goes on where it was."""

from __future__ import annotations

import contextlib
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest

RANKS = 3
LEARNERS = 2
"""at first: rank 2 is a reserve then"""
MORE = 10
"""rounds that a job does at least before it is asked to stop"""
CONFIG = {
    "name": "stopped",
    "data": {"set": "digits"},
    "model": {"net": "convnet-s", "width": 4, "batchnorm": True},
    "train": {"epochs": 16, "batch": 4},
    "learners": {"schedule": f"0:{LEARNERS}, 12:5, 14:1"},
    "averaging": {"steps": 2, "momentum": 0.5},
    "run": {"checkpoint_epochs": 0},
}


def _signal_launcher(number: signal.Signals) -> Callable[[jobs.Job, Path], None]:
    return lambda job, run: job.process.send_signal(number)


def _signal_rank(rank: int, number: signal.Signals) -> Callable[[jobs.Job, Path], None]:
    return lambda job, run: job.rank(rank).send_signal(number)


def _put_stop_file(job: jobs.Job, run: Path) -> None:
    (run / "stop").touch()


WAYS = {
    "SIGTERM to a reserve": (jobs.launch, _signal_rank(2, signal.SIGTERM), "a signal"),
    "SIGUSR2 to a reserve": (jobs.bare, _signal_rank(2, signal.SIGUSR2), "a signal"),
    "SIGTERM to shoal launch": (jobs.launch, _signal_launcher(signal.SIGTERM), "the stop file"),
    "SIGUSR2 to shoal launch": (jobs.launch, _signal_launcher(signal.SIGUSR2), "the stop file"),
    "SIGINT to shoal launch": (jobs.launch, _signal_launcher(signal.SIGINT), "the stop file"),
    "SIGHUP to shoal launch": (jobs.launch, _signal_launcher(signal.SIGHUP), "the stop file"),
    "SIGTERM to the master": (jobs.launch, _signal_rank(0, signal.SIGTERM), "a signal"),
    "SIGUSR2 to the master": (jobs.bare, _signal_rank(0, signal.SIGUSR2), "a signal"),
    "SIGTERM to a learner's rank": (jobs.bare, _signal_rank(1, signal.SIGTERM), "a signal"),
    "SIGUSR2 to a learner's rank": (jobs.launch, _signal_rank(1, signal.SIGUSR2), "a signal"),
    "a stop file": (jobs.bare, _put_stop_file, "the stop file"),
    "SIGUSR1 to mpiexec": (jobs.bare, _signal_launcher(signal.SIGUSR1), "a signal"),
}
"""how the job is started, how it is asked, and the reason that its log gives"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.write_config(tmp_path_factory.mktemp("config") / "stopped.toml", CONFIG)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, config: Path) -> Path:
    """A run directory."""
    return jobs.trained(tmp_path_factory.mktemp("uninterrupted"), RANKS, config)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that every test here takes on by a few rounds."""
    return tmp_path_factory.mktemp("stopped") / "run"


def _start(start: Callable[..., jobs.Job], config: Path, run: Path) -> jobs.Job:
    command = ("train",) if start is jobs.bare else ()
    return start(run.parent, RANKS, *command, config, "--out", run, "--resume")


def _work(job: jobs.Job, run: Path, more: int) -> None:
    """Until it has done some rounds; what a killed job has left in the log is cut off first."""
    job.until(lambda: re.search(r"run stopped|resumed at", job.output()) is not None, "its first words")
    enough = jobs.rounds(run) + more
    job.until(lambda: jobs.rounds(run) >= enough, f"round {enough}")


@pytest.mark.parametrize("way", WAYS)
def test_a_stop_is_honoured(config: Path, stopped: Path, way: str) -> None:
    start, ask, reason = WAYS[way]
    with _start(start, config, stopped) as job:
        _work(job, stopped, MORE)
        ask(job, stopped)
        ended = job.end()
    history = jobs.history(stopped)
    assert ended.status == 99, ended.output
    assert "Traceback" not in ended.output
    assert [event["event"] for event in history[-2:]] == ["checkpoint", "stop"]
    assert history[-1]["round"] == history[-2]["round"] == jobs.rounds(stopped)
    assert history[-1]["reason"] == reason
    if "reserve" in way:
        assert [event["ranks"] for event in history if event["event"] == "round"][-1] == LEARNERS
    assert (stopped / "checkpoint.h5").exists()
    assert not (stopped / "stop").exists() and not (stopped / "DONE").exists()


def test_a_signal_during_the_start(config: Path, stopped: Path) -> None:
    """It may be too early for a handler, or for a state to save; a run goes on all the same."""
    keyed = random.Random(7)
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        delay_s = keyed.uniform(0.0, 1.0)
        with _start(jobs.launch, config, stopped) as job:
            with contextlib.suppress(Exception):
                job.process.wait(delay_s)
            job.process.send_signal(number)
            ended = job.end()
        assert ended.status == 99 or "reduction" not in ended.output, (delay_s, ended)
        assert ended.status in (99, -number, 130), (delay_s, ended)
        assert not (stopped / "stop").exists(), (delay_s, ended)


def test_a_stop_that_a_kill_overtook_does_not_stop_the_next_job(config: Path, stopped: Path) -> None:
    with _start(jobs.launch, config, stopped) as job:
        _work(job, stopped, 1)
        job.rank(0).suspend()
        job.process.send_signal(signal.SIGTERM)
        job.until((stopped / "stop").exists, "a stop file")
        job.process.kill()
        job.gone()
    with _start(jobs.launch, config, stopped) as job:
        _work(job, stopped, MORE)
        job.process.send_signal(signal.SIGTERM)
        ended = job.end()
    assert ended.status == 99, ended


def test_after_all_these_stops_the_run_ends_as_if_there_had_been_none(
    config: Path, stopped: Path, uninterrupted: Path
) -> None:
    jobs.done(_start(jobs.launch, config, stopped))
    assert (stopped / "DONE").exists() and not (stopped / "stop").exists()
    assert jobs.digest(stopped) == jobs.digest(uninterrupted)
    for kind in ("round", "evaluation", "stage", "end"):
        assert jobs.figures(jobs.history(stopped), kind) == jobs.figures(jobs.history(uninterrupted), kind), kind
