"""Forward of a lookup whose backward updates its rows."""

from collections.abc import Callable

import torch
from torch import Tensor

from cowrec.sparse_opt.clipping.handle import Forward, Inputs
from cowrec.sparse_opt.clipping.in_backward import run_in_backward
from cowrec.sparse_opt.clipping.loss_scale import LossScale
from cowrec.sparse_opt.kernels.profiling import profiled
from cowrec.sparse_opt.tbe.lookup import LookupBackward

from .lookup_adam import LookupAdam

EMBEDDING_UPDATE = "embedding_update"
"""Name of a lookup's backward in torch's profiler."""


def look_up(
    adam: LookupAdam, lr: Callable[[], float], loss_scale: LossScale, forward: Forward, inputs: Inputs
) -> Tensor:
    """Forward of a lookup: its rows catch up, are looked up, and are updated in its backward, at the rate of then."""
    clipped, lookup, id_weights = adam.clipped, adam.lookup, inputs.get("per_sample_weights")
    bags = clipped.bags.of(inputs)
    ids = adam.catch_up(bags)
    with torch.no_grad():
        if lookup.pools_on_cpu and inputs.get("batch_size_per_feature_per_rank") is None:
            output = lookup.pool_on_cpu(inputs["indices"], inputs["offsets"], id_weights)
        else:
            output = forward(**inputs)
    if not torch.is_grad_enabled():
        return output
    # Passes of one step may have brought rows to different steps.
    step_of_forward = adam.step if clipped.accumulation.passes == 1 else -1

    def update(backward: LookupBackward) -> None:
        with profiled(EMBEDDING_UPDATE):
            adam.update(backward, lr(), step_of_forward)

    return run_in_backward(output, clipped, bags, id_weights, loss_scale, update, ids=ids)
