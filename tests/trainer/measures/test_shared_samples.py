"""Measures of samples that several processes share, against scikit-learn's, and bit for bit against one process's."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from cowrec.trainer.measures import score_blocks
from cowrec.trainer.measures.exact_sums import ExactSums
from cowrec.trainer.measures.quality import Quality, measure
from cowrec.trainer.measures.samples import CollectedSamples, Samples
from process_groups import in_processes, process_group

PART = 50
"""Samples of a part for each process: the cases below take many parts."""


def cases() -> Iterator[tuple[str, Samples]]:
    draw = np.random.default_rng(0)

    def floats(*each: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(np.asarray(values, np.float32)) for values in each]

    def labels(logits: np.ndarray) -> np.ndarray:
        return draw.random(len(logits)) < 1 / (1 + np.exp(-logits))

    different = draw.normal(-3, 1, 4001)
    yield "different", Samples(*floats(different, labels(different)))
    few = draw.integers(-4, 5, 3000) / 2 * draw.choice([1, -1], 3000)  # 0.0 and -0.0 too
    yield "few scores", Samples(*floats(few, labels(few)))
    narrow = 2 + draw.integers(0, 300, 3000) * 2.0**-22
    yield "neighbouring float32 numbers", Samples(*floats(narrow, labels(narrow)))
    yield "one score", Samples(*floats(np.full(2000, -1.5), labels(np.full(2000, -1.5))))
    half = np.where(draw.random(3000) < 0.5, 0.25, draw.normal(0, 5, 3000))
    yield "one frequent score", Samples(*floats(half, labels(half)))
    ascending = np.sort(draw.normal(0, 3, 3000))
    yield "in the order of the split", Samples(*floats(ascending, labels(ascending)))
    weighted = draw.normal(0, 1, 2500).round(2)
    weight = draw.choice([0, 0.1, 1 / 3, 1, 70], 2500)
    unknown = np.where(draw.random(2500) < 0.1, np.nan, labels(weighted))
    weight[np.isnan(unknown)] = 1e30  # of samples that do not count
    truth = weighted + draw.normal(0, 1, 2500)
    yield "weights, truth, unknown labels", Samples(*floats(weighted, unknown, weight, truth))
    yield "one class", Samples(*floats(draw.normal(0, 1, 500), np.zeros(500)))
    yield "two samples", Samples(*floats(np.array([1.0, -1.0]), np.array([1, 0])))
    yield "one sample", Samples(*floats(np.zeros(1), np.ones(1)))


def of_process(samples: Samples, rank: int, processes: int) -> Samples:
    """A share: of the first process a quarter, so that shares differ; of the second none where there are four."""
    ends = {1: [0, 1], 2: [0, 0.25, 1], 4: [0, 0.25, 0.25, 0.6, 1]}[processes]
    count = len(samples.label)
    return samples.where(torch.arange(round(ends[rank] * count), round(ends[rank + 1] * count)))


def _measure(rank: int, processes: int, folder: str) -> None:
    score_blocks.PART = PART
    with process_group(rank, processes, folder):
        found = [measure(of_process(samples, rank, processes), together=True) for _, samples in cases()]
        torch.save([dataclasses.asdict(each) for each in found], f"{folder}/{processes}_{rank}.pt")


def bits(values: object) -> object:
    """Values whose comparison is one of bits, NaN included."""
    return repr(values)


def test_any_number_of_processes_measures_the_same_bits_as_one(tmp_path: Path) -> None:
    for processes in (1, 2, 4):
        (tmp_path / str(processes)).mkdir()
        in_processes(_measure, (processes, str(tmp_path / str(processes))), processes)
    for number, (name, samples) in enumerate(cases()):
        alone = measure(samples)
        _check(alone, samples)
        for processes in (1, 2, 4):
            for rank in range(processes):
                found = torch.load(tmp_path / str(processes) / f"{processes}_{rank}.pt", weights_only=False)[number]
                assert bits(found) == bits(dataclasses.asdict(alone)), f"{name}, {processes} processes"


def _check(quality: Quality, samples: Samples) -> None:
    """AUC and logloss are scikit-learn's; the tolerance is for its own sums and the rounding of weights."""
    known = (~samples.label.isnan() & (samples.weights() > 0)).numpy()
    x, y, w = (each.numpy()[known] for each in (samples.logits, samples.label, samples.weights()))
    assert quality.rows == (~samples.label.isnan()).sum()
    p = 1 / (1 + np.exp(-x.astype(float)))
    assert quality.logloss == pytest.approx(log_loss(y, p, sample_weight=w, labels=[0, 1]), rel=1e-12)
    assert not y.any() or quality.calibration == pytest.approx(np.average(p, weights=w) / np.average(y, weights=w))
    assert quality.calibration_bins is not None
    assert sum(quality.calibration_bins.weight) == pytest.approx(w.sum(), rel=1e-12)
    if len(set(y)) == 2:
        assert quality.auc == pytest.approx(roc_auc_score(y, x, sample_weight=w), abs=1e-12)
    else:
        assert math.isnan(quality.auc)


def test_predictions_that_are_no_numbers_are_no_quality() -> None:
    quality = measure(Samples(torch.tensor([0.0, math.nan, 1.0]), torch.tensor([0.0, 1.0, 1.0])))
    assert math.isnan(quality.logloss)


@settings(max_examples=100, deadline=None)
@given(numbers=st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=30), seed=st.integers(0, 99))
def test_sums_are_those_of_fsum_in_any_order(numbers: list[float], seed: int) -> None:
    try:
        expected = math.fsum(numbers)
    except OverflowError:
        return
    sums = ExactSums(2, torch.device("cpu"))
    shuffled = np.random.default_rng(seed).permutation(np.array(numbers, np.float64))
    for part in np.array_split(shuffled, 3):
        sums.add(torch.from_numpy(part), torch.ones(len(part), dtype=torch.int64))
    assert sums.floats() == [0.0, expected]


def _collect(rank: int, folder: str) -> None:
    with process_group(rank, 2, folder):
        collected = CollectedSamples(5)
        for step in range(2):
            start = 10 * step + 5 * rank
            logits = torch.arange(start, start + 3 - step, dtype=torch.float32)
            collected.add(slice(start, start + 3 - step), Samples(logits, -logits))
        assert collected.own.logits.tolist() == collected.positions.tolist()
        gathered = collected.of_all_processes()
        assert gathered.logits.tolist() == [0, 1, 2, 5, 6, 7, 10, 11, 15, 16]
        assert gathered.label.equal(-gathered.logits)


def test_samples_of_all_processes_are_in_the_order_of_the_split(tmp_path: Path) -> None:
    in_processes(_collect, (str(tmp_path),), 2)


def test_a_true_logit_that_is_not_a_number_has_no_expectation() -> None:
    logits, label = torch.tensor([1.0, -1.0, 0.5]), torch.tensor([1.0, 0.0, 1.0])
    quality = measure(Samples(logits, label, true_logit=torch.tensor([1.0, math.nan, 0.0])))
    assert quality.auc == 1
    assert math.isnan(quality.expected_auc or 0)
    assert math.isnan(quality.expected_logloss or 0)
