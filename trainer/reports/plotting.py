"""Set-up of matplotlib for drawing into files, and names that plots and tables share."""

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

__all__ = ["plt", "size_name"]


def size_name(batch_size: int) -> str:
    """A batch size as plots and tables print it: 8192 is 8K, 1000 is 1,000."""
    return f"{batch_size // 1024:,}K" if batch_size % 1024 == 0 else f"{batch_size:,}"
