"""Exports of runs with id tables: a served model predicts what the run does, from raw samples."""

from pathlib import Path

import numpy as np
import pytest

from cowrec.data_pipeline import SampleCodec
from cowrec.data_pipeline.synthetic.drifting import drifting_tables
from cowrec.trainer.export.export import export_run
from cowrec.trainer.serving.served_model import ServedModel
from online_cases import DRIFT, make_case
from trained_runs import predicted, run

SHARED = "id_table.tables={both = {fields = ['C1', 'C3'], capacity = 900}}"


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_case(tmp_path_factory.mktemp("exports"))


@pytest.mark.parametrize(
    "settings", [[SHARED], [SHARED, "id_table.kind=hash", "id_table.capacity=50", "id_table.expire_after=''"]]
)
def test_raw_samples_get_the_predictions_of_the_run(case: Path, tmp_path: Path, settings: list[str]) -> None:
    """The test split follows the training split in the generated samples; float32 sums are in another order."""
    run(case, tmp_path / "run", "train.epochs=1", *settings)
    expected = predicted(tmp_path / "run", case / "data")
    export_run(tmp_path / "run", tmp_path / "export")
    codec = SampleCodec.load(tmp_path / "export")
    samples = codec.encode(codec.from_table(next(drifting_tables(DRIFT, DRIFT.rows, 500))))
    served = ServedModel.load(tmp_path / "export").predict(samples.block)
    np.testing.assert_allclose(served, expected, atol=1e-6)
    assert np.ptp(served) > 0.05
