"""A served model, and the network in it, predict what the trainer's model predicts, also while changes are applied."""

import dataclasses
import functools
import random
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cowrec.data_pipeline import MISSING, OUT_OF_VOCABULARY, DenseField, Schema, SparseField
from cowrec.data_pipeline.dataset.sample_block import Bags, SampleBlock
from cowrec.models import ModelConfig, build_network, physical_dim
from cowrec.trainer.export.export import TrainedTable, write_export
from cowrec.trainer.export.manifest import TableManifest, fingerprint
from cowrec.trainer.publishing.blob import Blob, Change, TableChange, decode, encode
from cowrec.trainer.serving.inference_network import InferenceNetwork
from cowrec.trainer.serving.served_model import ServedModel
from cowrec.trainer.serving.served_rows import RowChange, ServedRows
from history_cases import FLAT
from tiers import tiered

Key = tuple[int, int]
"""Number of the feature, id."""
WIDTH, USER_WIDTH = 4, 8
CONFIG = ModelConfig(embedding_dim=3, hidden=(5,), embedding_dims={"user": 6})


def full(change: Change, version: int = 1) -> Blob:
    return Blob(version, version - 1, "full", "lineage", 0.0, change, collisionless_fingerprint())


def delta(change: Change, version: int) -> Blob:
    return dataclasses.replace(full(change, version), kind="delta")


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


@functools.cache
def collisionless_fingerprint() -> str:
    with tempfile.TemporaryDirectory() as folder:
        collisionless_schema().save(folder)
        tables = {name: TableManifest(features, 0, True, 0.0) for name, features in FEATURES.items()}
        return fingerprint(Path(folder), CONFIG, tables | {"cities": TableManifest(("city",), 4, False, 0.0)})


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
            tables.append(TrainedTable(name, features, *(torch.from_numpy(part) for part in parts)))
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
        tables["cities"] = TableChange(np.arange(4), np.array(self.cities, np.float32))
        weights = {key: tensor.numpy().copy() for key, tensor in self.network.state_dict().items()} if dense else {}
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
        self.cities = [self.row("cities") for _ in self.cities]
        if dense:
            with torch.no_grad():
                for parameter in self.network.parameters():
                    parameter.normal_(std=0.5)
        return self.change(written, deleted, dense)

    def everything(self) -> Change:
        return self.change({name: list(table) for name, table in self.tables.items()}, {}, dense=True)

    def looked_up(self, name: str, feature: int, id_: int) -> torch.Tensor:
        table = self.tables[name]
        return torch.tensor(table[0, id_] if id_ in RESERVED else table.get((feature, id_), table[0, 0]))

    def predict(self, samples: SampleBlock) -> np.ndarray:
        rows = torch.zeros(len(samples), 4, USER_WIDTH)
        for b, (item, user, city) in enumerate(samples.ids.tolist()):
            rows[b, 0, :WIDTH] = self.looked_up("items", 0, item)
            start, end = samples.bags["basket"].offsets[b : b + 2].tolist()
            for id_ in samples.bags["basket"].values[start:end].tolist():
                rows[b, 1, :WIDTH] += self.looked_up("items", 1, id_) / (end - start)
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


@pytest.mark.parametrize(
    ("ids", "precision"),
    [
        (8, "float32"),
        (30, "int8"),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in ((3000, "float32"), (30, "float16"))),
    ],
)
def test_ids_that_are_added_deleted_and_added_again(tmp_path: Path, ids: int, precision: str) -> None:
    """Compares with dictionaries and loops: new, deleted and returning ids, a shared table, growing rows and slots.

    At the end bit-identical to an export of the changed model.
    """
    oracle, off = Oracle(ids), {"float32": 2e-6, "float16": 2e-3, "int8": 0.1}[precision]
    oracle.train(8, True)
    oracle.export(tmp_path / "export", precision)
    served = ServedModel.load(tmp_path / "export")

    def check() -> None:
        np.testing.assert_allclose(served.predict(samples), oracle.predict(samples), rtol=2e-5, atol=off)

    applied = 0
    for version in range(1, 13):
        samples = random_samples(oracle.rng, ids)
        check()
        whole = version in (1, 7)
        if whole:  # no delta lists what this removes
            oracle.train(ids, False)
        change = oracle.everything() if whole else oracle.train(ids, version % 3 == 0)
        served.apply(decode(encode(full(change, version) if whole else delta(change, version))))
        check()
        resident = sum(id_ not in RESERVED for table in oracle.tables.values() for _, id_ in table)
        applied += change.num_rows
        assert (served.counters()["resident_ids"], served.counters()["applied_rows"]) == (resident, applied)
        state = served.state
        assert (state.version, state.step, state.sample_time) == (version, change.step, change.sample_time)
    oracle.export(tmp_path / "after", precision)
    np.testing.assert_array_equal(served.predict(samples), ServedModel.load(tmp_path / "after").predict(samples))


