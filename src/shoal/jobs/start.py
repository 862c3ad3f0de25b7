"""From the user's command line to mpiexec: what to start for a config, a sweep or a script."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal import config as configs
from shoal.allocation import CLEARED_STOP
from shoal.comm import library
from shoal.elastic.schedule import Schedule
from shoal.errors import InputError
from shoal.jobs import grid, restarts
from shoal.jobs.launch import environment, find_mpiexec, folder, launch, launcher, say
from shoal.jobs.probe import can_spawn
from shoal.record.lease import is_held
from shoal.record.recorder import WishFile


@dataclass(frozen=True)
class Options:
    """The options of `shoal launch`."""

    ranks: int = 1
    ulfm: bool = False
    extra: Sequence[str] = ()
    overrides: Sequence[str] = ()
    out: Path | None = None
    resume: bool = False
    restarts: int = 0
    arguments: Sequence[str] = ()


def start(target: Path, options: Options) -> int:
    """Start `target` on the ranks, wait, return the exit status. Raises InputError before anything is started."""
    if options.restarts and (target.suffix == ".py" or grid.is_sweep(target)):
        raise InputError(f"--restarts is for configs, and {target} is none; leave it out")
    if target.suffix == ".py":
        return _launch(_script(target, options), None, options)
    if options.arguments:
        raise InputError(
            f"{target} takes no arguments, and {' '.join(options.arguments)} stands after it; leave that out, or "
            "use --set KEY=VALUE with a config"
        )
    if grid.is_sweep(target):
        return _launch(*_sweep(target, options), options)
    return _start_run(target, options)


def _start_run(target: Path, options: Options) -> int:
    """Once, and again while it ends with 75 and nobody has asked it to stop."""
    config = configs.load(target, options.overrides)
    Schedule.of(config)
    out = options.out or configs.default_directory(config)
    stop_file = _stop_file(out, [out])
    if config.run.provider == "spawn":
        options = _with_spawned_ranks(options, config.run.max_ranks)

    def attempt(again: bool) -> int:
        command = _run(target, out, replace(options, resume=options.resume or again))
        return restarts.outcome(_launch(command, stop_file, options), out)

    def wanted() -> bool:
        return stop_file is not None and not stop_file.exists()

    return restarts.with_restarts(attempt, options.restarts, wanted, say)


def _with_spawned_ranks(options: Options, most: int) -> Options:
    """The options as they are if ranks can be spawned by this launcher; else those of a job that has all from the
    start."""
    mpi = library.loaded()
    with folder() as own:
        verdict = can_spawn(launcher(mpi, options.ulfm, options.extra), environment(mpi, os.environ, own))
    if verdict.ok:
        return options
    say(f"ranks cannot be spawned here ({verdict.reason}): {most} are started now, and sleep while not needed")
    return replace(options, ranks=most, overrides=(*options.overrides, "run.provider=reserve"))


def _launch(command: list[str], stop_file: Path | None, options: Options) -> int:
    return launch(
        options.ranks,
        [sys.executable, "-m", "shoal", *command],
        stop_file=stop_file,
        ulfm=options.ulfm,
        extra=options.extra,
    )


def bench_script(name: str) -> Path:
    """The program bench/NAME.py of the checkout that shoal runs from. Raises InputError where there is none."""
    import shoal

    path = Path(shoal.__file__).resolve().parents[2] / "bench" / f"{name}.py"
    if not path.exists():
        raise InputError(f"{path} is not there: benchmarks come with a checkout of shoal; install it (pip install -e)")
    return path


def start_sweep(path: Path, ranks: int, out: Path | None) -> int:
    """`start` for what must be a sweep. Raises InputError if it is not."""
    grid.read(path)
    return start(path, Options(ranks, out=out))


def ask_to_resize(directory: Path, ranks: int | None, learners: int | None) -> None:
    """Leave the wish for the run at work in the directory. Raises InputError if there is none, or no wish."""
    wish = {key: value for key, value in (("ranks", ranks), ("learners", learners)) if value is not None}
    if not wish:
        raise InputError("no size was given; name the RANKS that may work, or --learners N")
    if not is_held(directory):
        raise InputError(f"no job is at work in {directory}; name the directory of a run that is training")
    WishFile(directory).put(wish)


def _script(target: Path, options: Options) -> list[str]:
    if options.overrides or options.out or options.resume:
        raise InputError(
            f"--set, --out and --resume are for configs, and {target} is a script; give it arguments of its own "
            "after its name"
        )
    return ["script", "--", str(target), *options.arguments]


def _sweep(target: Path, options: Options) -> tuple[list[str], Path | None]:
    if options.overrides:
        raise InputError(f"--set is for configs, and {target} is a sweep; change its base config or its [grid]")
    sweep, members = grid.read(target)
    out = options.out or grid.default_directory(sweep)
    stop_file = _stop_file(out, [out / member.name for member in members])
    return ["sweep", str(target), "--out", str(out)], stop_file


def _run(target: Path, out: Path, options: Options) -> list[str]:
    settings = [word for text in options.overrides for word in ("--set", text)]
    resume = ["--resume"] if options.resume else []
    width = ["--width", str(shutil.get_terminal_size().columns)] if sys.stdout.isatty() else []
    return ["train", str(target), *settings, "--out", str(out), *resume, *width]


def info() -> list[str]:
    """The lines of `shoal info`."""
    from shoal import environment

    mpi = library.loaded()
    found = {"mpi": f"{mpi} ({mpi.path or 'path unknown'})", "mpiexec": str(find_mpiexec(mpi))}
    rows = {**environment.describe(), **found, "devices": "none used (the backend is NumPy)"}
    width = max(map(len, rows))
    return [f"{name:<{width}}  {value}" for name, value in rows.items()]


def _stop_file(out: Path, runs: list[Path]) -> Path | None:
    """The file that stops this job; one that was left for a job killed since is removed, if not by the batch script.

    None while another job is at work there: the file would stop that one."""
    if any(is_held(run) for run in runs):
        return None
    if CLEARED_STOP in os.environ:
        return out / "stop"
    with contextlib.suppress(OSError):  # there may be no such directory, which the ranks will say
        (out / "stop").unlink()
    return out / "stop"
