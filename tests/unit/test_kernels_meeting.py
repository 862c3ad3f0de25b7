"""A reduction among processes that share memory, as one call: bits, both forms, a hub, and members that are late."""

from __future__ import annotations

import mmap
import multiprocessing
import multiprocessing.connection
import os
import time
from typing import Any

import numpy as np
import pytest

from shoal import kernels
from shoal.comm.algorithms import slices
from shoal.comm.tree import joins
from shoal.kernels import twins
from shoal.kernels.barrier import TwinBarrier
from shoal.kernels.compiled import cpu

DEADLINE_S = 60.0
MU, RATE = 0.7, 0.3
RULES = (kernels.SUM, kernels.STATISTICS, kernels.DISPLACEMENT, kernels.PER_RATE)
KINDS = [*((rule, None) for rule in RULES), (2, 0.0), (2, 1e-2), (3, 0.0), (3, 1e-2)]
"""(rule, decay); with a decay the parts are gradients"""
NAMES = ("a", "v", "a_out", "v_out")
ARRAYS = {
    kernels.SUM: ("a_out",),
    kernels.STATISTICS: ("a", "a_out"),
    kernels.DISPLACEMENT: NAMES,
    kernels.PER_RATE: NAMES,
}
FORMS = ("twin",) if cpu is None else ("twin", "C")
needs_c = pytest.mark.skipif(cpu is None, reason=f"only a compiled meeting has a hub: {kernels.backing()}")
needs_order = pytest.mark.skipif(not kernels.orders_memory(), reason="the twin orders no memory on this CPU")


class Memory:
    """A board with a hub, a part a rank, and the arrays of a state."""

    def __init__(self, ranks: int, size: int, dtype: Any = np.float32) -> None:
        item, self.ranks, self.size = np.dtype(dtype).itemsize, ranks, size
        raw = np.frombuffer(mmap.mmap(-1, 64 * (ranks + 1) + (ranks + len(NAMES)) * size * item + 64), np.uint8)
        self.board = raw[: 64 * (ranks + 1)].view(np.int64).reshape(-1, 8)
        rows = raw[64 * (ranks + 1) :][: (ranks + len(NAMES)) * size * item].view(dtype).reshape(-1, size)
        self.parts, self.arrays = rows[:ranks], dict(zip(NAMES, rows[ranks:], strict=True))
        rows[...] = np.random.default_rng((ranks, size)).standard_normal(rows.shape)
        self.joins = joins([(0, rank) for rank in range(ranks)])

    def move(self, rule: int, span: slice, decay: float | None = None) -> list[kernels.Move]:
        if span.start == span.stop:
            return []
        terms = kernels.Terms(np, [part[span] for part in self.parts], self.joins, 1 / self.ranks)
        return [kernels.Move(terms, rule, tuple(self.arrays[name][span] for name in ARRAYS[rule]), decay)]

    def meeting(self, form: str, rule: int, me: int, hub: bool, decay: float | None = None) -> Any:
        members = list(range(self.ranks))
        span = slice(0, self.size) if hub else slices(self.size, self.ranks)[me]
        line = kernels.barrier(self.board, members, me) if form == "C" else TwinBarrier(self.board, members, me)
        return kernels.meeting(np, line, self.move(rule, span, decay), self.ranks if hub else kernels.NO_HUB)

    def expected(self, rule: int, decay: float | None = None) -> dict[str, np.ndarray]:
        """The state by the twins."""
        parts = [part.copy() for part in self.parts]
        if decay is not None:
            a, step = self.arrays["a"], kernels.LocalStep(RATE, weight_decay=decay, decayed=self.size)
            for part in parts:
                twins.local_step(np, (a, None), part.copy(), (part, None), step, origin=a)
        terms = kernels.Terms(np, parts, self.joins, 1 / self.ranks)
        copies = {name: array.copy() for name, array in self.arrays.items()}
        arrays = [copies[name] for name in ARRAYS[rule]]
        if rule == kernels.SUM:
            twins.canonical_sum(np, terms, *arrays)
        elif rule == kernels.STATISTICS:
            twins.reduce_statistics(np, terms, *arrays)
        elif rule == kernels.DISPLACEMENT:
            twins.reduce_displacement(np, terms, tuple(arrays[:2]), tuple(arrays[2:]), MU)
        else:
            twins.reduce_per_rate(np, terms, tuple(arrays[:2]), tuple(arrays[2:]), (MU, RATE))
        return copies


def in_processes(ranks: int, work: Any) -> list[int | None]:
    """The exit statuses of `work(me)` in a process a rank. Once one fails, or time is up, the others are ended (-9)."""

    def run(me: int) -> None:
        os._exit(work(me))

    started = [multiprocessing.get_context("fork").Process(target=run, args=(me,)) for me in range(ranks)]
    for process in started:
        process.start()
    end_s = time.monotonic() + DEADLINE_S
    while alive := [process.sentinel for process in started if process.exitcode is None]:
        multiprocessing.connection.wait(alive, max(0.0, end_s - time.monotonic()))
        if time.monotonic() > end_s or any(process.exitcode for process in started):
            break
    for process in started:
        process.kill()
        process.join()
    return [process.exitcode for process in started]


