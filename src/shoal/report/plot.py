"""Figures of runs: what accuracy and loss came to, against what they cost, the learners and ranks below.

`plot_runs` draws any runs against epochs, serial steps and learner-steps. `plot_schedules` draws the
comparison of the paper: its schedules side by side without and with reduction momentum. Seeds of one
config are one line, their mean, in a band of one standard error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import InputError
from shoal.report import curves, style
from shoal.report.compare import cost_to, fraction, over_seeds
from shoal.report.curves import Curve, Points
from shoal.report.runs import Group, Run, group_runs, load_runs
from shoal.report.timeline import draw_timeline

FEW = 3
"""So many runs can be told apart where resizes and ranks are marked too."""
MARKED = 20
"""More resizes than this are not marked in the panels above their own."""
AXES = (("epoch", "epochs"), ("serial_steps", "serial steps"), ("learner_steps", "learner-steps"))


def plot_runs(directories: Iterable[Path], output: Path) -> Path:
    """Accuracy (or test loss, for regression), training loss and learners of runs, and of a few their ranks over time;
    returns the figure's path."""
    import matplotlib
    from matplotlib.figure import Figure

    groups = group_runs(load_runs(directories))
    _check_drawable(groups)
    with matplotlib.rc_context(style.RC):
        few = len(groups) <= FEW
        figure = Figure(figsize=(11, 8.2 if few else 6.6))
        parts: Any = figure.subfigures(2, 1, height_ratios=(6.6, 1.6)) if few else (figure, None)
        upper, lower = parts
        axes = upper.subplots(3, 3, sharex="col", sharey="row", height_ratios=(3, 2.2, 1.1))
        for column, (axis, label) in enumerate(AXES):
            for index, group in enumerate(groups):
                line = style.line_style(index)
                _draw_group(axes[:, column], group, axis, line, _dodge(index, len(groups)))
                if few:
                    _mark_resizes(axes[:2, column], _longest(group), axis, line["color"])
            axes[2, column].set_xlabel(label)
            axes[2, column].set_xlim(left=0)
            if axis != "epoch":
                axes[2, column].xaxis.set_major_formatter(style.thousands)
        _finish_rows(axes[:, 0], groups)
        if lower is not None:
            shown = [(_longest(group), style.line_style(index)["color"]) for index, group in enumerate(groups)]
            draw_timeline(lower.subplots(), shown)
        _legend(upper, axes[0, 0], len(groups))
        _caption(figure, [run for group in groups for run in group.runs])
        return style.save(figure, output)


def plot_schedules(
    groups: Mapping[tuple[str, float], Group],
    output: Path,
    target: float | None = None,
) -> Path:
    """The paper's schedules, a column for each mu: test accuracy and learners against epochs.

    `groups` is as claims.by_schedule gives it. With `target` (a fraction, or a percentage above 1) a row
    of points below gives the serial steps that each schedule took to reach it. Returns the figure's path.
    """
    import matplotlib
    from matplotlib.figure import Figure

    _check_drawable(list(groups.values()))
    momenta = sorted({mu for _, mu in groups})
    heights = [3.2, 1.2] if target is None else [3.2, 1.2, 1.3]
    with matplotlib.rc_context(style.RC):
        figure = Figure(figsize=(max(5.5, 4.8 * len(momenta)), 1.35 * sum(heights) + 0.6))
        axes = figure.subplots(len(heights), len(momenta), sharey="row", height_ratios=heights, squeeze=False)
        for column, mu in enumerate(momenta):
            ours = {name: group for (name, m), group in sorted(groups.items()) if m == mu}
            axes[0, column].set_title(f"reduction momentum μ = {mu:g}")
            _draw_schedules(axes[:2, column], ours)
            if target is not None:
                _draw_cost(axes[2, column], ours, fraction(target))
        _finish_schedules(axes, groups, target)
        _legend(figure, axes[0, 0], len(style.SCHEDULES))
        _caption(figure, [run for group in groups.values() for run in group.runs])
        return style.save(figure, output)


