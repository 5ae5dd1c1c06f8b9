"""A served model predicts what its trainer's model predicts, after changes and while they are applied."""

import dataclasses
import random
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from cowrec.data_pipeline import MISSING, OUT_OF_VOCABULARY, DenseField, Schema, SparseField
from cowrec.data_pipeline.dataset.sample_block import Bags, SampleBlock
from cowrec.data_pipeline.dataset.shards import load_shards
from cowrec.models import ModelConfig, build_network
from cowrec.trainer.config.run import load_config
from cowrec.trainer.export.export import TrainedTable, export_run, write_export
from cowrec.trainer.publishing.blob import Blob, Change, TableChange, decode, encode
from cowrec.trainer.serving.served_model import ServedModel
from cowrec.trainer.serving.served_rows import ServedRows
from cowrec.trainer.training.loop import train
from cowrec.trainer.training.saved_run import predict_run
from trainer_cases import COLUMNS, UNWEIGHTED, config_file, make_data

Key = tuple[int, int]
"""Number of the feature, id."""
DIM, WIDTH, USER_WIDTH = 3, 4, 8
CONFIG = ModelConfig(embedding_dim=DIM, hidden=(5,), embedding_dims={"user": 6})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch, resumed for a second one, with weighted bags of three widths, and with averaged ones."""
    folder = tmp_path_factory.mktemp("served")
    config = config_file(folder)
    for bags, columns in (("weighted", tuple(COLUMNS)), ("averaged", UNWEIGHTED)):
        data = make_data(folder / bags, columns)
        if bags == "averaged":
            described = data / "schema.json"
            described.write_text(described.read_text().replace('"pooling": "sum"', '"pooling": "mean"'))
        run = folder / bags / "run"
        for epochs in (1, 2):
            settings = [f"train.epochs={epochs}"]
            settings += ["model.embedding_dims={city=3, history=9}"] if bags == "weighted" else []
            train(load_config(config, settings), data, run, resume=epochs > 1)
            for precision in ("float32", "float16", "int8"):
                export_run(run, folder / bags / f"{precision}-{epochs}", precision)
            predict_run(run, data, folder / bags / f"predictions-{epochs}")
    return folder


def predictions(folder: Path, bags: str, epochs: int) -> np.ndarray:
    return pq.read_table(folder / bags / f"predictions-{epochs}")["prediction"].to_numpy()


def samples_of(data: Path) -> SampleBlock:
    schema = Schema.load(data)
    return load_shards(data, schema, "test", range(len(schema.split("test").shards)))


def difference(before: Path, after: Path) -> Change:
    """Rows that differ between two exports in float32, and the later one's dense weights."""
    tables = {}
    for file in sorted((after / "tables").iterdir()):
        old, new = (load_file(folder / "tables" / file.name)["rows"] for folder in (before, after))
        ids = (old != new).any(1).nonzero().flatten()
        tables[file.stem] = TableChange(ids.numpy(), new[ids].numpy())
    return Change(10, None, tables, {key: each.numpy() for key, each in load_file(after / "dense.safetensors").items()})


def full(change: Change, version: int = 1) -> Blob:
    return Blob(version, version - 1, "full", "lineage", 0.0, change)


def delta(change: Change, version: int) -> Blob:
    return dataclasses.replace(full(change, version), kind="delta")


@pytest.mark.parametrize("bags", ["weighted", "averaged"])
def test_an_export_with_published_changes_equals_the_trained_model(folder: Path, bags: str) -> None:
    """float32 up to the order of summation; smaller precisions bit-identical to an export made afterwards."""
    data = folder / bags / "data"
    samples = samples_of(data)
    change = difference(folder / bags / "float32-1", folder / bags / "float32-2")
    assert change.num_rows > 10
    for precision in ("float32", "float16", "int8"):
        served = ServedModel.load(folder / bags / f"{precision}-1")
        if precision == "float32":
            np.testing.assert_allclose(served.predict(samples), predictions(folder, bags, 1), rtol=2e-5, atol=2e-6)
        assert (served.version, served.step) == (0, 5)
        served.apply(decode(encode(full(change))))
        assert (served.version, served.step) == (1, 10)
        assert served.counters()["applied_rows"] == change.num_rows
        fresh = ServedModel.load(folder / bags / f"{precision}-2")
        np.testing.assert_array_equal(served.predict(samples), fresh.predict(samples))
        if precision == "float32":
            np.testing.assert_allclose(served.predict(samples), predictions(folder, bags, 2), rtol=2e-5, atol=2e-6)


