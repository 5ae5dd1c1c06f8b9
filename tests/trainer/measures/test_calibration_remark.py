"""The newest samples of a test split by time, and the remark on a calibration that is off there."""

from math import nan
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cowrec.data_pipeline import PrepareConfig, prepare
from cowrec.trainer.measures.quality import calibration_remark
from trained_runs import report_of, run
from trainer_cases import config_file

DAY, ROWS, TESTED, NEWEST = 86_400, 600, 240, 24
COLUMNS = 'label = "click"\ntime = "time"\nfields = [{name = "city", kind = "categorical"}]\n'


def test_the_newest_tenth_is_measured_and_its_drift_is_remarked(tmp_path: Path) -> None:
    """Everything is clicked in the end; the samples are stored in random order."""
    draw = np.random.default_rng(0)
    click = draw.random(ROWS) < 0.3
    click[-NEWEST:] = True
    table = pa.table({"click": click, "time": np.arange(ROWS) * DAY, "city": draw.integers(0, 5, ROWS)})
    pq.write_table(table.take(pa.array(draw.permutation(ROWS))), tmp_path / "raw.parquet")
    (tmp_path / "columns.toml").write_text(COLUMNS)
    config_file(tmp_path)
    for split in ("time", "random"):
        settings = PrepareConfig(split=split, test_fraction=TESTED / ROWS)
        data = tmp_path / split
        prepare("tabular", [tmp_path / "raw.parquet"], data, settings, schema_file=tmp_path / "columns.toml")
        run(tmp_path, tmp_path / f"run_{split}", data=data)
    report = report_of(tmp_path / "run_time")
    assert (report["newest"]["rows"], report["newest"]["ctr"]) == (NEWEST, 1)
    assert report["newest"] == report["epochs"][-1]["newest"]
    assert report["calibration_remark"].startswith("the newest tenth of the test samples has ")
    other = report_of(tmp_path / "run_random")
    assert ("newest" in other, other["calibration_remark"]) == (False, None)


def remark(
    calibration: float, *, auc: float = 0.7, whole: float = 1.0, rows: int = 10_000, ctr: float = 0.2
) -> str | None:
    newest = {"calibration": calibration, "auc": auc, "rows": rows, "ctr": ctr}
    return calibration_remark({"calibration": whole, "auc": 0.7, "newest": newest})


def test_the_remark_tells_drifts_apart() -> None:
    assert remark(1.09) is remark(0.91) is remark(nan, ctr=0.0) is calibration_remark({"auc": 0.7}) is None
    assert remark(1.25, rows=100) is None, "20 clicks are off by 22 % by chance"
    for found, expected in (
        (
            remark(1.25),
            "has 25% too many predicted clicks. AUC is not lower there: the click rate has changed lately, to 0.",
        ),
        (remark(0.8, auc=0.65), "has 20% too few predicted clicks. AUC is 5.0 points lower there: what is clicked has"),
        (
            remark(1.25, whole=1.2),
            "clicks. Calibration of the whole split is 1.200: the click rate differs from that of",
        ),
    ):
        assert expected in str(found)
        assert str(found).endswith(". Train on newer samples, or as they arrive (cowrec online)")
