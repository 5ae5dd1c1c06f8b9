"""CTR networks: ``forward(dense [B, N], sparse KeyedJaggedTensor) -> logits [B]``, and losses of their logits.

A network is a class that takes ``(config, front)``: one of ``MODELS``, or a class of your own, which a configuration
names as "module:Class" (docs/models.md). The caller provides tables, sharding and training.
"""

from .config import ModelConfig
from .front import EmbeddingFront, Features, SequenceField, SequenceRows, physical_dim
from .layers import l2_kernels
from .losses import LOSSES, loss_of
from .registry import MODELS, build_model, build_network, require_model

__all__ = [
    "LOSSES",
    "MODELS",
    "EmbeddingFront",
    "Features",
    "ModelConfig",
    "SequenceField",
    "SequenceRows",
    "build_model",
    "build_network",
    "l2_kernels",
    "loss_of",
    "physical_dim",
    "require_model",
]
