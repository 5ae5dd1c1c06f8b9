"""CowClip and the embedding optimizers, for use in any TorchRec job.

Names are imported on first use: the clip and scaling functions need only torch; ``attach_cowclip`` and
``EmbeddingAdam`` need TorchRec and FBGEMM; ``IdTables`` need numba, and on CPU so do the other two.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .algorithm.adam import AdamConfig, FtrlConfig
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
    )
    from .algorithm.scaling import PRESETS, SCALING_RULES, Hyperparameters, Preset, scale_clip, scale_hyperparameters
    from .clipping.attach import attach_cowclip
    from .id_tables.config import Admission, IdTableConfig
    from .id_tables.kernels.hashing import hashed_ids, id_bucket_rows
    from .id_tables.layout import rows_for
    from .id_tables.tables import Entries, IdTables, NewRows
    from .lookups.handle import LookupsHandle, detach_cowclip
    from .lookups.statistics import TableStats
    from .optim.embedding_adam import EmbeddingAdam
    from .optim.row_init import RowInitializer

_NAMES = {
    ".algorithm.adam": "AdamConfig FtrlConfig",
    ".algorithm.clip": "CLIP_RULES AdaptiveFieldClip ClipRule ConstantClip CowClip FieldClip GlobalClip NoClip"
    " ReferenceCowClip RowLimit clip_rows clip_scales clip_tables cowclip_limits",
    ".algorithm.scaling": "PRESETS SCALING_RULES Hyperparameters Preset scale_clip scale_hyperparameters",
    ".clipping.attach": "attach_cowclip",
    ".id_tables.config": "Admission IdTableConfig",
    ".id_tables.kernels.hashing": "hashed_ids id_bucket_rows",
    ".id_tables.layout": "rows_for",
    ".id_tables.tables": "Entries IdTables NewRows",
    ".lookups.handle": "LookupsHandle detach_cowclip",
    ".lookups.statistics": "TableStats",
    ".optim.embedding_adam": "EmbeddingAdam",
    ".optim.row_init": "RowInitializer",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

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
    "FtrlConfig",
    "GlobalClip",
    "Hyperparameters",
    "IdTableConfig",
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
    "rows_for",
    "scale_clip",
    "scale_hyperparameters",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __name__), name)
