"""Batch scripts, really run: under fake schedulers that are strict (fake_schedulers.py), with real ranks."""

from __future__ import annotations

import os
import signal
import tarfile
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest
from batch import Cluster

RANKS = 2
MORE = 10
"""rounds that a job does before it is warned"""
CONFIG = {
    "name": "batch",
    "data": {"set": "digits"},
    "model": {"net": "convnet-s", "width": 4},
    "train": {"epochs": 3, "batch": 4},
    "learners": {"schedule": "0:1, 1:3, 2:2"},
    "averaging": {"steps": 2, "momentum": 0.5},
    "run": {"checkpoint_epochs": 0},
}
MACHINES = {
    "slurm": ("frontier", "--account", "my project", "--ranks-per-node", "1", "-n", RANKS),
    "lsf": ("summit", "--account", "my project", "--ranks-per-node", "1", "-n", RANKS),
}
SHORT = ("--set", "train.epochs=0.1", "--set", "learners.schedule=0:1")
BOTH = pytest.mark.parametrize("scheduler", MACHINES)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.write_config(tmp_path_factory.mktemp("config") / "odd name.toml", CONFIG)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, config: Path) -> str:
    """Its digest."""
    return jobs.digest(jobs.trained(tmp_path_factory.mktemp("undisturbed"), RANKS, config))


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Cluster]:
    return lambda scheduler: Cluster(tmp_path, scheduler)


def _submit(cluster: Cluster, config: Path, *options: object) -> tuple[str, Path]:
    """The job's id and the run directory, whose name is an odd one."""
    machine, *more = MACHINES[cluster.scheduler]
    run = cluster.folder / "runs of mine" / "it's"
    return cluster.submit(machine, config, "--out", run, *more, *options), run


def _train(job: jobs.Job, run: Path, more: int = MORE) -> None:
    enough = jobs.rounds(run) + more
    job.until(lambda: jobs.rounds(run) >= enough, f"round {enough}")


@BOTH
def test_to_the_end(make: Callable[[str], Cluster], config: Path, scheduler: str, undisturbed: str) -> None:
    cluster = make(scheduler)
    job, run = _submit(cluster, config)
    assert "PEND" in cluster.shoal("status", run).stdout
    busy = cluster.shoal("submit", MACHINES[scheduler][0], config, "--out", run, "-A", "p")
    assert busy.returncode == 2 and f"job {job}" in busy.stderr
    ended = cluster.run(job)
    assert ended.status == 0, ended.output
    assert jobs.digest(run) == undisturbed
    assert f"run {run}: done" in cluster.shoal("status", run).stdout
    assert cluster.modules()[0].startswith("load ")
    assert cluster.record(job)["options"]["--account" if scheduler == "slurm" else "-P"] == "my project"
    again = cluster.shoal("submit", MACHINES[scheduler][0], config, "--out", run, "-A", "p")
    assert again.returncode == 2 and "done" in again.stderr


@pytest.mark.parametrize(("scheduler", "policy"), [("slurm", "requeue"), ("lsf", "chain")])
def test_a_warning_makes_it_go_on(
    make: Callable[[str], Cluster], config: Path, scheduler: str, policy: str, undisturbed: str
) -> None:
    cluster = make(scheduler)
    first, run = _submit(cluster, config, "--after-limit", policy)
    with cluster.running(first) as started:
        _train(started, run)
        cluster.warn(first)
        cluster.warn(first)
        ended = cluster.ended(first, started)
    assert "going on" in ended.output, ended.output
    assert (run / "checkpoint.h5").exists() and not (run / "DONE").exists()
    waiting = cluster.ids("PENDING")
    assert (waiting == [first]) == (policy == "requeue") and len(waiting) == 1
    assert f"job {waiting[0]}" in (said := cluster.shoal("status", run).stdout) and "1 of 10" in said
    ended = cluster.run(waiting[0])
    assert ended.status == 0 and "resumed" in ended.output, ended.output
    assert jobs.digest(run) == undisturbed
    assert cluster.ids("PENDING") == [] and not (run / "link").exists()


