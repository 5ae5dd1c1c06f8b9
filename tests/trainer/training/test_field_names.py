"""Fields may have any name, of any characters: also those that torch's modules and pyarrow's tables use."""

import json
import keyword
import random
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cowrec.data_pipeline import PrepareConfig, prepare
from cowrec.data_pipeline.codec import SampleCodec
from cowrec.data_pipeline.dataset.schema import escaped_name
from cowrec.data_pipeline.dataset.shards import load_shards
from cowrec.trainer import evaluate, export_model
from cowrec.trainer.serving.served_model import ServedModel
from trained_runs import metrics, predicted, run
from trainer_cases import config_file

NAMES = sorted({*dir(nn.ModuleDict()), *dir(nn.Parameter()), *keyword.kwlist, "City", "city", "x" * 200, "0", "a-b"})
COMMON = (
    "user.id",
    "",
    "Größe (cm)",
    "user",
    "名" * 300,
    "名" * 299 + "x",
    "a/b",
    "%61",
    "..",
    "train",
    "City",
    "city",
)
CASES = {"rows": COMMON, "hash": tuple(random.Random(0).sample(NAMES, 12))}


@pytest.mark.parametrize("ids", ["rows", pytest.param("hash", marks=pytest.mark.thorough)])
def test_any_name_trains_and_is_served(tmp_path: Path, ids: str) -> None:
    names, rng, rows = CASES[ids], random.Random(0), 120
    columns = {name: [f"v{rng.randrange(6)}" for _ in range(rows)] for name in names}
    table = pa.table({"clicked here": [rng.randrange(2) for _ in range(rows)], **columns})
    pq.write_table(table, tmp_path / "raw.parquet")
    fields = "".join(f'[[fields]]\nname = {json.dumps(name)}\nkind = "categorical"\n' for name in names)
    (tmp_path / "columns.toml").write_text(f'label = "clicked here"\n{fields}')
    config = PrepareConfig(split="order", test_rows=20, raw_ids=ids == "hash")
    prepare("tabular", [tmp_path / "raw.parquet"], tmp_path / "data", config, schema_file=tmp_path / "columns.toml")
    config_file(tmp_path)
    given = [f'optimizer.embedding_lr_factors={{"{names[0]}" = 0.5}}', f'sharding.tables={{"{names[1]}" = "row_wise"}}']
    given += [f'model.embedding_dims={{"{names[2]}" = 3}}', f"id_table.kind={ids}"]
    given += [f'id_table.tables={{"{names[3]}" = {{capacity = 9}}}}'] if ids == "hash" else []
    run(tmp_path, tmp_path / "run", "train.epochs=1", *given)
    plan = json.loads((tmp_path / "run" / "sharding.json").read_text())
    for shown in (metrics(tmp_path / "run", "clip")[-1]["fields"], plan["tables"]):
        assert {name for name in names if len(name) < 200} <= shown.keys()
    groups = evaluate(tmp_path / "run", tmp_path / "data", by=[names[1]])["by"][names[1]]["largest"]
    assert ids == "hash" or {group["id"] for group in groups} == set(columns[names[1]][-20:])
    export_model(tmp_path / "run", tmp_path / "export")
    served = ServedModel.load(tmp_path / "export")
    block = load_shards(tmp_path / "data", served.schema, "test", [0])
    expected = predicted(tmp_path / "run", tmp_path / "data")
    np.testing.assert_allclose(served.predict(block), expected, rtol=0, atol=1e-6)
    sample = {name: columns[name][-1] for name in names}
    request, _ = SampleCodec.load(tmp_path / "export").encode_request([sample])
    np.testing.assert_allclose(served.predict(request), expected[-1:], rtol=0, atol=1e-6)


@given(st.sets(st.text(st.characters(codec="utf-8"), max_size=300), min_size=2, max_size=9))
def test_names_of_files_differ_and_are_portable(names: set[str]) -> None:
    escaped = {name: escaped_name(name) for name in names}
    assert len({*escaped.values()}) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_%-]{1,240}", name) for name in escaped.values())
    plain = {name for name in names if re.fullmatch(r"[\w-]{1,200}", name, re.ASCII)}
    assert {name for name in names if escaped[name] == name} == plain
