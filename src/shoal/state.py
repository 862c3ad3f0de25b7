"""The state of a training at a reduction: all that a joiner, a checkpoint or a restart needs.

It is the same on all ranks of the group, bit for bit. What goes to a joiner is what goes to disk.
"""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
from msgspec import Struct, field

from shoal.backend import Array, Backend
from shoal.comm.collectives import broadcast, broadcast_bytes, gather
from shoal.comm.transport import Transport
from shoal.errors import InputError
from shoal.model.flat import Layout
from shoal.sgd.rates import Switch


class Counts(Struct):
    """What the master alone keeps count of; it tells the group with every decision."""

    train_s: float = 0.0
    """time in rounds, without evaluation and checkpoints"""
    allocated_rank_s: float = 0.0
    """train_s summed over the ranks of the job"""
    busy_rank_s: float = 0.0
    """time in learners' steps summed over ranks"""
    evaluated: int = 0
    """position of the newest evaluation"""
    best_accuracy: float = -1.0
    """the best validation accuracy, and where it was"""
    best_at: int = 0
    wanted_ranks: int = 0
    """the most ranks that may work, as somebody asked from outside; 0: all there are"""
    wanted_learners: int = 0
    """the learners that somebody asked for from outside; 0: as the schedule says"""


class Progress(Struct):
    """The scalars of the state. Everything counts from the start of training, over restarts too."""

    round: int = 0
    consumed: int = 0
    """position in the sample order"""
    serial_steps: int = 0
    learner_steps: int = 0
    history: list[Switch] = field(default_factory=list)
    """the switches of P that the rate may depend on: the growths since P last shrank, and two more at most; never
    changed in place"""
    counts: Counts = field(default_factory=Counts)

    def encode(self) -> bytes:
        """The inverse of `decode`."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> Progress:
        """A progress of its own."""
        return msgspec.msgpack.decode(data, type=Progress)

    def begin(self, learners: int) -> None:
        """A round of P learners begins: a switch of P becomes part of the history, which a shrinkage ends."""
        if not self.history or self.history[-1].learners != learners:
            shrinks = bool(self.history) and learners < self.history[-1].learners
            self.history = [*self.history[-1 if shrinks else 0 :], Switch(self.consumed, learners)]

    def advance(self, learners: int, steps: int, batch: int) -> None:
        """Count one round of P learners, K steps and batch B."""
        self.round += 1
        self.consumed += learners * steps * batch
        self.serial_steps += steps
        self.learner_steps += learners * steps


class TrainState:
    """anchor a (layout.size,), velocity v and momentum m (layout.parameters,), and the progress.

    There are two versions of the arrays, and the number of the round says which is the present one: a round
    reads it and writes the other. `memory` is where the ranks of a node share them; else they are this rank's.
    """

    def __init__(self, layout: Layout, backend: Backend, memory: list[dict[str, Array]] | None = None) -> None:
        lengths = {"anchor": layout.size, "velocity": layout.parameters, "momentum": layout.parameters}
        self._versions = memory or [{k: backend.zeros(n) for k, n in lengths.items()} for _ in (0, 1)]
        self.progress = Progress()
        self._backend = backend

    @property
    def versions(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """The present version of the arrays, and the one that the round under way writes."""
        now = self.progress.round % 2
        return self._versions[now], self._versions[1 - now]

    @property
    def anchor(self) -> Array:
        """The anchor, (layout.size,)."""
        return self.versions[0]["anchor"]

    @property
    def velocity(self) -> Array:
        """The reduction velocity, (layout.parameters,)."""
        return self.versions[0]["velocity"]

    @property
    def momentum(self) -> Array:
        """The local momentum that learners start from, (layout.parameters,)."""
        return self.versions[0]["momentum"]

    @property
    def position(self) -> int:
        """Where the next round starts in the sample order."""
        return self.progress.consumed

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays by name, as they go to a checkpoint."""
        return self.versions[0]

    def load(self, arrays: dict[str, Array], progress: Progress) -> None:
        """Take over the arrays and scalars of a checkpoint. Raises InputError if they are of another net."""
        self.progress = progress
        for name, mine in self.arrays.items():
            if name not in arrays or arrays[name].shape != mine.shape:
                raise InputError(
                    f"the checkpoint's {name} does not have this net's {mine.size} numbers; resume with the "
                    "config and the version of shoal that it was made with"
                )
            mine[...] = self._backend.xp.asarray(arrays[name])

    def hand_over(self, transport: Transport, holders: Transport | None, wait: bool = True) -> None:
        """Rank 0's state to all ranks of the transport, which know the round. Collective.

        holders: rank 0 and those of them that need the arrays (the others share memory with one that has them);
        None on a rank that does not. The scalars come when all have the arrays; where all have them anyhow (not
        `wait`), rank 0 waits for nobody."""
        if holders is not None:
            for array in self.arrays.values():
                broadcast(holders, array)
        if wait:
            gather(transport, np.zeros(1, np.uint8))
        self.progress = Progress.decode(broadcast_bytes(transport, self.progress.encode()))

    def digest(self) -> str:
        """sha256 of the bytes of the anchor, then of the velocity."""
        digest = hashlib.sha256()
        for array in (self.anchor, self.velocity):
            digest.update(self._backend.to_host(array).tobytes())
        return digest.hexdigest()
