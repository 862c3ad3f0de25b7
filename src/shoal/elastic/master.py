"""The master: at every reduction it decides what happens next, and everybody is told.

It is the lowest living world rank, not a special process. A decision is a pure function of the state, the
plan and the facts that the group's ranks report, so a resumed run decides as the first one did; what comes
from outside (a stop) is taken by the master alone. No other rank decides anything.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import Struct

from shoal import errors
from shoal.comm.group import ranks_for
from shoal.comm.tree import blocks, sum_scalars
from shoal.comm.world import World
from shoal.config import Config
from shoal.elastic.plan import Plan, StagePlan, batch_refusal, forecast
from shoal.elastic.policy import Policy, Resize, Situation, as_resize, refusal
from shoal.elastic.supply import Supply
from shoal.sgd.rates import learning_rate
from shoal.state import Counts, Progress, TrainState

Record = Callable[..., None]
"""record(kind, **fields): one event of the run's log."""

_SPEEDS = 16

Action = Literal["train", "evaluate", "checkpoint", "end", "spawn", "grow", "wait", "release", "forget"]


class Decision(Struct, frozen=True, array_like=True):
    """What all ranks do next. `train` carries the settings of the round: P, K, mu, B, rate and the ranks."""

    action: Action
    learners: int = 0
    steps: int = 0
    momentum: float = 0.0
    batch: int = 0
    rate: float = 0.0
    ranks: int = 0
    """R; the group is the first R of the world's order"""
    knowing: int = 0
    """so many of the first of the order have the state by now"""
    round: int = 0
    """rounds done; it says which version of the state is the present one"""
    status: int = errors.DONE
    reason: str = ""
    counts: Counts = msgspec.field(default_factory=Counts)
    """what the master keeps count of"""

    def encode(self) -> bytes:
        """A message shorter than a frame."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> Decision:
        """The inverse of `encode`."""
        return msgspec.msgpack.decode(data, type=Decision)


def facts(stop: bool, busy_s: float, losses: list[float], width: int) -> list[float]:
    """What a rank reports of a round, 2 + width numbers: its learners' losses come last, in order."""
    return [stop, busy_s, *losses, *[0.0] * (width - len(losses))]


@dataclass(frozen=True)
class Outside:
    """What is asked from outside the schedule. stop(): why this job is to stop, or an empty text; wish(): another
    size, and policy: one that decides on the size after each round."""

    stop: Callable[[], str]
    wish: Callable[[], Mapping[str, int] | None] = lambda: None
    policy: Policy | None = None


