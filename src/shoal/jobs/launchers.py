"""How ranks are started inside a job: the command that a script runs, a word a line, as the shell reads it."""

from __future__ import annotations

import shlex

from shoal.jobs.spec import Batch

_PER_NODE = {
    "openmpi": ("--map-by", "ppr:{ranks}:node:pe={cores}"),
    "mpich": ("-ppn", "{ranks}"),
    "intel": ("-ppn", "{ranks}"),
}


def command(batch: Batch) -> list[str]:
    """The launcher and its ranks."""
    return {"srun": _srun, "jsrun": _jsrun, "mpiexec": _mpiexec}[batch.machine.launch.program](batch)


def once_a_node(batch: Batch) -> list[str]:
    """What starts one process on each node."""
    nodes = batch.nodes
    if batch.machine.launch.program == "jsrun":
        rest = ["--bind=none", "--launch_distribution=packed", "--latency_priority=cpu-cpu"]
        return [*_resource_sets(nodes, 1, 1, 1, 0), *rest]
    return ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]


def preflight(batch: Batch) -> list[str]:
    """Commands that fail where the launcher cannot start this MPI; `shoal launch` finds that out by itself."""
    launch = batch.machine.launch
    if launch.program != "srun" or batch.spec.ranks == 1:
        return [":"]
    return [f'"$python" -m shoal preflight{f" --mpi={launch.plugin}" if launch.plugin else ""}']


def size(batch: Batch) -> tuple[str, str]:
    """Nodes and ranks, as the launcher is told: they are variables of the script where it may give nodes back."""
    return ('"$nodes"', '"$ranks"') if batch.spec.give_back_nodes else (str(batch.nodes), str(batch.spec.ranks))


def _srun(batch: Batch) -> list[str]:
    spec, launch = batch.spec, batch.machine.launch
    nodes, ranks = size(batch)
    named = {
        "mpi": launch.plugin,
        "cpu-bind": launch.cpu_bind,
        "distribution": launch.distribution,
        "gpus-per-task": str(spec.gpus_per_rank) if spec.gpus_per_rank and launch.gpus == "one" else "",
        "gpu-bind": launch.gpu_bind if spec.gpus_per_rank else "",
    }
    return [
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={ranks}",
        f"--ntasks-per-node={spec.ranks_per_node}",
        f"--cpus-per-task={spec.cores_per_rank}",
        *(f"--{option}={value}" for option, value in named.items() if value),
        *(["--no-kill", "--kill-on-bad-exit=0"] if spec.recovery else ["--kill-on-bad-exit=1"]),
        *launch.options,
        *_rank(batch, "train"),
    ]


def _jsrun(batch: Batch) -> list[str]:
    """One resource set a rank, or (all devices visible) one a node."""
    spec, launch = batch.spec, batch.machine.launch
    sets, tasks = (spec.ranks, 1) if launch.gpus == "one" else (batch.nodes, spec.ranks_per_node)
    gpus = tasks * spec.gpus_per_rank
    return [
        *_resource_sets(sets, spec.ranks_per_node // tasks, tasks, tasks * spec.cores_per_rank, gpus),
        f"--bind=packed:{spec.cores_per_rank}",
        f"--launch_distribution={launch.distribution or 'packed'}",
        f"--latency_priority={launch.latency_priority or 'cpu-cpu'}",
        *([f'--smpiargs="{launch.smpiargs}"'] if launch.smpiargs and gpus else []),
        *launch.options,
        *_rank(batch, "train"),
    ]


def _resource_sets(sets: int, per_host: int, tasks: int, cores: int, gpus: int) -> list[str]:
    """What jsrun has defaults for that differ between sites, so all of it is said."""
    return [
        "jsrun",
        f"--nrs={sets}",
        f"--rs_per_host={per_host}",
        f"--tasks_per_rs={tasks}",
        f"--cpu_per_rs={cores}",
        f"--gpu_per_rs={gpus}",
    ]


def _mpiexec(batch: Batch) -> list[str]:
    """By `shoal launch`: it finds the mpiexec of mpi4py's MPI and dies with it."""
    spec, launch = batch.spec, batch.machine.launch
    words = [
        word.format(ranks=spec.ranks_per_node, cores=spec.cores_per_rank) for word in _PER_NODE.get(launch.mpi, ())
    ]
    extra = [f"--mpiexec={shlex.quote(word)}" for word in (*words, *launch.options)]
    ulfm = ["--ulfm"] if spec.recovery else []
    limit = []
    if batch.machine.scheduler == "local" and spec.time_s:
        limit = ["timeout", "--preserve-status", "--signal=HUP", f"--kill-after={spec.grace_s}"]
        limit.append(str(spec.time_s - spec.grace_s))
    return [*limit, *_rank(batch, "launch", f"-n {size(batch)[1]}", *ulfm, *extra)]


def _rank(batch: Batch, command: str, *options: str) -> list[str]:
    spec = batch.spec
    command = f"bench {spec.bench}" if spec.bench else command
    settings = [f"--set={shlex.quote(text)}" for text in spec.overrides]
    return [f'"$python" -m shoal {command}', *options, *settings, '--out="$run"', "--resume", shlex.quote(spec.config)]
