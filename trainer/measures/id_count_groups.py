"""Groups of a split's samples by how often their ids occur in training."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cowrec.data_pipeline import Schema
from cowrec.data_pipeline.reading.id_counts import log_id_counts
from cowrec.trainer.runtime.processes import Process

GROUPS = ("rare", "middle", "frequent")


@dataclass(frozen=True)
class IdCountGroups:
    """Thirds of a split's samples by the mean over fields of log(1 + occurrences of the sample's id in training).

    Samples with equal means are in one group, so that a group depends on a sample's ids alone.

    Attributes:
        of_samples: index into ``GROUPS`` of each sample of the split in the stored order, int8 [R], on the device.
    """

    of_samples: Tensor

    @staticmethod
    def of(data_dir: Path, split: str, process: Process, train_rows: int | None = None) -> "IdCountGroups":
        """Groups a split. All processes call together: each counts the ids of its share of the fields.

        Args:
            data_dir: prepared data set.
            split: to group.
            process: this process.
            train_rows: training samples in which ids are counted, the first ones; by default all.
        """
        names = [field.name for field in Schema.load(data_dir).sparse]
        sums = torch.from_numpy(log_id_counts(data_dir, split, names[process.rank :: process.world_size], train_rows))
        sums = sums.to(process.device)
        if process.world_size > 1:
            dist.all_reduce(sums)
        return IdCountGroups(torch.from_numpy(_thirds(sums.cpu().numpy())).to(process.device))


def _thirds(values: np.ndarray) -> np.ndarray:
    """Third of each value, 0 to 2: int8. Equal values are in one third."""
    first, second = (-(-len(values) * part // 3) - 1 for part in (1, 2))
    ordered = np.partition(values, (first, second))
    return (values > ordered[first]).astype(np.int8) + (values > ordered[second])
