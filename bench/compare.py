"""Allreduce beside Open MPI's, MPICH's and Gloo's, in one table: `python bench/compare.py [--ranks 2 4 8]`.

Each program measures a band of sizes, then the next program the same band, and all of it is repeated, so that all
meet the same disturbances; the table has the medians over the repeats. The peers' environments are made by
`make bench-peers`; one that is missing is left out, and said to be.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import timing

ROOT = Path(__file__).resolve().parents[1]
BANDS = (64 * timing.KB, 4 * timing.MB, 1 << 40)
"""the largest size of each band"""
LIMIT_S = 300
LARGEST_CROWDED = 44 * timing.MB

Key = tuple[int, str, str]
"""Bytes, program, algorithm"""


def commands(ranks: int) -> tuple[dict[str, list[str]], list[str]]:
    """The programs that there are, by name, and what to say about those that there are not."""
    found, missing = {}, []
    shoal = [sys.executable, "-m", "shoal", "launch", "-n", str(ranks), str(ROOT / "bench/allreduce.py")]
    found["shoal"] = [*shoal, "--algorithms", "shared", "native", "reduction", "private", "exchange", "floor"]
    peers = ROOT / "bench/peers"
    mpich, gloo = ROOT / ".venv-mpich/bin", ROOT / ".venv-gloo/bin"
    if (mpich / "mpiexec").exists():
        found["MPICH"] = [
            str(mpich / "mpiexec"),
            "-n",
            str(ranks),
            str(mpich / "python"),
            str(peers / "mpi.py"),
        ]
    if (gloo / "python").exists():
        found["Gloo"] = [str(gloo / "python"), str(peers / "gloo.py"), "--ranks", str(ranks)]
    for name in ("MPICH", "Gloo"):
        if name not in found:
            missing.append(f"{name} is not measured: `make bench-peers` makes its environment")
    return found, missing


def run(command: list[str], sizes: list[int], dtype: str) -> list[dict[str, Any]]:
    """The header and the rows of one program."""
    full = [*command, "--json", "--dtype", dtype, "--sizes", *map(str, sizes)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(full, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environ)
    if done.returncode:
        sys.exit(f"{' '.join(full)}: exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def measure(ranks: int, options: Any) -> tuple[dict[str, Any], dict[Key, dict[str, float]]]:
    """Headers by program, and the medians over the repeats: us, call_us, and the largest `wrong`."""
    programs, missing = commands(ranks)
    print("\n".join(missing), file=sys.stderr)
    headers: dict[str, Any] = {}
    samples: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    limit = max(options.sizes) if ranks <= (os.cpu_count() or 1) else LARGEST_CROWDED
    for repeat in range(options.repeats):
        for low, high in zip((0, *BANDS), BANDS, strict=False):
            sizes = [size for size in options.sizes if low < size <= high and size <= limit]
            for name, command in programs.items() if sizes else ():
                print(
                    f"{ranks} ranks, repeat {repeat + 1}, {name}, up to {sizes[-1]} bytes", file=sys.stderr, flush=True
                )
                headers[name], *rows = run(command, sizes, options.dtype)
                for row in rows:
                    samples[row["bytes"], name, row["algorithm"]].append(row)
    medians = {
        key: {
            "us": statistics.median(row["us"] for row in rows),
            "call_us": statistics.median(row["call_us"] for row in rows),
            "wrong": max(row["wrong"] for row in rows),
        }
        for key, rows in samples.items()
    }
    return headers, medians


def table(medians: dict[Key, dict[str, float]]) -> list[str]:
    """Times in us; a peer's ratio is its time over ours at the kernel; `floor` is the share of the floor reached.
    reduction: its time over that of our bare sum, and over that of one from and to private arrays."""
    peers = [("shoal", "native"), ("MPICH", "native"), ("Gloo", "gloo")]
    heads = ["bytes", "shoal", "call", "exchange", "Open MPI", "x", "MPICH", "x", "Gloo", "x", "floor", "share"]
    lines = ["".join(f"{head:>11}" for head in [*heads, "reduction", "x", "private", "x", "wrong"])]
    for n_bytes in sorted({key[0] for key in medians}):
        at = {key[1:]: row for key, row in medians.items() if key[0] == n_bytes}
        ours, floor = at["shoal", "shared"], at["shoal", "floor"]
        whole, own = at["shoal", "reduction"], at["shoal", "private"]
        cells = [f"{ours['us']:.2f}", f"{ours['call_us']:.2f}", f"{at['shoal', 'exchange']['us']:.1f}"]
        for peer in peers:
            cells += [f"{at[peer]['us']:.2f}", f"{at[peer]['us'] / ours['us']:.2f}"] if peer in at else ["-", "-"]
        cells += [f"{floor['us']:.2f}", f"{floor['us'] / ours['us']:.2f}"]
        cells += [
            f"{whole['us']:.2f}",
            f"{whole['us'] / ours['us']:.2f}",
            f"{own['us']:.2f}",
            f"{whole['us'] / own['us']:.2f}",
            str(sum(row["wrong"] for row in at.values())),
        ]
        lines.append(f"{n_bytes:>11}" + "".join(f"{cell:>11}" for cell in cells))
    return lines


def main() -> None:
    """Measure, print, and on request keep the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", type=timing.positive, nargs="+", default=timing.SIZES)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--json", type=Path, help="a file for the headers and medians, as JSON lines")
    options = parser.parse_args()
    for ranks in options.ranks:
        load = os.getloadavg()[0]
        headers, medians = measure(ranks, options)
        header = {"bench": "compare", "ranks": ranks, "time": time.strftime("%Y-%m-%d"), "load_before": load, **headers}
        print(json.dumps(header))
        print(f"\n{ranks} ranks, {options.dtype}, microseconds, medians of {options.repeats} runs (x: times shoal's)")
        print("\n".join(table(medians)), flush=True)
        if options.json:
            rows = [
                {"ranks": ranks, "bytes": b, "program": p, "algorithm": a, **row} for (b, p, a), row in medians.items()
            ]
            with options.json.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in [header, *rows])


if __name__ == "__main__":
    main()
