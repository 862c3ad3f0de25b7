"""When a run stops on its own: in time before its job's end, and where fewer nodes are enough."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.config import from_tree
from shoal.elastic.plan import make_plan
from shoal.elastic.stopping import Deadline, nodes_needed


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _stops_at(end_s: float | None, rounds_s: list[float], checkpoint_s: float = 0.0, margin_s: float = 5.0) -> float:
    """How long before the end it stops if rounds take so long; -1 if it does not."""
    clock = Clock()
    deadline = Deadline(None if end_s is None else clock.now_s + end_s, margin_s, clock)
    assert deadline.reason(checkpoint_s) == ""
    for round_s in rounds_s:
        clock.now_s += round_s
        if deadline.reason(checkpoint_s):
            return 1000.0 + (end_s or 0.0) - clock.now_s
    return -1.0


def test_there_is_time_for_a_checkpoint_and_the_margin() -> None:
    assert _stops_at(100.0, [1.0] * 200) == 5.0
    assert _stops_at(100.0, [1.0] * 200, checkpoint_s=20.0) == 25.0
    assert _stops_at(100.0, [10.0] * 200, margin_s=1.0) == 10.0


def test_the_slowest_of_the_last_rounds_counts_and_an_old_hiccup_does_not() -> None:
    assert _stops_at(100.0, [1.0, 30.0, *[1.0] * 60]) == 34.0
    assert _stops_at(200.0, [1.0, 30.0, *[1.0] * 200]) == 5.0


def test_a_job_without_an_end_goes_on_and_one_that_is_too_short_does_one_round() -> None:
    assert _stops_at(None, [1.0] * 100) == -1.0
    assert _stops_at(3.0, [1.0] * 100) == 2.0


def test_the_reason_says_how_long() -> None:
    clock = Clock()
    deadline = Deadline(clock.now_s + 10.0, 60.0, clock)
    deadline.reason(0.0)
    clock.now_s += 2.0
    assert deadline.reason(3.0) == ("the job ends in 8 s; a round, a checkpoint and run.stop_margin_s may take 65 s")


def _needed(schedule: str, node_of: tuple[int, ...]) -> list[int]:
    """Nodes needed from each epoch on."""
    plan = make_plan(from_tree({"train": {"epochs": 4}, "learners": {"schedule": schedule}}, "test"), 1000)
    order: Any = sorted(range(len(node_of)), key=lambda rank: (node_of[rank], rank))
    world: Any = SimpleNamespace(order=order, node_of=node_of)
    return [nodes_needed(plan, 1000 * epoch, world) for epoch in range(4)]


@pytest.mark.parametrize(
    ("schedule", "node_of", "needed"),
    [
        ("0:4, 1:2, 2:1", (0, 1, 2, 3), [4, 2, 1, 1]),
        ("0:4, 1:2, 2:1", (0, 0, 2, 2), [2, 1, 1, 1]),
        ("0:4, 1:2, 2:1", (0, 1, 0, 1), [2, 1, 1, 1]),
        ("0:4, 1:1, 3:4", (0, 1, 2, 3), [4, 4, 4, 4]),
        ("0:1, 2:4", (0, 1, 2, 3), [4, 4, 4, 4]),
        ("0:5, 2:2", (0, 1, 2, 3), [3, 3, 2, 2]),
        ("0:1", (0, 1, 2, 3), [1, 1, 1, 1]),
    ],
)
def test_nodes_that_the_rest_of_a_schedule_needs(schedule: str, node_of: tuple[int, ...], needed: list[int]) -> None:
    assert _needed(schedule, node_of) == needed
