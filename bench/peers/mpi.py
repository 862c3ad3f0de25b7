"""MPI_Allreduce of another MPI: `mpiexec -n 2 python bench/peers/mpi.py [--json]` in a venv with mpi4py and NumPy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import timing

VERSION = " ".join(MPI.Get_library_version().split("\0")[0].split(",")[0].split())[:80].split(" MPICH ")[0]


def rows(comm: Any, options: Any) -> Iterator[dict[str, Any]]:
    """All sizes. Collective."""
    kind = MPI.FLOAT if options.dtype == "float32" else MPI.DOUBLE
    for n_bytes in options.sizes:
        mine = timing.contribution(n_bytes // np.dtype(options.dtype).itemsize, comm.rank, options.dtype)
        out = np.empty_like(mine)
        send, receive = [mine, kind], [out, kind]
        comm.Barrier()
        times = timing.durations_ns(lambda: comm.Allreduce(send, receive), timing.iterations(n_bytes))  # noqa: B023
        us = timing.microseconds(np.array(comm.allgather(times)))
        bad = sum(comm.allgather(timing.wrong(out, comm.size)))
        yield timing.row(VERSION, "native", (n_bytes, options.dtype), comm.size, (us, us), bad)


def main() -> None:
    """Collective over the ranks."""
    comm = MPI.COMM_WORLD
    timing.pin(comm.rank, comm.size)
    options = timing.parser(__doc__.splitlines()[0]).parse_args()
    if comm.rank == 0:
        timing.show({"bench": "peers/mpi", "ranks": comm.size, "mpi": VERSION}, rows(comm, options), options.json)
    else:
        for _ in rows(comm, options):
            pass


if __name__ == "__main__":
    main()
