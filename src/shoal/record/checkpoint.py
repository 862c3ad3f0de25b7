"""Checkpoints: named arrays and a meta text in one HDF5 file, whole at every moment.

A file is HDF5 (the group `arrays`, the bytes `meta`) behind a user block: one line of JSON that gives
the format, the round, and the sha256 of all that follows the block. `load` compares the sum before HDF5
sees the file, because the HDF5 library can loop for ever on damaged metadata. Files are published as
durable.py says, so a kill leaves the newest whole checkpoint in place. A CheckpointWriter does this in a
thread, from copies, while training goes on:

    checkpoint.h5              the newest
    checkpoint-<round>.h5      the keep - 1 before it
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import InputError
from shoal.record.durable import Hook, beside, publish

FORMAT = 1
BLOCK_BYTES = 512
"""The user block's size: the least that HDF5 allows."""
NEWEST = "checkpoint.h5"
SLAB_BYTES = 1 << 22
"""Arrays are written in pieces of this size, so that the training thread is never held up for long."""

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Written:
    """One checkpoint that is on the disk: its round, its size, and how long the thread took."""

    round: int
    bytes: int
    write_s: float


def save(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    meta: bytes,
    round: int = 0,
    before_rename: Hook | None = None,
) -> None:
    """Write `arrays` (any shape and dtype; names without "/") and `meta` to `path`, atomically."""
    publish(_write_beside(Path(path), arrays, meta, round), Path(path), before_rename)


def load(path: Path) -> tuple[Arrays, bytes]:
    """The arrays and the meta bytes of a checkpoint; InputError if it is missing, damaged or none."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no checkpoint at {path}; give a run directory that has saved one")
    block = _block(path)
    if block is None or block["format"] != FORMAT:
        raise InputError(
            f"{path} does not begin as a shoal checkpoint of format {FORMAT}: it is damaged or another "
            "file; use an older one of the same run, or start the run again"
        )
    if _file_sum(path) != block["sha256"]:
        raise InputError(
            f"the checkpoint {path} is truncated or damaged: its content does not have the sha256 it was "
            "saved with; use an older one of the same run, or start the run again"
        )
    return _read(path)


def newest_loadable(directory: Path, warn: Callable[[str], None] = warnings.warn) -> tuple[Path, Arrays, bytes]:
    """The newest checkpoint in `directory` that loads: (path, arrays, meta).

    Where a newer one is damaged, `warn` is called with a sentence that names it and the one used.
    InputError if there is none at all, or none that loads.
    """
    directory = Path(directory)
    newest = [directory / NEWEST] if (directory / NEWEST).exists() else []
    candidates = newest + [path for _, path in _older(directory)]
    damage: list[str] = []
    for path in candidates:
        try:
            arrays, meta = load(path)
        except InputError as error:
            damage.append(str(error))
            continue
        if damage:
            warn(f"{'; '.join(damage)}. Going on from the older {path}.")
        return path, arrays, meta
    if damage:
        raise InputError(f"no checkpoint in {directory} can be loaded: {'; '.join(damage)}")
    raise InputError(f"there is no checkpoint in {directory}; start the run without resuming")


def keep_until(directory: Path, round: int) -> int:
    """Remove checkpoints past `round`, of a future that did not come; the newest round that is left, -1 if none is."""
    left = [-1]
    for path in Path(directory).glob("checkpoint*.h5"):
        block = _block(path)
        if block is not None and block["round"] > round:
            path.unlink(missing_ok=True)
        elif block is not None:
            left.append(block["round"])
    return max(left)


class CheckpointWriter:
    """Saves checkpoints of a run directory in a background thread, one at a time.

    Only one process may have a writer on a directory (hold its lease): at start, what a killed writer
    left beside is removed. `before_rename` is called in the thread before each rename.
    """

    def __init__(self, directory: Path, keep: int = 1, before_rename: Hook | None = None) -> None:
        if keep < 1:
            raise InputError(f"cannot keep {keep} checkpoints: the newest is always kept, so give 1 or more")
        self.directory = Path(directory)
        self.keep = keep
        self._before_rename = before_rename
        self._copies: Arrays = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written: Written | None = None
        for leftover in self.directory.glob("checkpoint*.tmp-*"):
            leftover.unlink(missing_ok=True)

    def write(self, arrays: Mapping[str, np.ndarray], meta: bytes, round: int) -> Written | None:
        """Copy `arrays` and start saving them; they may change as soon as this returns.

        Waits for the previous checkpoint first and returns what `wait` says of it.
        """
        previous = self.wait()
        self._copies = {name: _copy(array, self._copies.get(name)) for name, array in arrays.items()}
        self._thread = threading.Thread(target=self._work, args=(bytes(meta), round), name="checkpoint")
        self._thread.start()
        return previous

    def poll(self) -> Written | None:
        """`wait` if the thread has finished, else None at once."""
        if self._thread is not None and self._thread.is_alive():
            return None
        return self.wait()

    def wait(self) -> Written | None:
        """Wait for the checkpoint being saved; raises here what the thread raised.

        Returns what was written, once; None if nothing was under way.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        written, self._written = self._written, None
        if error is not None:
            raise error
        return written

    def _work(self, meta: bytes, round: int) -> None:
        start = time.perf_counter()
        try:
            path = self.directory / NEWEST
            written = _write_beside(path, self._copies, meta, round)
            n_bytes = written.stat().st_size
            try:
                if self.keep > 1:
                    self._keep_old(path, round)
            except BaseException:
                written.unlink(missing_ok=True)
                raise
            publish(written, path, self._before_rename)
            self._prune(round)
            self._written = Written(round, n_bytes, time.perf_counter() - start)
        except BaseException as error:
            self._error = error

    def _keep_old(self, newest: Path, round: int) -> None:
        """Give the newest checkpoint its second name, if it is a whole one from before `round`."""
        block = _block(newest)
        if block is None or block["round"] >= round:
            return
        kept = self.directory / f"checkpoint-{block['round']}.h5"
        link = beside(kept)
        link.unlink(missing_ok=True)
        try:
            os.link(newest, link)
        except OSError:
            shutil.copyfile(newest, link)
        publish(link, kept, self._before_rename)

    def _prune(self, round: int) -> None:
        """Remove what is too old, and rounds past `round`: of a future this run was resumed before."""
        older = [(r, path) for r, path in _older(self.directory) if r < round]
        keep = {path for _, path in older[: self.keep - 1]}
        for _, path in _older(self.directory):
            if path not in keep:
                path.unlink(missing_ok=True)


