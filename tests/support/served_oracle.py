"""Plain tables of dictionaries as the oracle of a served model, whose versions they publish."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import torch

from cowrec.data_pipeline import MISSING, OUT_OF_VOCABULARY, DenseField, Schema, SparseField
from cowrec.data_pipeline.dataset.sample_block import Bags, SampleBlock
from cowrec.models import ModelConfig, build_network
from cowrec.trainer.export.export import TrainedTable, write_export
from cowrec.trainer.publishing.blob import Blob, Change, TableChange

Key = tuple[int, int]
"""Number of the feature, id."""
DIM, WIDTH, USER_WIDTH = 3, 4, 8
CONFIG = ModelConfig(embedding_dim=DIM, hidden=(5,), embedding_dims={"user": 6})


def full(change: Change, version: int = 1) -> Blob:
    return Blob(version, version - 1, "full", "lineage", 0.0, change)


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
        tables["cities"] = TableChange(np.arange(4), np.array(self.cities, np.float32))
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
        self.cities = [self.row("cities") for _ in self.cities]
        if dense:
            with torch.no_grad():
                for each in self.network.parameters():
                    each.normal_(std=0.5)
        return self.change(written, deleted, dense)

    def everything(self) -> Change:
        return self.change({name: list(table) for name, table in self.tables.items()}, {}, dense=True)

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
