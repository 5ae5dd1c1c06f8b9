"""Ranges of a step in torch's profiler."""

import torch
from torch.profiler import ProfilerActivity, profile

from cowrec.sparse_opt.kernels.profiling import profiled

OPERATOR = 0
"""RecordScope::FUNCTION of torch."""


def test_ranges_are_operators_to_which_the_profiler_ascribes_kernels() -> None:
    """It ascribes no kernel that Triton launches to a range of the user's; parts of a range belong to it."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found, profiled("outer"), profiled("inner"):
        torch.ones(8, 8) @ torch.ones(8, 8)
    events = {event.name: event for event in found.events()}
    inner, outer = events["inner"], events["outer"]
    assert (inner.scope, outer.scope) == (OPERATOR, OPERATOR)
    assert inner.cpu_parent is outer
    assert "aten::matmul" in {child.name for child in inner.cpu_children}
    assert outer.cpu_time_total >= inner.cpu_time_total > 0
    assert not [event for event in (inner, outer) if event.is_user_annotation]
