"""The configuration of a run: all sections together, read from one TOML file with overrides, and saved to one."""

import dataclasses
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from math import sqrt
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from cowrec.data_pipeline import PrepareConfig
from cowrec.data_pipeline.preparation.config import plain_value, prepared_with
from cowrec.errors import SettingError, UserError
from cowrec.files import replace_file
from cowrec.models import ModelConfig, loss_of, require_model
from cowrec.models.own_code import is_import_path, require_beside, search_also
from cowrec.names import nearest_name, parse_count

from .sections import (
    AUTO,
    CheckpointConfig,
    ClipConfig,
    DataConfig,
    EvaluateConfig,
    IdConfig,
    OnlineConfig,
    OptimizerConfig,
    ShardingConfig,
    TrainConfig,
)

EMBEDDING_LR, RATE_SAMPLES = 2e-3, 2_000_000
"""Default of `optimizer.embedding_lr` at base batch 1,024, and the number of samples beyond which it is lower.

With more samples, rates fall over two epochs by default, since the mean of the weights was hardly measured there.
"""
DECAY_SAMPLES, DECAY_STEPS = 100_000, 100
"""Samples and steps of a run from which the default rates decay. Of few steps none may be a small one."""
FEW_STEPS = 200
"""With fewer steps, a run shows how short it is, not how good its values or its scaling rule are.

With fewer in an epoch, AUC was lower than at the default batch size, see `train.batch_size = "auto"`.
"""
MOST_AUTO_BATCH = 1 << 16
"""Largest `train.batch_size = "auto"`: 128 times the largest default."""
MOST_EPOCHS, FIXED_EPOCHS = 50, 2
"""Epochs of `train.epochs = "auto"`: the most of a run that its validation quality ends, and those of other runs."""
WAIT_STEPS, MOST_PATIENCE = 100, 4
"""Steps without a better epoch after which `train.epochs = "auto"` ends a run, and the most epochs they may be."""
_TO_CHANGE = "load_config(path, ['section.key=value', ...]) and dataclasses.replace change values"


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run; `dataclasses.replace` changes its values."""

    data: DataConfig = field(default_factory=DataConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    clip: ClipConfig = field(default_factory=ClipConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    id_table: IdConfig = field(default_factory=IdConfig)
    online: OnlineConfig = field(default_factory=OnlineConfig)

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(RunConfig).items():
            if not isinstance(value := getattr(self, name), kind):
                raise UserError(f"RunConfig.{name} must be a {kind.__name__}, got {value!r}; {_TO_CHANGE}")
        with _about("model"):
            require_model(self.model)
        with _about("train"):
            loss_of(self.train.loss, self.train.loss_options, tasks=0)

    @property
    def own_code(self) -> dict[str, str]:
        """Returns the keys that name code of the user's own, with its "module:name"."""
        named = {"model.name": self.model.name, "train.loss": self.train.loss}
        return {key: name for key, name in named.items() if is_import_path(name)}


