"""The progress display: plain aligned lines in a batch log, one redrawn line on a terminal."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest

from shoal.record.progress import Progress


def a_round(number: int, learners: int = 2, time: float | None = None, **fields: object) -> dict:
    return {
        "event": "round",
        "time": float(number) if time is None else time,
        "round": number,
        "consumed": 100 * number,
        "epoch": number / 10,
        "learners": learners,
        "ranks": learners,
        "loss": 2.3 / number,
        "train_s": number / 2,
        **fields,
    }


HEADER = {
    "event": "header",
    "time": 0.0,
    "name": "digits-mavg",
    "seed": 1,
    "world": 4,
    "samples": 1437,
    "parameters": 12345,
    "caption": "digits, 20% of training labels randomised",
}
EVALUATION = {"event": "evaluation", "time": 9.0, "epoch": 1.0, "test": {"accuracy": 0.9715, "loss": 0.1}}
RESIZE = {"event": "resize", "time": 9.0, "learners": [2, 4], "ranks": [2, 4], "stall_ms": 0.42}
END = {"event": "end", "time": 9.0, "epoch": 2.0, "serial_steps": 1234, "learner_steps": 5678}


def run(events: list[dict], stream: io.StringIO, step_s: float = 1.0, width: int = 0) -> str:
    now = [0.0]
    progress = Progress(2, stream, width, interval_s=5.0, clock=lambda: now[0])
    for event in events:
        now[0] += step_s
        progress.on_event(event)
    progress.close()
    progress.close()
    return stream.getvalue()


def test_plain_lines_are_aligned_ascii_without_control_characters():
    events = [HEADER, *map(a_round, range(1, 8)), EVALUATION, RESIZE, a_round(8, 4), END]
    text = run(events, io.StringIO())
    assert text.isascii() and not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    lines = text.splitlines()
    assert lines[0].startswith("run digits-mavg, seed 1, 4 ranks, 1,437 training samples, 12,345 parameters")
    head, table = lines[1], lines[2:]
    for name, value in (("test acc", "97.15%"), ("learners", "2"), ("left", "0:13")):
        right_edge = head.index(name) + len(name)
        assert any(line[:right_edge].endswith(" " + value) for line in table), (name, text)
    assert "resize: 2 -> 4 learners, 2 -> 4 ranks, stall 0.4 ms" in text
    assert table[-1].endswith("done: 1,234 serial steps, 5,678 learner-steps")


def test_rounds_are_shown_every_few_seconds_only():
    rounds = [a_round(number) for number in range(1, 106)]
    assert len(run(rounds, io.StringIO(), step_s=0.1).splitlines()) == 1 + 2
    assert len(run(rounds, io.StringIO(), step_s=6.0).splitlines()) == 1 + 105


def test_an_evaluation_and_a_resize_are_shown_at_once():
    assert len(run([EVALUATION, RESIZE, EVALUATION], io.StringIO(), step_s=0.0).splitlines()) == 1 + 3


def test_rates_are_of_the_time_since_the_resize():
    slow = [a_round(number) for number in range(1, 11)]
    fast = [a_round(10 + i, 4, time=10 + i / 10, train_s=5 + i / 20) for i in range(1, 4)]
    text = run([*slow, RESIZE, *fast, EVALUATION], io.StringIO())
    row = next(line for line in text.splitlines() if "97.15%" in line).split()
    assert row[5:] == ["2,000", "0:01"]


@pytest.mark.parametrize("test", [{"loss": 0.5}, {"accuracy": None, "loss": 0.5}, None])
def test_no_accuracy(test):
    assert " - " in run([{"event": "evaluation", "epoch": 1.0, "test": test}], io.StringIO())


def test_failures_and_unknown_events():
    events = [{"event": "failure", "round": 7, "reason": "rank 2 died"}, {"event": "novelty", "x": 1}]
    events.append({"event": "warning", "text": "few rounds an epoch"})
    lines = run(events, io.StringIO()).splitlines()
    assert lines == ["failure at round 7: rank 2 died", "warning: few rounds an epoch"]


def test_a_terminal_gets_one_line_with_every_figure():
    text = run([HEADER, *map(a_round, range(1, 9)), EVALUATION, RESIZE, a_round(9, 4)], io.StringIO(), width=80)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "resize: 2 -> 4" in plain
    last = re.split(r"[\r\n]+", plain.strip())[-1]
    for part in ("0.90/2", "4 learners 4 ranks", "loss 0.2556", "97.15%", "/s", "left"):
        assert part in last, last


def test_rich_is_not_imported_for_a_batch_log():
    code = (
        "import io, sys; from shoal.record.progress import Progress; "
        "Progress(1, io.StringIO()).close(); sys.exit('rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
