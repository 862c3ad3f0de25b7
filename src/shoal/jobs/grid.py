"""A sweep file: a grid of configs x seeds.

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
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from shoal import config as configs
from shoal.config import Config
from shoal.errors import InputError


class Sweep(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a sweep file says."""

    name: str
    base: str
    seeds: Annotated[tuple[int, ...], Meta(min_length=1)] = (1,)
    ranks: Annotated[int, Meta(ge=1)] = 1
    grid: dict[str, Annotated[tuple[Any, ...], Meta(min_length=1)]] = {}


def default_directory(sweep: Sweep) -> Path:
    """Where a sweep goes that was given no --out."""
    return Path("runs") / sweep.name


def is_sweep(path: Path) -> bool:
    """Whether a TOML file is a sweep rather than a config. Raises InputError if it is no TOML."""
    return bool({"base", "grid", "seeds"} & configs.read_toml(path).keys())


def read(path: Path) -> tuple[Sweep, list[Config]]:
    """A sweep file and the configs of its runs, seeds innermost; their names are their directories' too.

    Raises InputError."""
    try:
        sweep = msgspec.convert(configs.read_toml(path), Sweep)
    except msgspec.ValidationError as error:
        raise InputError(
            f"sweep {path}: {error}; a sweep has name, base (a config), seeds, ranks and a [grid] of lists"
        ) from None
    for key in ("seed", "name"):
        if key in sweep.grid:
            raise InputError(f"sweep {path}: [grid] cannot set {key}; list the seeds in `seeds`, and names are made")
    found = []
    for values in itertools.product(*sweep.grid.values()):
        settings = dict(zip(sweep.grid, values, strict=True))
        for seed in sweep.seeds:
            found.append(_config(path, sweep, settings, seed))
    names = [config.name for config in found]
    if len(set(names)) < len(names):
        raise InputError(f"sweep {path}: two of its runs are the same ({max(names, key=names.count)}); list each once")
    return sweep, found


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
