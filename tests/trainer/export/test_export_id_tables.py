"""Exports of runs with id tables: a served model predicts what the run does, from raw samples."""

from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet as pq

from cowrec.data_pipeline import SampleCodec
from cowrec.data_pipeline.synthetic.drifting import drifting_tables
from cowrec.trainer.config.run import load_config
from cowrec.trainer.export.export import export_run
from cowrec.trainer.serving.served_model import ServedModel
from cowrec.trainer.training.loop import train
from cowrec.trainer.training.saved_run import predict_run
from online_cases import DRIFT, make_case

SHARED = "id_table.tables={both = {fields = ['C1', 'C3'], capacity = 900}}"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("exports"))


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["id_table.kind=hash", "id_table.capacity=50", "id_table.expire_after=''"],
        [SHARED],
        [SHARED, "id_table.kind=hash", "id_table.capacity=50", "id_table.expire_after=''"],
    ],
    ids=["collisionless", "hash", "collisionless_shared", "hash_shared"],
)
def test_raw_samples_get_the_predictions_of_the_run(case: Path, tmp_path: Path, settings: list[str]) -> None:
    """The test split follows the training split in the generated samples; float32 sums are in another order."""
    config = load_config(case / "run.toml", ["train.epochs=1", *settings])
    train(config, case / "data", tmp_path / "run")
    predict_run(tmp_path / "run", case / "data", tmp_path / "predicted.parquet")
    expected = pq.read_table(tmp_path / "predicted.parquet")["prediction"].to_numpy()
    export_run(tmp_path / "run", tmp_path / "export")
    codec = SampleCodec.load(tmp_path / "export")
    samples = codec.encode(codec.from_table(next(drifting_tables(DRIFT, DRIFT.rows, 500))))
    served = ServedModel.load(tmp_path / "export").predict(samples.block)
    np.testing.assert_allclose(served, expected, atol=1e-6)
    assert np.ptp(served) > 0.05
