"""DLRM against TorchRec's own, with the same weights."""

import torch
from torch import nn
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.models import ModelConfig, build_model, physical_dim

DIM, ROWS = 4, (11, 5, 7)


def table(i: int, rows: int, width: int) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=f"t{i}", feature_names=[f"C{i}"], num_embeddings=rows, embedding_dim=width)


def test_logits_and_sizes_are_those_of_torchrec() -> None:
    """Both use float32: sums of up to 16 terms of size 1."""
    torch.manual_seed(0)
    config = ModelConfig(name="dlrm", embedding_dim=DIM, hidden=(8, 6), options={"bottom": (5, 7)})
    model = build_model(config, [table(i, rows, physical_dim(DIM)) for i, rows in enumerate(ROWS)], 2)
    other = DLRM(
        EmbeddingBagCollection(tables=[table(i, rows, DIM) for i, rows in enumerate(ROWS)]),
        dense_in_features=2,
        dense_arch_layer_sizes=[5, 7, DIM],
        over_arch_layer_sizes=[8, 6, 1],
    )
    own = [each for key, each in model.named_parameters() if ".embedding_bags." not in key]
    theirs = [each for key, each in other.named_parameters() if ".embedding_bags." not in key]
    assert sum(map(torch.numel, own)) == sum(map(torch.numel, theirs))
    with torch.no_grad():
        for one, two in zip(own, theirs, strict=True):
            one.normal_(std=0.5)
            two.copy_(one.reshape(two.shape))
        for bag, same in zip(tables_of(model), tables_of(other), strict=True):
            same.weight.copy_(bag.weight[:, :DIM])
    ids = torch.cat([torch.randint(rows, (9,)) for rows in ROWS])
    sparse = KeyedJaggedTensor(keys=["C0", "C1", "C2"], values=ids, lengths=torch.ones_like(ids))
    dense = torch.randn(9, 2)
    torch.testing.assert_close(model(dense, sparse), other(dense, sparse).squeeze(1), rtol=1e-5, atol=1e-5)


def tables_of(model: nn.Module) -> list[nn.Module]:
    return [each for name, each in model.named_modules() if ".embedding_bags." in name]