def test_a_version_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    oracle = Oracle(1)
    oracle.train(20, True)
    oracle.export(tmp_path / "export")
    served, samples = ServedModel.load(tmp_path / "export"), random_samples(oracle.rng, 20)
    served.apply(full(oracle.everything(), 4))
    expected = served.predict(samples)
    later, everything = oracle.train(20, True), oracle.everything()
    one, user_row = np.ones(1, np.int64), np.ones((1, USER_WIDTH), np.float32)

    def table(name: str, *change: np.ndarray) -> Blob:
        return delta(dataclasses.replace(later, tables={name: TableChange(*change)}), 5)

    def dense(values: dict[str, np.ndarray]) -> Blob:
        return delta(dataclasses.replace(later, dense=values), 5)

    wrong = {
        "based on version 2": delta(later, 3),
        "of lineage 'other'": dataclasses.replace(delta(later, 5), lineage="other"),
        "other data or of another network": dataclasses.replace(full(everything, 9), fingerprint="0" * 64),
        "rows of table 'users' are not finite": table("users", one, user_row * np.nan),
        "dense weights '.*' are not finite": dense(
            {name: parameter * np.inf for name, parameter in everything.dense.items()}
        ),
        "the dense weights do not fit": dense({"linear.bias": user_row[0, :1]}),
    }
    for message, blob in wrong.items():
        with pytest.raises(ValueError, match=message):
            served.apply(blob)
        np.testing.assert_array_equal(served.predict(samples), expected)
        assert served.state.version == 4
    served.apply(delta(later, 5))
    np.testing.assert_allclose(served.predict(samples), oracle.predict(samples), rtol=2e-5, atol=2e-6)


VERSIONS, IDS = 12, 500


@pytest.mark.thorough
def test_every_prediction_is_of_one_version(tmp_path: Path) -> None:
    """Bit-identical to the prediction of a model to which the versions are applied while nobody else uses it.

    Numbered, collisionless and shared tables of two widths and a list field; all rows and weights change at random, ids
    come, go and return, and the tables grow; in int8, where a row and its scale belong together.
    """
    oracle = Oracle(5)
    oracle.train(IDS, True)
    oracle.export(tmp_path / "export", "int8")
    alone, served = (ServedModel.load(tmp_path / "export") for _ in range(2))
    samples = [random_samples(oracle.rng, IDS, 100) for _ in range(4)]
    blobs = []
    expected = [[alone.predict(sample) for sample in samples]]
    for version in range(1, VERSIONS + 1):
        change = oracle.train(IDS + 50 * version, version % 2 == 0)
        whole = version % 8 == 1
        blobs.append(full(oracle.everything(), version) if whole else delta(change, version))
        alone.apply(blobs[-1])
        expected.append([alone.predict(sample) for sample in samples])
    seen, wrong, finished = set[int](), list[str](), threading.Event()

    def ask(number: int) -> None:
        last = False
        while not last:
            last = finished.is_set()
            got, version = served.predict_with_version(samples[number])
            seen.add(version)
            if not np.array_equal(got, expected[version][number]):
                wrong.append(f"{(got != expected[version][number]).mean():.0%} differ from version {version}")

    readers = [threading.Thread(target=ask, args=(number,)) for number in range(len(samples))]
    for reader in readers:
        reader.start()
    for blob in blobs:
        served.apply(blob)
    finished.set()
    for reader in readers:
        reader.join()
    assert not wrong, wrong[:5]
    assert len(seen) > 2
    assert VERSIONS in seen


identifiers = st.integers(2, 9).map(lambda number: number << 40)
versions = st.lists(
    st.tuples(
        st.booleans(),  # whether it is a full version
        st.dictionaries(st.tuples(st.integers(0, 2), identifiers | st.integers(0, 1)), st.integers(-100, 100)),
        st.sets(st.tuples(st.integers(0, 2), identifiers)),
        st.dictionaries(st.integers(0, 3), st.integers(-100, 100)),
    ),
    max_size=12,
)
WIDTHS = np.array([4, 4, 8, 4])


def as_changes(rows: dict[tuple[int, int], int], removed: set[tuple[int, int]]) -> list[RowChange]:
    """Changes of one table for each field; every column of a row has its value."""
    changes = []
    for field in range(4):
        ids = np.array([id_ for of, id_ in rows if of == field], np.int64)
        values = np.array([value for (of, _), value in rows.items() if of == field], np.float32)
        gone = np.array([id_ for of, id_ in removed if of == field], np.int64)
        numbers = [np.full(len(own_ids), field) for own_ids in (ids, gone)]
        changes.append(RowChange(ids, numbers[0], np.repeat(values[:, None], WIDTHS[field], 1), gone, numbers[1]))
    return changes


