"""Wishes for another size: from outside (`shoal resize`), or from a policy of the user's.

A wish for *ranks* says who does the work and never changes the result. A wish for *learners* takes the place of the
schedule's number from the next round on and changes the algorithm. Both are part of the state and of the log, so that
a run that is resumed takes them again at the same rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from shoal.config import Run


class Resize(Struct, frozen=True, omit_defaults=True):
    """Another size. ranks: that may work at most, 0 for all there are; learners: 0 for the schedule's; None: as is."""

    ranks: int | None = None
    learners: int | None = None


class Situation(Struct, frozen=True):
    """What a policy is told, after each round."""

    round: int
    epoch: float
    learners: int
    ranks: int
    world: int
    """ranks alive"""
    loss: float
    """mean training loss of the round"""
    round_s: float
    scores: Mapping[str, Any]
    """the last evaluation: {"test": {"accuracy", "loss"}, "validation": ...}, empty before it"""


Policy = Callable[[Situation], "Resize | int | None"]
"""Called on the master; a number is one of learners, None means no wish."""


def as_resize(answer: Resize | int | None) -> Resize | None:
    """What a policy wants. Raises TypeError for what it may not return."""
    if answer is None or isinstance(answer, Resize):
        return answer
    if isinstance(answer, int):
        return Resize(learners=answer)
    raise TypeError(f"a policy returned {answer!r}; return a number of learners, a shoal.Resize, or None")


def refusal(wish: Resize, run: Run, ranks: int) -> str:
    """Why a wish cannot be had, or an empty text. ranks: the most that there can be."""
    most = min(ranks, run.max_ranks or ranks)
    if wish.ranks and not run.min_ranks <= wish.ranks <= most:
        return f"{wish.ranks} ranks were asked for, and there can be {run.min_ranks} to {most}; the size stays"
    most = run.max_learners
    if wish.learners and not run.min_learners <= wish.learners <= most:
        return f"{wish.learners} learners were asked for, and {run.min_learners} to {most} are allowed; the size stays"
    if min(wish.ranks or 0, wish.learners or 0) < 0:
        return "a size below 0 was asked for; the size stays"
    return ""
