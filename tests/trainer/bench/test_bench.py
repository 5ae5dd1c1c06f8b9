"""`cowrec bench` and its preset mlperf-dcnv2: rows after most of an epoch, shapes, combinations, results, messages."""

import contextlib
import dataclasses
import json
import re
from datetime import timedelta
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from commands.command_line import Cowrec
from cowrec.data_pipeline.synthetic.criteo_frequencies import CRITEO_SIZES
from cowrec.data_pipeline.synthetic.criteo_ids import CriteoIds
from cowrec.sparse_opt import EmbeddingAdam
from cowrec.trainer.bench import bench as benches
from cowrec.trainer.bench.bench import bench
from cowrec.trainer.bench.criteo import (
    Bench,
    Case,
    cases,
    criteo_config,
    enter_steady_state,
    last_steps,
    make_schema,
)
from cowrec.trainer.bench.mlperf import (
    IDS_PER_SAMPLE,
    TABLE_ROWS,
    build_mlperf,
    make_batch,
    mlperf_bytes_per_sample,
    mlperf_config,
)
from cowrec.trainer.bench.parts import PARTS, bytes_per_sample, flops_per_sample
from cowrec.trainer.runtime.errors import Interrupted, ProcessFailed
from cowrec.trainer.runtime.processes import Process, process_group
from cowrec.trainer.runtime.subprocess_call import Subprocess
from cowrec.trainer.sharded_model.build import build_sharded, dense_parameters, embedding_optimizer
from cowrec.trainer.sharded_model.run_plan import RunPlan
from criteo_stream import last_by_loop
from refusal import refused


