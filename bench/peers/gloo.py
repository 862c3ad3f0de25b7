"""Gloo's allreduce, through torch.distributed: `python bench/peers/gloo.py --ranks 2 [--json]` in a venv with torch.

The ranks are processes of this one, on one machine, and find each other by a file."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import timing

VERSION = f"Gloo of torch {torch.__version__}"


def rows(rank: int, options: Any) -> Iterator[dict[str, Any]]:
    """All sizes. Collective. In place, so zeros are timed, and one call more is checked."""
    for n_bytes in options.sizes:
        array = np.zeros(n_bytes // np.dtype(options.dtype).itemsize, options.dtype)
        tensor = torch.from_numpy(array)
        count = min(timing.iterations(n_bytes), 300)
        torch.distributed.barrier()
        times = timing.durations_ns(lambda: torch.distributed.all_reduce(tensor), count)  # noqa: B023
        gathered: list[Any] = [None] * options.ranks
        array[...] = timing.contribution(array.size, rank, options.dtype)
        torch.distributed.all_reduce(tensor)
        torch.distributed.all_gather_object(gathered, (times, timing.wrong(array, options.ranks)))
        us, bad = timing.microseconds(np.array([one for one, _ in gathered])), sum(few for _, few in gathered)
        row = timing.row(VERSION, "gloo", (n_bytes, options.dtype), options.ranks, (us, us), bad)
        yield {**row, "iterations": count}


def work(rank: int, meeting_place: str, options: Any) -> None:
    """One rank."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{meeting_place}", rank=rank, world_size=options.ranks)
    timing.pin(rank, options.ranks)
    if rank == 0:
        header = {"bench": "peers/gloo", "ranks": options.ranks, "torch": torch.__version__}
        timing.show(header, rows(rank, options), options.json)
    else:
        for _ in rows(rank, options):
            pass
    torch.distributed.destroy_process_group()


def main() -> None:
    """Start the ranks and wait for them."""
    parser = timing.parser(__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (str(Path(folder, "store")), options), options.ranks)


if __name__ == "__main__":
    main()
