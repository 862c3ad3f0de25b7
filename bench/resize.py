"""What a resize costs: `python bench/resize.py [--ranks 4] [--resizes 60] [--many 5000]`.

A job of several ranks trains an MLP whose group goes through all sizes from 1 to the number of ranks, each from each,
every few rounds; the rest of the ranks sleep. By the size of the state (anchor + velocity):

    stall   from a round's commit to the first step of the next on the master, beyond its median without a resize (the
            log's stall_ms)
    cpu     processor time of the master from the log's line of the round to that of the resize, right before the step:
            what is left of the stall where ranks have cores of their own
    excess  what the whole first round in the new group takes beyond the later ones in it: the joiners' late start and
            the first touch of their memory come here too
    lead    from the start of preparations to the resize, while training goes on (a reserve needs none)

Then, with --many, so many resizes in one job: what each rank holds at the end against what it held after its first ten.
With --peer, torchrun's elastic agent (peers/torchrun_growth.py, in the venv of `make bench-peers`) grows a job from one
to two processes and back, before and after ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import psutil

import shoal
from shoal import environment
from shoal.data.sets import open_set

HERE = Path(__file__).resolve()
STATES = {"44 MB + 44 MB": (784, 2400, 3600), "400 KB": (64, 200, 200)}
"""features and hidden widths by the size of the state"""
TARGETS_MS = {"44 MB + 44 MB": 5.0, "400 KB": 1.0}
ROUNDS_EACH = 4
LEARNERS_OF_MANY = 12
EARLY_STEPS = 100
MEMORY_LIMIT_MB = 5.0
HELD = ("communicators", "descriptors", "threads", "memory_mb", "shared_files")
LIMIT_S = 900
GLOO = HERE.parents[1] / ".venv-gloo/bin/python"


def sizes(ranks: int, count: int) -> list[int]:
    """`count` sizes one after another, in which each follows each other equally often."""
    round_trip = [n for a in range(1, ranks + 1) for b in range(a + 1, ranks + 1) for n in (a, b)]
    walk = [n for n, before in zip(round_trip, [0, *round_trip], strict=False) if n != before]
    walk = walk[:-1] if walk[-1] == walk[0] else walk
    return (walk * (count // len(walk) + 1))[:count]


def in_a_job(what: str, ranks: int, count: int, out: str) -> None:
    """One rank: train through `count` resizes, and on the master print what was measured. Collective."""
    if what == "many":
        many(ranks, count, out)
        return
    events: list[dict[str, Any]] = []

    def listen(event: dict[str, Any]) -> None:
        events.append({**event, "cpu_s": time.thread_time()})

    shape = STATES[what]
    schedule = sizes(ranks, count)

    def policy(now: shoal.Situation) -> int:
        return schedule[min(now.round // ROUNDS_EACH, count - 1)]

    samples = ROUNDS_EACH * sum(schedule) + 1
    train(shape[0], shape[1:], samples, listen, policy, learners=f"0:{schedule[0]}")
    if events:
        print(json.dumps({"what": what, **stalls(events)}), flush=True)


def train(
    features: int, hidden: tuple[int, ...], samples: int, listen: Callable[[Any], None], policy: Any, learners: str
) -> shoal.Result:
    """One epoch of one-sample steps, so that nothing is evaluated before the end."""
    data = open_set(shoal.config.Data(set="synthetic", shape=(features,), train=samples, test=64), 1)
    return shoal.train(
        "mlp",
        data,
        hidden=hidden,
        learners=learners,
        averaging=shoal.Averaging(steps=1, momentum=0.5),
        learning_rate=1e-4,
        batch=1,
        epochs=1,
        progress=False,
        on_event=listen,
        policy=policy,
    )


def stalls(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the resizes of a job, by growth and shrinkage."""
    rounds = [event for event in events if event["event"] == "round"]
    spent_s = [event["train_s"] for event in rounds]
    took_ms = {e["round"]: 1e3 * (b - a) for e, a, b in zip(rounds, [0.0, *spent_s], spent_s, strict=False)}
    resizes = [event for event in events if event["event"] == "resize"]
    first = {event["round"] + 1 for event in resizes} | {1}
    calm: dict[int, list[float]] = defaultdict(list)
    for event in rounds:
        if event["round"] not in first:
            calm[event["ranks"]].append(took_ms[event["round"]])
    rows = defaultdict(list)
    logged_s = {event["round"]: event["cpu_s"] for event in rounds}
    for event in resizes:
        before, after = event["ranks"]
        cpu_ms = 1e3 * (event["cpu_s"] - logged_s[event["round"]])
        excess_ms = took_ms.get(event["round"] + 1, 0.0) - statistics.median(calm[after])
        for name in ("all", "growth" if after > before else "shrinkage"):
            rows[name].append((event["stall_ms"], cpu_ms, excess_ms, event.get("lead_ms", 0.0)))
    result: dict[str, Any] = {"resizes": len(resizes), "round_ms": {n: _median(ms) for n, ms in sorted(calm.items())}}
    for name, values in rows.items():
        columns = list(zip(*values, strict=True))
        result[name] = {
            "stall_ms": _median(columns[0]),
            "stall_p90_ms": round(statistics.quantiles(columns[0], n=10)[-1], 3),
            "cpu_ms": _median(columns[1]),
            "excess_ms": _median(columns[2]),
            "lead_ms": _median(columns[3]),
        }
    return result


def _median(values: Any) -> float:
    return round(statistics.median(values), 3)


