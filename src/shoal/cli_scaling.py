"""The commands that predict and measure how training scales."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from shoal.cli_options import FILE, Counts, brace, costs, set_option


@click.command()
@set_option
@costs
@click.option("--ranks", type=Counts(), default=(), metavar="LIST", help="Jobs of so many ranks, e.g. 6,24,96.")
@click.option("--weak", is_flag=True, help="With --ranks: a learner a rank, instead of the schedule.")
@click.option(
    "--schedules", default="", metavar="LIST", help="Schedules by name, e.g. paper-I,paper-II; paper: all five."
)
@click.option("-o", "--output", type=FILE, help="A figure of time against node-hours.")
@click.argument("machine")
@click.argument("config", type=FILE)
def predict(machine: str, config: Path, schedules: str, **options: Any) -> None:
    """What CONFIG would take and cost on MACHINE, or on several by commas. Runs nothing."""
    from shoal.jobs import predictions

    wanted = predictions.named_schedules(schedules)
    _show(*predictions.tables(machine, config, predictions.Options(schedules=wanted, **options)))


@click.command()
@click.option("-o", "--output", type=FILE, required=True, help="The machine file to write (.toml).")
@click.option("--base", type=FILE, help="A machine file whose other tables are taken over.")
@click.option("--link-gbit", type=click.FloatRange(0, min_open=True), help="Write it for a link of this rate.")
@click.argument("benches", nargs=-1, required=True, type=FILE, metavar="BENCH.jsonl...")
def calibrate(benches: tuple[Path, ...], output: Path, base: Path | None, link_gbit: float | None) -> None:
    """Fit a machine's [network] to files of shoal bench scaling; prints what was fitted and how far each row is off."""
    from shoal.report import calibrate as fits
    from shoal.report.costs import residual_table

    found = fits.calibrate(fits.points(benches))
    fits.write(found, output, base, link_gbit)
    values = ", ".join(f"{name} = {value:.4g}" for name, value in found.values.items())
    summary = f"{len(found.points)} rows, {fits.describe_errors(found.errors)}; wrote {output}"
    _show(residual_table(fits.residuals(found)), values, summary)


def _show(*parts: Any) -> None:
    """Tables and lines, once all of them are there."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    for part in parts:
        console.print(part)


@click.group()
def bench() -> None:
    """What a step takes, and how training scales, measured here."""


@bench.command()
@set_option
@click.option("--repeats", type=click.IntRange(1), default=9, show_default=True, help="Rounds that are timed.")
@click.option("-o", "--output", type=FILE, help="A file for the header and the row, for shoal predict --step.")
@click.argument("config", type=FILE)
def step(config: Path, overrides: tuple[str, ...], repeats: int, output: Path | None) -> None:
    """The time of one learner's step, alone on this process; median with an interval."""
    from shoal.config import load
    from shoal.report.load import bench_step

    click.echo(bench_step(load(config, overrides), repeats, output))


@bench.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.option("-n", "ranks", type=click.IntRange(1))
@click.option("--ulfm", is_flag=True)
@click.option("--mpiexec", "extra", multiple=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def scaling(arguments: tuple[str, ...], ranks: int | None, ulfm: bool, extra: tuple[str, ...]) -> int:
    """Strong and weak scaling of a config in one job, by resizing; -h says more."""
    from shoal.jobs import start

    path = start.bench_script("scaling")
    if ranks or {"-h", "--help"} & {*arguments}:
        return start.start(path, start.Options(ranks or 1, ulfm, extra, arguments=arguments))
    brace()
    from shoal.jobs import rank

    return rank.script(path, arguments, None)
