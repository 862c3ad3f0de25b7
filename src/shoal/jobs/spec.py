"""What a batch job is asked to be, and how that lies on a machine's nodes.

A JobSpec is what the user wants, all of it: the script carries it as comments, so that the script can be made again
from itself. `place` puts it on a machine; a job that does not fit is refused there, before anything is submitted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shoal import config as configs
from shoal.elastic.schedule import Schedule
from shoal.errors import InputError
from shoal.jobs.machine import LINE_END, Machine, Node, check, load
from shoal.jobs.times import lsf_minutes, parse_time

TIME_S, GRACE_S = 3600, 240
MIN_GRACE_S = 60
"""Slurm may warn up to a minute early, and LSF counts in minutes."""


class JobSpec(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One job. The defaults are what goes without saying in a script."""

    machine: str
    config: str
    out: str
    """the run directory"""
    overrides: tuple[str, ...] = ()
    """section.key=value"""
    bench: Literal["", "scaling"] = ""
    """what is measured instead of a training: bench/scaling.py"""
    name: str
    ranks: int
    ranks_per_node: int
    cores_per_rank: int
    gpus_per_rank: int = 0
    threads: int = 1
    """of each rank's BLAS"""
    time_s: int = 0
    """0: no limit, on this machine only"""
    grace_s: int = GRACE_S
    """the warning comes so long before the limit"""
    signal: Literal["USR1", "USR2", "URG"] = "USR2"
    after_limit: Literal["none", "requeue", "chain"] = "none"
    max_links: int = 10
    """how often a job may go on after its limit"""
    max_restarts: int = 2
    """how often ranks are started again in the same job, after status 75"""
    recovery: bool = False
    """the run outlives a rank, so the launcher must not end it"""
    give_back_nodes: bool = False
    """release nodes that the run needs no more, and start the ranks again on the others"""
    account: str = ""
    queue: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    stage: str = ""
    """an archive (.tar, .tar.gz) of the Python environment, unpacked on each node's own disk"""
    python: str = "python3"
    """the interpreter that has shoal; inside `stage`: bin/python"""
    directives: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    """options of the scheduler to leave out, e.g. --signal"""
    setup: tuple[str, ...] = ()
    launcher: Literal["", "srun", "jsrun", "mpiexec"] = ""
    """instead of the machine's"""
    plugin: str = ""
    """srun --mpi=, instead of the machine's"""


