"""The arithmetic of a round: what the anchor, the velocity and the momentum are after a reduction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal import kernels
from shoal.comm.algorithms import slices
from shoal.comm.tree import joins
from shoal.config import from_tree
from shoal.elastic.plan import StagePlan
from shoal.errors import InputError
from shoal.job import Job, prepare
from shoal.model.flat import Piece
from shoal.model.gradient import Model
from shoal.sgd.averaging import ReductionMomentum
from shoal.sgd.interfaces import Numbers
from shoal.sgd.optimizer import contribution_size
from shoal.state import TrainState

MLP = {"net": "mlp", "hidden": [12]}
BATCHNORM = {"net": "convnet-s", "width": 4, "batchnorm": True}


class Rounds:
    """Rounds of a job without ranks: all learners one after another, then the reduction."""

    def __init__(
        self, learners: int = 3, steps: int = 4, model: dict[str, Any] = MLP, averaging: Any = (), train: Any = ()
    ) -> None:
        tree = {
            "data": {"set": "synthetic", "train": 120, "test": 8},
            "model": model,
            "learners": {"schedule": f"0:{learners}"},
            "averaging": {"steps": steps, **dict(averaging)},
            "train": {"epochs": 50, "batch": 6, **dict(train)},
        }
        self.job: Job = prepare(from_tree(tree, "test"))
        config, backend, self.layout = self.job.config, self.job.backend, self.job.model.layout
        self.state = TrainState(self.layout, backend)
        self.job.model.initialise(self.state.anchor, 1)
        self.at: StagePlan = self.job.plan.stages[0]
        self.mu = config.averaging.momentum
        self._average = ReductionMomentum(self.layout, config.averaging, config.train, backend)
        self._size = contribution_size(self.job.model, config.train)

    def contribution(self, learner: int, rate: float = 0.05, gradients: bool = False) -> np.ndarray:
        """What the learner brings to the next reduction; a copy. gradients: it leaves its step to that."""
        out = self.job.backend.empty(self._size)
        out.fill(np.nan)
        by = Numbers(self.at.steps, self.mu, rate, gradients)
        self.job.local.contribute(self.state, self.at, learner, by, out)
        return out.copy()

    def contributions(self, rate: float = 0.05, gradients: bool = False) -> list[np.ndarray]:
        return [self.contribution(learner, rate, gradients) for learner in range(self.at.learners)]

    def go(self, rate: float = 0.05, gradients: bool = False) -> None:
        self.commit(self.contributions(rate, gradients), rate, gradients)

    def commit(self, contributions: list[np.ndarray], rate: float, gradients: bool = False) -> None:
        """Two ranks' share of the update, one after the other, as each would compute its slice."""
        order = joins([(0, learner) for learner in range(len(contributions))])

        def terms(lo: int, hi: int) -> kernels.Terms:
            parts = [np.ascontiguousarray(one[lo:hi]) for one in contributions]
            return kernels.Terms(np, parts, order, 1 / len(contributions))

        by = Numbers(self.at.steps, self.mu, rate, gradients)
        for span in slices(self._size, 2):
            self._average.update(self.state, by, span, terms)
        self.state.progress.advance(self.at.learners, self.at.steps, self.at.batch)

    @property
    def parameters(self) -> np.ndarray:
        return self.state.anchor[: self.layout.parameters].copy()


def _close(a: np.ndarray, b: np.ndarray, tolerance: float = 1e-6) -> bool:
    return float(np.abs(a - b).max()) <= tolerance


@pytest.mark.parametrize("model", [MLP, BATCHNORM], ids=["mlp", "batchnorm"])
@pytest.mark.parametrize(("learners", "steps"), [(1, 1), (3, 4), (8, 1), (5, 3)])
def test_without_momentum_the_anchor_is_the_mean_of_the_models(
    model: dict[str, Any], learners: int, steps: int
) -> None:
    rounds = Rounds(learners, steps, model)
    for _ in range(3):
        before = rounds.state.anchor.astype(np.float64)
        models = [before + contribution[: before.size] for contribution in rounds.contributions()]
        rounds.go()
        assert _close(rounds.state.anchor, np.mean(models, axis=0))
        assert not _close(rounds.state.anchor, before, 1e-4)


def test_reduction_momentum_by_its_formula() -> None:
    rounds = Rounds(averaging={"momentum": 0.5})
    velocity = np.zeros(rounds.layout.parameters)
    anchor = rounds.parameters.astype(np.float64)
    for _ in range(5):
        d = np.mean(rounds.contributions(), axis=0, dtype=np.float64)[: anchor.size]
        velocity = 0.5 * velocity + d
        anchor = anchor + velocity
        rounds.go()
        assert _close(rounds.state.velocity, velocity) and _close(rounds.parameters, anchor)


