"""A machine as data: what a batch script has to know of its nodes, its launcher and its scheduler.

    shoal render frontier CONFIG            jobs/machines/frontier.toml
    shoal render ./mymachine.toml CONFIG    a file of yours, with the same keys

An unknown key is refused. Texts in `environment`, `modules` and `staging` may use $USER and the like: the script
expands them.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from shoal import config as configs
from shoal.comm.network import Network
from shoal.errors import InputError
from shoal.jobs.times import parse_time

FOLDER = Path(__file__).with_name("machines")

LINE_END = r"[\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]"
"""control characters, line ends, and what is no UTF-8"""

Count = Annotated[int, Meta(ge=0)]
Words = tuple[str, ...]


class _Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Node(_Table, frozen=True):
    """[node]: what one node has for ranks."""

    cores: Annotated[int, Meta(ge=1)]
    """physical cores that ranks may use"""
    gpus: Count = 0
    """devices, as the scheduler counts them"""


class Launch(_Table, frozen=True):
    """[launch]: how ranks are started inside the job."""

    program: Literal["srun", "jsrun", "mpiexec"]
    """mpiexec: by `shoal launch`, which finds the one that belongs to mpi4py"""
    mpi: Literal["spectrum", "cray-mpich", "openmpi", "mpich", "intel", "parastation", ""] = ""
    """the MPI that mpi4py loads there"""
    plugin: str = ""
    """srun --mpi=; left out: the site's default"""
    gpus: Literal["one", "all"] = "one"
    """which devices a rank sees: its own, or all of its node (CUDA IPC between ranks needs that)"""
    gpu_bind: str = ""
    """srun --gpu-bind="""
    cpu_bind: str = ""
    """srun --cpu-bind="""
    distribution: str = ""
    """srun --distribution=, jsrun --launch_distribution"""
    latency_priority: str = ""
    """jsrun --latency_priority, in lower case"""
    smpiargs: str = ""
    """jsrun --smpiargs, where ranks have devices"""
    options: Words = ()
    """more options of the launcher"""


class Request(_Table, frozen=True):
    """[request]: how the scheduler is asked."""

    nodes: Literal["nnodes", "slots"] = "nnodes"
    """LSF: whole nodes (-nnodes), or slots (-n with span[ptile])"""
    submit: Literal["stdin", "argument"] = "stdin"
    """LSF: `bsub < script`, or `bsub script`; sites differ in which of them reads the directives"""
    gpus: str = ""
    """the directive that asks for devices; {gpus} stands for how many a node"""
    alloc_flags: Words = ()
    """LSF with CSM: the words of -alloc_flags"""
    account: Literal["required", "optional"] = "optional"
    account_option: str = "-P"
    """LSF: the directive that names it"""
    queue: str = ""
    """queue or partition where none is given"""
    constraint: Words = ()
    """Slurm: features that every job asks for"""
    directives: Words = ()
    """more directives, as they stand in the script"""


class Staging(_Table, frozen=True):
    """[staging]: the disk of a node."""

    folder: str = "/tmp"
    """on each node"""
    needs: str = ""
    """a feature (Slurm) or an allocation flag (LSF) without which there is none"""


class Limits(_Table, frozen=True):
    """[limits]: what the site gives one job at most."""

    nodes: Annotated[int, Meta(ge=1)] | None = None
    time: str | None = None


class Machine(_Table, frozen=True):
    """A machine file."""

    about: str
    """what it is, and where the figures are from"""
    scheduler: Literal["slurm", "lsf", "local"]
    node: Node
    launch: Launch
    modules: Words = ()
    """loaded in this order"""
    setup: Words = ()
    """shell lines, after the modules"""
    environment: dict[str, str] = {}
    """exported to the ranks"""
    request: Request = Request()
    staging: Staging = Staging()
    limits: Limits = Limits()
    network: Network = Network()


def names() -> list[str]:
    """The machines that come with shoal."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Machine:
    """A machine by its name, or from a file of the user's (a path with a / or ending in .toml). Raises InputError."""
    if "/" in name or name.endswith(".toml"):
        path = Path(name)
    elif name in names():
        path = FOLDER / f"{name}.toml"
    else:
        close = difflib.get_close_matches(name, names(), 1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(names())}, or ./YOURS.toml"
        raise InputError(f"{name or repr(name)} is not a known machine; {hint}")
    machine = configs.convert(configs.read_toml(path, "machine"), Machine, f"machine {name}")
    check(machine, f"machine {name}")
    return machine


def check(machine: Machine, source: str) -> None:
    """The rules that tie keys together. Raises InputError."""
    launch, scheduler = machine.launch, machine.scheduler
    if machine.limits.time is not None:
        parse_time(machine.limits.time)
    _check_texts(machine, source)
    homes = {"srun": ("slurm",), "jsrun": ("lsf",), "mpiexec": ("slurm", "lsf", "local")}
    for broken, sentence in (
        (
            scheduler not in homes[launch.program],
            f'launch.program = "{launch.program}" does not start ranks under {scheduler}; take mpiexec',
        ),
        (
            launch.program == "jsrun" and machine.request.nodes != "nnodes",
            'launch.program = "jsrun" needs whole nodes, and request.nodes is "slots"; set it to "nnodes"',
        ),
        (
            bool(launch.plugin) and launch.program != "srun",
            f'launch.plugin = "{launch.plugin}" is for srun, and launch.program is "{launch.program}"; leave it out',
        ),
        (
            scheduler == "lsf" and "TMPDIR" in machine.environment,
            "environment.TMPDIR is exported, which breaks jsrun under LSF; leave it out",
        ),
        (
            launch.latency_priority != launch.latency_priority.lower(),
            f'launch.latency_priority = "{launch.latency_priority}" has capitals, which jsrun takes wrongly; write it '
            "in lower case",
        ),
    ):
        if broken:
            raise InputError(f"{source}: {sentence}")


def _check_texts(machine: Machine, source: str) -> None:
    """What would end a line of the script, or is no name of a variable."""
    texts = [
        machine.request.gpus,
        *machine.modules,
        *machine.setup,
        *machine.request.directives,
        *machine.launch.options,
    ]
    for text in (*texts, *machine.environment.values(), machine.staging.folder):
        if re.search(LINE_END, text):
            raise InputError(f"{source}: {text!r} has a control character, which no line can hold; leave it out")
    for name in machine.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise InputError(f"{source}: environment.{name!r} is no name of a variable; use letters, digits and _")
    if re.search(r"[{}]", machine.request.gpus.replace("{gpus}", "")):
        raise InputError(
            f"{source}: request.gpus = {machine.request.gpus!r} has a brace; only {{gpus}} can stand there"
        )
