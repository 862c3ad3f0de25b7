"""What a config trains, as predictions need it: sizes without opening files that may not be there, and a step's time.

`shoal bench step CONFIG -o step.jsonl` measures a step, and a file of bench/scaling.py holds one too; the header says
of which net, and a file of another net is refused.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from shoal.backend import numpy_backend
from shoal.config import Config
from shoal.data.formats import CIFAR10_CLASSES, CIFAR10_RECORDS, CIFAR10_TRAIN
from shoal.data.sets import open_set
from shoal.errors import InputError
from shoal.model import Model, build
from shoal.report.intervals import Median
from shoal.report.predict import Load
from shoal.sgd.optimizer import contribution_size

Positive = Annotated[float, Meta(gt=0, le=1e12)]
Count = Annotated[int, Meta(ge=1)]
_LONGEST_MS = 1e9


class StepRow(Struct):
    """What is read of a row that has a step's time."""

    ranks: Count
    batch: Count
    step_ms: Positive


@dataclass(frozen=True)
class Sizes:
    """samples: of an epoch; numbers: of a reduction; state: that a joiner is sent."""

    samples: int
    sample: tuple[int, ...]
    outputs: int
    numbers: int
    state: int


def sizes(config: Config) -> Sizes:
    """Of what a config trains. Raises InputError."""
    sample: tuple[int, ...] = (32, 32, 3)
    if config.data.set == "cifar10":  # known without the files
        samples = CIFAR10_RECORDS * len(CIFAR10_TRAIN)
        samples -= round(config.data.validation * samples)
        outputs = CIFAR10_CLASSES
    else:
        data = open_set(config.data, config.seed)
        samples, sample, outputs = len(data.train), data.sample_shape, data.outputs
    model = Model(build(config.model, sample, outputs), sample, config.model.loss, numpy_backend(), seed=config.seed)
    state = model.layout.size + 2 * model.layout.parameters
    return Sizes(samples, sample, outputs, contribution_size(model, config.train), state)


def identity(config: Config, found: Sizes) -> dict[str, Any]:
    """What a bench's header says of the net, and what must be equal for its times to be of use."""
    return {
        "model": msgspec.to_builtins(config.model),
        "sample": list(found.sample),
        "outputs": found.outputs,
        "numbers": found.numbers,
    }


def load_of(config: Config, step_ms: float | None, bench: Path | None) -> Load:
    """The load of a config; a step's time is given, or from a bench's file. Raises InputError."""
    found = sizes(config)
    if (step_ms is None) == (bench is None):
        raise InputError(
            "the time of one learner's step must be given, once: --step-ms, or --step with a file of shoal bench step"
        )
    if bench is None:
        assert step_ms is not None
        if not 0 < step_ms <= _LONGEST_MS:
            raise InputError(f"a step of {step_ms:g} ms cannot be; give the time of one learner's step (--step-ms)")
        return Load(1e-3 * step_ms, config.train.batch, found.numbers, found.state, found.samples)
    header, rows = read_bench(bench)
    check_net(bench, header, config, found)
    alone = [row for row in rows if row.get("ranks") == 1 and "step_ms" in row]
    if not alone:
        raise InputError(f"{bench} has no step of a rank alone; let the bench have 1 among its ranks")
    check_lines(bench, alone, StepRow)
    batch = alone[0]["batch"]
    step_s = 1e-3 * statistics.median(row["step_ms"] for row in alone if row["batch"] == batch)
    return Load(step_s, batch, found.numbers, found.state, found.samples)


def read_bench(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the rows of a bench's file. Raises InputError."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    except OSError as error:
        raise InputError(f"bench file {path} cannot be read ({error.strerror}); name one that a bench wrote") from None
    except ValueError:
        raise InputError(f"bench file {path} is not JSON lines; name one that a bench wrote") from None
    if not lines or "bench" not in lines[0] or "model" not in lines[0]:
        raise InputError(f"{path} has no header of shoal bench step or bench/scaling.py; name a file that one wrote")
    if any("bench" in line for line in lines[1:]):
        raise InputError(f"{path} has the headers of several benches; name their files one by one")
    return lines[0], lines[1:]


def check_lines(path: Path, lines: Sequence[dict[str, Any]], kind: type[Struct]) -> None:
    """Raises InputError where a line of a bench's file has not what `kind` says."""
    for line in lines:
        try:
            msgspec.convert(line, kind)
        except msgspec.ValidationError as error:
            start = json.dumps(line)[:60]
            raise InputError(
                f"{path}: the line {start}... is of no use ({error}); name a file as a bench wrote it"
            ) from None


def check_net(path: Path, header: dict[str, Any], config: Config, found: Sizes) -> None:
    """Raises InputError where a bench measured another net than the config's."""
    for key, value in json.loads(json.dumps(identity(config, found))).items():
        if header.get(key) != value:
            here, there = (_named(key, one) for one in (value, header.get(key)))
            raise InputError(
                f"{path} was measured with {there}, and the config has {here}; measure a step of this config: shoal "
                "bench step"
            )


def _named(key: str, value: Any) -> str:
    if key == "model" and isinstance(value, dict):
        return f"net {value.get('net')} ({', '.join(f'{k} {v}' for k, v in value.items() if k in ('width', 'hidden'))})"
    return f"{key} {value}"


def bench_step(config: Config, repeats: int, output: Path | None) -> str:
    """Measure a step, write it for `load_of` where a file is named, and return the row as JSON."""
    from shoal import environment

    found = sizes(config)
    load, middle = os.getloadavg()[0], Median.of(measure_step(config, repeats))
    times = {"step_ms": 1e3 * middle.value, "low_ms": 1e3 * middle.low, "high_ms": 1e3 * middle.high}
    row = {"ranks": 1, "batch": config.train.batch, **times, "repeats": repeats, "coverage": middle.coverage}
    header = {"bench": "step", **environment.describe(), **identity(config, found), "load_before": load}
    if output is not None:
        try:
            output.write_text(json.dumps(header) + "\n" + json.dumps(row) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"{output} cannot be written ({error.strerror}); give another name (-o)") from None
    return json.dumps(row)


def measure_step(config: Config, repeats: int) -> list[float]:
    """Seconds of a learner's step, of `repeats` rounds after two that do not count, on this process alone."""
    from shoal import environment
    from shoal.job import prepare
    from shoal.sgd.interfaces import Numbers
    from shoal.state import TrainState

    environment.limit_threads(config.run.threads)
    job = prepare(config)
    state, stage = TrainState(job.model.layout, job.backend), job.plan.stages[0].for_learners(1, config.train)
    job.model.initialise(state.anchor, config.seed)
    out = job.backend.zeros(contribution_size(job.model, config.train))
    times_s = []
    for _ in range(2 + repeats):
        began_s = time.perf_counter()
        job.local.contribute(state, stage, 0, Numbers(stage.steps, 0.0, config.learning_rate.base), out)
        times_s.append((time.perf_counter() - began_s) / stage.steps)
        state.progress.consumed += stage.round_samples
    return list(np.array(times_s)[2:])
