"""A rank that is killed where the MPI cannot go on without it: the job ends soon, with 75, and goes on by itself."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

import jobs
import psutil
import pytest

from shoal.errors import BAD_INPUT, DONE, ERROR, STOPPED, TRY_AGAIN
from shoal.jobs import restarts
from shoal.jobs.launch import ONE_SIGNAL_S

RANKS = 3
LIMIT_S = 10.0
CONFIG = {
    "name": "restarted",
    "model": {"net": "convnet-s", "width": 4},
    "train": {"epochs": 3, "batch": 4},
    "learners": {"schedule": "0:2, 1:4"},
    "averaging": {"steps": 2, "momentum": 0.5},
    "run": {"checkpoint_epochs": 0.2, "heartbeat_s": 0.5},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.write_config(tmp_path_factory.mktemp("config") / "restarted.toml", CONFIG)


def kill(job: jobs.Job, run: Path, rank: int, number: int) -> None:
    """Send the signal to a rank some rounds after its start."""
    before = jobs.rounds(run)
    job.until(lambda: jobs.rounds(run) > before + 20, "20 rounds more")
    job.rank(rank).send_signal(number)


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (2, signal.SIGSEGV), (1, signal.SIGSTOP)])
def test_a_lost_rank_ends_the_job_with_75(tmp_path: Path, config: Path, rank: int, number: int) -> None:
    with jobs.launch(tmp_path, RANKS, config, "--out", tmp_path / "run") as job:
        kill(job, tmp_path / "run", rank, number)
        killed = time.monotonic()
        assert job.end().status == TRY_AGAIN
        assert time.monotonic() - killed < LIMIT_S


def test_a_job_that_is_killed_goes_on_by_itself(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, config: Path
) -> None:
    """Twice; then it has the digest of a run that was left alone."""
    alone = jobs.trained(tmp_path_factory.mktemp("alone"), RANKS, config)
    with jobs.launch(tmp_path, RANKS, "--restarts", 2, config, "--out", tmp_path / "run") as job:
        for number, rank in enumerate([1, 0], 1):
            kill(job, tmp_path / "run", rank, signal.SIGKILL)
            job.until(lambda line=f"restart {number} of 2": line in job.output(), "the restart")
        ended = job.end()
    assert ended.status == DONE, ended.output
    assert jobs.digest(tmp_path / "run") == jobs.digest(alone)


def test_no_more_restarts_than_allowed(tmp_path: Path, config: Path) -> None:
    with jobs.launch(tmp_path, RANKS, "--restarts", 1, config, "--out", tmp_path / "run") as job:
        for _ in range(2):
            kill(job, tmp_path / "run", 1, signal.SIGKILL)
        ended = job.end()
    assert ended.status == TRY_AGAIN
    assert ended.output.count("restart 1 of 1") == 1


def test_who_asks_the_job_to_stop_is_not_answered_by_a_restart(tmp_path: Path, config: Path) -> None:
    with jobs.launch(tmp_path, RANKS, "--restarts", 3, config, "--out", tmp_path / "run") as job:
        job.until(lambda: jobs.rounds(tmp_path / "run") > 5, "5 rounds")
        for rank in range(RANKS):
            with contextlib.suppress(psutil.NoSuchProcess):
                job.rank(rank).suspend()  # so that no reduction comes
        job.process.terminate()
        job.until(lambda: "SIGTERM" in job.output(), "the first signal")
        time.sleep(ONE_SIGNAL_S)
        job.process.terminate()
        ended = job.end()
    assert "restart 1" not in ended.output


def test_what_a_status_means(tmp_path: Path) -> None:
    known = {
        DONE: TRY_AGAIN,
        ERROR: ERROR,
        BAD_INPUT: BAD_INPUT,
        STOPPED: STOPPED,
        TRY_AGAIN: TRY_AGAIN,
        3: 3,
        213: 213,
    }
    killed = dict.fromkeys((9, 11, 6, 14, 137, 139, 134), TRY_AGAIN)
    for status, meant in (known | killed).items():
        assert restarts.outcome(status, tmp_path) == meant, status
    (tmp_path / "DONE").touch()
    for status in (DONE, TRY_AGAIN, 137, 183, 14):
        assert restarts.outcome(status, tmp_path) == DONE
    for status in (ERROR, BAD_INPUT, STOPPED):
        assert restarts.outcome(status, tmp_path) == status
