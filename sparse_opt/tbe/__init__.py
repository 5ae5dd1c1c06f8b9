"""Lookups of sharded TorchRec models: inventory, geometry, column shards, and state laid out like the weights."""

from ..versions import require_matched_set


def _load() -> None:
    from torch import ops

    from . import collection, inventory, state  # noqa: F401

    for name in ("bounds_check_indices", "permute_1D_sparse_data", "split_embedding_codegen_forward_cpu"):
        getattr(ops.fbgemm, name)


# Before the modules here import torchrec and fbgemm, which fail with an unclear error if versions do not match.
require_matched_set(_load)
