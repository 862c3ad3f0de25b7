"""A machine's [network] from the files of bench/scaling.py: what was fitted, and how far each row is off.

The time of every row follows from the same formulas as a prediction (predict.py), with the step of a rank alone from
the same file. Fitted are the latency, a byte within a node and one that leaves it, what a round takes besides, how much
ranks of a node slow each other's steps, and by how much steps vary. Where files state the rate of the link between the
nodes (--link-gbit of the bench), a byte that leaves a node takes the link's time and, fitted, the hosts' own; so what
was measured with one link predicts another.

Weak rows only: the steps of strong ones are shorter by more than their share of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from shoal.comm.algorithms import KEEPS_ORDER
from shoal.comm.network import Buffers, Network
from shoal.comm.tuning import USUAL, Links
from shoal.config import Config, parse_toml
from shoal.config import from_tree as config_from_tree
from shoal.errors import InputError
from shoal.report.fitting import fit
from shoal.report.load import Count, Positive, StepRow, check_lines, read_bench
from shoal.report.predict import Load, Site, round_of

_GUESS = {
    "step_s": 5e-5,
    "byte_s": 2e-10,
    "host_byte_s": 3e-10,
    "overhead_s": 2e-4,
    "crowding": 0.1,
    "jitter": 0.01,
}
_MESSAGE = 0.2
"""a further message beside others takes this share of a step's latency"""
_STARTS = 12


class _Header(Struct):
    """What is read of a file's header."""

    config: str
    numbers: Count
    link_gbit: Positive | None = None


class _Row(StepRow):
    """What is read of a weak row."""

    steps: Count
    nodes: Annotated[list[Count], Meta(min_length=1)]
    algorithm: str
    round_ms: Positive


@dataclass(frozen=True)
class Point:
    """A row: the load that was measured, where, and the time of its round. link_byte_s: the link's, 0 if not stated."""

    file: str
    config: Config
    load: Load
    ranks: int
    per_node: int
    steps: int
    algorithm: str
    link_byte_s: float
    round_s: float


@dataclass(frozen=True)
class Calibration:
    """values: what was fitted, by name; crosses: whether anything left a node, else host_byte_s is that of a usual
    cluster; errors: of each point, predicted over measured, less 1."""

    values: dict[str, float]
    crosses: bool
    points: tuple[Point, ...]
    errors: np.ndarray


def points(paths: Sequence[Path]) -> list[Point]:
    """The weak rows of files. Raises InputError."""
    found = []
    for path in paths:
        header, rows = read_bench(path)
        if header["bench"] != "scaling":
            raise InputError(f"{path} is of bench {header['bench']}, and calibration needs one of shoal bench scaling")
        weak = [row for row in rows if row.get("mode") == "weak"]
        check_lines(path, [header], _Header)
        check_lines(path, weak, _Row)
        config = _config(header["config"], path)
        link = header.get("link_gbit")
        alone = {row["steps"]: row for row in weak if row["ranks"] == 1}
        if not alone:
            raise InputError(f"{path} has no weak row of 1 rank, from which the step is taken; measure --ranks 1,...")
        for row in weak:
            step_s = 1e-3 * alone.get(row["steps"], next(iter(alone.values())))["step_ms"]
            load = Load(step_s, row["batch"], header["numbers"], 0, 0)
            at = (row["ranks"], max(row["nodes"]), row["steps"], row["algorithm"], 8e-9 / link if link else 0.0)
            found.append(Point(str(path), config, load, *at, 1e-3 * row["round_ms"]))
    return found


def _config(text: str, path: Path) -> Config:
    try:
        return config_from_tree(parse_toml(text), str(path))
    except ValueError:
        raise InputError(f"the config in {path} is not TOML; name a file as a bench wrote it") from None


def network(values: dict[str, float], link_byte_s: float, origin: str, error: float | None = None) -> Network:
    """The [network] of values by name, for a link."""
    links = Links(
        step_s=values["step_s"],
        message_s=_MESSAGE * values["step_s"],
        byte_s=values["byte_s"],
        crossing_byte_s=values["host_byte_s"] + link_byte_s,
    )
    host = Buffers(origin=origin, error=error, links=links)
    jitter = min(values["jitter"], 0.5)
    return Network(host=host, jitter=jitter, crowding=values["crowding"], overhead_s=values["overhead_s"])


