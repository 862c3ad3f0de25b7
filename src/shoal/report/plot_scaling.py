"""Strong and weak scaling as bench/scaling.py measured it: throughput and efficiency against ranks, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from shoal.errors import InputError
from shoal.report import style
from shoal.report.load import Count, Positive, check_lines, read_bench

MODES = ("weak", "strong")


class _Net(Struct):
    net: str


class _Header(Struct):
    """What is drawn of a file's header."""

    model: _Net
    cpu: str
    cores: int
    blas: str


class _Row(Struct):
    """What is drawn of a row."""

    mode: str
    ranks: Count
    steps: Count
    round_ms: Positive
    low_ms: Positive
    high_ms: Positive
    samples_s: Positive
    oversubscribed: bool
    repeats: int
    coverage: float
    base: int | None = None
    efficiency: Positive | None = None
    efficiency_low: Positive | None = None
    efficiency_high: Positive | None = None


def plot_scaling(paths: Sequence[Path], output: Path) -> Path:
    """A column a mode: throughput above, efficiency below; a line a K and file. Returns the figure's path."""
    import matplotlib
    from matplotlib.figure import Figure

    files = [(path, *read_bench(path)) for path in paths]
    modes = [mode for mode in MODES if any(row.get("mode") == mode for _, _, rows in files for row in rows)]
    if not modes:
        raise InputError(f"{', '.join(map(str, paths))} has no row of strong or weak scaling; run shoal bench scaling")
    for path, header, rows in files:
        check_lines(path, [header], _Header)
        check_lines(path, rows, _Row)
    with matplotlib.rc_context(style.RC):
        figure = Figure(figsize=(max(6.0, 4.8 * len(modes)), 6.4))
        axes = figure.subplots(2, len(modes), sharex=True, sharey="row", height_ratios=(1.5, 1), squeeze=False)
        for column, mode in enumerate(modes):
            axes[0, column].set_title(f"{mode} scaling")
            index = 0
            for path, header, rows in files:
                for steps in sorted({row["steps"] for row in rows if row["mode"] == mode}):
                    ours = [row for row in rows if row["mode"] == mode and row["steps"] == steps]
                    label = f"{header['model']['net']}, K = {steps}" + (f" ({path.stem})" if len(files) > 1 else "")
                    _draw(axes[:, column], ours, style.line_style(index), label)
                    index += 1
            axes[1, column].axhline(100, color="#888888", linewidth=1.2, linestyle=(0, (1.5, 1.2)))
            axes[1, column].set_xlabel("ranks")
        _finish(axes, [row for _, _, rows in files for row in rows])
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(labels)))
        figure.set_layout_engine("constrained")
        figure.supxlabel(_caption(files), fontsize=8.5, color="#555555")
        return style.save(figure, output)


def _draw(axes: Any, rows: Sequence[dict[str, Any]], look: dict[str, Any], label: str) -> None:
    """One K: intervals as bars, rows that are oversubscribed as crosses without an efficiency, and the ideal."""
    ranks = [row["ranks"] for row in rows]
    rates = [row["samples_s"] for row in rows]
    low, high = ([row["samples_s"] * row["round_ms"] / row[key] for row in rows] for key in ("high_ms", "low_ms"))
    errors = [[r - a for r, a in zip(rates, low, strict=True)], [b - r for r, b in zip(rates, high, strict=True)]]
    axes[0].errorbar(ranks, rates, errors, capsize=3, marker="o", ms=5, label=label, **look)
    ideal = [rates[0] * count / ranks[0] for count in ranks]
    axes[0].plot(ranks, ideal, color=look["color"], linewidth=1.0, linestyle=(0, (1.5, 1.2)), alpha=0.8)
    crowded = [row for row in rows if row["oversubscribed"]]
    axes[0].plot(
        [row["ranks"] for row in crowded], [row["samples_s"] for row in crowded], "x", ms=11, mew=2, color=look["color"]
    )
    fair = [row for row in rows if "efficiency" in row]
    middle = [100 * row["efficiency"] for row in fair]
    below = [100 * (row["efficiency"] - row["efficiency_low"]) for row in fair]
    above = [100 * (row["efficiency_high"] - row["efficiency"]) for row in fair]
    axes[1].errorbar([row["ranks"] for row in fair], middle, [below, above], capsize=3, marker="o", ms=5, **look)


def _finish(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    from matplotlib.ticker import NullLocator

    counts = sorted({row["ranks"] for row in rows})
    for panel in axes.flat:
        panel.set_xscale("log", base=2)
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.set_xlim(counts[0] / 1.2, counts[-1] * 1.2)
        panel.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("samples per second")
    axes[0, 0].yaxis.set_major_formatter(style.thousands)
    axes[1, 0].set_ylabel("efficiency (%)")


def _caption(files: Sequence[tuple[Path, dict[str, Any], list[dict[str, Any]]]]) -> str:
    _, header, rows = files[0]
    bases = sorted({row["base"] for row in rows if "base" in row})
    parts = [
        f"{header['cpu']}, {header['cores']} cores a node, {header['blas']}",
        f"Medians of {rows[0]['repeats']} visits with intervals of {100 * rows[0]['coverage']:.0f}%; dotted: ideal, "
        f"from {', '.join(map(str, bases))} rank{'s' * (bases != [1])}",
    ]
    if any(row["oversubscribed"] for _, _, found in files for row in found):
        parts.append("Crosses: oversubscribed, more ranks than cores on a node; no efficiency is given")
    return "\n".join(parts)