def load_config(path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run's TOML file and applies `section.key=value` overrides; their values are TOML or bare words (strings).

    Without a path it returns the defaults. Raises UserError for a file that is missing or not TOML, an unknown key, or
    a value of the wrong type or out of range.
    """
    path = None if path is None else Path(path)
    sections, folder = ({}, Path.cwd()) if path is None else (_read_toml(path), path.parent)
    for override in overrides:
        apply_override(sections, override)
    search_also(*((folder, Path.cwd()) if _names_own_code(sections) else ()))
    with _blaming(overrides, path):
        config = config_from(sections)
        for key, name in config.own_code.items():
            with _about(key):
                require_beside(key, name, folder)
    return config


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Checks a configuration and applies overrides. Raises UserError as :func:`load_config` does."""
    config = checked_config(config)
    sections = to_plain(config)
    for override in overrides:
        apply_override(sections, override)
    with _blaming(overrides, None):
        return config_from(sections) if overrides else config


@contextmanager
def _blaming(overrides: Sequence[str], path: Path | None) -> Iterator[None]:
    """Adds the overrides that set the key of a SettingError, or the file, to its message."""
    try:
        yield
    except SettingError as error:
        blamed = [f"--set {override}" for override in overrides if _sets(override, error.keys)]
        raise UserError(f"{', '.join(blamed) or path or 'config'}: {error}") from None


@contextmanager
def _about(key: str) -> Iterator[None]:
    """Adds the key or section that is checked to an error for the user."""
    try:
        yield
    except SettingError:
        raise
    except UserError as error:
        raise SettingError(str(error), key) from error


def _sets(override: str, keys: Sequence[str]) -> bool:
    """Tells whether ``section.key=value`` sets one of the keys, a part of it, or its section."""
    parts = [part.strip() for part in override.partition("=")[0].split(".")]
    return any(all(one == other for one, other in zip(parts, key.split("."), strict=False)) for key in keys)


def _names_own_code(sections: Mapping[str, Any]) -> bool:
    tables = [(sections.get(section), key) for section, key in (("model", "name"), ("train", "loss"))]
    named = [table.get(key) for table, key in tables if isinstance(table, Mapping)]
    return any(isinstance(name, str) and is_import_path(name) for name in named)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; cowrec config init --output {path} writes one to begin with") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def apply_override(sections: dict[str, Any], override: str) -> None:
    """Sets ``section.key`` of nested sections to a TOML value, or to the text itself where it is no TOML."""
    path, equals, text = override.partition("=")
    *tables, key = (part.strip() for part in path.split("."))
    if not equals or not tables or not all((*tables, key)):
        raise UserError(f"--set takes section.key=value, got {override!r}; for example --set train.batch_size=8192")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    values = sections
    for depth, table in enumerate(tables, 1):
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise UserError(f"--set {override}: {'.'.join(tables[:depth])} = {values!r} in the file is not a section")
    values[key] = value


def with_values(config: RunConfig, **sections: Mapping[str, Any]) -> RunConfig:
    """Changes values in some sections, such as ``train={"epochs": 3}``."""
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


def checked_config(config: RunConfig) -> RunConfig:
    """Returns the configuration as its file would be read, with numpy's numbers as Python's.

    Raises UserError for a value of a wrong type.
    """
    if not isinstance(config, RunConfig):
        raise UserError(f"config must be a RunConfig, got {config!r}; {_TO_CHANGE}")
    return config_from(to_plain(config))


def with_defaults(
    config: RunConfig,
    samples: int,
    begun: RunConfig | None = None,
    *,
    validated: bool = False,
    stream: bool = False,
    fixed: bool = False,
) -> RunConfig:
    """Sets epochs, batch size, and `optimizer.embedding_lr`, `lr_decay` and `l2`, where a configuration has none.

    The rules are in :class:`TrainConfig` and :class:`OptimizerConfig`, their measurements in results/README.md. Rates
    fall for Adam alone, since Adagrad's fall by themselves, and not with a given `embedding_lr`, which may have been
    found without a decay, with `train.patience`, under which the end of the run is unknown, or with `train.average`,
    which stands in for a decay. L2 is inverse to the number of samples, so that the sum of the losses has one penalty,
    as under a normal prior of the weights; it grows with the epochs, since repeated samples are learnt by heart.

    Args:
        samples: number of samples of the training split.
        begun: configuration of the run that is resumed, whose values stay, also with more epochs.
        validated: whether the data set has a validation split.
        stream: whether training is on a stream, which has no end and repeats no sample: neither L2 nor a decay then
            follows from the size of the data set.
        fixed: whether the validation quality does not decide on the epochs.
    """
    if begun or not stream:
        config = _with_mean(config, samples, begun)
    given = config.train.patience
    config = _with_epochs(config, begun, validated=validated, fixed=fixed or stream or samples > RATE_SAMPLES)
    train, optimizer = config.train, config.optimizer
    patience = train.patience
    if begun:
        size, l2 = begun.train.batch_size, begun.optimizer.l2
        lr, decay = begun.optimizer.embedding_lr, begun.optimizer.lr_decay
    else:
        trained = samples - round(samples * train.validation_fraction)
        size = min(max(1 << max(trained // 100, 1).bit_length() - 1, 64), 512)
        if train.batch_size == AUTO:
            size = max(largest_batch(trained, 1, MOST_AUTO_BATCH), size)
        is_adam = "adam" in optimizer.embedding
        lr = EMBEDDING_LR * (sqrt(RATE_SAMPLES / samples) if is_adam and samples > RATE_SAMPLES else 1.0)
        size = train.batch_size if train.batch_size > 0 else size
        epoch_steps = -(-trained // size)
        if patience and not given:
            patience = _patience(epoch_steps)
        long = not stream and samples >= DECAY_SAMPLES and epoch_steps * train.epochs >= DECAY_STEPS
        decays = is_adam and long and optimizer.embedding_lr is None and not train.patience and not train.average
        decay = "linear" if decays else "none"
        again = 0 if stream else min(train.epochs, 4) if train.average else min(train.epochs - 1, 2)
        l2 = min(max(20 * again / max(samples, 1), 1e-6), 1e-2)
    defaults = {"embedding_lr": lr, "lr_decay": decay, "l2": l2}
    lacking = {key: value for key, value in defaults.items() if getattr(optimizer, key) is None}
    sizes = {"batch_size": max(train.batch_size, 0) or size, "patience": patience}
    return with_values(config, train=sizes, optimizer=lacking)


def _with_mean(config: RunConfig, samples: int, begun: RunConfig | None) -> RunConfig:
    """Decides on `train.average` where a configuration does not; see :class:`TrainConfig`."""
    if config.train.average is not None:
        return config
    if begun:
        return with_values(config, train={"average": begun.train.average})
    decays = config.optimizer.lr_decay not in (None, "none")
    kinds = {config.id_table.kind, *(config.id_table.of_table(name).kind for name in config.id_table.tables)}
    without = samples > RATE_SAMPLES or decays or "collisionless" in kinds or config.sharding.memory == "uvm"
    return with_values(config, train={"average": not without})


def _with_epochs(config: RunConfig, begun: RunConfig | None, *, validated: bool, fixed: bool) -> RunConfig:
    """Replaces `train.epochs` = "auto" by what "auto" stands for; see :class:`TrainConfig`."""
    train, keep_best = config.train, config.checkpoint.keep_best
    if train.epochs != AUTO:
        return config
    if begun:
        earlier = {key: getattr(begun.train, key) for key in ("epochs", "patience")}
        return with_values(config, train=earlier, checkpoint={"keep_best": begun.checkpoint.keep_best})
    if fixed or not train.average or not (validated or train.validation_fraction):
        return with_values(config, train={"epochs": FIXED_EPOCHS})
    return with_values(
        config,
        train={"epochs": MOST_EPOCHS, "patience": train.patience or 1},
        checkpoint={"keep_best": "logloss" if keep_best == "none" else keep_best},
    )


def _patience(epoch_steps: int) -> int:
    """Epochs without a better one after which a run ends."""
    return min(-(-WAIT_STEPS // max(epoch_steps, 1)), MOST_PATIENCE)


def largest_batch(samples: int, epochs: int, most: int = 1 << 62) -> int:
    """Finds the largest power of two, up to ``most``, with which so many epochs have FEW_STEPS steps; else 1."""
    enough = -(-FEW_STEPS // epochs)  # steps an epoch, of which the last may be short
    size = most
    while size > 1 and -(-samples // size) < enough:
        size >>= 1
    return size


def few_steps_warning(config: RunConfig, samples: int, steps: int, *, validated: bool = False) -> str:
    """Warns of fewer than FEW_STEPS steps; "" for other runs. ``samples`` are those of an epoch.

    ``validated`` tells whether there are validation samples.
    """
    epochs, size = config.train.epochs, config.train.batch_size
    if steps >= FEW_STEPS:
        return ""
    epoch_steps = -(-samples // size)
    smaller = largest_batch(samples, epochs)
    is_enough = -(-samples // smaller) * epochs >= FEW_STEPS
    remedy = f"train.batch_size to {smaller}, or " if is_enough else ""
    hold_out = "" if validated else "train.validation_fraction = 0.1, "
    return (
        f"warning: the run has {steps} steps, below {FEW_STEPS}: too few for train.batch_size = {size} to reach what"
        f" {'a smaller batch does' if is_enough else 'more steps would'}; set {remedy}train.epochs to"
        f" {-(-FEW_STEPS // epoch_steps)} together with {hold_out}train.patience = {_patience(epoch_steps)} and"
        ' checkpoint.keep_best = "logloss", since more epochs may learn rare ids by heart'
    )


def prepared_otherwise_warning(config: RunConfig, settings: Mapping[str, Any]) -> str:
    """Warns of `[prepare]` settings that a data set was not prepared with; "" without any."""
    there = prepared_with(settings)
    default = dataclasses.asdict(PrepareConfig())
    other = [
        f"prepare.{key} = {value!r} (the data set has {there[key]!r})"
        for key, value in dataclasses.asdict(config.prepare).items()
        if key in there and value not in (default[key], there[key])
    ]
    remedy = "has no effect on a data set that is there already; prepare it again by cowrec prepare, or leave it out"
    return f"warning: {', '.join(other)} {remedy}" if other else ""


def save_config(config: RunConfig, path: str | os.PathLike[str], comment: str = "") -> None:
    """Writes a configuration as TOML below a comment: every key that has a value, defaults included."""
    import tomli_w  # reading a configuration does not need it

    above = "".join(f"# {line}\n" for line in comment.splitlines())
    replace_file(Path(path), (above + tomli_w.dumps(to_plain(config))).encode())


def to_plain(config: RunConfig) -> dict[str, Any]:
    """Returns the keys of a configuration that have a value, by section."""
    plain: dict[str, Any] = _without_none(dataclasses.asdict(config))
    return plain


def first_difference(there: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """Describes the first key in which two configurations differ; None if they are equal."""
    for section in sorted(there.keys() | given.keys()):
        one, other = there.get(section, {}), given.get(section, {})
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key):
                return f"it has {section}.{key} = {one.get(key)!r}, but {other.get(key)!r} is requested"
    return None


def config_from(values: Mapping[str, Any]) -> RunConfig:
    # Strict JSON mode requires exact types, but accepts a list for a tuple and an int for a float. Values that JSON
    # lacks (TOML's dates) become strings, which the message shows.
    text = json.dumps(_without_none(_with_counts(RunConfig, values)), default=plain_value)
    try:
        return _adapter().validate_json(text, strict=True)
    except ValidationError as error:
        first, *others = error.errors()
        place, wanted = first["loc"], first["msg"][:1].lower() + first["msg"][1:]
        if place and str(place[-1]).startswith("literal["):  # a word or a value of another type: an error for each
            place = place[:-1]
            more = (other["msg"].removeprefix("Input should be ") for other in others if other["loc"][:-1] == place)
            wanted = ", or ".join([wanted, *more])
        key = ".".join(map(str, place))
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, SettingError):
            raise SettingError(str(cause), *cause.keys) from None
        if isinstance(cause, ValueError):
            # The message of a section's own check, which may lack the section's name.
            named = not key or f"{key}." in str(cause)
            raise SettingError(str(cause) if named else f"[{key}] {cause}", key) from None
        raise SettingError(f"{key} = {first['input']!r}: {wanted}", key) from None


def _with_counts(hint: Any, value: Any, key: str = "") -> Any:
    """Reads the texts of counts, such as "64K", where a whole number is expected.

    Raises SettingError if a key is unknown, or has a value where it is a section.
    """
    prefix = f"{key}." if key else ""
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise SettingError(f"{key} = {value!r} must be a section; write {key}.KEY = VALUE", key)
        hints = get_type_hints(hint)
        for name, given in value.items():
            if name not in hints:
                message = f"unknown key {prefix}{name} (= {given!r}); {_nearest_keys(name, hints, prefix)}"
                raise SettingError(message, prefix + name)
        return {name: _with_counts(hints[name], given, prefix + name) for name, given in value.items()}
    if isinstance(value, Mapping) and get_origin(hint) is dict:
        return {name: _with_counts(get_args(hint)[1], given, prefix + name) for name, given in value.items()}
    if isinstance(value, list) and get_origin(hint) is tuple:
        return [_with_counts(get_args(hint)[0], entry, key) for entry in value]
    if value == "auto" and key in ("train.batch_size", "train.epochs"):
        return AUTO
    if isinstance(value, str) and hint in (int, int | None):
        with _about(key):
            return parse_count(value, key)
    return value


@cache
def _adapter() -> TypeAdapter[RunConfig]:
    """Makes the validator of configurations once; pydantic takes tens of milliseconds."""
    return TypeAdapter(RunConfig)


def _nearest_keys(key: str, known: Mapping[str, Any], prefix: str) -> str:
    """Hints at equal keys of other sections, else at keys that end so (for lr, dense_lr), else at the nearest."""
    sections = {section.name: get_type_hints(section.default_factory) for section in dataclasses.fields(RunConfig)}
    everywhere = [(f"{section}.{name}", name) for section, keys in sections.items() for name in keys]
    ending = f"_{key.replace('learning_rate', 'lr')}"
    nearest = nearest_name(key, known)
    found = (
        [path for path, name in everywhere if name == key]
        or [prefix + name for name in known if name.endswith(ending)]
        or [prefix + name for name in known if name == nearest]
        or [path for path, name in everywhere if name.endswith(ending)]
    )
    return f"did you mean {' or '.join(found)}?" if found else f"known here: {', '.join(sorted(known))}"


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [_without_none(entry) for entry in value]
    return value
