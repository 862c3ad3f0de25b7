"""The typed TOML config: read, overridden, checked and written in one place, once, before anything starts.

A Config is frozen; every key has a default, a type and a range, and an unknown key is refused. What a
schedule or a data set means is checked by the room that knows it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from shoal.errors import InputError
from shoal.refusals import Shape, explain

Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, lt=1)]
Amount = Annotated[float, Meta(ge=0)]
Rate = Annotated[float, Meta(gt=0)]
_Kind = TypeVar("_Kind", bound=Struct)
_NARROW = ("ring", "recursive-doubling", "rabenseifner")
_ANY_ORDER = (*_NARROW, "native")


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Data(_Section, frozen=True):
    """[data]: which set, and where."""

    set: str = "digits"
    """digits, digits-noisy, cifar10, hdf5 or synthetic"""
    root: str | None = None
    """cifar10: the folder; hdf5: the file"""
    noise: Annotated[float, Meta(ge=0, le=1)] = 0.2
    """digits-noisy: the share of training labels that is randomised"""
    validation: Share = 0.0
    """the share of the training set held out for targets and early stopping"""
    normalise: Literal["none", "channel"] = "none"
    """none: as they come, bytes as 0 .. 1; channel: mean 0, standard deviation 1 over the training set, by channel"""
    augment: Literal["none", "crop", "crop-flip"] = "none"
    """training images moved at random by up to `pad` pixels, zeros beyond the edge; crop-flip: half of them mirrored"""
    pad: Annotated[int, Meta(ge=0)] = 4
    """crop, crop-flip: the most pixels an image is moved; 0: it is only mirrored"""
    shape: tuple[Positive, ...] = (8, 8, 1)
    """synthetic: shape of one sample, (height, width, channels) or (features,)"""
    classes: Annotated[int, Meta(ge=2)] | None = None
    """synthetic, hdf5: number of classes; left out: 10, and as many as the training labels have"""
    train: Positive = 1024
    """synthetic: number of training samples"""
    test: Positive = 256
    """synthetic: number of test samples"""


class Model(_Section, frozen=True):
    """[model]: the net and its loss."""

    net: str = "convnet-s"
    """mlp, convnet-s, resnet18, resnet20 or senet18"""
    loss: Literal["cross-entropy", "mse", "own"] = "cross-entropy"
    """cross-entropy for labels, mse for regression targets; own: a function of a PyTorch model"""
    hidden: tuple[Positive, ...] = (64,)
    """mlp: widths of the hidden layers"""
    dropout: Share = 0.0
    """mlp: the share of each hidden layer's outputs that is dropped in training, by sample and epoch"""
    width: Positive = 16
    """all but mlp: channels of the first convolution; 64 is the paper's resnet18 and senet18"""
    batchnorm: bool = False
    """mlp, convnet-s: batch norm before each ReLU; the others always have it"""


class Train(_Section, frozen=True):
    """[train]: how long, and the local steps."""

    epochs: Rate = 10.0
    """training ends at the first reduction at or after this many epochs"""
    batch: Positive = 8
    """samples of one learner's step; with batch_mode = "global", of all learners together"""
    batch_mode: Literal["per_learner", "global"] = "per_learner"
    """per_learner: `P*B` grows with P; global: `P*B` stays at batch"""
    micro_batch: Annotated[int, Meta(ge=0)] = 0
    """compute a batch in pieces of at most so many samples, to save memory; batch norm sees pieces; 0: at once"""
    local_momentum: Share = 0.0
    """beta of `m <- beta*m + g`"""
    nesterov: bool = False
    """`w <- w - rate*(g + beta*m)` instead of `w - rate*m`"""
    local_momentum_at_reduction: Literal["reset", "average"] = "reset"
    """what happens to the learners' m at a reduction, for K > 1"""
    weight_decay: Amount = 0.0
    """`g <- g + weight_decay*w`"""
    decay_norms: bool = False
    """weight decay on biases and norms too"""
    batchnorm_eval: Literal["running", "recalibrate"] = "running"
    """statistics used in evaluation: the averaged running ones, or fresh ones through the anchor"""
    target_accuracy: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """stop when validation accuracy reaches this; 0 is off"""
    patience: Amount = 0.0
    """stop after this many epochs without a better validation accuracy; 0 is off"""


class Stage(_Section, frozen=True):
    """One table of learners.schedule: from `at` on, so many learners, and what else changes there."""

    at: float | str
    learners: Positive
    steps: Positive | None = None
    momentum: Share | None = None
    batch: Positive | None = None


class Learners(_Section, frozen=True):
    """[learners]: the schedule."""

    schedule: str | tuple[Stage, ...] = "0:1"
    """`"epoch:learners, ..."` (an epoch may be a fraction, or `30%` of the whole), a list of tables, or a preset"""
    p: Positive = 2
    """presets paper-I .. paper-V: the small number of learners"""
    r: Positive = 4
    """presets: large over small"""