class Master:
    """Decides."""

    def __init__(
        self, config: Config, plan: Plan, world: World, record: Record, outside: Outside, supply: Supply | None
    ) -> None:
        self._config, self._plan, self._world = config, plan, world
        self._record, self._outside, self._supply = record, outside, supply
        self._speeds: deque[float] = deque(maxlen=_SPEEDS)
        """samples a second of the last rounds"""
        self._replay: deque[Mapping[str, Any]] = deque()
        self._scores: Mapping[str, Any] = {}
        self._saved = 0
        self._stop = ""
        self._failure = ""
        self._now: Decision | None = None
        self._knowing = 1
        self._before = 0
        """R of the round before"""
        self._logged: dict[str, Any] = {}
        """the settings of the stage that was logged last"""
        self._calm_ms: deque[float] = deque(maxlen=64)

    def decide(self, state: TrainState, round_s: float, rows: Sequence[Sequence[float]] | None) -> Decision:
        """The next decision. rows: the facts of the round just committed, one a rank, or None; it took round_s."""
        progress = state.progress
        if rows is not None:
            self._close_round(state, rows, round_s)
        self._stop = self._stop or self._outside.stop()
        self._hear_wishes(progress)
        finished = self._finished(state)
        if self._failure:
            return self._end(state, errors.BAD_INPUT, self._failure, "failure")
        if self._evaluation_due(state, finished):
            return self._without_round("evaluate", state)
        if self._checkpoint_due(state, finished):
            self._saved = progress.consumed
            return self._without_round("checkpoint", state)
        if finished:
            return self._end(state, errors.DONE, finished)
        if self._stop:
            return self._end(state, errors.STOPPED, self._stop, "stop")
        if self._supply is not None and (step := self._supply.next_step(*self._needed(progress), at_the_end=False)):
            return self._without_round(step, state)
        return self._next_round(state)

    def _end(self, state: TrainState, status: int, reason: str, event: str = "") -> Decision:
        """The end, once all ranks that came have left."""
        if self._supply is not None and (step := self._supply.next_step(0, 0, at_the_end=True)):
            return self._without_round(step, state)
        if event:
            self._record(event, round=state.progress.round, consumed=state.progress.consumed, reason=reason)
        return self._without_round("end", state, status, reason)

    def _needed(self, progress: Progress) -> tuple[int, int]:
        """The most ranks of the next round and of stages that begin before those they lack could have come; and of all
        that begin while twice as many as there can be could: a rank that came is kept for them, else it would have to
        come again after each slow round."""
        assert self._supply is not None
        lead = self._supply.lead_s * statistics.median(self._speeds or [0.0])
        wanted = kept = self._ranks_of(self._stage(progress), progress)
        for stage in self._plan.stages:
            ranks, far = self._ranks_of(stage, progress), stage.start - progress.consumed
            if 0 < far <= lead * (ranks - self._world.size):
                wanted = max(wanted, ranks)
            if 0 < far <= lead * 2 * self._supply.most:
                kept = max(kept, ranks)
        return wanted, max(wanted, kept)

    def _stage(self, progress: Progress) -> StagePlan:
        """What holds in the next round."""
        stage, wanted = self._plan.at(progress.consumed), progress.counts.wanted_learners
        return stage.for_learners(wanted, self._config.train) if wanted else stage

    def _ranks_of(self, stage: StagePlan, progress: Progress) -> int:
        """R of the stage, if as many ranks live as there can be."""
        most = min(progress.counts.wanted_ranks or self._most_ranks, self._most_ranks)
        return len(ranks_for(stage.learners, range(most)))

    def replay(self, events: Sequence[Mapping[str, Any]]) -> None:
        """What was asked for by these events, which a resume cut off the log, happens again at the same rounds."""
        self._replay.extend(event for event in events if event["event"] == "wish")

    def resumed(self, state: TrainState) -> None:
        """The state came from a checkpoint, so it need not be saved again, and its stage is in the log."""
        self._saved = state.progress.consumed
        rows = forecast(self._plan, self._config)
        self._logged = next((_settings(row.stage) for row in rows if self._saved <= row.consumed), {})

    def evaluated(self, state: TrainState, scores: dict[str, dict[str, float]], evaluation_s: float) -> None:
        """Log an evaluation, and remember it for targets and patience."""
        progress = state.progress
        _count_evaluation(progress, scores)
        self._scores = scores
        self._record("evaluation", **self.where(state), **scores, evaluation_s=evaluation_s)
        if not math.isfinite(scores["test"]["loss"]):
            self._failure = self._not_finite(f"the loss of the evaluation after round {progress.round}")

    def world_changed(self, state: TrainState, **what: Any) -> None:
        """A rank came or left, and all have the state; `what` is logged of it."""
        self._knowing = self._world.size
        self._record("world", round=state.progress.round, world=self._world.size, **what)

    def recovered(self, state: TrainState, history: Sequence[Mapping[str, Any]], saved_round: int) -> None:
        """All ranks have the state, some were lost, and this one may not have been the master before.

        history: the events of the log up to the state's round; saved_round: of the newest checkpoint."""
        progress = state.progress
        self._now, self._knowing, self._failure = None, self._world.size, ""
        for event in history:
            if event["event"] == "stage":
                self._logged = {key: event[key] for key in ("learners", "steps", "momentum", "batch")}
            elif event["event"] == "checkpoint" and event["round"] <= saved_round:
                self._saved = event["consumed"]
            elif event["event"] == "evaluation" and event["consumed"] == progress.consumed:
                _count_evaluation(progress, event)
            elif event["event"] == "wish":
                _grant(progress, event)

    def started(self, state: TrainState, gap_ms: float) -> None:
        """Log a resize. gap_ms: from asking for the decision to the first step, without evaluations."""
        assert self._now is not None
        learners = [switch.learners for switch in state.progress.history][-2:]
        before = self._before
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

    def where(self, state: TrainState) -> dict[str, Any]:
        """How far training is and what it has cost, for an event."""
        p = state.progress
        return {
            "round": p.round,
            "consumed": p.consumed,
            "epoch": p.consumed / self._plan.samples,
            "learners": self._now.learners if self._now else p.history[-1].learners,
            "serial_steps": p.serial_steps,
            "learner_steps": p.learner_steps,
            "busy_rank_s": p.counts.busy_rank_s,
            "allocated_rank_s": p.counts.allocated_rank_s,
            "train_s": p.counts.train_s,
        }

    def _close_round(self, state: TrainState, rows: Sequence[Sequence[float]], round_s: float) -> None:
        """Add up the times of the round and log it."""
        now, progress = self._now, state.progress
        assert now is not None
        hosted = blocks(now.learners, now.ranks)
        losses = [loss for row, block in zip(rows, hosted, strict=True) for loss in row[2 : 2 + len(block)]]
        counts = progress.counts
        self._speeds.append(now.learners * now.steps * now.batch / round_s)
        counts.train_s += round_s
        counts.allocated_rank_s += round_s * self._world.size
        counts.busy_rank_s += sum(row[1] for row in rows)
        settings = {"ranks": now.ranks, "steps": now.steps, "batch": now.batch, "rate": now.rate}
        self._record("round", **self.where(state), **settings, loss=sum_scalars(losses) / now.learners)
        if any(row[0] for row in rows) or (now.ranks < self._world.size and self._world.stop_from_reserve()):
            self._stop = self._stop or "a signal"
        for learner, loss in enumerate(losses):
            if not math.isfinite(loss):
                self._failure = self._not_finite(f"the loss of learner {learner} in round {progress.round}")
                return
        if self._outside.policy is not None:
            epoch, loss = progress.consumed / self._plan.samples, sum_scalars(losses) / now.learners
            here = (progress.round, epoch, now.learners, now.ranks, self._world.size, loss, round_s, self._scores)
            self._consider(progress, as_resize(self._outside.policy(Situation(*here))), "the policy")

    def _hear_wishes(self, progress: Progress) -> None:
        """Take what is asked for now; what a run before a resume was asked for comes first."""
        while self._replay and self._replay[0]["round"] <= progress.round:
            event = self._replay.popleft()
            self._consider(progress, Resize(event.get("ranks"), event.get("learners")), event["source"])
        if wish := self._outside.wish():
            self._consider(progress, Resize(wish.get("ranks"), wish.get("learners")), "shoal resize")

    def _consider(self, progress: Progress, wish: Resize | None, source: str) -> None:
        """Grant a wish that changes something, or say why not."""
        counts = progress.counts
        if wish is None or (
            wish.ranks in (None, counts.wanted_ranks) and wish.learners in (None, counts.wanted_learners)
        ):
            return
        no = refusal(wish, self._config.run, self._most_ranks)
        if not no and wish.learners:
            no = batch_refusal(self._config.train, wish.learners)
        if no:
            self._record("warning", round=progress.round, text=f"{source}: {no}")
            return
        asked = msgspec.to_builtins(wish)
        self._record("wish", round=progress.round, **asked, source=source)
        _grant(progress, asked)

    @property
    def _most_ranks(self) -> int:
        return self._world.size if self._supply is None else self._supply.most

    def _not_finite(self, what: str) -> str:
        rate = self._now.rate if self._now else 0.0
        return (
            f"{what} is not finite, at learning rate {rate:g}; use a smaller rate or a warm-up, or check the data "
            "(the last checkpoint is intact)"
        )

    def _finished(self, state: TrainState) -> str:
        """Why training is over, or an empty text."""
        train, progress = self._config.train, state.progress
        counts = progress.counts
        waited = (progress.consumed - counts.best_at) / self._plan.samples
        if progress.consumed >= self._plan.end:
            return f"{train.epochs:g} epochs done"
        if 0 < train.target_accuracy <= counts.best_accuracy:
            return f"validation accuracy reached {counts.best_accuracy:.4f}"
        if train.patience and counts.evaluated == progress.consumed and waited >= train.patience:
            return f"no better validation accuracy for {waited:g} epochs"
        return ""

    def _evaluation_due(self, state: TrainState, finished: str) -> bool:
        consumed, evaluated = state.progress.consumed, state.progress.counts.evaluated
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

    def _without_round(self, action: Action, state: TrainState, status: int = 0, reason: str = "") -> Decision:
        """A decision that leaves the group as it is."""
        progress = state.progress
        ranks = self._now.ranks if self._now else 0
        decision = Decision(action, ranks=ranks, status=status, reason=reason)
        return self._told(decision, progress)

    def _next_round(self, state: TrainState) -> Decision:
        """The settings of the next round; a new stage is logged and becomes part of the history."""
        progress = state.progress
        stage = self._stage(progress)
        progress.begin(stage.learners)
        rate = learning_rate(
            self._config.learning_rate,
            progress.consumed,
            self._plan.samples,
            self._plan.end,
            progress.history,
            stage.round_samples,
        )
        ranks = len(ranks_for(stage.learners, self._world.order[: progress.counts.wanted_ranks or None]))
        settings = _settings(stage)
        if settings != self._logged:
            self._logged = settings
            epoch = progress.consumed / self._plan.samples
            self._record("stage", round=progress.round, epoch=epoch, **settings, rate=rate)
        self._before = self._now.ranks if self._now else 0
        self._now = self._told(Decision("train", **settings, rate=rate, ranks=ranks), progress)
        self._knowing = ranks
        return self._now

    def _told(self, decision: Decision, progress: Progress) -> Decision:
        """The decision with what its listeners must know besides."""
        return msgspec.structs.replace(decision, knowing=self._knowing, round=progress.round, counts=progress.counts)


def _count_evaluation(progress: Progress, scores: Mapping[str, Any]) -> None:
    counts = progress.counts
    counts.evaluated = progress.consumed
    accuracy = scores.get("validation", {}).get("accuracy", -1.0)
    if accuracy > counts.best_accuracy:
        counts.best_accuracy, counts.best_at = accuracy, progress.consumed


def _grant(progress: Progress, wish: Mapping[str, Any]) -> None:
    counts = progress.counts
    counts.wanted_ranks = wish.get("ranks", counts.wanted_ranks)
    counts.wanted_learners = wish.get("learners", counts.wanted_learners)


def _settings(stage: StagePlan) -> dict[str, Any]:
    """P, K, mu and B."""
    return {"learners": stage.learners, "steps": stage.steps, "momentum": stage.momentum, "batch": stage.batch}
