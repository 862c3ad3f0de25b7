"""Run directories as series, and their grouping by seed."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from report_logs import SAMPLES, write_run

from shoal.errors import InputError
from shoal.report.runs import group_runs, load_run, load_runs, schedule_text


def test_series_are_typed_and_whole(tmp_path):
    run = load_run(write_run(tmp_path / "a", "V", 0.5, 7))
    assert run.seed == 7 and run.caption.startswith("digits, 20%") and run.measure == "test"
    assert all(series.dtype == np.float64 for series in (*run.rounds.values(), *run.evaluations.values()))
    assert run.rounds["consumed"][-1] >= 12 * SAMPLES > run.rounds["consumed"][-2]
    assert len(run.evaluations["test_accuracy"]) == 12
    assert np.isnan(run.evaluations["validation_loss"]).all()
    assert [event["learners"] for event in run.changes] == [[2, 4], [4, 8]]
    assert run.end is not None


def test_validation_and_logged_nan(tmp_path):
    run_dir = write_run(tmp_path / "a", validation=True, ended=False, epochs=2)
    log = run_dir / "run.jsonl"
    lines = log.read_text().splitlines()
    last = json.loads(lines[-2])
    assert last["event"] == "round"
    last["loss"] = "nan"
    log.write_text("\n".join([*lines[:-2], json.dumps(last), lines[-1], '{"event":"rou']))
    run = load_run(run_dir)
    assert run.measure == "validation" and run.end is None
    assert math.isnan(run.rounds["loss"][-1]) and np.isfinite(run.rounds["loss"][:-1]).all()


def test_seeds_group_and_labels_say_what_differs(tmp_path):
    directories = [
        write_run(tmp_path / "c", "II", 0.0, 3, epochs=1),
        write_run(tmp_path / "a", "II", 0.5, 2, epochs=1),
        write_run(tmp_path / "b", "II", 0.0, 1, epochs=1, changes={"name": "other", "out": "x", "run": {"keep": 5}}),
        write_run(tmp_path / "d", "II", 0.5, 1, epochs=1, changes={"train": {"epochs": 12, "batch": 16}}),
    ]
    groups = group_runs(load_runs(directories))
    assert [[run.seed for run in group.runs] for group in groups] == [[1, 3], [2], [1]]
    assert [group.label for group in groups] == ["mu = 0, batch = 8", "mu = 0.5, batch = 8", "mu = 0.5, batch = 16"]
    assert [group.label for group in group_runs(load_runs(directories[:1]))] == ["demo-II"]


def test_schedules_as_text():
    stages = [{"at": 0, "learners": 2}, {"at": 6, "learners": 8, "momentum": 0.5}]
    assert schedule_text({"learners": {"schedule": stages}}) == "0:2, 6:8"
    assert schedule_text({"learners": {"schedule": "paper-II"}}) == "paper-II"
    assert schedule_text({}) == "?"


def test_one_seed_twice_is_refused(tmp_path):
    one, two = (write_run(tmp_path / name, epochs=1) for name in "ab")
    with pytest.raises(InputError, match="same config and seed 1"):
        group_runs(load_runs([one, two]))
    with pytest.raises(InputError, match="given twice"):
        load_runs([one, tmp_path / "b" / ".." / "a"])
    with pytest.raises(InputError, match="no run directory"):
        load_runs([])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no readable run log"),
        ("", "does not begin with a header"),
        ('{"event":"round"}\n{"event":"round"}\n', "does not begin with a header"),
        ('{"event":"header","format":2}\n', "format 2"),
        ('{"event":"header","format":1}\n{"event":"round","epoch":1}\n', "lacks a field"),
    ],
)
def test_bad_directories(tmp_path, content, message):
    if content is not None:
        (tmp_path / "run.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        load_run(tmp_path)
