"""Wide & Deep (arXiv 1606.07792): a linear model beside an MLP."""

from torch import Tensor, nn

from cowrec.models.config import ModelConfig
from cowrec.models.front import Front, Sparse
from cowrec.models.layers import LinearPart, LogitKernel, Mlp


class WideDeep(nn.Module):
    """logit = linear + MLP.

    Args:
        config: uses ``hidden`` and ``dropout``.
        front: embeddings and dense features.
    """

    def __init__(self, config: ModelConfig, front: Front) -> None:
        super().__init__()
        self.front = front
        self.linear = LinearPart(front.num_dense)
        self.mlp = Mlp(front.width, config.hidden, config.dropout)
        self.output = LogitKernel(config.hidden[-1])

    def forward(self, dense: Tensor, sparse: Sparse) -> Tensor:
        """Logits [B] of dense features [B, N] and the fields' ids."""
        x = self.front(dense, sparse)
        return self.linear(x.wide, dense) + self.output(self.mlp(x.flat))
