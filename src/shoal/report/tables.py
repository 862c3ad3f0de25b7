"""A comparison as text: plain columns, Markdown, JSON, or a coloured table on a terminal.

All forms but JSON show the same cells, so they are made once (`cells`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from shoal.report.compare import Row, ToTarget
from shoal.report.curves import Estimate


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """(headers, one list of cells a row); the columns of a target only where a row has one."""
    headers = [
        "run",
        "seeds",
        "test accuracy %",
        "serial steps",
        "learner-steps",
        "rank-s allocated",
        "rank-s busy",
    ]
    target = next((row.to_target for row in rows if row.to_target), None)
    if target is not None:
        where = f"to {100 * target.target:g}% {target.measure}"
        headers += [f"serial steps {where}", f"learner-steps {where}"]
    return headers, [_cells(row, target is not None) for row in rows]


def text(rows: Sequence[Row]) -> str:
    """Plain aligned columns; what precedes the figures is left-aligned."""
    headers, body = cells(rows)
    lines = [headers, *body]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    return "\n".join(_aligned(line, widths, "  ").rstrip() for line in lines)


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    headers, body = cells(rows)
    rule = [":--"] + ["--:"] * (len(headers) - 1)
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in (headers, rule, *body)]
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped)


def as_json(rows: Sequence[Row]) -> str:
    """The rows' fields as a JSON list; null where there is no figure."""
    return json.dumps(_without_nan([asdict(row) for row in rows]), indent=2)


def show(rows: Sequence[Row], stream: TextIO) -> None:
    """A rich table where `stream` is a terminal, else plain text."""
    if not stream.isatty():
        stream.write(text(rows) + "\n")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    headers, body = cells(rows)
    table = Table(header_style="bold", box=None, pad_edge=False)
    for i, header in enumerate(headers):
        table.add_column(Text(header), justify="right" if i else "left")
    for line in body:
        table.add_row(*(Text(cell, style="dim" if cell == "never" else "") for cell in line))
    Console(file=stream).print(table)


def value_and_error(estimate: Estimate, digits: int) -> str:
    """ "97.71 ± 0.12", "97.71" with one seed, "-" with none."""
    if estimate.n == 0 or math.isnan(estimate.mean):
        return "-"
    mean = f"{estimate.mean:,.{digits}f}"
    return mean if math.isnan(estimate.error) else f"{mean} ± {estimate.error:,.{digits}f}"


def _cells(row: Row, with_target: bool) -> list[str]:
    line = [
        row.label,
        str(row.seeds) if row.ended == row.seeds else f"{row.ended}/{row.seeds} ended",
        value_and_error(row.accuracy, 2),
        _count(row.serial_steps),
        _count(row.learner_steps),
        value_and_error(row.allocated_rank_s, 1),
        value_and_error(row.busy_rank_s, 1),
    ]
    if with_target:
        target = row.to_target
        line += (
            ["-", "-"] if target is None else [_reached(target, e) for e in (target.serial_steps, target.learner_steps)]
        )
    return line


def _reached(target: ToTarget, cost: Estimate) -> str:
    if target.reached == 0:
        return "never"
    return _count(cost) + ("" if target.reached == target.seeds else f" ({target.reached}/{target.seeds})")


def _count(estimate: Estimate) -> str:
    """Steps: exact where all seeds agree."""
    return f"{estimate.mean:,.0f}" if estimate.error == 0 else value_and_error(estimate, 0)


def _aligned(line: Sequence[str], widths: Sequence[int], gap: str) -> str:
    return gap.join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
