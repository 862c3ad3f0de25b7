"""The lease of a run directory: one writer at a time, and the former one finds out.

DIR/lease is locked (flock) by its holder; the kernel frees it when the holder dies, however it dies. It
holds one record: a generation that grows by one with each holder, and the holder's host and pid. A
holder that was cut off and replaced sees at its next `check` that the record is no longer its own; so
writers check before each rename. Where the file system has no locks the generation alone decides: the
last to acquire holds the lease, and all before it fail their checks.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from shoal.errors import InputError, LeaseError

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
RECORD_BYTES = 256
"""The record has a fixed size, so that one write replaces it whole."""
POLL_S = 0.02


class Lease:
    """The lease of `directory`; `locked` tells whether a lock backs it, `generation` its number."""

    def __init__(self, directory: Path) -> None:
        self.path = Path(directory) / "lease"
        self.locked = False
        self.generation = 0
        self._record: dict[str, Any] | None = None
        self._descriptor = -1

    def acquire(self, wait_s: float) -> None:
        """Take the lease, waiting up to `wait_s` for its holder; then LeaseError names the holder."""
        deadline = time.monotonic() + wait_s
        while not self.try_acquire():
            if time.monotonic() >= deadline:
                raise LeaseError(
                    f"the run directory {self.path.parent} is in use by {_holder(_read(self.path))}, waited "
                    f"{wait_s:g} s; wait until that process ends, or give another directory"
                )
            time.sleep(POLL_S)

    def try_acquire(self) -> bool:
        """Take the lease if nobody else holds it; True if it is ours (or was already)."""
        if self._record is not None:
            return True
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(
                f"the run directory {self.path.parent} cannot be written ({error.strerror}); "
                "give a directory that exists and is yours"
            ) from error
        try:
            locked = _lock(descriptor)
            if locked is None or not self._is_current(descriptor):
                os.close(descriptor)
                return False
            self._take(descriptor, locked)
        except BaseException:
            os.close(descriptor)
            raise
        return True

    def check(self) -> None:
        """LeaseError unless the lease is still ours; called before each rename in the directory."""
        current = _read(self.path)
        if self._record is None:
            raise LeaseError(f"the lease of the run directory {self.path.parent} is not held by this process")
        if current != self._record:
            raise LeaseError(
                f"the run directory {self.path.parent} was taken over by {_holder(current)} "
                f"(this process held generation {self.generation}); nothing more is written by this one"
            )

    def release(self) -> None:
        """Give the lease up; the record stays, for the next generation's number. Twice does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._record = None
        self.locked = False

    def _is_current(self, descriptor: int) -> bool:
        """Whether the file that was locked is still the one at the path (it may have been removed)."""
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        except OSError:
            return False

    def _take(self, descriptor: int, locked: bool) -> None:
        record: dict[str, Any] = {
            "generation": int((_read(self.path) or {}).get("generation", 0)) + 1,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "token": os.urandom(8).hex(),
        }
        os.pwrite(descriptor, json.dumps(record).encode().ljust(RECORD_BYTES - 1) + b"\n", 0)
        os.fsync(descriptor)
        self._descriptor, self._record = descriptor, record
        self.generation, self.locked = record["generation"], locked


def is_held(directory: Path) -> bool:
    """Whether another process holds the lease of `directory`. Writes nothing."""
    try:
        descriptor = os.open(Path(directory) / "lease", os.O_RDWR)
    except OSError:
        return False
    try:
        return _lock(descriptor) is None
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """True: locked by us; None: locked by another; False: the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno in NO_LOCKS:
            return False
        raise
    return True


def _read(path: Path) -> dict[str, Any] | None:
    """The record at `path`, opened anew each time (so a network file system shows what others wrote)."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _holder(record: dict[str, Any] | None) -> str:
    if record is None:
        return "another process (its lease file is missing or not readable)"
    return f"process {record.get('pid')} on {record.get('host')} (generation {record.get('generation')})"
