"""What a machine's network costs, as its file states it, and the time of an allreduce by a library.

There is a table for MPI on host buffers, one for MPI on device buffers and one for NCCL: they differ by up to 20 times.
What our own algorithms take follows from what they send (algorithms.py) and the table's `Links`. What a library does is
its own affair; its time for S bytes on n ranks of M nodes is a constant and the lesser of two straight lines, one for
short and one for long messages:

    doubling    start + log2(n) * min(short + S*short_byte, long + S*long_byte)
    rings       start + min(log2(M) * (short + S*short_byte), log2(M)*long + 2(n-1)/n * S*long_byte)
    one node    node + 2(n-1)/n * S*node_byte

`doubling` describes the MPIs that were looked at, `rings` NCCL: a tree between nodes for short messages, rings over all
ranks for long ones. That the links of a node are shared by its ranks is in the measured parameters.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta, Struct

from shoal.comm.tuning import Links

Amount = Annotated[float, Meta(ge=0, le=1e9)]


class _Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Library(_Table, frozen=True):
    """[network.*.allreduce]: the parameters of a library's allreduce, in seconds and seconds per byte."""

    form: Literal["doubling", "rings"]
    """the formula between nodes, see comm/network.py"""
    start_s: Amount
    short_s: Amount
    short_byte_s: Amount
    long_s: Amount
    long_byte_s: Amount
    node_s: Amount | None = None
    """within one node; left out: as between nodes, for doubling only"""
    node_byte_s: Amount = 0.0

    def seconds(self, n_bytes: float, ranks: int, nodes: int) -> float:
        """The time of an allreduce of so many bytes."""
        if ranks == 1:
            return 0.0
        if nodes == 1 and self.node_s is not None:
            return self.node_s + 2 * (ranks - 1) / ranks * n_bytes * self.node_byte_s
        short, long = self.short_s + n_bytes * self.short_byte_s, n_bytes * self.long_byte_s
        if self.form == "doubling":
            return self.start_s + math.log2(ranks) * min(short, self.long_s + long)
        steps = math.log2(max(nodes, 2))
        return self.start_s + min(steps * short, steps * self.long_s + 2 * (ranks - 1) / ranks * long)


class Buffers(_Table, frozen=True):
    """[network.host], [network.device], [network.nccl]: what it costs to reduce what lies in such memory."""

    origin: Annotated[str, Meta(min_length=1)]
    """where the figures are from, and whether they were measured, fitted or estimated"""
    error: Amount | None = None
    """median relative error of the allreduce on scales that were left out of its fit"""
    links: Links | None = None
    """for shoal's own algorithms"""
    allreduce: Library | None = None
    """the library's own"""


class Network(_Table, frozen=True):
    """[network]: what predictions are made of."""

    host: Buffers | None = None
    """MPI on buffers of the host"""
    device: Buffers | None = None
    """MPI on buffers of a device"""
    nccl: Buffers | None = None
    """NCCL or RCCL"""
    jitter: Annotated[float, Meta(ge=0, lt=1)] = 0.02
    """by what share of its time a step varies from rank to rank and from time to time (standard deviation): all wait
    for the slowest"""
    crowding: Amount = 0.0
    """by what share a step gets longer for each further rank that computes on the node"""
    overhead_s: Amount = 1e-4
    """of a round, beside its steps and its reduction"""
