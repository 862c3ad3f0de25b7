"""Allreduce algorithms that add in whatever order their messages come: for `reproducible = false`.

All start from the rank's own sum and work in `out`. Results have the same bits on all ranks, not at all numbers of
ranks. `Ring`, `RecursiveDoubling` and `Rabenseifner` can send 16-bit numbers (`Wire`); sums are float32 always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal import kernels
from shoal.backend import Array
from shoal.comm.setting import Fold, Setting, length, on_line, slices
from shoal.comm.transport import Members
from shoal.comm.tree import cover, joins

_ALL = slice(None)


class Wire:
    """How a rank's running sum `out` travels: as it is, or rounded to 16 bits.

    For 16 bits the rank's sum is multiplied by `scale` first, so that what is sent is no larger than the largest
    contribution, and a mean of large numbers does not overflow half precision on its way. room: of the longest
    message that is received and added."""

    def __init__(self, setting: Setting, room: int) -> None:
        self._xp = setting.backend.xp
        vertices = cover(setting.dealt[setting.transport.rank])
        self._joins = joins(vertices) if vertices else ()
        self._packed: Array | None = None
        dtype: Any = setting.dtype
        if setting.wire != "float32":
            if np.dtype(setting.dtype) != np.float32:
                raise ValueError(f"a {setting.wire} wire carries float32 arrays, and these are {setting.dtype}")
            dtype = np.float16 if setting.wire == "float16" else np.uint16
            self._packed = setting.backend.empty(setting.size, dtype)
            self._numbers = setting.empty(room)
        self._received = setting.backend.empty(room, dtype)

    @property
    def narrow(self) -> bool:
        """Whether numbers are rounded for their way."""
        return self._packed is not None

    def begin(self, parts: Sequence[Array], out: Array, scale: float) -> float:
        """out = the sum of this rank's parts; returns the factor that is still to be multiplied with the total."""
        now, later = (scale, 1.0) if self.narrow else (1.0, scale)
        if parts:
            kernels.canonical_sum(self._xp, kernels.Terms(self._xp, parts, self._joins, now), out)
        else:
            out.fill(0)
        return later

    def outgoing(self, out: Array, at: slice) -> Array:
        """What to send for out[at]."""
        if self._packed is None:
            return out[at]
        kernels.pack(self._xp, out[at], self._packed[at])
        return self._packed[at]

    def incoming(self, count: int) -> Array:
        """Where to receive what `add` adds."""
        return self._received[:count]

    def add(self, out: Array, at: slice) -> None:
        """out[at] += what was received."""
        target = out[at]
        numbers = self._received[: target.size]
        if self.narrow:
            numbers = self._numbers[: target.size]
            kernels.unpack(self._xp, self._received[: target.size], numbers)
        self._xp.add(target, numbers, out=target)

    def finish(self, out: Array, at: slice, factor: float) -> Array:
        """out[at] is the total: multiply, or round; returns `whole(out)`."""
        if self._packed is None:
            out[at] *= factor
        else:
            kernels.pack(self._xp, out[at], self._packed[at])
        return self.whole(out)

    def whole(self, out: Array) -> Array:
        """The array, (size,), in which finished slices travel."""
        return out if self._packed is None else self._packed

    def open(self, out: Array) -> None:
        """out = what is in `whole(out)`."""
        if self._packed is not None:
            kernels.unpack(self._xp, self._packed, out)


class Ring:
    """Each slice goes round once to be summed, and once more to be known: 2(R-1) steps, 2N(R-1)/R numbers a rank.

    With 16 bits a sum that goes round would be rounded R-1 times. So each rank then sends every slice of its own
    contribution, rounded once, to the slice's owner: as many steps and numbers."""

    def __init__(self, setting: Setting) -> None:
        self._transport = setting.transport
        self._slices = slices(setting.size, setting.transport.size)
        self._wire = Wire(setting, length(self._slices[0]))

    def __call__(self, parts: Sequence[Array], out: Array, scale: float) -> None:
        """As `Allreduce`. Collective."""
        rank, ranks, wire = self._transport.rank, self._transport.size, self._wire
        factor = wire.begin(parts, out, scale)
        own = self._scatter(out) if wire.narrow else self._pass_round(out)
        whole = wire.finish(out, self._slices[own], factor)
        for step in range(ranks - 1):
            give, take = (self._slices[(own - step - k) % ranks] for k in (0, 1))
            self._transport.exchange([((rank + 1) % ranks, whole[give])], [((rank - 1) % ranks, whole[take])])
        wire.open(out)

    def _pass_round(self, out: Array) -> int:
        """Sums of slices move one rank on, ranks - 1 times; returns the slice that is complete here."""
        rank, ranks = self._transport.rank, self._transport.size
        for step in range(ranks - 1):
            give, take = (self._slices[(rank - step - k) % ranks] for k in (0, 1))
            incoming = self._wire.incoming(length(take))
            self._transport.exchange([((rank + 1) % ranks, out[give])], [((rank - 1) % ranks, incoming)])
            self._wire.add(out, take)
        return (rank + 1) % ranks

    def _scatter(self, out: Array) -> int:
        """Contributions go to their slice's owner; returns the slice that is complete here, this rank's."""
        rank, ranks = self._transport.rank, self._transport.size
        sent, mine = self._wire.outgoing(out, _ALL), self._slices[rank]
        for step in range(1, ranks):
            to, source = (rank + step) % ranks, (rank - step) % ranks
            incoming = self._wire.incoming(length(mine))
            self._transport.exchange([(to, sent[self._slices[to]])], [(source, incoming)])
            self._wire.add(out, mine)
        return rank