MISTAKES = {
    "step in the foreground": ("  ) &\n  local pid=$!", "  )\n  local pid=1000000000"),
    "one wait": ('while kill -0 "$pid" 2> /dev/null; do', "for one in wait; do"),
    "launcher takes the signal": ("    trap '' USR1 USR2 URG TERM INT\n", ""),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_usual_mistakes_would_be_found(make: Callable[[str], Cluster], config: Path, mistake: str) -> None:
    """Each makes the test above fail: the run does not stop with a checkpoint and go on."""
    cluster = make("lsf")
    job, run = _submit(cluster, config, "--after-limit", "requeue", "--set", "train.epochs=40")
    script = cluster.folder / "cluster" / f"{job}.sh"
    right = script.read_text()
    script.write_text(right.replace(*MISTAKES[mistake]))
    assert script.read_text() != right
    with cluster.running(job) as started:
        _train(started, run)
        cluster.warn(job)
        if mistake == "step in the foreground":
            _train(started, run, 50)
            assert not (run / "stop").exists()
        else:
            assert started.process.wait(jobs.DEADLINE_S) not in (0, 99)
            assert "training failed" in started.output() and "going on" not in started.output()


@BOTH
def test_a_crash_is_a_failure(make: Callable[[str], Cluster], config: Path, scheduler: str) -> None:
    cluster = make(scheduler)
    job, run = _submit(cluster, config, "--after-limit", "chain")
    with cluster.running(job) as started:
        _train(started, run)
        started.rank(1).kill()
        ended = cluster.ended(job, started)
    assert ended.status not in (0, 2, 75, 99)
    assert f"training failed with status {ended.status}" in ended.output
    assert cluster.ids("PENDING") == []


def test_bad_input_is_told_once(make: Callable[[str], Cluster], config: Path) -> None:
    cluster = make("slurm")
    job, run = _submit(cluster, config, "--after-limit", "requeue")
    (run / "config.toml").write_text("seed = 7\n")
    ended = cluster.run(job)
    assert ended.status == 2
    assert ended.output.count("another config") == 1 and cluster.ids("PENDING") == []


@pytest.mark.parametrize(
    ("scheduler", "statuses", "options", "status", "words", "goes_on"),
    [
        ("lsf", [1], [], 0, "starting it once more", False),
        ("slurm", [1, 1], [], 1, "training failed with status 1", False),
        ("slurm", [0, 75], [], 0, "starting the ranks again (2 of 2)", False),
        ("lsf", [75, 0, 75], [], 75, "stopped with status 75", False),
        ("slurm", [75, 75, 75], ["--after-limit", "chain"], 0, "going on by chain (1 of 10)", True),
        ("lsf", [75, 75, 75], ["--after-limit", "requeue"], 99, "going on by requeue (1 of 10)", True),
        ("lsf", [99], [], 99, "stopped with status 99", False),
        ("slurm", [139, 139], [], 139, "signal SEGV", False),
    ],
)
def test_what_a_status_leads_to(
    make: Callable[[str], Cluster], config: Path, scheduler: str, statuses: list[int], options: list[str], status: int,
    words: str, goes_on: bool,
) -> None:  # fmt: skip
    cluster = make(scheduler)
    job, run = _submit(cluster, config, *options, *SHORT)
    cluster.plan(statuses)
    ended = cluster.run(job)
    assert (ended.status, words in ended.output) == (status, True), ended.output
    assert bool(cluster.ids("PENDING")) == goes_on
    assert (run / "DONE").exists() == (status == 0 and not goes_on)


@BOTH
@pytest.mark.parametrize("policy", ["requeue", "chain"])
def test_links_are_counted(make: Callable[[str], Cluster], config: Path, scheduler: str, policy: str) -> None:
    cluster = make(scheduler)
    _, run = _submit(cluster, config, "--after-limit", policy, "--max-links", 2)
    cluster.plan([99] * 3)
    ended = []
    while waiting := cluster.ids("PENDING"):
        ended.append(cluster.run(waiting[0]))
    assert len(ended) == 3 and ended[-1].status == 1
    assert "all 2 links are used up" in ended[-1].output
    _, run = _submit(cluster, config)
    assert not (run / "link").exists(), "a new submission counts anew"


@BOTH
def test_a_link_that_is_left_over_leaves_at_once(make: Callable[[str], Cluster], config: Path, scheduler: str) -> None:
    cluster = make(scheduler)
    job, run = _submit(cluster, config)
    (run / "DONE").touch()
    ended = cluster.run(job)
    assert ended.status == 0 and "done already" in ended.output
    assert not (run / "run.jsonl").exists()


@BOTH
def test_cancel(make: Callable[[str], Cluster], config: Path, scheduler: str) -> None:
    cluster = make(scheduler)
    job, run = _submit(cluster, config, "--after-limit", "chain", "--set", "train.epochs=1000")
    with cluster.running(job) as started:
        _train(started, run)
        assert cluster.shoal("cancel", run).returncode == 0
        ended = cluster.ended(job, started)
    assert ended.status == 1 and "cancelled" in ended.output, ended.output
    assert cluster.ids("PENDING") == []


@pytest.mark.parametrize("launcher", ["mpiexec", "srun"])
def test_an_end_before_the_ranks_are_there(make: Callable[[str], Cluster], config: Path, launcher: str) -> None:
    """The file that it becomes is no old one."""
    cluster = make("slurm")
    early = ("--launcher", launcher, "--gpus-per-rank", 0, "--setup", "kill -USR2 $$")
    job, run = _submit(cluster, config, *early)
    ended = cluster.run(job)
    assert ended.status == 99 and not (run / "DONE").exists(), ended.output


def test_scancel_ends_it_and_preemption_does_not(make: Callable[[str], Cluster], config: Path) -> None:
    """Both are a SIGTERM; a preempted job is still RUNNING."""
    cluster = make("slurm")
    job, run = _submit(cluster, config, "--after-limit", "requeue", "--set", "train.epochs=40")
    with cluster.running(job) as started:
        _train(started, run)
        os.kill(started.process.pid, signal.SIGTERM)
        ended = cluster.ended(job, started)
    assert cluster.ids("PENDING") == [job] and "going on by requeue" in ended.output, ended.output
    with cluster.running(job) as started:
        started.until(lambda: "resumed" in started.output(), "its first words")
        _train(started, run)
        cluster.command("scancel", job)
        ended = cluster.ended(job, started)
    assert ended.status != 0 and cluster.ids("PENDING") == [], ended.output


def test_mpiexec_in_a_batch_job(make: Callable[[str], Cluster], config: Path, undisturbed: str) -> None:
    cluster = make("slurm")
    job, run = _submit(cluster, config, "--launcher", "mpiexec", "--after-limit", "requeue", "--gpus-per-rank", 0)
    with cluster.running(job) as started:
        _train(started, run)
        cluster.warn(job)
        cluster.ended(job, started)
    ended = cluster.run(job)
    assert ended.status == 0 and jobs.digest(run) == undisturbed, ended.output


def test_the_environment_is_staged(make: Callable[[str], Cluster], config: Path, tmp_path: Path) -> None:
    cluster = make("slurm")
    disk = tmp_path / "a disk"
    machine = tmp_path / "mine.toml"
    machine.write_text(
        f'about = "mine"\nscheduler = "slurm"\nnode.cores = 2\nlaunch.program = "srun"\nstaging.folder = "{disk}"\n'
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "staged python"\nexec {jobs.SHOAL[0]} "$@"\n')
    python.chmod(0o755)
    archive = tmp_path / "environment.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(python, "bin/python")
    run = tmp_path / "run"
    words = (machine, config, "--out", run, "-n", 2, "--stage", archive, *SHORT)
    ended = cluster.run(cluster.submit(*words))
    assert ended.status == 0 and ended.output.count("staged python") == 3, ended.output  # the preflight's too
    archive.write_bytes(archive.read_bytes()[:-20])
    ended = cluster.run(cluster.submit(*words[:3], tmp_path / "other", *words[4:]))
    assert ended.status == 1 and "could not be staged" in ended.output, ended.output


def test_an_mpi_that_srun_does_not_know(make: Callable[[str], Cluster], config: Path) -> None:
    cluster = make("slurm")
    ended = cluster.run(_submit(cluster, config, "--mpi", "openmpi")[0])
    assert ended.status == 2 and "srun has no --mpi=openmpi" in ended.output


def test_without_a_scheduler(config: Path, tmp_path: Path, undisturbed: str) -> None:
    cluster = Cluster(tmp_path, "slurm")
    run = tmp_path / "run"
    words = ("local", config, "--out", run, "-n", RANKS, "--time", "2h", "--after-limit", "chain")
    script = cluster.shoal("render", *words).stdout
    run.mkdir()
    (run / "job.sh").write_text(script)
    with jobs.Job(tmp_path, ["bash", run / "job.sh"]) as started:
        _train(started, run)
        timer = next(process for process in started.alive() if process.name() == "timeout")
        timer.send_signal(signal.SIGALRM)  # its time is up
        ended = started.end()
    assert ended.status == 0 and "going on by chain (1 of 10)" in ended.output, ended.output
    assert jobs.digest(run) == undisturbed
