"""Who still lives, told of child processes: dead, stopped, stuck, computing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.comm.watch import Watch
from shoal.errors import RankLost

HEARTBEAT_S = 0.4
LIMIT_S = 20.0
COMPUTES = "while True: pass"
SLEEPS = "import time; time.sleep(1000)"

Start = Callable[[str], "subprocess.Popen[bytes]"]

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system has no pidfd")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python process; all have ended afterwards."""
    started: list[subprocess.Popen[bytes]] = []

    def one(code: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", code]))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait()


def watching(*processes: subprocess.Popen[bytes], elsewhere: Callable[[], bool] = lambda: False) -> Watch:
    watch = Watch({10 + n: process.pid for n, process in enumerate(processes)}, elsewhere)
    watch.heartbeat_s = HEARTBEAT_S
    return watch


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def look_for(watch: Watch, seconds: float, pause_s: float = 0.02) -> None:
    """Look again and again, as a rank that waits does."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        watch.look()
        time.sleep(pause_s)


def test_a_dead_process_is_named_at_once(start: Start) -> None:
    first, second = start(SLEEPS), start(COMPUTES)
    watch = watching(first, second)
    watch.look()
    second.kill()
    with pytest.raises(RankLost, match=r"world rank 11 died") as raised:
        look_for(watch, LIMIT_S)
    assert not raised.value.final and watch.dead() == [11]


def test_a_process_that_is_gone_before_is_dead(start: Start) -> None:
    process = start("pass")
    process.wait()
    watch = watching(process, start(SLEEPS))
    assert watch.dead() == []  # it cannot be watched: MPI tells of it
    watch = watching(process, elsewhere=lambda: True)
    with pytest.raises(RankLost):
        watch.look()


def test_a_stopped_process_is_killed(start: Start) -> None:
    stopped, lives = start(SLEEPS), start(SLEEPS)
    watch = watching(stopped, lives)
    look_for(watch, 0.3)
    stopped.send_signal(signal.SIGSTOP)
    with pytest.raises(RankLost, match=r"world rank 10 died"):
        look_for(watch, LIMIT_S)
    assert stopped.wait(LIMIT_S) == -signal.SIGKILL
    assert watch.excluded == {10} and lives.poll() is None


def test_a_process_that_computes_or_sleeps_is_left_alone(start: Start) -> None:
    watch = watching(start(COMPUTES), start(SLEEPS))
    look_for(watch, 4 * HEARTBEAT_S)
    assert not watch.excluded


def test_a_process_that_moves_again_is_left_alone(start: Start) -> None:
    process = start(SLEEPS)
    watch = watching(process)
    watch.heartbeat_s = 1.0
    for _ in range(3):  # each stop is shorter than the limit, all together longer
        process.send_signal(signal.SIGSTOP)
        look_for(watch, 1.0)
        process.send_signal(signal.SIGCONT)
        look_for(watch, 0.3)
    assert not watch.excluded and process.poll() is None


def test_one_gap_between_two_looks_does_not_count_in_full(start: Start) -> None:
    """All ranks of a job may be stopped together; the first that wakes must not kill the others."""
    process = start(SLEEPS)
    watch = watching(process)
    process.send_signal(signal.SIGSTOP)
    watch.look()
    time.sleep(4 * HEARTBEAT_S)
    watch.look()
    assert not watch.excluded and process.poll() is None


def test_a_stopped_process_is_killed_by_one_that_seldom_looks(start: Start) -> None:
    """A rank that trains alone looks once a round, which may take longer than a heartbeat."""
    process = start(SLEEPS)
    watch = watching(process)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(RankLost, match=r"world rank 10 died"):
        look_for(watch, LIMIT_S, pause_s=1.5 * HEARTBEAT_S)
    assert watch.excluded == {10}


def test_fencing_kills_and_forgets(start: Start) -> None:
    stopped, other = start(SLEEPS), start(SLEEPS)
    watch = watching(stopped, other)
    stopped.send_signal(signal.SIGSTOP)
    assert watch.fence([10, 99], LIMIT_S) == []
    assert stopped.wait(LIMIT_S) == -signal.SIGKILL
    watch.look()  # who was fenced is not told again
    assert other.poll() is None


def test_what_others_know_is_told(start: Start) -> None:
    with pytest.raises(RankLost, match="another rank says"):
        watching(start(SLEEPS), elsewhere=lambda: True).look()


def test_ranks_come_and_go_and_leave_no_descriptor(start: Start) -> None:
    before = descriptors()
    process = start(SLEEPS)
    watch = watching()
    for n in range(20):
        watch.add(n, process.pid)
    watch.forget(3)
    watch.forget(3)
    assert descriptors() == before + 19
    process.kill()
    process.wait()
    assert watch.dead() == [n for n in range(20) if n != 3]
    watch.close()
    assert descriptors() == before
