"""Planted click model of synthetic data: all probabilities are known, and so is the best possible AUC.

    logit = b + sum_f a_f[id_f] + sum_{f<g} <v_f[id_f], v_g[id_g]> + sum_n c_n (x_n - E x_n)

Ids follow a power law by rank, P(rank) ~ rank^-skew. The effects a, v and c are approximately Gaussian hashes of (seed,
field, id), so vocabularies of any size need no memory. Every draw is a hash of (seed, sample, purpose), so a sample
does not depend on the chunk in which it is generated. F sparse fields, N dense fields, R samples, K interaction rank.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numba
import numpy as np
import pyarrow as pa

from cowrec.errors import UserError

from ..dataset.schema import (
    LABEL,
    RESERVED_ROWS,
    SHARD_ROWS,
    TIME,
    TRUE_LOGIT,
    DenseField,
    Schema,
    SparseField,
    Split,
    library_versions,
)
from ..dataset.shards import (
    arrow_schema,
    flat_ids,
    new_folder,
    shard_path,
    size_of_split,
    write_shard,
)
from ..encoding.encoder import sparse_field
from ..encoding.vocabulary import raw_ids
from ..hashing import mix, uniform
from ..parallel import ordered_map
from ..raw.layouts import Layout, RawField, RawLabel
from ..raw.times import RawTime
from ..splitmix import GOLDEN
from .criteo_frequencies import CRITEO_SIZES, NUM_DENSE

WORD_SUM_MEAN = 4 * 65535 / 2
WORD_SUM_STD = math.sqrt(4 * (65536**2 - 1) / 12)
PILOT_ROWS = 1 << 16


@numba.njit(inline="always")
def gaussian(bits: np.uint64) -> float:
    """Returns a number of mean 0 and variance 1 from the sum of a hash's four 16-bit words, equal on all machines."""
    low = np.uint64(0xFFFF)
    words = (bits & low) + ((bits >> np.uint64(16)) & low) + ((bits >> np.uint64(32)) & low) + (bits >> np.uint64(48))
    return (float(words) - WORD_SUM_MEAN) / WORD_SUM_STD


@numba.njit(inline="always")
def power_law_rank(u: float, size: int, skew: float) -> int:
    """Returns the rank, from 0, at which the distribution of density x^-skew on [1, size + 1) reaches u in [0, 1)."""
    power = 1.0 - skew
    if power == 0.0:
        x = math.exp(u * math.log(size + 1.0))
    else:
        x = (1.0 + u * ((size + 1.0) ** power - 1.0)) ** (1.0 / power)
    return min(int(x), size) - 1


def probability(logits: np.ndarray) -> np.ndarray:
    found: np.ndarray = 1.0 / (1.0 + np.exp(-logits))
    return found


def intercept_for(logits: np.ndarray, ctr: float) -> float:
    """Returns the intercept at which the mean click probability is `ctr`, by bisection."""
    low, high = -50.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        if np.mean(probability(logits + middle)) < ctr:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True)
class Draw:
    """Samples of a model.

    Attributes:
        ids: int32 or int64 [F, R], ranks by decreasing frequency, from 0.
        dense: float32 [N, R], in [0, 1).
        logits: float64 [R], of the true click probabilities.
        labels: float32 [R], drawn with these probabilities.
        times: int64 [R], Unix seconds, not decreasing; None in the planted model.
    """

    ids: np.ndarray
    dense: np.ndarray
    logits: np.ndarray
    labels: np.ndarray
    times: np.ndarray | None = None


class Scales(NamedTuple):
    """The exponent of the power law of ids, K as `rank`, and standard deviations of a_f, components of v_f, and c_n."""

    skew: float
    id_scale: float
    pair_scale: float
    rank: int
    dense_scale: float


def scales_of(config: Any) -> Scales:
    """Returns the scales at which the effect of one pair of ids has the deviation `config.interaction_effect`."""
    # A product of K pairs of components of deviation s has deviation sqrt(K) * s^2.
    pair_scale = (config.interaction_effect / config.interaction_rank**0.5) ** 0.5
    return Scales(config.skew, config.id_effect, pair_scale, config.interaction_rank, config.dense_effect)


