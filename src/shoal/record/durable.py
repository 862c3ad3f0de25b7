"""How a file is replaced so that a kill at any moment leaves the old one or the new one, whole.

The new content is written beside the file, synced, and renamed over it; then the directory is synced.
`before_rename` is the writer's last chance to find that the run directory is no longer its own: it is
called just before the rename and raises (the lease check, see lease.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

Hook = Callable[[], None]


def beside(path: Path) -> Path:
    """Where the new content of `path` is written: in the same directory, named after this process."""
    return path.with_suffix(f".tmp-{os.getpid()}")


def publish(written: Path, path: Path, before_rename: Hook | None = None) -> None:
    """Sync `written` and rename it to `path`; whatever goes wrong, `written` is gone afterwards."""
    try:
        sync_file(written)
        if before_rename is not None:
            before_rename()
        written.replace(path)
    finally:
        # A rename between two links of one file does nothing and leaves both.
        written.unlink(missing_ok=True)
    sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Wait until the file's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Wait until the directory's entries are on the disk; where a file system refuses, go on."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