@pytest.mark.parametrize("mode", ["replay", pytest.param("dense", marks=pytest.mark.thorough)])
def test_rows_enter_the_state_that_the_stream_leaves(tmp_path, mode):
    assert last_steps(np.array([0, 1, 4, 5, 9], np.int32), 4, 2).tolist() == [0, 1, 1, 2, 2]
    ids, batch_size, steps = CriteoIds(max_rows=30), 8, 5
    np.save(tmp_path / "last.npy", ids.last_samples(steps * batch_size))
    config = criteo_config("deepfm", batch_size, mode)
    case = Case(config, ids, steps * batch_size, tmp_path / "last.npy", 1, 0.0)
    size = torch.arange(12.0) * 1e-3
    with process_group("cpu") as process:
        schema = make_schema(case)
        plan = RunPlan.of(config, schema, process)
        adam = embedding_optimizer(plan, build_sharded(plan))
        assert isinstance(adam, EmbeddingAdam)
        enter_steady_state(case, adam, size, plan.scaled.hyperparameters.betas)
        with adam.as_stored():
            state = adam.state_dict()["state"]
        tables = {
            f"{key.split('.')[-2]}.{name}": value.local_shards()[0].tensor.clone()
            for key, table in state.items()
            for name, value in table.items()
            if name not in ("step", "lrs")
        }
    assert adam.steps == steps
    assert any(key.endswith(".last_step") for key in tables) == (mode == "replay")
    gradients = []
    for field, last in enumerate(last_by_loop(ids, steps * batch_size), 1):
        expected = torch.tensor([-(-sample // batch_size) for sample in last], dtype=torch.int32)
        if mode == "replay":
            assert tables[f"C{field}.last_step"].flatten().tolist() == expected.tolist()
        first, second = tables[f"C{field}.exp_avg"], tables[f"C{field}.exp_avg_sq"]
        assert not first[expected == 0].any()
        assert not second[expected == 0].any()
        gradients.append(first[expected > 0] / 0.1)
        # One gradient in a row that had no moments: (1 - b1) g and (1 - b2) g^2, a few float32 roundings apart.
        torch.testing.assert_close(second[expected > 0], 1e-3 * gradients[-1].square(), rtol=1e-5, atol=0)
    found = torch.cat(gradients)
    # The mean of several hundred squares of a normal number varies by a tenth.
    torch.testing.assert_close(found.square().mean(0).sqrt(), size, rtol=0.25, atol=0)


def test_every_combination_is_measured_batch_size_by_batch_size():
    settings = Bench(["replay", "lazy"], [64, 128], clips=["on", "off"], precisions=["float32", "bfloat16"])
    found, rules = [], ("cowclip_reference", "none")
    for case in cases(settings, CriteoIds(max_rows=50), Path("last.npy")):
        train, optimizer, clip = case.config.train, case.config.optimizer, case.config.clip
        found.append((train.batch_size, train.precision, optimizer.absent_rows, clip.rule))
    assert found == list(product((64, 128), ("float32", "bfloat16"), ("replay", "lazy"), rules))


def test_the_roofline_counts_what_torch_counts():
    """Operations of the dense kernels, forward and backward, equal torch's count; bytes are counted by hand."""
    mlp = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1, bias=False))
    x = torch.randn(16, 12, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        mlp(x).sum().backward()
    assert 16 * flops_per_sample(dict(mlp.named_parameters())) == counter.get_total_flops()
    # Two ids of 8 bytes; two rows of 4 floats out and their gradient, written and read; 1.5 rows of 3 x 4 floats twice.
    assert bytes_per_sample(2, 4, 1.5) == 2 * 8 + 4 * 2 * 4 * 4 + 1.5 * 2 * 3 * 4 * 4


def lines_of(file):
    return [json.loads(text) for text in file.read_text().splitlines()]


def with_a_failure(settings, ids, file):
    """The combinations of a bench, and before them one that cannot read the ids before it."""
    first, *others = cases(settings, ids, file)
    return [dataclasses.replace(first, last_samples=file.with_name("missing.npy")), first, *others]


def test_a_small_bench_and_a_combination_that_fails(cowrec, tmp_path, monkeypatch):
    monkeypatch.setattr(benches, "cases", with_a_failure)
    output = tmp_path / "bench.jsonl"
    what = ["--rows", "200", "--absent-rows", "replay,dense", "--batch-sizes", "64"]
    code, printed, said = cowrec("bench", *what, "--epoch-share", "0.001", "--seconds", "0", "--output", output)
    failed, replay, dense = lines_of(output)
    assert (code, failed["mode"], replay["mode"], dense["mode"]) == (2, "replay", "replay", "dense")
    assert "missing.npy" in failed["error"]
    identity = ("clip", "precision", "model", "max_rows", "device", "git_commit")
    assert [failed[key] for key in identity] == [replay[key] for key in identity]
    assert "replay, batch 64: failed: " in said
    assert f"1 of 3 combinations failed; their lines in {output} say why" in said
    assert printed.startswith("mode")
    for line in (replay, dense):
        rows = sum(min(size, 200) for size in CRITEO_SIZES)
        assert (line["batch_size"], line["table_rows"]) == (64, rows)
        assert (line["table_bytes"], line["moments_bytes"]) == (rows * 48, rows * 96)
        assert (line["steps"], line["steps_before"]) == (5, round(0.001 * 41_256_555 / 64))
        assert line["samples_per_second"] == pytest.approx(64_000 / line["step_ms"])
        low, high = line["samples_per_second_quartiles"]
        assert low <= line["samples_per_second"] <= high
        assert 0 < line["rss_before_tables_bytes"] <= line["peak_memory_bytes"]
        assert line["config"]["optimizer"]["absent_rows"] == line["mode"]
        assert {"versions", "device", "threads", "git_commit"} <= line.keys()
        parts = line["step_parts_ms"]
        assert tuple(parts) == PARTS
        assert sum(parts.values()) == pytest.approx(line["step_ms"])
        assert min(parts.values()) > 0
        assert line["minutes_of_10_epochs"] == pytest.approx(10 * 41_256_555 / line["samples_per_second"] / 60)
        roof = line["roofline"]
        seconds = [roof[f"{what}_per_sample"] / roof[f"{what}_per_second"] for what in ("flops", "bytes")]
        assert roof["step_ms"] == pytest.approx(1e3 * 64 * max(seconds))
        assert (line["clip"], line["precision"]) == ("on", "float32")
        # 26 fields of one id, whose rows of a batch are at most its samples; see the count by hand below.
        assert bytes_per_sample(26, 12, 1) < line["roofline"]["bytes_per_sample"] <= bytes_per_sample(26, 12, 26)
        assert "step_seconds" not in line
    assert re.search(r"^minutes of 10 epochs +64\nreplay +[\d,.]+\ndense +[\d,.]+\nroofline", printed, re.MULTILINE)
    assert re.search(r"^replay, batch 64: [\d,]+ samples/s", said, re.MULTILINE)


def test_invalid_settings_are_refused():
    for flags, message in (
        ({"modes": ["replay", "eager"]}, "--absent-rows 'eager' is not known; known: lazy, dense, replay"),
        ({"precisions": ["tf32"]}, "--precision tf32 exists on CUDA only"),
        ({"batch_sizes": [64, 64]}, "--batch-sizes needs one value or several different ones"),
    ):
        refused(re.escape(message), Bench, **flags)


@pytest.mark.parametrize("end", [ProcessFailed("killed"), KeyboardInterrupt()])
def test_what_was_measured_before_the_end_is_kept(tmp_path, monkeypatch, end):
    def measure(*_):
        yield {"step_ms": 4.0, "samples_per_second": 16_000.0}
        raise end

    monkeypatch.setattr(Subprocess, "each", measure)
    output = tmp_path / "bench.jsonl"
    settings = Bench(["replay"], [64, 128], max_rows=2, epoch_share=1e-5)
    with pytest.raises(Interrupted) if isinstance(end, KeyboardInterrupt) else contextlib.nullcontext():
        bench(settings, output)
    lines = lines_of(output)
    assert [line["step_ms"] for line in lines] == [4.0] * (1 if isinstance(end, KeyboardInterrupt) else 2)
    assert lines[0]["error"].startswith(str(end) or "interrupted")


SMALL = ["--preset", "mlperf-dcnv2", "--rows", "200", "--batch-sizes", "32", "--seconds", "0"]


def test_the_shape_of_mlperf_is_the_published_one() -> None:
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
        assert sum(parameter.numel() for parameter in dense.values()) == sum(kernels) + biases


def test_samples_have_the_published_numbers_of_ids_and_fit_the_tables() -> None:
    """Bytes of embeddings are counted by hand: with tables of one row, 100 samples share 26 rows."""
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
    alone = Process(0, 1, 1, False, torch.device("cpu"), timedelta(seconds=1))
    found = mlperf_bytes_per_sample(make_batch((1,) * 26, 100, alone, seed=0))
    assert found == pytest.approx(4 * 214 + 4 * 26 * 512 + 0.26 * (3 * 512 + 8))


def test_a_small_bench_of_mlperf(cowrec: Cowrec, tmp_path: Path) -> None:
    output = tmp_path / "bench.jsonl"
    _, printed, _ = cowrec("bench", *SMALL, "--clip", "off", "--output", output)
    (line,), rows = lines_of(output), sum(min(rows, 200) for rows in TABLE_ROWS)
    assert (line["table_rows"], line["table_bytes"], line["moments_bytes"]) == (rows, 512 * rows, 4 * rows)
    assert (line["model"], line["mode"], line["batch_size"]) == ("mlperf-dcnv2", "rowwise_adagrad", 32)
    assert line["samples_per_second_of_gpu"] == line["samples_per_second"] == pytest.approx(32e3 / line["step_ms"])
    assert sum(line["step_parts_ms"].values()) == pytest.approx(line["step_ms"])
    assert min(line["step_parts_ms"].values()) >= 0
    assert line["roofline"]["step_ms"] > 0
    assert {"versions", "device", "git_commit", "peak_memory_bytes", "host_ms"} <= line.keys()
    assert "MLPerf, 8 x H200, batch 55,296: 1,880,000 samples/s each" in printed