class DrawArrays(NamedTuple):
    """Arrays that a draw fills: ids [F, R], dense [N, R], logits [R] (no intercept), uniforms [R] for the labels."""

    ids: np.ndarray
    dense: np.ndarray
    logits: np.ndarray
    uniforms: np.ndarray

    @staticmethod
    def empty(fields: int, num_dense: int, rows: int, id_type: type[np.integer]) -> "DrawArrays":
        dense = np.empty((num_dense, rows), np.float32)
        return DrawArrays(np.empty((fields, rows), id_type), dense, np.empty(rows), np.empty(rows))

    def draw(self, intercept: float, times: np.ndarray | None = None) -> Draw:
        logits = self.logits + intercept
        labels = (self.uniforms < probability(logits)).astype(np.float32)
        return Draw(self.ids, self.dense, logits, labels, times)


@numba.njit(inline="always")
def fill_dense(logit: float, row: np.uint64, effects: np.ndarray, scale: float, dense: np.ndarray, i: int) -> float:
    """Draws the dense features of sample `i`; returns the logit with their effects, the last of `effects`."""
    fields = len(effects) - len(dense)
    for n in range(len(dense)):
        u = uniform(mix(row + np.uint64(fields + n + 1) * GOLDEN))
        # Like scaled counts, the cube of a uniform is mostly small: mean 1/4 and a long tail.
        x = u * u * u
        dense[n, i] = x
        logit += scale * gaussian(effects[fields + n]) * (x - 0.25)
    return logit


@numba.njit(nogil=True, cache=True)
def _draw(
    first: int, stream: np.uint64, effects: np.ndarray, sizes: np.ndarray, scales: Scales, out: DrawArrays
) -> None:
    """Fills the arrays with samples from `first`."""
    fields, rows = out.ids.shape
    sums = np.empty(scales.rank)
    for i in range(rows):
        row = mix(stream + np.uint64(first + i) * GOLDEN)
        logit = 0.0
        squares = 0.0
        sums[:] = 0.0
        for f in range(fields):
            u = uniform(mix(row + np.uint64(f + 1) * GOLDEN))
            rank_of_id = power_law_rank(u, sizes[f], scales.skew)
            out.ids[f, i] = rank_of_id
            effect = mix(effects[f] + np.uint64(rank_of_id) * GOLDEN)
            logit += scales.id_scale * gaussian(effect)
            for k in range(scales.rank):
                effect = mix(effect + GOLDEN)
                v = scales.pair_scale * gaussian(effect)
                sums[k] += v
                squares += v * v
        total = 0.0
        for k in range(scales.rank):
            total += sums[k] * sums[k]
        logit += 0.5 * (total - squares)
        out.logits[i] = fill_dense(logit, row, effects, scales.dense_scale, out.dense, i)
        out.uniforms[i] = uniform(mix(row))


@dataclass(frozen=True)
class PlantedModel:
    """The planted model with the seed of all effects and draws, vocabulary `sizes`, int64 [F], and the intercept b."""

    seed: int
    sizes: np.ndarray
    num_dense: int
    scales: Scales
    intercept: float = 0.0

    def draw(self, stream: int, first_row: int, rows: int) -> Draw:
        """Draws samples [first_row, first_row + rows) of a stream; streams are independent draws of one model."""
        out = DrawArrays.empty(len(self.sizes), self.num_dense, rows, np.int32)
        effects = keys((self.seed, 0), len(self.sizes) + self.num_dense)
        (row_key,) = keys((self.seed, 1, stream), 1)
        _draw(first_row, row_key, effects, self.sizes, self.scales, out)
        return out.draw(self.intercept)


def keys(seed: tuple[int, ...], count: int) -> np.ndarray:
    """Returns independent 64-bit keys: uint64 [count]."""
    return np.random.SeedSequence(seed).generate_state(count, np.uint64)


def require(config: object, wanted: str, holds: Callable[[float], bool], *names: str) -> None:
    """Raises ValueError unless a condition, in words `wanted`, holds for the attributes with these names."""
    for name in names:
        value = getattr(config, name)
        if not holds(value):
            raise UserError(f"{name} must be {wanted}, got {value}")


