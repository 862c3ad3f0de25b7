"""The run's log: one JSON object a line, appended by one writer, readable while it grows.

Every event goes to the kernel as one whole line in one write on an O_APPEND descriptor, so what a kill
can leave is at most one torn line at the end. A checkpoint stores `size()`, and a resume cuts the log
back to it (`truncate_to`): the history is then whole and has no round twice.

JSON has no NaN or infinity; they are written as the strings "nan", "inf" and "-inf", which `float()`
reads back. Other floats are written by repr, so they come back with the same bits.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal.errors import InputError
from shoal.record.durable import Hook, beside, publish

Event = dict[str, Any]


class RunLog:
    """Appends events to `path`; `clock` gives each its time (unix seconds). A torn last line is cut off."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self.path = Path(path)
        self._clock = clock
        if self.path.exists() and (whole := _whole_bytes(self.path)) < self.path.stat().st_size:
            truncate_to(self.path, whole)
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def event(self, kind: str, **fields: Any) -> Event:
        """Append one event and return it, as written: {"event": kind, "time": ..., **fields}."""
        event = {"event": kind, "time": float(self._clock()), **fields}
        line = memoryview(encode(event))
        while line:
            line = line[os.write(self._descriptor, line) :]
        return event

    def size(self) -> int:
        """The log's size in bytes, all events included; always the end of a line."""
        return os.fstat(self._descriptor).st_size

    def sync(self) -> None:
        """Wait until the log is on the disk: before a checkpoint that stores `size()` is published."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Release the descriptor; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def encode(event: Mapping[str, Any]) -> bytes:
    """One line of the log: valid JSON in ASCII with its newline."""
    try:
        text = json.dumps(event, default=_plain, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(event), allow_nan=False, separators=(",", ":"))
    return text.encode() + b"\n"


def read(path: Path) -> list[Event]:
    """All events of a log; a torn last line is left out.

    InputError if the file is missing or any other line is no JSON object.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(
            f"there is no readable run log at {path} ({error.strerror}); give the directory of a run"
        ) from error
    if not lines[-1]:
        lines.pop()
    events = []
    for number, line in enumerate(lines, 1):
        try:
            event = msgspec.json.decode(line)
            if not isinstance(event, dict) or "event" not in event:
                raise ValueError("not an event")
        except (ValueError, msgspec.DecodeError) as error:
            if number == len(lines):
                break
            raise InputError(
                f"line {number} of the run log {path} is not an event in JSON; the file is damaged, "
                "so take the run from a copy or start it again"
            ) from error
        events.append(event)
    return events


def truncate_to(path: Path, n_bytes: int, before_rename: Hook | None = None) -> None:
    """Cut the log back to its first `n_bytes`, atomically; what follows, torn or whole, is dropped.

    InputError if the log is shorter, or if `n_bytes` is not the end of a line: the log is then not the
    one that the number was taken from.
    """
    path = Path(path)
    size = path.stat().st_size if path.exists() else 0
    if size < n_bytes:
        raise InputError(
            f"the run log {path} has {size} bytes but the checkpoint was taken at {n_bytes}; the log was "
            "cut or belongs to another run, so restore it or start the run again"
        )
    written = beside(path)
    try:
        with path.open("rb") as source, written.open("wb") as target:
            last = _copy_bytes(source, target, n_bytes)
        if last not in (b"", b"\n"):
            raise InputError(
                f"byte {n_bytes} of the run log {path} is inside a line but the checkpoint was taken at "
                "the end of one; the log belongs to another run, so restore it or start the run again"
            )
    except BaseException:
        written.unlink(missing_ok=True)
        raise
    publish(written, path, before_rename)


def _copy_bytes(source: Any, target: Any, n_bytes: int) -> bytes:
    """Copy the first `n_bytes`; returns the last byte copied (empty if none)."""
    last = b""
    while n_bytes:
        piece = source.read(min(n_bytes, 1 << 20))
        target.write(piece)
        n_bytes -= len(piece)
        last = piece[-1:]
    return last


def _whole_bytes(path: Path) -> int:
    """The length of the log without a torn last line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - (1 << 16))
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a run-log event cannot hold a {type(value).__name__}: {value!r}")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if value is None or isinstance(value, (str, int)):
        return value
    return _finite(_plain(value))
