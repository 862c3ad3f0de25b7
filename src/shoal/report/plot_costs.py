"""A figure for a proposal: what schedules would take and cost on one machine or more, all of it predicted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.report import style
from shoal.report.predict import Prediction

_SAME = 0.02
_UNITS = ((2.0, 1.0, "s"), (120.0, 60.0, "min"), (7200.0, 3600.0, "h"))


def plot_costs(found: Sequence[Prediction], output: Path, caption: str) -> Path:
    """A column a machine: time against node-hours above, learners over the time below; returns the figure's path."""
    import matplotlib
    from matplotlib.figure import Figure

    sites = list(dict.fromkeys(one.site.name for one in found))
    longest = max(one.seconds for one in found)
    unit = next((size, name) for least, size, name in reversed(_UNITS) if longest >= least or size == 1.0)
    with matplotlib.rc_context(style.RC):
        figure = Figure(figsize=(max(6.0, 5.0 * len(sites)), 6.4))
        axes = figure.subplots(2, len(sites), sharey="row", height_ratios=(2.3, 1), squeeze=False)
        for column, name in enumerate(sites):
            ours = [one for one in found if one.site.name == name]
            axes[0, column].set_title(f"{name}: predicted")
            for index, one in enumerate(ours):
                _draw_learners(axes[1, column], one, unit[0], _look(one, ours), index - (len(ours) - 1) / 2)
            for alike in _alike(ours):
                _draw_cost(axes[0, column], alike, unit[0], [_look(one, ours)["color"] for one in alike])
            axes[0, column].set_xlabel("node-hours")
            axes[1, column].set_xlabel(f"time ({unit[1]})")
            axes[0, column].set_xlim(0, 1.24 * max(one.node_s for one in ours) / 3600)
            axes[1, column].set_xlim(left=0, right=1.03 * longest / unit[0])
        axes[0, 0].set_ylabel(f"time ({unit[1]})")
        axes[0, 0].set_ylim(0, 1.1 * longest / unit[0])
        _learner_axis(axes[1, 0], found)
        _legend(figure, axes[0, 0])
        figure.set_layout_engine("constrained")
        figure.supxlabel(_wrapped(caption, 62 * len(sites) + 24), fontsize=8.5, color="#555555")
        return style.save(figure, output)


def _look(one: Prediction, beside: Sequence[Prediction]) -> dict[str, Any]:
    """Schedules of the paper have their own colours."""
    name = one.label.removeprefix("paper-")
    return {"color": style.SCHEDULES[name]} if name in style.SCHEDULES else style.line_style(beside.index(one))


def _alike(found: Sequence[Prediction]) -> list[list[Prediction]]:
    """Those whose points would lie on one another, together."""
    groups = list[list[Prediction]]()
    for one in found:
        for group in groups:
            there = group[0]
            if abs(one.seconds / there.seconds - 1) < _SAME and abs(one.node_s / there.node_s - 1) < _SAME:
                group.append(one)
                break
        else:
            groups.append([one])
    return groups


def _draw_cost(axes: Any, alike: Sequence[Prediction], unit: float, colours: Sequence[str]) -> None:
    """What is held as a full point, what is used as a ring where it is less, with a line between; a point of two halves
    for two that cost the same."""
    one = alike[0]
    y, held, used = one.seconds / unit, one.node_s / 3600, one.used_node_s / 3600
    if used < 0.995 * held:
        axes.plot([used, held], [y, y], color=colours[0], linewidth=1.2, linestyle=(0, (1.5, 1.2)), zorder=2)
        axes.plot(used, y, "o", ms=7, mfc="white", mec=colours[0], mew=1.6, zorder=3)
    half = {"fillstyle": "left", "markerfacecoloralt": colours[-1]} if len(set(colours)) > 1 else {}
    axes.plot(held, y, "o", ms=9, mfc=colours[0], mec="none", ls="", zorder=4, **half)
    label = " and ".join(two.label.removeprefix("paper-") for two in alike)
    axes.annotate(label, (held, y), (7, 4), textcoords="offset points", color=colours[0], fontweight="bold")


def _draw_learners(axes: Any, one: Prediction, unit: float, look: dict[str, Any], place: float) -> None:
    x, y = [0.0], [one.stages[0].forecast.stage.learners]
    for stage in one.stages:
        x.append(x[-1] + stage.seconds / unit)
        y.append(stage.forecast.stage.learners)
    dodged = [count * 2.0 ** (0.07 * place) for count in y]
    axes.step(x, dodged, where="pre", **{"linewidth": 1.7, **look})
    axes.plot(x[-1], dodged[-1], "o", ms=4, color=look["color"])


def _learner_axis(axes: Any, found: Sequence[Prediction]) -> None:
    from matplotlib.ticker import NullLocator

    counts = sorted({stage.forecast.stage.learners for one in found for stage in one.stages})
    axes.set_yscale("log", base=2)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks(counts, [str(count) for count in counts])
    axes.set_ylim(counts[0] / 1.4, counts[-1] * 1.4)
    axes.set_ylabel("learners")


def _legend(figure: Any, axes: Any) -> None:
    from matplotlib.lines import Line2D

    grey = "#555555"
    handles = [
        Line2D([], [], marker="o", ls="", ms=8, color=grey, label="nodes held from start to end"),
        Line2D([], [], marker="o", ls="", ms=7, mfc="white", mec=grey, mew=1.6, label="nodes that host learners only"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=2)


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(line for part in text.splitlines() for line in textwrap.wrap(part, width))
