"""The state of a training at a reduction: all that a joiner, a checkpoint or a restart needs.

It is the same on all ranks of the group, bit for bit. What goes to a joiner is what goes to disk.
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct, field

from shoal.backend import Array, Backend
from shoal.comm.collectives import broadcast, broadcast_bytes
from shoal.comm.transport import Transport
from shoal.errors import InputError
from shoal.model.flat import Layout
from shoal.sgd.rates import Switch


class Progress(Struct):
    """The scalars of the state. Everything counts from the start of training, over restarts too."""

    round: int = 0
    consumed: int = 0
    """position in the sample order"""
    serial_steps: int = 0
    learner_steps: int = 0

    # From here on the master keeps count alone; a joiner gets its figures.
    train_s: float = 0.0
    """time in rounds, without evaluation and checkpoints"""
    allocated_rank_s: float = 0.0
    """train_s summed over the ranks of the job"""
    busy_rank_s: float = 0.0
    """time in learners' steps summed over ranks"""
    history: list[Switch] = field(default_factory=list)
    """the switches of P"""
    evaluated: int = 0
    """position of the newest evaluation"""
    best_accuracy: float = -1.0
    """the best validation accuracy, and where it was"""
    best_at: int = 0

    def advance(self, learners: int, steps: int, batch: int) -> None:
        """Count one round of P learners, K steps and batch B."""
        self.round += 1
        self.consumed += learners * steps * batch
        self.serial_steps += steps
        self.learner_steps += learners * steps


class TrainState:
    """anchor a (layout.size,), velocity v and momentum m (layout.parameters,), and the progress."""

    def __init__(self, layout: Layout, backend: Backend) -> None:
        self.anchor: Array = backend.zeros(layout.size)
        self.velocity: Array = backend.zeros(layout.parameters)
        self.momentum: Array = backend.zeros(layout.parameters)
        self.progress = Progress()
        self._backend = backend

    @property
    def position(self) -> int:
        """Where the next round starts in the sample order."""
        return self.progress.consumed

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays by name, as they go to a checkpoint."""
        return {"anchor": self.anchor, "velocity": self.velocity, "momentum": self.momentum}

    def load(self, arrays: dict[str, Array], progress: Progress) -> None:
        """Take over the arrays and scalars of a checkpoint. Raises InputError if they are of another net."""
        for name, mine in self.arrays.items():
            if name not in arrays or arrays[name].shape != mine.shape:
                raise InputError(
                    f"the checkpoint's {name} does not have this net's {mine.size} numbers; resume with the "
                    "config and the version of shoal that it was made with"
                )
            mine[...] = self._backend.xp.asarray(arrays[name])
        self.progress = progress

    def hand_over(self, transport: Transport) -> None:
        """Rank 0's state to all ranks of the transport. Collective."""
        for array in self.arrays.values():
            broadcast(transport, array)
        self.progress = msgspec.msgpack.decode(
            broadcast_bytes(transport, msgspec.msgpack.encode(self.progress)), type=Progress
        )

    def digest(self) -> str:
        """sha256 of the bytes of the anchor, then of the velocity."""
        digest = hashlib.sha256()
        for array in (self.anchor, self.velocity):
            digest.update(self._backend.to_host(array).tobytes())
        return digest.hexdigest()
