"""CowClip under the stock fused optimizers of any TorchRec model."""

from .. import tbe  # noqa: F401 (checks the versions before the modules here import torchrec)
