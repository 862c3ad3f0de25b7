"""The choice of an algorithm: by place and length, and what may be used at all."""

from __future__ import annotations

import pytest

from shoal.comm.algorithms import KEEPS_ORDER, TAKES_WIRE, cost
from shoal.comm.group import Group
from shoal.comm.tuning import Links, Place, Tuner

LINKS = Links(step_s=50e-6, message_s=5e-6, byte_s=0.2e-9, crossing_byte_s=8e-9)
TWO_BY_FOUR = Place(8, 8, (4, 4), True)


def _chosen(size: int, place: Place = TWO_BY_FOUR, **how: object) -> str:
    return Tuner(links=LINKS, **how).choose(place, size, 4).algorithm  # type: ignore[arg-type]


def test_one_node_has_no_choice() -> None:
    assert _chosen(10, Place(4, 2, (2,), True)) == "shared"
    assert _chosen(10, Place(4, 1, (1,), False)) == "alone"
    assert _chosen(10, Place(4, 1, None, False), algorithm="hierarchical") == "alone"
    assert _chosen(10, Place(4, 2, (2,), True), algorithm="tree") == "tree"


def test_long_arrays_go_by_lanes_where_nodes_share_memory() -> None:
    assert _chosen(10_000_000) == "hierarchical"
    assert _chosen(10_000_000, Place(8, 8, (4, 4), False)) == "exchange"
    assert _chosen(10_000_000, Place(8, 8, None, True)) == "exchange"
    assert _chosen(10_000_000, Place(8, 8, (4, 4), False), algorithm="hierarchical") == "exchange"


def test_short_arrays_go_in_few_messages_among_many_ranks() -> None:
    many = Place(64, 64, (1,) * 64, False)
    assert _chosen(1, many) == "tree"
    assert _chosen(10_000_000, many) == "exchange"


@pytest.mark.parametrize("size", [0, 1, 1000, 100_000, 10_000_000])
def test_only_what_keeps_the_order_unless_told_otherwise(size: int) -> None:
    for place in (TWO_BY_FOUR, Place(9, 9, (3, 3, 3), False), Place(12, 6, (6,), False), Place(7, 7, None, True)):
        assert KEEPS_ORDER[_chosen(size, place)]
        assert KEEPS_ORDER[_chosen(size, place, algorithm="ring")]
        assert _chosen(size, place, algorithm="ring", reproducible=False) == "ring"
        assert _chosen(size, place, reproducible=False, wire="float16") in TAKES_WIRE


def test_the_volume_between_nodes_is_the_minimum_where_blocks_are_aligned() -> None:
    assert cost("hierarchical", 4, (2, 2), 1000).crossing == 1000
    assert cost("hierarchical", 32, (4,) * 4, 1000).crossing == 2 * 1000 * 3 / 4
    assert cost("hierarchical", 12, (6, 6), 1000).crossing == (2 + 1) * 1000 / 2
    assert cost("hierarchical", 12, (6, 6), 1000).numbers == (2 + 1) * 1000 / 2 / 6


def _nodes(nodes: tuple[int, ...]) -> list[range] | None:
    return Group(tuple(range(len(nodes))), tuple(range(len(nodes))), nodes, None).on_nodes  # type: ignore[arg-type]


def test_ranks_by_node() -> None:
    assert _nodes((0, 0, 2, 2)) == [range(2), range(2, 4)]
    assert _nodes((0, 1, 0)) is None
    assert _nodes((3,)) == [range(1)]
