"""Calibration: from rows of known parameters back to them, and to rows that were not among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from shoal import config as configs
from shoal.cli import commands
from shoal.config import from_tree
from shoal.errors import InputError
from shoal.jobs import machine
from shoal.report.calibrate import calibrate, points, predicted_s
from shoal.report.load import identity, sizes

KNOWN = {
    "step_s": 4e-5,
    "byte_s": 2e-10,
    "host_byte_s": 5e-10,
    "overhead_s": 3e-4,
    "crowding": 0.8,
    "jitter": 0.02,
}
PLACES = ((1, (1,)), (2, (1, 1)), (4, (2, 2)))


def bench(folder: Path, hidden: int, gbit: float | None, known: dict[str, float] = KNOWN) -> Path:
    """A file as bench/scaling.py writes it, of rounds that take what the known parameters say."""
    shape = {"set": "synthetic", "shape": [64]}
    config = from_tree({"data": shape, "model": {"net": "mlp", "hidden": [hidden]}}, "test")
    path = folder / f"{hidden}_{gbit}.jsonl"
    header = {"bench": "scaling", **identity(config, sizes(config)), "link_gbit": gbit, "config": configs.dump(config)}
    rows = [
        {"mode": "weak", "steps": steps, "ranks": ranks, "nodes": nodes, "algorithm": "?", "batch": 8}
        | {"step_ms": 5.0, "round_ms": 1.0}
        for steps in (1, 8)
        for ranks, nodes in PLACES
    ]

    def write(rows: list[dict[str, Any]]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in [header, *rows]))

    write(rows)
    write([row | {"round_ms": 1e3 * predicted_s(at, known)} for row, at in zip(rows, points([path]), strict=True)])
    return path


def test_what_was_measured_over_two_links_predicts_a_third(tmp_path: Path) -> None:
    files = [bench(tmp_path, hidden, gbit) for hidden in (64, 16384) for gbit in (0.1, 1.0)]
    found = calibrate(points(files))
    assert max(abs(found.errors)) < 0.01 and found.crosses
    third = [bench(tmp_path, hidden, None) for hidden in (256, 8192)]
    for point in points(third):
        assert predicted_s(point, found.values) == pytest.approx(point.round_s, rel=0.05)


def test_a_machine_file_is_written_and_read(tmp_path: Path) -> None:
    file, written = bench(tmp_path, 4096, 1.0), tmp_path / "mine.toml"
    ended = CliRunner().invoke(commands, ["calibrate", str(file), "-o", str(written), "--link-gbit", "10"])
    assert "off by" in ended.output and "crowding" in ended.output
    network = machine.load(str(written)).network
    assert network.host is not None and network.host.links is not None
    assert network.host.links.crossing_byte_s > 0.8e-9 and "rows" in network.host.origin
    words = ["calibrate", str(file), "-o", str(written), "--base", str(machine.FOLDER / "summit.toml")]
    CliRunner().invoke(commands, words, catch_exceptions=False)
    assert machine.load(str(written)).node.gpus == 6 and machine.load(str(written)).network.nccl is None


def test_what_cannot_be_calibrated_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    for text, words in (
        ("", "has no header"),
        ("{", "is not JSON lines"),
        ('{"bench": "step", "model": {}}\n', "is of bench step"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=words) as raised:
            points([path])
        assert "\n" not in str(raised.value)
    lines = bench(tmp_path, 64, None).read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"ranks": 1,' not in line))
    with pytest.raises(InputError, match="no weak row of 1 rank"):
        points([path])
    path.write_text("".join(line for line in lines if '"ranks": 1,' in line or '"bench"' in line))
    with pytest.raises(InputError, match="one number of ranks"):
        calibrate(points([path]))


@pytest.mark.parametrize(
    ("line", "broken", "words"),
    [
        (0, {"config": "["}, "the config in .* is not TOML"),
        (0, {"link_gbit": 0}, "link_gbit"),
        (0, {"numbers": None}, "numbers"),
        (1, {"round_ms": float("nan")}, "round_ms"),
        (1, {"step_ms": 0}, "step_ms"),
        (2, {"nodes": []}, "nodes"),
        (2, {"ranks": 0}, "ranks"),
    ],
)
def test_a_broken_line_is_refused(line: int, broken: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = bench(tmp_path, 64, None)
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    lines[line] |= broken
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    with pytest.raises(InputError, match=words) as raised:
        points([path])
    assert "\n" not in str(raised.value)


def test_scaling_is_drawn(tmp_path: Path) -> None:
    path, figure = bench(tmp_path, 64, None), tmp_path / "scaling.png"
    header, *rows = map(json.loads, path.read_text().splitlines())
    header |= {"cpu": "a CPU", "cores": 2, "blas": "a BLAS"}
    more = {"samples_s": 10.0, "low_ms": 0.9, "high_ms": 5e3, "repeats": 9, "coverage": 0.96, "reduction": 0.1}
    fair = {"base": 1, "efficiency": 0.9, "efficiency_low": 0.8, "efficiency_high": 1.0}
    rows = [row | more | {"oversubscribed": row["ranks"] > 2} | (fair if row["ranks"] < 4 else {}) for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in [header, *rows]))
    CliRunner().invoke(commands, ["plot", "--scaling", str(path), "-o", str(figure)], catch_exceptions=False)
    assert figure.stat().st_size > 10_000
    for broken, words in (({"round_ms": 0}, "round_ms"), ({"mode": None}, "mode")):
        path.write_text("".join(json.dumps(row) + "\n" for row in [header, *rows, rows[0] | broken]))
        with pytest.raises(InputError, match=words):
            CliRunner().invoke(commands, ["plot", "--scaling", str(path), "-o", str(figure)], catch_exceptions=False)
    path.write_text(json.dumps(header) + "\n")
    with pytest.raises(InputError, match="has no row of strong or weak scaling"):
        CliRunner().invoke(commands, ["plot", "--scaling", str(path), "-o", str(figure)], catch_exceptions=False)