@needs_order
@pytest.mark.parametrize(("rule", "decay"), KINDS)
@pytest.mark.parametrize("forms", [["twin"] * 2, ["C"] * 3, ["C", "twin", "C"], ["C"] * 5])
def test_each_rank_does_its_slice(forms: list[str], rule: int, decay: float | None) -> None:
    if cpu is None and "C" in forms:
        pytest.skip("not compiled")
    memory = Memory(len(forms), 1003)
    expected = memory.expected(rule, decay)

    def work(me: int) -> int:
        return memory.meeting(forms[me], rule, me, False, decay).run(1, MU, RATE, 10, 50, DEADLINE_S) + 1

    assert in_processes(len(forms), work) == [0] * len(forms)
    for name, array in memory.arrays.items():
        assert array.tobytes() == expected[name].tobytes()


@needs_c
@pytest.mark.parametrize(("rule", "decay"), KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_whoever_comes_last_does_it_for_all(rule: int, decay: float | None, dtype: Any) -> None:
    memory = Memory(3, 1003, dtype)
    expected = memory.expected(rule, decay)

    def work(me: int) -> int:
        return memory.meeting("C", rule, me, True, decay).run(1, MU, RATE, 0, 50, DEADLINE_S) + 1

    assert in_processes(3, work) == [0] * 3
    for name, array in memory.arrays.items():
        assert array.tobytes() == expected[name].tobytes()


@needs_order
@pytest.mark.parametrize(("form", "hub"), [(form, False) for form in FORMS] + [("C", True)] * (cpu is not None))
def test_many_meetings_in_turn_with_deadlines_that_pass(form: str, hub: bool) -> None:
    """Every rank brings a new number each time and reads the sum; waits are cut short all the time. Waits without any
    patience end between the arrival of the last rank and its work too, where the work is the last one's."""
    ranks, rounds = 4, (500 if hub else 5000) if form == "C" else 300
    deadline_s = 0.0 if hub else 1e-5
    memory = Memory(ranks, 40)

    def work(me: int) -> int:
        meeting = memory.meeting(form, kernels.SUM, me, hub)
        for index in range(rounds):
            memory.parts[me][...] = index * ranks + me
            while meeting.run(2 * index + 1, 0.0, 0.0, 0, 1, deadline_s) >= 0:
                pass
            if not (memory.arrays["a_out"] == index * ranks + (ranks - 1) / 2).all():
                return 1
        return 0

    assert in_processes(ranks, work) == [0] * ranks


@pytest.mark.parametrize(("form", "hub"), [(form, False) for form in FORMS] + [("C", True)] * (cpu is not None))
def test_a_late_member_is_named_and_nobody_arrives_twice(form: str, hub: bool) -> None:
    memory = Memory(3, 40)
    one, two, three = (memory.meeting(form, kernels.DISPLACEMENT, me, hub) for me in range(3))
    expected = memory.expected(kernels.DISPLACEMENT)
    assert one.run(1, MU, RATE, 0, 1, 1e-3) == 1
    assert three.run(1, MU, RATE, 0, 1, 1e-3) == 1
    assert one.run(1, MU, RATE, 0, 1, 1e-3) == 1
    assert memory.board[:3, 0].tolist() == [1, 0, 1]
    for meeting in (two, one, three, two, one):
        meeting.run(1, MU, RATE, 0, 1, 1e-3)
    for name, array in memory.arrays.items():
        assert array.tobytes() == expected[name].tobytes()


@needs_c
def test_the_one_that_took_the_work_and_died_is_named() -> None:
    memory = Memory(3, 40)
    one = memory.meeting("C", kernels.SUM, 0, hub=True)
    memory.board[1:3, 0] = 5
    memory.board[3, 2] = 5 * 65536 + 2
    assert one.run(5, 0.0, 0.0, 0, 1, 1e-3) == 2
    assert memory.arrays["a_out"].any() and one.run(5, 0.0, 0.0, 0, 1, 1e-3) == 2


def test_what_does_not_fit_is_refused() -> None:
    memory = Memory(2, 40)
    for form in FORMS:
        line = kernels.barrier(memory.board, [0, 1], 0) if form == "C" else TwinBarrier(memory.board, [0, 1], 0)
        for hub in (0, 9) if form == "C" else (2,):
            with pytest.raises(ValueError, match="hub"):
                kernels.meeting(np, line, memory.move(kernels.SUM, slice(0, 40)), hub)
    terms = kernels.Terms(np, list(memory.parts), memory.joins, 0.5)
    if cpu is not None:
        with pytest.raises(ValueError, match="differs"):
            kernels.meeting(np, line, [kernels.Move(terms, kernels.SUM, (np.zeros(39, np.float32),))])
        with pytest.raises(ValueError, match="number of arrays"):
            kernels.meeting(np, line, [kernels.Move(terms, kernels.STATISTICS, (np.zeros(40, np.float32),))])
