"""Kills, stops and resizes at random while it trains: `python bench/chaos.py [--runs 20] [--seconds 60] [--seed 1]`.

Each run trains one config, whose learners change all the time and which evaluates and saves often, under
`shoal launch --ulfm`. 3 to 6 events strike it, most of them aimed at a phase by watching its log; at least one rank is
left. The end is compared with an undisturbed run of the same config on other ranks: digest, every round, evaluation
and stage once and in order, checkpoints loadable, no process, segment or file left. A job that ends with 75 is
resumed by `--restarts`.

Times: *found* is from the signal to the rank that notices it, *recovery* from there to the event in the log, right
before the recomputed round starts, *total* both. Exit status 1 if any run went wrong; its directory is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tomli_w

import disturbed
from disturbed import Job, Log
from shoal import environment
from shoal.errors import TRY_AGAIN, InputError
from shoal.record.checkpoint import load

LEARNERS = (2, 8, 3, 1, 6, 4)
STAGE_EPOCHS = 0.7
CONFIG: dict[str, Any] = {
    "name": "chaos",
    "data": {"set": "digits"},
    "model": {"net": "convnet-s"},
    "averaging": {"steps": 4, "momentum": 0.5},
    "run": {"checkpoint_epochs": 0.3, "timeout_s": 60.0},
}
PROBE_EPOCHS = 12.0
KINDS = {"kill": 10, "stop": 2, "stop, wake": 2, "resize": 4}
"""how often each happens"""
PHASES = ("any", "any", "evaluation", "checkpoint", "resize", "recovery")
"""of what the victim is in the middle of; recovery: of a rank that was killed just before"""
END_SHARE = 0.25
"""of the runs, in which the last event is a kill at the end: of the last evaluation, checkpoint and lines"""
AIM_S = 4.0
MASTERS_SHARE = 0.35
HEARTBEATS, HEARTBEAT_S = 3.0, 1.0
RESTARTS = 8


@dataclass
class Event:
    """One disturbance: what was planned, when it struck (unix time, 0 if it did not), and what became of it."""

    at_s: float
    kind: str
    phase: str
    struck: float = 0.0
    text: str = ""
    number: int = -1
    """of the rank that was struck, as in Job.ranks, and its process"""
    pid: int = 0
    lost: bool = True
    """whether the rank was lost"""
    found_ms: float | None = None
    recovery_ms: float | None = None


@dataclass
class Outcome:
    """One run."""

    seed: int
    ranks: int
    provider: str
    events: list[Event]
    status: int = -1
    restarts: int = 0
    """after status 75"""
    wrong: list[str] = field(default_factory=list)
    wall_s: float = 0.0


def write_config(path: Path, epochs: float) -> Path:
    """The config of so many epochs."""
    starts = [n * STAGE_EPOCHS for n in range(int((epochs - 0.5) / STAGE_EPOCHS) + 1)]
    schedule = ", ".join(f"{at:.6g}:{LEARNERS[n % len(LEARNERS)]}" for n, at in enumerate(starts))
    tree = {**CONFIG, "train": {"epochs": epochs, "batch": 8}, "learners": {"schedule": schedule}}
    path.write_text(tomli_w.dumps(tree))
    return path


def plan(rng: random.Random, seconds: float, ranks: int) -> list[Event]:
    """3 to 6 events over the length of a run; one rank less is lost than there are."""
    events, most, losses = list[Event](), rng.randint(3, 6), 0
    at_end = rng.random() < END_SHARE
    for at_s in sorted(rng.uniform(0.05, 0.9) * seconds for _ in range(most - at_end)):
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        phase = rng.choice(PHASES)
        if kind == "resize" or losses + at_end == ranks - 1:
            kind, phase = "resize", "any"
        if phase == "recovery" and losses == 0:
            phase = "any"
        losses += kind != "resize"
        events.append(Event(events[-1].at_s if phase == "recovery" else at_s, kind, phase))
    if at_end:
        events.append(Event(events[-1].at_s if events else 0.0, "kill", "end"))
    return events


def strike(event: Event, job: Job, log: Log, rng: random.Random) -> None:
    """Do it, if a rank would be left."""
    if event.kind == "resize":
        wanted = rng.randint(1, len(job.ranks()) or 1)
        event.struck, event.text = time.time(), f"to {wanted}"
        asked = subprocess.run(
            [*disturbed.SHOAL, "resize", str(log.path.parent), str(wanted)], capture_output=True, check=False
        )
        if asked.returncode:  # nobody is at work there: between a death and its recovery, or at the end
            event.text += ", refused"
        return
    if event.phase == "recovery":
        time.sleep(rng.choice((0.0, rng.uniform(0, 0.05), rng.uniform(0, 0.4))))
    else:
        _aim(event.phase, job, log)
        time.sleep(rng.uniform(0, 0.06 if event.phase == "end" else 0.02))
    ranks = job.ranks()
    if len(ranks) < 2 or not job.runs():
        return
    master = rng.random() < MASTERS_SHARE
    number = min(ranks) if master else rng.choice(sorted(ranks))
    event.text = f"rank {number} of {len(ranks)}{', master' if number == min(ranks) else ''}"
    event.number, event.pid = number, ranks[number].pid
    with contextlib.suppress(disturbed.GONE):
        event.struck = time.time()
        if event.kind == "kill":
            ranks[number].kill()
        else:
            ranks[number].suspend()
        if event.kind == "stop, wake":
            time.sleep(rng.uniform(0.7, 1.25) * HEARTBEATS * HEARTBEAT_S)
            ranks[number].resume()
            time.sleep(0.1)
            event.lost = ranks[number].status() == psutil.STATUS_ZOMBIE
            event.text += "" if event.lost else ", in time"


def _aim(phase: str, job: Job, log: Log) -> None:
    """Wait until the run is about to do this, or (but for the end) for a few seconds."""
    end_s = time.monotonic() + (job.limit_s if phase == "end" else AIM_S)
    epochs = next(iter(Log(log.path).new()))["config"]["train"]["epochs"]
    log.new()
    while phase != "any" and time.monotonic() < end_s and job.runs():
        for event in log.new():
            if event["event"] == "checkpoint" and phase == "checkpoint":
                return
            if event["event"] == "round" and phase in ("end" if event["epoch"] >= epochs else "", _next(event)):
                return
        time.sleep(0.001)


def _next(event: dict[str, Any]) -> str:
    """What comes after a round, as the config says: an evaluation, a resize, or nothing special."""
    per_round = event["learners"] * event["steps"] * event["batch"] / disturbed.SAMPLES
    epoch = event["epoch"]
    if epoch // 1 > (epoch - per_round) // 1:
        return "evaluation"
    return "resize" if epoch // STAGE_EPOCHS > (epoch - per_round) // STAGE_EPOCHS else ""


def run(seed: int, ranks: int, config: Path, folder: Path, options: argparse.Namespace) -> Outcome:
    """One run with its events; nothing of it is left afterwards."""
    rng = random.Random(seed)
    provider = rng.choice(options.providers)
    outcome = Outcome(seed, ranks, provider, plan(rng, options.seconds, ranks))
    out, due = folder / "run", list(outcome.events)
    arguments = ["-n", ranks, "--ulfm", config, "--out", out, "--restarts", RESTARTS]
    if provider == "spawn":
        arguments += ["--set", "run.provider=spawn", "--set", f"run.max_ranks={ranks}"]
        arguments[1] = (ranks + 1) // 2
    began = time.monotonic()
    with disturbed.place(folder) as variables, Job(folder, arguments, variables, 5 * options.seconds + 60) as job:
        log = Log(out / "run.jsonl")
        while job.runs() and not log.new():
            time.sleep(0.01)
        started = time.monotonic()
        while due and job.wait(max(0.0, due[0].at_s - (time.monotonic() - started))):
            strike(due.pop(0), job, log, rng)
        if job.wait(job.limit_s):
            outcome.wrong.append(f"hangs (not ended {job.limit_s:g} s after the last event)")
            job.describe(folder / "hang.txt")
        job.close()
        outcome.wrong += job.left
    outcome.status, outcome.wall_s = job.status, time.monotonic() - began
    outcome.restarts = (folder / "output.txt").read_text(errors="replace").count("; restart ")
    return outcome


def check(outcome: Outcome, out: Path, undisturbed: Path) -> None:
    """Compare the run with the undisturbed one, and note what is wrong."""
    wrong = outcome.wrong
    if outcome.status != 0:
        wrong.append(f"ended with status {outcome.status}")
        return
    expected, found = disturbed.digest(undisturbed), disturbed.digest(out)
    if found != expected:
        wrong.append(f"digest {found}, not {expected}")
    wrong += disturbed.differences(Log(undisturbed / "run.jsonl").new(), Log(out / "run.jsonl").new())
    for path in out.glob("checkpoint*.h5"):
        try:
            load(path)
        except InputError as error:
            wrong.append(str(error))
    expected_files = {"DONE", "checkpoint.h5", "config.toml", "lease", "run.jsonl", "resize"}
    wrong += [
        f"left {path.name}"
        for path in sorted(out.iterdir())
        if path.name not in expected_files and not (path.suffix == ".h5" and path.name.startswith("checkpoint-"))
    ]


def attribute(outcome: Outcome, events: list[dict[str, Any]]) -> None:
    """Which recovery belongs to which event: the one that has lost the process that was struck, first by this event.

    The log tells the process of a rank that came; a rank of the start is lost under its number, in the job that was
    under way when it was struck."""
    came, started = dict[int, int](), 0.0
    for event in events:
        if event["event"] in ("header", "resume"):
            came, started = {}, event["time"]
        if event["event"] == "world" and event["action"] == "grow":
            came[event["rank"]] = event["pid"]
        if event["event"] != "recovery":
            continue
        for lost in event["lost"]:
            for one in outcome.events:
                mine = one.pid == came[lost] if lost in came else one.number == lost
                if mine and one.lost and started < one.struck < event["time"]:
                    one.found_ms = 1e3 * (event["time"] - one.struck) - event["recovery_ms"]
                    one.recovery_ms = event["recovery_ms"]
                    break


def say(number: int, outcome: Outcome) -> None:
    """The run in words."""
    again = f", {outcome.restarts} restarts" if outcome.restarts else ""
    print(
        f"run {number}: {outcome.ranks} ranks ({outcome.provider}), seed {outcome.seed}, {outcome.wall_s:.0f} s, "
        f"status {outcome.status}{again}"
    )
    for one in outcome.events:
        times = "" if one.found_ms is None else f"found {one.found_ms:.0f} ms, recovery {one.recovery_ms:.0f} ms"
        struck = f"{one.text:<22}" if one.struck else "did not happen"
        print(f"    {one.at_s:6.1f} s  {one.kind:<11}{one.phase:<12}{struck}  {times}")
    print(f"    {'; '.join(outcome.wrong) or 'right'}", flush=True)


def summary(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Medians and the longest, of deaths and of stops that ended in an exclusion."""
    rows = []
    for what, kinds in (("death", ("kill",)), ("hang", ("stop", "stop, wake"))):
        events = [one for outcome in outcomes for one in outcome.events if one.kind in kinds and one.struck]
        timed = [one for one in events if one.found_ms is not None and one.recovery_ms is not None]
        row: dict[str, Any] = {"what": what, "events": len(events), "timed": len(timed)}
        for name, of in (
            ("found_ms", lambda one: one.found_ms),
            ("recovery_ms", lambda one: one.recovery_ms),
            ("total_ms", lambda one: one.found_ms + one.recovery_ms),
        ):
            if timed:
                values = [of(one) for one in timed]
                row |= {name: round(statistics.median(values), 1), f"longest_{name}": round(max(values), 1)}
        rows.append(row)
    return rows


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0, help="about the length of a run")
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8], help="the fewest and the most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a file for the header, the runs and the medians, as JSON lines")
    parser.add_argument("--against", type=Path, help="a folder to keep the undisturbed run in, or to take it from")
    parser.add_argument("--providers", nargs="*", default=["reserve"], help="reserve, spawn")
    return parser.parse_args()


