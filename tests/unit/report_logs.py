"""Made-up run directories for the tests of reports: learning curves of the right shape, keyed by seed."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np

from shoal.record.runlog import RunLog

SAMPLES = 1437
SCHEDULES = {
    "I": ((0, 2),),
    "II": ((0, 2), (6, 8)),
    "III": ((0, 8), (6, 2)),
    "IV": ((0, 8),),
    "V": ((0, 2), (1.2, 4), (2.4, 8)),
}
LEVELS = {
    0.0: {"I": 96.0, "II": 97.7, "III": 96.8, "IV": 97.0, "V": 97.5},
    0.5: {"I": 91.9, "II": 96.9, "III": 95.1, "IV": 97.3, "V": 97.6},
}


def config(name: str, mu: float, seed: int) -> dict[str, Any]:
    return {
        "name": f"demo-{name}",
        "seed": seed,
        "data": {"set": "digits-noisy"},
        "train": {"epochs": 12, "batch": 8},
        "learners": {"schedule": f"paper-{name}", "p": 2, "r": 4},
        "averaging": {"steps": 4, "momentum": mu},
    }


def write_run(
    directory: Path,
    name: str = "II",
    mu: float = 0.0,
    seed: int = 1,
    *,
    epochs: float = 12,
    level: float | None = None,
    noise: float = 0.3,
    changes: dict[str, Any] | None = None,
    validation: bool = False,
    ended: bool = True,
) -> Path:
    """A run of schedule `name`; `level` is its final accuracy in percent, up to `noise`."""
    directory.mkdir(parents=True)
    log = RunLog(directory / "run.jsonl", itertools.count(0.0, 0.01).__next__)
    full = {**config(name, mu, seed), **(changes or {})}
    log.event(
        "header",
        format=1,
        name=full["name"],
        seed=seed,
        config=full,
        caption="digits, 20% of training labels randomised",
        samples=SAMPLES,
    )
    rng = np.random.default_rng([seed, list(SCHEDULES).index(name), int(10 * mu)])
    top = (LEVELS.get(mu, LEVELS[0.0])[name] if level is None else level) + noise * rng.standard_normal()
    stages, consumed, serial, steps, number, evaluated, learners = SCHEDULES[name], 0, 0, 0, 0, 0, 0
    cost: dict[str, Any] = {}
    while consumed < epochs * SAMPLES:
        epoch = consumed / SAMPLES
        count = [p for start, p in stages if start <= epoch][-1]
        if learners and count != learners:
            change = [learners, count]
            log.event("resize", round=number, epoch=epoch, learners=change, ranks=change, stall_ms=0.5)
        learners, number = count, number + 1
        consumed, serial, steps = consumed + count * 32, serial + 4, steps + 4 * count
        busy = steps * 1e-3
        cost = {
            "consumed": consumed,
            "epoch": consumed / SAMPLES,
            "learners": count,
            "serial_steps": serial,
            "learner_steps": steps,
            "busy_rank_s": busy,
            "allocated_rank_s": 8 * serial * 1e-3,
            "train_s": serial * 1e-3,
        }
        pace = serial / 160
        loss = 0.7 + 1.6 * math.exp(-pace) + 0.15 * rng.standard_normal()
        log.event("round", round=number, ranks=min(count, 4), steps=4, batch=8, rate=0.1, loss=loss, **cost)
        if consumed / SAMPLES >= evaluated + 1:
            evaluated = int(consumed / SAMPLES)
            accuracy = (
                top - 60 * math.exp(-1.2 * serial / 24) - 6 / (1 + epoch) ** 1.5
            ) / 100 + 0.002 * rng.standard_normal()
            test = {"accuracy": round(accuracy * 360) / 360, "loss": 2 * (1 - accuracy)}
            parts = {"test": test, **({"validation": {"accuracy": 0.5, "loss": 1.0}} if validation else {})}
            log.event("evaluation", round=number, evaluation_s=0.01, **cost, **parts)
    if ended:
        final = {"accuracy": top / 100, "loss": 0.1}
        end = {k: cost[k] for k in ("consumed", "epoch", "serial_steps", "learner_steps")}
        log.event("end", round=number, digest="00", test=final, **end)
    log.close()
    return directory


def write_demo(root: Path, seeds: int = 3) -> list[Path]:
    """Every schedule at mu = 0 and 0.5."""
    return [
        write_run(root / f"{name}-{mu:g}-{seed}", name, mu, seed)
        for mu in LEVELS
        for name in SCHEDULES
        for seed in range(1, seeds + 1)
    ]
