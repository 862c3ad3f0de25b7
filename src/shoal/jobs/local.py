"""No scheduler: the script runs on this machine, in the background, and its process id is the job's."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from shoal.jobs.command import State
from shoal.jobs.spec import Batch

PREFIX = "#LOCAL"
SUBMITS = "bash"
SAME: dict[str, str] = {}


def directives(batch: Batch) -> list[str]:
    """None: there is nobody to read them."""
    return []


def functions(batch: Batch) -> list[str]:
    """The script goes on by starting anew."""
    act = {"none": "false", "requeue": 'exec bash "$0"', "chain": 'exec bash "$run/job.sh"'}[batch.spec.after_limit]
    end = f"echo $(($(date +%s) + {batch.spec.time_s}))" if batch.spec.time_s else ":"
    return [f"go_on() {{ {act}; }}", "preempted() { false; }", f"end_time() {{ {end}; }}"]


def submit(batch: Batch, script: Path) -> str:
    """Start it; the id outlives the shell that it was started from."""
    with script.with_name("job.log").open("ab") as output:
        process = subprocess.Popen(
            ["bash", str(script)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return f"{process.pid}"


def state(job: str) -> State:
    """Whether the script runs."""
    alive = _is_ours(int(job))
    return State(alive, "running" if alive else "ended")


def cancel(job: str) -> None:
    """The script stops its ranks in order."""
    if _is_ours(int(job)):
        os.kill(int(job), signal.SIGTERM)


def _is_ours(process: int) -> bool:
    """Whether the process lives and is a job's script: numbers are used again."""
    with suppress(OSError):
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        return len(words) > 1 and words[1].endswith(b"job.sh")
    return False
