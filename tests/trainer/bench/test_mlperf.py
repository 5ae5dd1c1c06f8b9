"""`cowrec bench --preset mlperf-dcnv2`: shape of network and samples, its lines, and several processes."""

import contextlib
import json
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from commands.command_line import Cowrec, exit_code
from cowrec.trainer.bench import mlperf
from cowrec.trainer.bench.mlperf import (
    IDS_PER_SAMPLE,
    TABLE_ROWS,
    build_mlperf,
    bytes_per_sample,
    make_batch,
    mlperf_config,
)
from cowrec.trainer.bench.parts import flops_per_sample
from cowrec.trainer.runtime.processes import Process, process_group
from cowrec.trainer.sharded_model.build import dense_parameters
from process_groups import in_processes
from trainer_cases import free_port, launched_as

SMALL = ["--preset", "mlperf-dcnv2", "--rows", "200", "--batch-sizes", "32", "--seconds", "0"]


def test_the_shape_is_the_published_one() -> None:
    """204,184,588 rows of 128 floats are the 104.5 GB, and 214 the ids of a sample, that MLPerf's documents name."""
    assert (len(TABLE_ROWS), sum(TABLE_ROWS)) == (26, 204_184_588)
    assert (len(IDS_PER_SAMPLE), sum(IDS_PER_SAMPLE)) == (26, 214)
    config = mlperf_config(4, "float32", "off", "cpu")
    with process_group("cpu") as process:
        dense = dense_parameters(build_mlperf(config, [10] * 26, process))
        crosses = 27 * 128
        layers = [13, 512, 256, 128], [crosses, 1024, 1024, 512, 256, 1]
        kernels = [fan_in * fan_out for sizes in layers for fan_in, fan_out in pairwise(sizes)]
        kernels += 3 * [2 * crosses * 512]
        assert flops_per_sample(dense) == 6 * sum(kernels)
        biases = sum(layers[0][1:] + layers[1][1:]) + 3 * crosses
        assert sum(each.numel() for each in dense.values()) == sum(kernels) + biases


def test_samples_have_the_published_numbers_of_ids_and_fit_the_tables() -> None:
    process = Process(0, 2, 2, True, torch.device("cpu"), timedelta(seconds=1))
    batch = make_batch(TABLE_ROWS, 1000, process, seed=3)
    assert (batch.label.numel(), batch.global_batch_size, tuple(batch.dense.shape)) == (500, 1000, (500, 13))
    for feature, rows, count in zip(batch.sparse.to_dict().values(), TABLE_ROWS, IDS_PER_SAMPLE, strict=True):
        assert feature.lengths().tolist() == [count] * 500
        ids = feature.values().view(500, count)
        assert 0 <= int(ids.min()) <= int(ids.max()) < rows
        # Equal first ids have equal further ids.
        assert len(ids.unique(dim=0)) == len(ids[:, 0].unique())
    # The rank is log-uniform: half of the first ids of 40 million rows are below its square root.
    first = batch.sparse.to_dict()["C1"].values()[::3]
    assert 0.4 < (first < 40_000_000**0.5).float().mean() < 0.6
    again = make_batch(TABLE_ROWS, 1000, process, seed=3)
    assert torch.equal(again.sparse.values(), batch.sparse.values())
    assert not torch.equal(make_batch(TABLE_ROWS, 1000, process, seed=4).sparse.values(), batch.sparse.values())


def test_bytes_of_the_embeddings_are_counted_by_hand() -> None:
    """With tables of one row, 100 samples share 26 rows."""
    process = Process(0, 1, 1, False, torch.device("cpu"), timedelta(seconds=1))
    batch = make_batch((1,) * 26, 100, process, seed=0)
    assert bytes_per_sample(batch) == pytest.approx(4 * 214 + 4 * 26 * 512 + 0.26 * (3 * 512 + 8))


def test_a_small_bench(cowrec: Cowrec, tmp_path: Path) -> None:
    output = tmp_path / "bench.jsonl"
    _, printed, _ = cowrec("bench", *SMALL, "--clip", "off", "--output", output)
    line, rows = json.loads(output.read_text()), sum(min(rows, 200) for rows in TABLE_ROWS)
    assert (line["table_rows"], line["table_bytes"], line["moments_bytes"]) == (rows, 512 * rows, 4 * rows)
    assert (line["model"], line["mode"], line["batch_size"]) == ("mlperf-dcnv2", "rowwise_adagrad", 32)
    assert line["samples_per_second_of_gpu"] == line["samples_per_second"] == pytest.approx(32e3 / line["step_ms"])
    assert sum(line["step_parts_ms"].values()) == pytest.approx(line["step_ms"])
    assert min(line["step_parts_ms"].values()) >= 0
    assert line["roofline"]["step_ms"] > 0
    assert {"versions", "device", "git_commit", "peak_memory_bytes", "host_ms"} <= line.keys()
    assert "MLPerf, 8 x H200, batch 55,296: 1,880,000 samples/s each" in printed


def bench_in_process(rank: int, folder: Path, port: int) -> None:
    """Runs the command as a process under torchrun, for ten steps instead of 100; it prints to ``stdout.rankN``."""
    launched_as(rank, 2, port)
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        (folder / f"stdout.rank{rank}").open("w") as printed,
        contextlib.redirect_stdout(printed),
    ):
        monkeypatch.setattr(mlperf, "_MOST_STEPS", 10)
        exit_code(monkeypatch, "bench", *SMALL, "--output", folder / "bench.jsonl")


def test_several_processes_measure_together(tmp_path: Path) -> None:
    in_processes(bench_in_process, (tmp_path, free_port()), 2)
    (line,) = (json.loads(text) for text in (tmp_path / "bench.jsonl").read_text().splitlines())
    assert (line["world_size"], line["steps"], line["clip"]) == (2, 10, "on")
    assert line["config"]["clip"]["rule"] == "cowclip"
    assert line["samples_per_second_of_gpu"] == line["samples_per_second"] / 2
    printed = [(tmp_path / f"stdout.rank{rank}").read_text() for rank in range(2)]
    assert [text.count("MLPerf, 8 x H200") for text in printed] == [1, 0]
