"""Every growth and shrinkage by spawned ranks: `python bench/tour.py [--sizes 1 2 3 4 8] [--launch=--ulfm]`.

A job starts with one rank. Its size is then changed from outside from each of the sizes to each other, twice, each
time when all ranks have come or gone. Then it is stopped, and trained to the same position without any of that, on
two ranks: both must have the same digest. Exit status 1 if they have not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import tomli_w

import disturbed
from disturbed import Job, Log
from resize import sizes
from shoal import environment
from shoal.errors import STOPPED
from shoal.record.recorder import WishFile

CONFIG: dict[str, Any] = {
    "name": "tour",
    "data": {"set": "digits"},
    "model": {"net": "convnet-s", "width": 4},
    "averaging": {"steps": 4, "momentum": 0.5},
    "learning_rate": {"decay": "constant"},
}
LONG_EPOCHS = 100_000.0
MOVE_S, END_S = 90.0, 60.0


def write_config(path: Path, learners: int, epochs: float, run: dict[str, Any]) -> Path:
    """The config of so many epochs."""
    tree = {**CONFIG, "train": {"epochs": epochs, "batch": 4}, "learners": {"schedule": f"0:{learners}"}, "run": run}
    path.write_text(tomli_w.dumps(tree))
    return path


class Follower:
    """What the log says: how many ranks there are and work, the rounds done, and where they end."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.world = self.works = 1
        self.consumed = 0
        self.leads_s: list[float] = []

    def look(self) -> None:
        """Read on."""
        for event in self._log.new():
            self.world = event["world"] if event["event"] in ("world", "header") else self.world
            self.works = event["ranks"] if event["event"] == "round" else self.works
            self.consumed = event.get("consumed", self.consumed)
            if event["event"] == "world" and event["action"] == "grow":
                self.leads_s.append(event["spawn_s"] + event["prepare_s"] + event["merge_s"])


def travel(job: Job, run: Path, tour: list[int], seen: Follower) -> str:
    """Change the size along the tour; what went wrong, or an empty text."""
    wishes = WishFile(run)
    for before, size in pairwise(tour):
        wishes.put({"ranks": size})
        end_s = time.monotonic() + MOVE_S
        while (seen.world, seen.works) != (size, size):
            if not job.runs() or time.monotonic() > end_s:
                return f"from {before} to {size}: {seen.world} ranks, {seen.works} work, runs: {job.runs()}"
            time.sleep(0.02)
            seen.look()
    return ""


def main() -> None:
    """Go on tour, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 2, 3, 4, 8])
    parser.add_argument("--launch", action="append", default=[], help="an option for shoal launch")
    options, load = parser.parse_args(), os.getloadavg()[0]
    disturbed.end_in_order()
    kinds, most = len(options.sizes), max(options.sizes)
    tour = [options.sizes[number - 1] for number in sizes(kinds, 2 * kinds * (kinds - 1) + 1)]
    folder = Path(tempfile.mkdtemp(prefix="shoal-tour-"))
    run, seen = folder / "run", Follower(Log(folder / "run" / "run.jsonl"))
    config = write_config(folder / "tour.toml", most, LONG_EPOCHS, {"provider": "spawn", "max_ranks": most})
    began = time.monotonic()
    arguments = ["-n", tour[0], *options.launch, config, "--out", run]
    with disturbed.place(folder) as variables, Job(folder, arguments, variables, END_S) as job:
        while job.runs() and not run.joinpath("run.jsonl").exists():
            time.sleep(0.02)
        wrong = travel(job, run, tour, seen)
        (run / "stop").touch()
        job.wait(END_S)
        job.close()
        took_s, left = time.monotonic() - began, job.left
    seen.look()
    if job.status != STOPPED or wrong:
        sys.exit(f"status {job.status}; {wrong}; see {folder}")
    straight = write_config(folder / "straight.toml", most, (seen.consumed - 0.5) / disturbed.SAMPLES, {})
    disturbed.undisturbed(folder, straight, 2, "straight")
    same = disturbed.digest(run) == disturbed.digest(folder / "straight")
    leads = sorted(seen.leads_s)
    row = {"changes": len(tour) - 1, "spawned": len(leads), "lead_s": round(leads[len(leads) // 2], 2), "left": left}
    row |= {"longest_lead_s": round(leads[-1], 2), "seconds": round(took_s, 1), "consumed": seen.consumed, "same": same}
    print(json.dumps({"bench": "tour", **environment.describe(), "launch": options.launch, "load_before": load, **row}))
    if not same or left:
        sys.exit(f"see {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
