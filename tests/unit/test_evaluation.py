"""How many samples are evaluated at a time."""

from __future__ import annotations

import pytest

from shoal.evaluation import chunk_size


@pytest.mark.parametrize(
    ("shape", "size"),
    [((784,), 256), ((10**6,), 8), ((8, 8, 1), 64), ((32, 32, 3), 32), ((224, 224, 3), 8)],
)
def test_a_chunk_is_large_and_its_memory_bounded(shape: tuple[int, ...], size: int) -> None:
    assert chunk_size(shape) == size
