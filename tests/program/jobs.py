"""Start `shoal` as a user does, from a test: with a deadline, its output in a file, and nothing left behind.

Each job has a folder of its own as TMPDIR. All that a job starts inherits it, so its processes are found by
it whatever session or parent they have by then, and what a killed MPI leaves behind is removed with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ranks
import tomli_w

from shoal.comm.library import loaded
from shoal.jobs.launch import environment, find_mpiexec

DEADLINE_S = 90.0
GONE_S = 5.0
"""no rank lives longer than this after its job's end"""
POLL_S = 0.01
SHOAL = (sys.executable, "-m", "shoal")
EXPERIMENTS = Path(__file__).parents[2] / "jobs" / "experiments"
MEASURED = {"time", "train_s", "busy_rank_s", "allocated_rank_s", "evaluation_s", "ranks"}
"""fields of the log that tell of the machine, not of the training"""


@dataclass(frozen=True)
class Ended:
    """A job that has ended."""

    status: int
    output: str
    wall_s: float


class Job:
    """A command that was started; at the end of its `with` block nothing of it lives."""

    def __init__(self, folder: Path, command: Sequence[object], **variables: str) -> None:
        self._tmp = Path(tempfile.mkdtemp(prefix="job-", dir=folder))
        self.command = " ".join(map(str, command))
        self.started = time.monotonic()
        own = {"TMPDIR": str(self._tmp), "OMPI_MCA_btl_sm_backing_directory": str(self._tmp)}
        with (self._tmp / "output").open("wb") as output:
            self.process = subprocess.Popen(
                list(map(str, command)),
                env={**variables, **os.environ, **own},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_as_in_a_terminal,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *raised: object) -> None:
        while left := self.alive():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, GONE_S)
        self.process.wait()
        shutil.rmtree(self._tmp, ignore_errors=True)

    def output(self) -> str:
        """What all its processes have written so far."""
        return (self._tmp / "output").read_text(errors="replace")

    def alive(self) -> list[psutil.Process]:
        """What lives of it."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("TMPDIR") == str(self._tmp) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def rank(self, number: int) -> psutil.Process:
        """The process that is this rank of the world."""
        for process in self.alive():
            with contextlib.suppress(psutil.Error, OSError):
                if _rank_of(process) == str(number) and "shoal" in process.cmdline():
                    return process
        pytest.fail(f"rank {number} of {self.command} does not live\n{self.output()}", False)

    def until(self, reached: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait for something; the test fails if the job ends before, or at the deadline."""
        while not reached():
            if self.process.poll() is not None:
                self._fail(f"ended with status {self.process.returncode} before {what}")
            if time.monotonic() > self.started + deadline_s:
                self._fail(f"had not come to {what} after {deadline_s:g} s; alive were {self._names()}")
            time.sleep(POLL_S)

    def end(self, deadline_s: float = DEADLINE_S) -> Ended:
        """Wait for its end; the test fails at the deadline, and if a process outlives the job."""
        try:
            status = self.process.wait(max(0.0, self.started + deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._fail(f"did not end within {deadline_s:g} s; alive were {self._names()}")
        wall_s = time.monotonic() - self.started
        self.gone()
        return Ended(status, self.output(), wall_s)

    def gone(self) -> None:
        """The test fails if anything of it lives for longer than a few seconds from now on."""
        end = time.monotonic() + GONE_S
        while self.alive():
            if time.monotonic() > end:
                self._fail(f"left behind after {GONE_S:g} s: {self._names()}")
            time.sleep(POLL_S)

    def _names(self) -> str:
        return ", ".join(map(_describe, self.alive())) or "no process"

    def _fail(self, complaint: str) -> None:
        pytest.fail(f"{self.command} {complaint}\n{self.output()[-ranks.LONGEST_OUTPUT :]}", False)


def _as_in_a_terminal() -> None:
    """What a shell starts in the background, or nohup anywhere, ignores these, and so does all that it starts."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def launch(folder: Path, n: int, *arguments: object) -> Job:
    """`shoal launch -n n arguments...`, working in `folder`."""
    return Job(folder, [*SHOAL, "launch", "-n", n, *arguments])


def bare(folder: Path, n: int, *arguments: object) -> Job:
    """`mpiexec -n n python -m shoal arguments...`"""
    return mpiexec(folder, "-n", n, *SHOAL, *arguments)


def mpiexec(folder: Path, *arguments: object) -> Job:
    """The mpiexec that belongs to mpi4py, in the environment that shoal gives it."""
    library = loaded()
    return Job(folder, [find_mpiexec(library), *arguments], **environment(library, {}, folder))


def done(job: Job, deadline_s: float = DEADLINE_S) -> str:
    """Wait for a job that must end well; what it wrote."""
    with job:
        ended = job.end(deadline_s)
    if ended.status != 0:
        pytest.fail(f"{job.command} ended with status {ended.status}\n{ended.output[-ranks.LONGEST_OUTPUT :]}", False)
    return ended.output


def trained(folder: Path, n: int, config: Path) -> Path:
    """The run directory of a config that n ranks have trained to its end."""
    done(launch(folder, n, config, "--out", folder / "run"))
    return folder / "run"


def write_config(path: Path, tree: Mapping[str, Any]) -> Path:
    """A config or sweep file."""
    path.write_text(tomli_w.dumps(tree))
    return path


def history(directory: Path) -> list[dict[str, Any]]:
    """The events in the log of a run, without a line that is being written."""
    lines = (directory / "run.jsonl").read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def rounds(directory: Path) -> int:
    """How many rounds the log of a run tells of by now; 0 without one."""
    with contextlib.suppress(FileNotFoundError):
        return sum(event["event"] == "round" for event in history(directory))
    return 0


def digest(directory: Path) -> str:
    """The digest at the end of a run that is done."""
    return str(history(directory)[-1]["digest"])


def figures(events: Sequence[Mapping[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    """The events of these kinds, without what tells of the machine."""
    return [{k: v for k, v in event.items() if k not in MEASURED} for event in events if event["event"] in kinds]


def contents(folder: Path) -> dict[str, bytes | None]:
    """All that is below a folder, jobs' own folders left out: the bytes of files, None for folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if not path.relative_to(folder).parts[0].startswith("job-")
    }


def _rank_of(process: psutil.Process) -> str | None:
    given = process.environ()
    return next((given[name] for name in ranks.RANK_VARIABLES if name in given), None)


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        rank = _rank_of(process)
        name = process.name() if rank is None else f"rank {rank}"
        return f"{name} (pid {process.pid}, {process.status()}, {sum(process.cpu_times()[:2]):.1f} s of CPU)"
    return f"pid {process.pid}"
