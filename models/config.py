"""The ``[model]`` section: name and sizes of the network."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a network; the defaults are the CowClip paper's.

    Attributes:
        name: a key of ``MODELS``, or "module:Class" for a network of your own; see docs/models.md.
        embedding_dim: width D of a field's embedding, without the wide weight that is stored beside it.
        hidden: widths of the MLP's ReLU layers.
        dropout: share of activations dropped after each of them while training, in [0, 1).
        options: further sizes, which each network has its own of, as a table `[model.options]`; docs/models.md lists
            them.
    """

    name: str = "deepfm"
    embedding_dim: int = 10
    hidden: tuple[int, ...] = (400, 400, 400)
    dropout: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.embedding_dim < 1:
            raise ValueError(f"model.embedding_dim must be at least 1, got {self.embedding_dim}")
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(
                f"model.hidden must list at least one layer width, each at least 1, got {list(self.hidden)}; "
                "the paper's is [400, 400, 400]"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout must be in [0, 1), got {self.dropout}; 0 turns it off")
