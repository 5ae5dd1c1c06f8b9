"""What readers of several ranks need of the transport between them, which the trainer implements."""

from collections.abc import Sequence
from typing import Protocol

import torch


class Answering(Protocol):
    """Answers the questions that other ranks ask; called by one thread, one question after the other."""

    def answer(self, rank: int, question: Sequence[int]) -> torch.Tensor:
        """Returns bytes for a rank, uint8 [n]; a ValueError or OSError is raised where it asked."""

    def answered(self, rank: int, question: Sequence[int]) -> None:
        """Takes notice that the answer, or the error, is on its way."""


class Exchange(Protocol):
    """Questions to the other ranks, which answer whether or not they read at the time."""

    def serve(self, answering: Answering) -> int:
        """Registers who answers; returns its number, which is that of its counterparts on the other ranks.

        All ranks register together.
        """

    def ask(self, number: int, question: Sequence[int], ranks: Sequence[int]) -> list[torch.Tensor]:
        """Asks ranks, other than this one, three numbers; returns their answers, in the order of `ranks`.

        Raises:
            ValueError, OSError: the error that a rank had.
            RuntimeError: a rank has ended, or does not answer.
        """