def test_unknown_ids_are_counted(folder: Path) -> None:
    """Ids of row 0, and ids outside a table of numbered rows, which get row 0."""
    served = ServedModel.load(folder / "averaged" / "float32-1")
    samples = samples_of(folder / "averaged" / "data").take(torch.zeros(3, dtype=torch.int64))
    samples.ids[:, 0] = torch.tensor([OUT_OF_VOCABULARY, -5, 1 << 30])
    before = served.counters()["unknown_ids"]
    logits = served.predict(samples)
    assert served.counters()["unknown_ids"] == before + 3
    assert logits[0] == logits[1] == logits[2]


def collisionless_schema() -> Schema:
    """Three fields of raw ids, two of which share a table, and one field of numbered rows."""
    raw = {"num_embeddings": 2, "encoding": "hash"}
    return Schema(
        "test",
        (DenseField("price"),),
        (
            SparseField("item", **raw),
            SparseField("basket", kind="multi", pooling="mean", **raw),
            SparseField("user", **raw),
            SparseField("city", 4),
        ),
        {},
    )


FEATURES = {"items": ("item", "basket"), "users": ("user",)}
RESERVED = (OUT_OF_VOCABULARY, MISSING)


def width_of(table: str) -> int:
    return USER_WIDTH if table == "users" else WIDTH


