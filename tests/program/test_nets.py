"""resnet18, resnet20 and senet18 give the same bits at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

CASES = {
    net: {
        "data": {"set": "synthetic", "shape": [32, 32, 3], "train": 24, "test": 16},
        "model": {"net": net, "width": 8},
        "learners": {"schedule": "0:3, 1:4"},
        "train": {"epochs": 2, "batch": 2},
        "averaging": {"steps": 2, "momentum": 0.5},
    }
    for net in ("resnet18", "resnet20", "senet18")
}


@pytest.fixture(scope="module")
def trained(train_many: Any) -> Callable[[int], Any]:
    """trained(n): all nets by n ranks."""
    return cache(lambda n: train_many(n, CASES))


@pytest.mark.parametrize("n", (2, 3, 4))
@pytest.mark.parametrize("net", CASES)
def test_the_digest_is_one_and_the_same(trained: Any, net: str, n: int) -> None:
    assert trained(n).digest(net) == trained(1).digest(net)
    assert {event["ranks"] for event in trained(n).histories[net] if event["event"] == "round"} == {
        -(-p // -(-p // n)) for p in (3, 4)
    }
