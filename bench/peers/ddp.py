"""DistributedDataParallel over Gloo: `python bench/peers/ddp.py --net mlp --steps 240` in a venv with torch.

A plain loop with torch.optim.SGD on each of two processes, one thread each, whose gradients are averaged; prints the
median times of a step by the clock and of the processor, of the slower process."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch_nets
from torch_nets import BATCH, RATE

RANKS, SKIPPED = 2, 5


def work(rank: int, meeting_place: str, options: Any) -> None:
    """One rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{meeting_place}", rank=rank, world_size=RANKS)
    module = DistributedDataParallel(torch_nets.build(options.net))
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    x, y = map(torch.from_numpy, torch_nets.samples(options.net))
    times_s = []
    for step in range(SKIPPED + options.steps):
        began = (time.perf_counter(), time.process_time())
        chosen = (torch.arange(BATCH) + (step * RANKS + rank) * BATCH) % len(x)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(x[chosen]), y[chosen])
        loss.backward()
        optimizer.step()
        loss.item()
        times_s.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    slowest = torch.tensor(times_s[SKIPPED:]).median(0).values
    torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
    if rank == 0:
        clock_s, cpu_s = slowest.tolist()
        print(json.dumps({"round_ms": 1e3 * clock_s, "cpu_ms": 1e3 * cpu_s}), flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    """Start the ranks and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=list(torch_nets.SAMPLES), default="mlp")
    parser.add_argument("--steps", type=int, default=240)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (str(Path(folder, "store")), options), RANKS)


if __name__ == "__main__":
    main()
