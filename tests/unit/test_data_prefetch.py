"""Batches made ahead: made once, in one thread, in memory that is used again; errors reach who asks."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest

from shoal.backend import numpy_backend
from shoal.data.batches import Batches
from shoal.data.order import SampleOrder
from shoal.data.prefetch import Prefetch
from shoal.data.sets import from_arrays


class Recorder:
    """Makes "batches": lists that are told their position."""

    def __init__(self, bad: int = -1) -> None:
        self.made: list[int] = []
        self.memories = 0
        self.threads: set[str] = set()
        self.bad = bad

    def make(self, position: int, count: int, memory: list[int]) -> None:
        self.threads.add(threading.current_thread().name)
        self.made.append(position)
        if position == self.bad:
            raise RuntimeError(f"no sample at {position}")
        memory[:] = [position, count]

    def memory(self, count: int) -> list[int]:
        self.memories += 1
        return [-1]


def run(prefetch: Prefetch[Any], learners: int, steps: int, batch: int, start: int, hosted: range) -> int:
    """One round of the learners hosted here; the next position."""
    stride = learners * batch
    for j in hosted:
        for k in range(steps):
            position = start + k * stride + j * batch
            assert prefetch.take(position, batch, position + stride) == [position, batch]
    return start + steps * stride


@pytest.mark.parametrize("hosted", [range(1), range(2, 4), range(5)])
def test_each_batch_is_made_once_and_memory_stays(hosted: range) -> None:
    recorder = Recorder()
    prefetch = Prefetch(recorder.make, recorder.memory)
    position = 0
    for _ in range(6):
        position = run(prefetch, 5, 3, 4, position, hosted)
    prefetch.close()
    assert len(set(recorder.made)) == len(recorder.made)
    assert 0 <= len(recorder.made) - 6 * 3 * len(hosted) <= len(hosted)
    assert recorder.memories == len(hosted) + 1
    assert len(recorder.threads) == 1 and "MainThread" not in recorder.threads


def test_wrong_guesses_cost_no_memory_in_the_long_run() -> None:
    recorder = Recorder()
    prefetch = Prefetch(recorder.make, recorder.memory)
    position = 0
    for learners in (1, 3, 2, 6, 1, 5) * 10:
        position = run(prefetch, learners, 2, 4, position, range(learners))
    prefetch.close()
    assert recorder.memories <= 2 * 6 + 1


def test_an_error_in_the_thread_reaches_who_asks() -> None:
    recorder = Recorder(bad=8)
    prefetch = Prefetch(recorder.make, recorder.memory)
    assert prefetch.take(0, 4, 4) == [0, 4]
    assert prefetch.take(4, 4, 8) == [4, 4]
    with pytest.raises(RuntimeError, match="no sample at 8"):
        prefetch.take(8, 4, 12)
    assert prefetch.take(12, 4, None) == [12, 4]
    prefetch.close()


def test_an_error_that_nobody_asked_for_is_nobodys() -> None:
    recorder = Recorder(bad=4)
    prefetch = Prefetch(recorder.make, recorder.memory)
    assert prefetch.take(0, 4, 4) == [0, 4]
    assert prefetch.take(16, 4, None) == [16, 4]
    prefetch.close()


@pytest.mark.parametrize("close", [True, False])
def test_the_thread_ends_with_its_owner(close: bool) -> None:
    before = threading.active_count()
    x = np.zeros((8, 2), np.float32)
    data = from_arrays(x, np.zeros(8), x, np.zeros(8))
    batches = Batches(data, SampleOrder(8, 1), numpy_backend(), prefetch=True)
    batches.training(0, 4, 4)
    threads = [t for t in threading.enumerate() if t.name.startswith("shoal-batches")]
    assert threading.active_count() == before + 1
    if close:
        batches.close()
        batches.close()
    del batches
    end = time.monotonic() + 10
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert not any(thread.is_alive() for thread in threads)


def test_no_thread_without_prefetch() -> None:
    x = np.zeros((8, 2), np.float32)
    data = from_arrays(x, np.zeros(8), x, np.zeros(8))
    before = threading.active_count()
    Batches(data, SampleOrder(8, 1), numpy_backend()).training(0, 4, 4)
    assert threading.active_count() == before