def _write_beside(path: Path, arrays: Mapping[str, np.ndarray], meta: bytes, round: int) -> Path:
    import h5py

    written = beside(path)
    try:
        # No HDF5 file lock: nobody else knows this name, and parallel file systems may refuse it.
        with h5py.File(written, "w", locking=False, userblock_size=BLOCK_BYTES) as file:
            group = file.create_group("arrays")
            for name, array in arrays.items():
                _write_array(group, name, np.asarray(array))
            file["meta"] = np.frombuffer(meta, np.uint8)
        block = {"format": FORMAT, "round": round, "sha256": _file_sum(written)}
        with written.open("r+b") as raw:
            raw.write(json.dumps({"shoal checkpoint": block}).encode() + b"\n")
    except BaseException:
        written.unlink(missing_ok=True)
        raise
    return written


def _write_array(group: Any, name: str, array: np.ndarray) -> None:
    if "/" in name:
        raise ValueError(f"an array of a checkpoint cannot be named {name!r}: a slash makes an HDF5 group")
    dataset = group.create_dataset(name, array.shape, array.dtype)
    if array.ndim == 0:
        dataset[()] = array
        return
    rows = max(1, SLAB_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        dataset[start : start + rows] = array[start : start + rows]


def _read(path: Path) -> tuple[Arrays, bytes]:
    import h5py

    with h5py.File(path, "r", locking=False) as file:
        arrays = {name: np.asarray(dataset[()]) for name, dataset in file["arrays"].items()}
        return arrays, file["meta"][()].tobytes()


def _block(path: Path) -> dict[str, Any] | None:
    """The user block's fields format, round and sha256; None if the file does not begin with one."""
    try:
        with path.open("rb") as file:
            block = json.loads(file.read(BLOCK_BYTES).partition(b"\n")[0])["shoal checkpoint"]
        return {"format": int(block["format"]), "round": int(block["round"]), "sha256": block["sha256"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _file_sum(path: Path) -> str:
    """sha256 (hex) of the file behind its user block."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(BLOCK_BYTES)
        while piece := file.read(SLAB_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _older(directory: Path) -> list[tuple[int, Path]]:
    """The checkpoint-<round>.h5 files of `directory`, newest first."""
    found = []
    for path in directory.glob("checkpoint-*.h5"):
        match = re.fullmatch(r"checkpoint-(\d+)\.h5", path.name)
        if match:
            found.append((int(match.group(1)), path))
    return sorted(found, reverse=True)


def _copy(array: np.ndarray, into: np.ndarray | None) -> np.ndarray:
    if into is None or into.shape != array.shape or into.dtype != array.dtype:
        return np.array(array, copy=True, order="C")
    np.copyto(into, array)
    return into