def auc(scores: np.ndarray, p: np.ndarray) -> float:
    """Returns the area under the ROC curve of scores [R] for labels that are drawn with the probabilities p [R].

    It is the expected number of concordant pairs over the expected number of pairs of different samples:

        sum_{i != j} p_i (1 - p_j) ([s_i > s_j] + [s_i = s_j] / 2) / sum_{i != j} p_i (1 - p_j)

    With labels, 0 or 1, in place of p it is the exact AUC of Mann and Whitney. It is NaN if no pair is possible.
    Source: the bipartite ranking risk by class probabilities (Menon and Williamson, JMLR 17, 2016).
    """
    if not len(scores):
        return float("nan")
    order = np.argsort(scores, kind="stable")
    ordered, p = scores[order], p[order].astype(np.float64)
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    # Sums over the samples of one score, and over the pairs of a sample with itself.
    positive, negative, own = (np.add.reduceat(values, starts) for values in (p, 1 - p, p * (1 - p)))
    below = np.cumsum(negative) - negative
    concordant = (positive * below + (positive * negative - own) / 2).sum()
    pairs = positive.sum() * negative.sum() - own.sum()
    return float(concordant / pairs) if pairs > 0 else float("nan")


def exact_logloss(logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the mean of -log(probability of the label) in nats; expected if labels [R] are true probabilities."""
    return float(np.mean(np.logaddexp(0.0, logits) - labels * logits))


def best_quality(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns the quality of the true probabilities: auc and logloss of labels [R], and their expectations."""
    p = probability(logits)
    return {
        "auc": auc(logits, labels),
        "logloss": exact_logloss(logits, labels),
        "expected_auc": auc(logits, p),
        "expected_logloss": exact_logloss(logits, p),
    }


UNSCALED_SIZE = 100
"""Fields up to this size are not scaled: a smaller log still has all weekdays and devices."""

TRAIN, TEST, PILOT = 0, 1, 2


@dataclass(frozen=True)
class SynthesizeConfig:
    """Settings of a synthetic data set. The default million samples suffice to learn from in one epoch.

    Attributes:
        rows: training samples.
        test_rows: test samples, independent of `rows`. The exact AUC takes 20 bytes of memory each.
        vocabulary_scale: share of Criteo's 33.8 million ids; fields are not scaled below 100 ids.
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
        require(self, "at least 1", lambda value: value >= 1, "rows", "test_rows", "interaction_rank", "shard_rows")
        require(self, "at least 0", lambda value: value >= 0, "seed")
        require(self, "in (0, 100]", lambda value: 0 < value <= 100, "vocabulary_scale")
        require(self, "between 0 and 1", lambda value: 0 < value < 1, "ctr")
        effects = ("skew", "id_effect", "interaction_effect", "dense_effect")
        require(self, "finite and at least 0", lambda value: 0 <= value < math.inf, *effects)


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
        progress: called with the number of samples just written.

    Returns the schema; `best` has the quality of the true probabilities on the test split.

    Raises ValueError: `output` is not empty; OSError: the disk is full.
    """
    config = config or SynthesizeConfig()
    sizes = [max(min(size, UNSCALED_SIZE), round(size * config.vocabulary_scale)) for size in CRITEO_SIZES]
    model = PlantedModel(config.seed, np.asarray(sizes, np.int64), NUM_DENSE, scales_of(config))
    intercept = intercept_for(model.draw(PILOT, 0, PILOT_ROWS).logits, config.ctr)
    model = dataclasses.replace(model, intercept=intercept)
    ids = [SparseField(f"C{f + 1}", size + RESERVED_ROWS, encoding="synthetic") for f, size in enumerate(sizes)]
    schema = Schema(
        name="synthetic",
        dense=tuple(DenseField(f"I{n + 1}") for n in range(NUM_DENSE)),
        sparse=tuple(ids),
        splits={},
        settings=dataclasses.asdict(config),
        versions=library_versions(),
        true_logits=True,
    )
    splits = {
        "train": (config.rows, partial(_drawn, schema, model, TRAIN)),
        "test": (config.test_rows, partial(_drawn, schema, model, TEST)),
    }
    return write_splits(output, schema, splits, config.shard_rows, overwrite=overwrite, progress=progress)


Drawn: TypeAlias = Callable[[int, int], tuple[pa.Table, Draw]]
"""Draws samples [first, first + rows) of a split; the table has the columns of `arrow_schema` but the true logits."""


def write_splits(
    output: str | os.PathLike[str],
    schema: Schema,
    splits: Mapping[str, tuple[int, Drawn]],
    shard_rows: int,
    *,
    overwrite: bool,
    progress: Callable[[int], None] | None,
) -> Schema:
    """Writes the splits of a data set, whose numbers of samples are known, from what draws them.

    Returns the schema with the sizes of the splits and the quality of the true probabilities on the test split.
    """
    with new_folder(output, overwrite=overwrite) as folder:
        sizes, tested = {}, list[tuple[np.ndarray, np.ndarray]]()
        for name, (rows, drawn) in splits.items():
            (folder / name).mkdir()
            shards = []
            write = partial(_write_drawn, schema, folder, name, rows, shard_rows, drawn)
            for shard, draw in ordered_map(write, range(0, rows, shard_rows)):
                shards.append(shard)
                if name == "test":
                    tested.append((draw.logits, draw.labels))
                if progress is not None:
                    progress(shard.rows)
            sizes[name] = size_of_split(shards, schema, labelled=True)
        best = best_quality(*map(np.concatenate, zip(*tested, strict=True)))
        schema = dataclasses.replace(schema, splits=sizes, best=None if np.isnan(best["auc"]) else best)
        schema.save(folder)
    return schema


def _write_drawn(
    schema: Schema, folder: Path, name: str, rows: int, shard_rows: int, drawn: Drawn, first: int
) -> tuple[Split, Draw]:
    table, draw = drawn(first, min(shard_rows, rows - first))
    table, columns = table.append_column(TRUE_LOGIT, pa.array(draw.logits.astype(np.float32))), arrow_schema(schema)
    path = shard_path(folder, name, first // shard_rows)
    return write_shard(path, table.select(columns.names).cast(columns), schema.label_columns), draw


def write_following(
    output: str | os.PathLike[str],
    schema: Schema,
    drawn: Drawn,
    rows: int,
    test_rows: int,
    *,
    overwrite: bool,
    progress: Callable[[int], None] | None,
) -> Schema:
    """Writes the first `rows` samples for training and the next `test_rows`, at least 1, for testing.

    `schema` is one of `raw_id_schema`; ids that `drawn` returns as text become raw ids. Returns as `write_splits`.
    """
    if test_rows < 1:
        raise UserError(f"test_rows must be at least 1, got {test_rows}")

    def encoded(start: int, first: int, count: int) -> tuple[pa.Table, Draw]:
        table, draw = drawn(start + first, count)
        for field in schema.sparse:
            text = table[field.name].combine_chunks()
            column = pa.array(raw_ids(flat_ids(text)))
            if field.is_list:
                column = pa.ListArray.from_arrays(text.offsets, column)
            table = table.set_column(table.column_names.index(field.name), field.name, column)
        return table, draw

    splits = {"train": (rows, partial(encoded, 0)), "test": (test_rows, partial(encoded, rows))}
    return write_splits(output, schema, splits, SHARD_ROWS, overwrite=overwrite, progress=progress)


def raw_id_schema(name: str, fields: Sequence[RawField], **settings: Any) -> Schema:
    """Returns the schema, without sizes, of samples with times whose ids are raw; `settings` are dataclasses."""
    layout = Layout(name, ",", "", True, (), (RawLabel(),), tuple(fields), time=RawTime((TIME,)))
    of_all = {key: dataclasses.asdict(value) for key, value in {"layout": layout, **settings}.items()}
    sparse = [sparse_field(field, "raw") for field in fields if not field.numbers]
    return Schema(
        name,
        tuple(DenseField(field.name, source=field.name) for field in fields if field.numbers),
        tuple(dataclasses.replace(field, num_embeddings=0) for field in sparse),
        {},
        timed=True,
        true_logits=True,
        settings=json.loads(json.dumps(of_all)),
        versions=library_versions(),
    )


def _drawn(schema: Schema, model: PlantedModel, stream: int, first: int, rows: int) -> tuple[pa.Table, Draw]:
    draw = model.draw(stream, first, rows)
    columns = {LABEL: draw.labels}
    columns |= {field.name: values for field, values in zip(schema.dense, draw.dense, strict=True)}
    ids = draw.ids + np.int32(RESERVED_ROWS)
    columns |= {field.name: values for field, values in zip(schema.sparse, ids, strict=True)}
    return pa.table({name: pa.array(values) for name, values in columns.items()}), draw
