"""Allreduce algorithms: plain functions over a Transport.

`Exchange` keeps the canonical order: each rank owns a slice, receives that slice of every rank's subtree sums,
joins them in the tree's order, and sends the finished slice to all. `native` is the MPI library's own allreduce
and keeps no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal import kernels
from shoal.backend import Array, Backend
from shoal.comm.transport import MpiTransport, Transport
from shoal.comm.tree import blocks, cover, joins

_SLICE_ITEMS = 16
"""Slices begin at multiples of this, so that no two ranks write to one cache line."""


class Exchange:
    """The canonical allreduce of `learners` arrays of `size` numbers, dealt in blocks over a transport."""

    def __init__(self, transport: Transport, learners: int, size: int, backend: Backend, dtype: Any) -> None:
        self._transport, self._backend = transport, backend
        covers = [cover(block) for block in blocks(learners, transport.size)]
        self._joins = joins([vertex for vertices in covers for vertex in vertices])
        self._slices = slices(size, transport.size)
        mine = self._slices[transport.rank]
        self._received = [
            [backend.empty(mine.stop - mine.start, dtype) for _ in vertices] if peer != transport.rank else []
            for peer, vertices in enumerate(covers)
        ]

    def __call__(self, parts: Sequence[Array], out: Array, scale: float) -> None:
        """out = scale * (sum over all learners), the same bits on every rank.

        parts: this rank's subtree sums (see `cover`), each (size,); out: (size,), no part. Collective."""
        transport, rank = self._transport, self._transport.rank
        peers = [peer for peer in range(transport.size) if peer != rank]
        transport.exchange(
            [(peer, part[self._slices[peer]]) for peer in peers for part in parts],
            [(peer, array) for peer in peers for array in self._received[peer]],
        )
        mine = self._slices[rank]
        own = [part[mine] for part in parts]
        all_parts = [array for peer, arrays in enumerate(self._received) for array in (own if peer == rank else arrays)]
        finished = out[mine]
        kernels.canonical_sum(
            self._backend.xp, kernels.Terms(self._backend.xp, all_parts, self._joins, scale), finished
        )
        transport.exchange([(peer, finished) for peer in peers], [(peer, out[self._slices[peer]]) for peer in peers])


def native(transport: MpiTransport, parts: Sequence[Array], out: Array, scale: float) -> None:
    """out = scale * sum by MPI_Allreduce: no fixed order, so only where `reproducible` is off. Collective."""
    out[...] = parts[0]
    for part in parts[1:]:
        out += part
    if transport.size > 1:
        transport.sum(out)
    out *= scale


def slices(size: int, ranks: int) -> list[slice]:
    """`size` numbers cut into one contiguous slice a rank; trailing ones may be empty."""
    step = -(-size // ranks)
    step += -step % _SLICE_ITEMS
    return [slice(min(r * step, size), min((r + 1) * step, size)) for r in range(ranks)]