def test_both_forms_of_the_velocity_agree_at_a_constant_rate_only() -> None:
    by_displacement, by_rate = (
        Rounds(averaging={"momentum": 0.6, "velocity": v}) for v in ("displacement", "per_rate")
    )
    for _ in range(10):
        by_displacement.go(0.05)
        by_rate.go(0.05)
    assert _close(by_displacement.parameters, by_rate.parameters)
    assert _close(by_displacement.state.velocity, 0.05 * by_rate.state.velocity)
    by_displacement.go(0.005)
    by_rate.go(0.005)
    assert not _close(by_displacement.parameters, by_rate.parameters, 1e-4)


def test_slowmo_across_a_decay_of_the_rate() -> None:
    """u <- mu*u + (x - mean)/rate, x <- x - rate*u (arXiv 1910.00643, alpha = 1)."""
    rounds = Rounds(averaging={"momentum": 0.6, "velocity": "per_rate"})
    u, x = np.zeros(rounds.layout.parameters), rounds.parameters.astype(np.float64)
    for rate in (0.05, 0.05, 0.05, 0.005, 0.005, 0.02):
        average = x + np.mean(rounds.contributions(rate), axis=0, dtype=np.float64)[: x.size]
        u = 0.6 * u + (x - average) / rate
        x = x - rate * u
        rounds.go(rate)
        assert _close(rounds.parameters, x)


@pytest.mark.parametrize("learners", [2, 3, 8])
def test_bmuf_in_sum_form_is_reduction_momentum(learners: int) -> None:
    """G = sum_j (w - w_j), D <- eta*D + (1 - eta)*G, w <- w - D with eta = 1 - 1/P is M-AVG with mu = 1 - 1/P."""
    eta = 1 - 1 / learners
    m_avg, bmuf = Rounds(learners, averaging={"momentum": eta}), Rounds(learners)
    count = bmuf.layout.parameters
    filtered = np.zeros(count)
    for _ in range(8):
        m_avg.go()
        summed = -np.sum(bmuf.contributions(), axis=0, dtype=np.float64)[:count]
        filtered = eta * filtered + (1 - eta) * summed
        now, after = bmuf.state.versions
        after["anchor"][...] = now["anchor"]
        after["anchor"][:count] -= filtered.astype(np.float32)
        bmuf.state.progress.advance(bmuf.at.learners, bmuf.at.steps, bmuf.at.batch)
        assert _close(m_avg.parameters, bmuf.parameters)


def test_statistics_take_no_momentum() -> None:
    """They follow the mean alone, while the parameters beside them are carried on by the velocity."""
    rounds = Rounds(model=BATCHNORM, averaging={"momentum": 0.9})
    layout = rounds.layout
    assert layout.size > layout.parameters
    start, draw = rounds.state.anchor.copy(), np.random.default_rng(0)
    means = [draw.standard_normal(layout.size).astype(np.float32) for _ in range(4)]
    for mean in means:
        rounds.commit([mean], 0.1)
    moved = rounds.state.anchor - start
    plain = np.sum(means, axis=0)
    assert _close(moved[layout.parameters :], plain[layout.parameters :], 1e-5)
    assert not _close(moved[: layout.parameters], plain[: layout.parameters], 1)


def test_running_statistics_are_those_of_the_learners() -> None:
    rounds = Rounds(model=BATCHNORM, averaging={"momentum": 0.9})
    for _ in range(3):
        before = rounds.state.anchor.astype(np.float64)
        models = [before + contribution for contribution in rounds.contributions()]
        rounds.go()
        statistics = slice(rounds.layout.parameters, rounds.layout.size)
        assert _close(rounds.state.anchor[statistics], np.mean(models, axis=0)[statistics])


def _momentum_of(contribution: np.ndarray, rounds: Rounds) -> np.ndarray:
    return contribution[rounds.layout.size :]


def test_local_momentum_is_averaged_at_a_reduction() -> None:
    rounds = Rounds(train={"local_momentum": 0.9, "local_momentum_at_reduction": "average"})
    for _ in range(3):
        own = [_momentum_of(contribution, rounds) for contribution in rounds.contributions()]
        assert not _close(own[0], own[1], 1e-3)
        rounds.go()
        assert _close(rounds.state.momentum, np.mean(own, axis=0, dtype=np.float64))
    assert np.abs(rounds.state.momentum).max() > 0.01


