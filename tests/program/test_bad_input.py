"""Bad input: one clear sentence, once, exit status 2, soon, and nothing written over."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import jobs
import numpy as np
import pytest
from jobs import EXPERIMENTS

RANKS = 3
LIMIT_S = 15.0
"""it takes 1 to 2 s; 5 s are promised, on a machine that is not busy with other tests too"""
DIGITS = EXPERIMENTS / "digits.toml"
TINY: dict[str, Any] = {
    "data": {"set": "synthetic", "train": 96, "test": 32},
    "model": {"net": "mlp", "hidden": [8]},
    "train": {"epochs": 2, "batch": 4},
    "learners": {"schedule": "0:2"},
}

SETTINGS = {
    "unknown section": ("trian.batch=8", r"trian is not a known key.*train"),
    "mistyped key": ("train.batchs=8", r"train\.batchs is not a known key.*did you mean batch\?"),
    "a fraction for a count": ("averaging.steps=2.5", r"averaging\.steps = 2\.5.*int"),
    "unknown net": ("model.net=convnet-xl", r"convnet-xl.*convnet-s"),
    "unknown loss": ("model.loss=hinge", r"model\.loss = 'hinge'.*cross-entropy"),
    "unknown set": ("data.set=digit", r"data\.set is 'digit'.*did you mean 'digits'"),
    "schedule from 1": ('learners.schedule="1:2, 3:4"', r"starts at epoch 1, and must start at 0"),
    "schedule not increasing": ('learners.schedule="0:1, 5:2, 3:4"', r"stage at 3 does not start after.*at 5"),
    "schedule of another form": ('learners.schedule="0=1"', r"'0=1'.*is not epoch:learners"),
    "unknown preset": ("learners.schedule=paper-VI", r"'paper-VI' is not a preset.*paper-V"),
    "0 learners": ('learners.schedule="0:1, 3:0"', r"stage at 3 has 0 learners"),
    "0 learners in a table": ("learners.schedule=[{at = 0, learners = 0}]", r"learners = 0 cannot be used.*>= 1"),
    "K = 0": ("averaging.steps=0", r"averaging\.steps = 0.*>= 1"),
    "mu = 1": ("averaging.momentum=1.0", r"averaging\.momentum = 1\.0.*< 1"),
    "mu below 0": ("averaging.momentum=-0.1", r"averaging\.momentum = -0\.1.*>= 0"),
    "rate 0": ("learning_rate.base=0", r"learning_rate\.base = 0.*> 0"),
    "negative rate": ("learning_rate.base=-0.1", r"learning_rate\.base = -0\.1.*> 0"),
    "rate nan": ("learning_rate.base=nan", r"learning_rate\.base = nan.*finite|learning_rate\.base = nan.*> 0"),
    "rate inf": ("learning_rate.base=inf", r"learning_rate\.base = inf.*finite"),
    "weight decay inf": ("train.weight_decay=inf", r"train\.weight_decay = inf.*finite"),
    "epochs inf": ("train.epochs=inf", r"train\.epochs = inf.*finite"),
    "0 epochs": ("train.epochs=0", r"train\.epochs = 0.*> 0"),
    "negative seed": ("seed=-1", r"seed = -1.*>= 0"),
    "seed too large": (f"seed={2**63}", r"seed = 9223372036854775808"),
    "a name that leads elsewhere": ("name=../other", r"name = '\.\./other'"),
    "patience without validation": ("train.patience=2", r"train\.patience reads the validation set"),
    "nesterov without momentum": ("train.nesterov=true", r"train\.nesterov is true"),
    "setting without a value": ("train.batch", r"--set train\.batch must have the form"),
    "section under a value": ("seed.x=1", r"seed is a value"),
    "a stage shorter than a round": ("averaging.steps=400", r"one round of.*steps x batch 8 takes.*longer"),
    "a batch that does not divide": (
        "train={batch = 8, batch_mode = 'global', epochs = 10}",
        r"a batch of 8 .*3 learners evenly.*multiple of 3",
    ),
}
"""a --set for the digits config, and what the sentence says"""


def _refused(job: jobs.Job, pattern: str, folder: Path, before: Mapping[str, bytes | None]) -> str:
    """Check the end of a job that was refused; returns its sentence."""
    with job:
        ended = job.end(LIMIT_S)
    print(f"refused after {ended.wall_s:.2f} s")
    assert ended.status == 2, ended
    said = [line for line in ended.output.splitlines() if line.startswith("shoal: ")]
    assert len(said) == 1, ended.output
    assert re.search(pattern, said[0]), said[0]
    assert "Traceback" not in ended.output
    assert jobs.contents(folder) == before
    return said[0]


def _configured(folder: Path, **sections: Any) -> Path:
    return jobs.write_config(folder / "config.toml", {**TINY, **sections})


@pytest.mark.parametrize("case", SETTINGS)
def test_a_setting(tmp_path: Path, case: str) -> None:
    setting, pattern = SETTINGS[case]
    schedule = ["--set", 'learners.schedule="0:3"'] if "divide" in case else []
    before = jobs.contents(tmp_path)
    job = jobs.launch(tmp_path, RANKS, DIGITS, "--out", tmp_path / "run", "--set", setting, *schedule)
    _refused(job, pattern, tmp_path, before)


@pytest.mark.parametrize("case", ["mistyped key", "schedule not increasing"])
def test_a_setting_under_a_bare_mpiexec(tmp_path: Path, case: str) -> None:
    setting, pattern = SETTINGS[case]
    job = jobs.bare(tmp_path, RANKS, "train", DIGITS, "--out", tmp_path / "run", "--set", setting)
    _refused(job, pattern, tmp_path, {})


def _arrays(**changed: Any) -> dict[str, np.ndarray]:
    labels = np.arange(24) % 3
    arrays = {"x_train": np.ones((24, 8, 8, 1), np.float32), "y_train": labels}
    return {**arrays, "x_test": arrays["x_train"], "y_test": labels, **changed}


X, Y = _arrays()["x_train"], _arrays()["y_train"]
TARGETS = np.ones(24, np.float32)
DATA_FILES: dict[str, tuple[dict[str, np.ndarray], dict[str, Any], str]] = {
    "a label past the classes": (_arrays(y_test=Y + (Y == 2)), {"classes": 3}, r"y_test\[2\] is 3.*0 \.\.\. 2"),
    "flat samples for a convnet": (_arrays(x_train=X.reshape(24, 64), x_test=X.reshape(24, 64)), {}, r"\(64,\)"),
    "targets for cross-entropy": (_arrays(y_train=TARGETS, y_test=TARGETS), {}, r"cross-entropy.*regression targets"),
}


@pytest.mark.parametrize("case", DATA_FILES)
def test_data(tmp_path: Path, case: str) -> None:
    arrays, options, pattern = DATA_FILES[case]
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.update(arrays)
    config = _configured(tmp_path, data={"set": "hdf5", "root": str(tmp_path / "data.h5"), **options}, model={})
    before = jobs.contents(tmp_path)
    _refused(jobs.launch(tmp_path, RANKS, config, "--out", tmp_path / "run"), pattern, tmp_path, before)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _cifar10(folder: Path, sizes: Mapping[str, int]) -> Path:
    folder.mkdir()
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        with (folder / name).open("wb") as file:
            file.truncate(sizes.get(name, 30_730_000))  # a sparse file of zeros
    return folder


BROKEN_DATA: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a missing file": ("hdf5", Path.unlink, r"data\.h5 does not exist"),
    "a truncated file": ("hdf5", _cut, r"data\.h5 cannot be read as HDF5.*truncated"),
    "truncated CIFAR-10": (
        "cifar10",
        lambda path: (path.unlink(), _cifar10(path, {"data_batch_3.bin": 30_729_000})),
        r"data_batch_3\.bin is truncated: it has 30729000 bytes, but must have 30730000",
    ),
}


@pytest.mark.parametrize("case", BROKEN_DATA)
def test_broken_data(tmp_path: Path, case: str) -> None:
    name, break_it, pattern = BROKEN_DATA[case]
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.update(_arrays())
    break_it(tmp_path / "data.h5")
    config = _configured(tmp_path, data={"set": name, "root": str(tmp_path / "data.h5")}, model={})
    before = jobs.contents(tmp_path)
    _refused(jobs.launch(tmp_path, RANKS, config, "--out", tmp_path / "run"), pattern, tmp_path, before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config.toml and its run, done, in run/."""
    folder = tmp_path_factory.mktemp("finished")
    jobs.done(jobs.launch(folder, 2, _configured(folder), "--out", folder / "run"))
    return folder


