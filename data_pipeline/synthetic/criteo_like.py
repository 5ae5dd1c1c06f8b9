"""Criteo-shaped synthetic data from a planted model, whose best possible AUC is known and saved."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from cowrec.data_pipeline.dataset.schema import (
    LABEL,
    RESERVED_ROWS,
    TRUE_LOGIT,
    DenseField,
    Schema,
    SparseField,
    library_versions,
)
from cowrec.data_pipeline.dataset.writer import SHARD_ROWS, ShardWriter, new_folder
from cowrec.data_pipeline.parallel import ordered_map

from .metrics import best_quality
from .planted import PILOT_ROWS, Draw, PlantedModel, intercept_for

# Distinct values of C1..C26 in the 45,840,617 rows of Criteo's Kaggle training set.
CRITEO_SIZES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
NUM_DENSE = 13
UNSCALED_SIZE = 100
"""Fields up to this size are not scaled: a smaller log still has all weekdays and devices."""

CHUNK_ROWS = 1 << 16
TRAIN, TEST, PILOT = 0, 1, 2


@dataclass(frozen=True)
class SynthesizeConfig:
    """Settings of a synthetic data set. The default million samples suffice to learn from in one epoch.

    Attributes:
        rows: training samples.
        test_rows: test samples, independent of `rows`. The exact AUC takes 20 bytes of memory each.
        seed: seed of all effects and draws.
        vocabulary_scale: share of Criteo's vocabulary sizes; 1 gives Criteo's 33.8 million ids. Fields are not scaled
            below 100 ids.
        skew: exponent of the ids' power law, P(rank) ~ rank^-skew.
        ctr: mean click probability.
        id_effect: standard deviation of an id's own effect on the logit.
        interaction_effect: standard deviation of the effect of one pair of ids.
        interaction_rank: components of the vectors whose products are the interactions.
        dense_effect: standard deviation of a dense feature's slope.
        shard_rows: samples per Parquet file.
    """

    rows: int = 1_000_000
    test_rows: int = 100_000
    seed: int = 0
    vocabulary_scale: float = 0.01
    skew: float = 1.1
    ctr: float = 0.25
    id_effect: float = 0.21
    interaction_effect: float = 0.04
    interaction_rank: int = 4
    dense_effect: float = 0.3
    shard_rows: int = SHARD_ROWS

    def __post_init__(self) -> None:
        for name in ("rows", "test_rows", "interaction_rank", "shard_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if not 0 < self.vocabulary_scale <= 100:
            raise ValueError(f"vocabulary_scale must be in (0, 100], got {self.vocabulary_scale}")
        if not 0 < self.ctr < 1:
            raise ValueError(f"ctr must be between 0 and 1, got {self.ctr}")
        for name in ("skew", "id_effect", "interaction_effect", "dense_effect"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and at least 0, got {getattr(self, name)}")


def synthesize(
    output: str | os.PathLike[str],
    config: SynthesizeConfig | None = None,
    *,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Schema:
    """Writes a synthetic data set; memory grows only with `test_rows`.

    Args:
        output: a new or empty folder.
        config: settings of the data set.
        overwrite: replaces an existing data set.
        progress: called with the number of samples just written.

    Returns:
        The schema; `best` has the quality of the true probabilities on the test split.

    Raises:
        ValueError: `output` is not empty.
        OSError: the disk is full.
    """
    config = config or SynthesizeConfig()
    model = _planted(config)
    schema = _schema(config, model)
    with new_folder(output, overwrite=overwrite) as folder:
        splits = {}
        seen: list[Draw] = []
        for name, stream, rows in (("train", TRAIN, config.rows), ("test", TEST, config.test_rows)):
            writer = ShardWriter(folder, name, schema, config.shard_rows)
            for draw in _drawn(model, stream, rows):
                writer.write(_table(schema, draw))
                if stream == TEST:
                    seen.append(dataclasses.replace(draw, ids=draw.ids[:0], dense=draw.dense[:0]))
                if progress is not None:
                    progress(len(draw.labels))
            splits[name] = writer.close()
        schema = dataclasses.replace(schema, splits=splits, best=_best(seen))
        schema.save(Path(folder))
    return schema


def _planted(config: SynthesizeConfig) -> PlantedModel:
    sizes = [max(min(size, UNSCALED_SIZE), round(size * config.vocabulary_scale)) for size in CRITEO_SIZES]
    model = PlantedModel(
        seed=config.seed,
        sizes=np.asarray(sizes, np.int64),
        num_dense=NUM_DENSE,
        skew=config.skew,
        id_scale=config.id_effect,
        # A product of K pairs of components of deviation s has deviation sqrt(K) * s^2.
        pair_scale=(config.interaction_effect / config.interaction_rank**0.5) ** 0.5,
        rank=config.interaction_rank,
        dense_scale=config.dense_effect,
    )
    return dataclasses.replace(model, intercept=intercept_for(model.draw(PILOT, 0, PILOT_ROWS).logits, config.ctr))


def _schema(config: SynthesizeConfig, model: PlantedModel) -> Schema:
    return Schema(
        name="synthetic",
        dense=tuple(DenseField(f"I{n + 1}") for n in range(NUM_DENSE)),
        sparse=tuple(
            SparseField(f"C{f + 1}", int(size) + RESERVED_ROWS, encoding="synthetic")
            for f, size in enumerate(model.sizes)
        ),
        splits={},
        settings=dataclasses.asdict(config),
        versions=library_versions(),
        true_logits=True,
    )


def _drawn(model: PlantedModel, stream: int, rows: int) -> Iterator[Draw]:
    return ordered_map(
        lambda first: model.draw(stream, first, min(CHUNK_ROWS, rows - first)), range(0, rows, CHUNK_ROWS)
    )


def _table(schema: Schema, draw: Draw) -> pa.Table:
    columns = {LABEL: draw.labels, TRUE_LOGIT: draw.logits.astype(np.float32)}
    columns |= {field.name: values for field, values in zip(schema.dense, draw.dense, strict=True)}
    ids = draw.ids + np.int32(RESERVED_ROWS)
    columns |= {field.name: values for field, values in zip(schema.sparse, ids, strict=True)}
    return pa.table({name: pa.array(values) for name, values in columns.items()})


def _best(draws: list[Draw]) -> dict[str, float] | None:
    logits = np.concatenate([draw.logits for draw in draws])
    labels = np.concatenate([draw.labels for draw in draws])
    best = best_quality(logits, labels)
    return None if np.isnan(best["auc"]) else best
