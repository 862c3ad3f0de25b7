"""Batch jobs on a real Slurm: the same bits, also through a time limit and on fewer nodes; ends that are in order."""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
from cluster import Cluster, environment_of

from shoal import allocation
from shoal.allocation import expand
from shoal.comm.library import MPICH, OPEN_MPI, loaded
from shoal.errors import BAD_INPUT, STOPPED
from shoal.record import runlog

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "jobs" / "experiments" / "digits.toml"
WITH_MPICH = ROOT / ".venv-mpich" / "bin" / "python"
SHRINKING = ("--set=learners.schedule=0:4, 6:2, 9:1", "--set=run.give_back_nodes=true")
LONG = "--set=train.epochs=2000"
DEADLINE_S, WARNED_S = 60.0, 110.0
POLL_S = 0.02


@dataclass(frozen=True)
class Launcher:
    """How a job's ranks are started: by whom, and the interpreter that they are."""

    program: str
    mpi: str
    python: Path
    plugin: str = ""


@dataclass(frozen=True)
class Submitted:
    """A job, and the directory of its run."""

    cluster: Cluster
    run: Path
    number: int

    def shows(self, name: str) -> str:
        """A field of scontrol's."""
        return self.cluster.job(self.number)[name]

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Those of the log so far, without a line that is being written."""
        with contextlib.suppress(Exception):
            return [event for event in runlog.read(self.run / "run.jsonl") if event["event"] in kinds]
        return []

    def rank(self, number: int) -> psutil.Process | None:
        """The process that is this rank, if it is there."""
        for process in self.cluster.processes(self.number):
            with contextlib.suppress(psutil.Error, OSError):
                if allocation.read(environment_of(process)).rank == number and "train" in process.cmdline():
                    return process
        return None

    def until(self, reached: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait for something; the test fails at the deadline."""
        end = time.monotonic() + deadline_s
        while not reached():
            if time.monotonic() > end:
                pytest.fail(f"job {self.number}: not after {deadline_s:g} s: {what}\n{self.said()}", False)
            time.sleep(POLL_S)

    def done(self, deadline_s: float = DEADLINE_S) -> str:
        """The digest, once the job has ended well."""
        self.ends("COMPLETED", deadline_s)
        assert (self.run / "DONE").exists(), self.said()
        return str(self.events("end")[-1]["digest"])

    def ends(self, state: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait for its end, which must be this one."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.until(lambda: self.shows("JobState") in over, f"the end of {self.shows('JobState')}", deadline_s)
        assert self.shows("JobState") == state, self.said()
        self.until(lambda: not list(self.cluster.processes(self.number)), "all processes have gone")

    def said(self) -> str:
        """For a failed test: the job's own output, and the daemons'."""
        log = self.run / f"job-{self.number}.log"
        return f"{log.read_text(errors='replace')[-6000:] if log.exists() else 'no output'}\n{self.cluster.logs()}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if problem := Cluster.missing():
        pytest.skip(problem)
    with Cluster(nodes=6, cpus=4) as up:
        yield up
    assert not up.folder.exists() and not list(up.processes())


@pytest.fixture(scope="module")
def mpiexec() -> Launcher:
    """That of the MPI which the tests run with."""
    mpi = {OPEN_MPI: "openmpi", MPICH: "mpich"}.get(loaded().name, "")
    return Launcher("mpiexec", mpi, Path(sys.executable))


@pytest.fixture(scope="module")
def srun() -> Launcher:
    if not WITH_MPICH.exists():
        pytest.skip(f"there is no {WITH_MPICH}; make .venv-mpich/.ready makes it")
    return Launcher("srun", "mpich", WITH_MPICH, "pmi2")


@pytest.fixture(scope="module", autouse=True)
def limited(cluster: Cluster, mpiexec: Launcher) -> Submitted:
    """A job that has begun to train, and waits for the warning of its time limit.

    Slurm looks every 30 s, so this comes first. Rank 0 is stopped until then, which nobody takes for a fault here: what
    is to be done takes a few seconds.
    """
    job = _submit(
        cluster, mpiexec, "limited", *SHRINKING, *_shape(ranks=2, nodes=1), "--time=2m", "--grace=85s",
        "--after-limit=requeue", "--set=run.heartbeat_s=1000",
    )  # fmt: skip
    job.until(lambda: len(job.events("round")) > 4, "some rounds")
    master = job.rank(0)
    assert master is not None
    master.suspend()
    return job


@pytest.fixture(scope="module")
def digest_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The digest of a run of the digits with these options that no scheduler has to do with."""

    @functools.cache
    def train(*options: str) -> str:
        run = tmp_path_factory.mktemp("plain") / "run"
        command = [sys.executable, "-m", "shoal", "launch", *options, str(DIGITS), "--out", str(run)]
        subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=True)
        return str(runlog.read(run / "run.jsonl")[-1]["digest"])

    return train


def _shape(ranks: int, nodes: int) -> tuple[str, ...]:
    return f"--ranks={ranks}", f"--ranks-per-node={ranks // nodes}"


def _submit(cluster: Cluster, by: Launcher, name: str, *options: str) -> Submitted:
    """`shoal submit` of the digits, with a machine file for these launcher and cluster."""
    launch = {"program": by.program, "mpi": by.mpi, "plugin": by.plugin}
    machine = {"about": "emulated nodes", "scheduler": "slurm", "node": {"cores": 4}, "launch": launch}
    path, run = cluster.folder / f"{by.program}.toml", cluster.folder / name
    path.write_text(tomli_w.dumps(machine))
    said = cluster.command(by.python, "-m", "shoal", "submit", path, DIGITS, f"--out={run}", *options)
    return Submitted(cluster, run, int(said))


@pytest.mark.parametrize("name", ["srun", "mpiexec"])
def test_the_digits_are_trained(
    cluster: Cluster, digest_of: Callable[..., str], request: pytest.FixtureRequest, name: str
) -> None:
    job = _submit(cluster, request.getfixturevalue(name), f"by-{name}", *_shape(ranks=4, nodes=2))
    assert job.done() == digest_of()
    (header,) = job.events("header")
    assert (header["world"], header["nodes"], header["hosts"]) == (4, 2, 2)
    assert header["job"] == f"Slurm {job.number}" and name in header["launcher"]
    assert 3000.0 < header["time_left_s"] <= 3600.0


def test_nodes_are_given_back_while_a_job_runs(
    cluster: Cluster, mpiexec: Launcher, digest_of: Callable[..., str]
) -> None:
    """By mpiexec, which reads more than srun of what Slurm leaves in the environment. This Slurm keeps no accounts, and
    then resizes a job only once: the second time it refuses, and the run goes on with the nodes that it has."""
    job = _submit(cluster, mpiexec, "shrinking", *SHRINKING, *_shape(ranks=4, nodes=4))
    job.until(lambda: job.shows("JobState") == "RUNNING", "it runs")
    at_first = set(expand(job.shows("NodeList")))
    assert len(at_first) == 4
    job.until(lambda: job.shows("NumNodes") == "2", "it has two nodes")
    kept = set(expand(job.shows("NodeList")))
    assert kept < at_first and at_first - kept <= cluster.idle()
    assert job.shows("JobState") == "RUNNING" and not job.events("end")
    assert job.done() == digest_of(*SHRINKING)
    starts, rounds = job.events("header", "resume"), job.events("round")
    assert [(event["world"], event["nodes"], event["hosts"]) for event in starts] == [(4, 4, 4), (2, 2, 2), (2, 2, 2)]
    assert "cannot release nodes" in job.events("warning")[-1]["text"]
    change, last = rounds[starts[1]["round"] - 1], rounds[-1]
    allocated, took = ([event[name] for event in (change, last)] for name in ("allocated_rank_s", "train_s"))
    assert allocated[0] == pytest.approx(4 * took[0])
    assert allocated[1] - allocated[0] == pytest.approx(2 * (took[1] - took[0]))


def test_a_job_stops_in_time_if_no_warning_comes(cluster: Cluster, mpiexec: Launcher) -> None:
    job = _submit(
        cluster, mpiexec, "unwarned", LONG, "--set=run.stop_margin_s=112", *_shape(ranks=1, nodes=1), "--time=2m",
        "--grace=60s", "--skip=--signal",
    )  # fmt: skip
    job.ends("FAILED")
    assert job.shows("ExitCode") == f"{STOPPED}:0"
    (stop,) = job.events("stop")
    assert stop["reason"].startswith("the job ends in 1"), stop
    assert job.events("checkpoint")[-1]["round"] == stop["round"]


def test_a_cancelled_job_stops_with_a_checkpoint_and_does_not_come_back(cluster: Cluster, srun: Launcher) -> None:
    job = _submit(cluster, srun, "cancelled", LONG, *_shape(ranks=2, nodes=2), "--after-limit=requeue")
    job.until(lambda: len(job.events("round")) > 4, "some rounds")
    cluster.command("scancel", job.number)
    job.ends("CANCELLED")
    assert [event["round"] for event in (job.events("checkpoint")[-1], job.events("stop")[-1])] == [
        len(job.events("round"))
    ] * 2
    assert job.shows("Restarts") == "0" and not cluster.command("squeue", "-h", "-j", job.number).strip()


def test_ranks_that_do_not_find_each_other_are_refused(cluster: Cluster, srun: Launcher, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        cluster.command("srun", "-n2", "--mpi=none", srun.python, "-m", "shoal", "train", DIGITS, "--out", run)
    assert failed.value.returncode == BAD_INPUT, failed.value.stderr
    assert "srun started 2 ranks, and each is alone in its MPI" in failed.value.stderr
    assert not run.exists()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        cluster.command(srun.python, "-m", "shoal", "preflight")
    assert failed.value.returncode == BAD_INPUT
    assert "does not understand srun --mpi=none: every rank would be alone; use --mpi=pmi2" in failed.value.stderr
    assert "understand each other" in cluster.command(srun.python, "-m", "shoal", "preflight", "--mpi=pmi2")


def test_nothing_is_left_of_a_cluster_that_failed(cluster: Cluster) -> None:
    with pytest.raises(RuntimeError), Cluster(nodes=1, cpus=1) as other:
        other.command("sbatch", "--parsable", "--output=/dev/null", "--wrap", "trap '' TERM; sleep 600")
        while not {"slurmctld", "slurmd", "slurmstepd", "sleep"} <= {process.name() for process in other.processes()}:
            time.sleep(POLL_S)
        raise RuntimeError
    assert not other.folder.exists() and not list(other.processes())


def test_a_time_limit_changes_no_bits(cluster: Cluster, limited: Submitted, digest_of: Callable[..., str]) -> None:
    limited.until((limited.run / "stop").exists, "the warning", WARNED_S)
    rounds = len(limited.events("round"))
    assert rounds > 4 and not limited.events("end", "stop")
    master = limited.rank(0)
    assert master is not None
    master.send_signal(signal.SIGCONT)
    assert limited.done(WARNED_S) == digest_of(*SHRINKING)
    resumed = limited.events("resume")
    assert resumed[0]["round"] in (rounds, rounds + 1)
    assert int(limited.shows("Restarts")) == len(resumed) >= 1
