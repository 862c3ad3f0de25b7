"""A rank that takes the place of a lost master goes on with its log, and trusts no checkpoint that is not on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shoal.config import Config
from shoal.record import runlog
from shoal.record.checkpoint import NEWEST, load, newest_loadable
from shoal.record.recorder import Recorder


def _lost_master(directory: Path, saved: int, begun: int) -> None:
    """What a master leaves that died in round 5, after it saved one checkpoint and began another."""
    recorder = Recorder(directory, Config())
    recorder.open()
    for round in range(1, 6):
        recorder.event("round", round=round)
        if round == saved:
            recorder.checkpoint({"a": np.arange(3.0)}, {}, round, 10 * round)
        elif round == begun:
            recorder.event("checkpoint", round=round, consumed=10 * round)
    recorder._writer.wait()
    recorder.close()
    (directory / "checkpoint.tmp-1").write_bytes(b"half")


def test_a_checkpoint_that_was_only_begun_is_not_taken_for_saved(tmp_path):
    _lost_master(tmp_path, saved=2, begun=5)
    recorder = Recorder(tmp_path, Config())
    history = recorder.take_over(5)
    assert [event["round"] for event in history if event["event"] == "checkpoint"] == [2, 5]
    assert recorder.saved_round == 2
    recorder.checkpoint({"a": np.arange(3.0)}, {}, 5, 50)
    assert recorder.saved_round == 5
    recorder.finish(0, done=True)
    assert sorted(path.name for path in tmp_path.glob("checkpoint*")) == ["checkpoint-2.h5", NEWEST]
    assert b'"log_bytes"' in load(tmp_path / NEWEST)[1]


def test_a_checkpoint_past_the_round_to_go_on_from_is_removed(tmp_path):
    _lost_master(tmp_path, saved=5, begun=0)
    recorder = Recorder(tmp_path, Config())
    history = recorder.take_over(4)
    assert recorder.saved_round == -1 and not list(tmp_path.glob("checkpoint*"))
    assert [event["round"] for event in history] == [1, 2, 3, 4]
    assert runlog.read(tmp_path / "run.jsonl") == history
    recorder.close()


def test_what_is_on_the_disk_counts(tmp_path):
    _lost_master(tmp_path, saved=4, begun=0)
    recorder = Recorder(tmp_path, Config())
    recorder.take_over(5)
    assert recorder.saved_round == 4
    assert newest_loadable(tmp_path)[0] == tmp_path / NEWEST
    recorder.close()


def test_a_master_that_stays_trusts_the_checkpoint_it_is_writing(tmp_path):
    recorder = Recorder(tmp_path, Config())
    recorder.open()
    recorder.event("round", round=1)
    recorder.checkpoint({"a": np.zeros(1)}, {}, 1, 10)
    recorder.event("round", round=2)
    assert [event["event"] for event in recorder.take_over(1)] == ["round", "checkpoint"]
    assert recorder.saved_round == 1
    recorder.finish(0, done=False)