OTHER_RUNS = {
    "a run that is there": ([], r"run holds a run already; give another --out, or --resume"),
    "another seed": (["--resume", "--set", "seed=2"], r"a run of another config \(seed differ\)"),
    "another net": (["--resume", "--set", "model.hidden=[9]"], r"another config \(model\.hidden differ\)"),
}


@pytest.mark.parametrize("case", OTHER_RUNS)
def test_a_directory_that_holds_a_run(finished: Path, case: str) -> None:
    options, pattern = OTHER_RUNS[case]
    before = jobs.contents(finished)
    arguments = [finished / "config.toml", "--out", finished / "run", *options]
    bare = len(options) == 3
    job = jobs.bare(finished, RANKS, "train", *arguments) if bare else jobs.launch(finished, RANKS, *arguments)
    _refused(job, pattern, finished, before)


def test_a_directory_that_holds_a_part_of_a_run(tmp_path: Path, finished: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.h5").write_bytes((finished / "run" / "checkpoint.h5").read_bytes())
    before = jobs.contents(tmp_path)
    job = jobs.launch(tmp_path, RANKS, finished / "config.toml", "--out", tmp_path / "run")
    _refused(job, r"run holds a run already", tmp_path, before)


@pytest.mark.parametrize("case", ["a file", "not writable"])
def test_a_directory_that_cannot_be_made(tmp_path: Path, case: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "closed").mkdir(mode=0o500)
    # root may write anywhere but in the kernel's own folders
    closed = Path("/proc/shoal") if os.geteuid() == 0 else tmp_path / "closed" / "run"
    out = {"a file": tmp_path / "file", "not writable": closed}[case]
    config = _configured(tmp_path)
    before = jobs.contents(tmp_path)
    job = jobs.launch(tmp_path, RANKS, config, "--out", out)
    said = _refused(job, r"cannot be made|cannot be written", tmp_path, before)
    assert str(out) in said


def _sweep(folder: Path, **settings: Any) -> Path:
    _configured(folder)
    return jobs.write_config(folder / "sweep.toml", {"name": "s", "base": "config.toml", **settings})


STARTS: dict[str, tuple[Callable[[Path], list[object]], str]] = {
    "no such config": (lambda folder: [folder / "nix.toml"], r"nix\.toml cannot be read \(No such file"),
    "wrong TOML": (lambda folder: [_write(folder / "x.toml", b"seed = = 1")], r"x\.toml is not valid TOML.*line 1"),
    "not text": (lambda folder: [_write(folder / "x.toml", b"\xff\xfe\x00")], r"x\.toml is not valid TOML.*utf-8"),
    "no such script": (lambda folder: [folder / "nix.py"], r"script .*nix\.py does not exist"),
    "--set for a script": (
        lambda folder: ["--set", "seed=2", _write(folder / "x.py", b"print('ran')")],
        r"--set, --out and --resume are for configs",
    ),
    "--out for a script": (
        lambda folder: ["--out", folder / "run", _write(folder / "x.py", b"print('ran')")],
        r"--set, --out and --resume are for configs",
    ),
    "words after a config": (lambda folder: [_configured(folder), "more", "words"], r"more words"),
    "unknown key in a sweep": (lambda folder: [_sweep(folder, sedes=[1], seeds=[1])], r"sweep\.toml.*sedes"),
    "no base": (lambda folder: [_sweep(folder, base="nix.toml", seeds=[1])], r"nix\.toml cannot be read"),
    "bad value in a grid": (lambda folder: [_sweep(folder, grid={"averaging.steps": [1, 0]})], r"averaging\.steps = 0"),
    "one run twice": (lambda folder: [_sweep(folder, seeds=[1, 1])], r"two of its runs are the same"),
    "a seed in a grid": (lambda folder: [_sweep(folder, grid={"seed": [1, 2]})], r"\[grid\] cannot set seed"),
    "an empty --out": (lambda folder: [_configured(folder), "--out", ""], r"'--out': it is empty"),
    "a sweep for more ranks": (lambda folder: [_sweep(folder, seeds=[1], ranks=9)], r"take 9 ranks and there are 3"),
    "--set for a sweep": (lambda folder: [_sweep(folder, seeds=[1]), "--set", "train.epochs=1"], r"--set"),
}


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("case", STARTS)
def test_what_is_to_be_started(tmp_path: Path, case: str) -> None:
    make, pattern = STARTS[case]
    arguments = make(tmp_path)
    before = jobs.contents(tmp_path)
    _refused(jobs.launch(tmp_path, RANKS, *arguments), pattern, tmp_path, before)


def test_a_config_is_no_sweep(tmp_path: Path) -> None:
    config = _configured(tmp_path)
    before = jobs.contents(tmp_path)
    job = jobs.Job(tmp_path, [*jobs.SHOAL, "sweep", "-n", RANKS, config, "--out", tmp_path / "out"])
    _refused(job, r"config\.toml: .*a sweep has name, base", tmp_path, before)


def test_ranks_with_different_configs(tmp_path: Path) -> None:
    one = _configured(tmp_path)
    other = jobs.write_config(tmp_path / "other.toml", {**TINY, "averaging": {"momentum": 0.5}})
    before = jobs.contents(tmp_path)
    start = [*jobs.SHOAL, "train", "--out", tmp_path / "run"]
    job = jobs.mpiexec(tmp_path, "-n", 1, *start, one, ":", "-n", 2, *start, other)
    _refused(job, r"the config.* on world rank 1, 2 differs from that on rank 0", tmp_path, before)


def test_ranks_of_which_one_has_no_config(tmp_path: Path) -> None:
    config = _configured(tmp_path)
    before = jobs.contents(tmp_path)
    start = [*jobs.SHOAL, "train", "--out", tmp_path / "run"]
    job = jobs.mpiexec(tmp_path, "-n", 2, *start, config, ":", "-n", 1, *start, tmp_path / "nix.toml")
    _refused(job, r"on world rank 2: .*nix\.toml cannot be read", tmp_path, before)


@pytest.mark.parametrize("bare", [False, True], ids=["launch", "mpiexec"])
def test_a_loss_that_is_not_finite(tmp_path: Path, bare: bool) -> None:
    """Found in training, so a log is there by then; the checkpoint before it stays."""
    rates = {"base": 0.05, "decay": [[1, 1e18]]}
    config = _configured(tmp_path, learning_rate=rates, train={"epochs": 4, "batch": 4})
    arguments = [config, "--out", tmp_path / "run"]
    job = jobs.bare(tmp_path, RANKS, "train", *arguments) if bare else jobs.launch(tmp_path, RANKS, *arguments)
    with job:
        ended = job.end(LIMIT_S)
    assert ended.status == 2, ended
    said = [line for line in ended.output.splitlines() if line.startswith("shoal: ")]
    assert len(said) == 1 and "Traceback" not in ended.output, ended.output
    assert re.search(r"loss of learner \d in round \d+ is not finite, at learning rate 5e\+16", said[0])
    last = jobs.history(tmp_path / "run")[-1]
    assert last["event"] == "failure" and last["reason"] in said[0]
    saved = [event for event in jobs.history(tmp_path / "run") if event["event"] == "checkpoint"]
    assert [event["round"] for event in saved] == [12]
    assert not (tmp_path / "run" / "DONE").exists()
    again = jobs.done(jobs.Job(tmp_path, [*jobs.SHOAL, "digest", tmp_path / "run"]))
    assert re.fullmatch(r"[0-9a-f]{64}\n", again)