class Oracle:
    """Tables as dictionaries of (feature, id), and plain loops. Feature 0 has the reserved rows."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.network = build_network(CONFIG, [field.name for field in collisionless_schema().sparse], 1)
        self.tables: dict[str, dict[Key, list[float]]] = {name: {} for name in FEATURES}
        for name, table in self.tables.items():
            for reserved in RESERVED:
                table[0, reserved] = self.row(name)
        self.cities = [self.row("cities") for _ in range(4)]

    def row(self, table: str) -> list[float]:
        return np.float32([self.rng.gauss(0, 1) for _ in range(width_of(table))]).tolist()

    def export(self, folder: Path, precision: str = "float32") -> None:
        tables = []
        for name, features in FEATURES.items():
            change = self.change({name: list(self.tables[name])}, {}).tables[name]
            parts = (change.rows, change.ids) if change.feature is None else (change.rows, change.ids, change.feature)
            tables.append(TrainedTable(name, features, *(torch.from_numpy(each) for each in parts)))
        tables.append(TrainedTable("cities", ("city",), torch.tensor(self.cities)))
        schema, dense = collisionless_schema(), dict(self.network.state_dict())
        write_export(folder, CONFIG, schema, folder / "none", dense, tables, precision, step=3, sample_time=30)

    def change(self, written: dict[str, list[Key]], deleted: dict[str, list[Key]], dense: bool = False) -> Change:
        tables = {}
        for name in written.keys() | deleted.keys():
            here, removed = written.get(name, []), deleted.get(name, [])
            features = [np.array([key[0] for key in keys], np.int64) for keys in (here, removed)]
            tables[name] = TableChange(
                np.array([key[1] for key in here], np.int64),
                np.array([self.tables[name][key] for key in here], np.float32).reshape(-1, width_of(name)),
                np.array([key[1] for key in removed], np.int64),
                *(features if len(FEATURES[name]) > 1 else ()),
            )
        weights = {key: each.numpy().copy() for key, each in self.network.state_dict().items()} if dense else {}
        return Change(self.rng.randrange(100), self.rng.randrange(100), tables, weights)

    def train(self, ids: int, dense: bool) -> Change:
        """Writes and deletes rows at random; ids are few, so that they return."""
        written, deleted = {}, {}
        for name, table in self.tables.items():
            keys = [(f, self.rng.randrange(2, ids) << 40) for f in range(len(FEATURES[name])) for _ in range(ids // 3)]
            keys = list(dict.fromkeys([*keys, (0, MISSING)]))
            written[name] = keys
            deleted[name] = [k for k in table if k not in keys and k[1] not in RESERVED and self.rng.random() < 0.4]
            for key in keys:
                table[key] = self.row(name)
            for key in deleted[name]:
                del table[key]
        if dense:
            with torch.no_grad():
                for each in self.network.parameters():
                    each.normal_(std=0.5)
        return self.change(written, deleted, dense)

    def everything(self) -> Change:
        change = self.change({name: list(table) for name, table in self.tables.items()}, {}, dense=True)
        cities = TableChange(np.arange(4), np.array(self.cities, np.float32))
        return dataclasses.replace(change, tables={**change.tables, "cities": cities})

    def looked_up(self, name: str, feature: int, each: int) -> torch.Tensor:
        table = self.tables[name]
        return torch.tensor(table[0, each] if each in RESERVED else table.get((feature, each), table[0, 0]))

    def predict(self, samples: SampleBlock) -> np.ndarray:
        rows = torch.zeros(len(samples), 4, USER_WIDTH)
        for b, (item, user, city) in enumerate(samples.ids.tolist()):
            rows[b, 0, :WIDTH] = self.looked_up("items", 0, item)
            start, end = samples.bags["basket"].offsets[b : b + 2].tolist()
            for each in samples.bags["basket"].values[start:end].tolist():
                rows[b, 1, :WIDTH] += self.looked_up("items", 1, each) / (end - start)
            rows[b, 2] = self.looked_up("users", 0, user)
            rows[b, 3, :WIDTH] = torch.tensor(self.cities[city])
        with torch.no_grad():
            return self.network(samples.dense, rows).sigmoid().numpy()


def random_samples(rng: random.Random, ids: int, count: int = 40) -> SampleBlock:
    def some() -> int:
        return rng.choice([0, 1, rng.randrange(2, ids) << 40, -3])

    lengths = torch.tensor([rng.randrange(4) for _ in range(count)])
    offsets = torch.zeros(count + 1, dtype=torch.int64)
    offsets[1:] = lengths.cumsum(0)
    single = [[some(), some(), rng.randrange(4)] for _ in range(count)]
    bags = Bags(torch.tensor([some() for _ in range(int(offsets[-1]))], dtype=torch.int64), offsets)
    return SampleBlock(torch.rand(count, 1), torch.zeros(count), torch.tensor(single), {"basket": bags})


@pytest.mark.parametrize("ids", [8, 3000])
def test_ids_that_are_added_deleted_and_added_again(tmp_path: Path, ids: int) -> None:
    """Compares with dictionaries and loops: new, deleted and returning ids, a shared table, growing rows and slots."""
    oracle = Oracle(ids)
    oracle.train(8, True)
    oracle.export(tmp_path / "export")
    served = ServedModel.load(tmp_path / "export")
    check = lambda: np.testing.assert_allclose(  # noqa: E731
        served.predict(samples), oracle.predict(samples), rtol=2e-5, atol=2e-6
    )
    for version in range(1, 13):
        samples = random_samples(oracle.rng, ids)
        check()
        whole = version in (1, 7)
        if whole:  # no delta lists what this removes
            oracle.train(ids, False)
        change = oracle.everything() if whole else oracle.train(ids, version % 3 == 0)
        served.apply(decode(encode(full(change, version) if whole else delta(change, version))))
        check()
        resident = sum(each not in RESERVED for table in oracle.tables.values() for _, each in table)
        assert served.counters()["resident_ids"] == resident
        assert (served.version, served.step, served.sample_time) == (version, change.step, change.sample_time)


def test_a_version_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    oracle = Oracle(1)
    oracle.train(20, True)
    oracle.export(tmp_path / "export")
    served, samples = ServedModel.load(tmp_path / "export"), random_samples(oracle.rng, 20)
    served.apply(full(oracle.everything(), 4))
    expected = served.predict(samples)
    later, everything = oracle.train(20, True), oracle.everything()
    row, user_row = (np.ones((1, width), np.float32) for width in (WIDTH, USER_WIDTH))
    one, no = np.ones(1, np.int64), np.empty(0, np.int64)
    wrong = {
        "based on version 2": delta(later, 3),
        "based on version 3": delta(later, 4),
        "based on version 5": delta(later, 6),
        "of lineage 'other'": dataclasses.replace(delta(later, 5), lineage="other"),
        "table 'cars'": delta(dataclasses.replace(later, tables={**later.tables, "cars": TableChange(one, row)}), 5),
        "table 'users'": delta(dataclasses.replace(later, tables={"users": TableChange(one, row)}), 5),
        "serves 2 fields": delta(dataclasses.replace(later, tables={"items": TableChange(one, row)}), 5),
        "serves 1 fields": delta(
            dataclasses.replace(later, tables={"users": TableChange(one, user_row, no, one, no)}), 5
        ),
        "rows 0 to 3, but its change": delta(
            dataclasses.replace(later, tables={"cities": TableChange(one * 4, row)}), 5
        ),
        "exactly the rows 0 to 3": delta(dataclasses.replace(later, tables={"cities": TableChange(one, row, one)}), 5),
        "rows of table 'users' are not finite": delta(
            dataclasses.replace(later, tables={**later.tables, "users": TableChange(one, user_row * np.nan)}), 5
        ),
        "dense weights '.*' are not finite": delta(
            dataclasses.replace(later, dense={name: each * np.inf for name, each in everything.dense.items()}), 5
        ),
        "a full version lacks cities, users": full(
            dataclasses.replace(everything, tables={"items": everything.tables["items"]}), 9
        ),
        "a full version lacks the dense weights": full(dataclasses.replace(everything, dense={}), 9),
        "the dense weights do not fit": delta(dataclasses.replace(later, dense={"linear.bias": row[0, :1]}), 5),
    }
    for message, blob in wrong.items():
        with pytest.raises(ValueError, match=message):
            served.apply(blob)
        np.testing.assert_array_equal(served.predict(samples), expected)
        assert served.version == 4
    served.apply(delta(later, 5))
    np.testing.assert_allclose(served.predict(samples), oracle.predict(samples), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_smaller_precisions_match_an_export(tmp_path: Path, precision: str) -> None:
    """Predictions after a change are bit-identical to those of an export of the changed model."""
    oracle = Oracle(2)
    oracle.train(30, True)
    oracle.export(tmp_path / "before", precision)
    served = ServedModel.load(tmp_path / "before")
    served.apply(full(oracle.everything()))
    if precision == "float16":
        row = np.full((1, USER_WIDTH), 7e4, np.float32)  # finite in float32, but not in float16
        with pytest.raises(ValueError, match="rows of table 'users' are not finite numbers in float16"):
            served.apply(delta(Change(1, 1, {"users": TableChange(np.ones(1, np.int64), row)}), 2))
    served.apply(delta(oracle.train(30, True), 2))
    oracle.export(tmp_path / "after", precision)
    samples = random_samples(oracle.rng, 30, 300)
    np.testing.assert_array_equal(served.predict(samples), ServedModel.load(tmp_path / "after").predict(samples))
    off = np.abs(served.predict(samples) - oracle.predict(samples)).max()
    assert 0 < off < {"float16": 2e-3, "int8": 0.1}[precision]  # of probabilities; logits differ by four times as much


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_lookups_never_see_a_partial_row(precision: str) -> None:
    """All columns of a row have one value, of its id and version, while ids are added and removed and the tables grow.

    For each id a lookup sees a version between the one before and the one after it, or the out-of-vocabulary row if the
    id may be deleted.
    """
    schema, ids = collisionless_schema(), np.arange(2, 3000)
    sizes, tables = np.array([-1, -1, -1, 4]), np.array([0, 0, 1, 2])
    rows = ServedRows(schema, sizes, tables, np.full(4, WIDTH), precision)
    version, last, failures = 0, 40, list[str]()

    def written(number: int, ids: np.ndarray) -> np.ndarray:
        return np.repeat((ids % 7 + 1 + 10 * number).astype(np.float32)[:, None], WIDTH, 1)

    def fields(ids: np.ndarray) -> np.ndarray:
        return np.full(len(ids), 2)

    def look() -> None:
        rng = np.random.default_rng(threading.get_ident())
        while version < last:
            users = rng.choice(ids, 500)
            single = np.stack([np.zeros_like(users), users, np.zeros_like(users)], 1)
            none = Bags(torch.empty(0, dtype=torch.int64), torch.zeros(501, dtype=torch.int64))
            before = version
            found, _ = rows.gather(
                SampleBlock(torch.zeros(500, 1), torch.zeros(500), torch.from_numpy(single), {"basket": none})
            )
            after, numbers = version + 1, found[:, 2].numpy()
            whole = (numbers == numbers[:, :1]).all(1)
            number = (numbers[:, 0] - 1 - users % 7) / 10
            known = np.isclose(number, number.round(), atol=1e-4) & (number > before - 0.5) & (number < after + 0.5)
            absent = (numbers == 0).all(1) & (users % 2 == 1)
            if not (whole & (known | absent)).all():
                failures.append(f"{users[~(whole & (known | absent))][:3]}: {numbers[~(whole & (known | absent))][:3]}")

    rows.write(ids, fields(ids), written(0, ids))
    readers = [threading.Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(1, last + 1):
        odd = ids[ids % 2 == 1]
        if number % 3 == 0:
            rows.remove(odd, fields(odd))
        rows.write(ids, fields(ids), written(number, ids))
        more = np.arange(2000) + (1 << 20) + number * 2000
        rows.write(more, fields(more), written(number, more))
        version = number
    for reader in readers:
        reader.join()
    assert not failures
    assert rows.resident == len(ids) + 2000 * last
