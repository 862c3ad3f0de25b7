"""The dry run of a config: what training would do, as a table. Trains nothing, needs neither MPI nor a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.comm.tree import blocks
from shoal.config import Config
from shoal.data.sets import DataSet
from shoal.elastic.plan import effective_step, forecast, make_plan, warnings
from shoal.elastic.schedule import Schedule

if TYPE_CHECKING:
    from rich.console import RenderableType

_COLUMNS = (
    "from epoch", "learners", "ranks", "steps K", "batch", "P*B", "mu", "rounds", "rate", "effective step",
    "serial steps", "learner-steps",
)  # fmt: skip


def forecast_table(config: Config, data: DataSet, world: int) -> list[RenderableType]:
    """What to print for a job of `world` ranks; 0: as many as there are learners at most. Raises InputError."""
    from rich.table import Table

    plan = make_plan(config, len(data.train))
    rows = forecast(plan, config)
    world = world or max(row.stage.learners for row in rows)
    table = Table(title=f"{config.name}: schedule {Schedule.of(config)}", title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        stage = row.stage
        rates = dict.fromkeys(f"{rate:.4g}" for rate in row.rates)
        steps = dict.fromkeys(f"{effective_step(config, stage, rate):.3g}" for rate in row.rates)
        table.add_row(
            f"{float(stage.epoch):g}",
            str(stage.learners),
            str(len(blocks(stage.learners, world))),
            str(stage.steps),
            str(stage.batch),
            str(stage.learners * stage.batch),
            f"{stage.momentum:g}",
            str(row.rounds),
            " .. ".join(rates),
            " .. ".join(steps),
            f"{row.serial_steps:,}",
            f"{row.learner_steps:,}",
        )
    beyond = rows[-1].consumed - plan.end
    totals = (
        f"{sum(row.rounds for row in rows):,} rounds, {sum(row.serial_steps for row in rows):,} serial steps, "
        f"{sum(row.learner_steps for row in rows):,} learner-steps on up to {world} ranks; {config.train.epochs:g} "
        f"epochs of {plan.samples:,} samples ({data.caption}), the last round takes {beyond} samples beyond"
    )
    return [table, totals, *(f"warning: {text}" for text in warnings(plan))]
