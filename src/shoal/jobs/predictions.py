"""`shoal predict` and the cost of a `shoal schedule`: machine files joined with what report/ predicts of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal import config as configs
from shoal.config import Config
from shoal.elastic.schedule import PRESETS
from shoal.errors import InputError
from shoal.jobs.machine import load as load_machine
from shoal.report import costs
from shoal.report.load import load_of
from shoal.report.plot_costs import plot_costs
from shoal.report.predict import Load, Prediction, Site, predict

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Options:
    """Of `shoal predict`. ranks: jobs to compare; weak: a learner a rank, instead of the schedule."""

    overrides: Sequence[str] = ()
    ranks: Sequence[int] = ()
    weak: bool = False
    schedules: Sequence[str] = ()
    step_ms: float | None = None
    step: Path | None = None
    buffers: str = "host"
    ranks_per_node: int | None = None
    output: Path | None = None


def tables(machines: str, path: Path, options: Options) -> Iterator[RenderableType]:
    """What to print; draws the figure if one is asked for. machines: names or files, by commas. Raises InputError."""
    config = configs.load(path, options.overrides)
    if options.weak and options.schedules:
        raise InputError("--weak has a learner on each rank, so no --schedules; leave one of them out")
    load = load_of(config, options.step_ms, options.step)
    sites = [site(name.strip(), options) for name in machines.split(",")]
    found = [one for place in sites for one in _predictions(config, load, place, options)]
    if len(found) == 1:
        yield costs.stage_table(found[0])
        yield costs.totals(found[0])
    else:
        yield costs.schedule_table(found)
    firsts = [next(one for one in found if one.site is place) for place in sites]
    yield from (costs.origin(one, load) for one in firsts)
    if options.output is not None:
        caption = f"{path.stem}: {load.numbers:,} numbers, a step of {load.batch} samples in {1e3 * load.step_s:g} ms\n"
        caption += "\n".join(map(_said, firsts))
        yield f"wrote {plot_costs(found, options.output, caption)}"


def site(name: str, options: Options) -> Site:
    """The machine, with as many ranks on a node as it has devices, or cores. Raises InputError without parameters."""
    machine = load_machine(name)
    per_node = options.ranks_per_node or machine.node.gpus or machine.node.cores
    if per_node > machine.node.cores:
        raise InputError(
            f"{per_node} ranks a node cannot be: a node of {name} has {machine.node.cores} cores; give fewer "
            "(--ranks-per-node)"
        )
    found = Site(Path(name).stem, machine.network, per_node, options.buffers, machine.limits.nodes)
    _ = found.buffers
    return found


def schedule_costs(machine: str, config: Config, options: Options) -> Iterator[RenderableType]:
    """The lines that `shoal schedule --machine` adds."""
    load, place = load_of(config, options.step_ms, options.step), site(machine, options)
    found = predict(config, load, place, options.ranks[0] if options.ranks else 0)
    yield costs.stage_table(found)
    yield costs.totals(found)
    yield costs.origin(found, load)


def _predictions(config: Config, load: Load, place: Site, options: Options) -> Iterator[Prediction]:
    for ranks in options.ranks or (0,):
        job = f", {ranks} ranks" if ranks else ""
        if options.weak:
            if not ranks:
                raise InputError(
                    "--weak puts a learner on each rank, and no ranks were given; name some: --ranks 6,24,96"
                )
            yield predict(_scheduled(config, f"0:{ranks}"), load, place, ranks, f"{ranks} learners")
        for name in () if options.weak else options.schedules or ("",):
            yield predict(_scheduled(config, name), load, place, ranks, (name or config.name) + job)


def _scheduled(config: Config, schedule: str) -> Config:
    if not schedule:
        return config
    learners = msgspec.structs.replace(config.learners, schedule=schedule)
    return msgspec.structs.replace(config, learners=learners)


def _said(one: Prediction) -> str:
    place = one.site
    estimated = ", network estimated" if "estimate" in place.buffers.origin else ""
    return f"{place.name}: {place.per_node} ranks a node, {place.kind} buffers{estimated}; {costs.validated(one)}"


def named_schedules(text: str) -> tuple[str, ...]:
    """By commas; "paper" stands for all presets."""
    if text.strip() == "paper":
        return tuple(PRESETS)
    return tuple(part.strip() for part in text.split(",") if part.strip())
