"""Fields may have any name of letters, digits, _ and -: also those that torch's modules and pyarrow's tables use."""

import keyword
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import nn

from cowrec.data_pipeline import PrepareConfig, prepare
from cowrec.data_pipeline.dataset.shards import load_shards
from cowrec.trainer.export.export import export_run
from cowrec.trainer.serving.served_model import ServedModel
from trained_runs import predicted, run
from trainer_cases import config_file

NAMES = sorted({*dir(nn.ModuleDict()), *dir(nn.Parameter()), *keyword.kwlist, "City", "city", "x" * 200, "0", "a-b"})
COMMON = ("type", "train", "forward", "half", "keys", "pop", "City", "city")
CASES = {"rows": COMMON, "hash": tuple(random.Random(0).sample(NAMES, 12))}


@pytest.mark.parametrize("ids", CASES)
def test_any_name_trains_and_is_served(tmp_path: Path, ids: str) -> None:
    names, rng, rows = CASES[ids], random.Random(0), 120
    columns = {name: [f"v{rng.randrange(6)}" for _ in range(rows)] for name in names}
    table = pa.table({"clicked here": [rng.randrange(2) for _ in range(rows)], **columns})
    pq.write_table(table, tmp_path / "raw.parquet")
    fields = "".join(f'[[fields]]\nname = "{name}"\nkind = "categorical"\n' for name in names)
    (tmp_path / "columns.toml").write_text(f'label = "clicked here"\n{fields}')
    settings = PrepareConfig(split="order", test_rows=20, raw_ids=ids == "hash")
    prepare("tabular", [tmp_path / "raw.parquet"], tmp_path / "data", settings, schema_file=tmp_path / "columns.toml")
    config_file(tmp_path)
    run(
        tmp_path,
        tmp_path / "run",
        "train.epochs=1",
        f'optimizer.embedding_lr_factors={{"{names[0]}" = 0.5}}',
        f'sharding.tables={{"{names[1]}" = "row_wise"}}',
        f'model.embedding_dims={{"{names[2]}" = 3}}',
        f"id_table.kind={ids}",
        *([f'id_table.tables={{"{names[3]}" = {{capacity = 9}}}}'] if ids == "hash" else []),
    )
    export_run(tmp_path / "run", tmp_path / "export")
    served = ServedModel.load(tmp_path / "export")
    block = load_shards(tmp_path / "data", served.schema, "test", [0])
    expected = predicted(tmp_path / "run", tmp_path / "data")
    np.testing.assert_allclose(served.predict(block), expected, rtol=0, atol=1e-6)
