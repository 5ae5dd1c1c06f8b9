"""CowClip and the embedding optimizers, usable alone in any TorchRec job.

The clip and scaling functions need torch alone; ``attach_cowclip`` and ``EmbeddingAdam`` load TorchRec when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .clip import (
    CLIP_RULES,
    AdaptiveFieldClip,
    ClipRule,
    ConstantClip,
    CowClip,
    FieldClip,
    GlobalClip,
    NoClip,
    ReferenceCowClip,
    RowLimit,
    clip_rows,
    clip_scales,
    clip_tables,
    cowclip_limits,
    reference_cowclip_limits,
)
from .scaling import PRESETS, SCALING_RULES, Hyperparameters, Preset, scale_clip, scale_hyperparameters

if TYPE_CHECKING:
    from .adam import EmbeddingAdam
    from .adam_formula import AdamConfig
    from .attach import LookupsHandle, attach_cowclip
    from .row_updates import TableStats

_NEEDS_TORCHREC = {
    "AdamConfig": ".adam_formula",
    "EmbeddingAdam": ".adam",
    "LookupsHandle": ".attach",
    "TableStats": ".row_updates",
    "attach_cowclip": ".attach",
}

__all__ = [
    "CLIP_RULES",
    "PRESETS",
    "SCALING_RULES",
    "AdamConfig",
    "AdaptiveFieldClip",
    "ClipRule",
    "ConstantClip",
    "CowClip",
    "EmbeddingAdam",
    "FieldClip",
    "GlobalClip",
    "Hyperparameters",
    "LookupsHandle",
    "NoClip",
    "Preset",
    "ReferenceCowClip",
    "RowLimit",
    "TableStats",
    "attach_cowclip",
    "clip_rows",
    "clip_scales",
    "clip_tables",
    "cowclip_limits",
    "reference_cowclip_limits",
    "scale_clip",
    "scale_hyperparameters",
]


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCHREC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NEEDS_TORCHREC[name], __name__), name)
