"""Weak scaling from 1 to 2 ranks beside DistributedDataParallel: `python bench/weak.py --net mlp [--repeats 9]`.

By turns: a job of ours that visits 1 and 2 ranks (bench/scaling.py, K = 1 and 8), and DDP over Gloo on 1 and on 2
processes; the same net and batch, one thread a rank. Efficiency is the time on one over the time on two; medians over
the repeats, with intervals of 95% at least. `make bench-peers` makes the environment of torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shoal import environment
from shoal.report.intervals import Median
from shoal.report.load import read_bench

HERE = Path(__file__).resolve().parent
STEPS, ROUNDS = {"mlp": 120, "resnet18": 12}, {"mlp": 60, "resnet18": 8}
CONFIGS = {"mlp": HERE / "nets/mlp.toml", "resnet18": HERE / "nets/resnet18.toml"}
LIMIT_S = 300


def said(command: list[str]) -> str:
    """What a program prints."""
    environ = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")}
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environ, timeout=LIMIT_S, check=True).stdout


def ours(net: str) -> dict[int, float]:
    """K -> efficiency."""
    with tempfile.TemporaryDirectory() as folder:
        job = [sys.executable, "-m", "shoal", "launch", "-n", "2", str(HERE / "scaling.py"), str(CONFIGS[net])]
        options = ["--modes", "weak", "--steps", "1,8", "--repeats", "1", "--rounds", str(ROUNDS[net]), "--out", folder]
        if net == "resnet18":
            options[3] = "1"
        said([*job, *options])
        _, rows = read_bench(Path(folder, "scaling.jsonl"))
    return {row["steps"]: row["efficiency"] for row in rows if row["ranks"] == 2}


def peer(net: str, python: str) -> float:
    """The efficiency of DDP."""
    command = [python, str(HERE / "peers/ddp_weak.py"), net]
    one, two = (json.loads(said([*command, ranks, str(STEPS[net])]))["step_ms"] for ranks in ("1", "2"))
    return one / two


def main() -> None:
    """Print a row for each K."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--net", choices=list(STEPS), default="mlp")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument(
        "--torch", default=str(HERE.parent / ".venv-gloo/bin/python"), help="the interpreter with torch"
    )
    options = parser.parse_args()
    header = {"bench": "weak", **environment.describe(), "net": options.net, "load_before": os.getloadavg()[0]}
    print(json.dumps(header), flush=True)
    found: dict[Any, list[float]] = {}
    for _ in range(options.repeats):
        for steps, value in ours(options.net).items():
            found.setdefault(steps, []).append(value)
        found.setdefault("ddp", []).append(peer(options.net, options.torch))
        last = {str(key): round(values[-1], 3) for key, values in found.items()}
        print(json.dumps({"repeat": len(found["ddp"]), **last, "load": os.getloadavg()[0]}), flush=True)
    for key, values in found.items():
        middle = Median.of(values)
        who = "DDP, Gloo" if key == "ddp" else f"shoal, K = {key}"
        row = {"who": who, "efficiency": middle.value, "low": middle.low, "high": middle.high}
        print(json.dumps({**row, "coverage": middle.coverage, "load_after": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    main()
