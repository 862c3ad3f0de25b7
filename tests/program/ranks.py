"""Start ranks from a test: in a session of their own, with a deadline, and with nothing left behind.

A test that starts ranks never is one: the test process does not initialise MPI.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

import psutil
import pytest

from shoal.comm.library import loaded
from shoal.jobs.launch import environment, find_mpiexec

END_S = 3.0
"""from SIGTERM to SIGKILL"""
LONGEST_OUTPUT = 6000
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


def run(n: int, command: Sequence[str], deadline_s: float = 60.0, status: int | None = 0) -> str:
    """Run `python -m mpi4py command...` on n ranks; what they wrote. With -m mpi4py an exception ends all.

    Fails the test, with the output, if the exit status is another than `status` (None: any but 0 will do), and
    at the deadline, with the ranks that still lived.
    """
    library = loaded()
    arguments = [str(find_mpiexec(library)), "-n", str(n), sys.executable, "-m", "mpi4py", *map(str, command)]
    with tempfile.TemporaryFile() as written:
        process = subprocess.Popen(
            arguments,
            env=environment(library, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ended, complaint = process.wait(deadline_s), ""
        except subprocess.TimeoutExpired:
            alive = ", ".join(_describe(rank) for rank in _in_session(process.pid)) or "no process"
            ended, complaint = None, f"did not end within {deadline_s:g} s; alive were {alive}"
        finally:
            _end(process)
        written.seek(0)
        output = written.read().decode(errors="replace")
    if ended is not None and (ended == 0 if status is None else ended != status):
        complaint = f"ended with status {ended}"
    if complaint:
        pytest.fail(f"{n} ranks of {' '.join(map(str, command))} {complaint}\n{output[-LONGEST_OUTPUT:]}", False)
    return output


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL for the group, and for what else of its session has a group of its own."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    left = list(_in_session(process.pid))
    for rank in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
    psutil.wait_procs(left, END_S)


def _in_session(session: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        given = process.environ()
        rank = next((given[name] for name in RANK_VARIABLES if name in given), None)
        name = process.name() if rank is None else f"rank {rank}"
        return f"{name} (pid {process.pid}, {process.status()}, {sum(process.cpu_times()[:2]):.1f} s of CPU)"
    return f"pid {process.pid}"
