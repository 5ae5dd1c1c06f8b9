"""Runs on histories: several processes and `serve` predict what one process and `predict` do."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from cowrec.data_pipeline import RESERVED_ROWS, SampleCodec, Schema, prepare
from cowrec.trainer import export_model, load_config
from cowrec.trainer.export.manifest import Manifest
from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.serving.request_samples import RequestSample, encode_samples
from cowrec.trainer.serving.served_model import ServedModel
from cowrec.trainer.sharded_model.run_plan import RunPlan
from history_cases import HISTORIES, category, make_histories
from run_comparison import assert_close, state_of
from shared_work import made_once
from trained_runs import predicted, run
from trainer_cases import case_of, train_in_processes

IDS = ["id_table.kind=collisionless", "id_table.capacity=100"]
HASHED = ["id_table.kind=hash", "id_table.capacity=30"]
SLOW = ["optimizer.dense_lr=1e-3", "optimizer.embedding_lr=1e-3"]
"""At the rates of 1e-2 an HSTU triples a rounding error with each step: halving its batch in one process gives 1e-5."""
SETTINGS: dict[str, tuple[str, list[str]]] = {
    "vocabulary": ("vocabulary", [f"model.embedding_dims.{name}=9" for name in ("item", "history")]),
    "ids": ("raw", [*IDS, *SLOW, "model.name=hstu"]),
    "hashed": ("raw", [*HASHED, "model.name=bst", "model.dropout=0.2", "optimizer.absent_rows=lazy"]),
    "own": ("vocabulary", ["model.name=my_attention:AttentionPooled"]),
}
PAGE = Path(__file__).resolve().parents[3] / "docs" / "models.md"


def make_runs(folder: Path) -> None:
    for data in ("vocabulary", "raw"):
        make_histories(folder / data, raw_ids=data == "raw")
    _, *blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    code = "\n".join(["import torch", "from torch import Tensor, nn", *blocks])
    (folder / "vocabulary" / "my_attention.py").write_text(code)
    for name, (data, settings) in SETTINGS.items():
        run(folder / data, folder / name / "run", *settings)
        export_model(folder / name / "run", folder / name / "export")


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = made_once(tmp_path_factory, "histories", make_runs)
    monkeypatch.syspath_prepend(folder / "vocabulary")
    return folder


def drawn_samples(count: int) -> list[dict[str, Any]]:
    """Samples with histories of 0 to 9 ids, unknown ones among them, as lists, null or missing ids."""
    rng = random.Random(0)
    ids = [f"item_{rng.randrange(HISTORIES.items + 9)}" for _ in range(60)] + [""]
    samples = []
    for number in range(count):
        history = [rng.choice(ids) for _ in range(rng.choice((0, 0, 1, 1, 2, 4, 5, 9)))]
        history = rng.choice((history, history or None)) if number % 9 else [""]
        item, several = rng.choice([*ids, None]), [] if history in (None, [""]) else history
        along = {"categories": [category(item) for item in several], "lengths": [str(len(ids)) for ids in several]}
        along["times"] = [str(number - rng.randrange(-3, 3000)) for _ in several]
        along = along if several else {name: rng.choice((history, None, [])) for name in along}
        samples.append({"item": item, "history": history, "category": category(item or ""), **along, "time": number})
    return samples


@pytest.mark.parametrize("name", SETTINGS)
def test_predict_and_serve_agree_on_drawn_samples(folder: Path, tmp_path: Path, name: str) -> None:
    """For one sample, for many, and with fields that samples share; float32 sums in another order."""
    samples, run_dir = drawn_samples(120), folder / name / "run"
    rows = [{**fields, "label": number % 2} for number, fields in enumerate(samples)]
    kinds = {"history": pa.list_(pa.string()), "item": pa.string(), "label": pa.int8(), "time": pa.int64()}
    kinds |= {"category": pa.string(), **dict.fromkeys(("categories", "lengths", "times"), kinds["history"])}
    columns = {column: pa.array([row[column] for row in rows], kind) for column, kind in kinds.items()}
    pq.write_table(pa.table(columns), tmp_path / "new.parquet")
    prepare("tabular", [tmp_path / "new.parquet"], tmp_path / "new", like=run_dir)
    expected = predicted(run_dir, tmp_path / "new")
    model, codec = (kind.load(folder / name / "export") for kind in (ServedModel, SampleCodec))
    encoded = codec.encode(codec.from_json([json.dumps(row).encode() for row in rows]))
    np.testing.assert_allclose(model.predict(encoded.block), expected, atol=1e-6)
    for sample, wanted in zip(samples[:30], expected[:30], strict=True):
        block, problems = codec.encode_request([sample])
        assert not problems
        np.testing.assert_allclose(model.predict(block), wanted, atol=1e-6)
    shared = {name: samples[1][name] for name in ("history", "categories", "lengths", "times", "time")}
    own = [{name: fields[name] for name in ("item", "category")} for fields in samples]
    block, problems = encode_samples(codec, [RequestSample(fields, shared) for fields in own])
    apart, _ = codec.encode_request([{**fields, **shared} for fields in samples])
    assert not any(problems)
    np.testing.assert_array_equal(model.predict(block), model.predict(apart))


def test_a_history_and_what_goes_along_are_shared_by_samples_together(folder: Path) -> None:
    codec, sample = SampleCodec.load(folder / "ids" / "export"), {"item": "item_1", "category": "category 1"}
    both = {"history": ["item_2"], "categories": ["category 2"], "lengths": ["6"], "times": [5], "time": 7}
    for name in both:
        own = {key: value for key, value in both.items() if key != name}
        block, problems = encode_samples(codec, [RequestSample(sample | own, {name: both[name]})])
        assert block is None
        assert re.match(r"shared: \w+ and \w+ go along with each other; share both or none", problems[0])
    assert not any(encode_samples(codec, [RequestSample(sample, both)])[1])


def test_item_and_history_are_one_table(folder: Path) -> None:
    """So the clip counts their ids together, and an id has one row; `seen` has a table of its own."""
    config, schema = load_config(folder / "raw" / "run.toml", IDS), Schema.load(folder / "raw" / "data")
    plan = RunPlan.of(config, schema, Process(0, 1, 1, False, torch.device("cpu")))
    features = {bag.name: bag.feature_names for bag in plan.bags}
    names = ("history", "categories", "lengths", "ages")
    history, categories, lengths, ages = ([f"{name}[{k}]" for k in range(4)] for name in names)
    own = {"seen": ["seen"], "category": ["category", *categories], "lengths": lengths, "ages": ages}
    assert features == {"item": ["item", *history], **own}
    tables = Manifest.load(folder / "ids" / "export").tables
    assert tables["item"].features == ("item",)
    assert tables["item"].rows <= HISTORIES.items + RESERVED_ROWS


def test_several_processes_train_what_one_does(folder: Path) -> None:
    plans, cases = {"vocabulary": "row_wise", "own": "table_wise", "ids": "row_wise"}, []
    for name, plan in plans.items():
        data, settings = SETTINGS[name]
        cases.append(case_of(folder / data, folder / name / "two", *settings, f"sharding.plan={plan}"))
    train_in_processes(*cases)
    for name in plans:
        assert_close(state_of(folder / name / "two"), state_of(folder / name / "run"), atol=1e-5)
