"""Working on a sweep: its runs, packed on the ranks it is given.

The world is cut into teams of `ranks` ranks. Each team takes the next run that nobody has done or is doing (a
run directory's lease says so), so a finished run frees its ranks for the next, several jobs can work on one
sweep, and a sweep that was interrupted goes on where it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from shoal import errors
from shoal.allocation import Allocation
from shoal.comm.collectives import broadcast_bytes, gather
from shoal.comm.world import World
from shoal.config import Config
from shoal.errors import InputError
from shoal.jobs import grid
from shoal.record import runlog
from shoal.record.lease import Lease
from shoal.record.recorder import StopFile
from shoal.run import Request, run

Say = Callable[[str], None]

_NONE, _STOP = -1, -2


def work(world: World, path: Path, out: Path | None, signalled: Callable[[], bool], say: Say, here: Allocation) -> int:
    """Do the runs of a sweep that are left; `say` is called with a line per run. Returns the exit status.

    `signalled` says whether a signal asks this rank to stop; a file `stop` in the sweep's directory does too.
    Collective over the world."""
    problem, sweep = None, None
    members: list[Config] = []
    try:
        sweep, members = grid.read(path)
        if world.size < sweep.ranks:
            problem = f"sweep {path}: its runs take {sweep.ranks} ranks and there are {world.size}; start more ranks"
    except InputError as error:
        problem = str(error)
    world.agree(problem)
    assert sweep is not None
    out = out or grid.default_directory(sweep)
    stop_file = StopFile(out)
    place = world.order.index(world.rank)
    teams = world.size // sweep.ranks
    comm = world.comm.Split(min(place // sweep.ranks, teams), place)
    status = errors.DONE
    start_s = float(broadcast_bytes(world.transport, repr(time.time()).encode()))
    if place // sweep.ranks < teams:
        team = World(comm, world.backend)
        runs = {out / member.name: member for member in members}
        status = _work_through(team, runs, start_s, lambda: signalled() or stop_file.seen(), say, here)
        team.close()
    comm.Free()
    world.waiter.timeout_s = math.inf  # another team may have hours to go
    rows = gather(world.transport, np.array([status]))
    if world.is_master:
        stop_file.remove()
    return int(broadcast_bytes(world.transport, str(rows.max()).encode()))


def _work_through(
    team: World,
    runs: Mapping[Path, Config],
    start_s: float,
    stop_requested: Callable[[], bool],
    say: Say,
    here: Allocation,
) -> int:
    """Take runs until none is left; the worst status of them, or 99 at once if asked to stop."""
    tried: set[Path] = set()
    worst = errors.DONE
    while True:
        left = [directory for directory in runs if directory not in tried]
        chosen = _claim(team, left, start_s, stop_requested)
        if chosen < 0:
            return errors.STOPPED if chosen == _STOP else worst
        directory = left[chosen]
        tried.add(directory)
        place = f"[{list(runs).index(directory) + 1:>{len(str(len(runs)))}}/{len(runs)}] {directory.name}"
        try:
            request = Request(runs[directory], directory, resume=True, patient=False, here=here)
            result = run(team, request, stop_requested)
        except errors.LeaseError:
            continue
        except InputError as error:
            if not error.agreed:
                raise
            worst = errors.BAD_INPUT
            _say(team, say, f"{place}: {error}")
            continue
        if result.status == errors.STOPPED:
            return errors.STOPPED
        _say(team, say, f"{place}: test accuracy {100 * result.accuracy:.2f}%")


def _claim(team: World, left: list[Path], start_s: float, stop_requested: Callable[[], bool]) -> int:
    """Which of the runs this team does next, _NONE or _STOP, as its master decides. Collective over the team."""
    chosen = _NONE
    if team.is_master:
        free = (i for i, directory in enumerate(left) if _is_free(directory, start_s))
        chosen = _STOP if stop_requested() else next(free, _NONE)
    return int(broadcast_bytes(team.transport, str(chosen).encode()))


def _is_free(directory: Path, start_s: float) -> bool:
    """Whether a run is to be done, nobody is at it, and it has not failed since the sweep was started."""
    if not directory.exists():
        return True
    if (directory / "DONE").exists():
        return False
    lease, log = Lease(directory), directory / "run.jsonl"
    try:
        free = lease.try_acquire()
        lease.release()
        last = runlog.read(log)[-1:] if free and log.exists() else []
    except InputError:  # the run itself will say so, on all ranks
        return True
    return free and not any(event["event"] == "failure" and event["time"] >= start_s for event in last)


def _say(team: World, say: Say, text: str) -> None:
    if team.is_master:
        say(text)
