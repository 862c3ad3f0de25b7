"""Sweeps: every run as if it had been started alone, whatever the packing, stops and failures."""

from __future__ import annotations

import json
import signal
from functools import cache
from pathlib import Path
from typing import Any

import jobs
import pytest

BASE: dict[str, Any] = {
    "data": {"set": "synthetic", "train": 96, "test": 64, "shape": [12], "classes": 3},
    "model": {"net": "mlp", "hidden": [12]},
    "train": {"epochs": 6, "batch": 4},
    "averaging": {"steps": 2, "momentum": 0.5},
}
SCHEDULES, SEEDS = ("0:1, 2:3", "paper-V"), (1, 2)
NAMES = {
    (schedule, seed): f"{label}_seed-{seed}"
    for schedule, label in zip(SCHEDULES, ("0-1-2-3", "paper-V"), strict=True)
    for seed in SEEDS
}


@pytest.fixture(scope="module")
def alone(train_many: Any) -> Any:
    """alone(epochs): the digests of the runs, each started by itself, by schedule and seed."""

    @cache
    def run(epochs: float) -> dict[tuple[str, int], str]:
        cases = {
            f"{schedule} {seed}": {
                **BASE,
                "train": {**BASE["train"], "epochs": epochs},
                "learners": {"schedule": schedule},
                "seed": seed,
            }
            for schedule, seed in NAMES
        }
        trained = train_many(2, cases)
        return {(schedule, seed): trained.digest(f"{schedule} {seed}") for schedule, seed in NAMES}

    return run


def _sweep(folder: Path, epochs: float = 6, **settings: Any) -> Path:
    jobs.write_config(folder / "base.toml", {**BASE, "train": {**BASE["train"], "epochs": epochs}})
    sweep = {"name": "s", "base": "base.toml", "seeds": SEEDS, "grid": {"learners.schedule": SCHEDULES}}
    return jobs.write_config(folder / "sweep.toml", {**sweep, **settings})


