"""Training steps of two and four processes on CUDA wait for the device only for the sizes that TorchRec exchanges.

One process runs on fake tensors, the first or the last one; its peers are taken to do what it does. Each has the device
of its own number, and mixing devices raises errors.
"""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from fake_training import Case, Report, reports

# Reads from the device.
EXCHANGED = {"sizes that the peers send", "torchrec.distributed.dist_data.KJTAllToAllTensorsAwaitable._wait_impl"}
# Where tables are sharded by rows, which TorchRec's planner may choose, the ids for each process are counted there.
COUNTED = {
    "torchrec.distributed.dist_data.KJTAllToAll.forward",
    "torchrec.distributed.sharding.twrw_sharding.TwRwSparseFeaturesDist.forward",
}

# Copies from the host: the sizes that are sent, and the order of the ids that are received.
CROSSINGS = {
    "_to_copy in torchrec.distributed.dist_data.KJTAllToAllSplitsAwaitable.__init__",
    "_to_copy in torchrec.distributed.dist_data._get_recat",
}


def case(plan: str, rank: int, world_size: int) -> Case:
    config = {
        "train": {"batch_size": 1024, "device": "cuda"},
        "optimizer": {"l2": 1e-4},
        "clip": {"rule": "cowclip"},
        "sharding": {"plan": plan},
    }
    return Case(config, rank, world_size)


CASES = {
    f"{plan}, rank {rank} of {world_size}": case(plan, rank, world_size)
    for world_size, plans in ((2, ("auto", "row_wise", "column_wise")), (4, ("auto", "table_wise")))
    for rank in (0, world_size - 1)
    for plan in plans
}


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return reports(CASES, tmp_path_factory.mktemp("guard"))


@pytest.mark.parametrize("name", CASES)
def test_step_mixes_no_devices_and_waits_only_for_sizes(taken: dict[str, Report], name: str) -> None:
    step = taken[name]
    assert not step.error, step.error
    may_count = name.startswith(("auto", "row_wise"))
    assert EXCHANGED <= set(step.waits) <= EXCHANGED | (COUNTED if may_count else set())
    assert set(step.crossings) == CROSSINGS
