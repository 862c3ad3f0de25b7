"""The node's shared memory among plain processes: one is killed in the middle of a reduction."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from shoal import kernels
from shoal.comm.algorithms import slices
from shoal.comm.places import Sizes
from shoal.comm.shared import NodeMemory
from shoal.comm.wait import Waiter
from shoal.errors import DeadlineError

RANKS, SIZE, TIMEOUT_S, LIMIT_S = 3, 100_000, 0.5, 30.0

pytestmark = pytest.mark.skipif(not kernels.orders_memory(), reason="the twin orders no memory on this CPU")


def reduce_for_ever(memory: NodeMemory, told: Any, alone: bool) -> None:
    """Reductions until one fails; tells how, and when."""
    members = tuple(range(RANKS))
    terms = kernels.Terms(np, [memory.part(member, 0) for member in members], (0, 1, 1), 1 / RANKS)
    span = slice(0, SIZE) if alone else slices(SIZE, RANKS)[memory.me]
    here = kernels.Terms(np, [part[span] for part in terms.parts], terms.joins, terms.scale)
    moves = [kernels.Move(here, kernels.SUM, (memory.versions[0]["anchor"][span],))]
    meeting, round = memory.meeting(members, moves, alone), 0
    try:
        while True:
            memory.meet(meeting, members, 2 * round + 1, (0.0, 1.0))
            round += 1
    except DeadlineError as error:
        told.send((round, time.monotonic(), str(error)))
    os._exit(0)


@pytest.mark.parametrize("alone", [False, True] if kernels.can_claim() else [False], ids=str)
def test_the_survivors_of_a_killed_rank_end_by_the_deadline_and_name_it(alone: bool) -> None:
    """Whatever it was doing: its slice, the work of all, or waiting."""
    sizes = Sizes(SIZE, 0, SIZE, 1, np.dtype(np.float32))
    file = mmap.mmap(-1, 64 << 20)
    memories = [NodeMemory(file, (4, 5, 6), me, sizes, Waiter(TIMEOUT_S, crowded=True)) for me in range(RANKS)]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    processes = [
        context.Process(target=reduce_for_ever, args=(memories[me], pipes[me][1], alone)) for me in range(RANKS)
    ]
    for process in processes:
        process.start()
    began_s = time.monotonic()
    while memories[0]._board[: 8 * RANKS : 8].min() < 5:
        assert time.monotonic() - began_s < LIMIT_S, "no reductions"
        time.sleep(0.01)
    os.kill(processes[1].pid or 0, signal.SIGKILL)
    killed_s = time.monotonic()
    try:
        for me in (0, 2):
            assert pipes[me][0].poll(LIMIT_S), "a survivor waits for ever"
            round, end_s, text = pipes[me][0].recv()
            assert round > 0 and "world rank 5, which" in text
            assert TIMEOUT_S - 0.1 < end_s - killed_s < TIMEOUT_S + 5
    finally:
        for process in processes:
            process.kill()
            process.join(LIMIT_S)


@pytest.mark.skipif(not kernels.can_claim(), reason="one rank for all needs compiled kernels")
def test_a_rank_that_died_doing_the_work_of_all_is_named_alone() -> None:
    sizes = Sizes(10, 0, 10, 1, np.dtype(np.float32))
    memory = NodeMemory(mmap.mmap(-1, 8 << 20), (4, 5, 6), 0, sizes, Waiter(0.1, crowded=True))
    for member in (1, 2):
        memory._board[8 * member] = 1
    memory._board[8 * RANKS + 2] = 65536 + 1
    meeting = memory.meeting((0, 1, 2), [], alone=True)
    with pytest.raises(DeadlineError, match="world rank 5, which"):
        memory.meet(meeting, (0, 1, 2), 1, (0.0, 1.0))
