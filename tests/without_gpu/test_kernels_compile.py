"""Every CUDA kernel compiles for all that training meets and rounds as the CPU does.

The kernels are compiled ahead of time, through the functions that launch them, for three generations of GPUs. What
decides about a compilation is in the arguments: types, widths, alignment, and numbers that are 1 or multiples of 16.
"""

import re
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")


from ahead_of_time import Launch, recorded_launches
from cowrec.models import triton_layers
from cowrec.models.triton_layers import features_backward_on_device, features_on_device, relu_backward_on_device
from cowrec.sparse_opt.algorithm.adam import AdamConfig, FtrlConstants, adam_constants
from cowrec.sparse_opt.kernels import triton_replay, triton_rows
from cowrec.sparse_opt.kernels.layout import (
    AdamState,
    Blocks,
    DeviceSteps,
    LookupBags,
    LookupLayout,
    RestThresholds,
    TableClips,
)
from cowrec.sparse_opt.kernels.triton_replay import replay_rows_on_device
from cowrec.sparse_opt.kernels.triton_rows import DeviceRows, find_rows_on_device, pool_rows_on_device

ROWS_OF_TABLE = 100


@dataclass(frozen=True)
class Variant:
    """Arguments of the kernels."""

    batch: int = 4093
    features: int = 26  # each of its own table, with an id in each sample
    width: int = 12  # columns of the tables
    l2: float = 1e-4
    weight_decay: float = 0.0
    weighted: bool = False  # whether ids have weights
    ids: torch.dtype = torch.int32  # and that of offsets
    grad: torch.dtype = torch.float32  # of the output
    num_rows: int = 26 * ROWS_OF_TABLE  # of all tables, as the layout states them
    offset: int = 0  # elements by which tensors miss their alignment

    def tensor(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(prod(sizes) + self.offset, dtype=dtype)[self.offset :].view(sizes)

    def numbers(self, *sizes: int) -> Tensor:
        return self.tensor(*sizes, dtype=torch.int64)


VARIANTS = {
    "odd batch": Variant(),
    "width 1, one id, no L2": Variant(batch=1, features=1, width=1, l2=0.0, weight_decay=0.1),
    "width 16, weighted int64 ids": Variant(batch=1024, width=16, weighted=True, ids=torch.int64),
    "width 64, one sample, bfloat16": Variant(batch=1, width=64, grad=torch.bfloat16),
    "width 128, 2^31 rows": Variant(width=128, num_rows=1 << 31),
    "width 600": Variant(width=600),
    "unaligned": Variant(offset=1),
}


@cache
def kernels(architecture: int, variant: str) -> list[Launch]:
    """One launch of each kernel that a variant compiles."""
    with recorded_launches(architecture) as launches:
        launch(VARIANTS[variant])
    return list({id(found.kernel): found for found in launches}.values())


def launch(variant: Variant) -> None:
    """Calls every function that launches kernels."""
    count, tables = variant.batch * variant.features, variant.features
    size = tables * ROWS_OF_TABLE * variant.width
    per_table = variant.numbers(tables)
    layout = LookupLayout(*[per_table] * 4, variant.width, size, tables, variant.num_rows)
    clips = TableClips(per_table, *(variant.tensor(tables) for _ in range(2)), variant.tensor(tables, dtype=torch.bool))
    state = AdamState(*(variant.tensor(size) for _ in range(3)))
    last_step = variant.tensor(tables * ROWS_OF_TABLE, dtype=torch.int32)
    taken, log_beta2 = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.float64)
    numbers = (*(variant.tensor(1024) for _ in range(3)), variant.tensor(tables), log_beta2, per_table)
    steps = DeviceSteps(taken, last_step, *numbers)
    constants = adam_constants(AdamConfig(l2=variant.l2, weight_decay=variant.weight_decay))

    indices, offsets = (variant.tensor(n, dtype=variant.ids) for n in (count, count + 1))
    blocks = Blocks(per_table, variant.numbers(tables + 1), variant.numbers(tables + 1), per_table, per_table)
    bags = LookupBags(indices, offsets, blocks, count * variant.width)
    ids = find_rows_on_device(layout, bags, per_table)
    for clips_of_absent in (None, clips):
        arguments = (state, steps, constants, RestThresholds(1e-4, 1e-11, 1e-19))
        replay_rows_on_device(ids.row, ids.begin, layout, clips_of_absent, *arguments)
    id_weights = variant.tensor(count) if variant.weighted else None
    pool_rows_on_device(layout, bags, id_weights, state.weights, variant.tensor(bags.size))
    output_grad = variant.tensor(variant.batch, tables * variant.width, dtype=variant.grad)
    rows = DeviceRows(layout, ids, id_weights, output_grad)
    for replays in (False, True):
        ftrl = FtrlConstants(0.1, 1.0, 64.0) if replays else None
        results = rows.update(clips, state, steps, constants, ftrl, replays=replays)
    rows.factors(clips, state.weights)
    rows.written(clips, state.weights, 2e-4)
    rows.sums()
    rows.count(results, per_table, per_table, variant.numbers(tables * 768).view(tables, 768), 19, 0)

    looked_up = variant.tensor(variant.batch, tables, variant.width)
    features = (looked_up, variant.tensor(variant.batch, 13), variant.width - 1, tables * variant.width + 13)
    wide, pairs, flat = features_on_device(*features, variant.grad)
    features_backward_on_device(looked_up, variant.width - 1, wide, pairs, flat)
    output = variant.tensor(variant.batch, variant.width, dtype=variant.grad)
    relu_backward_on_device(output, output, None)
    relu_backward_on_device(variant.tensor(variant.batch), output, variant.tensor(variant.width, 1))


