"""An export predicts what the trained model predicts, states its error, and appears complete or not at all."""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from cowrec.data_pipeline import Reader, Schema
from cowrec.models import ModelConfig, build_network, physical_dim
from cowrec.trainer.config.run import load_config
from cowrec.trainer.export.export import export_run, exported_network
from cowrec.trainer.export.manifest import Manifest, TableManifest, dequantise, fingerprint, quantise
from history_cases import FLAT
from refusal import refused
from tiers import tiered
from trained_runs import predicted, run, write_network
from trainer_cases import UNWEIGHTED, config_file, make_data

DIM = 6
TRAINED = {"wdl": "unweighted", "dcnmix": "weighted"}
"""Networks, and their data."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, and one data set for each kind of bags; "tags" are averaged in the unweighted one."""
    folder = tmp_path_factory.mktemp("export")
    config_file(folder)
    weighted = make_data(folder / "weighted")
    mean_pooled = make_data(folder / "unweighted", UNWEIGHTED) / "schema.json"
    mean_pooled.write_text(mean_pooled.read_text().replace('"pooling": "sum"', '"pooling": "mean"'))
    single = make_data(folder / "single", ("price", "city"))
    run(folder, folder / "wdl", "train.epochs=1", "model.name=wdl", data=mean_pooled.parent)
    run(folder, folder / "dcnmix", "train.epochs=1", "model.name=dcnmix", "model.options.layers=2", data=weighted)
    run(folder, folder / "single" / "run", "train.epochs=1", data=single)
    return folder


