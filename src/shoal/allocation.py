"""What launcher and scheduler tell a process by its environment: its rank, the hosts, its GPUs, the end of the job.

Pure functions of the environment. Launchers run inside one another, and variables of the outer one stay: under an
mpiexec in a Slurm job, SLURM_PROCID and SLURM_NTASKS count mpiexec's own daemons. So the innermost is looked for
first, and a variable that is missing or odd is only not known. None of this says which ranks share a node: MPI does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shoal.errors import InputError

Environment = Mapping[str, str]

END_TIME = "SHOAL_END_TIME"
"""seconds since the epoch; batch scripts set it, as not every scheduler tells when it will end the job"""
CLEARED_STOP = "SHOAL_CLEARED_STOP"
"""set by a batch script that has removed an old file `stop` before it listens: one that is there now is its warning"""
GIVES_BACK = "SHOAL_GIVES_BACK_NODES"
"""set by a batch script that releases nodes when a run has left their number in its file `nodes`"""


class _Names(NamedTuple):
    """The variables of a launcher."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_LAUNCHERS = (
    _Names("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    _Names(
        "Open MPI's mpiexec",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Names("MPICH's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Names("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_ID"),
    _Names("PALS", "PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    _Names("Cray PMI", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
"""Innermost first; one has started this process if rank, size and local rank are all there. (srun tells the ranks of
a node in another form; that there is a step at all is what tells its tasks from the batch script.)"""

_JOBS = (("Slurm", "SLURM_JOB_ID"), ("LSF", "LSB_JOBID"))
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_ENDS = (END_TIME, "SLURM_JOB_END_TIME")


@dataclass(frozen=True)
class Allocation:
    """What is known of a process's place; None or empty where nobody says.

    launcher: who started it, with its rank, the number of ranks, and both among the ranks of its host.
    job: scheduler and job id, e.g. "Slurm 4711". hosts: of the job, short names in order, each once.
    devices: the GPUs it may see, None if not restricted. end_time_s: when the job is ended, epoch.
    gives_back: its batch script can release nodes.
    """

    launcher: str = ""
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    job: str = ""
    hosts: tuple[str, ...] = ()
    devices: tuple[str, ...] | None = None
    end_time_s: float | None = None
    gives_back: bool = False

    def device(self, visible: int) -> int:
        """Which of `visible` (> 0) GPUs this rank takes: the one that it was given, or that of its local rank."""
        return (self.local_rank or 0) % visible


def read(given: Environment, text_of: Callable[[Path], str] = Path.read_text) -> Allocation:
    """What `given` says; `text_of` reads the files that it names. Raises InputError for an END_TIME that is none."""
    visible = next((given[name] for name in _DEVICES if name in given), None)
    return Allocation(
        *_launched(given),
        next((f"{scheduler} {given[name]}" for scheduler, name in _JOBS if given.get(name)), ""),
        hosts(given, text_of),
        None if visible is None else tuple(filter(None, visible.split(","))),
        _end_time_s(given),
        bool(given.get(GIVES_BACK)),
    )


def check_joined(here: Allocation, ranks: int, library: str) -> None:
    """Refuse to run as one of several lone ranks: the launcher started more than the one rank that MPI sees.

    ranks: the size of MPI's world. Each would train, and write, on its own. Raises InputError, on all alike.
    """
    if ranks > 1 or (here.size or 1) == 1:
        return
    way_out = (
        f"start it with the --mpi= of srun that {library} knows (srun --mpi=list), "
        if here.launcher == "srun"
        else f"start it with the launcher of {library}, "
    ) + "or use `shoal launch`, which finds it"
    raise InputError(
        f"{here.launcher} started {here.size} ranks, and each is alone in its MPI ({library}), which does not know "
        f"this launcher; {way_out}",
        agreed=True,
    )


def hosts(given: Environment, text_of: Callable[[Path], str] = Path.read_text) -> tuple[str, ...]:
    """The hosts of the job: short names, in order, each once. Empty where no scheduler names them."""
    if nodes := given.get("SLURM_JOB_NODELIST") or given.get("SLURM_NODELIST"):
        return _once(expand(nodes))
    names = _lsf_hosts(given, text_of)
    if {"CSM_ALLOCATION_ID", "JSM_NAMESPACE_RANK"} & given.keys():  # there the first is the launch node
        names = names[1:]
    return _once(names)


def expand(nodes: str) -> Iterator[str]:
    """The names in a node list of Slurm: "n[1-2,07],login" gives n1, n2, n07, login."""
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        parts = re.split(r"\[([^\]]*)\]", item)
        choices = [_numbers(part) if i % 2 else [part] for i, part in enumerate(parts)]
        yield from map("".join, itertools.product(*choices))


def _numbers(ranges: str) -> list[str]:
    """ "1-2,07" gives 1, 2, 07: the width of a range's first number is kept."""
    found = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        found += [str(i).zfill(len(first)) for i in range(int(first), int(last or first) + 1)]
    return found


def _lsf_hosts(given: Environment, text_of: Callable[[Path], str]) -> list[str]:
    """LSB_HOSTS is empty in large jobs, so the files come first."""
    for name in ("LSB_DJOB_RANKFILE", "LSB_DJOB_HOSTFILE"):
        if given.get(name):
            try:
                return text_of(Path(given[name])).split()
            except OSError:
                continue
    if counted := given.get("LSB_MCPU_HOSTS"):
        return counted.split()[::2]
    return given.get("LSB_HOSTS", "").split()


def _once(names: Iterator[str] | list[str]) -> tuple[str, ...]:
    """Short names, each once: a host may be listed for each of its slots, and with and without its domain."""
    return tuple(dict.fromkeys(name if _is_address(name) else name.partition(".")[0] for name in names))


def _is_address(name: str) -> bool:
    return re.fullmatch(r"[\d.]+", name) is not None


def _launched(given: Environment) -> tuple[str, int | None, int | None, int | None, int | None]:
    """Launcher, rank, size, local rank and local size."""
    for names in _LAUNCHERS:
        rank, size, local_rank = (_integer(given, name) for name in names[1:4])
        if rank is not None and size is not None and local_rank is not None:
            local_size = _tasks_here(given) if names.launcher == "srun" else _integer(given, names.local_size)
            return names.launcher, rank, size, local_rank, local_size
    if (rank := _integer(given, "PMI_RANK")) is not None:
        return "a launcher that speaks PMI", rank, _integer(given, "PMI_SIZE"), None, None
    if (rank := _integer(given, "PMIX_RANK")) is not None:
        return "a launcher that speaks PMIx", rank, None, None, None
    return "", None, None, None, None


def _tasks_here(given: Environment) -> int | None:
    """The tasks of a Slurm step on this node, from "2(x3),1" and the node's number in it."""
    node, counts = _integer(given, "SLURM_NODEID"), []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", given.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node is not None and node < len(counts) else None


def _integer(given: Environment, name: str) -> int | None:
    text = given.get(name, "")
    return int(text) if text.isdigit() else None


def _end_time_s(given: Environment) -> float | None:
    """The earliest that is said."""
    own = given.get(END_TIME)
    if own and _integer(given, END_TIME) is None:
        raise InputError(
            f"{END_TIME} = {own!r} is no time; give whole seconds since the epoch (date +%s), or unset it", agreed=True
        )
    ends = [end for name in _ENDS if (end := _integer(given, name))]
    return float(min(ends)) if ends else None
