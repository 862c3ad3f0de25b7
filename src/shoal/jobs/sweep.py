"""A sweep: a grid of configs x seeds, packed on the ranks it is given.

The world is cut into teams of `ranks` ranks. Each team takes the next run that nobody has done or is doing (a
run directory's lease says so), so a finished run frees its ranks for the next, several jobs can work on one
sweep, and a sweep that was interrupted goes on where it was.

    name = "digits-paper"
    base = "digits-noisy.toml"          # relative to this file
    seeds = [1, 2, 3]
    ranks = 1                           # of each run
    [grid]
    "learners.schedule" = ["paper-I", "paper-II"]
    "averaging.momentum" = [0.0, 0.5]
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from shoal import config as configs
from shoal import errors
from shoal.comm.collectives import broadcast_bytes, gather
from shoal.comm.world import World
from shoal.config import Config
from shoal.errors import InputError
from shoal.record.lease import Lease
from shoal.run import Request, run

Say = Callable[[str], None]


class Sweep(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sweep file."""

    name: str
    base: str
    seeds: Annotated[tuple[int, ...], Meta(min_length=1)] = (1,)
    ranks: Annotated[int, Meta(ge=1)] = 1
    grid: dict[str, Annotated[tuple[Any, ...], Meta(min_length=1)]] = {}


@dataclass(frozen=True)
class Member:
    """One run of a sweep; its config's name is its directory's."""

    config: Config

    @property
    def name(self) -> str:
        """The directory under the sweep's."""
        return self.config.name


def is_sweep(path: Path) -> bool:
    """Whether a TOML file is a sweep rather than a config. Raises InputError if it is no TOML."""
    return bool({"base", "grid", "seeds"} & configs.read_toml(path).keys())


def read(path: Path) -> tuple[Sweep, list[Member]]:
    """A sweep file and its runs, seeds innermost. Raises InputError."""
    try:
        sweep = msgspec.convert(configs.read_toml(path), Sweep)
    except msgspec.ValidationError as error:
        raise InputError(
            f"sweep {path}: {error}; a sweep has name, base (a config), seeds, ranks and a [grid] of lists"
        ) from None
    members = []
    for values in itertools.product(*sweep.grid.values()):
        settings = dict(zip(sweep.grid, values, strict=True))
        for seed in sweep.seeds:
            members.append(Member(_config(path, sweep, settings, seed)))
    names = [member.name for member in members]
    if len(set(names)) < len(names):
        raise InputError(f"sweep {path}: two of its runs are the same ({max(names, key=names.count)}); list each once")
    return sweep, members


def work(world: World, path: Path, out: Path, stop_requested: Callable[[], bool], say: Say) -> int:
    """Do the runs of a sweep that are left; `say` is called with a line per run. Returns the exit status.

    Collective over the world."""
    problem, sweep = None, None
    members: list[Member] = []
    try:
        sweep, members = read(path)
        if world.size < sweep.ranks:
            problem = f"sweep {path}: its runs take {sweep.ranks} ranks and there are {world.size}; start more ranks"
    except InputError as error:
        problem = str(error)
    world.agree(problem)
    assert sweep is not None
    place = world.order.index(world.rank)
    teams = world.size // sweep.ranks
    comm = world.comm.Split(min(place // sweep.ranks, teams), place)
    status = errors.DONE
    if place // sweep.ranks < teams:
        team = World(comm, world.backend)
        status = _work_through(team, members, out, stop_requested, say)
        team.close()
    comm.Free()
    world.waiter.timeout_s = math.inf  # another team may have hours to go
    rows = gather(world.transport, np.array([status]))
    return int(broadcast_bytes(world.transport, str(rows.max()).encode()))


def _work_through(
    team: World, members: list[Member], out: Path, stop_requested: Callable[[], bool], say: Say
) -> int:
    """Take runs until none is left; the worst status of them, or 99 at once if asked to stop."""
    tried: set[str] = set()
    worst = errors.DONE
    while True:
        name = _claim(team, members, out, tried)
        if not name or stop_requested():
            return errors.STOPPED if name else worst
        tried.add(name)
        member = next(m for m in members if m.name == name)
        place = f"[{members.index(member) + 1:>{len(str(len(members)))}}/{len(members)}] {name}"
        try:
            result = run(team, Request(member.config, out / name, resume=True), stop_requested)
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


def _claim(team: World, members: list[Member], out: Path, tried: set[str]) -> str:
    """The next run for this team, chosen by its master; empty if none is left. Collective over the team."""
    chosen = ""
    if team.is_master:
        for member in members:
            if member.name not in tried and _is_free(out / member.name):
                chosen = member.name
                break
    return broadcast_bytes(team.transport, chosen.encode()).decode()


def _is_free(directory: Path) -> bool:
    if (directory / "DONE").exists():
        return False
    if not directory.exists():
        return True
    lease = Lease(directory)
    free = lease.try_acquire()
    lease.release()
    return free


def _say(team: World, say: Say, text: str) -> None:
    if team.is_master:
        say(text)


def _config(path: Path, sweep: Sweep, settings: dict[str, Any], seed: int) -> Config:
    tree = configs.read_toml(path.parent / sweep.base)
    for key, value in settings.items():
        configs.put(tree, key, value)
    tree["seed"] = seed
    tree["name"] = "_".join([*(_label(key, value) for key, value in settings.items()), f"seed-{seed}"])
    return configs.from_tree(tree, str(path))


def _label(key: str, value: Any) -> str:
    """Short and good as a file name; a schedule speaks for itself."""
    text = re.sub(r"[^A-Za-z0-9.+-]+", "-", str(value)).strip("-")
    return text if key == "learners.schedule" else f"{key.rpartition('.')[2]}-{text}"
