"""The self-check of attach_cowclip finds updates that the clip did not reach, and no fault in others.

That right updates pass is also part of the random problems, which check all of their steps.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor, nn

from cowrec.sparse_opt import AdaptiveFieldClip, ClipRule, CowClip, attach_cowclip
from cowrec.sparse_opt.lookups import backward
from cowrec.sparse_opt.lookups.row_backends import NumbaRows
from process_groups import in_processes, process_group
from random_problems.drawing import Problem, small_problem
from random_problems.training import sharded_model, train_step
from tiers import tiered

RULE = CowClip(r=0.01, zeta=1e-3)
FAULT = r"did not reach the update of table 't\d': row \d+ is \d+ times in the batch, .* limit of .*, by which its {}"
KEPT = {"sgd": "weights", "adagrad": "sum of squares", "rowwise_adagrad": "sum of mean squares"}


def offloads(patch: pytest.MonkeyPatch) -> None:
    """Takes the guard away from hooks on saved tensors, which give FBGEMM's backward copies of its own."""

    def pack(saved: Tensor) -> Tensor:  # as torchtune, which leaves parameters where they are
        return saved if isinstance(saved, nn.Parameter) or not saved.is_floating_point() else saved.clone()

    patch.setattr(backward, "_with_version", pack)
    patch.setattr(backward, "_of_version", lambda packed: packed)


def casts(patch: pytest.MonkeyPatch) -> None:
    """Takes the guard away from default types: FBGEMM converts ids' weights of another type into its own copy."""

    def made(given: Tensor | None, indices: Tensor) -> Tensor:
        return torch.ones(len(indices), dtype=torch.float64) if given is None else given.double()

    patch.setattr(backward, "_scalable_weights", made)


def loses_what_it_wrote(patch: pytest.MonkeyPatch) -> None:
    """Where bags hold one id, the clip writes into the output gradient: this one returns the gradient as it was."""
    patch.setattr(NumbaRows, "clipped_output_grad", lambda _, given, l2: given.output_grad.clone())


def messages(
    case: Problem, guards: Any = None, rule: ClipRule = RULE, *, verify: int = 1, fused_params: Any = None
) -> list[str]:
    """What each step of a problem raises in this process; "" for none."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if guards:
            guards(patch)
        model = sharded_model(case, fused_params=fused_params)
        attach_cowclip(model, rule, verify=verify, single_id_bags=case.single_id_bags)
        for step in range(case.steps):
            try:
                train_step(case, model, step)
                found.append("")
            except RuntimeError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize("optimizer", tiered(KEPT, ("sgd", "rowwise_adagrad")))
def test_finds_updates_that_the_clip_did_not_reach(optimizer: str, tmp_path: Path) -> None:
    """In each kind of lookup, with the guard against each fault taken away; with it, the same steps raise nothing."""
    fault = re.compile(FAULT.format(KEPT[optimizer]))
    kinds: list[tuple[dict[str, Any], Any, ClipRule]] = [
        ({}, offloads, RULE),
        ({"weighted": True}, casts, RULE),
        ({"pooling": "mean"}, offloads, AdaptiveFieldClip(0.01)),
        ({"sharding": "columns_of_one_rank"}, casts, RULE),
        ({"max_ids": 1, "single_id_bags": True}, loses_what_it_wrote, RULE),
        ({"sequence": True}, loses_what_it_wrote, RULE),
    ]
    with process_group(0, 1, str(tmp_path)):
        for kind, guards, rule in kinds:
            case = small_problem(optimizer=optimizer, steps=2, **kind)
            assert fault.search(messages(case, guards, rule)[0])
            assert not any(messages(case, rule=rule, verify=2))


def test_checks_the_first_steps_that_clip(tmp_path: Path) -> None:
    """A step that clips no row shows no fault; none is looked for once a step that clips has been checked."""
    case = small_problem(rows=(40,), features=(("a",),), steps=4)
    with process_group(0, 1, str(tmp_path)):
        assert not any(messages(case, offloads, CowClip(r=1e6, zeta=1e6)))
        assert [bool(message) for message in messages(case, offloads)] == [True, False, False, False]
        assert [bool(message) for message in messages(case, offloads, verify=2)] == [True, True, False, False]
        assert not any(messages(case, offloads, verify=0))
        # FBGEMM's own L2 is in the gradient on CUDA alone.
        l2 = {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2}
        fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, **l2}
        assert not any(messages(case, verify=3, fused_params=fused_params))
        # Limits below the least step of float16, for rows of zeros, are no fault.
        assert not any(messages(small_problem(dtype="float16"), rule=CowClip(r=1.0, zeta=1e-5), verify=3))


@pytest.mark.parametrize("sharding", ["row_wise", "column_wise"])
def test_every_process_checks_its_shards(sharding: str, tmp_path: Path) -> None:
    in_processes(_two_processes, (str(tmp_path), sharding), 2)


def _two_processes(rank: int, folder: str, sharding: str) -> None:
    case = small_problem(sharding=sharding, world=2)
    with process_group(rank, 2, folder):
        assert re.search(FAULT.format("weights"), messages(case, offloads)[0])
        assert not any(messages(case, verify=3))
