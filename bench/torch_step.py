"""The PyTorch adapter beside plain PyTorch and DistributedDataParallel: `python bench/torch_step.py --net resnet18`.

alone: steps of `shoal.torch.Model` with shoal's batches and local step, and of a plain loop with torch.optim.SGD, in
one process, by turns of a few steps; `ratio` is of samples/s, its median over the turns.
ranks: two ranks train by shoal with K = 1 and 8, and two processes by DistributedDataParallel over Gloo, by turns;
`ratio` is of samples/s from the median times of a round.
memory: what building and a few steps add to the peak memory of a process: of a plain loop, of the adapter's module with
one copy of its weights (`step`), and of rounds with all that a rank has (`round`: the anchor and its velocity in two
versions, a contribution, and the learner's weights). One thread each. `cpu_ratio` is the same for the processor
time of a process, which other programs on the machine change less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shoal
import shoal.torch
import torch_nets
from peers.torch_nets import peak_mb
from shoal import environment, kernels
from shoal.backend import Backend, numpy_backend
from shoal.config import Train
from shoal.data.batches import Batches
from shoal.data.order import SampleOrder
from shoal.data.sets import from_arrays
from shoal.sgd.interfaces import Numbers
from shoal.sgd.optimizer import LocalSGD
from shoal.state import TrainState
from torch_nets import BATCH, RATE

HERE = Path(__file__).resolve()
LEARNERS, LIMIT_S = 2, 900
STEPS = {"mlp": 120, "resnet18": 10}
SKIPPED = {"mlp": 5, "resnet18": 2}
TURN = {"mlp": 10, "resnet18": 1}
GROWN, MOST_MEMORY = ("plain", "step", "round"), 1.5
TARGETS = {"mlp": {"alone": 0.98, 1: 1.1, 8: 1.2}, "resnet18": {"alone": 0.98, 1: 1.0, 8: 1.02}}


def plain(net: str) -> Callable[[int], None]:
    """A step of a plain loop."""
    module = torch_nets.build(net)
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    x, y = map(torch.from_numpy, torch_nets.samples(net))

    def step(index: int) -> None:
        chosen = (torch.arange(BATCH) + index * BATCH) % len(x)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(x[chosen]), y[chosen])
        loss.backward()
        optimizer.step()
        loss.item()

    return step


class Turn:
    """The settings of a round of `steps` steps on one learner."""

    learners, batch = 1, BATCH

    def __init__(self, steps: int) -> None:
        self.steps = steps


def prepared(net: str) -> tuple[shoal.torch.Model, Batches, Backend]:
    """The module in the adapter, and its batches."""
    x, y = torch_nets.samples(net)
    data, backend = from_arrays(x, y, x[:BATCH], y[:BATCH], classes=10), numpy_backend()
    model = shoal.torch.Model(torch_nets.build(net))
    model.prepare(data, backend, 1)
    return model, Batches(data, SampleOrder(len(x), 1), backend), backend


def bare(net: str) -> Callable[[int], None]:
    """A step of the adapter on one copy of the weights."""
    model, batches, backend = prepared(net)
    weights = backend.zeros(model.layout.size)
    model.initialise(weights, 1)
    model.bind(weights)

    def step(index: int) -> None:
        model.gradient(*batches.training(index * BATCH, BATCH), index * BATCH, whole=False)
        for at, gradient in model.pieces:
            own = weights[at], None
            kernels.local_step(np, own, gradient, own, kernels.LocalStep(RATE))

    return step


def adapter(net: str) -> Callable[[int], None]:
    """The local steps of a round, as training takes them, from where the last ended."""
    model, batches, backend = prepared(net)
    local, turn = LocalSGD(model, batches, Train(batch=BATCH), backend), Turn(TURN[net])
    state = TrainState(model.layout, backend)
    model.initialise(state.anchor, 1)
    out = backend.zeros(model.layout.size)

    def steps(index: int) -> None:
        state.progress.consumed = index * BATCH
        local.contribute(state, turn, 0, Numbers(turn.steps, 0.0, RATE), out)

    return steps


def alone(net: str) -> dict[str, Any]:
    """One row: turns of a few steps, each by both."""
    torch.set_num_threads(1)
    environment.limit_threads(1)
    one, many, turn = plain(net), adapter(net), TURN[net]
    times_s: dict[str, list[tuple[float, float]]] = {"plain": [], "adapter": []}
    for index in range(0, 2 * STEPS[net] + SKIPPED[net] * turn, turn):
        for name, run in (("plain", lambda at: [one(at + k) for k in range(turn)]), ("adapter", many)):
            began = (time.perf_counter(), time.process_time())
            run(index)
            times_s[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    plain_s, adapter_s = (np.array(times_s[name])[SKIPPED[net] :] for name in ("plain", "adapter"))
    ratio, cpu_ratio = np.median(plain_s / adapter_s, 0).tolist()
    ms = {"plain_ms": 1e3 / turn * np.median(plain_s, 0)[0], "adapter_ms": 1e3 / turn * np.median(adapter_s, 0)[0]}
    return {"alone": net, **ms, "ratio": ratio, "cpu_ratio": cpu_ratio, "target": TARGETS[net]["alone"]}


def grown(net: str, which: str) -> None:
    """Print what building and steps add to this process's peak memory."""
    torch.set_num_threads(1)
    environment.limit_threads(1)
    small = torch.nn.Linear(1, 1)
    small(torch.ones(1, 1)).sum().backward()
    torch.optim.SGD(small.parameters(), RATE).step()  # what PyTorch loads when it is first used
    before_mb = peak_mb()
    steps = {"plain": plain, "step": bare, "round": adapter}[which](net)
    for index in range(4 * TURN[net]):
        steps(index)
    print(json.dumps({"growth_mb": peak_mb() - before_mb}), flush=True)


