"""Synthetic histories: the stated model, its best AUC, and samples that a codec reads."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import roc_auc_score

from cowrec.data_pipeline import SampleCodec
from cowrec.data_pipeline.dataset.shards import load_shards
from cowrec.data_pipeline.synthetic.histories import HistoryConfig, synthesize_histories

CONFIG = HistoryConfig(rows=3000, items=50, groups=5, max_length=6, half_life=2.0)


def test_logits_follow_the_model_and_the_best_auc_is_theirs(tmp_path) -> None:
    """Without effects of items, each history has the logit of a plain sum, up to one constant."""
    config = dataclasses.replace(CONFIG, item_effect=0.0, history_effect=1.5)
    schema = synthesize_histories(tmp_path / "data", config, test_rows=2000)
    (train, drawn), (_, test) = config.draw(0, 3000), config.draw(3000, 2000)
    group = {f"item_{item}": item % 5 for item in range(50)}
    constants = set()
    for sample, logit in zip(train.slice(0, 300).to_pylist(), drawn.logits, strict=False):
        newest_first, own = sample["history"][::-1], group[sample["item"]]
        total = sum(0.5 ** (age / 2) for age, item in enumerate(newest_first) if group[item] == own)
        constants.add(round(logit - 1.5 * total, 4))
    assert max(constants) - min(constants) < 1e-3
    assert abs(train["label"].to_numpy().mean() - config.ctr) < 0.05
    best = roc_auc_score(test.labels, test.logits)
    assert schema.best["auc"] == pytest.approx(best, abs=1e-6)
    assert best > 0.65


def test_samples_of_a_stream_are_those_of_the_data_set(tmp_path) -> None:
    schema = synthesize_histories(tmp_path / "data", CONFIG, test_rows=100)
    table, _ = CONFIG.draw(0, 3000)
    expected = load_shards(tmp_path / "data", schema, "train", [0])
    codec = SampleCodec.load(tmp_path / "data")
    lines = [json.dumps(value).encode() for value in table.to_pylist()]
    for samples in (codec.from_table(table), codec.from_json(lines)):
        block = codec.encode(samples).block
        assert torch.equal(block.ids, expected.ids)
        assert torch.equal(block.bags["history"].values, expected.bags["history"].values)
        assert torch.equal(block.time, expected.time)
    lengths = np.bincount(expected.bags["history"].lengths, minlength=7)
    assert lengths.min() > 300
    assert pq.read_schema(tmp_path / "data" / "train" / "00000.parquet").field("history").type == pa.list_(pa.int64())
