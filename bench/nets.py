"""A training step beside PyTorch's: `python bench/nets.py [--cases resnet18:64 mlp:1024] [--steps 7] [--batch 64]`.

A case is net:width. Two processes, one with shoal and one with torch (CPU, channels_last, eager; `make bench-peers`
makes its environment), each with one thread, train the same net on the same kind of batch, a step in turn: gradient
and SGD update. `ratio` is the median over the steps of torch's time over shoal's time of the step beside it, so that
1 is torch's speed and more is faster; `cpu_ratio` the same of the processor's time, which other programs on the
machine change less. `memory` is how much the peak memory of the process grew by the net and its
steps, ours over torch's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from shoal import environment, kernels
from shoal.backend import numpy_backend
from shoal.config import Model as ModelOptions
from shoal.model import Model, build

ROOT = Path(__file__).resolve().parents[1]
TORCH = ROOT / ".venv-gloo/bin/python"
TARGETS = {"resnet18:64": 0.75, "resnet18:16": 0.6, "senet18:64": None, "resnet20:16": None, "mlp:1024": 1.0}
MEMORY_TARGET = 1.5
CLASSES, SKIPPED = 10, 2
COLUMNS = ("case", "ms", "torch_ms", "ratio", "cpu_ratio", "target", "mb", "torch_mb", "memory")


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def work(name: str, width: int, batch: int) -> None:
    """Train a step for each line read, and say how long it took; at the end, the growth of the peak memory."""
    environment.limit_threads(1)
    backend, rng = numpy_backend(), np.random.default_rng(0)
    shape = (784,) if name == "mlp" else (32, 32, 3)
    before_mb = peak_mb()
    net = build(ModelOptions(net=name, width=width, hidden=(width, width)), shape, CLASSES)
    model = Model(net, shape, "cross-entropy", backend)
    weights, gradient = backend.zeros(model.layout.size), backend.zeros(model.layout.parameters)
    model.initialise(weights, 1)
    model.bind(weights, gradient)
    x, y = rng.standard_normal((batch, *shape), np.float32), rng.integers(0, CLASSES, batch)
    parameters, step = weights[: model.layout.parameters], kernels.LocalStep(0.01)
    for _ in sys.stdin:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        model.gradient(x, y)
        kernels.local_step(np, (parameters, None), gradient, (parameters, None), step)
        spent = {"step_s": time.perf_counter() - start_s, "cpu_s": time.process_time() - start_cpu_s}
        print(json.dumps(spent), flush=True)
    print(json.dumps({"growth_mb": peak_mb() - before_mb}), flush=True)


class Trainer:
    """A process that trains a step when it is told to."""

    def __init__(self, command: list[str]) -> None:
        environ = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ)

    def _read(self, key: str) -> dict[str, float]:
        """What it says next that has this key."""
        assert self._process.stdout
        for line in self._process.stdout:
            if key in (said := json.loads(line)):
                return said
        sys.exit(f"{self._process.args}: exit status {self._process.wait()}")

    def step(self) -> tuple[float, float]:
        """The milliseconds of a step: of the clock, of the processor."""
        assert self._process.stdin
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        said = self._read("step_s")
        return 1e3 * said["step_s"], 1e3 * said["cpu_s"]

    def end(self) -> float:
        """The growth of its peak memory, in MB."""
        assert self._process.stdin
        self._process.stdin.close()
        growth_mb = self._read("growth_mb")["growth_mb"]
        self._process.wait()
        return growth_mb


def compare(case: str, steps: int, batch: int) -> dict[str, Any]:
    """One row."""
    name, _, width = case.partition(":")
    arguments = [name, width, str(batch)]
    ours = Trainer([sys.executable, str(Path(__file__).resolve()), "work", *arguments])
    torch = Trainer([str(TORCH), str(ROOT / "bench/peers/torch_nets.py"), *arguments])
    spent = np.array([(ours.step(), torch.step()) for _ in range(SKIPPED + steps)])[SKIPPED:]
    mb, torch_mb = ours.end(), torch.end()
    ms, torch_ms = (float(median) for median in np.median(spent[:, :, 0], axis=0))
    ratio, cpu_ratio = (float(median) for median in np.median(spent[:, 1] / spent[:, 0], axis=0))
    values = (case, ms, torch_ms, ratio, cpu_ratio, TARGETS.get(case), mb, torch_mb, mb / torch_mb)
    return dict(zip(COLUMNS, values, strict=True))


def main() -> None:
    """Compare, or be the process that trains."""
    if sys.argv[1:2] == ["work"]:
        return work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(TARGETS))
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    if not TORCH.exists():
        sys.exit(f"there is no {TORCH.relative_to(ROOT)}: `make bench-peers` makes it")
    header = {
        "bench": "nets",
        **environment.describe(),
        "threads": 1,
        "batch": options.batch,
        "memory_target": MEMORY_TARGET,
    }
    print(json.dumps({**header, "load_before": os.getloadavg()[0]}), flush=True)
    rows = []
    for case in options.cases:
        rows.append(compare(case, options.steps, options.batch))
        print(json.dumps(rows[-1]), flush=True)
    print("\n" + "".join(f"{name:>12}" for name in COLUMNS))
    for row in rows:
        cells = (f"{value:.2f}" if isinstance(value, float) else str(value or "-") for value in row.values())
        print("".join(f"{cell:>12}" for cell in cells))
    return None


if __name__ == "__main__":
    main()
