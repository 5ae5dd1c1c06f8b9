"""A run whose signal is in vectors: trained from a table, measured, exported and served."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from cowrec.data_pipeline import SampleCodec
from cowrec.trainer import fit, load_config
from cowrec.trainer.export.export import export_run
from cowrec.trainer.serving.request_samples import RequestSample, encode_samples
from cowrec.trainer.serving.served_model import ServedModel
from trainer_cases import CONFIG

ROWS, WIDTH = 1500, 8


def test_vectors_are_learned_from_exported_and_served(tmp_path: Path) -> None:
    """The predictions of requests are those of tables, also where the vector is shared by the samples of a request."""
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(ROWS, WIDTH))
    clicked = (vectors @ draw.normal(size=WIDTH) > 0).astype(int)
    columns = {"clicked": clicked, "user": [f"u{integer}" for integer in draw.integers(0, 9, ROWS)]}
    columns["emb"] = pa.array(list(vectors.astype(np.float32)), pa.list_(pa.float32(), WIDTH))
    table = pa.table(columns)
    (tmp_path / "run.toml").write_text(CONFIG)
    config = load_config(tmp_path / "run.toml", ["train.epochs=3"])
    model = fit(table, run_dir=tmp_path / "run", label="clicked", config=config)
    assert model.report["auc"] > 0.9
    importance = model.evaluate(importance=True)["importance"]
    assert [*importance] == ["emb", "user"], "a vector is permuted as one"
    assert importance["emb"]["auc_drop"] > 0.3
    rows = table.slice(0, 5).to_pylist()
    rows[3]["emb"] = None
    expected = model.predict(pa.Table.from_pylist(rows, table.schema))
    export_run(tmp_path / "run", tmp_path / "export")
    served, codec = ServedModel.load(tmp_path / "export"), SampleCodec.load(tmp_path / "export")
    block, bad = codec.encode_request(rows)
    assert not bad
    np.testing.assert_allclose(served.predict(block), expected, rtol=1e-5)
    shared = {"emb": rows[0]["emb"]}
    together, _ = encode_samples(codec, [RequestSample({"user": rows[0]["user"]}, shared)] * 2)
    assert together is not None
    np.testing.assert_allclose(served.predict(together), expected[[0, 0]], rtol=1e-5)