def predicted_s(point: Point, values: dict[str, float], as_measured: bool = False) -> float:
    """The time of a point's round, by the algorithm that would be chosen, or by the one that was."""
    site = Site("calibrated", network(values, point.link_byte_s, "fit"), point.per_node)
    run = point.config.run
    if as_measured and point.algorithm in KEEPS_ORDER:
        run = msgspec.structs.replace(run, algorithm=point.algorithm)
    return round_of(run, point.load, site, (point.ranks, point.ranks), (point.steps, point.load.batch)).seconds


def calibrate(found: Sequence[Point]) -> Calibration:
    """Fit the values to the points."""
    if len({(point.ranks, point.per_node) for point in found}) < 2:
        raise InputError(
            "the bench has one number of ranks, from which nothing can be told; measure several (--ranks 1,2,4)"
        )

    crosses = any(point.ranks > point.per_node for point in found)
    usual = {} if crosses else {"host_byte_s": USUAL.crossing_byte_s}
    guess = {name: value for name, value in _GUESS.items() if name not in usual}

    def named(values: np.ndarray) -> dict[str, float]:
        return {**usual, **dict(zip(guess, values.tolist(), strict=True))}

    def times(values: np.ndarray) -> np.ndarray:
        return np.array([predicted_s(point, named(values), as_measured=True) for point in found])

    measured_s = np.array([point.round_s for point in found])
    best = fit(times, measured_s, np.array(list(guess.values())), _STARTS)
    return Calibration(named(best.parameters), crosses, tuple(found), best.errors)


def as_toml(found: Calibration, link_gbit: float | None, files: str) -> str:
    """The tables for a machine file."""
    import tomli_w

    link = 8e-9 / link_gbit if link_gbit else 0.0
    origin = f"shoal calibrate of {files}: {len(found.points)} rows, {describe_errors(found.errors)}"
    origin += "" if found.crosses else "; between nodes nothing was measured"
    rounded = {name: float(f"{value:.4g}") for name, value in found.values.items()}
    made = msgspec.to_builtins(network(rounded, link, origin))
    tables = {key: value for key, value in made.items() if value is not None}
    tables["host"] = {key: value for key, value in tables["host"].items() if value is not None}
    tables["host"]["links"] = {key: float(f"{value:.4g}") for key, value in tables["host"]["links"].items()}
    return tomli_w.dumps({"network": tables})


def describe_errors(errors: np.ndarray) -> str:
    """The median and the largest."""
    return f"off by {100 * np.median(abs(errors)):.1f}% (median), {100 * abs(errors).max():.0f}% at most"


def residuals(found: Calibration) -> list[dict[str, Any]]:
    """A dict a row: what was measured, what the fit gives."""
    return [
        {
            "file": point.file,
            "ranks": point.ranks,
            "per_node": point.per_node,
            "K": point.steps,
            "algorithm": point.algorithm,
            "measured_ms": 1e3 * point.round_s,
            "fitted_ms": 1e3 * point.round_s * (1 + error),
            "error_percent": 100 * error,
        }
        for point, error in zip(found.points, found.errors.tolist(), strict=True)
    ]


def write(found: Calibration, output: Path, base: Path | None, link_gbit: float | None) -> None:
    """A machine file: `base` with its [network] replaced, or one of this machine's own. Raises InputError."""
    text = as_toml(found, link_gbit, ", ".join(dict.fromkeys(Path(point.file).name for point in found.points)))
    if base is None:
        head = 'about = "calibrated by shoal calibrate"\nscheduler = "local"\n\n'
        per_node = max(point.per_node for point in found.points)
        head += f'[node]\ncores = {per_node}\n\n[launch]\nprogram = "mpiexec"\n\n'
    else:
        tree = parse_toml(base.read_text(encoding="utf-8"))
        tree.pop("network", None)
        import tomli_w

        head = tomli_w.dumps(tree) + "\n"
    try:
        output.write_text(head + text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{output} cannot be written ({error.strerror}); give another name (-o)") from None
