"""The world: groups of its ranks, reserves that sleep and wake, and agreement."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest

from shoal.backend import numpy_backend
from shoal.comm.collectives import broadcast_bytes, gather
from shoal.comm.world import World
from shoal.errors import DeadlineError, InputError

pytestmark = pytest.mark.mpi


def _never() -> bool:
    return False


def _raised(kind: type[Exception], act: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


def _same_everywhere(comm: Any, text: str) -> bool:
    return len(set(comm.allgather(text))) == 1


def test_who_and_where(world: Any, comm: Any) -> None:
    assert (world.rank, world.size) == (comm.rank, comm.size)
    assert world.is_master == (comm.rank == 0)
    assert world.nodes == 1 and world.ranks_on_node == comm.size
    assert world.order == list(range(comm.size))
    assert world.library and "\n" not in world.library


def test_groups_of_any_ranks_in_any_order(world: Any) -> None:
    size = world.size
    chosen = [list(range(n)) for n in range(1, size + 1)]
    chosen += [list(reversed(range(size))), [size - 1], list(range(0, size, 2)), list(range(size // 2, size))]
    for ranks in chosen:
        group = world.group(ranks)
        assert (group is not None) == (world.rank in ranks)
        if group is None:
            continue
        assert group.ranks == tuple(ranks) and group.size == len(ranks)
        assert group.rank == ranks.index(world.rank)
        rows = gather(group.transport, np.array([world.rank]))
        if group.rank == 0:
            assert rows[:, 0].tolist() == ranks
        mine = np.array([group.learners_here(5 * size).start, group.learners_here(5 * size).stop])
        dealt = [learner for start, stop in gather(group.transport, mine) for learner in range(start, stop)]
        assert group.rank or dealt == list(range(5 * size))
        group.close()


@pytest.mark.parametrize("_", range(2))
def test_every_growth_and_shrinkage(world: Any, _: int) -> None:
    """Between all sizes 1..N: the group carries on by broadcast, sleeping ranks by orders."""
    sizes = [size for a in range(1, world.size + 1) for b in range(1, world.size + 1) for size in (a, b)]
    group = None
    for step, size in enumerate([*sizes, 0]):
        order = f"step {step}: {size} ranks".encode() if world.is_master else b""
        if world.is_master:
            for rank in range(1, world.size):
                if group is None or rank not in group.ranks:
                    world.order_reserve(rank, order)
        if group is not None:
            order = broadcast_bytes(group.transport, order)
        elif not world.is_master:
            order = world.sleep_until_order(_never)
        assert order == f"step {step}: {size} ranks".encode()
        if group is not None:
            group.close()
        group = world.group(range(size)) if size else None
        assert (group is not None) == (world.rank < size)


@pytest.mark.parametrize("length", [0, 1, 500, 1016])
def test_orders_arrive_whole_and_in_order(world: Any, length: int) -> None:
    orders = [bytes((i + n) % 251 for i in range(length)) for n in range(5)]
    if world.is_master:
        for order in orders:
            for rank in range(1, world.size):
                world.order_reserve(rank, order)
    else:
        assert [world.sleep_until_order(_never) for _ in orders] == orders


def test_an_order_wakes_a_sleeper_by_the_bell(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleeper that looked by itself only every 9 s must be up long before."""
    monkeypatch.setattr("shoal.comm.bell._PERIOD_S", 9.0)
    start = time.monotonic()
    for _ in range(20):
        if not world.is_master:
            world.sleep_until_order(_never)
        else:
            time.sleep(0.015)
            for rank in range(1, world.size):
                world.order_reserve(rank, b"wake")
        world.meet()
    assert time.monotonic() - start < 8


def test_a_sleeping_reserve_takes_no_core(world: Any) -> None:
    """Also not after orders that came while it was awake."""
    if world.is_master:
        for pause_s in (0.0, 0.0, 0.0, 1.0):
            time.sleep(pause_s)
            for rank in range(1, world.size):
                world.order_reserve(rank, b"")
    else:
        for _ in range(3):
            world.sleep_until_order(_never)
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        world.sleep_until_order(_never)
        slept_s, cpu_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
        assert slept_s > 0.5 and cpu_s < 0.1 * slept_s


