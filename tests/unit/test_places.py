"""Where contributions lie: the first two of a node where the round's result will."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from shoal.backend import numpy_backend
from shoal.comm.places import HOMES, OwnMemory, Sizes, numbers


def first(version: int, place: int, places: int) -> list[int]:
    return list(itertools.islice(numbers(version, place, places), 3))


@pytest.mark.parametrize("version", [0, 1])
def test_a_node_s_first_sums_lie_in_the_homes_of_the_version_written(version: int) -> None:
    homes = [2 * version, 2 * version + 1]
    assert first(version, 0, 1) == [*homes, HOMES]
    for places in (2, 3, 8):
        assert [first(version, place, places)[0] for place in (0, 1)] == homes
        for place in range(2, places):
            assert first(version, place, places) == [HOMES, HOMES + 1, HOMES + 2]


def test_the_state_lies_in_its_homes_whatever_a_contribution_has_besides() -> None:
    memory = OwnMemory(numpy_backend(), Sizes(10, 7, 17, 4, np.dtype(np.float32)))
    for k, name in itertools.product((0, 1), ("anchor", "velocity")):
        home = memory.array(2 * k + (name == "velocity"))
        part = memory.versions[k][name]
        assert home.shape == (17,) and part.shape == ((10,) if name == "anchor" else (7,))
        assert np.shares_memory(home, part) and home.ctypes.data == part.ctypes.data
    own = [memory.array(HOMES), memory.array(HOMES + 1)]
    assert all(not np.shares_memory(a, memory.array(n)) for a in own for n in range(HOMES))
