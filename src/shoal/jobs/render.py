"""The text of a batch script: a head made for the job, and a body that is the same for all.

    directives      what the scheduler reads
    #: ...          the JobSpec, so that `parse` and `render` make the same script again
    settings        run, python, after_limit, max_links, max_restarts
    functions       environment, stage, preflight, launch, end_time, go_on, preempted, give_back
    body.sh         waits, forwards the warning, and sees to it that the run goes on

Pure functions of a Batch: nothing here needs MPI, a cluster or a GPU.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import ModuleType

import msgspec

from shoal import config as configs
from shoal.errors import InputError
from shoal.jobs import launchers, local, lsf, slurm
from shoal.jobs.machine import load
from shoal.jobs.spec import Batch, JobSpec, place

SCHEDULERS: dict[str, ModuleType] = {"slurm": slurm, "lsf": lsf, "local": local}
BODY = Path(__file__).with_name("body.sh")
SCRIPT = "job.sh"
"""its name in the run directory"""
_MARK = "#: "


def render(batch: Batch) -> str:
    """The script. Raises InputError for a directive that cannot stand there."""
    blocks = [
        ["#!/bin/bash", *_directives(batch)],
        ["#", f"# For {' '.join(batch.machine.about.split())}.", *_spec_lines(batch.spec)],
        _settings(batch),
        _function("environment", _environment(batch)),
        _function("stage", _stage(batch)),
        _function("preflight", launchers.preflight(batch)),
        _function("launch", _launch(batch)),
        SCHEDULERS[batch.machine.scheduler].functions(batch),
    ]
    head = "\n".join("\n".join([*block, *([""] if at else [])]) for at, block in enumerate(blocks))
    return f"{head}\n{BODY.read_text(encoding='utf-8')}"


def parse(text: str, source: str) -> Batch:
    """The job that a script was made of. Raises InputError if it was not made by shoal."""
    spec = read_spec(text, source)
    return place(load(spec.machine), spec)


def read_spec(text: str, source: str) -> JobSpec:
    """`parse` without the machine, whose file may be gone since. Raises InputError."""
    lines = [line.removeprefix(_MARK) for line in text.splitlines() if line.startswith(_MARK)]
    if not lines:
        raise InputError(f"{source} was not made by shoal render: it has no lines that begin with {_MARK!r}")
    try:
        return configs.convert(configs.parse_toml("\n".join(lines)), JobSpec, source)
    except ValueError as error:
        raise InputError(
            f"{source}: the lines that begin with {_MARK!r} are no TOML: {error}; render it again"
        ) from None


def scheduler_of(text: str) -> ModuleType:
    """The one that reads the directives of a script."""
    return next((module for module in SCHEDULERS.values() if f"\n{module.PREFIX} " in text), local)


def _directives(batch: Batch) -> list[str]:
    """The scheduler's own, without those to skip, and the user's."""
    scheduler, spec = SCHEDULERS[batch.machine.scheduler], batch.spec
    made = scheduler.directives(batch)
    options = [option for line in made for option in _options(line)]
    for option in spec.skip:
        if option not in options:
            raise InputError(f"{option} cannot be skipped, since it is not in the script; it has {', '.join(options)}")
    kept = [line for line in made if not set(_options(line)) & set(spec.skip)]
    same = scheduler.SAME
    taken = {same.get(option, option): option for line in kept for option in _options(line)}
    for line in spec.directives:
        if clash := [taken[name] for option in _options(line) if (name := same.get(option, option)) in taken]:
            raise InputError(
                f"the directive {line!r} stands in the script already; skip {clash[0]}, or change it there"
            )
    return [f"{scheduler.PREFIX} {line}" for line in (*kept, *spec.directives)]


def _options(line: str) -> list[str]:
    """The options that a directive sets: -wa and -wt share a line."""
    return re.findall(r"(?:^|(?<= ))--?[A-Za-z][\w-]*", re.sub(r'"(\\.|[^"\\])*"', '""', line))


def _spec_lines(spec: JobSpec) -> list[str]:
    import tomli_w

    lines = tomli_w.dumps(msgspec.to_builtins(spec)).splitlines()
    return ["# Written by `shoal render`, from:", *(_MARK + line for line in lines)]


def _settings(batch: Batch) -> list[str]:
    spec, disk = batch.spec, batch.machine.staging.folder
    python = '"$staged/bin/python"' if spec.stage else shlex.quote(spec.python)
    return [
        f"run={shlex.quote(spec.out)}",
        *([f"staged={_expanded(f'{disk}/shoal-environment')}"] if spec.stage else []),
        f"python={python}",
        f"after_limit={spec.after_limit}",
        f"max_links={spec.max_links}",
        f"max_restarts={spec.max_restarts}",
    ]


def _environment(batch: Batch) -> list[str]:
    machine, spec = batch.machine, batch.spec
    variables = {
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(spec.threads)),
        "PYTHONUNBUFFERED": "1",
        "HDF5_USE_FILE_LOCKING": "FALSE",
    }
    if spec.gpus_per_rank:
        variables["CUPY_CACHE_DIR"] = "/tmp/shoal-cupy-$USER"
    if machine.launch.program == "srun":
        variables["SRUN_CPUS_PER_TASK"] = str(spec.cores_per_rank)
    variables |= machine.environment
    return [
        *(f"module load {shlex.quote(name)} || return 1" for name in machine.modules),
        *machine.setup,
        *spec.setup,
        *(f"export {name}={_expanded(value)}" for name, value in variables.items()),
    ]


def _stage(batch: Batch) -> list[str]:
    """The archive is unpacked once on each node; the launcher passes the worst exit status on."""
    if not batch.spec.stage:
        return [":"]
    unpack = f'tar -xf {shlex.quote(batch.spec.stage)} --recursive-unlink --one-top-level="$staged"'
    return [_broken([*launchers.once_a_node(batch), unpack])]


def _launch(batch: Batch) -> list[str]:
    reason = ["# a rank that dies must not end the others: they go on without it"] if batch.spec.recovery else []
    return [*reason, _broken(launchers.command(batch))]


def _broken(words: list[str]) -> str:
    """One command, a word a line."""
    return " \\\n    ".join(words)


def _function(name: str, lines: list[str]) -> list[str]:
    return [f"{name}() {{", *(f"  {line}" for line in lines), "}"]


def _expanded(text: str) -> str:
    """A word in which the shell still replaces $NAME."""
    if re.fullmatch(r"[\w.,:@%+=/-]+", text, re.ASCII):
        return text
    return '"' + re.sub(r'(["\\`])', r"\\\1", text) + '"'
