"""The process's own generators of random numbers, which a user's code draws from: PyTorch's, NumPy's and Python's.

They are seeded by a keyed word before each piece of such code, so that what it draws depends on the sample or the
step, and not on who ran what before.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_NUMPY_SEEDS = 2**32


def seed(word: int) -> None:
    """Seed them all by an unsigned 64-bit word; PyTorch's if it is imported."""
    np.random.seed(word % _NUMPY_SEEDS)
    random.seed(word)
    if torch := _torch():
        # torch.manual_seed does the same with a hundred times the overhead.
        torch.default_generator.manual_seed(word)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(word)


@contextmanager
def kept() -> Iterator[None]:
    """Put them back at the end of the block to where they were at its start; PyTorch's on the CPU."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    torch = _torch()
    torch_state = torch.get_rng_state() if torch else None
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if torch:
            torch.set_rng_state(torch_state)


def _torch() -> Any:
    """PyTorch, if this process has imported it: only then can anybody draw from its generator."""
    return sys.modules.get("torch")
