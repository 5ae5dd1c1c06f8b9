"""CTR networks: ``forward(dense [B, N], sparse KeyedJaggedTensor) -> logits [B]``.

To add a network, write one file with a class that takes ``(config, front)`` and add one line to ``MODELS``; wdl.py is
the shortest example. Tables, sharding and training are the caller's.
"""

from .config import ModelConfig
from .front import EmbeddingFront, physical_dim
from .layers import l2_kernels
from .registry import MODELS, build_model, build_network, require_model

__all__ = [
    "MODELS",
    "EmbeddingFront",
    "ModelConfig",
    "build_model",
    "build_network",
    "l2_kernels",
    "physical_dim",
    "require_model",
]
