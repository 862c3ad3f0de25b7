"""The reduction over several nodes, on threads: ranks of a node see each other's arrays, others exchange them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
from test_tree import random_vectors, tree_sum
from threads import ThreadTransport, on_ranks

from shoal.backend import numpy_backend
from shoal.comm import hierarchical
from shoal.comm.algorithms import cost
from shoal.comm.hierarchical import Carrier
from shoal.comm.setting import Setting
from shoal.comm.tree import SubtreeSums, blocks

BACKEND = numpy_backend()
LAYOUTS = [(1,), (3,), (1, 1), (2, 2), (1, 3), (3, 1), (2, 1, 2), (4, 4), (3, 3, 3), (1, 1, 1, 1, 1), (5, 1, 3)]


class Nodes:
    """The ranks of each node, and the subtree sums that each rank shows to its node."""

    def __init__(self, counts: Sequence[int]) -> None:
        ends = list(accumulate(counts))
        self.ranks = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self.shown: list[list[np.ndarray]] = [[] for _ in range(ends[-1])]
        self._states: dict[int, np.ndarray] = {}
        self._meeting = threading.Barrier(ends[-1], timeout=20.0)

    def reduce(self, transport: ThreadTransport, values: list[np.ndarray]) -> tuple[bytes, int, int]:
        """The mean's bits, and the messages and numbers that this rank sent; twice with one work memory."""
        learners, size, dtype = len(values), values[0].size, values[0].dtype
        setting = Setting(transport, learners, size, BACKEND, dtype)
        carrier = Carrier(setting, self.ranks)
        here = next(ranks for ranks in self.ranks if transport.rank in ranks)
        sums = SubtreeSums(np, lambda _: BACKEND.empty(size, dtype))
        for _ in range(2):
            transport.sent.clear()
            sums.start()
            for learner in setting.dealt[transport.rank]:
                sums.slot()[...] = values[learner]
                sums.add((0, learner))
            self.shown[transport.rank] = sums.parts
            self._meeting.wait()
            parts = [part for rank in here for part in self.shown[rank]]
            state = self._states.setdefault(here.start, np.empty(size, dtype))

            def take(at: slice, parts: list[np.ndarray] = parts, state: np.ndarray = state) -> None:
                state[at] = parts[0][at]
                for part in parts:  # as training does, whose next state lies there
                    part[at] = np.nan

            carrier(parts, 1 / learners, take)
            self._meeting.wait()
            mean = state.tobytes()
            self._meeting.wait()
        return mean, len(transport.sent), sum(numbers for _, numbers in transport.sent)


@pytest.mark.parametrize("section_bytes", [hierarchical._SECTION_BYTES, 200])
@pytest.mark.parametrize("counts", LAYOUTS, ids=str)
def test_it_is_the_tree_bit_for_bit_over_any_nodes(
    counts: tuple[int, ...], section_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hierarchical, "_SECTION_BYTES", section_bytes)
    ranks = sum(counts)
    for learners in [p for p in range(ranks, 18) if len(blocks(p, ranks)) == ranks]:
        for size in (0, 1, 33, 500) if learners % 5 == 0 else (100,):
            values = random_vectors(learners, size)
            expected = (tree_sum(values) * np.float32(1 / learners)).tobytes()
            results = on_ranks(ranks, partial(Nodes(counts).reduce, values=values))
            assert [mean for mean, _, _ in results] == [expected] * ranks, (learners, size)


def test_in_float64() -> None:
    values = [value.astype(np.float64) / 3 for value in random_vectors(12, 50)]
    for mean, _, _ in on_ranks(6, partial(Nodes((4, 2)).reduce, values=values)):
        assert mean == (tree_sum(values) * (1 / 12)).tobytes()


@pytest.mark.parametrize("counts", LAYOUTS, ids=str)
def test_as_much_is_sent_as_declared(counts: tuple[int, ...]) -> None:
    ranks, size = sum(counts), 16 * 60 * 5
    nodes = Nodes(counts)
    for learners in (ranks, 2 * ranks):
        sent = on_ranks(ranks, partial(nodes.reduce, values=[np.ones(size, np.float32)] * learners))
        declared = cost("hierarchical", learners, counts, size)
        assert max(messages for _, messages, _ in sent) == declared.messages
        assert max(numbers for _, _, numbers in sent) == pytest.approx(declared.numbers)
        assert max(sum(sent[rank][2] for rank in here) for here in nodes.ranks) == pytest.approx(declared.crossing)
