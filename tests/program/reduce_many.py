"""A rank that times reductions: `reduce_many.py SIZE TRIES ALGORITHM...`, printing one JSON line an algorithm.

Each reduces float32 contributions of SIZE numbers, one learner a rank, in the node's shared memory where there is
some, and keeps the mean. "MPI_Allreduce" is the library's own, bare, and "MPI_Allreduce+mean" keeps the mean too. Of
several tries the time is the median of the slowest rank's, from when the contributions are in their place, and
`link_bytes` what one try sends from the first host.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from shoal import kernels
from shoal.backend import numpy_backend
from shoal.comm.places import OwnMemory, Sizes
from shoal.comm.reducer import Reducer, TermsAt
from shoal.comm.shared import NodeMemory, share
from shoal.comm.tuning import Tuner, measure
from shoal.comm.world import World


def sent_bytes() -> int:
    """What this host has sent over its link; 0 without one."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "link0":
            return int(figures.split()[8])
    return 0


Call = Callable[[], None]


def timed(world: World, tries: int, bring: Call, reduce: Call) -> tuple[float, float]:
    """(seconds, bytes sent from this host) of one call of `reduce`."""
    bring()
    reduce()
    times, before = [], 0
    for _ in range(tries):
        bring()
        world.comm.Barrier()
        before = before or sent_bytes()
        start = time.perf_counter()
        reduce()
        times.append(world.comm.allreduce(time.perf_counter() - start, MPI.MAX))
    return statistics.median(times), (sent_bytes() - before) / tries


def contribution(world: World, size: int) -> np.ndarray:
    """Small whole numbers, so that the mean is exact in any order."""
    return (np.arange(size) % 251 + world.rank).astype(np.float32)


def shoals(world: World, size: int, algorithm: str, made: dict[str, Any]) -> tuple[Call, Call]:
    """What brings a contribution, and one reduction by shoal."""
    tuner = Tuner(reproducible=False, algorithm=algorithm, links=made["links"])
    memory, mine = made["memory"], contribution(world, size)
    reducer = Reducer(world.backend, size, np.float32, tuner, memory)

    def bring() -> None:
        reducer.start(made["group"], made["round"] + 1)
        reducer.slot()[...] = mine
        reducer.add(world.order.index(world.rank))

    def reduce() -> None:
        out = memory.versions[made["round"] % 2]["anchor"]
        made["round"] += 1

        def keep(span: slice, terms: TermsAt) -> None:
            if span.start < span.stop:
                kernels.canonical_sum(np, terms(span.start, span.stop), out[span])

        reducer.reduce(made["group"], world.size, made["round"], keep)
        assert out[size // 2] == size // 2 % 251 + (world.size - 1) / 2

    return bring, reduce


def mpis(world: World, size: int, mean: bool) -> tuple[Call, Call]:
    """The same by MPI, in place."""
    mine, array, kept = contribution(world, size), np.empty(size, np.float32), np.zeros(size, np.float32)

    def reduce() -> None:
        world.comm.Allreduce(MPI.IN_PLACE, array)
        if mean:
            np.multiply(array, np.float32(1 / world.size), out=kept)

    return lambda: np.copyto(array, mine), reduce


def main(size: int, tries: int, algorithms: list[str]) -> None:
    world = World(MPI.COMM_WORLD, numpy_backend(), 60.0)
    sizes = Sizes(size, 0, size, world.size, np.dtype(np.float32))
    memory = share(world, sizes)
    if not isinstance(memory, NodeMemory):
        memory = OwnMemory(world.backend, sizes)
    made = {"memory": memory, "links": measure(world), "group": world.group(world.order), "round": 0}
    for algorithm in algorithms:
        name, _, mean = algorithm.partition("+")
        calls = mpis(world, size, bool(mean)) if name == "MPI_Allreduce" else shoals(world, size, algorithm, made)
        seconds, n_bytes = timed(world, tries, *calls)
        if world.is_master:
            row = {"algorithm": algorithm, "nodes": world.nodes, "seconds": seconds, "link_bytes": n_bytes}
            print(json.dumps({**row, "links": str(made["links"])}), flush=True)
    made["group"].close()
    world.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
