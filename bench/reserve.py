"""What a sleeping reserve costs, and how fast it wakes: `shoal launch -n 4 bench/reserve.py [SECONDS]`.

Prints, as JSON lines with a header: the share of a core that each reserve uses while it sleeps for SECONDS
(default 10), and the time from the master's order to the reserve's next statement, over 100 orders each.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from mpi4py import MPI

from shoal import environment
from shoal.backend import numpy_backend
from shoal.comm.world import World

ORDERS = 100


def main(seconds: float) -> None:
    """Collective over the ranks."""
    world = World(MPI.COMM_WORLD, numpy_backend())
    if world.is_master:
        time.sleep(seconds)
        for _ in range(ORDERS):
            for rank in range(1, world.size):
                time.sleep(0.003)
                world.order_reserve(rank, json.dumps(time.monotonic()).encode())
        rows = world.comm.gather(None)[1:]
        print(json.dumps({"bench": "reserve", **environment.describe(), "world": world.size, "mpi": world.library}))
        for rank, (share, wakes_ms) in enumerate(rows, 1):
            row = {"rank": rank, "core_share": share, "wake_median_ms": statistics.median(wakes_ms)}
            print(json.dumps({**row, "wake_p90_ms": sorted(wakes_ms)[ORDERS * 9 // 10]}))
    else:
        used, began = time.process_time(), time.monotonic()
        sent = float(world.sleep_until_order(lambda: False))
        share = (time.process_time() - used) / (time.monotonic() - began)
        wakes_ms = [1e3 * (time.monotonic() - sent)]
        for _ in range(ORDERS - 1):
            sent = float(world.sleep_until_order(lambda: False))
            wakes_ms.append(1e3 * (time.monotonic() - sent))
        world.comm.gather((share, wakes_ms))
    world.close()


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)
