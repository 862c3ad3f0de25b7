"""A run whose job ends before it is done is started again, from its last checkpoint.

What mpiexec says of a job's end is not enough to tell. Found by trial: a rank that a signal kills makes Open MPI return
128 + k and MPICH k; Open MPI without ULFM returns 14 when ranks of two MPI_Comm_spawns lose each other; and a spawned
rank that dies leaves its status behind even where the others finish the run. So the run directory has the last word.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from shoal.errors import BAD_INPUT, DONE, ERROR, STOPPED, TRY_AGAIN

KILLS = ("SIGILL", "SIGABRT", "SIGBUS", "SIGFPE", "SIGKILL", "SIGSEGV", "SIGTERM")
LOST_PEER = 14
"""also SIGALRM, which ends a spawned rank that nobody waits for any more"""
_KILLED = {LOST_PEER, *(int(signal.Signals[name]) for name in KILLS)}


def outcome(status: int, directory: Path) -> int:
    """A run's exit status, from the status of its job and what it left in the run directory."""
    if status in (ERROR, BAD_INPUT, STOPPED):
        return status
    if (directory / "DONE").exists():  # with 75: a rank was lost when all was done
        return DONE
    killed = status in _KILLED or status - 128 in signal.valid_signals()
    return TRY_AGAIN if status == DONE or killed else status


def with_restarts(
    attempt: Callable[[bool], int], restarts: int, wanted: Callable[[], bool], say: Callable[[str], object]
) -> int:
    """The status of the last `attempt(again)`, of which there are up to 1 + `restarts` while they end with 75.

    wanted: whether the run shall go on (nobody has asked it to stop)."""
    status = attempt(False)
    for number in range(1, restarts + 1):
        if status != TRY_AGAIN or not wanted():
            break
        say(f"the job ended before the run was done; restart {number} of {restarts}, from the last checkpoint")
        status = attempt(True)
    return status
