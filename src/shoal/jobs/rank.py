"""What one rank does: train a config, run a script, or work on a sweep. Started by mpiexec, srun or jsrun."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from shoal import allocation
from shoal import config as configs
from shoal.allocation import Allocation
from shoal.comm.lifeline import Lifeline
from shoal.comm.spawn import join_within
from shoal.comm.world import World
from shoal.config import Config
from shoal.errors import InputError
from shoal.jobs import grid
from shoal.jobs import sweep as sweeps
from shoal.record.progress import Progress
from shoal.record.recorder import OnEvent
from shoal.run import Request, Result, run
from shoal.run import join as run_from
from shoal.session import be_a_joiner, be_a_rank

JOIN_LIMIT_S = 60


def train(path: Path, overrides: Sequence[str], out: Path | None, resume: bool, width: int) -> NoReturn:
    """One rank of a run. width: columns of the terminal that the launcher writes to, 0 for a log. Collective."""

    def work(world: World, life: Lifeline) -> int:
        config = _load(world, path, overrides)
        request, lines = _request(config, out, resume, width)
        try:
            result = run(world, request, life.stop_requested)
        finally:
            for line in lines:
                line.close()
        return _tell(result, request)

    be_a_rank(work)


def join(path: Path, overrides: Sequence[str], out: Path | None, width: int) -> NoReturn:
    """A rank that was spawned into a run of the same config."""
    join_within(JOIN_LIMIT_S)

    def work(life: Lifeline) -> tuple[World, int | None]:
        request, _ = _request(configs.load(path, overrides), out, True, width)
        world, result = run_from(request, life.recovers, life.stop_requested)
        return world, None if result is None else _tell(result, request)

    be_a_joiner(work)


def _request(config: Config, out: Path | None, resume: bool, width: int) -> tuple[Request, list[Progress]]:
    """What to run, and the progress lines that there will be."""
    lines: list[Progress] = []

    def listen() -> list[OnEvent]:
        lines.append(Progress(config.train.epochs, sys.stdout, width))
        return [lines[0].on_event]

    here, directory = allocation.read(os.environ), out or configs.default_directory(config)
    return Request(config, directory, resume, listen=listen, here=here), lines


def _tell(result: Result, request: Request) -> int:
    if result.master:
        print(f"{result.reason}: {request.out}", flush=True)
    return result.status


def script(path: Path, arguments: Sequence[str], stop_file: Path | None) -> NoReturn:
    """One rank of a user's script, which calls `shoal.train`. Collective."""

    def work(world: World, life: Lifeline) -> int:
        world.agree(None if path.is_file() else f"script {path} does not exist; name an existing .py file")
        sys.argv = [str(path), *arguments]
        sys.path.insert(0, str(path.resolve().parent))
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        return 0

    be_a_rank(work, stop_file)


def sweep(path: Path, out: Path | None) -> NoReturn:
    """One rank of a sweep. Collective."""

    def work(world: World, life: Lifeline) -> int:
        ends = Allocation(end_time_s=allocation.read(os.environ).end_time_s)
        return sweeps.work(world, path, out, life.stop_requested, lambda text: print(text, flush=True), ends)

    be_a_rank(work, _stop_file_of_sweep(path, out))


def _stop_file_of_sweep(path: Path, out: Path | None) -> Path | None:
    """What tells all teams of a signal that reached a rank of one; None for a sweep that will be refused."""
    try:
        return (out or grid.default_directory(grid.read(path)[0])) / "stop"
    except InputError:
        return None


def _load(world: World, path: Path, overrides: Sequence[str]) -> Config:
    """The config, or the same InputError on all ranks."""
    config, problem = Config(), None
    try:
        config = configs.load(path, overrides)
    except InputError as error:
        problem = str(error)
    world.agree(problem)
    return config
