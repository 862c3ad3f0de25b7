"""What the arithmetic of a round needs to see of the state and of the stage."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from shoal.backend import Array


class Settings(Protocol):
    """What holds for a round: P, K and the batch B of one learner's step."""

    @property
    def learners(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def batch(self) -> int: ...


class Numbers(NamedTuple):
    """What the arithmetic of a round is done with: K, mu, the rate, and whether learners leave their one step to the
    reduction and bring gradients."""

    steps: int
    mu: float
    rate: float
    gradients: bool = False


class State(Protocol):
    """The arrays of a training between two rounds, and the position in the sample order."""

    @property
    def versions(self) -> tuple[dict[str, Array], dict[str, Array]]: ...

    @property
    def anchor(self) -> Array: ...

    @property
    def momentum(self) -> Array: ...

    @property
    def position(self) -> int: ...
