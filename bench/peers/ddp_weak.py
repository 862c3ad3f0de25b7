"""DistributedDataParallel over Gloo on some ranks: `python bench/peers/ddp_weak.py NET RANKS STEPS`, with torch.

NET: mlp (784-784-512-256-10, 1.2 million parameters) or resnet18 (16 channels in the first stage, 32x32 images). A
plain loop with torch.optim.SGD on each process, one thread and a batch of 64 each; prints the median time of a step in
ms, of the slowest process."""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch_nets

BATCH, RATE, SKIPPED, WIDTH = 64, 0.01, 5, 16


def module(net: str) -> torch.nn.Module:
    """The net, the same in all processes."""
    torch.manual_seed(1)
    if net == "resnet18":
        return torch_nets.make(net, WIDTH).to(memory_format=torch.channels_last)
    widths = (784, 784, 512, 256, 10)
    layers = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def work(rank: int, meeting_place: str, net: str, ranks: int, steps: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{meeting_place}", rank=rank, world_size=ranks)
    model = DistributedDataParallel(module(net))
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    x = torch.randn(BATCH * 8, *((784,) if net == "mlp" else (3, 32, 32)))
    if net != "mlp":
        x = x.to(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (len(x),))
    times_s = []
    for step in range(SKIPPED + steps):
        began_s = time.perf_counter()
        at = slice(step % 8 * BATCH, (step % 8 + 1) * BATCH)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[at]), y[at])
        loss.backward()
        optimizer.step()
        loss.item()
        times_s.append(time.perf_counter() - began_s)
    slowest = torch.tensor(times_s[SKIPPED:]).median()
    torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({"step_ms": 1e3 * slowest.item()}), flush=True)
    torch.distributed.barrier()
    time.sleep(0.5)  # the others are out of the barrier too
    os._exit(0)  # Gloo's threads now and then abort a process that takes its group down


def main() -> None:
    """Start the ranks and wait for them."""
    net, ranks, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (str(Path(folder, "store")), net, ranks, steps), ranks)


if __name__ == "__main__":
    main()