class Counting(shoal.ReLU):
    """Looks at what this rank holds: early, after some ten resizes, and then now and again."""

    steps = 0
    seen: ClassVar[list[dict[str, float]]] = []

    def forward(self, x: Any, training: bool) -> Any:
        self.steps += training
        if training and (self.steps == EARLY_STEPS or self.steps % (5 * EARLY_STEPS) == 0):
            self.seen[1:] = [held()]
        return super().forward(x, training)


def held() -> dict[str, float]:
    """What this process holds. communicators: the lowest free handle."""
    from mpi4py import MPI

    own = MPI.COMM_SELF.Dup()
    handle, process = own.py2f(), psutil.Process()
    own.Free()
    memory = process.memory_full_info()
    shared = len(list(Path("/dev/shm").glob("*")))
    return dict(zip(HELD, (handle, process.num_fds(), process.num_threads(), memory.uss / 1e6, shared), strict=True))


def many(ranks: int, count: int, out: str) -> None:
    """Ranks change after every round. Collective."""
    from mpi4py import MPI

    schedule, resizes = sizes(ranks, count), [0]
    net = shoal.Sequential(shoal.Linear(16, 8), Counting(), shoal.Linear(8, 4))
    data = open_set(
        shoal.config.Data(set="synthetic", shape=(16,), classes=4, train=LEARNERS_OF_MANY * count, test=64), 1
    )

    def listen(event: dict[str, Any]) -> None:
        resizes[0] += event["event"] == "resize"

    began = time.monotonic()
    shoal.train(
        net,
        data,
        learners=f"0:{LEARNERS_OF_MANY}",
        learning_rate=1e-3,
        batch=1,
        epochs=1,
        out=out,
        progress=False,
        on_event=listen,
        policy=lambda now: shoal.Resize(ranks=schedule[min(now.round, count - 1)]),
    )
    took_s = time.monotonic() - began
    rows = MPI.COMM_WORLD.gather((Counting.seen, resizes[0]))
    if rows:
        most = max(number for _, number in rows)
        print(json.dumps({"what": "many", "resizes": most, "seconds": round(took_s, 1), "held": [r for r, _ in rows]}))


def job(what: str, ranks: int, count: int, *launch: str) -> dict[str, Any]:
    """Start this file as a job; what it measured."""
    launched = [sys.executable, "-m", "shoal", "launch", "-n", str(ranks), *launch, str(HERE)]
    with tempfile.TemporaryDirectory() as folder:
        command = [*launched, "job", what, str(ranks), str(count), folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def peer() -> list[dict[str, Any]]:
    """What torchrun takes, one growth and one shrinkage."""
    command = [str(GLOO), str(HERE.parent / "peers/torchrun_growth.py"), "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()[1:]]


def beside(rows: list[dict[str, Any]], peers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our stalls in the peer's."""
    found = []
    for event in ("growth", "shrinkage"):
        theirs_ms = statistics.median(one["stall_ms"] for one in peers if one["event"] == event)
        for row in rows:
            ours_ms = row[event]["stall_ms"]
            ratio = round(theirs_ms / max(ours_ms, 1e-3))
            found.append({"what": row["what"], "event": event, "stall_ms": ours_ms, "peer_stall_ms": theirs_ms})
            found[-1]["ratio"] = ratio
            print(f"{row['what']:>14} {event}: torchrun's stall {theirs_ms:.0f} ms, ours {ours_ms:.2f} ms: {ratio}x")
    return found


def leaks(row: dict[str, Any]) -> list[str]:
    """What any rank holds more of than after its first ten resizes."""
    found = []
    for rank, (early, late) in enumerate(row["held"]):
        for name in HELD:
            allowed = MEMORY_LIMIT_MB if name == "memory_mb" else 0
            if abs(late[name] - early[name]) > allowed:
                found.append(f"rank {rank}: {name} {early[name]:g} -> {late[name]:g}")
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """The table of stalls, medians in ms."""
    print(f"{'state':>14}{'resizes':>9}{'':>11}{'stall':>9}{'p90':>9}{'cpu':>9}{'excess':>9}{'lead':>9}{'target':>9}")
    for row in rows:
        for name in ("all", "growth", "shrinkage"):
            at, target = row[name], f"{TARGETS_MS[row['what']]:g}" if name == "all" else ""
            cells = "".join(f"{at[key]:9.2f}" for key in ("stall_ms", "stall_p90_ms", "cpu_ms", "excess_ms", "lead_ms"))
            print(f"{row['what']:>14}{row['resizes']:>9}{name:>11}{cells}{target:>9}")


def main() -> None:
    """Measure, or be a rank of what is measured."""
    if sys.argv[1:2] == ["job"]:
        in_a_job(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--resizes", type=int, default=60)
    parser.add_argument("--many", type=int, default=0)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--json", type=Path, help="a file for the header and the rows, as JSON lines")
    options = parser.parse_args()
    header = {"bench": "resize", **environment.describe(), "ranks": options.ranks, "load_before": os.getloadavg()[0]}
    print(json.dumps(header), flush=True)
    peers = peer() if options.peer else []
    rows = [job(what, options.ranks, options.resizes) for what in STATES]
    show(rows)
    if options.peer:
        rows += [*(peers := [*peers, *peer()]), *beside(rows, peers)]
    wrong = []
    if options.many:
        rows.append(job("many", options.ranks, options.many))
        wrong = leaks(rows[-1])
        print(f"{rows[-1]['resizes']} resizes in {rows[-1]['seconds']} s: {'; '.join(wrong) or 'nothing grew'}")
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in [header, *rows]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