def test_local_momentum_is_reset_at_a_reduction() -> None:
    rounds = Rounds(train={"local_momentum": 0.9})
    first = rounds.contribution(1)
    rounds.go()
    assert not rounds.state.momentum.any()
    rounds.state.progress.consumed = 0
    again = Rounds(train={"local_momentum": 0.9})
    again.state.anchor[...] = rounds.state.anchor
    assert np.array_equal(rounds.contribution(1), again.contribution(1))
    assert not _close(first, rounds.contribution(1), 1e-4)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("at_reduction", ["reset", "average"])
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_with_one_step_the_gradients_are_averaged(nesterov: bool, at_reduction: str, mu: float) -> None:
    """One m for all learners, in the form of PyTorch's SGD, whatever is said of reductions."""
    train = {"local_momentum": 0.9, "nesterov": nesterov, "local_momentum_at_reduction": at_reduction}
    rounds = Rounds(steps=1, train=train, averaging={"momentum": mu})
    count = rounds.layout.parameters
    m, v, a = np.zeros(count), np.zeros(count), rounds.parameters.astype(np.float64)
    for _ in range(5):
        g = np.mean(rounds.contributions(), axis=0, dtype=np.float64)[:count]
        m = 0.9 * m + g
        v = mu * v - 0.05 * (g + 0.9 * m if nesterov else m)
        a = a + v
        rounds.go()
        assert _close(rounds.parameters, a) and _close(rounds.state.momentum, m, 1e-5)


@pytest.mark.parametrize("decay_norms", [False, True])
def test_weight_decay(decay_norms: bool) -> None:
    """It leaves out biases and norms, unless told otherwise; compared along one learner's single step."""
    train = {"weight_decay": 0.5, "decay_norms": decay_norms}
    decayed, plain = Rounds(1, 1, BATCHNORM, train=train), Rounds(1, 1, BATCHNORM)
    for rounds in (decayed, plain):
        rounds.state.anchor[: rounds.layout.parameters] += 0.25
    difference = decayed.contribution(0, 0.1) - plain.contribution(0, 0.1)
    end = decayed.layout.parameters if decay_norms else decayed.layout.decayed
    assert _close(difference[:end], -0.1 * 0.5 * decayed.state.anchor[:end])
    assert not difference[end:].any()
    assert end > decayed.layout.decayed or not decay_norms


@pytest.mark.parametrize("train", [{}, {"local_momentum": 0.9, "local_momentum_at_reduction": "average"}])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_contribution_depends_on_the_state_and_the_learner_alone(train: dict[str, Any], steps: int) -> None:
    rounds = Rounds(5, steps, BATCHNORM, train=train, averaging={"momentum": 0.5})
    rounds.go()
    state = {name: array.copy() for name, array in rounds.state.arrays.items()}
    forwards = rounds.contributions()
    backwards = [rounds.contribution(learner) for learner in reversed(range(5))][::-1]
    assert [a.tobytes() for a in forwards] == [b.tobytes() for b in backwards]
    assert all(np.array_equal(rounds.state.arrays[name], array) for name, array in state.items())
    assert len({a.tobytes() for a in forwards}) == 5


def test_the_first_step_is_at_the_anchor_which_no_layer_can_write() -> None:
    rounds = Rounds(1, 1, BATCHNORM)
    rounds.contribution(0)
    for layer in rounds.job.model.net.walk():
        for tensor in layer.tensors():
            values = layer.values[tensor.name]
            assert np.shares_memory(values, rounds.state.anchor) == (tensor.kind != "statistic")
            assert values.flags.writeable == (tensor.kind == "statistic")


