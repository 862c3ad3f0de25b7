"""The options of bench/scaling.py: what cannot be measured is refused before anything is."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from shoal.errors import InputError

SCRIPT = Path(__file__).resolve().parents[2] / "bench/scaling.py"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "1,x"], "'x' is no number from 1"),
        (["--steps", "0"], "'0' is no number from 1"),
        (["--modes", "week"], "'week' is not weak, strong"),
        (["--repeats", "0"], "--repeats: '0' is no number"),
        (["--rounds", "-1"], "--rounds: '-1' is no number"),
        (["--cores", "0"], "--cores"),
        (["--link-gbit", "nan"], "nan is no rate above 0"),
        (["--nosuch"], "unrecognized arguments: --nosuch"),
    ],
)
def test_bad_options_are_one_sentence(options: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling", "config.toml", *options])
    with pytest.raises(InputError, match=words) as raised:
        runpy.run_path(str(SCRIPT))["parse"]()
    assert "\n" not in str(raised.value)


def test_numbers_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling", "config.toml", "--ranks", "4,1,4"])
    assert runpy.run_path(str(SCRIPT))["parse"]().ranks == [4, 1]
