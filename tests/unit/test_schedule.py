"""Schedules: what is written is what is read, and whatever cannot be carried out is refused in one sentence."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.config import from_tree
from shoal.elastic.plan import make_plan
from shoal.elastic.schedule import PRESETS, Schedule, Stage, Start
from shoal.errors import InputError

FIXED = settings(derandomize=True, deadline=None)

decimals = st.decimals(0, 10**6, places=12, allow_nan=False).map(lambda value: abs(value).normalize())
shares = st.decimals(0, 99, places=9, allow_nan=False).map(lambda value: abs(value).normalize())
starts = st.one_of(
    decimals.map(lambda value: Start(Fraction(value))),
    shares.map(lambda value: Start(Fraction(value) / 100, relative=True)),
)
schedules = st.builds(
    lambda first, rest: Schedule((Stage(Start(Fraction(0)), first), *rest)),
    st.integers(1, 10**9),
    st.lists(st.builds(Stage, starts, st.integers(1, 10**9)), max_size=6),
)


def _plan(schedule: Any, epochs: float = 10.0, **train: Any) -> Any:
    tree = {"train": {"epochs": epochs, "batch": 4, **train}, "learners": {"schedule": schedule}}
    return make_plan(from_tree(tree, "test"), 1000)


@FIXED
@given(schedules)
@example(Schedule((Stage(Start(Fraction(0)), 1), Stage(Start(Fraction("0.000000000001")), 2))))
@example(Schedule((Stage(Start(Fraction(0)), 1), Stage(Start(Fraction(1000)), 2))))
def test_parse_reads_what_str_wrote(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule


@FIXED
@given(st.lists(st.tuples(decimals, st.booleans(), st.integers(1, 999)), max_size=5), st.text(" \t", max_size=2))
def test_spaces_and_ways_to_write_a_number_do_not_matter(rest: list[tuple[Decimal, bool, int]], space: str) -> None:
    parts = [("0", "0", 3)]
    for value, padded, learners in rest:
        plain = f"{value:f}"
        long = f"{plain}{'00' if '.' in plain else '.00'}" if padded else f"0{plain}"
        parts.append((plain, long, learners))
    plain_text = ",".join(f"{plain}:{learners}" for plain, _, learners in parts)
    loose_text = f"{space},{space}".join(f"{space}{long}{space}:{space}{n}{space}" for _, long, n in parts)
    assert Schedule.parse(loose_text) == Schedule.parse(plain_text)


def test_the_short_form() -> None:
    schedule = Schedule.parse("0:1, 3:2,6.50:4 , 99.5%:8")
    assert str(schedule) == "0:1, 3:2, 6.5:4, 99.5%:8"
    assert [(stage.start.value, stage.start.relative) for stage in schedule.stages] == [
        (Fraction(0), False),
        (Fraction(3), False),
        (Fraction(13, 2), False),
        (Fraction(199, 200), True),
    ]
    assert schedule.stages[3].start.epochs(Fraction(40)) == Fraction(398, 10)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("paper-I", "0:3"),
        ("paper-II", "0:3, 50%:12"),
        ("paper-III", "0:12, 50%:3"),
        ("paper-IV", "0:12"),
        ("paper-V", "0:3, 10%:6, 20%:12"),
    ],
)
def test_presets(name: str, text: str) -> None:
    assert str(Schedule.parse(name, p=3, r=4)) == text
    assert Schedule.parse(f" {name} ", p=3, r=4) == Schedule.parse(text)
    config = from_tree({"learners": {"schedule": name, "p": 3, "r": 4}}, "test")
    assert str(Schedule.of(config)) == text


def test_there_are_five_presets() -> None:
    assert list(PRESETS) == [f"paper-{number}" for number in ("I", "II", "III", "IV", "V")]


def test_a_list_of_tables_is_the_short_form_and_more() -> None:
    tables = [{"at": 0, "learners": 2}, {"at": 1.5, "learners": 4}, {"at": "30%", "learners": 8}]
    config = from_tree({"learners": {"schedule": tables}}, "test")
    assert Schedule.of(config) == Schedule.parse("0:2, 1.5:4, 30%:8")
    tables[1] |= {"steps": 8, "momentum": 0.25, "batch": 16}
    stage = Schedule.of(from_tree({"learners": {"schedule": tables}}, "test")).stages[1]
    assert stage == Stage(Start(Fraction(3, 2)), 4, steps=8, momentum=0.25, batch=16)


BAD = {
    "1:2": "must start at 0",
    "0.5:2, 1:4": "must start at 0",
    "10%:2": "must start at 0",
    "0:0": "0 learners",
    "0:1, 3:0": "the stage at 3 has 0 learners",
    "0:-1": "'0:-1'",
    "0:1.5": "'0:1.5'",
    "0:": "'0:'",
    ":1": "starts at ''",
    "0": "'0'",
    "": "''",
    "0:1,": "''",
    "0:1, ,5:2": "''",
    "0:1; 5:2": "'0:1; 5:2'",
    "0:1, x:2": "'x'",
    "0:1, -3:2": "'-3'",
    "0:1, 1e1:2": "'1e1'",
    "0:1, nan:2": "'nan'",
    "0:1, 1.2.3:2": "'1.2.3'",
    "0:1, %:2": "'%'",
    "0:1, 100%:2": "100%",
    "0:1, 250%:2": "250%",
    "0:1:2": "'0:1:2'",
    "paper-VI": "the presets are paper-I",
    "paper-1": "the presets are paper-I",
    "0:1, 3:2, 2:4": "the stage at 2 does not start after the stage at 3",
    "0:1, 3:2, 3:4": "the stage at 3 does not start after the stage at 3",
    "0:1, 50%:2, 5:4": "the stage at 5 does not start after the stage at 50%",
    "0:1, 0:2": "the stage at 0 does not start after the stage at 0",
    "0:1, 10:2": "at or after the end of 10 epochs",
    "0:1, 12:2": "at or after the end of 10 epochs",
    "0:1, 9.999:8": "one round of 8 learners",
    "0:1, 5:8, 5.01:1": "one round of 8 learners",
    "0:8, 0.001:1": "one round of 8 learners",
    "0:99999999": "one round of 99999999 learners",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_schedule_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(InputError) as caught:
        _plan(text)
    sentence = str(caught.value)
    assert BAD[text] in sentence
    assert "schedule" in sentence and "\n" not in sentence and len(sentence) < 300


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ([], "no stage"),
        ([{"at": 1, "learners": 2}], "must start at 0"),
        ([{"at": 0, "learners": 0}], "learners.schedule.0.learners = 0"),
        ([{"at": 0, "learners": 2, "steps": 0}], "learners.schedule.0.steps = 0"),
        ([{"at": 0, "learners": 2, "momentum": 1.0}], "learners.schedule.0.momentum = 1.0"),
        ([{"at": 0, "learners": 2, "batch": 0}], "learners.schedule.0.batch = 0"),
        ([{"at": 0}], "learners"),
        ([{"learners": 2}], "at"),
        ([{"at": 0, "learner": 2}], "did you mean learners?"),
        ([{"at": -1, "learners": 2}], "-1"),
        ([{"at": "soon", "learners": 2}], "'soon'"),
        ([{"at": 0, "learners": 2}, {"at": 0.0, "learners": 4}], "does not start after"),
        (3, "learners.schedule = 3"),
    ],
)
def test_a_bad_table_is_refused(tables: Any, named: str) -> None:
    with pytest.raises(InputError) as caught:
        _plan(tables)
    assert named in str(caught.value) and "\n" not in str(caught.value)
