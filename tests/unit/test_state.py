"""The state of a training: all that a joiner or a checkpoint needs, and nothing else."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest
from threads import ThreadTransport, on_ranks

from shoal.backend import numpy_backend
from shoal.config import LearningRate
from shoal.errors import InputError
from shoal.model.flat import Layout, Tensor
from shoal.sgd.rates import Switch, learning_rate
from shoal.state import Counts, Progress, TrainState

LAYOUT = Layout(
    [Tensor("w", (5, 7), "weight"), Tensor("b", (7,), "bias"), Tensor("m", (7,), "statistic")],
)


def _state(seed: int | None = 3) -> TrainState:
    state = TrainState(LAYOUT, numpy_backend())
    if seed is not None:
        draw = np.random.default_rng(seed)
        state.progress = Progress(
            round=7,
            consumed=12345678901,
            serial_steps=28,
            learner_steps=99,
            history=[Switch(0, 2), Switch(640, 8)],
            counts=Counts(train_s=1.1, busy_rank_s=0.1 + 0.2, evaluated=600, best_accuracy=0.9, best_at=500),
        )
        for array in state.arrays.values():
            array[...] = draw.standard_normal(array.size)
    return state


def _same(a: TrainState, b: TrainState) -> bool:
    return a.progress == b.progress and all(
        array.tobytes() == b.arrays[name].tobytes() for name, array in a.arrays.items()
    )


def test_a_new_state_is_0() -> None:
    state = _state(None)
    assert {name: array.shape for name, array in state.arrays.items()} == {
        "anchor": (LAYOUT.size,),
        "velocity": (LAYOUT.parameters,),
        "momentum": (LAYOUT.parameters,),
    }
    assert all(array.dtype == np.float32 and not array.any() for array in state.arrays.values())
    assert state.progress == Progress() and state.position == 0


def test_advance_counts_a_round() -> None:
    progress = Progress()
    progress.advance(learners=3, steps=4, batch=5)
    progress.advance(learners=8, steps=1, batch=2)
    assert (progress.round, progress.consumed, progress.serial_steps, progress.learner_steps) == (2, 76, 5, 20)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_hand_over_gives_rank_0s_state_to_all(ranks: int) -> None:
    def work(transport: ThreadTransport) -> TrainState:
        state = _state(3 + transport.rank)
        state.progress.round += 2 * transport.rank
        state.hand_over(transport, transport)
        return state

    states = on_ranks(ranks, work)
    assert all(_same(state, _state(3)) for state in states)


def test_the_history_does_not_grow_for_ever_and_the_rate_is_the_same() -> None:
    """A policy may switch P tens of thousands of times; a shrinkage makes what was before irrelevant."""
    rate = LearningRate(base=0.1, scaling="sqrt", growth_warmup_epochs=0.7, warmup_epochs=2.0, decay="cosine")
    random, progress, whole = np.random.default_rng(1), Progress(), list[Switch]()
    for learners in random.integers(1, 9, 1000).tolist():
        if not whole or whole[-1].learners != learners:
            whole.append(Switch(progress.consumed, learners))
        progress.begin(learners)
        assert progress.history == whole[-len(progress.history) :] and len(progress.history) <= 9
        rates = [learning_rate(rate, progress.consumed, 64, 64_000, known, 10) for known in (whole, progress.history)]
        assert rates[0] == rates[1]
        progress.advance(learners, 1, 2)


def test_a_long_history_is_handed_over() -> None:
    """Longer than one frame."""

    def work(transport: ThreadTransport) -> list[Switch]:
        state = _state()
        if transport.rank == 0:
            state.progress.history = [Switch(i * 10**9, i % 9 + 1) for i in range(500)]
        state.hand_over(transport, transport)
        return state.progress.history

    for history in on_ranks(3, work):
        assert history == [Switch(i * 10**9, i % 9 + 1) for i in range(500)]


def test_load_takes_over_what_was_saved() -> None:
    """By value: the checkpoint's arrays are not kept."""
    saved = _state()
    arrays = {name: array.copy() for name, array in saved.arrays.items()}
    progress = msgspec.json.decode(msgspec.json.encode(saved.progress), type=Progress)
    state = _state(None)
    mine = [id(array) for version in state.versions for array in version.values()]
    state.load(arrays, progress)
    assert _same(state, saved)
    assert all(id(array) in mine for array in state.arrays.values())
    arrays["anchor"][...] = 0
    assert _same(state, saved)


@pytest.mark.parametrize("name", ["anchor", "velocity", "momentum"])
def test_load_refuses_the_arrays_of_another_net(name: str) -> None:
    arrays = _state().arrays
    with pytest.raises(InputError, match=f"checkpoint's {name}"):
        _state(None).load({**arrays, name: arrays[name][:-1]}, Progress())
    with pytest.raises(InputError, match=f"checkpoint's {name}"):
        _state(None).load({key: array for key, array in arrays.items() if key != name}, Progress())


def test_the_digest_is_that_of_anchor_and_velocity() -> None:
    state = _state()
    expected = hashlib.sha256(state.anchor.tobytes() + state.velocity.tobytes()).hexdigest()
    assert state.digest() == expected
    state.momentum[...] += 1
    state.progress.round += 2
    assert state.digest() == expected
    for array in (state.anchor, state.velocity):
        old = array[3]
        array[3] = np.nextafter(old, np.float32(np.inf))
        assert state.digest() != expected
        array[3] = old
    assert state.digest() == expected
