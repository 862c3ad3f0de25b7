"""The predictor beside published figures: `python bench/predictor.py [--scales abci-v=32 lassen=64,256 summit=1536]`.

Allreduces: every number of ranks is left out of the fit in turn and predicted (report/validation.py); median and 90th
percentile of the relative error on what was left out. Training: published efficiencies of weak scaling, with the
assumptions of report/published.toml. --scales: times by the parameters that ship, at scales of your choice.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np

from shoal.jobs.machine import load
from shoal.report.validation import Table, efficiency, left_out, met, nccl_of_abci, published

TARGETS = {"host": (0.20, None), "device": (0.15, None), "nccl": (0.15, 0.30)}
SHARE_MET = 0.8
SHIPS_WITH = {"abci-v": "summit"}
"""NCCL's parameters are those of ABCI, whose ranks are 4 a node"""


def allreduces(tables: tuple[Table, ...]) -> bool:
    """Print a line for each scale left out, and one for all of a system; whether all targets are met."""
    fine = True
    print(f"{'system':10}{'library':9}{'left out':>9}{'sizes':>7}{'median':>9}{'p90':>8}   errors")
    for table in tables:
        outs = list(left_out(table))
        if not outs:
            continue
        median, p90 = TARGETS[table.library]
        for out in outs:
            errors = abs(out.errors)
            middle, high = np.median(errors), np.quantile(errors, 0.9)
            fine &= bool(middle <= median and (p90 is None or high <= p90))
            cells = " ".join(f"{100 * error:+.0f}%" for error in out.errors)
            where = f"{table.system:10}{table.library:9}{out.ranks:9}{len(errors):7}"
            print(f"{where}{100 * middle:8.1f}%{100 * high:7.1f}%   {cells}")
        errors = abs(np.concatenate([out.errors for out in outs]))
        words = f"target: median {100 * median:g}%" + (f", p90 {100 * p90:g}%" if p90 else "")
        print(
            f"{table.system:10}{table.library:9}{'all':>9}{len(errors):7}{100 * np.median(errors):8.1f}%"
            f"{100 * np.quantile(errors, 0.9):7.1f}%   {words}\n"
        )
    return fine


def training(rows: Iterator[tuple[str, int, float, float, bool]]) -> bool:
    """Print published and predicted efficiencies; whether enough are within 8 points."""
    print(f"{'weak scaling':54}{'ranks':>7}{'published':>11}{'predicted':>11}   within 8 points")
    found = []
    for work, ranks, known, predicted, fine in rows:
        found.append(fine)
        print(f"{work:54}{ranks:7}{100 * known:10.1f}%{100 * predicted:10.1f}%   {'yes' if fine else 'NO'}")
    print(f"{sum(found)} of {len(found)} (target: {100 * SHARE_MET:g}%)")
    return sum(found) >= SHARE_MET * len(found)


def at_scales(tables: tuple[Table, ...], scales: dict[str, list[int]]) -> None:
    """Print what the shipped parameters give."""
    for table in tables:
        if table.system not in scales or table.form == "node":
            continue
        machine = load(SHIPS_WITH.get(table.system, table.system))
        library = getattr(machine.network, table.library).allreduce
        print(f"\n{table.system}, {table.what}; microseconds predicted with the parameters that ship")
        print(f"{'ranks':>8}" + "".join(f"{size:>12,.0f}" for size in table.sizes))
        for ranks in scales[table.system]:
            nodes = -(-ranks // table.per_node)
            print(f"{ranks:8}" + "".join(f"{1e6 * library.seconds(size, ranks, nodes):12.1f}" for size in table.sizes))


def chosen(wanted: list[str], systems: set[str]) -> dict[str, list[int]]:
    """Systems and their numbers of ranks, from SYSTEM=RANKS,... Raises ValueError."""
    scales = {}
    for text in wanted:
        name, _, counts = text.partition("=")
        if name not in systems or not all(count.isdigit() and int(count) for count in counts.split(",")):
            raise ValueError(f"--scales {text!r} is not SYSTEM=RANKS,... with one of {', '.join(sorted(systems))}")
        scales[name] = [int(count) for count in counts.split(",")]
    return scales


def main() -> int:
    """Print all; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scales", nargs="*", default=[], metavar="SYSTEM=RANKS,...")
    options = parser.parse_args()
    known = published()
    try:
        scales = chosen(options.scales, {table.system for table in known.allreduce if table.form != "node"})
    except ValueError as error:
        parser.error(str(error))
    fine = allreduces(known.allreduce)
    library = nccl_of_abci(known.allreduce)
    rows = (
        (row.work, row.ranks, row.efficiency, value := efficiency(row, library), met(row, value))
        for row in known.training
    )
    fine &= training(rows)
    at_scales(known.allreduce, scales)
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