def _draw_group(axes: Any, group: Group, axis: str, line: dict[str, Any], dodge: float) -> None:
    """One group in one column: accuracy, training loss, learners with a dot where they change."""
    seeds = f" ({len(group.runs)} seeds)" if len(group.runs) > 1 else ""
    _band(axes[0], _headline(group, axis), line, group.label + seeds)
    _band(axes[1], curves.curve(group, curves.training_loss, axis), line)
    run = _longest(group)
    x, count = curves.learners(run.rounds, axis)
    axes[2].step(x, count * dodge, where="post", **line)
    before = _resized(run)
    count_before = run.rounds["learners"][before] * dodge
    axes[2].plot(run.rounds[axis][before], count_before, "o", ms=3.5, color=line["color"])


def _finish_rows(axes: Any, groups: Sequence[Group]) -> None:
    accuracy = all(_has_accuracy(group) for group in groups)
    axes[0].set_ylabel("test accuracy (%)" if accuracy else "test loss")
    axes[1].set_ylabel("training loss")
    if accuracy:
        axes[0].set_ylim(*_accuracy_limits([_headline(group, "epoch") for group in groups]))
    low, high = axes[1].get_ylim()
    losses = [curves.curve(group, curves.training_loss, "epoch").mean for group in groups]
    if min((loss.min() for loss in losses if len(loss)), default=0) > 0 and high > 20 * max(low, 1e-12):
        axes[1].set_yscale("log")
    _learner_axis(axes[2], [_longest(group) for group in groups])


def _draw_schedules(axes: Any, groups: Mapping[str, Group]) -> None:
    """One column of plot_schedules: a line a schedule, its end marked; its learners below."""
    order = list(style.SCHEDULES)
    for name, group in groups.items():
        line = {"color": style.SCHEDULES[name]}
        run = _longest(group)
        _band(axes[0], _headline(group, "epoch"), line, f"schedule {name}")
        x, count = curves.learners(run.rounds, "epoch")
        axes[1].step(x, count * _dodge(order.index(name), len(order)), where="post", **line)


def _draw_cost(axes: Any, groups: Mapping[str, Group], target: float) -> None:
    """Serial steps to the target, a row of points a schedule: the mean and one s.e. of the seeds."""
    value = cost_to(target, "serial_steps")
    for name, group in groups.items():
        row, colour = -list(style.SCHEDULES).index(name), style.SCHEDULES[name]
        cost = over_seeds(group.runs, value)
        if cost.n == 0:
            axes.annotate("never", (0, row), (6, 0), textcoords="offset points", va="center", color=colour)
            continue
        error = 0.0 if np.isnan(cost.error) else cost.error
        axes.errorbar(cost.mean, row, xerr=error, fmt="o", color=colour, ms=5.5, capsize=2.5)
        if cost.n < len(group.runs):
            text = f"{cost.n}/{len(group.runs)} seeds"
            axes.annotate(text, (cost.mean + error, row), (7, 0), textcoords="offset points", va="center", fontsize=8)


def _finish_schedules(axes: Any, groups: Mapping[tuple[str, float], Group], target: float | None) -> None:
    axes[0, 0].set_ylabel("test accuracy (%)")
    axes[0, 0].set_ylim(*_accuracy_limits([_headline(group, "epoch") for group in groups.values()]))
    _learner_axis(axes[1, 0], [_longest(group) for group in groups.values()])
    for column in range(axes.shape[1]):
        axes[0, column].sharex(axes[1, column])
        axes[0, column].tick_params(labelbottom=False)
        axes[1, column].set_xlabel("epochs")
        axes[1, column].set_xlim(0, max(_longest(group).rounds["epoch"][-1] for group in groups.values()))
    if target is None:
        return
    measure = next(iter(groups.values())).runs[0].measure
    names = [name for name in style.SCHEDULES if any(name == found for found, _ in groups)]
    rows = [-list(style.SCHEDULES).index(name) for name in names]
    furthest = max(ax.get_xlim()[1] for ax in axes[2])
    axes[2, 0].set_yticks(rows, names)
    axes[2, 0].set_ylim(min(rows) - 0.6, max(rows) + 0.6)
    for column in range(axes.shape[1]):
        axes[2, column].set_xlabel(f"serial steps to {100 * fraction(target):g}% {measure} accuracy")
        axes[2, column].set_xlim(0, furthest)
        axes[2, column].xaxis.set_major_formatter(style.thousands)
        axes[2, column].grid(axis="y", visible=False)


