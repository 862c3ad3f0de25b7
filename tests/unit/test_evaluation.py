"""How many samples are evaluated at a time."""

from __future__ import annotations

import math

import pytest

from shoal.evaluation import CHUNK_BYTES, chunk_size


@pytest.mark.parametrize(
    ("shape", "size"),
    [((784,), 256), ((8, 8, 1), 64), ((32, 32, 3), 64), ((224, 224, 3), 6), ((10**6,), 1), ((10**4, 10**4, 3), 1)],
)
def test_a_chunk_is_large_and_its_memory_bounded(shape: tuple[int, ...], size: int) -> None:
    assert chunk_size(shape) == size
    assert size == 1 or 4 * size * math.prod(shape) <= CHUNK_BYTES