def memory(net: str) -> dict[str, Any]:
    """One row, from a process each."""
    of = {which: run([sys.executable, str(HERE), "grown", net, which])["growth_mb"] for which in GROWN}
    ratios = {f"{which}_ratio": of[which] / of["plain"] for which in ("step", "round")}
    return {"memory": net, **{f"{which}_mb": mb for which, mb in of.items()}, **ratios, "limit": MOST_MEMORY}


def in_a_job(net: str, steps: int) -> None:
    """One rank: train, and on the master print the median time of a round. Collective."""
    ends_s: list[tuple[float, float]] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            ends_s.append((event["train_s"], time.process_time()))

    x, y = torch_nets.samples(net)
    shoal.train(
        shoal.torch.Model(torch_nets.build(net)),
        (x, y, x[:BATCH], y[:BATCH]),
        classes=10,
        learners=f"0:{LEARNERS}",
        averaging=shoal.Averaging(steps=steps),
        learning_rate=RATE,
        batch=BATCH,
        epochs=(max(STEPS[net], 3 * steps) + SKIPPED[net] * steps) * LEARNERS * BATCH / len(x),
        progress=False,
        on_event=on_event,
    )
    if ends_s:
        clock_s, cpu_s = np.median(np.diff(ends_s, axis=0)[SKIPPED[net] - 1 :], 0)
        print(json.dumps({"round_ms": 1e3 * clock_s, "cpu_ms": 1e3 * cpu_s}), flush=True)


def run(command: list[str]) -> dict[str, float]:
    """What a program prints in its last line."""
    environ = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environ, timeout=LIMIT_S, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def said(command: list[str]) -> np.ndarray:
    """The times of a round in a program that prints them: by the clock, of the processor."""
    times = run(command)
    return np.array([times["round_ms"], times["cpu_ms"]])


def ranks(net: str, repeats: int) -> list[dict[str, Any]]:
    """A row for each K."""
    peer = [sys.executable, str(HERE.parent / "peers" / "ddp.py"), "--net", net, "--steps", str(STEPS[net])]
    job = [sys.executable, "-m", "shoal", "launch", "-n", str(LEARNERS), str(HERE), "job", net]
    rows: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {1: [], 8: []}
    for _ in range(repeats):
        peer_ms = said(peer)
        for steps, found in rows.items():
            found.append((peer_ms, said([*job, str(steps)]) / steps))
    made = []
    for steps, found in rows.items():
        ratios = np.array([peer_ms / own_ms for peer_ms, own_ms in found])
        (ddp_ms, _), (shoal_ms, _) = np.median(np.array(found), axis=0)
        ratio, cpu_ratio = np.median(ratios, axis=0)
        row = {"ranks": net, "steps": steps, "ddp_ms": ddp_ms, "shoal_ms": shoal_ms, "ratio": ratio}
        spread = np.sort(ratios[:, 0]).round(3).tolist()
        made.append({**row, "cpu_ratio": cpu_ratio, "target": TARGETS[net][steps], "ratios": spread})
    return made


def main() -> None:
    """Compare, or be the job that is compared."""
    if sys.argv[1:2] == ["job"]:
        return in_a_job(sys.argv[2], int(sys.argv[3]))
    if sys.argv[1:2] == ["grown"]:
        return grown(*sys.argv[2:4])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=list(TARGETS), default="mlp")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    header = {"bench": "torch_step", **environment.describe(), "net": options.net, "batch": BATCH}
    print(json.dumps({**header, "load_before": os.getloadavg()[0]}), flush=True)
    print(json.dumps(alone(options.net)), flush=True)
    print(json.dumps(memory(options.net)), flush=True)
    for row in ranks(options.net, options.repeats):
        print(json.dumps(row), flush=True)
    return None


if __name__ == "__main__":
    main()