def make_undisturbed(folder: Path, config: Path, ranks: int, seconds: float) -> None:
    """The config, of as many epochs as so many ranks train in about so many seconds, and a run of it on two ranks."""
    folder.mkdir(exist_ok=True)
    probe_s = disturbed.undisturbed(folder, write_config(folder / "probe.toml", PROBE_EPOCHS), ranks, "probe")
    written = write_config(folder / "making.toml", max(PROBE_EPOCHS, round(PROBE_EPOCHS * seconds / probe_s, 1)))
    disturbed.undisturbed(folder, written, 2, "undisturbed")
    written.replace(config)


def main() -> None:
    """Run them all."""
    options, load_before = parse(), os.getloadavg()[0]
    disturbed.end_in_order()
    folder = Path(tempfile.mkdtemp(prefix="shoal-chaos-"))
    low, high = min(options.ranks), max(options.ranks)
    against = options.against or folder
    config = against / "chaos.toml"
    if not config.exists():
        make_undisturbed(against, config, high, options.seconds)
    header = {"bench": "chaos", **environment.describe(), "load_before": load_before}
    header |= {"runs": options.runs, "seconds": options.seconds, "ranks": [low, high], "seed": options.seed}
    header["providers"] = options.providers
    print(json.dumps(header))
    outcomes = []
    for number in range(options.runs):
        seed = 1000 * options.seed + number
        place = folder / f"run-{seed}"
        place.mkdir()
        outcome = run(seed, low + number % (high - low + 1), config, place, options)
        check(outcome, place / "run", against / "undisturbed")
        with contextlib.suppress(OSError):
            attribute(outcome, Log(place / "run" / "run.jsonl").new())
        say(number + 1, outcome)
        outcomes.append(outcome)
        if not outcome.wrong:
            shutil.rmtree(place)
    finish(outcomes, header, options, folder)


def finish(outcomes: list[Outcome], header: dict[str, Any], options: argparse.Namespace, folder: Path) -> None:
    """The medians, the JSON, and the exit status."""
    rows = summary(outcomes)
    for row in rows:
        print(json.dumps(row))
    bad = [outcome.seed for outcome in outcomes if outcome.wrong]
    restarts = sum(outcome.restarts for outcome in outcomes)
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} runs right, {restarts} restarts after status {TRY_AGAIN}")
    if options.json:
        lines = [header, *({**vars(o), "events": [vars(e) for e in o.events]} for o in outcomes), *rows]
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if bad:
        sys.exit(f"wrong: seeds {', '.join(map(str, bad))}; see {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
