"""The ``[model]`` section: name and sizes of the network."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a network; the defaults are the CowClip paper's.

    Attributes:
        name: a key of ``MODELS``: wdl, deepfm, dcn, dcnmix (low-rank mixture) or dcnv2 (full matrix); checked by
            ``require_model``.
        embedding_dim: width D of a field's embedding, without the wide weight that is stored beside it.
        hidden: widths of the MLP's ReLU layers.
        dropout: share of activations dropped after each of them while training, in [0, 1).
        cross_layers: number of cross layers (dcn, dcnmix, dcnv2).
        experts: number of experts in each cross layer (dcnmix).
        rank: rank of each expert's matrices (dcnmix).
    """

    name: str = "deepfm"
    embedding_dim: int = 10
    hidden: tuple[int, ...] = (400, 400, 400)
    dropout: float = 0.0
    cross_layers: int = 3
    experts: int = 4
    rank: int = 32

    def __post_init__(self) -> None:
        for field in ("embedding_dim", "cross_layers", "experts", "rank"):
            if getattr(self, field) < 1:
                raise ValueError(f"model.{field} must be at least 1, got {getattr(self, field)}")
        if not self.hidden or min(self.hidden) < 1:
            raise ValueError(
                f"model.hidden must list at least one layer width, each at least 1, got {list(self.hidden)}; "
                "the paper's is [400, 400, 400]"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout must be in [0, 1), got {self.dropout}; 0 turns it off")
