"""The master: at every reduction it decides what happens next, and everybody is told.

It is the lowest living world rank, not a special process. A decision is a pure function of the state, the
plan and the facts that the group's ranks report, so a resumed run decides as the first one did; what comes
from outside (a stop) is taken by the master alone. No other rank decides anything.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct

from shoal import errors
from shoal.comm.group import ranks_for
from shoal.comm.tree import blocks, sum_scalars
from shoal.comm.world import World
from shoal.config import Config
from shoal.elastic.plan import Plan, StagePlan, forecast
from shoal.sgd.rates import Switch, learning_rate
from shoal.state import TrainState

Record = Callable[..., None]
"""record(kind, **fields): one event of the run's log."""


class Decision(Struct, frozen=True, array_like=True):
    """What all ranks do next. `train` carries the settings of the round: P, K, mu, B, rate and the ranks."""

    action: Literal["train", "evaluate", "checkpoint", "end"]
    learners: int = 0
    steps: int = 0
    momentum: float = 0.0
    batch: int = 0
    rate: float = 0.0
    ranks: int = 0
    """R; the group is the first R of the world's order"""
    ranks_before: int = 0
    """R until now, 0 at the start"""
    round: int = 0
    """rounds done; it says which version of the state is the present one"""
    status: int = errors.DONE
    reason: str = ""

    def encode(self) -> bytes:
        """A message shorter than a frame."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> Decision:
        """The inverse of `encode`."""
        return msgspec.msgpack.decode(data, type=Decision)


def facts(stop: bool, busy_s: float, losses: list[float], width: int) -> np.ndarray:
    """What a rank reports of a round, float64 (2 + width,): its learners' losses come last, in order."""
    row = np.zeros(2 + width)
    row[:2] = stop, busy_s
    row[2 : 2 + len(losses)] = losses
    return row


