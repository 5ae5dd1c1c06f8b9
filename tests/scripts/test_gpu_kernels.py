"""`scripts/gpu/kernels.py` takes its steps: interpreted by Triton, for the times only a GPU can show."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("triton", reason="Triton is not installed")


def test_each_line_has_the_times_of_the_kernels_on_the_rows_of_the_stream(tmp_path: Path) -> None:
    output = tmp_path / "kernels.jsonl"
    tiny = ["--batch-sizes", "2", "--rows", "4", "--epoch-share", "1e-6", "--steps", "1", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu.kernels", *tiny, "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    on, off = (json.loads(line) for line in output.read_text().splitlines())
    assert (on["clip"], off["clip"], on["batch_size"]) == ("on", "off", 2)
    before = round(1e-6 * 41_256_555 / 2)
    # The second batch, after one that is not timed.
    rows = CriteoIds(max_rows=4).rows(2 * (before + 1), 2)
    assert on["distinct_rows"] == off["distinct_rows"] == sum(len(np.unique(each)) for each in rows)
    for line in (on, off):
        assert list(line["ms"]) == ["find", "replay", "update"]
        assert min(line["ms"].values()) > 0
