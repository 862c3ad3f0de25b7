"""A Transport whose ranks are threads of one process: the algorithms' test bench without MPI."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from shoal.comm.transport import Message
from shoal.errors import DeadlineError

T = TypeVar("T")


class ThreadTransport:
    """Rank `rank` of `size`. `posts[a][b]` carries what a sends to b, in order.

    As MPI promises and no better: a message must fit its receive, to the byte; what is received is spoilt until it is
    waited for, and what is sent must be the same then.
    """

    def __init__(self, rank: int, posts: list[list[queue.SimpleQueue[np.ndarray]]], deadline_s: float) -> None:
        self.rank = rank
        self.size = len(posts)
        self._posts = posts
        self._deadline_s = deadline_s
        self.sent: list[tuple[int, int]] = []
        """(peer, numbers) of each message sent"""
        self._expected: deque[Message] = deque()

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self.begin(sends, receives)()

    def begin(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        awaited = [message for message in receives if message[1].size]
        for _, array in awaited:
            assert array.flags.c_contiguous
            array.reshape(-1).view(np.uint8).fill(0xFF)
        self._expected += awaited
        copies = []
        for peer, array in sends:
            assert array.flags.c_contiguous
            if array.size:
                self.sent.append((peer, array.size))
                copies.append((array, array.copy()))
                self._posts[self.rank][peer].put(copies[-1][1])

        def finish() -> None:
            end = time.monotonic() + self._deadline_s
            while any(message is awaited[-1] for message in self._expected if awaited):
                self._receive(*self._expected.popleft(), end - time.monotonic())
            assert all(array.tobytes() == copy.tobytes() for array, copy in copies)

        return finish

    def _receive(self, peer: int, array: np.ndarray, left_s: float) -> None:
        try:
            message = self._posts[peer][self.rank].get(timeout=max(0.0, left_s))
        except queue.Empty:
            raise DeadlineError(f"rank {self.rank} waited in vain for rank {peer}") from None
        assert message.shape == array.shape and message.dtype == array.dtype
        array[...] = message

    def undelivered(self) -> int:
        """How many messages wait for this rank."""
        return sum(posts[self.rank].qsize() for posts in self._posts)


def on_ranks(size: int, work: Callable[[ThreadTransport], T], deadline_s: float = 20.0) -> list[T]:
    """work(transport) on each of `size` threads; their results by rank. Raises what the lowest failing rank
    raised, and fails if a message was sent that nobody received."""
    posts: list[list[queue.SimpleQueue[np.ndarray]]] = [[queue.SimpleQueue() for _ in range(size)] for _ in range(size)]
    transports = [ThreadTransport(rank, posts, deadline_s) for rank in range(size)]
    results: list[Any] = [None] * size
    failures: list[BaseException | None] = [None] * size

    def rank_body(rank: int) -> None:
        try:
            results[rank] = work(transports[rank])
        except BaseException as failure:
            failures[rank] = failure

    threads = [threading.Thread(target=rank_body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline_s + 5)
        assert not thread.is_alive(), "a rank is stuck outside of the transport"
    for failure in failures:
        if failure is not None:
            raise failure
    assert [transport.undelivered() for transport in transports] == [0] * size
    return results
