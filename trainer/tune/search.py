"""What a study searches: the values, their ranges, and the configuration of each trial."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, log
from typing import Any

from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.sharded_model.hyperparameters import derived_clip, derived_hyperparameters

VALUES = ("embedding_lr", "dense_lr", "l2")
"""Keys of `[optimizer]` that a study searches."""
_DEFAULT_FACTOR = 10.0
_EDGE = 0.05

Range = tuple[float, float]


@dataclass(frozen=True)
class Search:
    """Settings of a study.

    Attributes:
        batch_size: samples per step of all trials.
        metric: of the validation samples, "logloss" or "auc"; a trial's value is that of its best epoch.
        ranges: (lowest, highest) of a value; None: not searched. By default a tenth to ten times the configuration's
            value, except for 0, which is not searched.
        validation_fraction: of the training samples, where neither the data nor the configuration have any.
        patience: epochs without a better value after which a trial ends, where the configuration has none; 0: never.
        prune: from the second epoch on, end a trial that is worse than the median of the others at that epoch.
        seed: of the search; all trials train with the configuration's seed.
    """

    batch_size: int
    metric: str = "logloss"
    ranges: Mapping[str, Range | None] = dataclasses.field(default_factory=dict)
    validation_fraction: float = 0.1
    patience: int = 1
    prune: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"--batch-size must be at least 1, got {self.batch_size}")
        if self.metric not in ("logloss", "auc"):
            raise ValueError(f"--metric {self.metric!r} is not known; known: logloss, auc")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"--validation-fraction must be above 0 and below 1, got {self.validation_fraction}")
        for key, value in {"patience": self.patience, "seed": self.seed}.items():
            if value < 0:
                raise ValueError(f"--{key} must be at least 0, got {value}")
        for name, bounds in self.ranges.items():
            if bounds and not 0 < bounds[0] < bounds[1] < inf:
                raise ValueError(f"{_flag(name)} needs 0 < LOWEST < HIGHEST, got {bounds[0]:g},{bounds[1]:g}")

    def based_on(self, config: RunConfig) -> RunConfig:
        """The configuration with base values for the study's batch size: its own, scaled by its own rule."""
        at_size = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=self.batch_size))
        derived, clip = derived_hyperparameters(at_size), derived_clip(at_size)
        clip_values: dict[str, Any] = vars(clip)
        known = {each.name for each in dataclasses.fields(config.optimizer)}
        values = {key: value for key, value in dataclasses.asdict(derived).items() if key in known}
        return dataclasses.replace(
            at_size,
            optimizer=dataclasses.replace(config.optimizer, base_batch_size=self.batch_size, **values),
            clip=dataclasses.replace(config.clip, **clip_values),
        )

    def searched(self, base: RunConfig) -> dict[str, Range]:
        """The ranges of the values that are searched.

        Raises:
            ValueError: nothing is searched, or a range does not include the configuration's value.
        """
        found = {}
        for name in VALUES:
            own = getattr(base.optimizer, name)
            default = (own / _DEFAULT_FACTOR, own * _DEFAULT_FACTOR) if own else None
            bounds = self.ranges.get(name, default)
            if bounds is None:
                continue
            if not bounds[0] <= own <= bounds[1]:
                raise ValueError(
                    f"{_flag(name)} {bounds[0]:g},{bounds[1]:g} does not include the first trial's, the configuration's"
                    f" optimizer.{name} = {own:g} at batch size {self.batch_size}; widen the range, or change the value"
                    f" with --set optimizer.{name}=VALUE"
                )
            found[name] = bounds
        if not found:
            raise ValueError(f"nothing to search: give a range with {', '.join(map(_flag, VALUES))}")
        return found

    def of_trials(self, base: RunConfig, *, has_validation: bool) -> RunConfig:
        """The configuration that all trials share: with validation samples, and as few checkpoints as possible.

        ``has_validation``: whether the data set has a validation split.
        """
        train, checkpoint = base.train, base.checkpoint
        metric: Any = self.metric
        return dataclasses.replace(
            base,
            train=dataclasses.replace(
                train,
                validation_fraction=train.validation_fraction or (0.0 if has_validation else self.validation_fraction),
                # Where learning rates fall over the epochs, a trial that ends early says nothing about the whole run.
                patience=train.patience or (0 if base.optimizer.rates_follow_epochs else self.patience),
            ),
            checkpoint=dataclasses.replace(checkpoint, keep_last=1, keep_best=metric),
        )


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """A configuration with the values of a trial."""
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **values))


def hints(best: Mapping[str, Any], ranges: Mapping[str, Range], epochs: int) -> list[str]:
    """Messages about where better values may be found.

    For each value within a twentieth of its range, in logarithms, from an end of it, and where the last of several
    epochs was the best.

    Args:
        best: line of the best trial.
        ranges: that were searched.
        epochs: most epochs of a trial.
    """
    found = []
    for name, (low, high) in ranges.items():
        share = log(best[name] / low) / log(high / low)
        if _EDGE < share < 1 - _EDGE:
            continue
        wider = (low / _DEFAULT_FACTOR, high) if share <= _EDGE else (low, high * _DEFAULT_FACTOR)
        found.append(
            f"the best optimizer.{name} = {best[name]:.4g} is at the edge of the searched {low:g} to {high:g};"
            f" continue with {_flag(name)} {wider[0]:g},{wider[1]:g} and more --trials"
        )
    if best["best_epoch"] == epochs > 1:
        found.append(
            f"the best epoch, {epochs}, was the last one; a study with more of them (--set train.epochs={2 * epochs},"
            " another --output) may find better values"
        )
    return found


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
