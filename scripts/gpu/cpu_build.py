"""Lets a CPU build of FBGEMM make tables on CUDA, whose steps under `EmbeddingAdam` run none of its kernels there.

The constructor asks an operator for two numbers of its lookup, which that build has for CPU tensors only, and which
depend on no tensor. Import this module before tables are made; it changes nothing under FBGEMM's CUDA build.
"""

import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401  (it defines the operator)
import torch

_NAME = "get_infos_metadata"


def _on_cpu(_: torch.Tensor, batch_size: int, tables: int) -> tuple[int, int]:
    numbers: tuple[int, int] = torch.ops.fbgemm.get_infos_metadata(torch.empty(0), batch_size, tables)
    return numbers


if not torch._C._dispatch_has_kernel_for_dispatch_key(f"fbgemm::{_NAME}", "CUDA"):
    _library = torch.library.Library("fbgemm", "IMPL", "CUDA")
    _library.impl(_NAME, _on_cpu)
