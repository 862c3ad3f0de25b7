"""Broadcast over a binomial tree, and gather, written in `Transport.exchange`."""

from __future__ import annotations

import numpy as np

from shoal.backend import Array
from shoal.comm.transport import Transport

FRAME_BYTES = 1024


def broadcast(transport: Transport, array: Array) -> None:
    """Rank 0's array to all, in place. Collective; same shape and dtype on all ranks."""
    parent, children = _binomial(transport)
    if parent is not None:
        transport.exchange([], [(parent, array)])
    transport.exchange([(child, array) for child in children], [])


def broadcast_bytes(transport: Transport, data: bytes) -> bytes:
    """Rank 0's bytes, of any length, on all ranks. Collective. Short ones (most are) go in one message."""
    frame = np.zeros(FRAME_BYTES, np.uint8)
    head = frame[:8].view(np.int64)
    room = FRAME_BYTES - 8
    if transport.rank == 0:
        head[0] = len(data)
        frame[8 : 8 + len(data)] = np.frombuffer(data[:room], np.uint8)
    broadcast(transport, frame)
    length = int(head[0])
    if length <= room:
        return frame[8 : 8 + length].tobytes()
    body = np.frombuffer(data, np.uint8).copy() if transport.rank == 0 else np.empty(length, np.uint8)
    broadcast(transport, body)
    return body.tobytes()


def gather(transport: Transport, row: np.ndarray) -> np.ndarray:
    """The rows of all ranks, (size, len(row)), on rank 0; elsewhere only the own one. Collective.

    Each rank sends to rank 0 itself: in a tree, a rank that is missing would make its parent seem missing too.
    """
    rows = np.zeros((transport.size, row.size), row.dtype)
    rows[transport.rank] = row
    if transport.rank == 0:
        transport.exchange([], [(rank, rows[rank]) for rank in range(1, transport.size)])
    else:
        transport.exchange([(0, rows[transport.rank])], [])
    return rows


def _binomial(transport: Transport) -> tuple[int | None, list[int]]:
    """(parent, children) in the binomial tree rooted at rank 0: the parent clears the lowest set bit, and
    the subtree of rank r is the contiguous range [r, r + lowest set bit)."""
    rank, size = transport.rank, transport.size
    span = rank & -rank if rank else 1 << (size - 1).bit_length()
    children = []
    while span > 1:
        span //= 2
        if rank + span < size:
            children.append(rank + span)
    return (rank & (rank - 1) if rank else None), children
