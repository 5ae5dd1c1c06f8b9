"""A training step of one process on CUDA never waits for the device, and starts no more kernels than recorded here.

The steps run on fake tensors. Waits for the device (``item``, masks, ``nonzero``, ``unique``, ``tolist``) and operators
on tensors of several devices raise errors there. Of two and four processes the first or the last one runs, and its
peers are taken to do what it does; they wait only for the sizes that TorchRec exchanges. Each has the device of its own
number.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiers import tiered

pytest.importorskip("triton", reason="Triton is not installed")

from fake_training import Case, Report, reports
from shared_work import made_once

# Operators of a step that start work on the device, at most: those that the host starts, and those of a captured CUDA
# graph, which start at once. FBGEMM's lookup and torch's fused Adam count as one each.
MOST_LAUNCHES = {
    "replay": (12, 57),
    "lazy": (12, 56),
    "three widths and two rates": (12, 80),
    "replay without a graph": (63, 0),
    "row-wise Adagrad": (66, 0),
    "id tables": (75, 0),
}

# Operators between host and device: none, except that the host translates ids, for which it waits once a batch.
CROSSINGS = {
    "id tables": {
        "_to_copy in cowrec.trainer.sharded_model.id_translation.IdTranslation._flat_ids",
        "_to_copy in cowrec.trainer.sharded_model.id_translation._with_rows",
        "_to_copy in cowrec.sparse_opt.optim.row_init._ShardGroup.reset",
        "_to_copy in cowrec.sparse_opt.optim.lookup_adam.LookupAdam.forget",
        "index_put_ in cowrec.sparse_opt.optim.lookup_adam.LookupAdam.forget",
    },
}

# Operators to which the host passes other numbers in every step. In a captured graph there can be none.
CHANGING = {"fill_ in cowrec.trainer.sharded_model.step.DenseAdam.prepare"}  # the learning rate

# Reads from the device of several processes.
EXCHANGED = {"sizes that the peers send", "torchrec.distributed.dist_data.KJTAllToAllTensorsAwaitable._wait_impl"}
# Where tables are sharded by rows, which TorchRec's planner may choose, the ids for each process are counted there.
COUNTED = {
    "torchrec.distributed.dist_data.KJTAllToAll.forward",
    "torchrec.distributed.sharding.twrw_sharding.TwRwSparseFeaturesDist.forward",
}

# Copies from the host of several processes: the sizes that are sent, and the order of the ids that are received.
CROSSINGS_OF_RANKS = {
    "_to_copy in torchrec.distributed.dist_data.KJTAllToAllSplitsAwaitable.__init__",
    "_to_copy in torchrec.distributed.dist_data._get_recat",
}


def case(rank: int = 0, world_size: int = 1, **sections: dict[str, Any]) -> Case:
    config: dict[str, dict[str, Any]] = {
        "train": {"batch_size": 1024, "device": "cuda"},
        "optimizer": {"l2": 1e-4, "warmup_epochs": 1.0},
        "clip": {"rule": "cowclip"},
    }
    given = {name: config.get(name, {}) | section for name, section in sections.items()}
    return Case(config | given, rank, world_size)


CASES = {
    "replay": case(),
    "lazy": case(optimizer={"absent_rows": "lazy"}),
    "three widths and two rates": case(
        model={"embedding_dims": {"C1": 3, "C4": 3, "C7": 31}}, optimizer={"embedding_lr_factors": {"C1": 0.5}}
    ),
    "replay without a graph": case(train={"cuda_graph": False}),
    "row-wise Adagrad": case(optimizer={"embedding": "rowwise_adagrad"}),
    "id tables": case(id_table={"kind": "collisionless", "capacity": 10_000}),
}


OF_RANKS = {
    f"{plan}, rank {rank} of {world_size}": case(rank, world_size, sharding={"plan": plan})
    for plan, rank, world_size in (("auto", 0, 2), ("row_wise", 1, 2), ("column_wise", 1, 2), ("table_wise", 3, 4))
}
FIRST = ("replay", "row_wise, rank 1 of 2")
"""Cases of the first tiers."""


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Report]:
    """Steps of the cases that this run of pytest has."""
    here = (item for item in request.session.items if item.path == request.path)
    collected = [item.callspec.params.values() for item in here if isinstance(item, pytest.Function)]

    def take(folder: Path) -> None:
        cases = {name: of for name, of in (CASES | OF_RANKS).items() if any(name in message for message in collected)}
        (folder / "reports.pickle").write_bytes(pickle.dumps(reports(cases)))

    folder = made_once(tmp_path_factory, "fake_steps", take)
    found: dict[str, Report] = pickle.loads((folder / "reports.pickle").read_bytes())
    return found


@pytest.mark.parametrize("name", tiered(CASES, FIRST))
def test_a_step_of_one_process(taken: dict[str, Report], name: str, record_property: Callable) -> None:
    """A step that waits or mixes devices ends with an error."""
    step, (most, most_captured) = taken[name], MOST_LAUNCHES[name]
    assert not step.error, step.error
    total, captured = sum(step.launches.values()), sum(step.captured.values())
    record_property("measured", f"{name}: the host starts {total} operators of a step, and a graph of {captured}")
    assert 0 < total <= most, step.launches
    assert bool(captured) == bool(most_captured)
    assert captured <= most_captured, step.captured
    assert set(step.crossings) == CROSSINGS.get(name, set()), "operators between host and device"
    assert set(step.changing) == CHANGING, "operators that get other numbers in every step"
    assert not step.frozen, "operators that a graph would repeat with old numbers"
    assert not step.lost, "operators of a graph whose memory is gone"
    # Triton compiles kernels anew for arguments that are 1 or multiples of 16, such as a step.
    assert not step.recompiled


@pytest.mark.parametrize("rank", tiered(OF_RANKS, FIRST))
def test_ranks_mix_no_devices_and_wait_only_for_sizes(taken: dict[str, Report], rank: str) -> None:
    step = taken[rank]
    assert not step.error, step.error
    may_count = rank.startswith(("auto", "row_wise"))
    assert EXCHANGED <= set(step.waits) <= EXCHANGED | (COUNTED if may_count else set())
    assert set(step.crossings) == CROSSINGS_OF_RANKS
