"""DeepFM (arXiv 1703.04247): a linear model, all pairwise products of embeddings, and an MLP."""

from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from .config import ModelConfig
from .front import EmbeddingFront
from .layers import LinearPart, LogitKernel, Mlp


def pairwise_products(embeddings: Tensor) -> Tensor:
    """Sum of the inner products of all pairs of fields, float [B], from embeddings [B, F, D].

    Source: Factorization Machines (Rendle 2010), lemma 3.1: half of (sum squared minus sum of squares).
    """
    of_sum = embeddings.sum(dim=1).square()
    sum_of = embeddings.square().sum(dim=1)
    return 0.5 * (of_sum - sum_of).sum(dim=1)


class DeepFM(nn.Module):
    """logit = linear + pairwise products of the fields' embeddings + MLP.

    Args:
        config: uses ``hidden`` and ``dropout``.
        front: embeddings and dense features.
    """

    def __init__(self, config: ModelConfig, front: EmbeddingFront) -> None:
        super().__init__()
        self.front = front
        self.linear = LinearPart(front.num_dense)
        self.mlp = Mlp(front.width, config.hidden, config.dropout)
        self.output = LogitKernel(config.hidden[-1])

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits [B] of dense features [B, N] and the fields' ids."""
        x = self.front(dense, sparse)
        return self.linear(x.wide, dense) + pairwise_products(x.deep) + self.output(self.mlp(x.flat))
