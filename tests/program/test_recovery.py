"""Ranks are lost while it trains, and the survivors go on: the run ends as if nothing had happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jobs
import psutil
import pytest

from shoal.comm.library import OPEN_MPI, loaded
from shoal.record.checkpoint import load

pytestmark = pytest.mark.skipif(loaded().name != OPEN_MPI, reason="no other MPI goes on without a rank")

RANKS = 4
CONFIG = {
    "name": "recovered",
    "model": {"net": "convnet-s", "width": 4},
    "train": {"epochs": 6, "batch": 4},
    "learners": {"schedule": "0:2, 3:4, 4:1, 5:4"},  # ranks 0 and 1 train first, 2 and 3 sleep
    "averaging": {"steps": 2, "momentum": 0.5},
    "run": {"checkpoint_epochs": 0.4, "heartbeat_s": 0.5},
}
SAME = ("round", "evaluation", "stage", "end")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.write_config(tmp_path_factory.mktemp("config") / "recovered.toml", CONFIG)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, config: Path) -> Path:
    return jobs.trained(tmp_path_factory.mktemp("undisturbed"), 1, config)


def recoveries(run: Path) -> list[dict[str, Any]]:
    """What the log tells of losses."""
    return [event for event in jobs.history(run) if event["event"] == "recovery"]


def more_rounds(job: jobs.Job, run: Path, count: int = 20) -> None:
    """Wait for some more rounds."""
    before = jobs.rounds(run)
    job.until(lambda: jobs.rounds(run) > before + count, f"{count} rounds more")


def recovered(job: jobs.Job, run: Path, lost: int) -> None:
    """Wait until so many ranks were lost."""
    job.until(lambda: sum(len(event["lost"]) for event in recoveries(run)) >= lost, f"the loss of {lost}")


def ends_well(
    tmp_path: Path, config: Path, undisturbed: Path, strike: Callable[[jobs.Job, Path], Sequence[int]]
) -> list[dict[str, Any]]:
    """Train while `strike(job, run)` does its worst; returns the recoveries. It names the ranks that must be lost."""
    run = tmp_path / "run"
    with jobs.launch(tmp_path, RANKS, "--ulfm", config, "--out", run) as job:
        more_rounds(job, run)
        expected = strike(job, run)
        ended = job.end()
    assert ended.status == 0, ended.output
    history = jobs.history(run)
    assert jobs.figures(history, *SAME) == jobs.figures(jobs.history(undisturbed), *SAME)
    assert history[-1]["event"] == "end"
    found = recoveries(run)
    assert sorted(one for event in found for one in event["lost"]) == sorted(expected)
    for path in run.glob("checkpoint*.h5"):
        load(path)
    said = jobs.done(jobs.Job(tmp_path, [*jobs.SHOAL, "digest", run]))
    assert said.strip() == jobs.digest(undisturbed)
    assert not list(run.glob("*.tmp-*"))
    return found


@pytest.mark.parametrize(
    ("victims", "new_master"),
    [((1,), False), ((0,), True), ((3,), False), ((0, 1), True)],
    ids=["one that trains", "the master", "a reserve", "all that train"],
)
def test_killed(tmp_path: Path, config: Path, undisturbed: Path, victims: tuple[int, ...], new_master: bool) -> None:
    def strike(job: jobs.Job, run: Path) -> Sequence[int]:
        for process in [job.rank(victim) for victim in victims]:
            process.kill()
        return victims

    found = ends_well(tmp_path, config, undisturbed, strike)
    assert any(event["new_master"] for event in found) == new_master


def test_down_to_the_last_rank(tmp_path: Path, config: Path, undisturbed: Path) -> None:
    def strike(job: jobs.Job, run: Path) -> Sequence[int]:
        for lost, victim in enumerate((0, 2, 1), 1):
            job.rank(victim).kill()
            recovered(job, run, lost)
            more_rounds(job, run, 5)
        return (0, 1, 2)

    found = ends_well(tmp_path, config, undisturbed, strike)
    assert [event["ranks"] for event in found] == [[4, 3], [3, 2], [2, 1]]


@pytest.mark.parametrize("victim", [1, 0, 3], ids=["one that trains", "the master", "a reserve"])
def test_a_stopped_rank_is_fenced(tmp_path: Path, config: Path, undisturbed: Path, victim: int) -> None:
    """It has ended before anybody goes on, so to wake it does nothing."""

    def strike(job: jobs.Job, run: Path) -> Sequence[int]:
        stopped = job.rank(victim)
        stopped.suspend()
        recovered(job, run, 1)
        with pytest.raises(psutil.NoSuchProcess):
            while stopped.status() == psutil.STATUS_ZOMBIE:  # until mpiexec has taken notice
                time.sleep(jobs.POLL_S)
            stopped.resume()
        return (victim,)

    ends_well(tmp_path, config, undisturbed, strike)


STOPS_AT_THE_END = """
import os, signal
import shoal
from shoal.comm.world import World

def close(world, orderly=World.close):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return orderly(world)

World.close = close
shoal.train("mlp", "digits", learners="0:3", epochs=1, heartbeat_s=0.5, progress=False)
os._exit(0)
"""


def test_a_rank_that_stops_when_all_is_done(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STOPS_AT_THE_END)
    jobs.done(jobs.launch(tmp_path, 3, "--ulfm", script), deadline_s=30.0)


def test_a_rank_that_wakes_in_time_is_not_lost(tmp_path: Path, config: Path, undisturbed: Path) -> None:
    def strike(job: jobs.Job, run: Path) -> Sequence[int]:
        stopped = job.rank(1)
        stopped.suspend()
        time.sleep(0.3)
        stopped.resume()
        return ()

    ends_well(tmp_path, config, undisturbed, strike)
