"""Start ranks from a test: in a session of their own, with a deadline, and with nothing left behind.

A test that starts ranks never is one: the test process does not initialise MPI. Processes of a job are known by
a mark in their environment, since an mpiexec may give its ranks sessions and groups of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence

import psutil
import pytest

from shoal.comm.library import loaded
from shoal.jobs.launch import environment, find_mpiexec, folder

END_S = 3.0
"""from SIGTERM to SIGKILL"""
LONGEST_OUTPUT = 6000
MARK = "SHOAL_TEST_JOB"
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


def run(
    n: int,
    command: Sequence[str],
    deadline_s: float = 60.0,
    status: int | None = 0,
    wrap: Callable[[list[str]], list[str]] = list,
) -> str:
    """Run `python -m mpi4py command...` on n ranks; what they wrote. With -m mpi4py an exception ends all.

    Fails the test, with the output, if the exit status is another than `status` (None: any but 0 will do), and
    at the deadline, with the ranks that still lived. `wrap` turns the command into the one that is started.
    """
    library = loaded()
    arguments = [str(find_mpiexec(library)), "-n", str(n), sys.executable, "-m", "mpi4py", *map(str, command)]
    mark = uuid.uuid4().hex
    with tempfile.TemporaryFile() as written, folder() as own:
        process = subprocess.Popen(
            wrap(arguments),
            env={**environment(library, os.environ, own), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ended, complaint = process.wait(deadline_s), ""
        except subprocess.TimeoutExpired:
            alive = ", ".join(map(_describe, _processes(mark))) or "no process"
            ended, complaint = None, f"did not end within {deadline_s:g} s; alive were {alive}"
        finally:
            _end(process, mark)
        written.seek(0)
        output = written.read().decode(errors="replace")
    if ended is not None and (ended == 0 if status is None else ended != status):
        complaint = f"ended with status {ended}"
    if complaint:
        pytest.fail(f"{n} ranks of {' '.join(map(str, command))} {complaint}\n{output[-LONGEST_OUTPUT:]}", False)
    return output


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """SIGTERM, then SIGKILL for the group and for whatever else is left of the job."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    left = list(_processes(mark))
    for one in left:
        with contextlib.suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(left, END_S)


def _processes(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                yield process


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        given = process.environ()
        rank = next((given[name] for name in RANK_VARIABLES if name in given), None)
        name = process.name() if rank is None else f"rank {rank}"
        return f"{name} (pid {process.pid}, {process.status()}, {sum(process.cpu_times()[:2]):.1f} s of CPU)"
    return f"pid {process.pid}"