class RecursiveDoubling:
    """Swap all numbers with the neighbour, then with the neighbour's neighbour: log2(R) steps of N numbers.

    With 16 bits the partial sums are rounded at each step, on both sides alike."""

    def __init__(self, setting: Setting) -> None:
        self._transport, self._size = setting.transport, setting.size
        self._fold = Fold.of(setting.transport.rank, setting.transport.size)
        self._wire = Wire(setting, setting.size)

    def __call__(self, parts: Sequence[Array], out: Array, scale: float) -> None:
        """As `Allreduce`. Collective."""
        transport, wire = self._transport, self._wire
        factor = wire.begin(parts, out, scale)
        if fold_in(transport, wire, self._fold, out):
            return
        for _, peer in self._fold.partners():
            transport.exchange([(peer, wire.outgoing(out, _ALL))], [(peer, wire.incoming(self._size))])
            wire.open(out)
            wire.add(out, _ALL)
        whole = wire.finish(out, _ALL, factor)
        if self._fold.takes_from is not None:
            transport.exchange([(self._fold.takes_from, whole)], [])
        wire.open(out)


class Rabenseifner:
    """Halving and doubling: swap halves with the neighbour, quarters with the next, ..., then the same way back.

    2*log2(R) steps, 2N(R-1)/R numbers a rank where R is a power of two, N more where not. The nearest ranks swap
    most, so between nodes little is sent. With 16 bits partial sums are rounded at each of the first log2(R) steps."""

    def __init__(self, setting: Setting) -> None:
        self._transport = setting.transport
        self._fold = Fold.of(setting.transport.rank, setting.transport.size)
        self._swaps = _halves(setting.size, self._fold)
        self._own = self._swaps[-1][1] if self._swaps else slice(0, setting.size)
        self._wire = Wire(setting, setting.size)

    def __call__(self, parts: Sequence[Array], out: Array, scale: float) -> None:
        """As `Allreduce`. Collective."""
        transport, wire = self._transport, self._wire
        factor = wire.begin(parts, out, scale)
        if fold_in(transport, wire, self._fold, out):
            return
        for peer, keep, give in self._swaps:
            transport.exchange([(peer, wire.outgoing(out, give))], [(peer, wire.incoming(length(keep)))])
            wire.add(out, keep)
        whole = wire.finish(out, self._own, factor)
        for peer, keep, give in reversed(self._swaps):
            transport.exchange([(peer, whole[keep])], [(peer, whole[give])])
        if self._fold.takes_from is not None:
            transport.exchange([(self._fold.takes_from, whole)], [])
        wire.open(out)


class Native:
    """The MPI library's own MPI_Allreduce."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self._wire = setting, Wire(setting, 0)

    def __call__(self, parts: Sequence[Array], out: Array, scale: float) -> None:
        """As `Allreduce`. Collective."""
        transport = self._setting.transport
        assert isinstance(transport, Members)
        factor = self._wire.begin(parts, out, scale)
        if transport.size > 1:
            transport.sum(out)
        out *= factor


class Nothing:
    """Sums this rank's parts, packs and unpacks, sends nothing: what an allreduce costs beside its messages."""

    def __init__(self, setting: Setting) -> None:
        self._wire = Wire(setting, 0)

    def __call__(self, parts: Sequence[Array], out: Array, scale: float) -> None:
        """out = scale * sum of the own parts: another result on every rank."""
        self._wire.finish(out, _ALL, self._wire.begin(parts, out, scale))
        self._wire.open(out)


def fold_in(transport: Any, wire: Wire, fold: Fold, out: Array) -> bool:
    """Add the sums of the ranks beyond a power of two; True on these ranks, which then have the result."""
    if fold.gives_to is not None:
        transport.exchange([(fold.gives_to, wire.outgoing(out, _ALL))], [])
        transport.exchange([], [(fold.gives_to, wire.whole(out))])
        wire.open(out)
        return True
    if fold.takes_from is not None:
        transport.exchange([], [(fold.takes_from, wire.incoming(out.size))])
        wire.add(out, _ALL)
    return False


def _halves(size: int, fold: Fold) -> list[tuple[int, slice, slice]]:
    """(peer, what this rank keeps, what it gives) of each step."""
    lo, hi, swaps = 0, size, []
    for bit, peer in fold.partners() if fold.gives_to is None else []:
        middle = min(lo + on_line((hi - lo + 1) // 2), hi)
        low, high = slice(lo, middle), slice(middle, hi)
        keep, give = (high, low) if fold.index & bit else (low, high)
        swaps.append((peer, keep, give))
        lo, hi = keep.start, keep.stop
    return swaps