# Those that differ most from each other; --thorough compiles all variants on Hopper, and these on the others.
FIRST = ("odd batch", "width 600")
LATER = [variant for variant in VARIANTS if variant not in FIRST]
THOROUGH = [(90, variant) for variant in LATER] + [(other, variant) for other in (80, 100) for variant in FIRST]


def thoroughly(*case: object) -> object:
    return pytest.param(*case, marks=pytest.mark.thorough)


@pytest.mark.parametrize(
    ("architecture", "variant"), [*((90, variant) for variant in FIRST), *(thoroughly(*case) for case in THOROUGH)]
)
def test_float32_is_rounded_as_on_the_cpu(architecture: int, variant: str) -> None:
    """No product is fused with a sum, roots and divisions are rounded correctly, and nothing is flushed to zero."""
    for kernel in kernels(architecture, variant):
        wrong = re.findall(r"fma\S*f32|\S*approx\S*f32|div\.full\S*|\b(?!abs)\w+\.ftz\S*", kernel.ptx)
        assert not wrong, f"{kernel}: {wrong}"
        # ptxas may fuse operations that do not state their rounding, unless told otherwise.
        unstated = re.findall(r"\b(?:mul|add|sub)\.f32", kernel.ptx)
        assert not (unstated and kernel.kernel.metadata.enable_fp_fusion), f"{kernel}: {unstated}"


def test_no_kernel_is_left_out() -> None:
    folders = [Path(module.__file__).parent for module in (triton_rows, triton_layers)]
    sources = [file.read_text(encoding="utf-8") for folder in folders for file in folder.glob("triton_*.py")]
    launched = {name for source in sources for name in re.findall(r"(\w+)\[[^][]+\]\(", source)}
    assert {kernel.name for kernel in kernels(90, "odd batch")} == launched


def test_counts_that_programs_share_are_added_atomically() -> None:
    for name, sums in (("_count", 2), ("_locate", 1)):
        (kernel,) = (found for found in kernels(90, "odd batch") if found.name == name)
        assert len(re.findall(r"(?:atom|red)\S*\.add\.\S*64", kernel.ptx)) >= sums


def test_no_warp_stores_a_last_step_before_all_have_read_it() -> None:
    """Several warps of a program read a wide row's last step: there is a barrier between the load and the store."""
    source = Path(triton_rows.__file__).read_text(encoding="utf-8").splitlines()
    load, store = (number for number, line in enumerate(source, 1) if "(steps.last_step +" in line)
    (update,) = (
        kernel for kernel in kernels(90, "width 600") if kernel.name == "_update" and kernel.constants["REPLAYS"]
    )
    assert update.constants["num_warps"] > 1
    events, line = [], 0
    for text in update.ptx.splitlines():
        if found := re.search(r"\.loc\b.*triton_rows\.py:(\d+):", text):
            line = int(found[1])
        for what, at in (("bar.sync", line), ("ld.global", load), ("st.global", store)):
            if what in text and line == at:
                events.append(what)
    assert events[events.index("st.global") - 1] == "bar.sync"


def test_no_warp_stores_a_replayed_step_before_all_have_read_it() -> None:
    """Nor after a loop that has met no barrier: it is in the basic block of the store, ahead of it."""
    source = Path(triton_replay.__file__).read_text(encoding="utf-8").splitlines()
    (store,) = (number for number, line in enumerate(source, 1) if "tl.store(steps.last_step +" in line)
    replays = [kernel for kernel in kernels(90, "width 600") if kernel.name == "_replay"]
    assert replays
    for replay in replays:
        assert replay.constants["num_warps"] > 1
        block, stores, line = "", list[str](), 0
        for text in replay.ptx.splitlines():
            if found := re.search(r"\.loc\b.*?triton_replay\.py:(\d+):", text):
                line = int(found[1])
            block = "" if text.startswith("$L__BB") else block + text
            stores += [block] if "st.global" in text and line == store else []
        assert stores
        assert all("bar.sync" in line for line in stores)
