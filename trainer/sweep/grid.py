"""The grid of a sweep: which combinations it runs, and the configuration of each."""

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
        """The run's own configuration, of what all runs share."""
        return dataclasses.replace(
            shared,
            train=dataclasses.replace(shared.train, batch_size=self.batch_size, seed=self.seed),
            optimizer=dataclasses.replace(shared.optimizer, scaling=self.rule),
            clip=shared.clip if self.clip == "on" else dataclasses.replace(shared.clip, rule="none"),
        )


@dataclass(frozen=True)
class Grid:
    """What is varied; every combination is one run.

    Attributes:
        batch_sizes: samples per step.
        rules: scaling rules.
        clips: "on", "off" or both.
        seeds: number of seeds, from the configuration's on.

    Raises:
        ValueError: a value that is unknown, out of range or there twice.
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
        """Seed by seed, so that a sweep cut short has seen the whole grid."""
        return [
            Cell(rule, batch_size, clip, first_seed + seed)
            for seed in range(self.seeds)
            for batch_size in self.batch_sizes
            for rule in self.rules
            for clip in self.clips
        ]