class Master:
    """Decides; `stop_requested` says whether a signal or a stop file asks this job to stop."""

    def __init__(
        self, config: Config, plan: Plan, world: World, record: Record, stop_requested: Callable[[], str]
    ) -> None:
        self._config, self._plan, self._world = config, plan, world
        self._record, self._stop_requested = record, stop_requested
        self._saved = 0
        self._stop = ""
        self._failure = ""
        self._now: Decision | None = None
        self._logged: dict[str, Any] = {}
        """the settings of the stage that was logged last"""
        self._calm_ms: deque[float] = deque(maxlen=64)

    def decide(self, state: TrainState, round_s: float, rows: np.ndarray | None) -> Decision:
        """The next decision. rows: the facts of the round just committed, one a rank, or None; it took round_s."""
        progress = state.progress
        if rows is not None:
            self._close_round(state, rows, round_s)
        self._stop = self._stop or self._stop_requested()
        finished = self._finished(state)
        if self._failure:
            self._record("failure", round=progress.round, reason=self._failure)
            return self._without_round("end", state, errors.BAD_INPUT, self._failure)
        if self._evaluation_due(state, finished):
            return self._without_round("evaluate", state)
        if self._checkpoint_due(state, finished):
            self._saved = progress.consumed
            return self._without_round("checkpoint", state)
        if finished:
            return self._without_round("end", state, errors.DONE, finished)
        if self._stop:
            self._record("stop", round=progress.round, consumed=progress.consumed, reason=self._stop)
            return self._without_round("end", state, errors.STOPPED, self._stop)
        return self._next_round(state)

    def resumed(self, state: TrainState) -> None:
        """The state came from a checkpoint, so it need not be saved again, and its stage is in the log."""
        self._saved = state.progress.consumed
        rows = forecast(self._plan, self._config)
        self._logged = next((_settings(row.stage) for row in rows if self._saved <= row.consumed), {})

    def evaluated(self, state: TrainState, scores: dict[str, dict[str, float]], evaluation_s: float) -> None:
        """Log an evaluation, and remember it for targets and patience."""
        progress = state.progress
        progress.evaluated = progress.consumed
        accuracy = scores.get("validation", {}).get("accuracy", -1.0)
        if accuracy > progress.best_accuracy:
            progress.best_accuracy, progress.best_at = accuracy, progress.consumed
        self._record("evaluation", **self._where(state), **scores, evaluation_s=evaluation_s)
        if not math.isfinite(scores["test"]["loss"]):
            self._failure = self._not_finite(f"the loss of the evaluation after round {progress.round}")

    def started(self, state: TrainState, gap_ms: float) -> None:
        """Log a resize. gap_ms: from asking for the decision to the first step, without evaluations."""
        assert self._now is not None
        learners = [switch.learners for switch in state.progress.history][-2:]
        before = self._now.ranks_before
        if before == self._now.ranks:
            self._calm_ms.append(gap_ms)
        elif before:
            usual_ms = statistics.median(self._calm_ms) if self._calm_ms else 0.0
            self._record(
                "resize",
                round=state.progress.round,
                epoch=state.progress.consumed / self._plan.samples,
                learners=[learners[0], learners[-1]],
                ranks=[before, self._now.ranks],
                stall_ms=max(0.0, gap_ms - usual_ms),
            )

    def _where(self, state: TrainState) -> dict[str, Any]:
        p = state.progress
        return {
            "round": p.round,
            "consumed": p.consumed,
            "epoch": p.consumed / self._plan.samples,
            "learners": self._now.learners if self._now else p.history[-1].learners,
            "serial_steps": p.serial_steps,
            "learner_steps": p.learner_steps,
            "busy_rank_s": p.busy_rank_s,
            "allocated_rank_s": p.allocated_rank_s,
            "train_s": p.train_s,
        }

    def _close_round(self, state: TrainState, rows: np.ndarray, round_s: float) -> None:
        """Add up the times of the round and log it."""
        now, progress = self._now, state.progress
        assert now is not None
        listed = rows.tolist()
        hosted = blocks(now.learners, now.ranks)
        losses = [loss for row, block in zip(listed, hosted, strict=True) for loss in row[2 : 2 + len(block)]]
        progress.train_s += round_s
        progress.allocated_rank_s += round_s * self._world.size
        progress.busy_rank_s += sum(row[1] for row in listed)
        settings = {"ranks": now.ranks, "steps": now.steps, "batch": now.batch, "rate": now.rate}
        self._record("round", **self._where(state), **settings, loss=sum_scalars(losses) / now.learners)
        if any(row[0] for row in listed) or self._world.stop_from_reserve():
            self._stop = self._stop or "a signal"
        if not all(map(math.isfinite, losses)):
            learner = next(j for j, loss in enumerate(losses) if not math.isfinite(loss))
            self._failure = self._not_finite(f"the loss of learner {learner} in round {progress.round}")

    def _not_finite(self, what: str) -> str:
        rate = self._now.rate if self._now else 0.0
        return (
            f"{what} is not finite, at learning rate {rate:g}; use a smaller rate or a warm-up, or check the data "
            "(the last checkpoint is intact)"
        )

    def _finished(self, state: TrainState) -> str:
        """Why training is over, or an empty text."""
        train, progress = self._config.train, state.progress
        waited = (progress.consumed - progress.best_at) / self._plan.samples
        if progress.consumed >= self._plan.end:
            return f"{train.epochs:g} epochs done"
        if 0 < train.target_accuracy <= progress.best_accuracy:
            return f"validation accuracy reached {progress.best_accuracy:.4f}"
        if train.patience and progress.evaluated == progress.consumed and waited >= train.patience:
            return f"no better validation accuracy for {waited:g} epochs"
        return ""

    def _evaluation_due(self, state: TrainState, finished: str) -> bool:
        consumed, evaluated = state.progress.consumed, state.progress.evaluated
        if consumed == evaluated:
            return False
        epoch_passed = consumed // self._plan.samples > evaluated // self._plan.samples
        return bool(finished) or (epoch_passed and not self._stop)

    def _checkpoint_due(self, state: TrainState, finished: str) -> bool:
        consumed, every = state.progress.consumed, self._config.run.checkpoint_epochs
        if consumed == self._saved:
            return False
        period = every * self._plan.samples
        return bool(finished or self._stop) or (period > 0 and consumed // period > self._saved // period)

    def _without_round(
        self, action: Literal["evaluate", "checkpoint", "end"], state: TrainState, status: int = 0, reason: str = ""
    ) -> Decision:
        """A decision that leaves the group as it is."""
        ranks = self._now.ranks if self._now else 0
        return Decision(
            action, ranks=ranks, ranks_before=ranks, round=state.progress.round, status=status, reason=reason
        )

    def _next_round(self, state: TrainState) -> Decision:
        """The settings of the next round; a new stage is logged and becomes part of the history."""
        progress = state.progress
        stage = self._plan.at(progress.consumed)
        if not progress.history or progress.history[-1].learners != stage.learners:
            progress.history.append(Switch(progress.consumed, stage.learners))
        rate = learning_rate(
            self._config.learning_rate,
            progress.consumed,
            self._plan.samples,
            self._plan.end,
            progress.history,
            stage.round_samples,
        )
        ranks = len(ranks_for(stage.learners, self._world.order))
        settings = _settings(stage)
        if settings != self._logged:
            self._logged = settings
            epoch = progress.consumed / self._plan.samples
            self._record("stage", round=progress.round, epoch=epoch, **settings, rate=rate)
        before = self._now.ranks if self._now else 0
        self._now = Decision("train", **settings, rate=rate, ranks=ranks, ranks_before=before, round=progress.round)
        return self._now


def _settings(stage: StagePlan) -> dict[str, Any]:
    """P, K, mu and B."""
    return {"learners": stage.learners, "steps": stage.steps, "momentum": stage.momentum, "batch": stage.batch}
