"""CowClip and the embedding optimizers, usable alone in any TorchRec job.

The clip and scaling functions need torch alone; the rest is loaded when first used: TorchRec by ``attach_cowclip``,
``EmbeddingAdam`` and ``IdTableModule``, compiled kernels by these and ``IdTables``.
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
    from .id_layout import rows_for
    from .id_records import hashed_ids
    from .id_tables import Admission, Births, Entries, IdTableConfig, IdTables
    from .managed_ids import IdTableModule
    from .row_births import RowBirths
    from .row_updates import TableStats

_LOADED_WHEN_USED = {
    "AdamConfig": ".adam_formula",
    "Admission": ".id_tables",
    "Births": ".id_tables",
    "EmbeddingAdam": ".adam",
    "Entries": ".id_tables",
    "IdTableConfig": ".id_tables",
    "IdTableModule": ".managed_ids",
    "IdTables": ".id_tables",
    "LookupsHandle": ".attach",
    "RowBirths": ".row_births",
    "TableStats": ".row_updates",
    "attach_cowclip": ".attach",
    "hashed_ids": ".id_records",
    "rows_for": ".id_layout",
}

__all__ = [
    "CLIP_RULES",
    "PRESETS",
    "SCALING_RULES",
    "AdamConfig",
    "AdaptiveFieldClip",
    "Admission",
    "Births",
    "ClipRule",
    "ConstantClip",
    "CowClip",
    "EmbeddingAdam",
    "Entries",
    "FieldClip",
    "GlobalClip",
    "Hyperparameters",
    "IdTableConfig",
    "IdTableModule",
    "IdTables",
    "LookupsHandle",
    "NoClip",
    "Preset",
    "ReferenceCowClip",
    "RowBirths",
    "RowLimit",
    "TableStats",
    "attach_cowclip",
    "clip_rows",
    "clip_scales",
    "clip_tables",
    "cowclip_limits",
    "hashed_ids",
    "reference_cowclip_limits",
    "rows_for",
    "scale_clip",
    "scale_hyperparameters",
]


def __getattr__(name: str) -> Any:
    if name not in _LOADED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LOADED_WHEN_USED[name], __name__), name)
