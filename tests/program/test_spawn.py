"""Ranks that are spawned and released while others train, and the trial that says whether a launcher can do it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path

import jobs
import psutil
import pytest

from shoal.comm.library import OPEN_MPI, loaded
from shoal.jobs import probe
from shoal.jobs.launch import environment, find_mpiexec

SCRIPT = Path(__file__).parent / "spawn_ranks.py"
KNOWN_WITHIN_S = 15.0
ULFM = ("--with-ft", "ulfm")
OPEN_MPI_S = pytest.mark.skipif(loaded().name != OPEN_MPI, reason="only Open MPI can")
FAULT_TOLERANCE = [pytest.param((), id="plain"), pytest.param(ULFM, id="ulfm", marks=OPEN_MPI_S)]


@pytest.fixture(autouse=True)
def yielding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")


def scene(folder: Path, n: int, *words: object, options: tuple[str, ...] = ()) -> jobs.Job:
    return jobs.mpiexec(folder, *options, "-n", n, sys.executable, "-m", "mpi4py", SCRIPT, *words)


@pytest.mark.parametrize("options", FAULT_TOLERANCE)
def test_up_and_down_leaves_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    output = jobs.done(scene(tmp_path, 2, "cycles", 4, 2, options=options))
    assert output.count("went up and down 4 times") == 2


def test_one_rank_grows_to_four(tmp_path: Path) -> None:
    assert "went up and down 1 times" in jobs.done(scene(tmp_path, 1, "cycles", 1, 3))


@OPEN_MPI_S
@pytest.mark.parametrize("options", FAULT_TOLERANCE)
def test_a_command_that_is_refused_leaves_the_ranks_as_they_were(tmp_path: Path, options: tuple[str, ...]) -> None:
    with scene(tmp_path, 2, "refused", options=options) as job:
        assert job.end().output.count("went on") == 2


@OPEN_MPI_S
@pytest.mark.parametrize("who", ["joiner", "0", "1"])
def test_a_death_while_a_rank_joins(tmp_path: Path, who: str) -> None:
    """mpiexec passes on the dead joiner's status, so that only the survivors' word counts."""
    survivors = 3 if who == "joiner" else 2
    with scene(tmp_path, 3, "dies", who, options=ULFM) as job:
        assert job.end().output.count(f"{survivors} ranks went on") == survivors


@pytest.mark.parametrize("options", FAULT_TOLERANCE)
def test_spawned_ranks_die_with_the_launcher(tmp_path: Path, options: tuple[str, ...]) -> None:
    with scene(tmp_path, 2, "stay", options=options) as job:
        job.until(lambda: "three ranks" in job.output(), "three ranks")
        assert sum(process.name().startswith("python") for process in job.alive()) == 3
        job.process.kill()
        job.gone()


def judged(folder: Path, line: list[str], deadline_s: float = probe.DEADLINE_S, **variables: str) -> probe.Verdict:
    """What the trial finds out, in time and with nothing of it left."""
    mark = {"SHOAL_TEST_PROBE": str(folder)}
    began = time.monotonic()
    verdict = probe.can_spawn(line, {**environment(loaded(), os.environ, folder), **variables, **mark}, deadline_s)
    assert time.monotonic() - began < KNOWN_WITHIN_S
    end = time.monotonic() + jobs.GONE_S
    while left := [process for process in psutil.process_iter() if _has(process, mark)]:
        assert time.monotonic() < end, left
        time.sleep(jobs.POLL_S)
    return verdict


def _has(process: psutil.Process, variables: dict[str, str]) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        return process.status() != psutil.STATUS_ZOMBIE and variables.items() <= process.environ().items()
    return False


@pytest.mark.parametrize("options", FAULT_TOLERANCE)
def test_a_launcher_that_can_spawn(tmp_path: Path, options: tuple[str, ...]) -> None:
    verdict = judged(tmp_path, [str(find_mpiexec(loaded())), *options])
    assert verdict.ok, verdict.reason
    assert 0 < verdict.lead_s < probe.DEADLINE_S


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param("echo 'srun: error: no spawn here' >&2; exit 3", "status 3 .*no spawn here", id="refuses"),
        pytest.param("kill -ABRT $$", "SIGABRT", id="aborts"),
        pytest.param("exit 0", "status 0", id="does nothing"),
        pytest.param("sleep 1000; sleep 1000", "after 1 s", id="hangs"),
        pytest.param("trap '' TERM; while :; do sleep 1; done", "after 1 s", id="hangs and ignores signals"),
    ],
)
def test_a_launcher_that_cannot(tmp_path: Path, body: str, reason: str) -> None:
    path = tmp_path / "launcher"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    verdict = judged(tmp_path, [str(path)], deadline_s=1)
    assert not verdict.ok
    assert re.search(reason, verdict.reason), verdict.reason


@pytest.mark.parametrize(("fate", "deadline_s"), [("time.sleep(1000)", probe.DEADLINE_S), ("os._exit(3)", 5.0)])
def test_a_spawn_that_hangs(tmp_path: Path, fate: str, deadline_s: float) -> None:
    """The real launcher, and a spawned process that never gets to MPI_Init, on which MPI_Comm_spawn waits."""
    spawned = "os.environ.get('PMI_SPAWNED') == '1' or os.environ.get('PMIX_NAMESPACE', '').endswith('@2')"
    (tmp_path / "sitecustomize.py").write_text(f"import os, time\nif {spawned}: {fate}\n")
    verdict = judged(tmp_path, [str(find_mpiexec(loaded()))], deadline_s, PYTHONPATH=str(tmp_path))
    assert not verdict.ok


@OPEN_MPI_S
def test_no_slot_to_spawn_on(tmp_path: Path) -> None:
    line = [str(find_mpiexec(loaded())), "--host", "localhost:2", "--map-by", "slot:NOOVERSUBSCRIBE"]
    verdict = judged(tmp_path, line, PRTE_MCA_rmaps_default_mapping_policy="slot")
    assert not verdict.ok
    assert re.search("slots|filled", verdict.reason), verdict.reason