def _digests(out: Path) -> dict[tuple[str, int], str]:
    return {key: jobs.digest(out / name) for key, name in NAMES.items()}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a sweep by two ranks, and what it said."""
    folder = tmp_path_factory.mktemp("swept")
    command = [*jobs.SHOAL, "sweep", "-n", 2, _sweep(folder), "--out", folder / "out"]
    return folder / "out", jobs.done(jobs.Job(folder, command))


def test_each_run_is_as_if_it_were_alone(swept: tuple[Path, str], alone: Any) -> None:
    out, said = swept
    assert {path.name for path in out.iterdir()} == set(NAMES.values())
    assert _digests(out) == alone(6)
    assert all((out / name / "DONE").exists() for name in NAMES.values())
    assert sorted(line.split()[1].rstrip(":") for line in said.splitlines()) == sorted(NAMES.values())


def test_the_runs_were_packed(swept: tuple[Path, str]) -> None:
    """Two at a time, each on one rank, and the next when one was done."""
    times = {}
    for name in NAMES.values():
        history = jobs.history(swept[0] / name)
        assert history[0]["world"] == 1
        times[name] = history[0]["time"], history[-1]["time"]
    for moment in [end for _, end in times.values()]:
        assert sum(start < moment < end for start, end in times.values()) <= 1
    starts = sorted(start for start, _ in times.values())
    ends = sorted(end for _, end in times.values())
    assert starts[1] < ends[0]


def test_a_sweep_that_is_done_does_nothing(swept: tuple[Path, str]) -> None:
    out, _ = swept
    before = jobs.contents(out.parent)
    said = jobs.done(jobs.launch(out.parent, 3, out.parent / "sweep.toml", "--out", out))
    assert said == ""
    assert jobs.contents(out.parent) == before


def test_teams_of_two_ranks(tmp_path: Path, alone: Any) -> None:
    """5 ranks make two teams, and one rank is left over."""
    jobs.done(jobs.launch(tmp_path, 5, _sweep(tmp_path, ranks=2), "--out", tmp_path / "out"))
    assert _digests(tmp_path / "out") == alone(6)
    for name in NAMES.values():
        history = jobs.history(tmp_path / "out" / name)
        assert history[0]["world"] == 2
        assert max(event["ranks"] for event in history if event["event"] == "round") == 2


STOPS = {
    "SIGUSR2 to a rank": lambda job, out: job.rank(1).send_signal(signal.SIGUSR2),
    "a stop file": lambda job, out: (out / "stop").touch(),
}


def test_a_stopped_sweep_goes_on(tmp_path: Path, alone: Any) -> None:
    """Each stop ends all teams, within a run."""
    epochs, out = 120, tmp_path / "out"
    sweep = _sweep(tmp_path, epochs)
    for how, ask in STOPS.items():
        with jobs.launch(tmp_path, 2, sweep, "--out", out) as job:
            before = len(list(out.glob("*/run.jsonl"))) and _rounds(out)
            job.until(lambda before=before: _rounds(out) > before + 60, f"60 rounds before {how}")
            ask(job, out)
            ended = job.end()
        assert ended.status == 99, (how, ended)
        assert not (out / "stop").exists(), how
        assert not all((out / name / "DONE").exists() for name in NAMES.values()), how
        last = [jobs.history(path.parent)[-1]["event"] for path in out.glob("*/run.jsonl")]
        assert set(last) <= {"stop", "end"} and last.count("stop") <= 2, (how, last)
    with jobs.launch(tmp_path, 2, sweep, "--out", out) as job:
        before = _rounds(out)
        job.until(lambda: _rounds(out) > before + 60, "60 rounds before a kill")
        job.process.kill()
        job.gone()
    jobs.done(jobs.launch(tmp_path, 2, sweep, "--out", out))
    assert _digests(out) == alone(epochs)
    for name in NAMES.values():
        rounds = [event["round"] for event in jobs.history(out / name) if event["event"] == "round"]
        assert rounds == list(range(1, len(rounds) + 1))


def _rounds(out: Path) -> int:
    return sum(jobs.rounds(path.parent) for path in out.glob("*/run.jsonl"))


def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    grid = {"learning_rate.base": [0.1, 1e18, 0.2]}
    out = tmp_path / "out"
    with jobs.launch(tmp_path, 2, _sweep(tmp_path, grid=grid), "--out", out) as job:
        ended = job.end()
    assert ended.status == 2, ended
    assert "Traceback" not in ended.output
    lines = ended.output.splitlines()
    assert len(lines) == 6, ended.output
    for line in lines:
        assert ("is not finite, at learning rate 1e+18" in line) == ("base-1e+18" in line), line
    done = sorted(path.parent.name for path in out.glob("*/DONE"))
    assert done == [f"base-{rate}_seed-{seed}" for rate in (0.1, 0.2) for seed in SEEDS]


def test_compare(swept: tuple[Path, str]) -> None:
    """Over the seeds: mean and standard error of each schedule."""
    out, _ = swept
    runs = [out / name for name in NAMES.values()]
    command = [*jobs.SHOAL, "compare", "--format", "json", "--target", "0.2"]
    rows = {row["label"]: row for row in json.loads(jobs.done(jobs.Job(out.parent, [*command, *runs])))}
    assert rows.keys() == set(SCHEDULES)
    for schedule, row in rows.items():
        assert (row["seeds"], row["ended"]) == (2, 2)
        ends = [jobs.history(out / NAMES[schedule, seed])[-1] for seed in SEEDS]
        accuracies = [100 * end["test"]["accuracy"] for end in ends]
        assert row["accuracy"]["mean"] == pytest.approx(sum(accuracies) / 2)
        assert row["accuracy"]["error"] == pytest.approx(abs(accuracies[0] - accuracies[1]) / 2)
        assert row["serial_steps"]["mean"] == ends[0]["serial_steps"]
        assert row["learner_steps"]["mean"] == ends[0]["learner_steps"]


def test_plot(swept: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = swept
    runs = [out / name for name in NAMES.values()]
    figure = tmp_path / "figure.png"
    said = jobs.done(jobs.Job(tmp_path, [*jobs.SHOAL, "plot", "-o", figure, *runs]))
    assert said == f"wrote {figure}\n"
    written = figure.read_bytes()
    assert written.startswith(b"\x89PNG\r\n") and len(written) > 10_000
