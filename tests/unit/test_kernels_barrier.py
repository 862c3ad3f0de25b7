"""The barrier between processes that share memory: order, many rounds, mixed forms, and a member that is missing."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import kernels
from shoal.kernels.barrier import TwinBarrier
from shoal.kernels.compiled import cpu

DEADLINE_S = 60.0
LINE_BYTES = 64
MAKERS: dict[str, Any] = {"twin": TwinBarrier}
if cpu is not None:
    MAKERS["C"] = cpu.Barrier

needs_order = pytest.mark.skipif(not kernels.orders_memory(), reason="the twin orders no memory on this CPU")


def new_board(ranks: int) -> np.ndarray:
    raw = np.zeros(8 * ranks + 8, np.int64)
    start = -raw.ctypes.data % LINE_BYTES // 8
    return raw[start : start + 8 * ranks].reshape(ranks, 8)


def rounds(path: Path, ranks: int, me: int, maker: Any, count: int) -> None:
    """Each round every rank writes a number, meets the others, reads theirs, and meets them again."""
    with path.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)
    board, values = memory[: 8 * ranks].reshape(ranks, 8), memory[8 * ranks :].reshape(ranks, -1)
    barrier = maker(board, list(range(ranks)), me)
    crowded, sequence = ranks > (os.cpu_count() or 1), 0
    for index in range(count):
        values[me] = index * 1000 + me
        for look in (True, False):
            sequence += 1
            barrier.arrive(sequence)
            if barrier.wait(sequence, 0 if crowded else 2000, 20, DEADLINE_S) != -1:
                os._exit(3)
            if look and not (values == index * 1000 + np.arange(ranks)[:, None]).all():
                os._exit(4)
    os._exit(0)


def run_ranks(path: Path, makers: list[Any], count: int) -> list[int | None]:
    ranks = len(makers)
    path.write_bytes(bytes(LINE_BYTES * ranks + 8 * 32 * ranks))
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rounds, args=(path, ranks, i, m, count)) for i, m in enumerate(makers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
        if process.is_alive():
            process.kill()
    return [process.exitcode for process in processes]


@needs_order
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_what_ranks_wrote_before_is_read_after(tmp_path: Path, ranks: int) -> None:
    maker = MAKERS["C"] if cpu is not None else TwinBarrier
    count = 3000 if cpu is not None else 200
    assert run_ranks(tmp_path / "memory", [maker] * ranks, count) == [0] * ranks


@needs_order
@pytest.mark.skipif(cpu is None, reason=f"one form only: {kernels.backing()}")
@pytest.mark.parametrize("makers", [["twin", "twin"], ["C", "twin"], ["twin", "C", "C"]])
def test_both_forms_keep_the_same_protocol(tmp_path: Path, makers: list[str]) -> None:
    assert run_ranks(tmp_path / "memory", [MAKERS[name] for name in makers], 100) == [0] * len(makers)


@pytest.mark.parametrize("form", MAKERS)
def test_a_missing_member_is_named_and_waiting_goes_on(form: str) -> None:
    board = new_board(4)
    members = [0, 2, 3]
    first, late = MAKERS[form](board, members, 2), MAKERS[form](board, members, 3)
    first.arrive(7)
    assert first.wait(7, 10, 2, 0.01) == 0
    MAKERS[form](board, members, 0).arrive(7)
    assert first.wait(7, 10, 2, 0.01) == 3
    assert first.wait(7, 0, 0, 0.0) == 3
    assert kernels.missing(board, members, 7) == [3]
    late.arrive(8)
    assert first.wait(7, 10, 2, 0.01) == -1
    assert kernels.missing(board, members, 8) == [0, 2]


@pytest.mark.parametrize("form", MAKERS)
def test_an_arrival_wakes_a_sleeper_and_the_gil_is_free(form: str) -> None:
    board = new_board(2)
    waiter, other = MAKERS[form](board, [0, 1], 0), MAKERS[form](board, [0, 1], 1)

    def arrive_later() -> None:
        time.sleep(0.05)
        other.arrive(1)

    thread = threading.Thread(target=arrive_later)
    thread.start()
    waiter.arrive(1)
    assert waiter.wait(1, 0, 0, DEADLINE_S) == -1
    thread.join()


@pytest.mark.skipif(cpu is None, reason=f"the twin does not wake: {kernels.backing()}")
def test_a_sleeper_leaves_its_number_and_an_arrival_takes_it_back() -> None:
    board = new_board(2)
    waiter, other = MAKERS["C"](board, [0, 1], 0), MAKERS["C"](board, [0, 1], 1)
    assert waiter.wait(1, 0, 0, 0.01) == 0
    other.arrive(1)
    assert waiter.wait(2, 0, 0, 0.01) == 0
    waiter.arrive(2)
    assert board[0, 1] == 0 and board[0, 0] == 2
    assert waiter.wait(2, 0, 0, 0.01) == 1
    assert board[1, 1] in (0, 2)


@pytest.mark.parametrize("form", MAKERS)
def test_boards_and_members_that_do_not_fit_are_refused(form: str) -> None:
    board, make = new_board(3), MAKERS[form]
    for wrong in (board.reshape(-1)[1:17], np.zeros(16, np.int32), board.reshape(-1)[:12]):
        with pytest.raises(ValueError, match="board"):
            make(wrong, [0], 0)
    for members, me in (([0, 3], 0), ([0, 1], 2), ([-1, 0], 0)):
        with pytest.raises(ValueError, match="member"):
            make(board, members, me)
