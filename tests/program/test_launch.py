"""Ranks started by launch() or by a bare mpiexec: how they end, and that none is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.comm.library import INTEL_MPI, MPICH, OPEN_MPI, Library, loaded
from shoal.errors import InputError
from shoal.jobs import launch

DEADLINE_S = 30.0
GONE_S = 5.0

ULFM = pytest.mark.skipif(loaded().name != OPEN_MPI, reason="ULFM is Open MPI's")
WITH_AND_WITHOUT_ULFM = pytest.mark.parametrize(
    "ulfm", [pytest.param(False, id="plain"), pytest.param(True, id="ulfm", marks=ULFM)]
)
STARTERS = pytest.mark.parametrize("bare", [False, True], ids=["launch", "mpiexec"])

RANK = """
import os, sys, threading, time
from pathlib import Path
import numpy as np
from shoal.comm import lifeline

here, stop_file = Path(sys.argv[1]), Path(sys.argv[1]) / "stop"
line = lifeline.start(stop_file if len(sys.argv) > 2 else None)
from mpi4py import MPI
world = MPI.COMM_WORLD
rank = world.rank

def in_python():
    while True:
        pass

def in_c():
    a = np.ones((5000, 5000))
    while True:
        np.dot(a, a)

def in_mpi():
    world.recv(source=MPI.ANY_SOURCE, tag=77)

def asleep():
    time.sleep(1000)

def reduce_until(stop):
    while not world.allreduce(stop(), MPI.MAX):
        time.sleep(0.01)
    line.leave(99, rank == 0)

world.Barrier()
(here / f"tmp-{rank}").write_text(str(os.getpid()))
(here / f"tmp-{rank}").rename(here / f"pid-{rank}")
"""

LAUNCH = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
from pathlib import Path
from shoal.jobs.launch import launch
n, ulfm, stop_file, *command = sys.argv[1:]
sys.exit(launch(int(n), command, stop_file=Path(stop_file) if stop_file else None, ulfm=ulfm == "ulfm"))
"""

WRAPPER = ("sh", "-c", '"$@"; exit $?', "sh")
"""A script between mpiexec and the rank, as sites have them; it stays the rank's parent."""


