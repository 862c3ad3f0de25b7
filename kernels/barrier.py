"""The barrier of ranks that share memory: each writes how far it is on its own line and reads the others'.

`board` is an int64 array of 8 words (64 bytes) for each rank, starting at a multiple of 64 bytes, zero at first:
word 0 is the rank's sequence number, word 1 belongs to the sleep of the compiled form (cpu/barrier.c), the rest is
free. `arrive(sequence)` publishes all that this rank wrote before; `wait(sequence, ...)` returns once all members
have arrived there, and then what they wrote before is seen. Numbers grow by one from barrier to barrier and start
at 1; a rank that joins takes up the number of the others.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from typing import Any, Protocol

from shoal.kernels.compiled import cpu

LINE = 8
"""Words of a line."""
NAP_S = 1e-3


class Barrier(Protocol):
    """Made by `barrier`: (board, members, me)."""

    def arrive(self, sequence: int, /) -> None:
        """Write `sequence` on the own line (release) and wake who sleeps for it."""

    def wait(self, sequence: int, spins: int, yields: int, deadline_s: float, /) -> int:
        """Wait until every member's line is at `sequence` (acquire); for `deadline_s` seconds from now at most.

        Looks `spins` times, then yields the core `yields` times, then sleeps. Returns -1, or the first member that
        is missing: call again to go on waiting."""


class TwinBarrier:
    """The same protocol in NumPy; peers may be compiled. Where the CPU reorders stores (not x86) it orders nothing
    but its own words: see `orders_memory`."""

    def __init__(self, board: Any, members: Sequence[int], me: int) -> None:
        words = board.reshape(-1)
        if words.dtype.itemsize != 8 or words.size % LINE or words.ctypes.data % (8 * LINE):
            raise ValueError("a board is an array of 64-bit integers, 8 for each rank, at a multiple of 64 bytes")
        if me not in members or not all(0 <= member < words.size // LINE for member in members):
            raise ValueError(f"rank {me} and the members {list(members)} do not fit a board of {words.size // LINE}")
        self._sequences, self._members, self._me = words[::LINE], tuple(members), me

    def arrive(self, sequence: int, /) -> None:
        """As `Barrier.arrive`; a compiled peer that sleeps sees it at the end of its nap (4 ms)."""
        self._sequences[self._me] = sequence

    def wait(self, sequence: int, spins: int, yields: int, deadline_s: float, /) -> int:
        """As `Barrier.wait`."""
        end_s, looks = time.monotonic() + deadline_s, 0
        while (first := self._missing(sequence)) >= 0:
            if time.monotonic() >= end_s:
                return first
            looks += 1
            if looks > spins + yields:
                time.sleep(max(0.0, min(NAP_S, end_s - time.monotonic())))
            elif looks > spins:
                os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
        return -1

    def _missing(self, sequence: int) -> int:
        return next((member for member in self._members if self._sequences[member] < sequence), -1)


def barrier(board: Any, members: Sequence[int], me: int) -> Barrier:
    """The barrier of `members` (lines of `board`; `me` is one), compiled where there is one."""
    return TwinBarrier(board, members, me) if cpu is None else cpu.Barrier(board, members, me)


def missing(board: Any, members: Sequence[int], sequence: int) -> list[int]:
    """All members that have not arrived at `sequence`."""
    sequences = board.reshape(-1)[::LINE]
    return [member for member in members if sequences[member] < sequence]


def orders_memory() -> bool:
    """Whether `barrier` orders what ranks wrote before it: the compiled one does, the twin on x86 only."""
    return cpu is not None or platform.machine().lower() in ("x86_64", "amd64", "i686")
