"""What a batch costs beside its step, and what making it ahead saves: `python bench/input.py [--ranks 1 2]`.

Each rank is a process by itself that trains convnet-s on noise of CIFAR-10's shape, batch 32, crop and flip, with and
without prefetch in turns, side by side with the other ranks; BLAS has one thread. A batch is made by the C kernel, or
by its NumPy twin. `make_us` is the time to make one, `step_ms` that of a step without and with prefetch, of the
clock: medians over steps, the slowest rank's. `cores` is what there is to run the threads on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from shoal import environment
from shoal.backend import numpy_backend
from shoal.config import Data
from shoal.config import Model as ModelOptions
from shoal.data.augmentation import Augmentation
from shoal.data.batches import Batches
from shoal.data.order import SampleOrder
from shoal.data.sets import DataSet, open_set
from shoal.model import nets
from shoal.model.gradient import Model

SAMPLES, BATCH, STEPS, TURNS = 8192, 32, 20, 12
MAKERS = ("C", "twin")


def data(maker: str) -> DataSet:
    """Noise of CIFAR-10's shape; a map that differs from row to row is not the C kernel's."""
    made = open_set(Data(set="synthetic", shape=(32, 32, 3), train=SAMPLES, test=1), 1)
    rows = np.arange(32, dtype=np.float32)[:, None, None]
    return made if maker == "C" else dataclasses.replace(made, shift=made.shift + np.broadcast_to(rows, (32, 32, 3)))


def alone(maker: str) -> dict[str, float]:
    """One rank: medians over all steps, in microseconds."""
    environment.limit_threads(1)
    backend, samples = numpy_backend(), data(maker)
    model = Model(
        nets.build(ModelOptions(), samples.sample_shape, samples.outputs), (32, 32, 3), "cross-entropy", backend
    )
    weights, gradient = backend.zeros(model.layout.size), backend.zeros(model.layout.parameters)
    model.initialise(weights, 1)
    model.bind(weights, gradient)
    moves = Augmentation(SAMPLES, 1, 4, True)
    both = [Batches(samples, SampleOrder(SAMPLES, 1), backend, moves, prefetch) for prefetch in (False, True)]
    times_ns: dict[str, list[int]] = {"make": [], "off": [], "on": []}
    position, clock = 0, time.perf_counter_ns
    for _ in range(TURNS):
        for name, batches in zip(("off", "on"), both, strict=True):
            for _ in range(STEPS):
                start = clock()
                x, y = batches.training(position, BATCH, position + BATCH)
                made = clock()
                model.gradient(x, y)
                times_ns[name].append(clock() - start)
                if name == "off":
                    times_ns["make"].append(made - start)
                position += BATCH
    return {name: statistics.median(values[STEPS:]) / 1e3 for name, values in times_ns.items()}


def side_by_side(ranks: int, maker: str) -> dict[str, Any]:
    """One row: so many ranks at once; of each figure the slowest rank's."""
    environ = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")}
    command = [sys.executable, __file__, "--alone", maker]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) for _ in range(ranks)]
    said = [json.loads(process.communicate(timeout=300)[0]) for process in started]
    us = {name: max(one[name] for one in said) for name in said[0]}
    return {
        "ranks": ranks,
        "maker": maker,
        "make_us": round(us["make"], 1),
        "step_ms": [round(us[name] / 1e3, 3) for name in ("off", "on")],
        "ratio": round(us["on"] / us["off"], 3),
    }


def main() -> None:
    """Measure, or be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--alone", choices=MAKERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(alone(options.alone)))
        return
    header = {"bench": "input", **environment.describe(), "cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    print(json.dumps(header), flush=True)
    for ranks in options.ranks:
        for maker in MAKERS:
            print(json.dumps(side_by_side(ranks, maker)), flush=True)


if __name__ == "__main__":
    main()