def looked_up(exported: Path, data: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense features, and rows [B, F, P] pooled by plain loops, of the test split."""
    schema = Schema.load(exported)
    (batch,) = Reader(data, "test", batch_size=1 << 20).epoch(0)
    bags = batch.sparse.to_dict()
    rows = torch.zeros(len(batch.label), len(schema.sparse), physical_dim(DIM))
    for number, field in enumerate(schema.sparse):
        table = dequantise(**load_file(exported / "tables" / f"{field.name}.safetensors"))
        bag, start = bags[field.name], 0
        weights = bag.weights_or_none()
        for sample, length in enumerate(bag.lengths().tolist()):
            for k in range(start, start + length):
                rows[sample, number] += table[bag.values()[k]] * (1 if weights is None else weights[k])
            if field.pooling == "mean" and not schema.is_weighted:
                rows[sample, number] /= max(length, 1)
            start += length
    return batch.dense, rows


def served(exported: Path, data: Path) -> np.ndarray:
    program = torch.export.load(exported / "network.pt2").module()
    with torch.no_grad():
        return program(*looked_up(exported, data)).sigmoid().numpy()


@pytest.mark.parametrize("model", TRAINED)
def test_float32_predicts_what_the_trained_model_predicts(folder: Path, tmp_path: Path, model: str) -> None:
    """Holds up to the order of summation; bags have 0 to 4 ids, with weights, or averaged for wdl."""
    manifest, data = export_run(folder / model, tmp_path / "export"), folder / TRAINED[model] / "data"
    expected = predicted(folder / model, data)
    np.testing.assert_allclose(served(tmp_path / "export", data), expected, rtol=2e-5, atol=2e-6)
    assert manifest == Manifest.load(tmp_path / "export")
    assert (manifest.step, manifest.logits_error < 1e-5) == (5, True)
    assert all(table.max_error == 0 for table in manifest.tables.values())
    program = torch.export.load(tmp_path / "export" / "network.pt2").module()
    dense = load_file(tmp_path / "export" / "dense.safetensors")
    assert dense.keys() == program.state_dict().keys()
    assert all(torch.equal(dense[name], value) for name, value in program.state_dict().items())
    for samples in (0, 1):
        assert program(torch.zeros(samples, 1), torch.zeros(samples, len(manifest.tables), 8)).shape == (samples,)


@pytest.mark.parametrize("model", tiered([name for name in FLAT if name not in TRAINED], ("deepfm", "autoint", "ple")))
def test_exported_networks_compute_the_same(folder: Path, model: str) -> None:
    """For any number of samples; weights are random, biases too; two fields have widths of their own."""
    torch.manual_seed(0)
    schema = Schema.load(folder / "weighted" / "data")
    config = ModelConfig(model, DIM, (5, 4), embedding_dims={"city": 3, "history": 9})
    network = build_network(config, [field.name for field in schema.sparse], len(schema.dense)).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.5)
        program = exported_network(network, config, schema).module()
        for samples in (0, 1, 5):
            inputs = torch.rand(samples, 1), torch.rand(samples, len(schema.sparse), physical_dim(9))
            torch.testing.assert_close(program(*inputs), network(*inputs), rtol=1e-5, atol=1e-5)


def test_a_network_that_torch_cannot_export_is_refused(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    write_network(tmp_path / "my_branching.py", "self.out(x.flat).squeeze(1) if x.wide.sum() > 0 else x.wide")
    monkeypatch.syspath_prepend(tmp_path)
    schema, config = Schema.load(folder / "weighted" / "data"), ModelConfig("my_branching:Net", DIM)
    network = build_network(config, [field.name for field in schema.sparse], len(schema.dense)).eval()
    with pytest.raises(ValueError, match=r'"my_branching:Net" cannot be exported .* must not depend on the values'):
        exported_network(network, config, schema)


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_quantised_tables_have_the_stated_error(folder: Path, tmp_path: Path, precision: str) -> None:
    """Errors of tables are maxima and are recomputed here. The error of logits is measured on random samples, which
    cover more combinations of rows than the data; dense features differ, hence the tolerance of a half.
    """
    run_dir, data = folder / "single" / "run", folder / "single" / "data"
    trained = export_run(run_dir, tmp_path / "trained")
    manifest = export_run(run_dir, tmp_path / "export", precision)
    assert sum(size for size, _ in manifest.files.values()) < sum(size for size, _ in trained.files.values())
    for name, table in manifest.tables.items():
        exact = load_file(tmp_path / "trained" / "tables" / f"{name}.safetensors")["rows"].double()
        stored = load_file(tmp_path / "export" / "tables" / f"{name}.safetensors")
        rows = stored["rows"].double() * (stored["scale"].double()[:, None] if precision == "int8" else 1)
        rounded = torch.finfo(torch.float32).eps * float(exact.abs().max())  # of the product, in float32
        assert abs(float((rows - exact).abs().max()) - table.max_error) <= rounded
        assert table.max_error > 0
    both = served(tmp_path / "export", data), predicted(run_dir, data)
    found, expected = (torch.from_numpy(tensor).double().logit() for tensor in both)
    off = float((found - expected).abs().max())
    assert 0 < off <= 1.5 * manifest.logits_error + 1e-5


def test_int8_rounds_to_half_a_scale() -> None:
    """Each row has its own scale; rows of zeros stay zero, and no rows stay no rows."""
    rows = torch.tensor([[1.0, -127.0, 63.4], [0, 0, 0], [1e-6, -2e-6, 3e-6], [1e30, 0, -1e30]])
    stored = quantise(rows, "int8")
    assert stored["rows"].dtype == torch.int8
    assert stored["rows"].tolist()[:2] == [[1, -127, 63], [0, 0, 0]]
    assert ((dequantise(**stored) - rows).abs() <= stored["scale"][:, None] * 0.5000001).all()
    assert dequantise(**quantise(rows[:0], "int8")).shape == (0, 3)
    for precision, value in (("float16", 7e4), ("int8", float("inf")), ("int8", float("nan"))):
        refused("export in float32", quantise, torch.tensor([[value]]), precision)


def test_a_changed_file_is_detected(folder: Path, tmp_path: Path) -> None:
    exported = tmp_path / "export"
    export_run(folder / "dcnmix", exported)
    listed = json.loads((exported / "manifest.json").read_text())["files"]
    found = {str(path.relative_to(exported)) for path in exported.rglob("*") if path.is_file()}
    assert {*listed, "manifest.json"} == found
    for name, (size, sha256) in listed.items():
        file = exported / name
        written = file.read_bytes()
        assert (len(written), hashlib.sha256(written).hexdigest()) == (size, sha256)
        for damaged in (written[:-1], bytes([written[0] ^ 1]) + written[1:]):
            file.write_bytes(damaged)
            refused(f"{file.name} has (.* bytes instead of|another checksum than)", Manifest.load, exported)
        file.unlink()
        refused(f"it has no {name}", Manifest.load, exported)
        file.write_bytes(written)
    Manifest.load(exported)
    refused("is not an export", Manifest.load, folder / "dcnmix")


def test_the_fingerprint_is_of_what_weights_mean(folder: Path, tmp_path: Path) -> None:
    """Neither the Parquet library and the counts of a vocabulary, nor the splits are; the order of its ids is.

    Nor is dropout, nor a field's width that equals the others'.
    """
    single, data, model = folder / "single" / "data", tmp_path / "data", load_config(folder / "run.toml").model
    shutil.copytree(single / "vocabulary", data / "vocabulary")
    schema, file = Schema.load(single), data / "vocabulary" / "city.parquet"
    tables = {"city": TableManifest(("city",), len(pq.read_table(file)) + 2, False, 0.0)}
    expected, table = fingerprint(single, model, tables), pq.read_table(file)

    def changed(config: ModelConfig = model, order: Any = None, city: Any = tables["city"], **others: Any) -> str:
        dataclasses.replace(schema, **others).save(data)
        values = table["value"] if order is None else table["value"].take(order)
        pq.write_table(pa.table({"value": values}), file, row_group_size=2)
        return fingerprint(data, config, {"city": city})

    assert changed(splits={}) == changed(negative_fraction=1) == expected
    assert changed(dataclasses.replace(model, dropout=0.5, embedding_dims={"city": model.embedding_dim})) == expected
    others = [
        changed(dataclasses.replace(model, embedding_dims={"city": model.embedding_dim + 1})),
        changed(dataclasses.replace(model, hidden=(9,))),
        changed(order=pa.array([1, 0, *range(2, len(table))])),
        changed(labels=("buy",)),
        changed(negative_fraction=0.5),
        changed(city=dataclasses.replace(tables["city"], rows=3)),
        changed(city=dataclasses.replace(tables["city"], collisionless=True)),
        changed(dense=(dataclasses.replace(schema.dense[0], maximum=1e9), *schema.dense[1:])),
    ]
    assert len({expected, *others}) == 9
    assert changed(city=dataclasses.replace(tables["city"], max_error=0.5)) == expected
    raw = dataclasses.replace(tables["city"], collisionless=True)
    assert changed(city=dataclasses.replace(raw, rows=99)) == changed(city=raw)
