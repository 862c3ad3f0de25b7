"""The lease: one holder, freed by death, generations without locks, and checks that find out."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import InputError, LeaseError
from shoal.record.lease import Lease


def test_one_holder_at_a_time_and_generations_grow(tmp_path):
    first, second = Lease(tmp_path), Lease(tmp_path)
    first.acquire(0)
    assert first.locked and first.generation == 1
    assert first.try_acquire() and first.generation == 1
    assert not second.try_acquire()
    with pytest.raises(LeaseError, match=f"process {os.getpid()} on {socket.gethostname()}"):
        second.acquire(0.05)
    first.check()
    first.release()
    first.release()
    assert second.try_acquire() and second.generation == 2
    second.check()
    with pytest.raises(LeaseError, match="not held"):
        first.check()
    second.release()


def test_acquire_waits_for_the_holder(tmp_path):
    first, second = Lease(tmp_path), Lease(tmp_path)
    first.acquire(0)
    timer = threading.Timer(0.1, first.release)
    timer.start()
    second.acquire(10)
    assert second.generation == 2
    timer.join()
    second.release()


def _hold_for_ever(directory: Path, ready: Any) -> None:
    lease = Lease(directory)
    lease.acquire(0)
    ready.set()
    while lease:
        signal.pause()


def test_death_frees_it(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=_hold_for_ever, args=(tmp_path, ready))
    child.start()
    assert child.pid is not None and ready.wait(10)
    lease = Lease(tmp_path)
    try:
        with pytest.raises(LeaseError, match=f"process {child.pid} "):
            lease.acquire(0.05)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    lease.acquire(5)
    assert lease.generation == 2
    lease.release()


def test_a_removed_or_overwritten_file_fails_the_check(tmp_path):
    lease = Lease(tmp_path)
    lease.acquire(0)
    content = (tmp_path / "lease").read_bytes()
    (tmp_path / "lease").unlink()
    with pytest.raises(LeaseError, match="missing"):
        lease.check()
    other = Lease(tmp_path)
    other.acquire(0)
    with pytest.raises(LeaseError, match="taken over"):
        lease.check()
    (tmp_path / "lease").write_bytes(content)
    lease.check()
    with pytest.raises(LeaseError, match="generation 1"):
        other.check()
    lease.release()
    other.release()


def test_a_damaged_record_does_not_stop_the_next_holder(tmp_path):
    (tmp_path / "lease").write_bytes(b"\x00" * 10)
    lease = Lease(tmp_path)
    lease.acquire(0)
    lease.check()
    assert (tmp_path / "lease").stat().st_size == 256
    lease.release()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_without_locks_the_generation_decides(tmp_path, monkeypatch, code):
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    first, second = Lease(tmp_path), Lease(tmp_path)
    first.acquire(0)
    assert not first.locked and first.generation == 1
    first.check()
    second.acquire(0)
    assert second.generation == 2
    second.check()
    with pytest.raises(LeaseError, match="taken over by process"):
        first.check()


def test_another_error_of_the_lock_is_raised(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="I/O error"):
        Lease(tmp_path).try_acquire()


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        Lease(tmp_path / "none").acquire(0)
