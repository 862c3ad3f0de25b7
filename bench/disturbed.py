"""A job that is disturbed while it runs: its processes and segments, its log as it grows, what must be the same.

All that a job starts inherits its TMPDIR, so that its processes are found by it whatever parent they have by then.
Open MPI's segments go to a folder of the job's own in /dev/shm.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

SHOAL = (sys.executable, "-m", "shoal")
SAMPLES = 1437
"""of the digits' training set"""
GONE = (psutil.Error, OSError)
LEFT_S = 5.0
SHARED = Path("/dev/shm")
COMPARED = {
    "round": ("round", "consumed", "learners", "serial_steps", "learner_steps", "steps", "batch", "rate", "loss"),
    "evaluation": ("round", "consumed", "test"),
    "stage": ("round", "learners", "steps", "momentum", "batch", "rate"),
    "end": ("round", "consumed", "digest", "serial_steps", "learner_steps", "test"),
}
"""by kind of event, what a disturbed run's log must have in common with an undisturbed one's"""


@contextlib.contextmanager
def place(folder: Path) -> Iterator[dict[str, str]]:
    """The variables that keep a job's traces together, in places that are removed at the end."""
    shared = Path(tempfile.mkdtemp(prefix="shoal-chaos-", dir=SHARED if SHARED.is_dir() else folder))
    tmp = folder / "tmp"
    tmp.mkdir()
    try:
        yield {"TMPDIR": str(tmp), "OMPI_MCA_btl_sm_backing_directory": str(shared)}
    finally:
        shutil.rmtree(shared, ignore_errors=True)
        shutil.rmtree(tmp, ignore_errors=True)


class Job:
    """`shoal launch arguments...`; at the end of its `with` block nothing of it lives, and `left` says what was left
    of it after its end. limit_s: what it may take after the last event."""

    def __init__(self, folder: Path, arguments: Sequence[object], variables: Mapping[str, str], limit_s: float) -> None:
        self._variables, self.limit_s = variables, limit_s
        self.left: list[str] = []
        with (folder / "output.txt").open("ab") as output:
            self._process = subprocess.Popen(
                [*SHOAL, "launch", *map(str, arguments)],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """End it if it has not ended, and look what it left."""
        self.wait(LEFT_S)
        end_s = time.monotonic() + LEFT_S
        while self.alive() and time.monotonic() < end_s:
            time.sleep(0.05)
        self.left = [f"left the process {_describe(process)}" for process in self.alive()]
        while alive := self.alive():
            for process in alive:
                with contextlib.suppress(*GONE):
                    process.kill()
            psutil.wait_procs(alive, LEFT_S)
        self.status = self._process.wait()
        for place in map(Path, self._variables.values()):
            self.left += [f"left {path}" for path in place.rglob("*") if not path.is_dir()]

    def runs(self) -> bool:
        """Whether the launcher lives."""
        return self._process.poll() is None

    def wait(self, seconds: float) -> bool:
        """Wait for its end, so long at most; whether it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.runs()

    def alive(self) -> list[psutil.Process]:
        """What lives of it."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(*GONE):
                mine = process.environ().get("TMPDIR") == self._variables["TMPDIR"]
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self) -> dict[int, psutil.Process]:
        """Its living ranks, but those that are stopped, by a number that grows with their age."""
        found = []
        for process in self.alive():
            with contextlib.suppress(*GONE):
                if process.status() == psutil.STATUS_STOPPED:
                    continue
                given, name = process.environ(), process.cmdline()
                if "OMPI_COMM_WORLD_RANK" in given and any("shoal" in part for part in name):
                    job = int(given.get("PMIX_NAMESPACE", "@0").rpartition("@")[2] or 0)
                    found.append(((job, int(given["OMPI_COMM_WORLD_RANK"])), process))
        most = max((job for (job, _), _ in found), default=0)
        first = min((job for (job, _), _ in found), default=0)
        assert most - first < 10_000
        return {1000 * (job - 1) + rank: process for (job, rank), process in found}

    def describe(self, path: Path) -> None:
        """Where its processes are, as far as can be found out."""
        texts = []
        for process in self.alive():
            texts.append(_describe(process))
            if tool := shutil.which("py-spy"):
                command = [tool, "dump", "--nonblocking", "-p", str(process.pid)]
                texts.append(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
        path.write_text("\n".join(texts))


def end_in_order() -> None:
    """SIGTERM ends this program as an exception would, so that no job outlives it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))


class Log:
    """A run's log while it grows, and is cut and replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = (0, 0)

    def new(self) -> list[dict[str, Any]]:
        """The events that came since the last call; after a cut, all."""
        try:
            with self.path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                start = self._read[1] if inode == self._read[0] else 0
                file.seek(start)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        self._read = (inode, start + len(whole) + bool(whole))
        return [json.loads(line) for line in whole.splitlines()]


def digest(directory: Path) -> str:
    """What `shoal digest` says of the checkpoint."""
    command = [*SHOAL, "digest", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).strip()


def undisturbed(folder: Path, config: Path, ranks: int, name: str) -> float:
    """Train a config without any event; how long the rounds took, in seconds."""
    arguments = ["-n", ranks, config, "--out", folder / name]
    with (folder / f"{name}.txt").open("wb") as output:
        subprocess.run([*SHOAL, "launch", *map(str, arguments)], check=True, stdout=output, stderr=output)
    events = Log(folder / name / "run.jsonl").new()
    return float(events[-1]["time"] - events[0]["time"])


def differences(expected: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether the log is whole: each round, evaluation and stage of an undisturbed one is there once, in order and
    with the same figures; it begins with its header, ends with its end, and goes neither back nor on after it."""
    wrong = []
    for kind, names in COMPARED.items():
        ours, theirs = (
            [[event[name] for name in names] for event in log if event["event"] == kind] for log in (found, expected)
        )
        if ours != theirs:
            same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False))
            wrong.append(f"the log's {kind} events differ after {len(list(same))} ({len(ours)} of {len(theirs)})")
    if [found[0]["event"], found[-1]["event"]] != ["header", "end"]:
        wrong.append(f"the log begins with {found[0]['event']} and ends with {found[-1]['event']}")
    rounds = [event["round"] for event in found if "round" in event]
    if rounds != sorted(rounds):
        wrong.append("the log goes back")
    return wrong


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(*GONE):
        rank = process.environ().get("OMPI_COMM_WORLD_RANK", "-")
        return f"{process.name()} pid {process.pid}, rank {rank}, {process.status()}"
    return f"pid {process.pid}"