@dataclass(frozen=True)
class Batch:
    """A job on a machine: all that its script is made of."""

    machine: Machine
    spec: JobSpec

    @property
    def nodes(self) -> int:
        """As few as hold the ranks."""
        return -(-self.spec.ranks // self.spec.ranks_per_node)

    @property
    def gpus_per_node(self) -> int:
        """Devices that the ranks of a full node use."""
        return self.spec.gpus_per_rank * self.spec.ranks_per_node


@dataclass(frozen=True)
class Layout:
    """What the user said of ranks and nodes; None leaves it to the config and the machine."""

    ranks: int | None = None
    learners_per_rank: int = 1
    ranks_per_node: int | None = None
    cores_per_rank: int | None = None
    gpus_per_rank: int | None = None


def ask(machine: str, config: Path, out: Path | None = None, **chosen: Any) -> Batch:
    """The job that trains a config on a machine, from the options of `shoal render`; None leaves one to its default.

    `chosen` are fields of a Layout and of a JobSpec, with time and grace as texts. Raises InputError."""
    given = {name: value for name, value in chosen.items() if value is not None}
    for name in ("time", "grace"):
        if name in given:
            given[f"{name}_s"] = parse_time(given.pop(name))
    layout = Layout(**{field.name: given.pop(field.name) for field in fields(Layout) if field.name in given})
    profile, settings = load(machine), configs.load(config, given.get("overrides", ()))
    learners = max(stage.learners for stage in Schedule.of(settings).stages)
    threads = settings.run.threads
    defaults = {
        "name": settings.name,
        "time_s": 0 if profile.scheduler == "local" else TIME_S,
        "queue": profile.request.queue,
        "give_back_nodes": settings.run.give_back_nodes and profile.scheduler == "slurm",
    }
    paths = {"config": _path(config), "out": _path(out or configs.default_directory(settings))}
    made = {"machine": machine, "threads": threads, **paths, **_laid_out(profile.node, layout, learners, threads)}
    return place(profile, JobSpec(**{**defaults, **given, **made}))


def place(machine: Machine, spec: JobSpec) -> Batch:
    """The job on the machine, or InputError if it does not fit there."""
    launch = machine.launch
    if spec.launcher:
        launch = replace(launch, program=spec.launcher, options=())
    if spec.plugin:
        launch = replace(launch, plugin=spec.plugin)
    batch = Batch(replace(machine, launch=launch), spec)
    check(batch.machine, f"{spec.machine} with launcher {launch.program}")
    _check_texts(spec)
    _check_layout(batch)
    _check_time(batch)
    _check_scheduler(batch)
    return batch


def _path(path: Path) -> str:
    """No word that begins with a dash, which commands would take for an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def _laid_out(node: Node, layout: Layout, learners: int, threads: int) -> dict[str, int]:
    """A device a rank where there are any, with its share of the cores; else as many ranks as cores."""
    gpus = min(1, node.gpus) if layout.gpus_per_rank is None else layout.gpus_per_rank
    per_device = node.cores * gpus // node.gpus if gpus and node.gpus else threads
    per_node = (
        layout.ranks_per_node or (node.gpus // gpus if gpus else node.cores // (layout.cores_per_rank or threads)) or 1
    )
    ranks = -(-learners // layout.learners_per_rank) if layout.ranks is None else layout.ranks
    cores = layout.cores_per_rank or max(1, min(per_device, node.cores // per_node))
    return {"ranks": ranks, "ranks_per_node": min(per_node, ranks), "cores_per_rank": cores, "gpus_per_rank": gpus}


def _refuse(broken: bool, sentence: str) -> None:
    if broken:
        raise InputError(sentence)


def _check_texts(spec: JobSpec) -> None:
    for name, value in msgspec.to_builtins(spec).items():
        for text in value if isinstance(value, (list, tuple)) else [value]:
            control = isinstance(text, str) and re.search(LINE_END, text)
            _refuse(
                bool(control),
                f"{name} = {text!r} has a control character, a line end or no UTF-8, which no line can hold; leave "
                "it out",
            )
    _refuse(
        "%" in spec.out or "\\" in spec.out,
        f"the run directory {spec.out} has a % or a \\, which schedulers replace in the name of a log; take another",
    )
    for option, word in (("--name", spec.name), ("--python", spec.python)):
        _refuse(not word, f"{option} is empty, and a job needs one; give it or leave the option out")
    for line in spec.directives:
        _refuse(
            not re.match(r"--?[A-Za-z]", line),
            f"the directive {line!r} does not begin with an option; write it as e.g. --mail-type=END",
        )


def _check_layout(batch: Batch) -> None:
    machine, spec = batch.machine, batch.spec
    per_node, cores, limit = spec.ranks_per_node, spec.ranks_per_node * spec.cores_per_rank, machine.limits.nodes
    node = f"a node of {spec.machine} has"
    _refuse(min(spec.ranks, per_node) < 1, f"{spec.ranks} ranks, {per_node} a node, cannot be started; give 1 or more")
    _refuse(spec.gpus_per_rank < 0, f"{spec.gpus_per_rank} devices a rank cannot be; give 0 or more (--gpus-per-rank)")
    _refuse(
        spec.cores_per_rank < spec.threads,
        f"{spec.cores_per_rank} cores a rank are fewer than its threads (run.threads = {spec.threads}); give more "
        "(--cores-per-rank) or take fewer threads",
    )
    _refuse(
        cores > machine.node.cores,
        f"{per_node} ranks a node with {spec.cores_per_rank} cores each take {cores}, and {node} {machine.node.cores}; "
        "give fewer (--ranks-per-node, --cores-per-rank)",
    )
    _refuse(
        batch.gpus_per_node > machine.node.gpus,
        f"{per_node} ranks a node with {spec.gpus_per_rank} devices each take {batch.gpus_per_node}, and {node} "
        f"{machine.node.gpus}; give fewer (--ranks-per-node, --gpus-per-rank)",
    )
    _refuse(
        machine.launch.program == "jsrun" and machine.launch.gpus == "all" and spec.ranks % per_node != 0,
        f'{spec.ranks} ranks are no multiple of {per_node} a node, and with launch.gpus = "all" jsrun fills its nodes; '
        "give such a multiple (--ranks, --ranks-per-node)",
    )
    _refuse(
        limit is not None and batch.nodes > limit,
        f"{spec.ranks} ranks at {per_node} a node take {batch.nodes} nodes, and a job on {spec.machine} gets at "
        f"most {limit}; give fewer ranks (--ranks) or more of them a node (--ranks-per-node)",
    )


def _check_time(batch: Batch) -> None:
    spec, limit = batch.spec, batch.machine.limits.time
    if batch.machine.scheduler == "local" and not spec.time_s:
        return
    _refuse(
        limit is not None and spec.time_s > parse_time(limit),
        f"{spec.time_s} s are longer than a job on {spec.machine} may run ({limit}); give less (--time) and let it go "
        "on after its limit (--after-limit)",
    )
    _refuse(
        not MIN_GRACE_S <= spec.grace_s < spec.time_s,
        f"the grace, {spec.grace_s} s, must be {MIN_GRACE_S} s or more (schedulers count in minutes) and shorter than "
        f"the job's {spec.time_s} s; give another (--grace, --time)",
    )


def _check_scheduler(batch: Batch) -> None:
    machine, spec = batch.machine, batch.spec
    launch, scheduler, on = machine.launch, machine.scheduler, f"on {spec.machine}"
    unknown = {"lsf": ("qos", "constraint"), "local": ("account", "queue", "qos", "constraint", "reservation")}
    given = " and ".join(name for name in unknown.get(scheduler, ()) if getattr(spec, name))
    _refuse(bool(given), f"{given} cannot be chosen {on} (scheduler: {scheduler}); leave it out")
    _refuse(
        machine.request.account == "required" and not spec.account,
        f"a job {on} needs an account to charge; give one (--account)",
    )
    _refuse(
        spec.recovery and launch.program == "jsrun",
        f"recovery cannot be had {on}: jsrun ends all ranks when one dies; leave --recovery out",
    )
    _refuse(
        spec.recovery and launch.program == "mpiexec" and launch.mpi not in ("openmpi", ""),
        f"recovery cannot be had {on}: of the MPIs that mpiexec starts only Open MPI has it; leave --recovery out",
    )
    _refuse(
        bool(spec.stage) and launch.program == "mpiexec" and scheduler != "slurm",
        f"--stage cannot be had {on}: nothing there runs once on each node; leave it out",
    )
    _refuse(
        scheduler == "local" and bool(spec.directives),
        f"the directive {' '.join(spec.directives)} has no reader {on}: there is no scheduler; leave it out",
    )
    _refuse(
        scheduler == "lsf" and lsf_minutes(spec.grace_s) >= lsf_minutes(spec.time_s),
        f"the grace, {spec.grace_s} s, is in LSF's whole minutes no shorter than the job's {spec.time_s} s; give "
        "another (--grace, --time)",
    )
    _refuse(
        scheduler == "lsf" and "[" in spec.name,
        f"the name {spec.name!r} has a [, with which LSF starts an array of jobs; give another (--name)",
    )
    _refuse(
        scheduler == "lsf" and any(re.search(r"\bTMPDIR=", line) for line in (*machine.setup, *spec.setup)),
        "a setup line sets TMPDIR, which breaks jsrun under LSF; leave it out",
    )