@pytest.mark.parametrize("train", [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decay_norms": True}])
@pytest.mark.parametrize("velocity", ["displacement", "per_rate"])
def test_a_step_left_to_the_reduction_gives_the_same_bits(velocity: str, train: dict[str, Any]) -> None:
    taken, left = (Rounds(3, 1, BATCHNORM, {"momentum": 0.5, "velocity": velocity}, train) for _ in range(2))
    for _ in range(3):
        taken.go()
        left.go(gradients=True)
        for name, array in taken.state.arrays.items():
            assert array.tobytes() == left.state.arrays[name].tobytes()


@pytest.mark.parametrize("micro", [1, 4, 5, 6, 7])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("model", [MLP, {**BATCHNORM, "batchnorm": False}], ids=["mlp", "convnet"])
def test_micro_batches_give_the_gradient_of_the_batch(
    model: dict[str, Any], momentum: float, steps: int, micro: int
) -> None:
    """To rounding, and to the bit where a piece is the whole; a batch of 6 has pieces of 5 and 1, or 4 and 2."""
    train = {"local_momentum": momentum, "weight_decay": 1e-3}
    pieces, whole = (Rounds(2, steps, model, train={**train, "micro_batch": n}) for n in (micro, 0))
    for _ in range(2):
        for learner in range(2):
            mine, reference = pieces.contribution(learner), whole.contribution(learner)
            assert _close(mine, reference, 1e-6) and np.abs(reference).max() > 1e-3
            assert (mine.tobytes() == reference.tobytes()) == (micro >= 6)
        pieces.go()
        whole.go()


def test_micro_batches_add_their_gradients_in_order_by_their_shares() -> None:
    rounds = Rounds(1, 1, train={"micro_batch": 4, "local_momentum": 0.9})
    job, count = rounds.job, rounds.layout.parameters
    weights, gradient = rounds.state.anchor, job.backend.zeros(count)
    brought = rounds.contribution(0)[:count]
    job.model.bind(weights, gradient)
    total, loss = np.zeros(count, np.float32), 0.0
    for position, size in ((0, 4), (4, 2)):
        loss += size / 6 * job.model.gradient(*job.batches.training(position, size))
        total += gradient * np.float32(size / 6)
    assert brought.tobytes() == total.tobytes()
    out = job.backend.empty(count)
    assert job.local.contribute(rounds.state, rounds.at, 0, Numbers(1, 0.0, 0.1), out) == loss


def test_micro_batches_take_the_memory_of_one() -> None:
    """Also where the last is smaller: it has scratch of its own, but no more than a whole one's."""
    held = {}
    for batch, micro in ((8, 0), (64, 8), (60, 8), (64, 0)):
        rounds = Rounds(1, 2, BATCHNORM, train={"batch": batch, "micro_batch": micro})
        for _ in range(2):
            rounds.go()
        held[batch, micro] = rounds.job.model.scratch_bytes
    assert held[64, 8] == held[8, 0] < held[60, 8] < 2 * held[8, 0] < held[64, 0]


def test_micro_batches_move_running_statistics_each() -> None:
    pieces, steps = Rounds(1, 1, BATCHNORM, train={"micro_batch": 3}), Rounds(1, 2, BATCHNORM, train={"batch": 3})
    measured = slice(pieces.layout.parameters, pieces.layout.size)
    assert _close(pieces.contribution(0, 1e-9)[measured], steps.contribution(0, 1e-9)[measured])


def test_a_piece_too_small_for_batch_norm_is_refused_at_the_start() -> None:
    with pytest.raises(InputError, match=r"batch >= 2"):
        Rounds(model={"net": "mlp", "hidden": [4], "batchnorm": True}, train={"micro_batch": 5})


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("decay_norms", [False, True])
@pytest.mark.parametrize("kept", ["none", "reset", "average"])
def test_a_gradient_in_pieces_gives_the_bits_of_the_whole(
    kept: str, decay_norms: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    train: dict[str, Any] = {"weight_decay": 0.1, "decay_norms": decay_norms}
    if kept != "none":
        train |= {"local_momentum": 0.9, "local_momentum_at_reduction": kept}
    whole = Rounds(2, steps, BATCHNORM, train=train)
    brought = []
    for _ in range(2):
        brought.append([one.tobytes() for one in whole.contributions()])
        whole.go()
    flat_pieces = Model.pieces.fget

    def pieces(model: Model) -> list[Piece]:
        """One a tensor."""
        ((_, flat),) = flat_pieces(model)
        trained = (one for one in model.layout.tensors if one.kind != "statistic")
        spans = [slice(one.offset, one.offset + one.size) for one in trained]
        return [(at, flat[at].copy()) for at in spans]

    monkeypatch.setattr(Model, "pieces", property(pieces))
    apart = Rounds(2, steps, BATCHNORM, train=train)
    for expected in brought:
        assert [one.tobytes() for one in apart.contributions()] == expected
        apart.go()


def test_the_gaps_between_tensors_stay_0() -> None:
    rounds = Rounds(model=BATCHNORM, averaging={"momentum": 0.9}, train={"weight_decay": 0.1})
    for _ in range(3):
        rounds.go()
    gaps = np.ones(rounds.layout.size, bool)
    for tensor in rounds.layout.tensors:
        gaps[tensor.offset : tensor.offset + tensor.size] = False
    assert gaps.any() and not rounds.state.anchor[gaps].any()
