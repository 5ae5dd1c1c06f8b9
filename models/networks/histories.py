"""The histories of a front, for the networks that read them.

Sizes: B samples, D embedding width, L positions of a sequence.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cowrec.errors import UserError

from ..front import Features, Front


class History(NamedTuple):
    """A sequence that shares a field's table, and those along it: its parts, first those that share a field's."""

    parts: list[str]
    """Their names."""
    places: list[int]
    """Their numbers among the front's fields."""
    targets: list[int]
    """Numbers of the fields whose tables the first parts share."""
    length: int
    """L."""

    def with_target(self, x: Features, dim: int) -> tuple[Tensor, Tensor]:
        """Sums of the parts' embeddings at each position, and of the targets' behind them.

        Returns:
            [B, L + 1, D], and where there is one, which is always at the last: bool [B, L + 1].
        """
        steps = sum(x.sequences[part].rows[:, :, :dim] for part in self.parts)
        target = sum(x.rows[:, each, None, :dim] for each in self.targets)
        assert isinstance(steps, Tensor)
        assert isinstance(target, Tensor)
        return torch.cat([steps, target], 1), F.pad(x.sequences[self.parts[0]].mask, (0, 1), value=True)


def histories_of(front: Front, name: str) -> list[History]:
    """The histories of a front. Raises ValueError, for the network of that name, if there are none."""
    sequences, found = front.sequences, list[History]()
    for main, sequence in sequences.items():
        if sequence.shares and not sequence.along:
            parts = [main, *(part for part, each in sequences.items() if each.along == main)]
            parts.sort(key=lambda part: not sequences[part].shares)
            targets = [front.fields.index(sequences[part].shares) for part in parts if sequences[part].shares]
            places = [front.fields.index(part) for part in parts]
            found.append(History(parts, places, targets, len(sequence.keys)))
    if not found:
        raise UserError(
            f'model.name = "{name}" needs a field of kind sequence that shares the table of a categorical field; add'
            " one to the schema file, with shares, or choose a network for fields without order"
        )
    return found


def require_heads(front: Front, heads: int) -> None:
    """Raises ValueError unless the embeddings can be split into so many heads."""
    if front.embedding_dim % heads:
        raise UserError(
            f"model.options.heads = {heads} must divide model.embedding_dim = {front.embedding_dim}; change one"
        )
