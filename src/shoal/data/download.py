"""Fetching CIFAR-10 from its official site.

The archive is checked against its known checksum before a byte of it is used, and of its members only
the data files are taken, each written beside its place and renamed: an archive cannot write elsewhere,
and an interrupted download leaves no half file that could be read.
"""

from __future__ import annotations

import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from shoal.data.formats import (
    CIFAR10_FOLDER,
    CIFAR10_RECORD_BYTES,
    CIFAR10_RECORDS,
    CIFAR10_TEST,
    CIFAR10_TRAIN,
)
from shoal.errors import InputError

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_CHECKSUM = "md5:c32a1d4ab5d03f1284b67883e8d87530"

Progress = Callable[[int, int], None]
"""Called with the bytes fetched so far and the whole size in bytes (0 where the site does not say)."""


def fetch_cifar10(
    root: Path, url: str = CIFAR10_URL, checksum: str = CIFAR10_CHECKSUM, progress: Progress | None = None
) -> Path:
    """Download and unpack CIFAR-10's binary version under `root`; returns the folder of its files.

    Does nothing where the files are there already and have the right size.  The archive is removed once
    it is unpacked.  Without `progress`, percentages go to standard error.  Raises InputError where the
    site cannot be reached, the archive is not the known one, or `root` cannot be written.
    """
    folder = Path(root) / CIFAR10_FOLDER
    if _complete(folder):
        return folder
    try:
        archive = _download(Path(root), url, checksum, progress or _print_percent())
        _unpack(archive, folder)
        archive.unlink()
    except (OSError, ValueError, EOFError, tarfile.TarError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"CIFAR-10 could not be fetched from {url} to {root} ({reason}), but needs a reachable site, its "
            f"known checksum and a writable folder; try again, or unpack the binary version there by hand."
        ) from error
    return folder


def _complete(folder: Path) -> bool:
    size_bytes = CIFAR10_RECORDS * CIFAR10_RECORD_BYTES
    files = [folder / name for name in (*CIFAR10_TRAIN, CIFAR10_TEST)]
    return all(file.is_file() and file.stat().st_size == size_bytes for file in files)


def _download(root: Path, url: str, checksum: str, progress: Progress) -> Path:
    import pooch

    downloader = pooch.HTTPDownloader(progressbar=_Meter(progress))
    name = url.rsplit("/", 1)[-1]
    return Path(pooch.retrieve(url, checksum, fname=name, path=root, downloader=downloader))


def _unpack(archive: Path, folder: Path) -> None:
    wanted = {*CIFAR10_TRAIN, CIFAR10_TEST}
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name).name
            source = tar.extractfile(member) if member.isfile() and name in wanted else None
            if source is None:
                continue
            beside = folder / f"{name}.tmp-{os.getpid()}"
            beside.write_bytes(source.read())
            beside.replace(folder / name)
            wanted.discard(name)
    if wanted:
        raise ValueError(f"the archive lacks {', '.join(sorted(wanted))}")


class _Meter:
    """The progress bar that pooch asks for, as calls of a `Progress`."""

    def __init__(self, progress: Progress) -> None:
        self.total = 0
        self._progress = progress
        self._fetched_bytes = 0

    def update(self, n_bytes: int) -> None:
        self._fetched_bytes += n_bytes
        self._progress(min(self._fetched_bytes, self.total or self._fetched_bytes), self.total)

    def reset(self) -> None:
        self._fetched_bytes = 0

    def close(self) -> None:
        """Nothing is held open."""


def _print_percent() -> Progress:
    """Return a Progress that writes a line at every tenth of the download."""
    tenths = -1

    def show(fetched_bytes: int, total_bytes: int) -> None:
        nonlocal tenths
        done = 10 * fetched_bytes // total_bytes if total_bytes else 0
        if done > tenths:
            tenths = done
            print(f"cifar10: {10 * done}% of {total_bytes / 1e6:.0f} MB", file=sys.stderr, flush=True)

    return show
