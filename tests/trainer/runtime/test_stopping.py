"""Losses kept on the device until they are read, against plain sums."""

import math
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cowrec.trainer.runtime.processes import Process
from cowrec.trainer.runtime.stopping import LossWatch
from process_groups import in_processes, process_group


def process(rank: int = 0, world_size: int = 1) -> Process:
    return Process(rank, world_size, world_size, False, torch.device("cpu"), timedelta(minutes=1))


losses = st.lists(st.floats(0, 10, width=32) | st.sampled_from([math.nan, math.inf, -math.inf]), max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(losses, min_size=1, max_size=4), st.integers(0, 10**6))
def test_readings_cover_the_steps_since_the_last(readings: list[list[float]], step: int) -> None:
    watch = LossWatch(process())
    for values in readings:
        for number, value in enumerate(values):
            watch.add(torch.tensor(value), step + number)
        mean, bad = watch.read()
        wrong = [step + number for number, value in enumerate(values) if not math.isfinite(value)]
        assert bad == (wrong[0] if wrong else None)
        if wrong or not values:
            assert not math.isfinite(mean)
        else:
            # Both sum in float64.
            assert mean == pytest.approx(math.fsum(values) / len(values), rel=1e-12)
        step += len(values)


def test_a_loss_may_be_overwritten_by_the_next_step() -> None:
    """As that of a captured step, which writes its results to the same memory."""
    watch, loss = LossWatch(process()), torch.zeros(())
    for step in range(4):
        loss.fill_(step)
        watch.add(loss, step)
    assert watch.read() == (1.5, None)


def two_processes(rank: int, folder: str) -> None:
    with process_group(rank, 2, folder):
        watch = LossWatch(process(rank, 2))
        assert math.isnan(watch.read()[0])
        for step in range(6):
            watch.add(torch.tensor(float(step + 10 * rank)), step)
        assert watch.read() == (7.5, None)
        for step in range(6, 12):
            watch.add(torch.tensor(math.inf if (rank, step) == (1, 9) else 1.0), step)
        assert watch.read()[1] == 9
        for step in range(12, 15):  # an infinity of each sign on the two
            watch.add(torch.tensor((-1) ** rank * math.inf if step == 13 else 1.0), step)
        assert watch.read()[1] == 13
        watch.add(torch.tensor(2.0 * rank), 15)
        assert watch.read() == (1.0, None)


def test_all_processes_read_the_same(tmp_path: Path) -> None:
    in_processes(two_processes, (str(tmp_path),), 2)
