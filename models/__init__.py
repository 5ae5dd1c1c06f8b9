"""CTR networks: ``forward(dense [B, N], sparse KeyedJaggedTensor) -> logits [B]``.

A network of your own is one file with a class that takes ``(config, front)``, and one line in ``MODELS``; wdl.py is the
shortest example. Tables, sharding and training belong to the caller.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from .config import ModelConfig
from .dcn import DCN, DCNMix, DCNv2
from .deepfm import DeepFM
from .front import EmbeddingFront, LookedUpFront, physical_dim
from .layers import l2_kernels
from .wdl import WideDeep

MODELS: dict[str, type[nn.Module]] = {
    "wdl": WideDeep,
    "deepfm": DeepFM,
    "dcn": DCN,
    "dcnmix": DCNMix,
    "dcnv2": DCNv2,
}

__all__ = ["MODELS", "EmbeddingFront", "ModelConfig", "build_model", "build_network", "l2_kernels", "physical_dim"]


def build_model(
    config: ModelConfig,
    tables: Sequence[EmbeddingBagConfig],
    num_dense: int,
    *,
    is_weighted: bool = False,
    fields: Sequence[str] | None = None,
    device: torch.device | None = None,
) -> nn.Module:
    """The network ``config.name`` on the given tables.

    Its dense part is initialised as in the CowClip reference, from torch's global generator; the tables' initial values
    are the caller's (``EmbeddingBagConfig.init_fn``), except that columns after the wide weight should be zero.

    Args:
        config: architecture; ``config.embedding_dim`` is D.
        tables: of width ``physical_dim(D)``; their feature names are the fields.
        num_dense: number of dense features N; 0 is fine.
        is_weighted: the ids carry weights; all tables are pooled by sum then.
        fields: the order in which the network sees them; by default that of the tables.
        device: where everything is built. The meta device holds the tables only, so that sharding allocates them; the
            dense part is on the CPU then. Default: the CPU.

    Returns:
        A module ``forward(dense float [B, N], sparse KeyedJaggedTensor) -> logits float [B]``. Sharding replaces its
        one EmbeddingBagCollection, ``front.embeddings``.

    Raises:
        ValueError: the tables do not fit the configuration.
    """
    front = EmbeddingFront(
        tables, config.embedding_dim, num_dense, is_weighted=is_weighted, fields=fields, device=device
    )
    model = MODELS[config.name](config, front)
    if device is not None and device.type != "meta":
        model.to(device)
    return model


def build_network(config: ModelConfig, num_fields: int, num_dense: int) -> nn.Module:
    """The network ``config.name`` without its tables, for rows that are looked up and pooled elsewhere.

    Returns:
        A module on the CPU, ``forward(dense float [B, N], rows float [B, F, P]) -> logits float [B]`` with F =
        ``num_fields`` and P = ``physical_dim(D)``. Its parameters have the names they have in :func:`build_model`'s.
    """
    return MODELS[config.name](config, LookedUpFront(num_fields, config.embedding_dim, num_dense))
