"""Loss scaling by torch's GradScaler that a process uses, found without being told of it."""

import gc
from typing import Any

from torch.amp import GradScaler


def grad_scalers_in_use() -> list[GradScaler]:
    """Enabled scalers of this process that have scaled a loss.

    Searches all objects that refer to a scaler's class: take care to call it once, not in every step.
    """
    found = [each for each in gc.get_referrers(*_with_subclasses(GradScaler)) if isinstance(each, GradScaler)]
    # The scale is None until the first loss; get_scale() tells the initial one then.
    return [each for each in found if each.is_enabled() and each._scale is not None]


def _with_subclasses(kind: Any) -> set[Any]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
