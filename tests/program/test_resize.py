"""The size changes while a run goes on: by its schedule, from outside, by a policy, and back again. Ranks never
change the result."""

from __future__ import annotations

import json
import subprocess
from itertools import pairwise
from pathlib import Path

import jobs
import pytest

from shoal.errors import BAD_INPUT, STOPPED, TRY_AGAIN
from shoal.record.recorder import WishFile

CONFIG = {
    "name": "resized",
    "model": {"net": "convnet-s", "width": 4},
    "train": {"epochs": 8, "batch": 4},
    "learners": {"schedule": "0:4"},
    "averaging": {"steps": 2, "momentum": 0.5},
    "run": {"checkpoint_epochs": 0.5},
}
SIZES = (1, 2, 3, 4, 8)
SAMPLES = 1437


def every_change(sizes: tuple[int, ...]) -> list[int]:
    """Sizes such that each follows each other one."""
    tour, left = [sizes[0]], {(a, b) for a in sizes for b in sizes if a != b}
    while left:
        step = next(((a, b) for a, b in sorted(left) if a == tour[-1]), None)
        tour.append(min(left)[0] if step is None else step[1])
        left -= {(tour[-2], tour[-1])}
    return tour


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return jobs.write_config(tmp_path / "resized.toml", CONFIG)


