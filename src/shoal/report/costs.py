"""Predictions as tables, and what must be said beside them: the parameters' origin, and the error that was seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.report.predict import KINDS, Load, Prediction, Stage

if TYPE_CHECKING:
    from rich.console import RenderableType

_STAGES = (
    "from epoch", "learners", "ranks", "nodes", "rounds", "algorithm", "steps ms", "wait ms", "reduction ms",
    "round ms", "resize ms", "time", "efficiency %",
)  # fmt: skip
_SCHEDULES = (
    "schedule", "learners", "ranks", "nodes", "time", "efficiency %", "learner-steps", "rank-h allocated",
    "rank-h busy", "node-h held", "node-h used",
)  # fmt: skip


def stage_table(found: Prediction) -> RenderableType:
    """What each stage of a schedule would take."""
    from rich.table import Table

    table = Table(title=f"predicted: {found.label} on {found.site.name}", title_justify="left")
    for name in _STAGES:
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for stage in found.stages:
        table.add_row(*_stage(stage))
    return table


def schedule_table(found: Sequence[Prediction]) -> RenderableType:
    """A row a schedule, or a number of ranks."""
    from rich.table import Table

    title = f"predicted, on {', '.join(dict.fromkeys(one.site.name for one in found))}"
    several = len({one.site.name for one in found}) > 1
    table = Table(title=title, title_justify="left")
    for name in (["machine"] if several else []) + list(_SCHEDULES):
        table.add_column(name, justify="left" if name in ("schedule", "machine") else "right")
    for one in found:
        table.add_row(*([one.site.name] if several else []), *_whole(one))
    return table


def residual_table(rows: Sequence[dict[str, Any]]) -> RenderableType:
    """Measured and fitted times, row by row."""
    from rich.table import Table

    table = Table(title="fitted to what was measured", title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="left" if name in ("file", "algorithm") else "right")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    return table


def totals(found: Prediction) -> str:
    """One line."""
    nodes = f"{found.nodes} node{'s' * (found.nodes != 1)}"
    return (
        f"predicted in all: {duration(found.seconds)} on {found.ranks} ranks, {nodes}; efficiency "
        f"{100 * found.efficiency:.1f}%; {found.learner_steps:,} learner-steps, rank-hours "
        f"{hours(found.seconds * found.ranks)} allocated and {hours(found.busy_s)} busy, node-hours "
        f"{hours(found.node_s)} held and {hours(found.used_node_s)} used"
    )


def origin(found: Prediction, load: Load) -> str:
    """Where the figures are from, and how far they may be off."""
    site = found.site
    return (
        f"All of it is predicted, nothing was run. {KINDS[site.kind]} on {site.name}: {site.buffers.origin}; "
        f"{validated(found)}. A step of {load.batch} samples takes {1e3 * load.step_s:g} ms, and varies by "
        f"{100 * site.network.jitter:g}%; {site.per_node} ranks a node; {load.numbers:,} numbers are reduced. "
        "Evaluations, checkpoints and the start of the job are not in it."
    )


def validated(found: Prediction) -> str:
    """What was seen of the error of such reductions."""
    library = any(stage.round.algorithm.endswith("library") for stage in found.stages)
    error = found.site.buffers.error
    if library and error is not None:
        return f"its allreduce was off by {100 * error:.2g}% (median) at scales left out of the fit"
    if library:
        return "not validated there"
    return "shoal's own algorithms from these links: not validated there"


def duration(seconds: float) -> str:
    """12.3 s, 4 min 05 s, 2 h 07 min."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def hours(seconds: float) -> str:
    """Three digits."""
    value = seconds / 3600
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _stage(stage: Stage) -> list[str]:
    planned, now = stage.forecast.stage, stage.round
    busy = stage.busy_s / (stage.seconds * stage.ranks)
    return [
        f"{float(planned.epoch):g}",
        str(planned.learners),
        str(stage.ranks),
        str(stage.nodes),
        f"{stage.forecast.rounds:,}",
        now.algorithm,
        *(f"{1e3 * part:.3g}" for part in (now.steps_s, now.wait_s, now.reduction_s, now.seconds, stage.resize_s)),
        duration(stage.seconds),
        f"{100 * busy:.1f}",
    ]


def _whole(one: Prediction) -> list[str]:
    learners = [stage.forecast.stage.learners for stage in one.stages]
    return [
        one.label,
        " > ".join(map(str, learners)),
        str(one.ranks),
        str(one.nodes),
        duration(one.seconds),
        f"{100 * one.efficiency:.1f}",
        f"{one.learner_steps:,}",
        *(hours(part) for part in (one.seconds * one.ranks, one.busy_s, one.node_s, one.used_node_s)),
    ]
