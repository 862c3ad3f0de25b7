"""Whether ranks can be spawned here: tried in a job that may hang, before the real one relies on it.

No version or name of an MPI tells it; the launcher, the scheduler and the slots decide, and where it does not work the
call aborts or hangs more often than it returns an error. So a job of two ranks is started by the same launcher line,
brings in a third, exchanges something with it and releases it, and has ten seconds for all that.

`python -m shoal.jobs.probe` is a rank of that job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from shoal.comm import lifeline

if TYPE_CHECKING:
    from shoal.comm.spawn import Spawner

DEADLINE_S = 10.0
END_S = 2.0
"""from SIGTERM, on which a launcher cleans up, to SIGKILL"""
POLL_S = 1e-3
RANKS = 2
_SPAWNED = "shoal: spawned a rank in "
_REFUSED = "shoal: spawned no rank: "


@dataclass(frozen=True)
class Verdict:
    """Whether the launcher can spawn ranks; if so, how long one took to come, in seconds; if not, why not."""

    ok: bool
    reason: str
    lead_s: float = 0.0


def can_spawn(launcher: Sequence[str], environment: Mapping[str, str], deadline_s: float = DEADLINE_S) -> Verdict:
    """Try it. launcher: the job's own line up to the number of ranks (`-n 2` and the command are added).

    The answer is there after at most `deadline_s` and a few seconds, and nothing of the trial is left then."""
    command = [*launcher, "-n", str(RANKS), sys.executable, "-m", "shoal.jobs.probe"]
    with tempfile.TemporaryFile() as written:
        try:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lifeline.death_with_parent(),
            )
        except OSError as error:
            return Verdict(False, f"{launcher[0]} cannot be started: {error.strerror}")
        status = _end(process, deadline_s)
        written.seek(0)
        return _judge(status, written.read().decode(errors="replace"), deadline_s)


def _end(process: subprocess.Popen[bytes], deadline_s: float) -> int | None:
    """The exit status; None if it had to be ended. What shares its session is gone afterwards."""
    status = None
    try:
        status = process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return status


def _judge(status: int | None, output: str, deadline_s: float) -> Verdict:
    lines = [line.strip() for line in output.splitlines() if any(map(str.isalnum, line))]
    said = f" (it said: {lines[0][:200]})" if lines else ""
    found = next((line for line in lines if line.startswith((_SPAWNED, _REFUSED))), "")
    if status is None:
        return Verdict(False, f"the launcher had not spawned a rank and ended after {deadline_s:g} s{said}")
    if found.startswith(_REFUSED):
        return Verdict(False, found.removeprefix(_REFUSED) + said)
    if status != 0 or not found:
        how = f"ended with status {status}" if status >= 0 else f"died of {signal.Signals(-status).name}"
        return Verdict(False, f"the launcher {how} when a rank was to be spawned{said}")
    return Verdict(True, "", float(found.removeprefix(_SPAWNED).split()[0]))


def _be_a_rank() -> NoReturn:
    """One of the two, or the spawned one. Whatever MPI does, the kernel ends this process soon after the deadline."""
    signal.alarm(int(DEADLINE_S + END_S))
    lifeline.die_with_parent()
    from mpi4py import MPI

    from shoal.comm.spawn import Spawner, is_spawned

    if is_spawned():
        spawner = Spawner.join()
        spawner.top.allreduce(1)
        spawner.release()
    else:
        spawner = Spawner.found(MPI.COMM_WORLD)
        text = _grow(spawner)
        if spawner.top.Get_rank() == 0:
            print(text, flush=True)
    MPI.Finalize()
    sys.exit()


def _grow(spawner: Spawner) -> str:
    """Bring a rank in and release it; the line that says how that went."""
    if spawner.top.Get_size() != RANKS:
        return f"{_REFUSED}the ranks do not see each other ({spawner.top.Get_size()} instead of {RANKS})"
    spawner.begin([sys.executable, "-m", "shoal.jobs.probe"])
    while spawner.state() == "busy":
        time.sleep(POLL_S)
    if spawner.state() == "failed":
        return _REFUSED + spawner.error
    top, lead = spawner.take()
    top.allreduce(1)
    spawner.release()
    return f"{_SPAWNED}{lead.total_s:.3f} s"


if __name__ == "__main__":
    _be_a_rank()
