"""LightGBM and logistic regression on a prepared data set, to compare with runs. R samples, F fields, N numbers."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from cowrec.data_pipeline import Schema
from cowrec.data_pipeline.dataset.schema import SAMPLE_WEIGHT
from cowrec.data_pipeline.dataset.shards import read_columns
from cowrec.errors import UserError
from cowrec.files import locked_folder, replace_file

from ..measures.quality import Samples, measure
from ..runs.run_dir import METRICS

LIGHTGBM, LOGISTIC_REGRESSION = "LightGBM", "logistic regression"
ROUNDS, PATIENCE = 2000, 50
"""Most trees of LightGBM, and trees without a better validation logloss after which it stops."""
PENALTIES = (0.01, 0.1, 1.0)
"""Inverse strengths of the L2 penalty of logistic regression, of which validation samples choose one."""
HELD_OUT = 0.1
"""Share of the training split, its last samples, that are validation samples where there is no such split."""


@dataclass(frozen=True)
class Part:
    """Samples of a split: columns of features as they are stored, labels (NaN if unknown) and weights, float64 [R]."""

    table: pa.Table
    label: np.ndarray
    weight: np.ndarray

    @staticmethod
    def of(data_dir: Path, schema: Schema, split: str) -> "Part":
        """Reads a split; the label of the part is the first one of the data set."""
        features = [*(number.name for number in schema.dense), *(field.name for field in schema.sparse)]
        label = schema.label_columns[0]
        names = [*features, label, *[SAMPLE_WEIGHT] * schema.sample_weights]
        table = read_columns(data_dir, schema, split, names)
        weight = table[SAMPLE_WEIGHT].to_numpy() if schema.sample_weights else np.ones(len(table))
        return Part(table.select(features), table[label].to_numpy().astype(float), weight.astype(float))

    def between(self, first: int, end: int) -> "Part":
        return Part(self.table.slice(first, end - first), self.label[first:end], self.weight[first:end])

    def labelled(self) -> "Part":
        """The samples with a known label and a weight above 0."""
        known = ~np.isnan(self.label) & (self.weight > 0)
        return self if known.all() else Part(self.table.filter(pa.array(known)), self.label[known], self.weight[known])


class Known(NamedTuple):
    """Ids of a field in training, ascending, int64, and ``codes``, their numbers by descending count, from 0, int64."""

    ids: np.ndarray
    codes: np.ndarray

    @staticmethod
    def of(column: pa.ChunkedArray) -> "Known":
        ids, counts = np.unique(_flat(column), return_counts=True)
        codes = np.empty(len(ids), np.int64)
        codes[np.argsort(-counts, kind="stable")] = np.arange(len(ids))
        return Known(ids, codes)

    def code(self, ids: np.ndarray) -> np.ndarray:
        """Codes of ids, int64; -1 for ids that no training sample has."""
        if not len(self.ids):
            return np.full(len(ids), -1)
        place = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        found: np.ndarray = np.where(self.ids[place] == ids, self.codes[place], -1)
        return found


def baselines(data_dir: Path, output: Path, most_rows: int) -> Iterator[dict[str, Any]]:
    """Trains LightGBM and logistic regression, measures the test split, and writes both as a run's metrics.

    LightGBM has its default values, and as many trees as give the best validation logloss. Its features are the numbers
    and the ids, as categories; of a field of several ids their number and the last one. Logistic regression has a
    weight for each id and number, with the L2 penalty of the best validation logloss. Ids of at least one training
    sample are known. Of several labels the first is trained. ``cowrec plot`` takes ``output`` as it takes a run. At
    most the newest ``most_rows`` training samples are used; a sample takes 12 bytes for each feature.

    Yields:
        For each model its name, the number of training samples, what validation chose, seconds, and the measures of the
        test split and the logloss and AUC of the validation samples.

    Raises UserError: a package is not installed, a split has no labelled sample, or a shard is missing or damaged.
    """
    models = _models()
    schema = Schema.load(data_dir)
    train, validation, test = (part.labelled() for part in _parts(data_dir, schema))
    train = train.between(max(0, len(train.label) - most_rows), len(train.label))
    for split, part in (("training", train), ("validation", validation), ("test", test)):
        if not len(part.label):
            raise UserError(f"{data_dir} has no {split} samples with a label; prepare the data set with more samples")
    if len(np.unique(train.label)) < 2:
        raise UserError(f"all {len(train.label):,} training samples of {data_dir} have one label")
    known = {field.name: Known.of(train.table[field.name]) for field in schema.sparse}
    lines = []
    with locked_folder(output):
        for name, fit in models.items():
            begun = time.perf_counter()
            predict, chosen = fit(schema, known, train, validation)
            seconds = time.perf_counter() - begun
            of_test, of_validation = (_measured(predict(part), part) for part in (test, validation))
            chosen |= {f"validation_{key}": of_validation[key] for key in ("auc", "logloss")}
            lines.append({"kind": "baseline", "model": name, "train_rows": len(train.label), "seconds": seconds})
            lines[-1] |= chosen | of_test
            replace_file(output / METRICS, "".join(f"{json.dumps(line)}\n" for line in lines).encode())
            yield lines[-1]


Fit = Callable[..., tuple[Callable[[Part], np.ndarray], dict[str, Any]]]
"""Trains a model; returns the function that predicts logits, and what the validation samples chose."""


def _models() -> dict[str, Fit]:
    try:
        import lightgbm  # noqa: F401
        import sklearn  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(
            f"baseline requires {error.name}, which is not installed: pip install 'cowrec[baseline]'"
        ) from None
    return {LIGHTGBM: _lightgbm, LOGISTIC_REGRESSION: _logistic_regression}


def _parts(data_dir: Path, schema: Schema) -> tuple[Part, Part, Part]:
    train = Part.of(data_dir, schema, "train")
    test = Part.of(data_dir, schema, "test")
    if "validation" in schema.splits:
        return train, Part.of(data_dir, schema, "validation"), test
    border = len(train.label) - round(HELD_OUT * len(train.label))
    return train.between(0, border), train.between(border, len(train.label)), test


def _measured(logits: np.ndarray, part: Part) -> dict[str, Any]:
    label, weight = torch.from_numpy(part.label).float(), torch.from_numpy(part.weight).float()
    return measure(Samples(torch.from_numpy(logits).float(), label, weight)).without_bins().values()


def _lightgbm(
    schema: Schema, known: Mapping[str, Known], train: Part, validation: Part
) -> tuple[Callable[[Part], np.ndarray], dict[str, Any]]:
    import lightgbm

    columns: list[str] = [number.name for number in schema.dense]
    for field in schema.sparse:
        columns += [f"{field.name} (number)", field.name] if field.is_list else [field.name]

    def features(part: Part) -> np.ndarray:
        """Float32 [R, N + F], and a column more for each field of several ids; NaN for what is not known."""
        values = np.empty((len(part.label), len(columns)), np.float32)
        for place, column in enumerate(columns):
            name = column.removesuffix(" (number)")
            stored = part.table[name]
            if name not in known:
                values[:, place] = stored.to_numpy()
                continue
            offsets = _offsets(stored)
            if column != name:
                values[:, place] = np.diff(offsets)
                continue
            last = np.full(len(offsets) - 1, -1, np.int64)
            given = np.diff(offsets) > 0
            last[given] = known[name].code(_flat(stored)[offsets[1:][given] - 1])
            values[:, place] = np.where(last < 0, np.nan, last)
        return values

    objective = "cross_entropy" if _has_rates(train) or _has_rates(validation) else "binary"
    parameters = {"objective": objective, "verbosity": -1, "deterministic": True, "force_row_wise": True}
    of_train = lightgbm.Dataset(
        features(train),
        train.label,
        weight=train.weight,
        feature_name=[f"f{i}" for i in range(len(columns))],
        categorical_feature=[columns.index(name) for name in known],
        params=parameters,
    )
    of_validation = of_train.create_valid(features(validation), validation.label, weight=validation.weight)
    stop = lightgbm.early_stopping(PATIENCE, verbose=False)
    model = lightgbm.train(parameters, of_train, ROUNDS, valid_sets=[of_validation], callbacks=[stop])

    def predict(part: Part) -> np.ndarray:
        return np.asarray(model.predict(features(part), raw_score=True))

    return predict, {"trees": model.best_iteration}


def _logistic_regression(
    schema: Schema, known: Mapping[str, Known], train: Part, validation: Part
) -> tuple[Callable[[Part], np.ndarray], dict[str, Any]]:
    from scipy.sparse import csr_array
    from sklearn.linear_model import LogisticRegression

    numbers = [number.name for number in schema.dense]
    stored = {name: train.table[name].to_numpy() for name in numbers}
    scales = {name: (np.mean(values), np.std(values) or 1.0) for name, values in stored.items()}

    def features(part: Part) -> Any:
        """CSR float32 [R, N + the known ids of all fields]: standardized numbers, and how often a sample has an id."""
        rows, columns, values = [], [], []  # of the entries
        for place, name in enumerate(numbers):
            mean, deviation = scales[name]
            rows.append(np.arange(len(part.label)))
            columns.append(np.full(len(part.label), place))
            values.append((part.table[name].to_numpy() - mean) / deviation)
        begin = len(numbers)
        for name, ids in known.items():
            offsets, codes = _offsets(part.table[name]), ids.code(_flat(part.table[name]))
            rows.append(np.repeat(np.arange(len(part.label)), np.diff(offsets))[codes >= 0])
            columns.append(begin + codes[codes >= 0])
            values.append(np.ones(len(columns[-1])))
            begin += len(ids.ids)
        places = tuple(np.concatenate(parts).astype(np.int32) for parts in (rows, columns))  # not int64: scikit-learn
        return csr_array((np.concatenate(values).astype(np.float32), places), shape=(len(part.label), begin))

    of_train, of_validation = features(train), features(validation)
    fits = []
    for penalty in PENALTIES:
        model = LogisticRegression(C=penalty, solver="newton-cg")
        model.fit(*_by_class(of_train, train))
        fits.append((_measured(model.decision_function(of_validation), validation)["logloss"], penalty, model))
    _, penalty, best = min(fits, key=lambda fit: fit[0])
    return lambda part: best.decision_function(features(part)), {"C": penalty}


def _has_rates(part: Part) -> bool:
    """True if labels are no classes, but rates between them."""
    return bool(((part.label > 0) & (part.label < 1)).any())


def _by_class(features: Any, part: Part) -> tuple[Any, np.ndarray, np.ndarray]:
    """Features, classes and weights of samples; one of a rate becomes a positive and a negative one of its shares."""
    from scipy.sparse import vstack

    if not _has_rates(part):
        return features, part.label, part.weight
    weight = np.concatenate([part.weight * part.label, part.weight * (1 - part.label)])
    return vstack([features, features], format="csr"), np.repeat([1.0, 0.0], len(part.label)), weight


def _offsets(column: pa.ChunkedArray) -> np.ndarray:
    """Begin and end of each sample's ids in :func:`_flat`, int64 [R + 1]."""
    if not pa.types.is_list(column.type):
        return np.arange(len(column) + 1)
    return np.append(0, np.cumsum(pc.list_value_length(column).to_numpy()))


def _flat(column: pa.ChunkedArray) -> np.ndarray:
    """All ids of a column, int64, in the order of the samples."""
    if pa.types.is_list(column.type):
        column = pc.list_flatten(column)
    flat: np.ndarray = column.to_numpy().astype(np.int64)
    return flat