def test_a_reserve_passes_on_a_stop_once(world: Any) -> None:
    asked = []

    def stop_requested() -> bool:
        asked.append(time.monotonic())
        return True

    assert not world.is_master or not world.stop_from_reserve()
    world.meet()
    if world.is_master:
        end = time.monotonic() + 10
        while world.size > 1 and not world.stop_from_reserve():
            assert time.monotonic() < end
        time.sleep(0.05)
        for rank in range(1, world.size):
            world.order_reserve(rank, b"go on")
    else:
        assert world.sleep_until_order(stop_requested) == b"go on"
        assert len(asked) == 1
    world.meet()
    if world.is_master:
        world.stop_from_reserve()
        assert not world.stop_from_reserve()


def test_a_rank_that_does_not_come_to_a_meeting_is_named(comm: Any) -> None:
    """By rank 0, which waits for all; what was begun on this communicator ends with it."""
    world = World(comm, numpy_backend(), timeout_s=0.5)
    late = world.size - 1
    if world.rank != late:
        sentence = _raised(DeadlineError, world.meet)
        assert not world.is_master or f"world rank {late}, which did not come" in sentence
    comm.Barrier()
    world.comm.Free()


def test_agreement(world: Any, comm: Any) -> None:
    world.agree(None)
    assert _raised(InputError, lambda: world.agree("the file is gone")) == "the file is gone"
    last = world.size - 1
    sentence = _raised(InputError, lambda: world.agree("no file x" if world.rank == last else None))
    assert "no file x" in sentence and _same_everywhere(comm, sentence)
    assert (f"world rank {last}" in sentence) == (world.size > 1)
    if world.size > 2:
        sentence = _raised(InputError, lambda: world.agree("even" if world.rank % 2 == 0 else "odd"))
        evens = ", ".join(str(rank) for rank in range(0, world.size, 2))
        assert f"on world rank {evens}: even" in sentence and "world rank 1" in sentence
        assert _same_everywhere(comm, sentence)
    world.agree("")
    world.agree(None)


def test_agreement_on_a_value(world: Any, comm: Any) -> None:
    world.agree_same("the config", b"x" * 10_000)
    value = b"other" if world.rank and world.rank == world.size - 1 else b"mine"
    if world.size > 1:
        sentence = _raised(InputError, lambda: world.agree_same("the config", value))
        assert f"the config on world rank {world.size - 1} differs" in sentence
        assert _same_everywhere(comm, sentence)


def test_two_worlds_side_by_side(comm: Any) -> None:
    """Halves of the ranks, as a sweep makes them: each is whole and neither hears the other's orders."""
    half = comm.rank % 2
    part = comm.Split(half, comm.rank)
    world = World(part, numpy_backend(), 10.0)
    assert world.size == part.size
    order = f"for half {half}".encode()
    if world.is_master:
        for rank in range(1, world.size):
            world.order_reserve(rank, order)
    else:
        assert world.sleep_until_order(_never) == order
    world.close()
    part.Free()


def test_resizing_leaves_nothing_behind(world: Any) -> None:
    """Files and memory after 200 resizes as after 40."""
    process = psutil.Process()

    def resize(times: int) -> tuple[int, int]:
        for n in range(times):
            group = world.group(range(n % world.size + 1))
            if group is not None:
                group.close()
        return process.num_fds(), process.memory_info().rss

    files, before_bytes = resize(40)
    files_after, after_bytes = resize(160)
    assert files_after <= files  # fewer: what an earlier test left is collected
    assert after_bytes - before_bytes < 2 << 20


def test_a_rank_that_does_not_come_to_a_world_is_named(comm: Any) -> None:
    """Before any call of MPI that has no deadline."""
    if comm.Get_size() == 1:
        pytest.skip("one rank waits for nobody")
    apart = comm.Dup()
    late = apart.Get_size() - 1
    if apart.Get_rank() == 0:
        sentence = _raised(DeadlineError, lambda: World(apart, numpy_backend(), timeout_s=0.3))
        assert f"world rank {late}" in sentence
    elif apart.Get_rank() != late:
        _raised(DeadlineError, lambda: World(apart, numpy_backend(), timeout_s=0.6))
    comm.Barrier()
