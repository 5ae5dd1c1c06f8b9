"""Factorization machine (Rendle 2010): a linear model and all pairwise products of embeddings."""

from torch import Tensor, nn

from cowrec.models.config import ModelConfig
from cowrec.models.front import Front, Sparse
from cowrec.models.layers import LinearPart

from .deepfm import PairwiseProducts


class FM(nn.Module):
    """logit = linear + pairwise products of the fields' embeddings. Source: Rendle 2010, equation 1.

    Args:
        config: has nothing that is used; ``hidden`` has no effect.
        front: embeddings and dense features.
    """

    def __init__(self, config: ModelConfig, front: Front) -> None:
        super().__init__()
        self.front = front
        self.pairs = PairwiseProducts(front.embedding_dim)
        self.linear = LinearPart(front.num_dense)

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        """Logits [B] of dense features [B, N] and the fields' ids."""
        x = self.front(dense, sparse)
        return self.linear(x.wide, dense) + self.pairs(x.rows)
