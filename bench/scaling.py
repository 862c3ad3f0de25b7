"""Strong and weak scaling in one allocation: `shoal bench scaling -n 4 CONFIG [--ranks 1,2,4] [--steps 1,8] ...`.

The job has all ranks from the start and goes to the next number of ranks by a resize: every repeat visits all of them,
in turn, so that what changes slowly on the machine changes all alike. weak: a learner a rank, each with the config's
batch; strong: a learner a rank, which share the config's batch. A visit is some rounds, of which the first are left
out; its time is their median, as the master sees a round: to the end of its slowest rank. A row is the median over the
visits with an interval of 95% at least (`coverage` says what it holds); the efficiency is that of that visit's base,
the first number of ranks. Evaluations, resizes and checkpoints are not in it. `step_ms` is what ranks were busy with a
step, their mean; `reduction` the share of a round in which they were not, waiting included. Where a node has more ranks
than cores the row is *oversubscribed*, and has no efficiency.

Writes a header and the rows as JSON lines (--out DIR: DIR/scaling.jsonl); `shoal plot --scaling` draws them,
`shoal predict --step` and `shoal calibrate` read them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from msgspec.structs import asdict

import shoal
from shoal import config as configs
from shoal import environment
from shoal.errors import InputError
from shoal.report.intervals import Median
from shoal.report.load import identity, sizes

LEFT_OUT = 3


@dataclass
class Visits:
    """The rounds of one job: which number of ranks is visited when, and what was measured. Lives on every rank, and is
    filled on the master."""

    order: list[int]
    rounds: int
    done: int = 0
    nodes: tuple[int, ...] = ()
    before: tuple[float, float] = (0.0, 0.0)
    found: dict[tuple[int, int], list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """(visit, ranks) -> seconds of each round counted, and busy seconds of a rank"""
    places: dict[int, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    """ranks -> the ranks on each node, and the algorithm"""
    chosen: str = ""

    def hear(self, event: dict[str, Any]) -> None:
        """An event of the log."""
        if event["event"] == "algorithm":
            self.nodes, self.chosen = tuple(event["nodes"] or (1,) * event["ranks"]), event["algorithm"]
        if event["event"] != "round":
            return
        visit, place = divmod(self.done, self.rounds)
        now = (event["train_s"], event["busy_rank_s"])
        if place >= LEFT_OUT and event["ranks"] == self.order[min(visit, len(self.order) - 1)]:
            round_s, busy_s = now[0] - self.before[0], (now[1] - self.before[1]) / event["ranks"]
            self.found[visit, event["ranks"]].append((round_s, busy_s))
            self.places[event["ranks"]] = (self.nodes, self.chosen)
        self.before, self.done = now, self.done + 1

    def policy(self, now: shoal.Situation) -> shoal.Resize:
        """The ranks of the next round."""
        ranks = self.order[min(self.done // self.rounds, len(self.order) - 1)]
        return shoal.Resize(ranks=ranks, learners=ranks)


def measure(config: configs.Config, options: argparse.Namespace, mode: str, steps: int) -> list[dict[str, Any]]:
    """The rows of one mode and K; empty but on the master. Collective."""
    visits = Visits(options.ranks * options.repeats, options.rounds + LEFT_OUT)
    batch = config.train.batch
    samples = sizes(config).samples
    learners = sum(visits.order) if mode == "weak" else len(visits.order)
    result = shoal.train(
        config.model.net,
        config.data.set,
        learners=f"0:{visits.order[0]}",
        averaging=msgspec.structs.replace(config.averaging, steps=steps),
        learning_rate=config.learning_rate,
        policy=visits.policy,
        on_event=visits.hear,
        progress=False,
        seed=config.seed,
        **{
            **_options(config),
            "batch_mode": "global" if mode == "strong" else "per_learner",
            "epochs": learners * visits.rounds * steps * batch / samples,
            "max_learners": max(options.ranks),
        },
    )
    return rows(visits, options, (mode, steps, batch)) if result.master else []


def _options(config: configs.Config) -> dict[str, Any]:
    """What the config sets beside what a row does."""
    parts = {**asdict(config.data), **asdict(config.model), **asdict(config.train), **asdict(config.run)}
    return {key: value for key, value in parts.items() if key not in ("set", "net") and value is not None}


def rows(visits: Visits, options: argparse.Namespace, what: tuple[str, int, int]) -> list[dict[str, Any]]:
    """A row for each number of ranks."""
    mode, steps, batch = what
    base, made = options.ranks[0], []
    medians = {at: tuple(map(statistics.median, zip(*found, strict=True))) for at, found in visits.found.items()}
    for ranks in options.ranks:
        at = [visit for visit, count in enumerate(visits.order) if count == ranks and (visit, ranks) in medians]
        rounds_s, busy_s = zip(*(medians[visit, ranks] for visit in at), strict=True)
        of_base = [medians[visit - options.ranks.index(ranks), base][0] for visit in at]
        nodes, algorithm = visits.places[ranks]
        crowded = max(nodes) * options.threads > options.cores
        time, own = Median.of(rounds_s), batch // ranks if mode == "strong" else batch
        row = {"mode": mode, "steps": steps, "ranks": ranks, "nodes": nodes, "algorithm": algorithm, "batch": own}
        row |= {"repeats": len(at), "coverage": round(time.coverage, 4), "oversubscribed": crowded}
        row |= {"round_ms": 1e3 * time.value, "low_ms": 1e3 * time.low, "high_ms": 1e3 * time.high}
        row |= {"step_ms": 1e3 * statistics.median(busy_s) / steps, "samples_s": ranks * own * steps / time.value}
        row["reduction"] = statistics.median(1 - b / t for b, t in zip(busy_s, rounds_s, strict=True))
        if not crowded:
            gain = 1 if mode == "weak" else base / ranks
            value = Median.of([gain * b / t for b, t in zip(of_base, rounds_s, strict=True)])
            row |= {"base": base, "efficiency": value.value, "efficiency_low": value.low}
            row["efficiency_high"] = value.high
        made.append(row)
    return made


class Parser(argparse.ArgumentParser):
    """Bad options are an InputError, the same on all ranks."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} -h", agreed=True) from None


