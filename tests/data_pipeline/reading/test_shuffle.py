"""The two permutations of a window, numpy's and the one of sorted keys, against plain Python."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cowrec.data_pipeline.reading.order import Window

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def splitmix64(start: int, count: int) -> list[int]:
    """Computes SplitMix64's outputs as published, on Python's unbounded integers."""
    outputs = []
    for position in range(count):
        state = (start + position * 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(state ^ (state >> 31))
    return outputs


def window(samples: int, *key: int) -> Window:
    return Window(0, (0,), samples, key or None)


def keyed(samples: int, *key: int) -> list[int]:
    return window(samples, *key).keyed_order(CPU).tolist()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 300), st.integers(0, 2**40), st.integers(0, 1000), st.integers(1, 1000))
def test_the_keyed_order_sorts_the_outputs_of_splitmix64(samples, seed, epoch, number):
    start = int(np.random.SeedSequence((seed, epoch, number)).generate_state(1, np.uint64)[0])
    keys = splitmix64(start, samples)
    signed = [key - (1 << 64) if key >> 63 else key for key in keys]
    assert keyed(samples, seed, epoch, number) == sorted(range(samples), key=signed.__getitem__)


def test_splitmix64_is_the_published_generator():
    """The first outputs for state 0 after a step, as in the Java and C programs of its authors."""
    assert splitmix64(0x9E3779B97F4A7C15, 2) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@pytest.mark.parametrize("order", [lambda each: each.order(), lambda each: each.keyed_order(CPU).numpy()])
def test_a_window_that_is_not_shuffled_keeps_its_order(order):
    assert order(window(50)).tolist() == list(range(50))
    assert len(order(window(0, 1, 2, 3))) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_keyed_order_of_a_gpu_is_that_of_the_cpu():
    for samples in (1, 4097, 3_000_001):
        here, there = (window(samples, 5, 6, 7).keyed_order(torch.device(kind)) for kind in ("cpu", "cuda"))
        assert there.is_cuda
        assert torch.equal(there.cpu(), here)
