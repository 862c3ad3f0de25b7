"""How every allreduce here is timed and checked, ours and the peers': needs NumPy alone, for the peers' venvs.

A rank calls back to back and takes the monotonic clock around each call. The time of an iteration is the longest
over the ranks, the time of a size the median over the iterations, of which the first are left out. Inputs are
whole numbers, so that every order of additions has the same sum, and the result of every timed size is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

KB, MB = 1 << 10, 1 << 20
SIZES = [4, 64, 256, KB, 4 * KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 44 * MB, 128 * MB]
SKIPPED = 0.2
"""the share of the calls that is made before the timed ones, at least three"""
COLUMNS = ("bytes", "dtype", "program", "algorithm", "us", "call_us", "algbw_gb_s", "busbw_gb_s", "wrong")


def iterations(n_bytes: int) -> int:
    """How many calls of this size are timed: about a tenth of a second's worth."""
    return max(10, min(2000, int(5e8 / (n_bytes + 2e5))))


def contribution(elements: int, rank: int, dtype: Any) -> np.ndarray:
    """What a rank brings: whole numbers below 97."""
    return ((np.arange(elements) * 7 + 13 * rank) % 97).astype(dtype)


def wrong(result: np.ndarray, ranks: int, scale: float = 1.0) -> int:
    """How many elements of the sum over `ranks` contributions, times `scale`, are not what they must be."""
    total = np.zeros(result.size, result.dtype)
    for rank in range(ranks):
        total += contribution(result.size, rank, result.dtype)
    return int((result != total * result.dtype.type(scale)).sum())


def pin(rank: int, ranks: int) -> None:
    """Keep this rank on a core of its own, where there are enough: two that wake on one core stay there a while."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if ranks <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def durations_ns(call: Callable[[], Any], count: int) -> np.ndarray:
    """The times of `count` calls, int64, after some that are not counted. Collective, where the call is."""
    clock, skipped = time.monotonic_ns, max(3, int(SKIPPED * count))
    times = np.zeros(skipped + count, np.int64)
    for i in range(skipped + count):
        start = clock()
        call()
        times[i] = clock() - start
    return times[skipped:]


def microseconds(times_ns: np.ndarray) -> float:
    """The median over iterations of the maximum over ranks; times are (ranks, iterations)."""
    return float(np.median(times_ns.max(axis=0))) / 1e3


def row(program: str, algorithm: str, size: tuple[int, Any], ranks: int, us: tuple[float, float], bad: int) -> dict:
    """One line of results; size: (bytes, dtype); us: (around the library's call, around Python's)."""
    n_bytes, dtype = size
    rate = n_bytes / us[0] / 1e3
    values = (n_bytes, np.dtype(dtype).name, program, algorithm, *us, rate, 2 * (ranks - 1) / ranks * rate, bad)
    return {**dict(zip(COLUMNS, values, strict=True)), "iterations": iterations(n_bytes)}


def positive(text: str) -> int:
    """The argument of an option that counts something. ValueError if it is none."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def parser(text: str) -> argparse.ArgumentParser:
    """The options that all programs have."""
    made = argparse.ArgumentParser(description=text)
    made.add_argument("--sizes", type=positive, nargs="+", default=SIZES, help="bytes, of all elements together")
    made.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    made.add_argument("--json", action="store_true", help="JSON lines rather than a table")
    return made


def show(header: dict[str, Any], rows: Iterable[dict[str, Any]], as_json: bool) -> None:
    """Print the header and the rows as they come."""
    print(json.dumps(header), flush=True)
    if not as_json:
        print("".join(f"{name:>12}" for name in COLUMNS))
    for one in rows:
        if as_json:
            print(json.dumps(one), flush=True)
        else:
            cells = (f"{v:12.2f}" if isinstance(v, float) else f"{v:>12}" for v in map(one.get, COLUMNS))
            print("".join(cells), flush=True)
