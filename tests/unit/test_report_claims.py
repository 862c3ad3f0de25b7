"""The paper's claims on runs of known outcome: what holds, what does not, what cannot be told."""

from __future__ import annotations

import pytest
from report_logs import LEVELS, SCHEDULES, write_run

from shoal.report.claims import Claim, by_schedule, check
from shoal.report.runs import group_runs, load_runs

SPREAD = {1: -0.1, 2: 0.0, 3: 0.1}


def groups(tmp_path, **changed):
    """Every schedule with exact levels plus SPREAD; `changed` maps e.g. II_0 to a level or seeds' levels."""
    directories = []
    for mu, levels in LEVELS.items():
        for name in SCHEDULES:
            level = changed.get(f"{name}_{mu:g}", levels[name])
            if level is None:
                continue
            for seed, shift in SPREAD.items():
                value = level[seed - 1] if isinstance(level, tuple) else level + shift
                directory = tmp_path / f"{name}-{mu}-{seed}"
                directories.append(write_run(directory, name, mu, seed, level=value, noise=0))
    return by_schedule(group_runs(load_runs(directories)))


def claim(claims: list[Claim], start: str) -> Claim:
    (found,) = [c for c in claims if c.text.startswith(start)]
    return found


def test_the_paper_s_outcome(tmp_path):
    found = groups(tmp_path)
    assert sorted(found) == sorted((name, mu) for name in SCHEDULES for mu in LEVELS)
    claims = check(found)
    assert [c.holds for c in claims] == [True] * 4
    assert "II 97.70 ± 0.06%" in claim(claims, "II is the best").evidence
    assert "I 96.00 ± 0.06% (ahead by +1.70 ± 0.00)" in claim(claims, "II is the best").evidence
    assert claim(claims, "II takes").evidence.endswith("= 1.60")
    assert "difference +4.40 ± 0.00" in claim(claims, "momentum").evidence
    assert str(claims[0]).startswith("holds ")


def test_another_outcome_is_reported_as_such(tmp_path):
    claims = check(groups(tmp_path, III_0=98.5))
    best = claim(claims, "II is the best")
    assert best.holds is False and "III 98.50 ± 0.06% (ahead by -0.80 ± 0.00)" in best.evidence


def test_within_one_standard_error_is_undecided(tmp_path):
    claims = check(groups(tmp_path, **{"IV_0": (97.3, 98.3, 97.4), "I_0.5": (90.0, 96.3, 99.0)}))
    best = claim(claims, "II is the best")
    assert best.holds is None and best.evidence.count("within one s.e.") == 1
    assert claim(claims, "momentum").holds is None
    assert "within one s.e." in claim(claims, "momentum").evidence


def test_missing_runs_are_named(tmp_path):
    claims = check(groups(tmp_path, **{"IV_0": None, "V_0.5": None}), 0.96)
    assert claim(claims, "II is the best").holds is None
    assert claim(claims, "II is the best").evidence == "no runs of IV at mu = 0"
    assert claim(claims, "V is the best").evidence == "no runs of V at mu = 0.5"
    assert claim(claims, "II takes").holds is True
    assert all(c.holds is None for c in check({}, 0.96))


@pytest.mark.parametrize(
    ("levels", "verdicts"),
    [
        ({"I_0": 90.0, "IV_0": 90.0}, (True, True, True)),
        ({"II_0": 90.0}, (False, False, False)),
        ({"I_0": 90.0, "II_0": 90.0, "IV_0": 90.0}, (None, None, None)),
    ],
)
def test_targets_that_one_side_never_reaches(tmp_path, levels, verdicts):
    claims = check(groups(tmp_path, **levels), 95.5)
    reached = [c for c in claims if c.text.startswith("II reaches 95.5%")]
    assert tuple(c.holds for c in reached) == verdicts
    assert all("never (0/3)" in c.evidence for c in reached)


def test_costs_to_a_target_are_compared_by_seed(tmp_path):
    claims = check(groups(tmp_path), 95)
    serial, speed = claim(claims, "II reaches 95% in fewer serial"), claim(claims, "II reaches 95% in at least")
    assert "3/3 seeds" in serial.evidence and "IV - II over 3 common seeds" in serial.evidence
    assert "ratio" in speed.evidence
    assert claim(claims, "II reaches 95% in fewer learner-steps").holds is True


def test_one_seed_decides_nothing(tmp_path):
    directories = [write_run(tmp_path / name, name, 0.0, 1) for name in ("I", "II", "III", "IV")]
    best = check(by_schedule(group_runs(load_runs(directories))))[0]
    assert best.holds is None and "one seed, so no s.e." in best.evidence


def test_other_schedules_are_left_out(tmp_path):
    other = write_run(tmp_path / "a", changes={"learners": {"schedule": "0:2, 6:8"}, "name": "mine"})
    named = write_run(tmp_path / "b", changes={"learners": {"schedule": "0:8"}, "name": "paper-IV-mu0"})
    assert list(by_schedule(group_runs(load_runs([other, named])))) == [("IV", 0.0)]
