"""Who was there when: learners and ranks of a run against the clock, with resizes and failures marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.report.runs import Run

FAILURE, GREY = "#B00020", "#333333"
FLOOR = 0.75
"""where the axis begins, below one rank"""
MARKS = {
    "lost": ("X", FAILURE, "rank lost"),
    "came": ("^", GREY, "rank came"),
    "left": ("v", GREY, "rank left"),
    "resize": ("|", GREY, "resize"),
    "resume": (">", FAILURE, "resumed"),
}
"""Marker, colour and words of what happens to a group or its world"""


def draw_timeline(axes: Any, runs: Sequence[tuple[Run, str]]) -> None:
    """Runs with their colours, each from its own start. Line: learners; area: ranks that train; dots: ranks alive."""
    seen: set[str] = set()
    for run, colour in runs:
        start = _start(run)
        times = np.concatenate([[0.0], run.rounds["time"] - start])
        learners, ranks = (np.concatenate([run.rounds[k][:1], run.rounds[k]]) for k in ("learners", "ranks"))
        axes.step(times, learners, where="pre", color=colour, lw=1.3)
        axes.fill_between(times, ranks, FLOOR, step="pre", color=colour, alpha=0.2, linewidth=0)
        alive = _alive(run)
        if len(alive):
            x, y = np.array([*alive, (times[-1], alive[-1][1])]).T
            axes.step(x, y, where="post", color=colour, linestyle=":", lw=1.3)
        for kind, time, height in _marks(run):
            marker, fill, _ = MARKS[kind]
            axes.plot(time, height, marker, color=fill, ms=7 if kind == "resize" else 6, zorder=4)
            seen.add(kind)
    _finish(axes, [run for run, _ in runs], seen)


def _start(run: Run) -> float:
    return float(run.header.get("time", run.rounds["time"][0]))


def _alive(run: Run) -> list[tuple[float, float]]:
    """(seconds, ranks alive from then on)."""
    start, found = _start(run), list[tuple[float, float]]()
    for event in (run.header, *run.changes):
        if event["event"] == "recovery":
            found.append((event["time"] - start, event["ranks"][1]))
        elif "world" in event:
            found.append((event["time"] - start, event["world"]))
    return found


def _marks(run: Run) -> list[tuple[str, float, float]]:
    """(kind, seconds, height) of all that is marked."""
    start, found = _start(run), list[tuple[str, float, float]]()
    for event in run.changes:
        time = event["time"] - start
        if event["event"] == "recovery":
            found.append(("lost", time, event["ranks"][1]))
        elif event["event"] == "world":
            found.append(("came" if event.get("action") == "grow" else "left", time, event["world"]))
        elif event["event"] == "resume":
            found.append(("resume", time, event.get("world", 1)))
        elif event["ranks"][0] != event["ranks"][1]:
            found.append(("resize", time, event["ranks"][1]))
    return found


def _finish(axes: Any, runs: Sequence[Run], seen: set[str]) -> None:
    """The axes, and a legend of its own."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    most = max(float(run.rounds[name].max()) for run in runs for name in ("learners", "ranks"))
    most = max([most, *(count for run in runs for _, count in _alive(run))])
    axes.set_yscale("log", base=2)
    ticks = [2**n for n in range(int(np.log2(most)) + 1)]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(FLOOR, most * 1.4)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel("learners, ranks")
    handles: list[Any] = [
        Line2D([], [], color=GREY, lw=1.3, label="learners"),
        Patch(color=GREY, alpha=0.2, linewidth=0, label="ranks that train"),
        Line2D([], [], color=GREY, ls=":", lw=1.3, label="ranks alive"),
    ]
    for kind, (marker, colour, label) in MARKS.items():
        if kind in seen:
            handles.append(Line2D([], [], color=colour, marker=marker, linestyle="", ms=6, label=label))
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8.5)