class Averaging(_Section, frozen=True):
    """[averaging]: K, mu and the form of the velocity. mu = 0 is K-AVG."""

    steps: Positive = 1
    """K: local steps between two reductions"""
    momentum: Share = 0.0
    """mu: the reduction momentum"""
    velocity: Literal["displacement", "per_rate"] = "displacement"
    """displacement: `v <- mu*v + d`; per_rate (SlowMo's buffer): `v <- mu*v + d/rate`"""


class LearningRate(_Section, frozen=True):
    """[learning_rate]: a pure function of the position and of the stages before it."""

    base: Rate = 0.1
    """the rate before decay, warm-up and scaling"""
    decay: Literal["constant", "cosine", "polynomial"] | tuple[tuple[Amount, Rate], ...] = "constant"
    """`[[epoch, factor], ...]`, cosine, polynomial or constant"""
    floor: Share = 0.0
    """cosine and polynomial: the share of `base` that is left at the end"""
    power: Rate = 1.0
    """polynomial: `(1 - progress)^power`"""
    warmup_epochs: Amount = 0.0
    """linear warm-up at the start"""
    growth_warmup_epochs: Amount = 0.0
    """after a growth the scaling factor ramps over this many epochs"""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """times 1, P/base_learners, or its root"""
    base_learners: Positive = 1
    """the P at which scaling is 1"""


class Run(_Section, frozen=True):
    """[run]: how it is carried out. Nothing here but `reproducible`, `threads` and `wire` may change a result; and
    `algorithm`, where not `reproducible`."""

    backend: Literal["numpy"] = "numpy"
    """where tensors live"""
    threads: Positive = 1
    """BLAS threads of each rank"""
    reproducible: bool = True
    """sum over learners in the canonical order: the same bits at any number of ranks"""
    algorithm: Literal[
        "auto", "hierarchical", "exchange", "tree", "ring", "recursive-doubling", "rabenseifner", "native"
    ] = "auto"
    """how ranks that share no memory reduce; the first three keep the canonical order"""
    wire: Literal["float32", "float16", "bfloat16"] = "float32"
    """how numbers travel between them; narrow ones by ring, recursive-doubling and rabenseifner"""
    prefetch: bool = False
    """make the next batch in a thread while the step computes: for sets that are slow to give a sample"""
    timeout_s: Rate = 300.0
    """every wait for other ranks ends with an error after this long"""
    heartbeat_s: Rate = 1.0
    """a rank that is stopped or stuck in the kernel for three of these is excluded; without recovery, the job ends"""
    provider: Literal["reserve", "spawn"] = "reserve"
    """where ranks come from: all are started at once, and sleep when not needed; or they are spawned, and end"""
    respawn: bool = True
    """spawn: ranks that were lost are replaced"""
    min_ranks: Positive = 1
    """the fewest ranks that may be asked for while it runs"""
    max_ranks: Annotated[int, Meta(ge=0)] = 0
    """the most ranks there can be; 0: as many as are started"""
    min_learners: Positive = 1
    """the fewest learners that may be asked for while it runs"""
    max_learners: Positive = 1024
    """the most learners that may be asked for while it runs"""
    checkpoint_epochs: Amount = 1.0
    """a checkpoint every so many epochs; 0: only at the end or on a stop"""
    keep: Positive = 2
    """checkpoints kept"""
    stop_margin_s: Amount = 60.0
    """before the end of its batch job, a run stops with a checkpoint; so long before, besides what a round takes"""
    give_back_nodes: bool = False
    """in a Slurm job: release whole nodes that the rest of the schedule has no learners for, by a restart on fewer"""


class Config(_Section, frozen=True):
    """One run."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*\Z")] = "run"
    """of the run, and of its directory under runs/"""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 1
    """the key of everything random: initial weights, sample order, label noise, hold-out"""
    data: Data = Data()
    model: Model = Model()
    train: Train = Train()
    learners: Learners = Learners()
    averaging: Averaging = Averaging()
    learning_rate: LearningRate = LearningRate()
    run: Run = Run()


def load(path: Path, overrides: Iterable[str] = ()) -> Config:
    """The config in a TOML file, with `section.key=value` overrides. Raises InputError."""
    tree = read_toml(path)
    for text in overrides:
        override(tree, text)
    return from_tree(tree, str(path))


def read_toml(path: Path, kind: str = "config") -> dict[str, Any]:
    """The tables of a TOML file, of a kind that errors call it by. Raises InputError."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{kind} {path} cannot be read ({error.strerror}); name an existing TOML file") from None
    except ValueError as error:
        raise InputError(f"{kind} {path} is not valid TOML: {error}; correct that line") from None


