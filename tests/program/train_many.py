"""A rank that trains many configs one after another in one world: `train_many.py CASES.json OUT [NODES]`.

CASES.json maps names to config trees. Rank 0 writes OUT.json, the history of each run, and OUT.npz, the final
parameters as name/tensor. NODES like 0,0,1,1 plays several nodes on one machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from shoal import config as configs
from shoal.backend import numpy_backend
from shoal.comm.world import World
from shoal.run import Request, run


def main(cases: Path, out: Path, nodes: list[int] | None) -> None:
    world = World(MPI.COMM_WORLD, numpy_backend(), nodes=nodes)
    histories, parameters = {}, {}
    for name, tree in json.loads(cases.read_text()).items():
        result = run(world, Request(configs.from_tree(tree, name)), lambda: False)
        histories[name] = result.history
        parameters |= {f"{name}/{tensor}": array for tensor, array in result.parameters.items()}
    if world.is_master:
        out.with_suffix(".json").write_text(json.dumps(histories))
        np.savez(out.with_suffix(".npz"), **parameters)
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(n) for n in sys.argv[3].split(",")] if sys.argv[3:] else None)
