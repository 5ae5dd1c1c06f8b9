"""What is measured: after each epoch validation samples, or without them the test split, which else comes last."""

import dataclasses
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.measures.id_count_groups import IdCountGroups
from cowrec.trainer.measures.quality import Quality
from cowrec.trainer.runtime.processes import Process

from .dataloading import Readers, training_sample
from .evaluation import evaluate
from .state import TrainState


class EpochQuality:
    """Measures a model after an epoch; all processes call together.

    Args:
        config: of the run.
        readers: of the run.
        process: this process.
        non_finite: makes the error for a logloss that is not finite, from where it was measured.
    """

    def __init__(
        self, config: RunConfig, readers: Readers, process: Process, non_finite: Callable[[str], Exception]
    ) -> None:
        self._readers, self._non_finite = readers, non_finite
        self._groups: IdCountGroups | None = None
        if config.evaluate.by_id_counts:
            self._groups = IdCountGroups.of(Path(config.data.dir), "test", process, readers.train.num_rows)
        self._train_sample = training_sample(config, readers.train, process)

    @property
    def tests_each_epoch(self) -> bool:
        """Whether the test split is measured after each epoch, for lack of validation samples."""
        return self._readers.validation is None

    def measure(self, state: TrainState) -> tuple[dict[str, Any], str]:
        """Returns the measures of an epoch, and a line for the terminal."""
        if self._readers.validation is None:
            values, text = self.measure_test(state)
            texts = [text]
        else:
            validation = self._finite(evaluate(state, self._readers.validation), "validation samples")
            known = validation.values().items()
            values = {f"validation_{key}": each for key, each in known if key.startswith(("auc", "logloss"))}
            texts = [f"validation {dataclasses.replace(validation, excess_logloss=None)}"]
        if self._train_sample:
            trained = evaluate(state, self._train_sample)
            values["train"] = trained.values()
            texts.append(f"train {trained}")
        return values, "  ".join(texts)

    def measure_test(self, state: TrainState) -> tuple[dict[str, Any], str]:
        """Returns the measures of the test split, and a text for the terminal."""
        test = self._finite(evaluate(state, self._readers.test, self._groups), "test split")
        return test.values(), f"test {test}"

    def _finite(self, quality: Quality, where: str) -> Quality:
        if not isfinite(quality.logloss):
            raise self._non_finite(where)
        return quality
