"""The tasks of a run: names of its labels, and the quality of each."""

import dataclasses
from dataclasses import dataclass

from .quality import Quality, measure
from .samples import Samples


@dataclass(frozen=True)
class Tasks:
    """The tasks that a model is trained for.

    Attributes:
        labels: their names; the quality of the first, the main task, is the run's.
    """

    labels: tuple[str, ...]

    def named(self, name: str) -> list[str]:
        """A name for each task: of one task the name itself, of several ``<name>_<label>``."""
        return [name] if len(self.labels) == 1 else [f"{name}_{label}" for label in self.labels]

    def main_of(self, samples: Samples) -> Samples:
        """The samples with logits and labels of the main task, [R]."""
        return _of_task(samples, 0) if len(self.labels) > 1 else samples

    def measure(self, samples: Samples, together: bool = False) -> Quality:
        """Measures the main task, and of several tasks each; see :func:`measure` for ``together``."""
        if len(self.labels) == 1:
            return measure(samples, together)
        by_task = {label: measure(_of_task(samples, task), together) for task, label in enumerate(self.labels)}
        of_tasks = {label: dataclasses.replace(each, calibration_bins=None) for label, each in by_task.items()}
        return dataclasses.replace(by_task[self.labels[0]], by_task=of_tasks)


def _of_task(samples: Samples, task: int) -> Samples:
    return samples._replace(logits=samples.logits[:, task], label=samples.label[:, task])
