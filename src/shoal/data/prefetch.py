"""Batches made ahead of time: a thread makes the next one while the caller computes with this one.

A caller says with each batch which position it will ask for next, and that batch is made meanwhile. With
several learners on a rank, each one's first batch of the next round waits for it. A wrong guess costs time and
never changes a batch, since a batch is a function of its position.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Memory = TypeVar("Memory")
Key = tuple[int, int]
"""position, count"""


class Prefetch(Generic[Memory]):
    """Runs `make(position, count, memory)` in one thread of its own, for all batches.

    `memory(count)` gives memory for a batch; it is taken when all that there is is in use: one batch for the
    caller, and one for each of its learners. The thread ends with `close`, or with this object.
    """

    def __init__(self, make: Callable[[int, int, Memory], None], memory: Callable[[int], Memory]) -> None:
        self._make, self._memory = make, memory
        self._thread = ThreadPoolExecutor(1, "shoal-batches")
        self._begun: dict[Key, tuple[Future[None], Memory]] = {}
        self._spare: dict[int, list[Memory]] = defaultdict(list)
        self._lent: tuple[int, Memory] | None = None

    def take(self, position: int, count: int, following: int | None) -> Memory:
        """The batch at `position`, valid until the next call; the one at `following` is begun.

        Raises what making it raised."""
        if self._lent:
            self._spare[self._lent[0]].append(self._lent[1])
            self._lent = None
        if (position, count) not in self._begun:
            self._drop_before(position)
            self._begin(position, count)
        made, memory = self._begun.pop((position, count))
        if following is not None and (following, count) not in self._begun:
            self._begin(following, count)
        self._lent = count, memory
        made.result()
        return memory

    def close(self) -> None:
        """End the thread, when it has made what it is at. May be called again."""
        self._thread.shutdown(cancel_futures=True)

    def _begin(self, position: int, count: int) -> None:
        spare = self._spare[count]
        memory = spare.pop() if spare else self._memory(count)
        self._begun[position, count] = self._thread.submit(self._make, position, count, memory), memory

    def _drop_before(self, position: int) -> None:
        """Take back what nobody asked for: positions only go up, but for those of one round."""
        for at, count in [key for key in self._begun if key[0] < position]:
            made, memory = self._begun.pop((at, count))
            if not made.cancel():
                made.exception()  # wait for the memory
            self._spare[count].append(memory)
