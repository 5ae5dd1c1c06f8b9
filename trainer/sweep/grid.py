"""The grid of a sweep: its combinations and the configuration of each run."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from cowrec.sparse_opt import SCALING_RULES
from cowrec.trainer.config.run import RunConfig


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Attributes:
        rule: scaling rule.
        batch_size: samples per step.
        clip: "on", the configuration's clip rule, or "off".
        seed: of initial values and shuffling.
    """

    rule: str
    batch_size: int
    clip: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.rule}-{self.batch_size}-clip_{self.clip}-seed{self.seed}"

    def config(self, shared: RunConfig) -> RunConfig:
        """The run's configuration, made from the one that all runs share."""
        return dataclasses.replace(
            shared,
            train=dataclasses.replace(shared.train, batch_size=self.batch_size, seed=self.seed),
            optimizer=dataclasses.replace(shared.optimizer, scaling=self.rule),
            clip=shared.clip if self.clip == "on" else dataclasses.replace(shared.clip, rule="none"),
        )


COMPETITORS = ("cowclip", "linear", "none")
"""Scaling rules with which a configuration's own rule is compared unless others are asked for."""


def default_rules(config: RunConfig) -> list[str]:
    """The configuration's scaling rule and its main competitors."""
    return list(dict.fromkeys((config.optimizer.scaling, *COMPETITORS)))


@dataclass(frozen=True)
class Grid:
    """Values that a sweep varies; each combination is one run.

    Attributes:
        batch_sizes: samples per step.
        rules: scaling rules.
        clips: "on", "off" or both.
        seeds: number of seeds; they count up from the configuration's seed.

    Raises:
        ValueError: a value that is unknown, out of range or repeated.
    """

    batch_sizes: Sequence[int]
    rules: Sequence[str]
    clips: Sequence[str]
    seeds: int

    def __post_init__(self) -> None:
        for what, values, known in (("rules", self.rules, SCALING_RULES), ("clip", self.clips, ("on", "off"))):
            for value in values:
                if value not in known:
                    raise ValueError(f"--{what} {value!r} is not known; known: {', '.join(known)}")
        for option, given in {"batch-sizes": self.batch_sizes, "rules": self.rules, "clip": self.clips}.items():
            if not given or len(set(given)) < len(given):
                raise ValueError(f"--{option} needs one value or several different ones, got {list(given)}")
        for option, least in {"batch-sizes": min(self.batch_sizes), "seeds": self.seeds}.items():
            if least < 1:
                raise ValueError(f"--{option} must be at least 1, got {least}")

    def cells(self, first_seed: int) -> list[Cell]:
        """The runs, seed by seed, so that an interrupted sweep has covered the grid with some seeds."""
        return [
            Cell(rule, batch_size, clip, first_seed + seed)
            for seed in range(self.seeds)
            for batch_size in self.batch_sizes
            for rule in self.rules
            for clip in self.clips
        ]
