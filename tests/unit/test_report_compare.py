"""Comparisons: means and standard errors, costs to a target, pairing, and the forms of the table."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
from report_logs import write_run

from shoal.errors import InputError
from shoal.report import tables
from shoal.report.compare import compare, cost_to, final_accuracy, fraction, paired, rows
from shoal.report.curves import curve, estimate, evaluated, learners, training_loss
from shoal.report.runs import Group, group_runs, load_run, load_runs


def three(tmp_path, name, mu, **options):
    return [write_run(tmp_path / f"{name}-{mu}-{seed}", name, mu, seed, **options) for seed in (1, 2, 3)]


def test_estimate_by_hand():
    assert estimate([1.0, 2.0, 6.0]).mean == 3.0
    assert estimate([1.0, 2.0, 6.0]).error == pytest.approx(math.sqrt(7 / 3))
    assert math.isnan(estimate([1.0]).error) and math.isnan(estimate([]).mean)


def test_row_of_a_group(tmp_path):
    directories = three(tmp_path, "II", 0.0)
    runs = load_runs(directories)
    (row,) = compare(directories, 96)
    values = [final_accuracy(run) for run in runs]
    assert values == [pytest.approx(100 * run.end["test"]["accuracy"]) for run in runs]
    assert (row.label, row.seeds, row.ended) == ("demo-II", 3, 3)
    assert row.accuracy.mean == pytest.approx(np.mean(values))
    assert row.accuracy.error == pytest.approx(np.std(values, ddof=1) / math.sqrt(3))
    assert row.serial_steps.mean == runs[0].rounds["serial_steps"][-1] and row.serial_steps.error == 0
    assert row.learner_steps.mean == runs[0].rounds["learner_steps"][-1]
    assert row.busy_rank_s.mean == pytest.approx(row.learner_steps.mean / 1000)
    assert row.allocated_rank_s.mean == pytest.approx(8 * row.serial_steps.mean / 1000)
    firsts = [int(np.argmax(run.evaluations["test_accuracy"] >= 0.96)) for run in runs]
    steps = [run.evaluations["serial_steps"][i] for run, i in zip(runs, firsts, strict=True)]
    assert row.to_target.reached == 3 and row.to_target.serial_steps.mean == pytest.approx(np.mean(steps))


def test_a_target_that_some_or_none_reach(tmp_path):
    runs = load_runs([write_run(tmp_path / str(s), seed=s, level=90 + 4 * s, noise=0) for s in (1, 2)])
    group = Group("g", tuple(runs))
    part, never = rows([group], 0.95)[0], rows([group], 99.9)[0]
    assert part.to_target.reached == 1
    assert part.to_target.serial_steps.mean == cost_to(0.95, "serial_steps")(runs[1])
    assert tables.cells([part])[1][0][-1].endswith(" (1/2)")
    assert tables.cells([never])[1][0][-2:] == ["never", "never"]


def test_a_target_reads_validation_where_there_is_one(tmp_path):
    run = load_run(write_run(tmp_path / "a", validation=True))
    assert cost_to(0.5, "serial_steps")(run) == run.evaluations["serial_steps"][0]
    assert cost_to(0.51, "serial_steps")(run) is None
    assert rows([Group("a", (run,))], 0.5)[0].to_target.measure == "validation"


def test_runs_that_have_not_ended(tmp_path):
    done = write_run(tmp_path / "1", seed=1, level=97, noise=0)
    going = write_run(tmp_path / "2", seed=2, level=50, noise=0, ended=False, epochs=3)
    row = compare([done, going])[0]
    assert (row.seeds, row.ended) == (2, 1) and row.accuracy.mean == pytest.approx(97)
    assert tables.cells([row])[1][0][1] == "1/2 ended"
    alone = compare([going])[0]
    assert alone.ended == 0 and 45 < alone.accuracy.mean < 51


def test_paired_over_common_seeds(tmp_path):
    def group(name: str, levels: dict[int, float]) -> Group:
        return Group(
            name,
            tuple(
                load_run(write_run(tmp_path / f"{name}{s}", seed=s, level=level, noise=0, epochs=2))
                for s, level in levels.items()
            ),
        )

    result = paired(group("a", {1: 97, 2: 96, 3: 50}), group("b", {2: 95, 1: 94, 4: 10}))
    assert result.seeds == (1, 2)
    assert result.difference.mean == pytest.approx(2.0) and result.difference.error == pytest.approx(1.0)


@pytest.mark.parametrize("target", [0, -0.5, 100.5, math.nan])
def test_targets_that_are_none(target):
    with pytest.raises(InputError, match="target accuracy"):
        fraction(target)


def test_fraction_and_percent():
    assert fraction(0.97) == 0.97 and fraction(97) == 0.97 and fraction(1) == 1.0


def test_the_forms_of_a_table_agree(tmp_path):
    table = rows(group_runs(load_runs(three(tmp_path, "I", 0.0) + three(tmp_path, "IV", 0.5))), 97)
    headers, body = tables.cells(table)
    plain = tables.text(table)
    assert len({len(line) for line in plain.splitlines()}) == 1
    assert [row[0] for row in body] == ["paper-I, mu = 0", "paper-IV, mu = 0.5"]
    for cell in (*headers, *(cell for line in body for cell in line)):
        assert cell in plain and cell in tables.markdown(table)
    assert {line.count("|") for line in tables.markdown(table).splitlines()} == {len(headers) + 1}
    data = json.loads(tables.as_json(table), parse_constant=pytest.fail)
    assert data[0]["accuracy"]["mean"] == table[0].accuracy.mean
    stream = io.StringIO()
    tables.show(table, stream)
    assert stream.getvalue() == plain + "\n"


def test_a_terminal_gets_the_same_figures(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "200")
    table, stream = compare(three(tmp_path, "II", 0.0)), Terminal()
    tables.show(table, stream)
    assert all(cell in stream.getvalue() for cell in tables.cells(table)[1][0])


def test_json_has_no_nan_with_one_seed(tmp_path):
    table = compare([write_run(tmp_path / "a", epochs=2)])
    assert json.loads(tables.as_json(table), parse_constant=pytest.fail)[0]["accuracy"]["error"] is None


def test_curves_align_by_position_and_outlive_a_short_run(tmp_path):
    long, short = (load_run(write_run(tmp_path / str(s), seed=s, epochs=e)) for s, e in ((1, 12), (2, 5)))
    both = curve(Group("g", (long, short)), evaluated("test_accuracy"), "epoch")
    one, two = (run.evaluations["test_accuracy"] for run in (long, short))
    assert np.array_equal(both.x, long.evaluations["epoch"])
    assert both.mean[:5] == pytest.approx((one[:5] + two) / 2) and np.array_equal(both.mean[5:], one[5:])
    assert both.error[:5] == pytest.approx(np.abs(one[:5] - two) / 2) and np.isnan(both.error[5:]).all()


def test_training_loss_is_the_mean_of_the_rounds_between_evaluations(tmp_path):
    run = load_run(write_run(tmp_path / "a"))
    consumed, x, loss = training_loss(run, "serial_steps")
    ends = run.evaluations["consumed"]
    inside = (run.rounds["consumed"] > ends[2]) & (run.rounds["consumed"] <= ends[3])
    assert loss[3] == pytest.approx(run.rounds["loss"][inside].mean())
    assert len(consumed) == len(x) == len(loss) == 12


def test_learners_are_a_step_line_from_zero(tmp_path):
    run = load_run(write_run(tmp_path / "a", "III"))
    x, count = learners(run.rounds, "consumed")
    assert x[0] == 0 and x[-1] == run.rounds["consumed"][-1] and len(x) == len(count)
    for i in range(len(x) - 1):
        assert (x[i + 1] - x[i]) == 32 * count[i]
