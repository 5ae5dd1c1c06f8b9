"""A linear model with pairwise products of embeddings, an MLP, or both.

Factorization machine (Rendle 2010), Wide & Deep (arXiv 1606.07792), DeepFM (arXiv 1703.04247).
"""

from torch import Tensor, nn

from ..config import ModelConfig
from ..front import Front, Sparse
from ..layers import LinearPart, LogitKernel, Mlp


class PairwiseProducts(nn.Module):
    """Sum of the inner products of all pairs of embeddings, float [B], from rows [B, F, P].

    ``pairs`` is this sum where the front has computed it. Source: Factorization Machines (Rendle 2010), lemma
    3.1: half of (sum squared minus sum of squares).
    """

    def __init__(self, embedding_dim: int) -> None:
        super().__init__()
        self._embedding_dim = embedding_dim

    def forward(self, rows: Tensor, pairs: Tensor | None = None) -> Tensor:
        if pairs is not None:
            return pairs
        # Few operations on contiguous rows. The front has two of them too, which a recording then has once.
        total, flat = rows.sum(1).narrow(1, 0, self._embedding_dim), rows.narrow(2, 0, self._embedding_dim).flatten(1)
        return 0.5 * ((total * total).sum(1) - (flat * flat).sum(1))


class DeepFM(nn.Module):
    """logit = linear + pairwise products of the fields' embeddings + MLP."""

    has_pairs, has_mlp = True, True

    def __init__(self, config: ModelConfig, front: Front) -> None:
        super().__init__()
        self.front = front
        self.pairs = PairwiseProducts(front.embedding_dim) if self.has_pairs else None
        self.linear = LinearPart(front.num_dense)
        self.mlp = Mlp(front.width, config.hidden, config.dropout) if self.has_mlp else None
        self.output = LogitKernel(config.hidden[-1]) if self.has_mlp else None

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        x = self.front(dense, sparse)
        logits: Tensor = self.linear(x.wide, dense)
        if self.pairs is not None:
            logits = logits + self.pairs(x.rows, x.pairs)
        if self.mlp is not None and self.output is not None:
            logits = logits + self.output.of(self.mlp, x.flat, x.padded)
        return logits


class FM(DeepFM):
    """logit = linear + pairwise products of the fields' embeddings. Source: Rendle 2010, equation 1."""

    has_mlp = False


class WideDeep(DeepFM):
    """logit = linear + MLP."""

    has_pairs = False
