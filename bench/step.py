"""What a round costs beyond its gradients: `python bench/step.py [--steps 1 8] [--repeats 5]`.

Two learners on two ranks train an MLP of 1.2 million parameters, against two processes that each train the same
net on their own, side by side on the same cores: gradient and local step, nothing else. `ratio` is a round of K
steps over K steps of the slower of the two; medians over the rounds of a run, then over the repeats, in which the
two take turns. `cpu_ratio` is the same for the processor time of a process, which other programs on the machine
change less: it has the work and the looking around of a wait, not the sleep. BLAS has one thread.

`ratios` has of each repeat the ratio, and how long two processes take to meet at a barrier before and after the job, in
ns: where that is several times the least, the two cores share no cache at that time (a virtual machine may be moved
so), and what ranks share costs two to three times as much, while trainers that share nothing notice nothing.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import shoal
import timing
from shoal import environment, kernels
from shoal.backend import numpy_backend
from shoal.config import Data
from shoal.config import Model as ModelOptions
from shoal.data.batches import Batches
from shoal.data.order import SampleOrder
from shoal.data.sets import DataSet, open_set
from shoal.model import nets
from shoal.model.gradient import Model

HERE = Path(__file__).resolve()
HIDDEN, BATCH, LEARNERS, RATE = (784, 512, 256), 64, 2, 0.01
TARGETS = {1: 1.08, 8: 1.03}
STEPS_TIMED, ROUNDS_SKIPPED = 240, 5
LIMIT_S = 300
MEETINGS = 20_000


def data() -> DataSet:
    """Noise with labels, of MNIST's shape."""
    return open_set(Data(set="synthetic", shape=(784,), train=LEARNERS * BATCH * 40, test=64), 1)


def in_a_job(steps: int) -> None:
    """One rank: train, and on the master print the median time of a round. Collective."""
    ends_s: list[tuple[float, float]] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            ends_s.append((event["train_s"], time.process_time()))

    samples = data()
    shoal.train(
        "mlp",
        samples,
        hidden=HIDDEN,
        learners=f"0:{LEARNERS}",
        averaging=shoal.Averaging(steps=steps, momentum=0.5),
        learning_rate=RATE,
        batch=BATCH,
        epochs=(STEPS_TIMED + ROUNDS_SKIPPED * steps) * LEARNERS * BATCH / len(samples.train),
        progress=False,
        on_event=on_event,
    )
    if ends_s:
        say(np.diff(ends_s, axis=0))


def say(rounds_s: Any) -> None:
    """Print the medians over rounds; rounds_s: (rounds, 2), the clock's time and the processor's."""
    clock_s, cpu_s = np.median(np.array(rounds_s)[ROUNDS_SKIPPED:], axis=0)
    print(json.dumps({"round_ms": 1e3 * float(clock_s), "cpu_ms": 1e3 * float(cpu_s)}), flush=True)


def alone(steps: int, start_s: float) -> None:
    """A trainer by itself: print the median time of K steps."""
    backend, samples = numpy_backend(), data()
    environment.limit_threads(1)
    net = nets.build(ModelOptions(net="mlp", hidden=HIDDEN), samples.sample_shape, samples.outputs)
    model = Model(net, samples.sample_shape, "cross-entropy", backend)
    batches = Batches(samples, SampleOrder(len(samples.train), 1), backend)
    weights, gradient = backend.zeros(model.layout.size), backend.zeros(model.layout.parameters)
    model.initialise(weights, 1)
    model.bind(weights, gradient)
    parameters, step, times_s = weights[: model.layout.parameters], kernels.LocalStep(RATE), []
    time.sleep(max(0.0, start_s - time.time()))
    for first in range(0, STEPS_TIMED + ROUNDS_SKIPPED * steps, steps):
        began = (time.perf_counter(), time.process_time())
        for index in range(first, first + steps):
            model.gradient(*batches.training(index * BATCH, BATCH))
            kernels.local_step(np, (parameters, None), gradient, (parameters, None), step)
        times_s.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    say(times_s)


def side_by_side(commands: list[list[str]]) -> tuple[float, float]:
    """Run the programs at the same time; the longest of the times that they printed, in ms: clock, processor."""
    environ = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")}
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) for command in commands]
    texts = [process.communicate(timeout=LIMIT_S)[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit(f"{commands[0]}: exit status {[process.returncode for process in started]}")
    said = [json.loads(text.splitlines()[-1]) for text in texts]
    return max(one["round_ms"] for one in said), max(one["cpu_ms"] for one in said)


def meeting_ns() -> float:
    """The time of one meeting of two processes, of many."""
    board = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)

    def meet(me: int) -> float:
        line, began = kernels.barrier(board, (0, 1), me), 0
        for sequence in range(1, MEETINGS + 1):
            began = began or (sequence > MEETINGS // 10) * time.perf_counter_ns()
            line.arrive(sequence)
            line.wait(sequence, 1_000_000, 0, LIMIT_S)
        return (time.perf_counter_ns() - began) / (MEETINGS * 0.9)

    other = multiprocessing.get_context("fork").Process(target=meet, args=(1,))
    other.start()
    ns = meet(0)
    other.join(LIMIT_S)
    return ns


def compare(steps: int, repeats: int) -> dict[str, Any]:
    """One row."""
    job = [sys.executable, "-m", "shoal", "launch", "-n", str(LEARNERS), str(HERE), "job", str(steps)]
    rows = []
    for _ in range(repeats):
        start = str(time.time() + 3)
        slower_ms, slower_cpu_ms = side_by_side([[sys.executable, str(HERE), "alone", str(steps), start]] * LEARNERS)
        met_ns = [meeting_ns()]
        round_ms, cpu_ms = side_by_side([job])
        met_ns.append(meeting_ns())
        rows.append((round_ms, slower_ms, round_ms / slower_ms, cpu_ms / slower_cpu_ms, *met_ns))
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    ratios = sorted((round(row[2], 3), *map(round, row[4:])) for row in rows)
    names = ("round_ms", "alone_ms", "ratio", "cpu_ratio")
    return {"steps": steps, **dict(zip(names, medians, strict=False)), "target": TARGETS.get(steps), "ratios": ratios}


def main() -> None:
    """Compare, or be one of the programs that are compared."""
    if sys.argv[1:2] == ["job"]:
        return in_a_job(int(sys.argv[2]))
    if sys.argv[1:2] == ["alone"]:
        return alone(int(sys.argv[2]), float(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=timing.positive, nargs="+", default=list(TARGETS))
    parser.add_argument("--repeats", type=timing.positive, default=5)
    options = parser.parse_args()
    header = {"bench": "step", **environment.describe(), "net": ["mlp", 784, *HIDDEN, 10], "batch": BATCH}
    print(json.dumps({**header, "ranks": LEARNERS, "load_before": os.getloadavg()[0]}), flush=True)
    for steps in options.steps:
        print(json.dumps(compare(steps, options.repeats)), flush=True)
    return None


if __name__ == "__main__":
    main()