@given(versions)
def test_tables_equal_dictionaries(versions: list) -> None:
    """Before, with, and after merging an overlay; earlier tables keep their values until the overlay is merged.

    Fields 0 and 1 share a collisionless table, whose reserved rows belong to both; field 2 has one of another width,
    and field 3 has numbered rows.
    """
    sizes, schema = np.array([-1, -1, -1, 4]), collisionless_schema()
    served = ServedRows(schema, sizes, np.array([0, 0, 1, 2]), WIDTHS, "float32")
    asked = [0, 1, *(number << 40 for number in range(2, 10)), -3]
    cities = [-1, 0, 1, 2, 3, 4, -5, 1 << 30, 0, 1, 2]
    single = torch.tensor([[id_, id_, city] for id_, city in zip(asked, cities, strict=True)])
    bags = {"basket": Bags(torch.tensor(asked), torch.arange(len(asked) + 1))}
    samples = SampleBlock(torch.zeros(len(asked), 1), torch.zeros(len(asked)), single, bags)
    rows = {(field, id_): 0 for field in (0, 2) for id_ in (0, 1)} | {(3, id_): 0 for id_ in range(4)}

    def check(tables: tuple, rows: dict[tuple[int, int], int]) -> None:
        unknown, missing = np.zeros(4, np.int64), np.zeros(4, np.int64)
        got = served.gather(samples, tables, unknown)
        for b in range(len(asked)):
            for field in range(4):
                id_ = int(single[b, 2]) if field == 3 else asked[b]
                key = (0 if field == 1 and id_ in (0, 1) else field, id_)
                default = (0 if field == 1 else field, 0)
                assert (got[b, field, : WIDTHS[field]] == rows.get(key, rows[default])).all(), (field, id_)
                missing[field] += key not in rows or key == default
        np.testing.assert_array_equal(unknown, missing)

    for whole, written, removed, numbered in versions:
        changed = {(0 if id_ in (0, 1) and field == 1 else field, id_): v for (field, id_), v in written.items()}
        changed |= {(3, id_): value for id_, value in numbered.items()}
        removed = removed - changed.keys()
        before, tables = dict(rows), served.tables
        if whole:
            rows = {key: value for key, value in rows.items() if key[0] == 3 or key[1] in (0, 1)} | changed
            served.replace(as_changes(changed, set()))
        else:
            rows = {key: value for key, value in (rows | changed).items() if key not in removed}
            served.overlay(as_changes(changed, removed))
            check(tables, before)
            check(served.tables, rows)
            served.merge(as_changes(changed, removed))
        check(served.tables, rows)
        assert served.resident == sum(field != 3 and id_ > 1 for field, id_ in rows)


FIELDS, DENSE, DIM = ["a", "b", "c"], 2, 8
SIZES = (DENSE, len(FIELDS), physical_dim(DIM))


@pytest.mark.parametrize("name", tiered(FLAT, ("deepfm", "dcnmix", "autoint", "ple")))
def test_inference_equals_the_network_of_training(name: str) -> None:
    """float32 sums in another order: 1e-6 is about ten units in the last place of a probability."""
    config = ModelConfig(name=name, embedding_dim=DIM, hidden=(16, 16))
    first, second = (build_network(config, FIELDS, DENSE, 2 if name in ("mmoe", "ple", "shared_bottom") else 1).eval()
                     for _ in range(2))  # fmt: skip
    inference = InferenceNetwork(first, 0.5, SIZES)
    assert inference.replays
    renewed = inference.with_weights(second.state_dict())
    again = renewed.with_weights(first.state_dict())
    for samples in (1, 7, 32, 33):
        dense, rows = torch.randn(samples, DENSE), 0.3 * torch.randn(samples, *SIZES[1:])
        for network, served in ((first, inference), (second, renewed), (first, again)):
            expected = (network(dense, rows) + 0.5).sigmoid().detach()
            torch.testing.assert_close(served(dense, rows), expected, atol=1e-6, rtol=0)
            with torch.autocast("cpu"):
                torch.testing.assert_close(served(dense, rows).float(), expected, atol=0.05, rtol=0)


class Branching(nn.Module):
    """Its operations depend on the number of samples."""

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        return dense.sum(1) if len(dense) == 1 else rows.sum((1, 2))


class Scaling(nn.Module):
    """Reads a weight as a number, which a recording would take for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, dense: Tensor, rows: Tensor) -> Tensor:
        return rows.sum((1, 2)) * self.scale.item()


def test_networks_that_change_their_operations_or_read_weights_as_numbers_are_not_replayed() -> None:
    branching, scaling = (InferenceNetwork(module, 0.0, SIZES) for module in (Branching(), Scaling()))
    dense, rows = torch.randn(5, DENSE), torch.randn(5, *SIZES[1:])
    assert not branching.replays
    assert not scaling.replays
    torch.testing.assert_close(branching(dense, rows), rows.sum((1, 2)).sigmoid())
    torch.testing.assert_close(branching(dense[:1], rows[:1]), dense[:1].sum(1).sigmoid())
    found = scaling.with_weights({"scale": torch.tensor(3.0)})(dense, rows)
    torch.testing.assert_close(found, (3 * rows.sum((1, 2))).sigmoid())
