"""Checkpoints: round trips, damage, and a whole one at every moment, also under kill -9."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import threading
import time
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from shoal.errors import InputError, LeaseError
from shoal.record import checkpoint
from shoal.record.checkpoint import CheckpointWriter, load, newest_loadable, save


def state(round: int, size: int = 3000) -> dict[str, np.ndarray]:
    return {"anchor": np.full(size, round, np.float32), "velocity": np.full(size, -round, np.float64)}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_round_trip_keeps_names_dtypes_shapes_bits(tmp_path):
    arrays = {
        "anchor": np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32),
        "wide": np.array([np.nan, -0.0, np.inf]),
        "scalar": np.array(5, np.int64),
        "empty": np.zeros((0, 4), np.uint8),
        "large": np.arange(3 << 20, dtype=np.int32),
    }
    save(tmp_path / "checkpoint.h5", arrays, b'{"a": 1}\x00\xff')
    loaded, meta = load(tmp_path / "checkpoint.h5")
    assert meta == b'{"a": 1}\x00\xff'
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype and loaded[name].shape == array.shape
        assert loaded[name].tobytes() == array.tobytes()
    assert names(tmp_path) == ["checkpoint.h5"]


def test_empty_meta(tmp_path):
    save(tmp_path / "c.h5", {}, b"")
    assert load(tmp_path / "c.h5") == ({}, b"")


def test_any_damage_is_an_input_error_or_harmless(tmp_path):
    path = tmp_path / "checkpoint.h5"
    save(path, state(1, 200), b"meta")
    whole = path.read_bytes()
    expected = load(path)[0]
    rng = random.Random(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 8))):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            arrays, meta = load(path)
        except InputError as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert meta == b"meta" and all(np.array_equal(arrays[n], expected[n]) for n in expected)
    assert refused > 190


def test_it_is_an_ordinary_hdf5_file(tmp_path):
    h5py = pytest.importorskip("h5py")
    save(tmp_path / "c.h5", state(4), b"meta", round=4)
    with h5py.File(tmp_path / "c.h5") as file:
        assert sorted(file["arrays"]) == ["anchor", "velocity"] and file["meta"][()].tobytes() == b"meta"
    assert b'"round": 4' in (tmp_path / "c.h5").read_bytes()[:512]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_truncated_is_an_input_error(tmp_path, share):
    path = tmp_path / "checkpoint.h5"
    save(path, state(1), b"meta")
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(InputError, match=r"begin as|truncated"):
        load(path)


def test_changed_data_fails_the_sum(tmp_path):
    path = tmp_path / "checkpoint.h5"
    save(path, {"anchor": np.full(100, 1.5, np.float32)}, b"")
    content = path.read_bytes()
    at = content.index(np.full(100, 1.5, np.float32).tobytes())
    path.write_bytes(content[: at + 40] + b"\x01" + content[at + 41 :])
    with pytest.raises(InputError, match="sha256"):
        load(path)


def test_missing_and_other_files(tmp_path):
    with pytest.raises(InputError, match="no checkpoint at"):
        load(tmp_path / "checkpoint.h5")
    (tmp_path / "checkpoint.h5").write_text("hello")
    with pytest.raises(InputError, match="does not begin as a shoal checkpoint"):
        load(tmp_path / "checkpoint.h5")


def test_writer_saves_a_copy_while_the_state_moves_on(tmp_path):
    held = threading.Event()
    writer = CheckpointWriter(tmp_path, before_rename=lambda: held.wait(5) and None)
    arrays = state(3)
    assert writer.write(arrays, b"m", 3) is None
    for array in arrays.values():
        array.fill(99)
    assert writer.poll() is None
    held.set()
    written = writer.wait()
    assert written is not None and written.round == 3
    assert written.bytes == (tmp_path / "checkpoint.h5").stat().st_size
    loaded, _ = load(tmp_path / "checkpoint.h5")
    assert np.all(loaded["anchor"] == 3) and np.all(loaded["velocity"] == -3)
    assert writer.wait() is None


def test_writer_reuses_its_buffers_and_follows_new_shapes(tmp_path):
    writer = CheckpointWriter(tmp_path)
    writer.write(state(1), b"", 1)
    first = dict(writer._copies)
    previous = writer.write(state(2), b"", 2)
    assert previous is not None and previous.round == 1
    assert all(writer._copies[name] is first[name] for name in first)
    writer.write(state(3, size=10), b"", 3)
    writer.wait()
    assert load(tmp_path / "checkpoint.h5")[0]["anchor"].shape == (10,)


def test_keeps_the_older_ones_and_only_these(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=3)
    for round in (5, 10, 15, 20, 20):
        writer.write(state(round), b"", round)
    writer.wait()
    assert names(tmp_path) == ["checkpoint-10.h5", "checkpoint-15.h5", "checkpoint.h5"]
    assert load(tmp_path / "checkpoint-15.h5")[0]["anchor"][0] == 15
    again = CheckpointWriter(tmp_path, keep=3)
    again.write(state(25), b"", 25)
    again.wait()
    assert names(tmp_path) == ["checkpoint-15.h5", "checkpoint-20.h5", "checkpoint.h5"]
    fewer = CheckpointWriter(tmp_path, keep=1)
    fewer.write(state(30), b"", 30)
    fewer.wait()
    assert names(tmp_path) == ["checkpoint.h5"]


def test_copies_where_links_are_refused(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    writer = CheckpointWriter(tmp_path, keep=2)
    for round in (1, 2):
        writer.write(state(round), b"", round)
    writer.wait()
    assert load(tmp_path / "checkpoint-1.h5")[0]["anchor"][0] == 1
    assert names(tmp_path) == ["checkpoint-1.h5", "checkpoint.h5"]


def test_after_a_fall_back_the_abandoned_rounds_go(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=3)
    for round in (10, 20, 30):
        writer.write(state(round), b"", round)
    writer.wait()
    (tmp_path / "checkpoint.h5").write_bytes(b"damaged")
    resumed = CheckpointWriter(tmp_path, keep=3)
    resumed.write(state(15), b"", 15)
    resumed.wait()
    assert names(tmp_path) == ["checkpoint-10.h5", "checkpoint.h5"]
    assert newest_loadable(tmp_path)[1]["anchor"][0] == 15


def test_newest_loadable_falls_back_and_says_so(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=3)
    for round in (8, 9, 10):
        writer.write(state(round), b"m%d" % round, round)
    writer.wait()
    warnings: list[str] = []
    path, arrays, meta = newest_loadable(tmp_path, warnings.append)
    assert (path.name, meta, warnings) == ("checkpoint.h5", b"m10", [])
    os.truncate(tmp_path / "checkpoint.h5", 100)
    path, arrays, meta = newest_loadable(tmp_path, warnings.append)
    assert path.name == "checkpoint-9.h5" and meta == b"m9" and arrays["anchor"][0] == 9
    assert len(warnings) == 1 and "checkpoint.h5" in warnings[0] and "checkpoint-9.h5" in warnings[0]
    (tmp_path / "checkpoint.h5").unlink()
    assert newest_loadable(tmp_path, warnings.append)[2] == b"m9"


def test_newest_loadable_without_any(tmp_path):
    with pytest.raises(InputError, match="no checkpoint in"):
        newest_loadable(tmp_path)
    (tmp_path / "checkpoint.h5").write_bytes(b"x")
    with pytest.raises(InputError, match="can be loaded"):
        newest_loadable(tmp_path)


def test_leftovers_are_removed_at_start(tmp_path):
    (tmp_path / "checkpoint.tmp-123").write_bytes(b"half")
    (tmp_path / "checkpoint-7.tmp-123").write_bytes(b"half")
    (tmp_path / "other.txt").write_bytes(b"")
    CheckpointWriter(tmp_path)
    assert names(tmp_path) == ["other.txt"]


def test_a_lost_lease_stops_the_rename_and_reaches_the_caller(tmp_path):
    lost = threading.Event()

    def check() -> None:
        if lost.is_set():
            raise LeaseError("taken over")

    writer = CheckpointWriter(tmp_path, keep=2, before_rename=check)
    writer.write(state(1), b"", 1)
    writer.wait()
    lost.set()
    writer.write(state(2), b"", 2)
    with pytest.raises(LeaseError, match="taken over"):
        writer.wait()
    assert names(tmp_path) == ["checkpoint.h5"]
    assert load(tmp_path / "checkpoint.h5")[0]["anchor"][0] == 1
    writer.write(state(3), b"", 3)
    with pytest.raises(LeaseError):
        writer.write(state(4), b"", 4)


def test_a_full_disk_reaches_the_caller_and_leaves_the_old_one(tmp_path, monkeypatch):
    writer = CheckpointWriter(tmp_path)
    writer.write(state(1), b"", 1)
    writer.wait()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_array", full)
    writer.write(state(2), b"", 2)
    with pytest.raises(OSError, match="No space"):
        writer.wait()
    assert names(tmp_path) == ["checkpoint.h5"]
    assert load(tmp_path / "checkpoint.h5")[0]["anchor"][0] == 1


@pytest.mark.parametrize("keep", [0, -1])
def test_keep_below_one(tmp_path, keep):
    with pytest.raises(InputError, match="1 or more"):
        CheckpointWriter(tmp_path, keep=keep)


def test_slash_in_a_name(tmp_path):
    with pytest.raises(ValueError, match="slash"):
        save(tmp_path / "c.h5", {"a/b": np.zeros(1)}, b"")
    assert names(tmp_path) == []


def _save_for_ever(directory: Path) -> None:
    writer = CheckpointWriter(directory, keep=3)
    newest = newest_loadable(directory)
    for round in count(int(newest[1]["anchor"][0]) + 1):
        writer.write(state(round), b"%d" % round, round)


def test_killed_while_saving_a_whole_checkpoint_always_loads(tmp_path):
    save(tmp_path / "checkpoint.h5", state(0), b"0", round=0)
    rng = random.Random(1)
    context = multiprocessing.get_context("fork")
    last, leftovers = 0, 0
    for _ in range(30):
        child = context.Process(target=_save_for_ever, args=(tmp_path,))
        child.start()
        time.sleep(rng.uniform(0.01, 0.1))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        leftovers += len(list(tmp_path.glob("*.tmp-*")))
        path, arrays, meta = newest_loadable(tmp_path, pytest.fail)
        assert path.name == "checkpoint.h5"
        round = int(meta)
        assert np.all(arrays["anchor"] == round) and np.all(arrays["velocity"] == -round)
        assert round >= last
        last = round
        for older in tmp_path.glob("checkpoint-*.h5"):
            load(older)
    assert last > 0 and leftovers > 0  # it saved, and was killed in the middle of it
    shutil.rmtree(tmp_path)