def _band(axes: Any, curve: Curve, line: dict[str, Any], label: str | None = None) -> None:
    """The mean with a band of one standard error, where there is one."""
    axes.plot(curve.x, curve.mean, label=label, **line)
    error = np.nan_to_num(curve.error)
    if error.any():
        low, high = curve.mean - error, curve.mean + error
        axes.fill_between(curve.x, low, high, color=line["color"], alpha=0.18, linewidth=0)


def _headline(group: Group, axis: str) -> Curve:
    """Test accuracy in percent; test loss where there is no accuracy."""
    points: Points = curves.evaluated("test_accuracy" if _has_accuracy(group) else "test_loss")
    curve = curves.curve(group, points, axis)
    scale = 100.0 if _has_accuracy(group) else 1.0
    return Curve(curve.x, scale * curve.mean, scale * curve.error)


def _has_accuracy(group: Group) -> bool:
    return any(np.nan_to_num(run.evaluations["test_accuracy"]).any() for run in group.runs)


def _accuracy_limits(found: Sequence[Curve]) -> tuple[float, float]:
    """From what is reached after the first third of training: before it, every curve is far below."""
    late = [curve.mean[curve.x >= curve.x[-1] / 3] for curve in found if len(curve.x)]
    values = np.concatenate(late) if late else np.array([0.0, 100.0])
    low, high = float(values.min()), float(values.max())
    margin = max(0.06 * (high - low), 0.2)
    return low - margin, min(high + margin, 100.0 + margin / 2)


def _learner_axis(axes: Any, runs: Sequence[Run]) -> None:
    """A log axis with a tick at each number of learners that occurs, thinned to what can be read."""
    from matplotlib.ticker import NullLocator

    counts = np.unique(np.concatenate([run.rounds["learners"] for run in runs]))
    axes.set_yscale("log", base=2)
    axes.yaxis.set_minor_locator(NullLocator())
    shown: list[float] = []
    for count in counts[::-1]:
        if not shown or shown[-1] / count >= 1.4:
            shown.append(float(count))
    axes.set_yticks(shown, [f"{count:g}" for count in shown])
    axes.set_ylim(counts[0] / 1.5, counts[-1] * 1.5)
    axes.set_ylabel("learners")


def _resized(run: Run) -> np.ndarray:
    """The indices of the last rounds before the learners changed."""
    learners = run.rounds["learners"]
    return np.flatnonzero(learners[1:] != learners[:-1])


def _mark_resizes(axes: Any, run: Run, axis: str, colour: str) -> None:
    resized = _resized(run)
    if len(resized) > MARKED:
        return
    for panel in axes:
        for x in run.rounds[axis][resized]:
            panel.axvline(x, color=colour, linewidth=0.9, linestyle=":", alpha=0.7, zorder=0.5)


def _dodge(index: int, count: int) -> float:
    """A factor near 1 that keeps lines on the same number of learners apart (the axis is logarithmic)."""
    return float(2.0 ** (min(0.09, 0.45 / count) * (index - (count - 1) / 2)))


def _longest(group: Group) -> Run:
    """The run that got furthest: all seeds have the same learners as far as they go."""
    return max(group.runs, key=lambda run: len(run.rounds["epoch"]))


def _legend(figure: Any, axes: Any, entries: int) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = min(entries, 5 if max(map(len, labels)) < 24 else 3)
        figure.legend(handles, labels, loc="outside upper center", ncols=columns)


def _caption(figure: Any, runs: Sequence[Run]) -> None:
    """The data sets, and what the lines are, below the figure; lays the figure out."""
    data = "; ".join(dict.fromkeys(run.caption for run in runs if run.caption))
    seeds = len({run.seed for run in runs})
    parts = [data, f"Lines: mean over {seeds} seeds, bands: ± 1 s.e." if seeds > 1 else ""]
    figure.set_layout_engine("constrained")
    figure.supxlabel(". ".join(part for part in parts if part), fontsize=9, color="#555555")


def _check_drawable(groups: Sequence[Group]) -> None:
    if not groups:
        raise InputError("there are no runs to draw; give the directories of some")
    for group in groups:
        for run in group.runs:
            if not len(run.rounds["epoch"]):
                raise InputError(f"the run in {run.directory} has no round yet; wait for its first, or leave it out")
