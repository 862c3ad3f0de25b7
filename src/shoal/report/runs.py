"""A run directory as typed arrays, and runs that differ by seed only as one group.

Every report starts here: `load_run` reads DIR/run.jsonl, also of a run that is still going on;
`group_runs` puts the seeds of one config together and names each group by what sets it apart.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import InputError
from shoal.record import runlog

FORMAT = 1
SEED_ONLY = ("seed", "name", "out")
"""The config keys that runs of one group may differ in."""
NO_RESULT = (
    *("timeout_s", "heartbeat_s", "checkpoint_epochs", "keep", "stop_margin_s", "give_back_nodes"),
    *("provider", "respawn", "min_ranks", "max_ranks"),
)
"""Keys of [run] that no result depends on: runs of one group may differ in them too."""

COSTS = ("serial_steps", "learner_steps", "busy_rank_s", "allocated_rank_s", "train_s")
CHANGES = ("resize", "recovery", "world", "resume")
"""The kinds of events that tell of ranks."""
ROUND_FIELDS = ("time", "epoch", "consumed", "learners", "ranks", "loss", *COSTS)
EVALUATION_FIELDS = ("epoch", "consumed", "learners", *COSTS)

Series = dict[str, np.ndarray]


@dataclass(frozen=True)
class Run:
    """One run: `rounds` and `evaluations` map a field to its float64 array, in the log's order.

    `evaluations` also has test_accuracy, test_loss, validation_accuracy, validation_loss (NaN where
    absent). `changes` are the log's events about ranks; `end` is the closing event, None if the run has not ended.
    """

    directory: Path
    header: dict[str, Any]
    config: dict[str, Any]
    rounds: Series
    evaluations: Series
    changes: tuple[dict[str, Any], ...]
    end: dict[str, Any] | None

    @property
    def seed(self) -> int:
        """The seed; -1 where the header has none."""
        return int(self.header.get("seed", -1))

    @property
    def caption(self) -> str:
        """What the data are, for a figure's caption."""
        return str(self.header.get("caption", ""))

    @property
    def measure(self) -> str:
        """What a target is compared with: "validation" where the run holds samples out, else "test"."""
        return "test" if np.isnan(self.evaluations["validation_accuracy"]).all() else "validation"


@dataclass(frozen=True)
class Group:
    """Runs of one config, ordered by seed; `label` says what sets the config apart from the others."""

    label: str
    runs: tuple[Run, ...]

    @property
    def config(self) -> dict[str, Any]:
        """The config the runs share (that of the first)."""
        return self.runs[0].config


def load_run(directory: Path) -> Run:
    """Read one run directory; InputError where it is not one."""
    path = Path(directory) / "run.jsonl"
    events = runlog.read(path)
    if not events or events[0]["event"] != "header":
        raise InputError(
            f"the run log {path} does not begin with a header; the run has not started or this is no "
            "run directory, so give another"
        )
    header = events[0]
    if header.get("format") != FORMAT:
        raise InputError(
            f"the run log {path} has format {header.get('format')!r} but this shoal reads {FORMAT}; "
            "use the shoal that wrote it"
        )
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_kind.setdefault(event["event"], []).append(event)
    rounds = _series(by_kind.get("round", []), ROUND_FIELDS, path)
    evaluations = _series(by_kind.get("evaluation", []), EVALUATION_FIELDS, path)
    for part in ("test", "validation"):
        for field in ("accuracy", "loss"):
            values = [number((e.get(part) or {}).get(field)) for e in by_kind.get("evaluation", [])]
            evaluations[f"{part}_{field}"] = np.array(values, np.float64)
    end = by_kind["end"][-1] if "end" in by_kind else None
    config = dict(header.get("config") or {})
    changes = tuple(event for event in events if event["event"] in CHANGES)
    return Run(Path(directory), header, config, rounds, evaluations, changes, end)


