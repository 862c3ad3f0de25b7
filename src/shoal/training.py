"""The walk of the data: decision -> local steps -> canonical sum -> new anchor -> record, until the end.

Nothing here asks which backend, provider, algorithm or launcher is in use.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from shoal import evaluation
from shoal.allocation import Allocation
from shoal.comm.group import Group
from shoal.comm.joining import Joined
from shoal.comm.places import OwnMemory, Sizes
from shoal.comm.reducer import Reducer
from shoal.comm.shared import NodeMemory
from shoal.comm.tuning import make_tuner
from shoal.comm.world import World
from shoal.elastic.master import Decision, Master, Outside, facts
from shoal.elastic.recovery import Journal, recover_state
from shoal.elastic.reserve import ReserveProvider
from shoal.elastic.stopping import Deadline, nodes_needed
from shoal.elastic.supply import CHANGES, memory_and_supply
from shoal.errors import InputError, RankLost
from shoal.job import Job
from shoal.record.recorder import Recorder
from shoal.sgd.averaging import ReductionMomentum
from shoal.sgd.interfaces import Numbers
from shoal.sgd.optimizer import contribution_size, may_leave_step
from shoal.state import Progress, TrainState

_WAIT_S = 0.01


class Training:
    """One rank's part of a training."""

    def __init__(
        self,
        job: Job,
        world: World,
        recorder: Recorder,
        stop_requested: Callable[[], bool],
        here: Allocation,
        joined: Joined | None = None,
    ) -> None:
        self._job, self._world, self._recorder, self.here = job, world, recorder, here
        config, backend, layout = job.config, job.backend, job.model.layout
        self._stop_requested = stop_requested
        size = contribution_size(job.model, config.train)
        most = max(config.run.max_learners, *(stage.learners for stage in job.plan.stages))
        sizes = Sizes(layout.size, layout.parameters, size, most, np.dtype(np.float32))
        self.memory, self._supply = memory_and_supply(world, sizes, config.run, job.fingerprint(), joined)
        memory = self.memory if isinstance(self.memory, NodeMemory) else None
        arrays = memory or OwnMemory(backend, sizes)
        self.state = TrainState(layout, backend, arrays.versions)
        tuner = make_tuner(world, config.run, memory is not None, self._record)
        self._reducer = Reducer(backend, size, np.float32, tuner, arrays)
        self._average = ReductionMomentum(layout, config.averaging, config.train, backend)
        self._journal = Journal(memory)
        listen = self._supply is not None
        self._provider = ReserveProvider(world, memory, stop_requested, listen, self._journal.forget)
        self._deadline = Deadline(here.end_time_s, config.run.stop_margin_s)
        self._gives_back = config.run.give_back_nodes and here.gives_back and not (self._supply or job.policy)
        outside = Outside(self._stop_reason, recorder.wish, job.policy)
        self._master = Master(config, job.plan, world, self._record, outside, self._supply)
        self._group: Group | None = None
        self._row: list[float] | None = None
        """this rank's facts of the round just done"""
        self._round_s = 0.0
        self._idle_since = time.perf_counter()
        """the end of the last round, evaluation or checkpoint"""
        self._begins = joined is None
        self._released = False

    def run(self) -> Decision:
        """Train from the state there is to the end, or until this rank is released; returns the last decision.
        Collective over the world."""
        if self._world.is_master and self._begins:
            self._master.replay(self._recorder.replay)
            self._journal.note(self.state.progress, trains=False)
        while True:
            try:
                if not self._begins:  # this rank has just come
                    self._begins = True
                    recover_state(self._world, self._provider, self._journal, self.state)
                decision = self._carry_out_next()
            except RankLost as lost:
                if lost.final:
                    raise
                self._recover(lost)
            else:
                if decision.action == "end" or self._released:
                    return decision

    def _carry_out_next(self) -> Decision:
        """Hear what is next, and do it."""
        if self._supply is not None:
            self._supply.hear()
        decide = functools.partial(self._master.decide, self.state, self._round_s)
        progress = self.state.progress
        decision = self._provider.next_decision(self._group, progress.round, self._row, decide)
        self._row = None
        progress.round = decision.round
        if decision.action == "train":
            self._group = group = self._provider.resize(self._group, decision, self.state)
            if self._world.is_master:
                self._master.started(self.state, 1e3 * (time.perf_counter() - self._idle_since))
            if group is not None:
                self._row = self._round(group, decision)
            self._round_s = time.perf_counter() - self._idle_since
            self._idle_since = time.perf_counter()
            return decision
        if self._group is not None:
            progress.counts = decision.counts
            self._journal.note(progress, trains=False)
        if decision.action in CHANGES:
            self._change(decision)
            return decision
        if decision.action == "evaluate":
            self._evaluate(decision)
        elif decision.action == "checkpoint":
            self._save()
        else:
            self._finish(decision)
        self._idle_since = time.perf_counter()
        return decision

    def _change(self, decision: Decision) -> None:
        """A rank is brought in, or leaves; training waits for nothing but the switch."""
        supply, start = self._supply, time.perf_counter()
        assert supply is not None
        action: dict[str, Any] = {"action": decision.action}
        if decision.action == "spawn":
            supply.begin()
        elif decision.action == "wait":
            time.sleep(_WAIT_S)
        elif decision.action == "forget":
            supply.give_up()
            self._record("warning", round=decision.round, text=f"{supply.problem}; the run goes on without it")
        else:
            if self._group is not None:
                self._group.close()
                self._group = None
            if decision.action == "grow":
                action |= supply.take()
            elif supply.release():
                self._released = True
                return
            recover_state(self._world, self._provider, self._journal, self.state)
            if self._world.is_master:
                action["switch_ms"] = 1e3 * (time.perf_counter() - start)
                self._master.world_changed(self.state, **action)

    def _recover(self, lost: RankLost) -> None:
        """Go on with the ranks that are left, from the newest state that they have. Raises RankLost if they cannot."""
        start, world = time.perf_counter(), self._world
        ranks, master, gone = world.size, world.is_master, list[int]()
        self._group, self._row = None, None
        if self._supply is not None:
            self._supply.forget()
        while True:
            gone += world.recover()
            shrunk_s = time.perf_counter() - start
            if isinstance(self.memory, NodeMemory):
                self.memory.new_generation(world.generation)
            try:
                if self._supply is not None:
                    self._supply.found_again(gone)
                recover_state(world, self._provider, self._journal, self.state)
                break
            except RankLost as again:
                if again.final:
                    raise
        if world.is_master:
            history = self._recorder.take_over(self.state.progress.round)
            self._master.recovered(self.state, history, self._recorder.saved_round)
            times = {"shrink_ms": 1e3 * shrunk_s, "recovery_ms": 1e3 * (time.perf_counter() - start)}
            who = {"lost": gone, "ranks": [ranks, world.size], "new_master": not master}
            self._recorder.event("recovery", **self._master.where(self.state), **who, **times, reason=str(lost))

    def _round(self, group: Group, at: Decision) -> list[float]:
        """K steps on every learner of this rank, one reduction; returns this rank's facts of it."""
        reducer, state = self._reducer, self.state
        start = time.perf_counter()
        state.progress.counts = at.counts
        state.progress.begin(at.learners)
        self._journal.note(state.progress, trains=True)
        gradients = may_leave_step(self._job.config.train, at.steps)
        gradients = gradients and reducer.reads_each(group, at.learners, state.progress.round)
        by = Numbers(at.steps, at.momentum, at.rate, gradients)
        reducer.start(group, state.progress.round)
        losses = []
        for learner in group.learners_here(at.learners):
            losses.append(self._job.local.contribute(state, at, learner, by, reducer.slot()))
            reducer.add(learner)
        busy_s = time.perf_counter() - start
        row = facts(self._stop_requested(), busy_s, losses, -(-at.learners // group.size))
        self._provider.tell(group, row)
        update = functools.partial(self._average.update, state, by)
        reducer.reduce(group, at.learners, state.progress.round, update, self._average.passes(state, by))
        state.progress.advance(at.learners, at.steps, at.batch)
        return row

    def close(self) -> None:
        """No rank comes or goes any more. Collective over the world."""
        if self._supply is not None:
            self._supply.close()

    @property
    def released(self) -> bool:
        """Whether this rank has left the world, before the end."""
        return self._released

    def _evaluate(self, decision: Decision) -> None:
        """All living ranks evaluate the anchor; reserves receive it first."""
        job, world = self._job, self._world
        start = time.perf_counter()
        self._provider.spread(self.state.anchor, decision)
        job.local.evaluate_at(self.state.anchor)
        if job.config.train.batchnorm_eval == "recalibrate":
            evaluation.recalibrate(job.model, job.batches, len(job.data.train), job.config.seed)
        scores = evaluation.evaluate(world, job.model, job.batches, job.data)
        if world.is_master:
            self._master.evaluated(self.state, scores, time.perf_counter() - start)

    def _save(self) -> None:
        """The master saves a copy of the state while training goes on."""
        if self._world.is_master:
            p = self.state.progress
            arrays = {name: self._job.backend.to_host(array) for name, array in self.state.arrays.items()}
            self._recorder.checkpoint(arrays, self._meta(), p.round, p.consumed)

    def restore(self, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        """Master: go on from a checkpoint. Raises InputError if it is of another net or of other data."""
        try:
            data, progress = meta["data"], msgspec.convert(meta["progress"], Progress)
        except (KeyError, msgspec.ValidationError):
            raise InputError(
                "the checkpoint was made by another version of shoal; resume with that, or start another run"
            ) from None
        if data != self._job.data_sum:
            raise InputError(
                "the run began with other training or test data; resume it with the same, or start another run"
            )
        self.state.load(arrays, progress)
        self._master.resumed(self.state)

    def _meta(self) -> dict[str, Any]:
        progress = msgspec.to_builtins(self.state.progress)
        return {"progress": progress, "tensors": self._job.model.layout.table(), "data": self._job.data_sum}

    def _record(self, kind: str, **fields: Any) -> None:
        """What happens is logged by the master."""
        if self._world.is_master:
            self._recorder.event(kind, **fields)

    def _stop_reason(self) -> str:
        if self._stop_requested():
            return "a signal"
        recorder = self._recorder
        return recorder.stop_requested() or self._deadline.reason(recorder.checkpoint_s) or self._give_back()

    def _give_back(self) -> str:
        """Ask the batch script to go on with the nodes that the rest of the plan needs, if these are fewer."""
        nodes, progress = self._world.nodes, self.state.progress
        asked_for = progress.counts.wanted_learners or progress.counts.wanted_ranks
        if not self._gives_back or asked_for:
            return ""
        needed = nodes_needed(self._job.plan, progress.consumed, self._world)
        if needed == nodes:
            return ""
        self._recorder.ask_for_nodes(needed)
        return f"{needed} of {nodes} nodes are enough from here on"

    def _finish(self, decision: Decision) -> None:
        """Everybody leaves with the final anchor."""
        if self._group is not None:
            self._group.close()
        self._provider.spread(self.state.anchor, decision)
