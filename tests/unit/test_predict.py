"""Predictions: the formulas against counting by hand, published figures at scales left out, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from shoal.cli import commands
from shoal.comm.algorithms import cost, hand_over, on_node
from shoal.comm.network import Buffers, Library, Network
from shoal.comm.tuning import Links
from shoal.config import Config, Run, from_tree
from shoal.errors import InputError
from shoal.jobs import machine
from shoal.jobs.predictions import Options, tables
from shoal.report import validation
from shoal.report.intervals import Median
from shoal.report.load import load_of, sizes
from shoal.report.predict import Load, Site, largest_of, predict, reduction, resize_s, round_of

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "jobs/experiments/digits.toml"
LINKS = Links(step_s=1e-5, message_s=1e-6, byte_s=1e-10, crossing_byte_s=1e-9)
LOAD = Load(step_s=0.01, batch=8, numbers=1_000_000, state=3_000_000, samples=1024)


def site(**how: object) -> Site:
    network = Network(host=Buffers(origin="a test", links=LINKS), **{"jitter": 0.0, "overhead_s": 0.0, **how})  # type: ignore[arg-type]
    return Site("test", network, 4, "host", 8)


def test_a_round_is_its_steps_and_its_reduction() -> None:
    found = round_of(Run(), LOAD, site(), (8, 4), (3, 16))
    assert found.algorithm == "shared" and found.wait_s == 0
    assert found.steps_s == pytest.approx(2 * 3 * 0.02)
    assert found.reduction_s == pytest.approx(2 * 1e-5 + 4e6 * (4 + 4) / 4 * 1e-10)


def test_between_nodes_it_is_what_the_tuner_chooses_at_the_cost_that_is_stated() -> None:
    name, seconds = reduction(Run(), 1_000_000, site(), (8, 8))
    assert name == "hierarchical"
    spent = cost("hierarchical", 8, (4, 4), 1_000_000)
    assert seconds == pytest.approx(LINKS.seconds(spent, 4) + LINKS.seconds(on_node(4, 1_000_000), 4))
    assert reduction(Run(algorithm="exchange"), 1_000_000, site(), (8, 8))[0] == "exchange"


def test_waiting_for_the_slowest_grows_with_ranks_and_shrinks_with_steps() -> None:
    assert largest_of(1) == 0 and largest_of(2) == pytest.approx(0.564, abs=0.03)
    one, eight = (round_of(Run(), LOAD, site(jitter=0.05), (4, 4), (steps, 8)) for steps in (1, 8))
    assert one.wait_s / one.steps_s == pytest.approx(8**0.5 * eight.wait_s / eight.steps_s)
    crowded = round_of(Run(), LOAD, site(crowding=0.5), (4, 4), (1, 8))
    assert crowded.steps_s == pytest.approx(0.01 * 2.5)


def test_only_nodes_that_are_new_are_sent_the_state() -> None:
    assert resize_s(LOAD, site(), 4, 2) == resize_s(LOAD, site(), 2, 4) == resize_s(LOAD, site(), 0, 8) == 0
    assert resize_s(LOAD, site(), 4, 16) == pytest.approx(LINKS.seconds(hand_over(3, 3_000_000), 4))
    assert [hand_over(count, 1).steps for count in (1, 2, 3, 4, 7, 8)] == [1, 2, 2, 3, 3, 4]


def test_a_schedule_adds_up() -> None:
    config = from_tree({"learners": {"schedule": "0:4, 50%:8"}, "train": {"epochs": 2.0}}, "test")
    found = predict(config, LOAD, site())
    assert [(stage.forecast.rounds, stage.ranks, stage.nodes) for stage in found.stages] == [(32, 4, 1), (16, 8, 2)]
    first, second = found.stages
    assert found.seconds == pytest.approx(32 * first.round.seconds + 16 * second.round.seconds + second.resize_s)
    assert found.busy_s == pytest.approx(0.01 * found.learner_steps)
    assert found.node_s == pytest.approx(2 * found.seconds)
    assert found.used_node_s == pytest.approx(first.seconds + 2 * second.seconds)
    assert 0 < found.efficiency < 1


def test_a_librarys_forms() -> None:
    between = {"start_s": 1.0, "short_s": 2.0, "short_byte_s": 3.0, "long_s": 50.0, "long_byte_s": 1.0}
    rings = Library(form="rings", node_s=7, node_byte_s=2, **between)
    assert rings.seconds(10, 1, 1) == 0
    assert rings.seconds(10, 4, 1) == pytest.approx(7 + 1.5 * 10 * 2)
    assert rings.seconds(1, 8, 2) == pytest.approx(1 + 5)
    assert rings.seconds(1000, 16, 4) == pytest.approx(1 + 2 * 50 + 2 * 15 / 16 * 1000)
    doubling = Library(form="doubling", **between)
    assert doubling.seconds(100, 8, 2) == pytest.approx(1 + 3 * 150)


def test_nccl_at_a_scale_left_out_and_what_ships() -> None:
    known = validation.published()
    table = next(t for t in known.allreduce if t.form == "rings")
    for out in validation.left_out(table):
        assert np.median(abs(out.errors)) <= 0.15, out.ranks
    ships = machine.load("summit").network
    fitted = validation.nccl_of_abci(known.allreduce)
    for name in (*validation.NAMES, *validation.NODE_NAMES):
        assert getattr(ships.nccl.allreduce, name) == pytest.approx(getattr(fitted, name), rel=2e-3)  # type: ignore[union-attr]
    rows = [validation.met(row, validation.efficiency(row, fitted)) for row in known.training]
    assert sum(rows) >= 0.8 * len(rows)


def test_an_interval_of_the_median() -> None:
    nine = Median.of([5, 1, 9, 3, 7, 2, 8, 4, 6])
    assert (nine.value, nine.low, nine.high) == (5, 2, 8) and nine.coverage == pytest.approx(1 - 20 / 512)
    assert Median.of([1, 2, 3]).low == 1 and Median.of([1, 2, 3]).coverage == pytest.approx(0.75)
    assert Median.of([4.0]) == Median(4.0, 4.0, 4.0, 0.0)


def test_cifar10_is_known_without_its_files() -> None:
    model = {"net": "resnet18", "width": 64}
    config = from_tree({"data": {"set": "cifar10", "root": "nowhere"}, "model": model}, "test")
    found = sizes(config)
    assert found.samples == 50_000 and 11.1e6 < found.numbers < 11.3e6 and found.state > 3 * 11.1e6


def bench_file(folder: Path, config: Config) -> Path:
    from shoal.report.load import identity

    path = folder / "step.jsonl"
    header = {"bench": "step", **identity(config, sizes(config))}
    path.write_text(json.dumps(header) + "\n" + json.dumps({"ranks": 1, "batch": 4, "step_ms": 2.0}) + "\n")
    return path


def test_a_benchs_step_is_used_and_another_nets_refused(tmp_path: Path) -> None:
    config = from_tree({}, "test")
    path = bench_file(tmp_path, config)
    found = load_of(config, None, path)
    assert (found.step_s, found.batch) == (2e-3, 4)
    with pytest.raises(InputError, match=r"was measured with net convnet-s .* the config has net mlp"):
        load_of(from_tree({"model": {"net": "mlp"}}, "test"), None, path)
    with pytest.raises(InputError, match="must be given, once"):
        load_of(config, None, None)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"step_ms": math.nan}, "`float` > 0.0"),
        ({"step_ms": math.inf}, "`float` <= "),
        ({"step_ms": "2"}, "got `str`"),
        ({"batch": 0}, "`int` >= 1"),
        ({"bench": "step"}, "the headers of several"),
    ],
)
def test_a_benchs_broken_line_is_refused(broken: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = from_tree({}, "test")
    path = bench_file(tmp_path, config)
    header, row = path.read_text().splitlines()
    path.write_text(header + "\n" + json.dumps({**json.loads(row), **broken}) + "\n")
    with pytest.raises(InputError, match=words) as raised:
        load_of(config, None, path)
    assert "\n" not in str(raised.value)


def test_a_networks_figures_are_finite(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = (machine.FOLDER / "summit.toml").read_text(encoding="utf-8")
    path.write_text(text.replace("step_s = 1.78e-06", "step_s = inf"))
    with pytest.raises(InputError, match=r"links\.step_s = inf cannot be used"):
        machine.load(str(path))


def test_a_machine_without_nccls_allreduce_is_not_told_to_take_another_algorithm(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = (machine.FOLDER / "slurm-generic.toml").read_text(encoding="utf-8")
    path.write_text(text + '\n[network.nccl]\norigin = "a guess"\n')
    with pytest.raises(InputError, match=r"no \[network.nccl.allreduce\].*needs; add it$"):
        list(tables(str(path), DIGITS, Options(step_ms=1, buffers="nccl")))


@pytest.mark.parametrize(
    ("where", "options", "words"),
    [
        ("local", Options(step_ms=1), "local has no parameters for MPI on host buffers"),
        ("lsf-generic", Options(step_ms=1, buffers="nccl"), "has no parameters for NCCL"),
        ("summit", Options(step_ms=1, ranks=(60_000,)), "take 10000 nodes, and a job on summit gets at most 4600"),
        ("summit", Options(step_ms=1, weak=True), "--weak puts a learner on each rank"),
        ("summit", Options(step_ms=1, ranks_per_node=1000), "1000 ranks a node cannot be"),
        ("summit", Options(step=Path("no.jsonl")), "cannot be read"),
        ("sumit", Options(step_ms=1), "did you mean summit"),
        ("summit,", Options(step_ms=1), "'' is not a known machine"),
        ("summit", Options(step_ms=math.nan), "a step of nan ms cannot be"),
        ("summit", Options(step_ms=math.inf), "a step of inf ms cannot be"),
        ("summit", Options(step_ms=1, weak=True, ranks=(6,), schedules=("paper-I",)), "so no --schedules"),
    ],
)
def test_what_cannot_be_predicted_is_one_sentence(where: str, options: Options, words: str) -> None:
    with pytest.raises(InputError, match=words) as raised:
        list(tables(where, DIGITS, options))
    assert "\n" not in str(raised.value)


def test_links_that_are_not_all_given_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = (machine.FOLDER / "frontier.toml").read_text(encoding="utf-8")
    path.write_text(text.replace("message_s = 1e-06\n", "", 1))
    with pytest.raises(InputError, match=r"links.*message_s") as raised:
        machine.load(str(path))
    assert "\n" not in str(raised.value)


def test_a_machine_file_that_is_no_toml_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("about = = 1")
    with pytest.raises(InputError, match=r"machine .*mine\.toml is not valid TOML"):
        machine.load(str(path))


def test_an_unknown_key_of_a_network_is_named(tmp_path: Path) -> None:
    text = (ROOT / "jobs/machines/summit.toml").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(text.replace("short_byte_s", "short_bytes_s", 1))
    with pytest.raises(InputError, match=r"short_bytes_s is not a known key; did you mean short_byte_s"):
        machine.load(str(path))


def test_tables_and_a_figure(tmp_path: Path) -> None:
    figure = tmp_path / "cost.png"
    words = ["predict", "summit,frontier", str(DIGITS), "--step-ms", "1", "--schedules", "paper", "-o", str(figure)]
    ended = CliRunner().invoke(commands, words, catch_exceptions=False)
    assert figure.stat().st_size > 10_000
    assert all(f"paper-{name}" in ended.output for name in ("I", "II", "III", "IV", "V"))
    assert "nothing was run" in ended.output and "estimate" in ended.output
    one = CliRunner().invoke(commands, ["schedule", "--machine", "summit", "--step-ms", "1", str(DIGITS)])
    assert "hierarchical" in one.output and "rank-hours" in one.output
    for kind in ("device", "nccl"):
        words = ["predict", "lassen", str(DIGITS), "--step-ms", "1", "--buffers", kind, "--weak", "--ranks", "4,64"]
        assert "64 learners" in CliRunner().invoke(commands, words, catch_exceptions=False).output