def count(text: str) -> int:
    """A number from 1."""
    if not (text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def numbers(text: str) -> list[int]:
    """By commas, each once."""
    return list(dict.fromkeys(map(count, text.split(","))))


def modes(text: str) -> list[str]:
    """By commas."""
    if not {"weak", "strong"} >= {*text.split(",")}:
        raise argparse.ArgumentTypeError(f"{text!r} is not weak, strong or weak,strong")
    return text.split(",")


def rate(text: str) -> float:
    """Above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no rate above 0")
    return value


def parse() -> argparse.Namespace:
    """The options. Raises InputError."""
    parser = Parser(prog="shoal bench scaling", description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--ranks", type=numbers, help="default: 1, 2, 4, ... and all")
    parser.add_argument("--steps", type=numbers, help="K, several by commas; default: the config's")
    parser.add_argument("--modes", type=modes, default="weak,strong")
    parser.add_argument("--repeats", type=count, default=9)
    parser.add_argument("--rounds", type=count, default=10, help="of a visit, beside those left out")
    parser.add_argument("--cores", type=count, default=len(os.sched_getaffinity(0)), help="of a node")
    parser.add_argument("--link-gbit", type=rate, help="between nodes, where it is known; for shoal calibrate")
    parser.add_argument("--out", type=Path, help="a directory, for scaling.jsonl")
    parser.add_argument("--resume", action="store_true", help="of no effect; batch scripts give it")
    return parser.parse_args()


def prepared(options: argparse.Namespace) -> tuple[configs.Config, int]:
    """The config and the ranks of the job; fills in the defaults. Raises InputError, alike on all ranks."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Get_size()
    config = configs.load(options.config, options.set)
    options.steps, options.threads = options.steps or [config.averaging.steps], config.run.threads
    doubling = [1 << k for k in range(world.bit_length()) if 1 << k < world]
    options.ranks = options.ranks or [*doubling, world]
    if not 1 <= min(options.ranks) <= max(options.ranks) <= world:
        raise InputError(f"--ranks {options.ranks} cannot be had: this job has {world}; start more, or give fewer")
    uneven = [ranks for ranks in options.ranks if config.train.batch % ranks]
    if "strong" in options.modes and uneven:
        raise InputError(
            f"a batch of {config.train.batch} cannot be shared by {uneven[0]} ranks evenly, which strong scaling does; "
            "give another (--set train.batch=...), or --modes weak"
        )
    if options.out is not None:  # now, not when all is measured
        try:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "scaling.jsonl").open("a").close()
        except OSError as error:
            raise InputError(f"{options.out} cannot be written ({error.strerror}); give another --out") from None
    return config, world


def main() -> None:
    """Measure all and write it. Collective."""
    options = parse()
    try:
        config, world = prepared(options)
    except InputError as error:  # the same on all ranks, which read the same
        raise InputError(str(error), agreed=True) from None
    header = {"bench": "scaling", **environment.describe(), **identity(config, sizes(config)), "data": config.data.set}
    header |= {"world": world, "cores": options.cores, "rounds": options.rounds, "left_out": LEFT_OUT}
    header |= {"link_gbit": options.link_gbit, "config": configs.dump(config), "load_before": os.getloadavg()[0]}
    found = []
    for mode, steps in itertools.product(options.modes, options.steps):
        found += measure(config, options, mode, steps)
        for row in found[-len(options.ranks) :]:
            print(json.dumps(row), flush=True)
    if found and options.out is not None:
        lines = "".join(json.dumps(row) + "\n" for row in [header, *found])
        (options.out / "scaling.jsonl").write_text(lines, encoding="utf-8")
        (options.out / "DONE").touch()
        print(f"wrote {options.out / 'scaling.jsonl'}", flush=True)


if __name__ == "__main__":
    main()
