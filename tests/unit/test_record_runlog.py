"""The run log: bits of floats, JSON without NaN, torn lines, and the cut for a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InputError, LeaseError
from shoal.record.runlog import RunLog, encode, read, truncate_to


@pytest.fixture
def log(tmp_path):
    log = RunLog(tmp_path / "run.jsonl", iter(range(1000)).__next__)
    yield log
    log.close()


def strict(line: bytes) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


@given(st.floats())
def test_floats_come_back_with_the_same_bits(value):
    back = strict(encode({"event": "x", "loss": value, "in": {"list": [value]}}))
    for item in (back["loss"], back["in"]["list"][0]):
        assert math.isnan(value) == math.isnan(float(item))
        assert math.isnan(value) or float(item) == value
        assert isinstance(item, float) == math.isfinite(value)


def test_events_are_lines_in_order(log):
    log.event("round", round=1, loss=np.float32(0.5), learners=np.int64(4), flag=np.bool_(True))
    written = log.event("round", round=2, loss=float("nan"), values=np.arange(3), path=Path("a/b"))
    assert written["time"] == 1.0
    first, second = read(log.path)
    assert first == {"event": "round", "time": 0.0, "round": 1, "loss": 0.5, "learners": 4, "flag": True}
    assert second["loss"] == "nan" and second["values"] == [0, 1, 2] and second["path"] == "a/b"
    assert [strict(line) for line in log.path.read_bytes().splitlines()] == [first, second]


def test_what_is_no_json_is_a_type_error(log):
    with pytest.raises(TypeError, match="object"):
        log.event("round", thing=object())
    assert read(log.path) == []


def test_text_with_newlines_stays_one_line(log):
    log.event("failure", reason="a\nb\u2028c\u00e9")
    assert log.path.read_bytes().count(b"\n") == 1
    assert read(log.path)[0]["reason"] == "a\nb\u2028c\u00e9"


def test_size_is_where_a_resume_cuts(log):
    log.event("round", round=1)
    size = log.size()
    assert size == log.path.stat().st_size
    log.event("round", round=2)
    log.sync()
    log.close()
    truncate_to(log.path, size)
    assert [event["round"] for event in read(log.path)] == [1]
    again = RunLog(log.path, lambda: 0.0)
    again.event("round", round=2)
    assert [event["round"] for event in read(log.path)] == [1, 2]
    again.close()
    again.close()


@pytest.mark.parametrize("torn", [b'{"event":"rou', b'{"event":"round"}', b"\x00\x00\x00"])
def test_a_torn_tail_is_not_read_and_not_appended_to(tmp_path, torn):
    path = tmp_path / "run.jsonl"
    whole = b'{"event":"header","time":0.0}\n'
    path.write_bytes(whole + torn)
    assert len(read(path)) == (2 if torn.endswith(b"}") else 1)
    log = RunLog(path, lambda: 1.0)
    log.event("round", round=1)
    log.close()
    assert [event["event"] for event in read(path)] == ["header", "round"]
    truncate_to(path, len(whole))
    assert path.read_bytes() == whole


def test_a_log_that_is_one_torn_line_starts_anew(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"{" * 200_000)
    log = RunLog(path, lambda: 1.0)
    assert log.size() == 0
    log.close()


def test_truncate_refuses_what_is_another_log(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"event":"header"}\n{"event":"round"}\n')
    with pytest.raises(InputError, match="37 bytes"):
        truncate_to(path, 1000)
    with pytest.raises(InputError, match="inside a line"):
        truncate_to(path, 5)
    with pytest.raises(InputError, match="0 bytes"):
        truncate_to(tmp_path / "none.jsonl", 5)
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]
    assert len(read(path)) == 2


def test_truncate_asks_the_lease_first(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"event":"header"}\n{"event":"round"}\n')

    def lost() -> None:
        raise LeaseError("taken over")

    with pytest.raises(LeaseError):
        truncate_to(path, 0, lost)
    assert len(read(path)) == 2 and len(list(tmp_path.iterdir())) == 1
    truncate_to(path, 0)
    assert read(path) == []


def test_read_names_a_damaged_line_and_a_missing_log(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes(b'{"event":"header"}\nrubbish\n{"event":"round"}\n')
    with pytest.raises(InputError, match="line 2"):
        read(path)
    path.write_bytes(b'{"event":"header"}\n[1]\n{"event":"round"}\n')
    with pytest.raises(InputError, match="line 2"):
        read(path)
    with pytest.raises(InputError, match="no readable run log"):
        read(tmp_path / "none")
