"""Options and types that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


class PathType(click.Path):
    """A path that is not empty: Path("") would be the current folder."""

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if not os.fspath(value):
            self.fail("it is empty; name a file or a folder", param, ctx)
        return Path(value)


FILE = PathType()
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key, e.g. averaging.momentum=0.5."
)


COSTS = (
    click.option("--step-ms", type=click.FloatRange(0, min_open=True), help="The time of one learner's step."),
    click.option("--step", type=FILE, help="Or a file of shoal bench step, or of bench/scaling.py."),
    click.option("--buffers", type=click.Choice(["host", "device", "nccl"]), default="host", show_default=True),
    click.option("--ranks-per-node", type=click.IntRange(1), help="Default: one a device, or one a core."),
)


def costs(command: Callable[..., None]) -> Callable[..., None]:
    for decorate in reversed(COSTS):
        command = decorate(command)
    return command


class Counts(click.ParamType):
    """Numbers by commas."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if not isinstance(value, str):
            return tuple(value)
        parts = value.split(",")
        if not all(part.strip().isdigit() and int(part) for part in parts):
            self.fail(f"{value!r} is no list of numbers from 1; write e.g. 6,24,96", param, ctx)
        return tuple(map(int, parts))


def brace() -> None:
    """In a rank, before the imports that take their time."""
    from shoal.comm import lifeline

    lifeline.brace(launched=any(name in os.environ for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")))
