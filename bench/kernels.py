"""What each kernel takes beside the memory's own speed: `python bench/kernels.py [--table] [BYTES...]`.

BYTES is the size of one float32 array (default 4 KB to 128 MB). The floor of a kernel is the bytes that it must move
(each input read once, each output written once) at the speed of memcpy at that size, measured in the same run;
`share` is floor / time, and can pass 1 where a kernel reads more than it writes. JSON lines with a header;
--table prints columns instead. Every timed result is first compared with the twin's, bit for bit: `wrong`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from shoal import environment, kernels
from shoal.backend import numpy_backend
from shoal.kernels import twins

SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 44 << 20, 128 << 20]
SECONDS = 0.25
JOINS = {2: [0, 1], 8: [0, 1, 0, 2, 0, 1, 0, 3]}
STEP = kernels.LocalStep(0.01, 0.9, weight_decay=1e-4)

Case = tuple[str, int, Callable[[Any], None], Any]
"""Name, arrays' worth of bytes moved, the call with the kernels or the twins, the array to compare."""


def cases(elements: int) -> Iterator[Case]:
    """The kernels on arrays of so many float32."""
    rng, backend = np.random.default_rng(0), numpy_backend()

    def array(dtype: Any = np.float32) -> Any:
        made = backend.empty(elements, dtype)
        if dtype == np.float32:
            rng.random(out=made, dtype=np.float32)
        else:
            made.fill(0)
        return made

    parts, out, v, a_out, v_out = [array() for _ in range(8)], array(), array(), array(), array()
    a = parts[7]
    yield "delta", 3, lambda by: by.delta(np, parts[0], a, out), out
    plain = kernels.LocalStep(0.01)
    yield "local_step", 3, lambda by: by.local_step(np, (out, None), parts[0], (out, None), plain), out
    yield "local_step m", 5, lambda by: by.local_step(np, (out, v), parts[0], (out, v), STEP), out
    yield "displaces", 3, lambda by: by.local_step(np, (a, None), parts[0], (out, None), plain, a), out
    for count, joins in JOINS.items():
        terms = kernels.Terms(np, parts[:count], joins, 1 / count)
        yield f"canonical_sum {count}", count + 1, lambda by, t=terms: by.canonical_sum(np, t, out), out
    terms = kernels.Terms(np, parts[:2], JOINS[2], 0.5)
    yield "statistics 2", 4, lambda by: by.reduce_statistics(np, terms, a, a_out), a_out
    yield "displacement 2", 6, lambda by: by.reduce_displacement(np, terms, (a, v), (a_out, v_out), 0.5), a_out
    yield "displacement 2 in place", 6, lambda by: by.reduce_displacement(np, terms, (out, v), (out, v), 0.5), out
    yield "per_rate 2", 6, lambda by: by.reduce_per_rate(np, terms, (a, v), (a_out, v_out), (0.5, 0.1)), a_out
    for name, dtype in (("f16", np.float16), ("bf16", np.uint16)):
        packed = array(dtype)
        yield f"pack {name}", 1.5, lambda by, p=packed: by.pack(np, parts[0], p), packed
        yield f"unpack {name}", 1.5, lambda by, p=packed: by.unpack(np, p, out), out


def seconds(call: Callable[[], Any]) -> float:
    """The median time of a call, over repeats of enough calls to be timed."""
    call()
    began = time.perf_counter()
    call()
    inner = max(1, int(1e-3 / max(time.perf_counter() - began, 1e-7)))
    times = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times) < 3:
        began = time.perf_counter()
        for _ in range(inner):
            call()
        times.append((time.perf_counter() - began) / inner)
    return statistics.median(times)


def wrong(case: Case, elements: int) -> int:
    """How many results differ from the twin's, on the same inputs."""
    results = []
    for by in (kernels, twins):
        for name, _, call, result in cases(elements):
            if name == case[0]:
                call(by)
                results.append(result.view(np.uint8).copy())
    return int((results[0] != results[1]).sum())


def measure(size: int) -> Iterator[dict[str, Any]]:
    """One row a kernel."""
    backend = numpy_backend()
    source, target = backend.zeros(size // 4), backend.zeros(size // 4)
    copy_s = seconds(lambda: np.copyto(target, source))
    yield {"bytes": size, "kernel": "memcpy", "c_us": 1e6 * copy_s, "gb_s": 2 * size / copy_s / 1e9}
    check = min(size // 4, 1 << 18)
    for case in cases(size // 4):
        name, arrays, call, _ = case
        c_s, twin_s = seconds(lambda: call(kernels)), seconds(lambda: call(twins))  # noqa: B023
        floor_s = arrays * copy_s / 2
        row = {"bytes": size, "kernel": name, "c_us": 1e6 * c_s, "twin_us": 1e6 * twin_s, "floor_us": 1e6 * floor_s}
        rates = {"gb_s": arrays * size / c_s / 1e9, "share": floor_s / c_s, "speedup": twin_s / c_s}
        yield {**row, **rates, "wrong": wrong(case, check)}


def main(arguments: list[str]) -> None:
    """Measure and print."""
    table = "--table" in arguments
    sizes = [int(word) for word in arguments if word != "--table"] or SIZES
    header = {"bench": "kernels", **environment.describe(), "kernels": kernels.backing(), "dtype": "float32"}
    print(json.dumps({**header, "seconds": SECONDS, "floor": "bytes moved at memcpy's speed of the same size"}))
    columns = ["c_us", "twin_us", "floor_us", "gb_s", "share", "speedup", "wrong"]
    if table:
        print(f"{'bytes':>10} {'kernel':24}" + "".join(f"{name:>10}" for name in columns))
    for size in sizes:
        for row in measure(size):
            if table:
                cells = [f"{row[name]:10.2f}" if name in row else " " * 10 for name in columns]
                print(f"{size:>10} {row['kernel']:24}" + "".join(cells), flush=True)
            else:
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
