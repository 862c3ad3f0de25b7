"""The commands. Each gathers its options and calls one function of the room that does the work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

import shoal
from shoal import cli_scaling, errors
from shoal.cli_options import FILE, brace, costs, set_option

_out = click.option("--out", type=FILE, help="The run directory. Default: runs/NAME.")
_resume = click.option("--resume", is_flag=True, help="Go on with the run that the directory holds, if it holds one.")


class _Starting(click.Command):
    """Options may stand behind a config; behind a script (.py) all words are the script's own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = False
        values, _, _ = self.make_parser(ctx).parse_args(list(args))
        ctx.allow_interspersed_args = not str(values.get("target")).endswith(".py")
        return super().parse_args(ctx, args)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(shoal.__version__, prog_name="shoal")
def commands() -> None:
    """Elastic data-parallel training on MPI ranks."""


def main() -> NoReturn:
    """The entry point: bad input is one sentence and exit status 2."""
    try:
        sys.exit(commands(standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        sys.exit(errors.BAD_INPUT)
    except click.ClickException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "shoal")
        click.echo(f"shoal: {error.format_message().rstrip('.')}; see {command} --help", err=True)
        sys.exit(errors.BAD_INPUT)
    except click.Abort:
        sys.exit(130)
    except errors.ShoalError as error:
        click.echo(f"shoal: {error}", err=True)
        sys.exit(error.status)


@commands.command(cls=_Starting)
@click.option("-n", "ranks", type=click.IntRange(1), default=1, show_default=True, help="Ranks to start.")
@click.option("--ulfm", is_flag=True, help="Open MPI: start with fault tolerance.")
@click.option("--mpiexec", "extra", multiple=True, metavar="ARG", help="One more argument for mpiexec.")
@set_option
@_out
@_resume
@click.option("--restarts", type=click.IntRange(0), default=0, help="Resume so often if the job ends before the run.")
@click.argument("target", type=FILE)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(
    target: Path, ranks: int, ulfm: bool, extra: tuple[str, ...], overrides: tuple[str, ...], out: Path | None,
    resume: bool, restarts: int, arguments: tuple[str, ...],
) -> int:  # fmt: skip
    """Start TARGET on N ranks: a config or a sweep (.toml), or a script of yours (.py ARGUMENTS...)."""
    from shoal.jobs import start

    return start.start(target, start.Options(ranks, ulfm, extra, overrides, out, resume, restarts, arguments))


@commands.command()
@set_option
@_out
@_resume
@click.option("--width", type=int, default=0, hidden=True)
@click.option("--joins", is_flag=True, hidden=True)
@click.argument("config", type=FILE)
def train(config: Path, overrides: tuple[str, ...], out: Path | None, resume: bool, width: int, joins: bool) -> None:
    """Be one rank of a run; mpiexec, srun or jsrun starts `python -m shoal train CONFIG`."""
    brace()
    from shoal.jobs import rank

    if joins:
        rank.join(config, overrides, out, width)
    rank.train(config, overrides, out, resume, width)


@commands.command(cls=_Starting)
@click.option("--stop-file", type=FILE, hidden=True)
@click.argument("target", type=FILE, metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def script(target: Path, arguments: tuple[str, ...], stop_file: Path | None) -> None:
    """Be one rank of a script that uses the Python API."""
    brace()
    from shoal.jobs import rank

    rank.script(target, arguments, stop_file)


@commands.command()
@click.option("-n", "ranks", type=click.IntRange(1), help="Start so many ranks; left out: be a rank of this job.")
@_out
@click.argument("path", type=FILE, metavar="SWEEP")
def sweep(path: Path, ranks: int | None, out: Path | None) -> int:
    """A grid of configs and seeds, packed on the ranks; goes on where it was interrupted."""
    if ranks:
        from shoal.jobs import start

        return start.start_sweep(path, ranks, out)
    brace()
    from shoal.jobs import rank

    return rank.sweep(path, out)


@commands.command()
@click.option("--learners", type=click.IntRange(0), help="So many learners from now on; 0: as the schedule says.")
@click.argument("directory", type=FILE)
@click.argument("ranks", type=click.IntRange(0), required=False)
def resize(directory: Path, ranks: int | None, learners: int | None) -> None:
    """Let the run that is at work in DIRECTORY go on with RANKS ranks at most; 0: with all.

    Ranks never change the result. Learners do: the log says when."""
    from shoal.jobs.start import ask_to_resize

    ask_to_resize(directory, ranks, learners)


@commands.command()
@set_option
@click.option("-n", "ranks", type=click.IntRange(1), help="Ranks of the job. Default: as many as learners at most.")
@click.option("--machine", help="Also the predicted cost of each stage there.")
@costs
@click.argument("config", type=FILE)
def schedule(config: Path, overrides: tuple[str, ...], ranks: int | None, machine: str | None, **given: Any) -> None:
    """The dry run: stages, rounds, rates, steps and ranks. Trains nothing."""
    from rich.console import Console

    from shoal.config import load
    from shoal.data.sets import open_set
    from shoal.report.forecast import forecast_table

    options = load(config, overrides)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for part in forecast_table(options, open_set(options.data, options.seed), ranks or 0):
        console.print(part)
    if machine is not None:
        from shoal.jobs import predictions

        for part in predictions.schedule_costs(machine, options, predictions.Options(ranks=[ranks or 0], **given)):
            console.print(part)


@commands.command()
@click.option("-o", "--output", type=FILE, required=True, help="The figure to write (.png, .pdf, .svg).")
@click.option("--schedules", is_flag=True, help="Schedules paper-I .. paper-V: a column for each mu.")
@click.option("--target", type=float, help="With --schedules: also the serial steps to this accuracy, e.g. 0.97.")
@click.option("--scaling", is_flag=True, help="Files of shoal bench scaling: throughput and efficiency against ranks.")
@click.argument("directories", nargs=-1, required=True, type=FILE)
def plot(directories: tuple[Path, ...], output: Path, schedules: bool, target: float | None, scaling: bool) -> None:
    """Accuracy and loss against epochs, serial steps and learner-steps; learners below."""
    from shoal.report.claims import by_schedule
    from shoal.report.plot import plot_runs, plot_schedules
    from shoal.report.plot_scaling import plot_scaling
    from shoal.report.runs import group_runs, load_runs

    if scaling:
        written = plot_scaling(directories, output)
    elif schedules:
        written = plot_schedules(by_schedule(group_runs(load_runs(directories))), output, target)
    else:
        written = plot_runs(directories, output)
    click.echo(f"wrote {written}")


@commands.command()
@click.option("--target", type=float, help="Also the cost to this accuracy, e.g. 0.97.")
@click.option("--format", "style", type=click.Choice(["table", "markdown", "json"]), default="table")
@click.option("--claims", is_flag=True, help="Which of the paper's claims hold (schedules paper-I .. paper-V).")
@click.argument("directories", nargs=-1, required=True, type=FILE)
def compare(directories: tuple[Path, ...], target: float | None, style: str, claims: bool) -> None:
    """Runs side by side, over seeds: accuracy, cost, cost to a target."""
    from shoal.report import tables
    from shoal.report.claims import by_schedule, check
    from shoal.report.compare import rows
    from shoal.report.runs import group_runs, load_runs

    groups = group_runs(load_runs(directories))
    table = rows(groups, target)
    if style == "table":
        tables.show(table, sys.stdout)
    else:
        click.echo((tables.markdown if style == "markdown" else tables.as_json)(table))
    if claims:
        click.echo("\n" + "\n".join(map(str, check(by_schedule(groups), target))))


@commands.command()
@click.option(
    "-o", "--output", type=FILE, required=True, help="model.npz, model.safetensors or model.pt (a state_dict)"
)
@click.argument("directory", type=FILE)
def export(directory: Path, output: Path) -> None:
    """The trained parameters by name, from a run's newest checkpoint."""
    from shoal.report.export import export as write

    click.echo(f"wrote {write(directory, output, lambda text: click.echo(f'warning: {text}', err=True))}")


@commands.command()
@click.argument("directory", type=FILE)
def digest(directory: Path) -> None:
    """sha256 of the anchor and the velocity of a run's newest checkpoint."""
    from shoal.report.export import digest as compute

    click.echo(compute(directory))


@commands.command()
@click.option("--root", type=FILE, default=Path("data"), show_default=True, help="Where to unpack.")
@click.argument("name", type=click.Choice(["cifar10"]))
def data(name: str, root: Path) -> None:
    """Download a data set from its official site, with a checksum."""
    from shoal.data.download import fetch_cifar10

    click.echo(f"{name} is in {fetch_cifar10(root)}")


_JOB = (
    click.argument("machine"),
    click.argument("config", type=FILE),
    set_option,
    _out,
    click.option("-n", "--ranks", type=click.IntRange(1), help="Default: as many as learners at most."),
    click.option("--learners-per-rank", type=click.IntRange(1), default=1, help="To start fewer ranks than learners."),
    click.option("--ranks-per-node", type=click.IntRange(1), help="Default: one a device, or one a core."),
    click.option("--cores-per-rank", type=click.IntRange(1), help="Default: a device's share, or run.threads."),
    click.option("--gpus-per-rank", type=click.IntRange(0), help="Default: 1 where there are any."),
    click.option("-t", "--time", help="90m, 2h, 1d12h, 1:30:00. Default: 1h; local: no limit."),
    click.option("--grace", help="The warning comes so long before the limit. Default: 4m."),
    click.option("--signal", type=click.Choice(["USR1", "USR2", "URG"]), help="The warning. Default: USR2."),
    click.option("--after-limit", type=click.Choice(["none", "requeue", "chain"]), help="How to go on. Default: none."),
    click.option("--max-links", type=click.IntRange(0), help="How often. Default: 10."),
    click.option("--max-restarts", type=click.IntRange(0), help="Of the ranks in one job, after 75. Default: 2."),
    click.option(
        "--recovery", is_flag=True, default=None, help="Ranks outlive a rank: the launcher must not end them."
    ),
    click.option("--bench", type=click.Choice(["scaling"]), help="Instead of training, how it scales."),
    click.option("--name", help="Of the job. Default: the config's."),
    click.option("-A", "--account"),
    click.option("-q", "--queue", help="Or partition."),
    click.option("--qos"),
    click.option("-C", "--constraint"),
    click.option("--reservation"),
    click.option("--launcher", type=click.Choice(["srun", "jsrun", "mpiexec"]), help="Instead of the machine's."),
    click.option("--mpi", "plugin", help="srun --mpi=, instead of the machine's."),
    click.option("--stage", help="A .tar of the Python environment, unpacked on each node's own disk."),
    click.option("--python", default=sys.executable, help="The interpreter there. Default: the one that runs this."),
    click.option("--directive", "directives", multiple=True, help="One more, e.g. --mail-type=END."),
    click.option("--skip", multiple=True, help="An option to leave out, e.g. --signal."),
    click.option("--setup", multiple=True, help="A shell line, after the modules are loaded."),
)
"""The arguments and options of a batch job: fields of a Layout and a JobSpec."""


def _job(command: Callable[..., None]) -> Callable[..., None]:
    for decorate in reversed(_JOB):
        command = decorate(command)
    return command


@commands.command()
@_job
def render(**options: Any) -> None:
    """Print the batch script that trains CONFIG on MACHINE: a name, or a file (./mine.toml)."""
    from shoal.jobs.spec import ask
    from shoal.jobs.submit import script_of

    click.echo(script_of(ask(**options)), nl=False)


@commands.command()
@_job
def submit(**options: Any) -> None:
    """Write that script to the run directory, submit it, and print the job's id."""
    from shoal.jobs.spec import ask
    from shoal.jobs.submit import submit as send

    click.echo(send(ask(**options)))


@commands.command()
@click.argument("directory", type=FILE)
def status(directory: Path) -> None:
    """What the scheduler says of the job in a run directory, and how far the run is."""
    from shoal.jobs.submit import status as lines

    for line in lines(directory):
        click.echo(line)


@commands.command()
@click.argument("directory", type=FILE)
def cancel(directory: Path) -> None:
    """End the job in a run directory; its ranks save a checkpoint if the scheduler leaves them the time."""
    from shoal.jobs.submit import cancel as end

    click.echo(end(directory))


@commands.command()
@click.option("--mpi", "plugin", default="", help="As srun has it. Default: the site's.")
def preflight(plugin: str) -> None:
    """Whether srun and mpi4py's MPI understand each other; batch scripts ask before they start ranks."""
    from shoal.jobs.preflight import check_srun

    click.echo(check_srun(plugin))


@commands.command()
def info() -> None:
    """MPI, backend, kernels, threads, devices: what is used and why."""
    from shoal.jobs import start

    for line in start.info():
        click.echo(line)


for _command in (cli_scaling.predict, cli_scaling.calibrate, cli_scaling.bench):
    commands.add_command(_command)
