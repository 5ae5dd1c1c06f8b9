"""The ``[model]`` section: name and sizes of the network."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cowrec.errors import UserError
from cowrec.names import hint


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a network; the defaults are the CowClip paper's.

    Attributes:
        name: network: a key of ``MODELS``, or "module:Class" for a network of your own; see docs/models.md.
        embedding_dim: width D of the embedding of a field, without the wide weight that is stored beside it.
        hidden: widths of the ReLU layers of the MLP.
        dropout: share of activations that is dropped after each of these layers while training, in [0, 1).
        options: sizes that only this network has, as a table `[model.options]`; docs/models.md lists them.
        embedding_dims: other widths of single fields, such as `{ city = 3, user = 31 }`. The network projects their
            embeddings to embedding_dim. Fields that share a table have one width. A stored row is padded to a multiple
            of 4: widths of 3, 7, 11 and so on, plus the wide weight, need no padding.
    """

    name: str = "deepfm"
    embedding_dim: int = 10
    hidden: tuple[int, ...] = (400, 400, 400)
    dropout: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    embedding_dims: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.embedding_dim < 1:
            raise UserError(f"model.embedding_dim must be at least 1, got {self.embedding_dim}")
        for name, width in self.embedding_dims.items():
            if width < 1:
                raise UserError(f"model.embedding_dims.{name} must be at least 1, got {width}")
        if not self.hidden or min(self.hidden) < 1:
            raise UserError(
                f"model.hidden must list at least one layer width, each at least 1, got {list(self.hidden)}; "
                "the paper's is [400, 400, 400]"
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout must be in [0, 1), got {self.dropout}; 0 turns it off")

    def widths(self, fields: Sequence[str]) -> list[int]:
        """Widths of the embeddings of all fields. Raises ValueError if :attr:`embedding_dims` names another one."""
        for name in self.embedding_dims:
            if name not in fields:
                meant = hint(name, fields, "sparse fields")
                raise UserError(f"model.embedding_dims names {name!r}, which is not a sparse field; {meant}")
        return [self.embedding_dims.get(name, self.embedding_dim) for name in fields]
