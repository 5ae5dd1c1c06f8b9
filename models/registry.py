"""The networks by name, and their construction from a configuration."""

from collections.abc import Sequence
from difflib import get_close_matches

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from .config import ModelConfig
from .dcn import DCN, DCNMix, DCNv2
from .deepfm import DeepFM
from .front import EmbeddingFront, LookedUpFront
from .wdl import WideDeep

MODELS: dict[str, type[nn.Module]] = {
    "wdl": WideDeep,
    "deepfm": DeepFM,
    "dcn": DCN,
    "dcnmix": DCNMix,
    "dcnv2": DCNv2,
}


def require_model(name: str) -> None:
    """Raises ValueError for a name that is not in ``MODELS``."""
    if name not in MODELS:
        nearest = get_close_matches(name, MODELS, n=1)
        hint = f'did you mean "{nearest[0]}"? ' if nearest else ""
        raise ValueError(f'model.name is "{name}"; {hint}known: {", ".join(MODELS)}')


def build_model(
    config: ModelConfig,
    tables: Sequence[EmbeddingBagConfig],
    num_dense: int,
    *,
    is_weighted: bool = False,
    fields: Sequence[str] | None = None,
    device: torch.device | None = None,
) -> nn.Module:
    """Builds the network ``config.name`` on the given tables.

    Its dense part is initialised as in the CowClip reference, from torch's global generator. The caller chooses the
    tables' initial values (``EmbeddingBagConfig.init_fn``); columns after the wide weight should be zero.

    Args:
        config: architecture; ``config.embedding_dim`` is D.
        tables: of width ``physical_dim(D)``; their feature names are the fields.
        num_dense: number of dense features N; 0 is fine.
        is_weighted: the ids carry weights, and all tables are pooled by sum.
        fields: the order in which the network sees them; by default that of the tables.
        device: where everything is built, by default the CPU. With the meta device only the tables are there, so that
            sharding allocates them, and the dense part is on the CPU.

    Returns:
        A module ``forward(dense float [B, N], sparse KeyedJaggedTensor) -> logits float [B]``. Sharding replaces its
        one EmbeddingBagCollection, ``front.embeddings``.

    Raises:
        ValueError: an unknown name, or tables that do not fit the configuration.
    """
    require_model(config.name)
    front = EmbeddingFront(
        tables, config.embedding_dim, num_dense, is_weighted=is_weighted, fields=fields, device=device
    )
    model = MODELS[config.name](config, front)
    if device is not None and device.type != "meta":
        model.to(device)
    return model


def build_network(config: ModelConfig, num_fields: int, num_dense: int) -> nn.Module:
    """Builds the network ``config.name`` without its tables, for rows that are looked up and pooled elsewhere.

    Returns:
        A module on the CPU, ``forward(dense float [B, N], rows float [B, F, P]) -> logits float [B]`` with F =
        ``num_fields`` and P = ``physical_dim(D)``. Its parameters have the names they have in :func:`build_model`'s.
    """
    require_model(config.name)
    return MODELS[config.name](config, LookedUpFront(num_fields, config.embedding_dim, num_dense))