class Run:
    """One job in a folder of its own; what it wrote is read from files, so that no pipe holds it up."""

    def __init__(
        self,
        here: Path,
        body: str,
        n: int,
        *,
        ulfm: bool = False,
        bare: bool = False,
        stop_file: bool = False,
        wrapped: bool = False,
    ) -> None:
        self.here, self.n = here, n
        script = here / "rank.py"
        script.write_text(RANK + body)
        command = [
            *(WRAPPER if wrapped else ()),
            sys.executable,
            str(script),
            str(here),
            *(["stop"] if stop_file else []),
        ]
        environ = dict(os.environ)
        if bare:
            library = loaded()
            options = ["--with-ft", "ulfm"] if ulfm else []
            start = [str(launch.find_mpiexec(library)), *options, "-n", str(n)]
            environ = launch.environment(library, environ, here)
        else:
            path = str(here / "stop") if stop_file else ""
            start = [sys.executable, "-c", LAUNCH, str(n), "ulfm" if ulfm else "", path]
        with (here / "output").open("w") as output:
            self.process = subprocess.Popen(
                [*start, *command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ranks(self) -> list[int]:
        """The process ids of the ranks, once all have started."""
        files = [self.here / f"pid-{rank}" for rank in range(self.n)]
        wait_for(lambda: all(map(Path.exists, files)) or self.process.poll() is not None, DEADLINE_S)
        assert all(map(Path.exists, files)), self.output()
        return [int(file.read_text()) for file in files]

    def wait(self, limit_s: float = DEADLINE_S) -> int:
        return self.process.wait(limit_s)

    def output(self) -> str:
        return (self.here / "output").read_text()

    def close(self) -> None:
        pids = [int(file.read_text()) for file in self.here.glob("pid-*")]
        started = [psutil.Process(self.process.pid)] if self.process.poll() is None else []
        for parent in started:
            pids += [child.pid for child in parent.children(recursive=True)]
        for pid in filter(alive, [self.process.pid, *pids]):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(body: str, n: int = 3, **options: Any) -> Run:
        runs.append(Run(tmp_path, body, n, **options))
        return runs[-1]

    yield start
    for one in runs:
        one.close()


def wait_for(condition: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(pids: list[int]) -> None:
    wait_for(lambda: not any(map(alive, pids)), GONE_S)
    assert not any(map(alive, pids))


@pytest.mark.parametrize("status", [0, 2, 75, 99])
def test_all_leave_with_one_status_and_no_noise(run: Callable[..., Run], status: int) -> None:
    job = run(f"line.leave({status}, rank == 0)", bare=True)
    assert job.wait() == status
    assert job.output() == ""
    assert_gone(job.ranks())


@ULFM
@STARTERS
def test_all_leave_under_ulfm(run: Callable[..., Run], bare: bool) -> None:
    job = run("line.leave(99, rank == 0)", 4, ulfm=True, bare=bare)
    assert job.wait() == 99
    assert job.output() == ""
    assert_gone(job.ranks())


@STARTERS
@WITH_AND_WITHOUT_ULFM
def test_an_exception_ends_ranks_whatever_they_do(run: Callable[..., Run], ulfm: bool, bare: bool) -> None:
    body = """
if rank == 1:
    raise ValueError("the reason")
(in_python, None, in_c, in_mpi, asleep)[rank]()
"""
    job = run(body, 5, ulfm=ulfm, bare=bare)
    ranks = job.ranks()
    assert job.wait(10) == 1
    assert len(re.findall("ValueError: the reason", job.output())) == 1
    assert len(re.findall("Traceback", job.output())) == 1
    assert len(re.findall(r"(?m)^shoal: rank 1 of 5 on \S+ failed:$", job.output())) == 1
    assert_gone(ranks)


@WITH_AND_WITHOUT_ULFM
def test_an_exception_in_a_thread_ends_the_job(run: Callable[..., Run], ulfm: bool) -> None:
    body = """
def load():
    raise ValueError("in a thread")
if rank == 2:
    threading.Timer(0.3, load).start()
(in_python, in_mpi, in_c, asleep)[rank]()
"""
    job = run(body, 4, ulfm=ulfm, wrapped=ulfm)
    ranks = job.ranks()
    assert job.wait(10) == 1
    assert len(re.findall("ValueError: in a thread", job.output())) == 1
    assert_gone(ranks)


@pytest.mark.parametrize("victim", ["launcher", "mpiexec", "mpiexec before a wrapper"])
def test_no_rank_outlives_a_killed_parent(run: Callable[..., Run], victim: str) -> None:
    job = run("(in_python, in_c, in_mpi)[rank]()", wrapped="wrapper" in victim)
    ranks = job.ranks()
    launcher = psutil.Process(job.process.pid)
    killed = launcher if victim == "launcher" else launcher.children()[0]
    killed.kill()
    assert job.wait(GONE_S) != 0
    assert_gone(ranks)


def test_a_killed_mpiexec_leaves_no_file(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A later one that has its process id by chance would not start."""
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "own"))
    job = run("in_python()", 2)
    job.ranks()
    assert [*(tmp_path / "own").iterdir()]
    psutil.Process(job.process.pid).children()[0].kill()
    job.wait(GONE_S)
    assert not [*(tmp_path / "own").iterdir()]


@pytest.mark.skipif(loaded().name != OPEN_MPI, reason="a segment that nobody takes away is Open MPI's")
def test_a_process_without_a_launcher_leaves_no_segment() -> None:
    text = """
from pathlib import Path
from mpi4py import MPI
from shoal.backend import numpy_backend
from shoal.comm.world import World
World(MPI.COMM_WORLD, numpy_backend())
for line in Path("/proc/self/maps").read_text().splitlines():
    if "/sm_segment." in line:
        print(line.split(maxsplit=5)[-1])
"""
    alone = {key: value for key, value in os.environ.items() if not key.startswith(("PMIX_", "OMPI_"))}
    done = subprocess.run(
        [sys.executable, "-c", text], env=alone, check=True, timeout=DEADLINE_S, stdout=subprocess.PIPE
    )
    segments = done.stdout.decode().splitlines()
    assert segments and all(name.endswith("(deleted)") for name in segments)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_to_the_launcher_creates_the_stop_file(run: Callable[..., Run], number: int) -> None:
    job = run("reduce_until(stop_file.exists)", 2, stop_file=True)
    ranks = job.ranks()
    for _ in range(2):  # as timeout(1) does: to its child, and to its group
        job.process.send_signal(number)
        time.sleep(0.01)
    assert job.wait() == 99
    assert job.output().count("stopping at the next reduction") == 1
    assert_gone(ranks)


def test_without_a_stop_file_the_signal_goes_to_the_ranks(run: Callable[..., Run]) -> None:
    job = run("reduce_until(line.stop_requested)", 2)
    job.ranks()
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 99


def test_a_signal_to_one_rank_is_known_to_all_by_the_stop_file(run: Callable[..., Run]) -> None:
    job = run("reduce_until(stop_file.exists if rank == 0 else int)", 2, stop_file=True, bare=True)
    os.kill(job.ranks()[1], signal.SIGUSR2)
    assert job.wait() == 99


def test_a_second_signal_ends_the_job(run: Callable[..., Run]) -> None:
    job = run("in_python()", 2, stop_file=True)
    ranks = job.ranks()
    job.process.send_signal(signal.SIGINT)
    wait_for(lambda: "second signal" in job.output(), 5)
    time.sleep(launch.ONE_SIGNAL_S)
    job.process.send_signal(signal.SIGINT)
    assert job.wait(launch.END_S + 5) not in (0, 2, 75, 99)
    assert_gone(ranks)


def test_no_mpiexec_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "mpiexec"
    other.write_text("#!/bin/sh\necho 'mpiexec (Some MPI) 1.0'\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(InputError, match=f"No mpiexec of {OPEN_MPI} 5.0.8.*{re.escape(str(other))}"):
        launch.find_mpiexec(Library(OPEN_MPI, "5.0.8", None, ulfm=False))


def test_an_mpiexec_of_another_version_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, version in (("mpiexec", "4.1.4"), ("mpirun", "5.0.8")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho 'mpirun (Open MPI) {version}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = launch.find_mpiexec(Library(OPEN_MPI, "5.0.8", None, ulfm=False))
    assert found == tmp_path / "mpirun"


def test_no_ranks_are_refused() -> None:
    with pytest.raises(InputError, match="0 ranks"):
        launch.launch(0, ["true"], stop_file=None)


def test_ulfm_needs_open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "loaded", lambda: Library(MPICH, "5.0.2", None, ulfm=False))
    monkeypatch.setattr(launch, "find_mpiexec", lambda library: Path("true"))
    with pytest.raises(InputError, match=r"MPICH 5\.0\.2"):
        launch.launch(1, ["true"], stop_file=None, ulfm=True)


def test_what_the_user_has_set_stays() -> None:
    wheel = Library(OPEN_MPI, "5.0.8", Path(sys.prefix).resolve() / "lib" / "libmpi.so.40", ulfm=False)
    environ = launch.environment(wheel, {"OMPI_MCA_pml": "ucx", "OMP_NUM_THREADS": "4", "OTHER": "x"}, Path("own"))
    assert environ["OMPI_MCA_pml"] == "ucx"
    assert environ["OMPI_MCA_btl"] == "self,sm,tcp"
    assert environ["OPENBLAS_NUM_THREADS"] == "4"
    assert environ["OTHER"] == "x"


def test_a_site_s_open_mpi_keeps_its_network() -> None:
    site = Library(OPEN_MPI, "4.1.4", Path("/opt/site/lib/libmpi.so.40"), ulfm=False)
    environ = launch.environment(site, {}, Path("own"))
    assert not any(name.startswith("OMPI_MCA_btl") for name in environ)
    assert environ["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert environ["OMP_NUM_THREADS"] == "1"
    assert launch.environment(Library(INTEL_MPI, "2021.18", None, ulfm=False), {}, Path("own"))["I_MPI_SPAWN"] == "on"
