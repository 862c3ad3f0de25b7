"""The recorder: the one writer of a run directory, and the ear of every progress line and callback.

    config.toml   the resolved config            run.jsonl   one event a line
    checkpoint.h5 the newest state               DONE        written last, when the run is complete
    lease         who writes here                stop        put there by anyone to stop the run
    nodes         how many nodes the run goes on with, for the batch script

Only the master has a recorder with a directory. Every other rank has one that records nothing.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shoal import config as configs
from shoal.config import Config
from shoal.errors import InputError
from shoal.record import durable, runlog
from shoal.record.checkpoint import NEWEST, CheckpointWriter, keep_until, load, newest_loadable
from shoal.record.lease import Lease

OnEvent = Callable[[dict[str, Any]], None]
Resumed = tuple[dict[str, np.ndarray], dict[str, Any]]
"""arrays and meta of the checkpoint that a run goes on from"""

_LOOK_EVERY_S = 0.2
_LEASE_WAIT_S = 15.0


class StopFile:
    """The file `stop` that anyone may put into a run's or a sweep's directory; looked for a few times a second."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "stop"
        self._looked_s = -math.inf
        self._seen = False

    def seen(self) -> bool:
        """Whether it is there, or was when it was last looked for."""
        if time.monotonic() - self._looked_s > _LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            self._seen = self._path.exists()
        return self._seen

    def remove(self) -> None:
        """It was honoured."""
        self._path.unlink(missing_ok=True)