def override(tree: dict[str, Any], text: str) -> None:
    """Put `section.key=value` into `tree`; the value is TOML, or else a plain string. Mutates `tree`."""
    path, equals, value = text.partition("=")
    if not equals or not all(path.strip().split(".")):
        raise InputError(f"--set {text} must have the form section.key=value, e.g. averaging.momentum=0.5")
    try:
        parsed = parse_toml(f"value = {value}")["value"]
    except ValueError:
        parsed = value.strip()
    put(tree, path.strip(), parsed)


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set `section.key` in nested dicts. Mutates `tree`. Raises InputError if the section is a value."""
    *sections, last = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise InputError(f"{path} cannot be set: {section} is a value, not a section; name a key of a section")
    tree[last] = value


def from_tree(tree: Mapping[str, Any], source: str) -> Config:
    """A checked Config from nested dicts; `source` names it in errors. Raises InputError."""
    config = convert(tree, Config, source)
    _check_finite(msgspec.to_builtins(config), (), source)
    _check(config, source)
    return config


def convert(tree: Mapping[str, Any], kind: type[_Kind], source: str) -> _Kind:
    """A Struct of this kind from nested dicts; `source` names them in errors. Raises InputError."""
    try:
        return msgspec.convert(dict(tree), kind, strict=True)
    except msgspec.ValidationError as error:
        settable = kind is Config
        raise InputError(explain(str(error), tree, source, Shape(kind, Stage, settable))) from None


def dump(config: Config) -> str:
    """The config as TOML with every key resolved; `load` reads it back to an equal Config."""
    import tomli_w

    return tomli_w.dumps(_without_none(msgspec.to_builtins(config)))


def default_directory(config: Config) -> Path:
    """Where a run goes that was given no --out."""
    return Path("runs") / config.name


def differences(left: Config, right: Config) -> list[str]:
    """The keys, as `section.key`, that differ and change the result; the name and most of [run] do not."""
    found = []
    for section in Config.__struct_fields__:
        a, b = getattr(left, section), getattr(right, section)
        if section == "name" or a == b:
            continue
        if not isinstance(a, Struct):
            found.append(section)
            continue
        for key in a.__struct_fields__:
            free = section == "run" and key not in ("reproducible", "threads", "wire")
            if getattr(a, key) != getattr(b, key) and not free:
                found.append(f"{section}.{key}")
    return found


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ValueError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


def _without_none(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_none(value) for key, value in tree.items() if value is not None}
    if isinstance(tree, (list, tuple)):
        return [_without_none(value) for value in tree]
    return tree


def _check_finite(value: Any, path: tuple[str, ...], source: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{source}: {'.'.join(path)} = {value} is not a finite number; give one")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, item in items:
        _check_finite(item, (*path, str(key)), source)


def _check(config: Config, source: str) -> None:
    """The rules that tie keys together."""
    train, rate, run = config.train, config.learning_rate, config.run
    needs_validation = [key for key in ("target_accuracy", "patience") if getattr(train, key)]
    for broken, sentence in (
        (
            needs_validation and not config.data.validation,
            f"train.{''.join(needs_validation[:1])} reads the validation set, and data.validation is 0; "
            "hold out a share of the training set, e.g. data.validation = 0.1",
        ),
        (
            train.nesterov and not train.local_momentum,
            "train.nesterov is true but train.local_momentum is 0; give a local momentum, or drop nesterov",
        ),
        (
            rate.growth_warmup_epochs and rate.scaling == "none",
            f"learning_rate.growth_warmup_epochs is {rate.growth_warmup_epochs:g} but learning_rate.scaling is "
            '"none", so there is nothing to ramp; set scaling to linear or sqrt, or growth_warmup_epochs to 0',
        ),
        (
            run.provider == "spawn" and not run.max_ranks,
            'run.provider is "spawn" and run.max_ranks is 0; say how many ranks there may be, e.g. run.max_ranks = 4',
        ),
        (
            run.reproducible and run.algorithm in _ANY_ORDER,
            f'run.algorithm = "{run.algorithm}" adds in an order that depends on the ranks, and run.reproducible is '
            "true; set run.reproducible = false, or take auto, hierarchical, exchange or tree",
        ),
        (
            run.reproducible and run.wire != "float32",
            f'run.wire = "{run.wire}" rounds what ranks send, so results depend on the ranks, and run.reproducible is '
            'true; set run.reproducible = false, or run.wire = "float32"',
        ),
        (
            run.wire != "float32" and run.algorithm not in ("auto", *_NARROW),
            f'run.algorithm = "{run.algorithm}" sends float32 only, and run.wire is "{run.wire}"; take auto, '
            f'{", ".join(_NARROW[:-1])} or {_NARROW[-1]}, or run.wire = "float32"',
        ),
    ):
        if broken:
            raise InputError(f"{source}: {sentence}")