def resize(run: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [*jobs.SHOAL, "resize", str(run), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def events(run: Path, kind: str) -> list[dict[str, object]]:
    return [event for event in jobs.history(run) if event["event"] == kind]


def test_every_growth_and_shrinkage_by_schedule(tmp_path: Path) -> None:
    """Learners and ranks between all of 1, 2, 3, 4 and 8, twice each, on 8 ranks and on one."""
    tour = 2 * every_change(SIZES)
    tree = {**CONFIG, "train": {"epochs": 0.25 * len(tour), "batch": 4}}
    tree["learners"] = {"schedule": ", ".join(f"{0.25 * n}:{size}" for n, size in enumerate(tour))}
    config = jobs.write_config(tmp_path / "tour.toml", tree)
    runs = []
    for n in (1, 8):
        folder = tmp_path / str(n)
        folder.mkdir()
        runs.append(jobs.trained(folder, n, config))
    changes = [tuple(event["ranks"]) for event in events(runs[1], "resize")]  # type: ignore[arg-type]
    assert set(changes) == {(a, b) for a in SIZES for b in SIZES if a != b}
    assert len(changes) == sum(a != b for a, b in pairwise(tour))
    assert jobs.digest(runs[0]) == jobs.digest(runs[1])


def test_spawned_ranks_come_and_go(tmp_path: Path) -> None:
    tree = {**CONFIG, "train": {"epochs": 30, "batch": 4}, "learners": {"schedule": "0:4, 20:1"}}
    tree["run"] = {"provider": "spawn", "max_ranks": 3}
    config = jobs.write_config(tmp_path / "spawned.toml", tree)
    grown = jobs.trained(tmp_path, 1, config)
    changes = [(event["action"], event["world"]) for event in events(grown, "world")]
    assert changes[0] == ("grow", 2)
    assert sum(action == "grow" for action, _ in changes) == sum(action == "release" for action, _ in changes)
    assert changes[-1] == ("release", 1)
    alone = tmp_path / "alone"
    alone.mkdir()
    assert jobs.digest(grown) == jobs.digest(jobs.trained(alone, 2, jobs.write_config(
        alone / "alone.toml", {**tree, "run": {}}
    )))  # fmt: skip


def test_every_growth_and_shrinkage_by_spawned_ranks(tmp_path: Path) -> None:
    """`bench/tour.py` does it with more of them."""
    run, tour = tmp_path / "run", every_change((1, 2, 3))
    (tmp_path / "straight").mkdir()
    tree = {**CONFIG, "learners": {"schedule": "0:3"}, "train": {"epochs": 100_000, "batch": 4}}
    tree["run"] = {"provider": "spawn", "max_ranks": 3}
    with jobs.launch(tmp_path, 1, jobs.write_config(tmp_path / "tour.toml", tree), "--out", run) as job:
        job.until(lambda: jobs.rounds(run) > 0, "rounds")
        for size in tour:
            WishFile(run).put({"ranks": size})
            job.until(lambda size=size: jobs.history(run)[-1].get("ranks") == size, f"{size} ranks")
        (run / "stop").touch()
        assert job.end().status == STOPPED
    done = jobs.history(run)[-1]["consumed"]
    tree |= {"train": {"epochs": (done - 0.5) / SAMPLES, "batch": 4}, "run": {}}
    straight = jobs.trained(tmp_path / "straight", 2, jobs.write_config(tmp_path / "straight.toml", tree))
    digests = [jobs.done(jobs.Job(tmp_path, [*jobs.SHOAL, "digest", one])) for one in (run, straight)]
    assert digests[0] == digests[1]


def test_ranks_from_outside_change_nothing_but_who_works(tmp_path: Path, config: Path) -> None:
    with jobs.launch(tmp_path, 3, config, "--set", "train.epochs=30", "--out", tmp_path / "run") as job:
        run = tmp_path / "run"
        for ranks, now in ((1, 1), (2, 2), (9, 2), (0, 2)):
            job.until(lambda: jobs.rounds(run) > 0, "rounds")
            assert resize(run, ranks).returncode == 0
            job.until(lambda: not (run / "resize").exists(), "the wish")
            before = jobs.rounds(run)
            job.until(lambda before=before: jobs.rounds(run) > before + 1, "the size")
            assert jobs.history(run)[-1].get("ranks", now) == now
        assert job.end().status == 0
    wishes = [event["ranks"] for event in events(run, "wish")]
    assert wishes == [1, 2, 0]
    assert "9 ranks were asked for, and there can be 1 to 3" in str(events(run, "warning")[-1])
    alone = tmp_path / "alone"
    alone.mkdir()
    undisturbed = jobs.done(jobs.launch(alone, 2, config, "--set", "train.epochs=30", "--out", alone / "run"))
    assert undisturbed and jobs.digest(run) == jobs.digest(alone / "run")


def test_learners_from_outside_are_replayed(tmp_path: Path, config: Path) -> None:
    """A job that is killed after a wish, and before the next checkpoint, does the same again when it is resumed."""
    run, options = tmp_path / "run", ("--set", "train.epochs=12", "--set", "run.checkpoint_epochs=4")
    with jobs.launch(tmp_path, 2, config, *options, "--out", run) as job:
        job.until(lambda: jobs.rounds(run) > 20, "rounds")
        assert resize(run, "--learners", 6).returncode == 0
        job.until(lambda: any(event["event"] == "wish" for event in jobs.history(run)), "the wish")
        before = jobs.rounds(run)
        job.until(lambda: jobs.rounds(run) > before + 3, "rounds with 6 learners")
        job.rank(0).kill()
        assert job.end().status == TRY_AGAIN
    first = events(run, "wish")
    lost = jobs.figures(jobs.history(run), "round")
    jobs.done(jobs.launch(tmp_path, 2, config, *options, "--resume", "--out", run))
    assert [event["round"] for event in events(run, "wish")] == [event["round"] for event in first]
    again = jobs.figures(jobs.history(run), "round")
    assert again[: len(lost)] == lost and again[-1]["learners"] == 6


def test_a_wish_that_nobody_can_hear_is_refused(tmp_path: Path) -> None:
    for words in ((tmp_path, 2), (tmp_path,)):
        done = resize(*words)  # type: ignore[arg-type]
        assert done.returncode == BAD_INPUT and len(done.stderr.splitlines()) == 1


POLICY = """
import json, sys
import shoal

def policy(now):
    if now.round == 10:
        return 4
    if now.round == 20:
        return shoal.Resize(ranks=1)

result = shoal.train("mlp", "digits", learners="0:2", epochs=2, batch=8, policy=policy, progress=False)
if result.master:
    rounds = [[e["round"], e["learners"], e["ranks"]] for e in result.history if e["event"] == "round"]
    print(json.dumps(rounds))
"""


def test_a_policy_decides(tmp_path: Path) -> None:
    script = tmp_path / "policy.py"
    script.write_text(POLICY)
    output = jobs.done(jobs.launch(tmp_path, 3, script))
    rounds = json.loads(next(line for line in output.splitlines() if line.startswith("[[")))
    for number, learners, ranks in rounds:
        assert learners == (2 if number <= 10 else 4)
        assert ranks == (2 if number <= 20 else 1)
