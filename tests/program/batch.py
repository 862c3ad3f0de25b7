"""A cluster for tests: the commands of fake_schedulers.py on PATH, and a machine that runs the jobs they queue."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jobs

from shoal.comm.library import loaded
from shoal.jobs.launch import environment, find_mpiexec

FAKE = Path(__file__).with_name("fake_schedulers.py")
SLURM = ("sbatch", "scontrol", "squeue", "scancel", "srun")
LSF = ("bsub", "bjobs", "bkill", "jsrun")


class Cluster:
    """Jobs run one at a time, in the order of their ids, each in a process group of its own."""

    def __init__(self, folder: Path, scheduler: str) -> None:
        self.folder, self.scheduler = folder, scheduler
        self._jobs, programs = folder / "cluster", folder / "bin"
        self._jobs.mkdir()
        programs.mkdir()
        for name in SLURM if scheduler == "slurm" else LSF:
            self._put(programs / name, f'exec {shlex.quote(sys.executable)} -S -E {shlex.quote(str(FAKE))} {name} "$@"')
        self._put(programs / "module", 'echo "$*" >> "$FAKE_CLUSTER/modules"')
        library = loaded()
        self.variables = {
            **environment(library, {}, self._jobs),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "FAKE_CLUSTER": str(self._jobs),
            "FAKE_MPIEXEC": json.dumps([str(find_mpiexec(library))]),
        }

    def shoal(self, *words: object) -> subprocess.CompletedProcess[str]:
        """A command on the login node."""
        command = [*jobs.SHOAL, *map(str, words)]
        given = {**os.environ, **self.variables}
        return subprocess.run(command, cwd=self.folder, env=given, capture_output=True, text=True, timeout=60)

    def submit(self, *words: object) -> str:
        """`shoal submit`, and the job's id."""
        ended = self.shoal("submit", *words)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def command(self, *words: str) -> None:
        """One of the scheduler's commands."""
        subprocess.run(words, env={**os.environ, **self.variables}, check=True, timeout=60)

    def plan(self, statuses: list[int]) -> None:
        """The next steps end at once, with these statuses."""
        (self._jobs / "statuses").write_text(" ".join(map(str, statuses)))

    def record(self, job: str) -> dict[str, Any]:
        return json.loads((self._jobs / f"{job}.json").read_text())

    def ids(self, *states: str) -> list[str]:
        """Ids of the jobs in these states, in order."""
        return sorted(path.stem for path in self._jobs.glob("*.json") if self.record(path.stem)["state"] in states)

    def modules(self) -> list[str]:
        """What `module` was told."""
        return (self._jobs / "modules").read_text().splitlines()

    @contextmanager
    def running(self, job: str, **variables: str) -> Iterator[jobs.Job]:
        """The job's script, started; within the block, `ended` says how it went."""
        held = self.record(job)
        assert held["state"] == "PENDING"
        own = (
            {"SLURM_JOB_ID": job, "SLURM_RESTART_COUNT": str(held["restarts"])}
            if self._is_slurm()
            else {"LSB_JOBID": job}
        )
        spooled = self._jobs / f"{job}.sh"
        gate = self._jobs / f"{job}.go"
        gate.unlink(missing_ok=True)
        wait = f"until [ -e {shlex.quote(str(gate))} ]; do sleep 0.01; done; exec bash {shlex.quote(str(spooled))}"
        given = {**self.variables, **own, **variables}
        with jobs.Job(self.folder, ["env", *(f"{k}={v}" for k, v in given.items()), "bash", "-c", wait]) as started:
            self._save(job, state="RUNNING", pid=started.process.pid, requeued=False)
            gate.touch()
            yield started

    def ended(self, job: str, started: jobs.Job) -> jobs.Ended:
        """How its script ended; the job is queued again if it asked for that."""
        ended = started.end()
        held = self.record(job)
        again = held["requeued"] or (not self._is_slurm() and held["options"].get("-Q") == str(ended.status))
        if again:
            self._save(job, state="PENDING", restarts=held["restarts"] + 1)
        else:
            self._save(job, state="COMPLETED" if ended.status == 0 else "FAILED")
        return ended

    def run(self, job: str, **variables: str) -> jobs.Ended:
        """Run it undisturbed."""
        with self.running(job, **variables) as started:
            return self.ended(job, started)

    def warn(self, job: str) -> None:
        """The warning before the limit: Slurm's B: to the script alone, LSF's to all of its process group."""
        pid = self.record(job)["pid"]
        (os.kill if self._is_slurm() else os.killpg)(pid, signal.SIGUSR2)

    def _save(self, job: str, **changes: Any) -> None:
        path = self._jobs / f"{job}.json"
        path.write_text(json.dumps({**self.record(job), **changes}))

    def _is_slurm(self) -> bool:
        return self.scheduler == "slurm"

    @staticmethod
    def _put(path: Path, line: str) -> None:
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