class WishFile:
    """The file `resize` that `shoal resize` puts into a run's directory; taken away when it was read."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "resize"
        self._looked_s = -math.inf

    def put(self, wish: Mapping[str, int]) -> None:
        """Ask for it, in place of what was asked before and not read yet."""
        written = durable.beside(self._path)
        written.write_bytes(msgspec.json.encode(wish))
        written.replace(self._path)

    def take(self) -> dict[str, int] | None:
        """What was asked for since the last look; looked for a few times a second."""
        if time.monotonic() - self._looked_s <= _LOOK_EVERY_S:
            return None
        self._looked_s = time.monotonic()
        try:
            wish = msgspec.json.decode(self._path.read_bytes(), type=dict[str, int])
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError):
            wish = {}
        self._path.unlink(missing_ok=True)
        return wish


class Recorder:
    """Records events to listeners and, with a directory, to its log; saves checkpoints there.

    It records nothing until it is opened, on the master, or takes over from a master that was lost. listen() makes
    the listeners, then."""

    def __init__(self, directory: Path | None, config: Config, listen: Callable[[], Sequence[OnEvent]] = tuple) -> None:
        self.directory = directory
        self.resumed: Resumed | None = None
        self._events: list[dict[str, Any]] = []
        self.complete = False
        """the directory holds a run that is DONE: nothing is recorded again"""
        self.checkpoint_s = 0.0
        """the longest time that a checkpoint has taken to write"""
        self._config = config
        self._listen = listen
        self._listeners: Sequence[OnEvent] | None = None
        self._log: runlog.RunLog | None = None
        self._stop_file = StopFile(directory) if directory is not None else None
        self._wish_file = WishFile(directory) if directory is not None else None
        self.saved_round = -1
        """the newest checkpoint that is whole, or being written here: a master that was lost took others along"""
        self.replay: list[dict[str, Any]] = []
        """the events of a log that a resume cut off"""

    def open(self, resume: bool = False, patient: bool = True) -> None:
        """Take the directory's lease, and go on from what is there.

        Raises InputError if the directory holds another run, or one that `resume` does not ask to go on with;
        LeaseError if another process writes there (when `patient`, a resume waits a while for one that is just
        ending)."""
        self._listeners = self._listen()
        if self.directory is not None:
            self._open(self.directory, resume, _LEASE_WAIT_S if resume and patient else 0.0)

    def take_over(self, round: int) -> list[dict[str, Any]]:
        """Go on with the log from this round, in place of a master that was lost or for a master that goes back;
        the events up to there."""
        if self._listeners is None:
            if self.directory is not None and not self.complete:
                self._lease = Lease(self.directory)
                self._lease.acquire(_LEASE_WAIT_S)
                self._open_writer(self.directory)
                self.saved_round = keep_until(self.directory, round)
                self._log = runlog.RunLog(self.directory / "run.jsonl", time.time)
            self._listeners = self._listen()
        history = self.history()
        beyond = next((n for n, event in enumerate(history) if event.get("round", 0) > round), len(history))
        if beyond < len(history):
            if self._log is not None:
                kept = sum(len(runlog.encode(event)) for event in history[:beyond])
                self._log.close()
                runlog.truncate_to(self._log.path, kept, self._lease.check)
                self._log = runlog.RunLog(self._log.path, time.time)
            del self._events[beyond:]
        return history[:beyond]

    def history(self) -> list[dict[str, Any]]:
        """All events of the run; where there is a log, they are read from it, and none is kept in memory."""
        if self.directory is None or self._listeners is None:
            return list(self._events)
        return runlog.read(self.directory / "run.jsonl")

    def event(self, kind: str, **fields: Any) -> None:
        """Log one event and tell the listeners."""
        if self.complete:
            return
        event = {"event": kind, "time": time.time(), **fields}
        if self._log is not None:
            event = self._log.event(kind, **fields)
        else:
            self._events.append(event)
        for listener in self._listeners or ():
            listener(event)

    def checkpoint(self, arrays: Mapping[str, np.ndarray], meta: dict[str, Any], round: int, consumed: int) -> None:
        """Start saving a copy of the state; the log up to here belongs to it."""
        if self._log is None:
            return
        self.event("checkpoint", round=round, consumed=consumed, bytes=sum(a.nbytes for a in arrays.values()))
        self._log.sync()
        self.saved_round = round
        before = self._writer.write(arrays, msgspec.json.encode({**meta, "log_bytes": self._log.size()}), round)
        self.checkpoint_s = max(self.checkpoint_s, before.write_s if before else 0.0)

    def stop_requested(self) -> str:
        """The reason if somebody put a `stop` file into the directory, or an empty text."""
        return "the stop file" if self._stop_file is not None and self._stop_file.seen() else ""

    def ask_for_nodes(self, nodes: int) -> None:
        """Leave word for the batch script that `nodes` nodes are enough."""
        if self._log is not None:
            self._publish("nodes", f"{nodes}\n")

    def wish(self) -> dict[str, int] | None:
        """What `shoal resize` asked for since the last call."""
        return None if self._wish_file is None else self._wish_file.take()

    def finish(self, status: int, done: bool) -> None:
        """Wait for the checkpoint, take an honoured `stop` away, write DONE if the run is complete."""
        if self._log is not None:
            self._writer.wait()
            self._log.sync()
            if done:
                self._publish("DONE", f"{status}\n")
        if self._stop_file is not None:
            self._stop_file.remove()
        self.close()

    def close(self) -> None:
        """Give the directory back. Safe to call twice."""
        if self._log is not None:
            self._log.close()
            self._log = None
            self._lease.release()

    def _open(self, directory: Path, resume: bool, wait_s: float) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"the run directory {directory} cannot be made ({error.strerror}); give another --out"
            ) from None
        self._refuse_other_run(directory, resume)
        if self._open_complete(directory):
            return
        self._lease = Lease(directory)
        self._lease.acquire(wait_s)
        try:
            self._refuse_other_run(directory, resume)
            if self._open_complete(directory):
                self._lease.release()
            else:
                self._open_to_write(directory)
        except BaseException:
            self._lease.release()
            raise

    def _open_complete(self, directory: Path) -> bool:
        """Take a run that is DONE as it is, and write nothing; False if it is not, or lost its last state."""
        if not (directory / "DONE").exists():
            return False
        try:
            arrays, meta = load(directory / NEWEST)
        except InputError:
            return False
        self.resumed = arrays, msgspec.json.decode(meta)
        self.complete = True
        return True

    def _open_to_write(self, directory: Path) -> None:
        """Go on from the newest checkpoint that loads, or start."""
        for outdated in ("DONE", "nodes"):
            (directory / outdated).unlink(missing_ok=True)
        self._open_writer(directory)
        log, damage = directory / "run.jsonl", list[str]()
        before = _events(log)
        if any(directory.glob("checkpoint*.h5")):
            _, arrays, meta = newest_loadable(directory, damage.append)
            self.resumed = arrays, msgspec.json.decode(meta)
            runlog.truncate_to(log, self.resumed[1]["log_bytes"], self._lease.check)
        else:
            if log.exists():
                runlog.truncate_to(log, 0, self._lease.check)
            self._publish("config.toml", configs.dump(self._config))
        kept = runlog.read(log) if log.exists() else []
        self.replay = before[len(kept) :]
        self.saved_round = max((e["round"] for e in kept if e["event"] == "checkpoint"), default=-1)
        self._log = runlog.RunLog(log, time.time)
        for text in damage:
            self.event("warning", text=text)

    def _open_writer(self, directory: Path) -> None:
        for left_by_a_kill in directory.glob("*.tmp-*"):
            left_by_a_kill.unlink(missing_ok=True)
        self._writer = CheckpointWriter(directory, self._config.run.keep, self._lease.check)

    def _refuse_other_run(self, directory: Path, resume: bool) -> None:
        written = directory / "config.toml"
        if not resume and any((directory / name).exists() for name in (written.name, "run.jsonl", NEWEST)):
            raise InputError(f"{directory} holds a run already; give another --out, or --resume to go on with it")
        if not written.exists():
            if (directory / NEWEST).exists():
                raise InputError(f"{directory} holds a checkpoint but no {written.name}; give another --out")
            return
        changed = configs.differences(configs.load(written), self._config)
        if changed:
            raise InputError(
                f"{directory} holds a run of another config ({', '.join(changed)} differ); resume with its own "
                f"config ({written}), or give another --out"
            )

    def _publish(self, name: str, text: str) -> None:
        assert self.directory is not None
        path = self.directory / name
        written = durable.beside(path)
        written.write_text(text, encoding="utf-8")
        durable.publish(written, path, self._lease.check)


def _events(log: Path) -> list[dict[str, Any]]:
    """What a log holds, before it is cut; nothing if it cannot be read."""
    with contextlib.suppress(InputError):
        return runlog.read(log)
    return []
