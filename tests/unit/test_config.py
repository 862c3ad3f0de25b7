"""The config: what is dumped is what is loaded, and every bad key or value is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import config as configs
from shoal.config import Averaging, Config, Learners, LearningRate, Stage, Train
from shoal.errors import InputError

FIXED = settings(derandomize=True, deadline=None)

positive = st.integers(1, 10**6)
momentum = st.floats(0, 1, exclude_max=True)
stages = st.lists(
    st.builds(
        Stage,
        at=st.one_of(st.floats(0, 100), st.sampled_from(["5", "30%", "12.5%"])),
        learners=positive,
        steps=st.none() | positive,
        momentum=st.none() | momentum,
        batch=st.none() | positive,
    ),
    max_size=3,
).map(tuple)
configurations = st.builds(
    Config,
    name=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._+-]{0,9}\Z"),
    seed=st.integers(0, 2**63 - 1),
    data=st.builds(configs.Data, root=st.none() | st.text(max_size=9), validation=momentum),
    train=st.builds(Train, epochs=st.floats(1e-9, 1e9), batch=positive, local_momentum=momentum),
    learners=st.builds(Learners, schedule=st.one_of(st.text(max_size=12), stages), p=positive, r=positive),
    averaging=st.builds(Averaging, steps=positive, momentum=momentum),
    learning_rate=st.builds(
        LearningRate,
        base=st.floats(1e-300, 1e300),
        decay=st.one_of(
            st.sampled_from(["constant", "cosine", "polynomial"]),
            st.lists(st.tuples(st.floats(0, 1e6), st.floats(1e-9, 1e9)), max_size=3).map(tuple),
        ),
    ),
)


def _load(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    return configs.load(path, overrides)


def _refusal(tree: Mapping[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        configs.from_tree(tree, "run.toml")
    sentence = str(caught.value)
    assert sentence.startswith("run.toml: ") and "\n" not in sentence and len(sentence) < 400
    return sentence


@FIXED
@given(configurations)
def test_load_reads_what_dump_wrote(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    assert _load(tmp_path_factory.getbasetemp(), configs.dump(config)) == config


def test_dump_resolves_every_key() -> None:
    tree = configs.parse_toml(configs.dump(Config()))
    assert tree["averaging"] == {"steps": 1, "momentum": 0.0, "velocity": "displacement"}
    assert set(tree) == set(Config.__struct_fields__)
    for section, keys in tree.items():
        if isinstance(keys, dict):
            unset = {"root", "classes"} if section == "data" else set()
            assert set(keys) | unset == set(getattr(Config(), section).__struct_fields__)


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert _load(tmp_path, "") == Config()


def test_overrides(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        'name = "a"\n[averaging]\nsteps = 4\nmomentum = 0.5\n',
        "averaging.momentum=0.25",
        "learners.schedule=0:1, 3:2",
        'train.batch_mode="global"',
        "train.nesterov = true",
        "train.local_momentum=0.9",
        "learning_rate.decay=[[3, 0.1], [5.5, 0.5]]",
        "name=b-2",
        "train.epochs=7",
        "averaging.momentum=0.75",
    )
    assert config.averaging == Averaging(steps=4, momentum=0.75)
    assert config.learners.schedule == "0:1, 3:2"
    assert config.train.batch_mode == "global" and config.train.nesterov and config.train.epochs == 7.0
    assert config.learning_rate.decay == ((3, 0.1), (5.5, 0.5))
    assert config.name == "b-2"


@pytest.mark.parametrize("text", ["averaging.steps", "=3", "averaging.=3", ".steps=3", "a..b=3", ""])
def test_an_override_of_no_form_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"must have the form section\.key=value"):
        configs.override({}, text)


def test_an_override_through_a_value_is_refused() -> None:
    with pytest.raises(InputError, match=r"seed\.x cannot be set: seed is a value"):
        configs.override({"seed": 3}, "seed.x=1")


UNKNOWN = [
    ({"averagin": {"steps": 3}}, "averagin is not a known key; did you mean averaging?"),
    ({"averaging": {"stepss": 3}}, "averaging.stepss is not a known key; did you mean steps?"),
    ({"averaging": {"Momentum": 0.5}}, "averaging.Momentum is not a known key; did you mean momentum?"),
    ({"train": {"zzz": 1}}, "train.zzz is not a known key; known: epochs, batch"),
    ({"epochs": 3}, "epochs is not a known key"),
    ({"learners": {"schedule": [{"at": 0, "learner": 1}]}}, "did you mean learners?"),
]


@pytest.mark.parametrize(("tree", "named"), UNKNOWN)
def test_an_unknown_key_is_refused(tree: dict[str, Any], named: str) -> None:
    assert named in _refusal(tree)


BAD = [
    ("name", ""),
    ("name", "a b"),
    ("name", "../a"),
    ("name", ".hidden"),
    ("name", "a\n"),
    ("name", 3),
    ("seed", -1),
    ("seed", 2**63),
    ("seed", 1.5),
    ("seed", True),
    ("data", 3),
    ("data.root", 3),
    ("data.noise", 1.1),
    ("data.noise", -0.1),
    ("data.validation", 1.0),
    ("data.validation", -0.1),
    ("data.shape", [8, 0]),
    ("data.shape", 8),
    ("data.classes", 1),
    ("data.train", 0),
    ("data.test", 0),
    ("model.loss", "cross entropy"),
    ("model.hidden", [0]),
    ("model.hidden", 64),
    ("model.width", 0),
    ("model.batchnorm", 1),
    ("train.epochs", 0),
    ("train.epochs", -1.0),
    ("train.epochs", math.inf),
    ("train.epochs", math.nan),
    ("train.epochs", "3"),
    ("train.batch", 0),
    ("train.batch", 8.5),
    ("train.batch_mode", "globl"),
    ("train.local_momentum", 1.0),
    ("train.local_momentum", -0.5),
    ("train.local_momentum_at_reduction", "keep"),
    ("train.nesterov", "yes"),
    ("train.weight_decay", -1e-4),
    ("train.weight_decay", math.inf),
    ("train.target_accuracy", 1.5),
    ("train.patience", -1),
    ("train.batchnorm_eval", "fresh"),
    ("learners.schedule", 3),
    ("learners.p", 0),
    ("learners.r", 0),
    ("averaging.steps", 0),
    ("averaging.steps", -4),
    ("averaging.steps", 1.5),
    ("averaging.steps", "four"),
    ("averaging.steps", True),
    ("averaging.momentum", 1),
    ("averaging.momentum", 1.0),
    ("averaging.momentum", -0.1),
    ("averaging.momentum", math.nan),
    ("averaging.momentum", "0.5"),
    ("averaging.velocity", "slow"),
    ("learning_rate.base", 0),
    ("learning_rate.base", -0.1),
    ("learning_rate.base", math.inf),
    ("learning_rate.base", math.nan),
    ("learning_rate.base", "0.1"),
    ("learning_rate.decay", "linear"),
    ("learning_rate.decay", 0.1),
    ("learning_rate.decay", [0.1]),
    ("learning_rate.floor", 1.0),
    ("learning_rate.power", 0),
    ("learning_rate.warmup_epochs", -1),
    ("learning_rate.growth_warmup_epochs", -1),
    ("learning_rate.scaling", "quadratic"),
    ("learning_rate.base_learners", 0),
    ("run.backend", "cupy"),
    ("run.threads", 0),
    ("run.reproducible", "yes"),
    ("run.timeout_s", 0),
    ("run.checkpoint_epochs", -1),
    ("run.keep", 0),
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_bad_value_is_refused_by_key_and_value(key: str, value: Any) -> None:
    tree: dict[str, Any] = {}
    *sections, last = key.split(".")
    inner = tree
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[last] = value
    sentence = _refusal(tree)
    assert key in sentence
    assert (repr(value) if not isinstance(value, list) else str(value[-1])) in sentence


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"decay": [[1, 0]]}, "0"),
        ({"decay": [[-1, 0.5]]}, "-1"),
        ({"decay": [[1]]}, "[1]"),
        ({"decay": [[1, 0.1, 2]]}, "[1, 0.1, 2]"),
        ({"decay": [[1, math.inf]]}, "inf"),
    ],
)
def test_a_bad_step_of_the_decay_is_refused(keys: dict[str, Any], named: str) -> None:
    sentence = _refusal({"learning_rate": keys})
    assert "learning_rate.decay" in sentence and named in sentence


def test_the_words_of_a_choice_are_listed() -> None:
    assert "per_learner, global" in _refusal({"train": {"batch_mode": "x"}})
    assert "constant, cosine, polynomial" in _refusal({"learning_rate": {"decay": "linear"}})


@pytest.mark.parametrize(
    ("tree", "keys"),
    [
        ({"train": {"target_accuracy": 0.9}}, ["train.target_accuracy", "data.validation"]),
        ({"train": {"patience": 2}}, ["train.patience", "data.validation"]),
        ({"train": {"nesterov": True}}, ["train.nesterov", "train.local_momentum"]),
        ({"learning_rate": {"growth_warmup_epochs": 1}}, ["growth_warmup_epochs", "learning_rate.scaling"]),
    ],
)
def test_keys_that_do_not_go_together_are_refused(tree: dict[str, Any], keys: list[str]) -> None:
    sentence = _refusal(tree)
    assert all(key in sentence for key in keys)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.toml cannot be read \(No such file"):
        configs.load(tmp_path / "none.toml")
    with pytest.raises(InputError, match="cannot be read"):
        configs.load(tmp_path)
    with pytest.raises(InputError, match=r"config\.toml is not valid TOML.*line 2"):
        _load(tmp_path, "seed = 1\nname = run\n")
    with pytest.raises(InputError, match="is not valid TOML"):
        _load(tmp_path, "seed = 1\nseed = 2\n")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"binary\.toml is not valid TOML"):
        configs.load(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("averaging.momentum=0.5", ["averaging.momentum"]),
        ("seed=2", ["seed"]),
        ("learners.schedule=0:2", ["learners.schedule"]),
        ("run.reproducible=false", ["run.reproducible"]),
        ("run.threads=2", ["run.threads"]),
        ("name=other", []),
        ("run.keep=7", []),
        ("run.timeout_s=7", []),
        ("run.checkpoint_epochs=7", []),
    ],
)
def test_differences_are_what_changes_a_result(override: str, named: list[str]) -> None:
    tree = msgspec.to_builtins(Config())
    configs.override(tree, override)
    assert configs.differences(Config(), configs.from_tree(tree, "run.toml")) == named