def load_runs(directories: Iterable[Path]) -> list[Run]:
    """Read several run directories; InputError if there are none, or one was given twice."""
    directories = [Path(directory) for directory in directories]
    if not directories:
        raise InputError("no run directory was given; name at least one")
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise InputError("a run directory was given twice, which would count its seed twice; name each once")
    return [load_run(directory) for directory in directories]


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Groups in the order of their labels; InputError where one config and seed come twice."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(group_key(run.config), []).append(run)
    members = [sorted(group, key=lambda run: run.seed) for group in found.values()]
    for group in members:
        for one, other in itertools.pairwise(group):
            if one.seed == other.seed:
                raise InputError(
                    f"{one.directory} and {other.directory} are the same config and seed {one.seed}, "
                    "which would count the seed twice; leave one of them out"
                )
    labels = _labels([group[0] for group in members])
    groups = [Group(label, tuple(group)) for label, group in zip(labels, members, strict=True)]
    return sorted(groups, key=lambda group: _natural(group.label))


def _natural(text: str) -> list[tuple[int, str]]:
    """A key by which "batch = 8" comes before "batch = 16"."""
    return [(int(part or 0), "") if i % 2 else (0, part) for i, part in enumerate(re.split(r"(\d+)", text))]


def group_key(config: Mapping[str, Any]) -> str:
    """The same text for configs that differ in seed, name and out only, or in what no result depends on."""
    kept = {key: value for key, value in config.items() if key not in SEED_ONLY}
    kept["run"] = {key: value for key, value in (config.get("run") or {}).items() if key not in NO_RESULT}
    return json.dumps(kept, sort_keys=True)


def schedule_text(config: Mapping[str, Any]) -> str:
    """The learner schedule as the config gives it: a preset's name, "0:2, 6:8", or stages joined so."""
    schedule = (config.get("learners") or {}).get("schedule", "?")
    if isinstance(schedule, list):
        return ", ".join(f"{stage.get('at', '?')}:{stage.get('learners', '?')}" for stage in schedule)
    return str(schedule)


def momentum(config: Mapping[str, Any]) -> float:
    """The reduction momentum mu of a config (0 where it says nothing)."""
    return float((config.get("averaging") or {}).get("momentum", 0.0))


def number(value: Any) -> float:
    """A number of the log as float; NaN for none (infinities are logged as strings)."""
    return math.nan if value is None else float(value)


def _series(events: Sequence[Mapping[str, Any]], fields: Sequence[str], path: Path) -> Series:
    try:
        return {field: np.array([number(e[field]) for e in events], np.float64) for field in fields}
    except (KeyError, ValueError, TypeError) as error:
        kind = events[0]["event"]
        raise InputError(
            f"a {kind} event of the run log {path} lacks a field or holds no number there ({error}); "
            "the log was changed or is of another shoal, so use the one that wrote it"
        ) from error


def _labels(runs: Sequence[Run]) -> list[str]:
    """A label for each config: the values it has where the configs differ, or the run's name."""
    flat = [_flatten(run.config) for run in runs]
    keys = sorted({key for config in flat for key in config})
    ignored = {*SEED_ONLY, *(f"run.{key}" for key in NO_RESULT)}
    keys = [key for key in keys if key not in ignored and len({repr(c.get(key)) for c in flat}) > 1]
    if not keys:
        return [str(run.header.get("name") or run.directory.name) for run in runs]
    # The schedule and the momentum come first: they are what shoal is about.
    first = ("learners.schedule", "averaging.momentum", "averaging.steps")
    keys.sort(key=lambda key: (first.index(key) if key in first else len(first), key))
    return [
        ", ".join(_setting(key, run, config.get(key)) for key in keys) for run, config in zip(runs, flat, strict=True)
    ]


def _setting(key: str, run: Run, value: Any) -> str:
    if key == "learners.schedule":
        return schedule_text(run.config)
    if key == "averaging.momentum":
        return f"mu = {momentum(run.config):g}"
    name = "K" if key == "averaging.steps" else key.rpartition(".")[2].replace("_", " ")
    return f"{name} = {value}"


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
