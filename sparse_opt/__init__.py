"""CowClip and the embedding optimizers, for use in any TorchRec job.

Names are imported on first use: the clip and scaling functions need only torch; ``attach_cowclip``, ``EmbeddingAdam``
and ``IdTableModule`` need TorchRec and FBGEMM; these three and ``IdTables`` need numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithm.adam import AdamConfig
    from .algorithm.clip import (
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
    from .algorithm.scaling import PRESETS, SCALING_RULES, Hyperparameters, Preset, scale_clip, scale_hyperparameters
    from .clipping.attach import attach_cowclip
    from .clipping.handle import LookupsHandle, detach_cowclip
    from .clipping.statistics import TableStats
    from .id_tables.config import Admission, IdTableConfig
    from .id_tables.kernels.hashing import hashed_ids, id_bucket_rows
    from .id_tables.layout import rows_for
    from .id_tables.tables import Entries, IdTables, NewRows
    from .id_tables.torchrec_module import IdTableModule
    from .optim.embedding_adam import EmbeddingAdam
    from .optim.row_init import RowInitializer

_MODULE_OF = {
    "AdamConfig": ".algorithm.adam",
    "AdaptiveFieldClip": ".algorithm.clip",
    "Admission": ".id_tables.config",
    "NewRows": ".id_tables.tables",
    "CLIP_RULES": ".algorithm.clip",
    "ClipRule": ".algorithm.clip",
    "ConstantClip": ".algorithm.clip",
    "CowClip": ".algorithm.clip",
    "EmbeddingAdam": ".optim.embedding_adam",
    "Entries": ".id_tables.tables",
    "FieldClip": ".algorithm.clip",
    "GlobalClip": ".algorithm.clip",
    "Hyperparameters": ".algorithm.scaling",
    "IdTableConfig": ".id_tables.config",
    "IdTableModule": ".id_tables.torchrec_module",
    "IdTables": ".id_tables.tables",
    "LookupsHandle": ".clipping.handle",
    "NoClip": ".algorithm.clip",
    "PRESETS": ".algorithm.scaling",
    "Preset": ".algorithm.scaling",
    "ReferenceCowClip": ".algorithm.clip",
    "RowInitializer": ".optim.row_init",
    "RowLimit": ".algorithm.clip",
    "SCALING_RULES": ".algorithm.scaling",
    "TableStats": ".clipping.statistics",
    "attach_cowclip": ".clipping.attach",
    "clip_rows": ".algorithm.clip",
    "clip_scales": ".algorithm.clip",
    "clip_tables": ".algorithm.clip",
    "cowclip_limits": ".algorithm.clip",
    "detach_cowclip": ".clipping.handle",
    "hashed_ids": ".id_tables.kernels.hashing",
    "id_bucket_rows": ".id_tables.kernels.hashing",
    "reference_cowclip_limits": ".algorithm.clip",
    "rows_for": ".id_tables.layout",
    "scale_clip": ".algorithm.scaling",
    "scale_hyperparameters": ".algorithm.scaling",
}

__all__ = [
    "CLIP_RULES",
    "PRESETS",
    "SCALING_RULES",
    "AdamConfig",
    "AdaptiveFieldClip",
    "Admission",
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
    "NewRows",
    "NoClip",
    "Preset",
    "ReferenceCowClip",
    "RowInitializer",
    "RowLimit",
    "TableStats",
    "attach_cowclip",
    "clip_rows",
    "clip_scales",
    "clip_tables",
    "cowclip_limits",
    "detach_cowclip",
    "hashed_ids",
    "id_bucket_rows",
    "reference_cowclip_limits",
    "rows_for",
    "scale_clip",
    "scale_hyperparameters",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __name__), name)
