"""Figures are drawn for what runs there are, and refused in one sentence for what is none."""

from __future__ import annotations

import pytest
from report_logs import write_demo, write_run

from shoal.errors import InputError
from shoal.record.runlog import RunLog
from shoal.report.claims import by_schedule
from shoal.report.plot import plot_runs, plot_schedules
from shoal.report.runs import group_runs, load_runs
from shoal.report.style import PALETTE, line_style, thousands

FOUR = (("I", 0.0), ("I", 0.5), ("IV", 0.0), ("IV", 0.5))
PNG = b"\x89PNG"


def test_runs_as_png_with_the_data_s_caption(tmp_path):
    runs = [write_run(tmp_path / f"{name}{s}", name, seed=s) for name in ("II", "IV") for s in (1, 2)]
    output = plot_runs(runs, tmp_path / "figure.png")
    assert output == tmp_path / "figure.png" and output.read_bytes().startswith(PNG)
    text = plot_runs(runs, tmp_path / "figure.svg").read_text()
    for part in ("20% of training labels randomised", "serial steps", "learner-steps", "paper-IV (2 seeds)"):
        assert part in text


def test_runs_just_begun_and_without_evaluations(tmp_path):
    run = write_run(tmp_path / "a", epochs=0.3, ended=False)
    assert plot_runs([run], tmp_path / "figure.png").read_bytes().startswith(PNG)


def test_ranks_over_time_with_what_happened_to_them(tmp_path):
    run = write_run(tmp_path / "a", "V", epochs=4, ended=False)
    log = RunLog(run / "run.jsonl", lambda: 1.0)
    log.event("recovery", round=3, lost=[2], ranks=[4, 3])
    log.event("world", round=3, world=4, action="grow")
    log.event("world", round=3, world=3, action="release")
    log.event("resume", round=3, world=2)
    log.close()
    text = plot_runs([run], tmp_path / "figure.svg").read_text()
    marks = ("rank lost", "rank came", "rank left", "resumed", "resize")
    assert [mark for mark in marks if mark not in text] == []
    calm = write_run(tmp_path / "b", "I", epochs=4)
    text = plot_runs([calm], tmp_path / "figure.svg").read_text()
    assert "ranks alive" in text and [mark for mark in marks if mark in text] == []
    many = [write_run(tmp_path / f"m{n}", name, mu=mu) for n, (name, mu) in enumerate(FOUR)]
    assert "ranks alive" not in plot_runs(many, tmp_path / "figure.svg").read_text()


def test_regression_has_a_loss_for_an_accuracy(tmp_path):
    run = write_run(tmp_path / "a", epochs=3)
    log = (run / "run.jsonl").read_text().replace('"accuracy"', '"unused"')
    (run / "run.jsonl").write_text(log)
    text = plot_runs([run], tmp_path / "figure.svg").read_text()
    assert "test loss" in text and "test accuracy" not in text


def test_schedules_side_by_side(tmp_path):
    groups = by_schedule(group_runs(load_runs(write_demo(tmp_path / "runs", seeds=2))))
    text = plot_schedules(groups, tmp_path / "figure.svg", target=96).read_text()
    for part in ("reduction momentum μ = 0.5", "schedule V", "serial steps to 96% test accuracy", "never"):
        assert part in text
    few = {key: groups[key] for key in (("I", 0.0), ("V", 0.0))}
    assert plot_schedules(few, tmp_path / "few.png").read_bytes().startswith(PNG)


def test_no_pyplot_is_imported(tmp_path):
    import subprocess
    import sys

    run = write_run(tmp_path / "a", epochs=2)
    code = (
        "import sys; from shoal.report.plot import plot_runs; early = 'matplotlib' in sys.modules; "
        "plot_runs([sys.argv[1]], sys.argv[2]); sys.exit(early or 'matplotlib.pyplot' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(run), str(tmp_path / "figure.png")]
    assert subprocess.run(command, timeout=60).returncode == 0


def test_what_cannot_be_drawn(tmp_path):
    run = write_run(tmp_path / "a", epochs=1)
    with pytest.raises(InputError, match="ends in one of"):
        plot_runs([run], tmp_path / "figure.docx")
    with pytest.raises(InputError, match="no ending"):
        plot_runs([run], tmp_path / "figure")
    with pytest.raises(InputError, match="exists and is writable"):
        plot_runs([run], tmp_path / "none" / "figure.png")
    with pytest.raises(InputError, match="no runs to draw"):
        plot_schedules({}, tmp_path / "figure.png")
    empty = write_run(tmp_path / "b", epochs=0, ended=False)
    with pytest.raises(InputError, match="no round yet"):
        plot_runs([empty], tmp_path / "figure.png")


def test_lines_can_be_told_apart():
    styles = [line_style(i) for i in range(3 * len(PALETTE))]
    assert len({(s["color"], str(s["linestyle"])) for s in styles}) == len(styles)


def test_ticks():
    assert [thousands(v) for v in (0, 500, 1500, 2e6)] == ["0", "500", "1.5k", "2M"]
