"""From the user's command line to mpiexec: what to start for a config, a sweep or a script."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal import config as configs
from shoal.comm import library
from shoal.elastic.schedule import Schedule
from shoal.errors import InputError
from shoal.jobs import grid
from shoal.jobs.launch import find_mpiexec, launch
from shoal.record.lease import Lease


@dataclass(frozen=True)
class Options:
    """The options of `shoal launch`."""

    ranks: int = 1
    ulfm: bool = False
    extra: Sequence[str] = ()
    overrides: Sequence[str] = ()
    out: Path | None = None
    resume: bool = False
    arguments: Sequence[str] = ()


def start(target: Path, options: Options) -> int:
    """Start `target` on the ranks, wait, return the exit status. Raises InputError before anything is started."""
    stop_file = None
    if target.suffix == ".py":
        _refuse_config_options(target, options)
        command = ["script", str(target), *options.arguments]
    elif grid.is_sweep(target):
        sweep, _ = grid.read(target)
        out = options.out or grid.default_directory(sweep)
        stop_file = out / "stop"
        command = ["sweep", str(target), "--out", str(out)]
    else:
        config = configs.load(target, options.overrides)
        Schedule.of(config)
        out = options.out or configs.default_directory(config)
        stop_file = out / "stop"
        settings = [word for text in options.overrides for word in ("--set", text)]
        resume = ["--resume"] if options.resume else []
        width = ["--width", str(shutil.get_terminal_size().columns)] if sys.stdout.isatty() else []
        command = ["train", str(target), *settings, "--out", str(out), *resume, *width]
    if stop_file is not None and stop_file.exists():
        _forget(stop_file)
    return launch(
        options.ranks,
        [sys.executable, "-m", "shoal", *command],
        stop_file=stop_file,
        ulfm=options.ulfm,
        extra=options.extra,
    )


def info() -> list[str]:
    """The lines of `shoal info`."""
    from shoal import environment

    mpi = library.loaded()
    found = {"mpi": f"{mpi} ({mpi.path or 'path unknown'})", "mpiexec": str(find_mpiexec(mpi))}
    rows = {**environment.describe(), **found, "devices": "none used (the backend is NumPy)"}
    width = max(map(len, rows))
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


def _forget(stop_file: Path) -> None:
    """Remove a stop that was asked of a job that has been killed since; one that still runs keeps it."""
    lease = Lease(stop_file.parent)
    if lease.try_acquire():
        stop_file.unlink(missing_ok=True)
    lease.release()


def _refuse_config_options(target: Path, options: Options) -> None:
    if options.overrides or options.out or options.resume:
        raise InputError(
            f"--set, --out and --resume are for configs, and {target} is a script; give it arguments of its own "
            "after its name"
        )
