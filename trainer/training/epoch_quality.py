"""What is measured: after each epoch validation samples, or without them the test split, which else comes last."""

import dataclasses
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cowrec.data_pipeline import Reader
from cowrec.trainer.config.run import RunConfig
from cowrec.trainer.measures.id_count_groups import IdCountGroups
from cowrec.trainer.measures.logistic_regression import LogisticRegression
from cowrec.trainer.measures.quality import Quality
from cowrec.trainer.measures.tasks import Tasks
from cowrec.trainer.runtime.processes import Process, on_first

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
        self._config, self._readers, self._process, self._non_finite = config, readers, process, non_finite
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
            values = {f"validation_{key}": each for key, each in _auc_and_logloss(validation).items()}
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

    def regression(self, tasks: Tasks) -> tuple[dict[str, Any], str]:
        """Returns what logistic regression reaches on the same samples, and a text; the first process computes it.

        Nothing and the reason where there are more training samples than `evaluate.logistic_regression_rows`.
        """
        train, most = self._readers.train, self._config.evaluate.logistic_regression_rows
        if train.num_rows > most:
            why = f"{train.num_rows:,} training samples are more than evaluate.logistic_regression_rows = {most:,}"
            return {}, f"left out: {why}" if most else ""
        measured: list[dict[str, Quality]] = [{}]

        def measure() -> None:
            model = LogisticRegression(train.schema, next(self._alone(train, train.num_rows).epoch(0)))
            if self._readers.validation:
                measured[0]["validation"] = model.quality(self._alone(self._readers.validation), tasks)
            measured[0]["test"] = model.quality(self._alone(self._readers.test), tasks)

        on_first(self._process, measure)
        dist.broadcast_object_list(measured, src=0)
        first = next(iter(measured[0]))
        values = _auc_and_logloss(measured[0]["test"])
        if first == "validation":
            values |= {f"validation_{key}": each for key, each in _auc_and_logloss(measured[0][first]).items()}
        return values, f"{first} {measured[0][first]}"

    def _alone(self, reader: Reader, batch_size: int | None = None) -> Reader:
        """A reader of the same samples for one process, in the stored order, on the CPU."""
        first = self._readers.train.num_rows if reader.split == "train" and reader is self._readers.validation else 0
        rows = range(first, first + reader.num_rows)
        return Reader(self._config.data.dir, reader.split, rows=rows, batch_size=batch_size or reader.batch_size)

    def _finite(self, quality: Quality, where: str) -> Quality:
        if not isfinite(quality.logloss):
            raise self._non_finite(where)
        return quality


def _auc_and_logloss(quality: Quality) -> dict[str, Any]:
    """AUC and logloss, of several labels those of each too."""
    return {key: each for key, each in quality.values().items() if key.startswith(("auc", "logloss"))}
