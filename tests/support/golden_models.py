"""Networks of the project with the weights of a recorded reference model."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.models import ModelConfig, build_model, physical_dim

FIELDS = ("C1", "C2", "C3")
DENSE = ("I1", "I2")


def model_name(file: Path) -> str:
    """Key of MODELS that ``traj_<tag>_...npz`` recorded."""
    tag = file.stem.split("_")[1]
    return "dcnv2" if tag == "dcnmatrix" else tag


def golden_model(name: str, golden: Mapping[str, np.ndarray]) -> nn.Module:
    """Builds the network ``name``, unsharded, with the weights ``s0/w/*``."""
    weights = {key.rpartition("/")[2]: golden[key] for key in golden if key.startswith("s0/w/")}
    dim = int(golden["hp/dim"])
    rows = {field: len(weights[f"sparse_emb_{field}__embeddings"]) for field in FIELDS}
    tables = [EmbeddingBagConfig(rows[field], physical_dim(dim), name=field, feature_names=[field]) for field in FIELDS]
    model = build_model(ModelConfig(name=name, embedding_dim=dim, hidden=(8, 8)), tables, len(DENSE))
    views = {**table_views(model), **dense_views(model)}
    assert views.keys() == weights.keys()
    with torch.no_grad():
        for bag in model.front.embeddings.embedding_bags.values():
            bag.weight.zero_()
        for key, view in views.items():
            view.copy_(torch.from_numpy(weights[key]))
    return model


def golden_batch(golden: Mapping[str, np.ndarray], step: int) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """Dense features, ids and labels of the batch that training step ``step + 1`` used."""
    ids = np.concatenate([golden[f"batch/{field}"][step] for field in FIELDS])
    lengths = torch.ones(len(ids), dtype=torch.int32)
    sparse = KeyedJaggedTensor(list(FIELDS), torch.from_numpy(ids), lengths=lengths)
    dense = torch.from_numpy(np.stack([golden[f"batch/{name}"][step] for name in DENSE], axis=1))
    return dense, sparse, torch.from_numpy(golden["batch/label"][step])


def table_views(model: nn.Module) -> dict[str, Tensor]:
    """Maps reference names to views of the unsharded model's tables."""
    dim = model.front.embedding_dim
    views = {}
    for field in FIELDS:
        weight = model.front.embeddings.embedding_bags[field].weight
        views[f"sparse_emb_{field}__embeddings"] = weight[:, :dim]
        views[f"linear0sparse_emb_{field}__embeddings"] = weight[:, dim : dim + 1]
    return views


def dense_views(model: nn.Module) -> dict[str, Tensor]:
    """Maps reference names to views of the model's dense parameters, in the reference's shapes."""
    views = {
        "linear__linear_kernel": model.linear.kernel,
        "prediction_layer__global_bias": model.linear.bias,
        "dense__kernel": model.output.kernel,
    }
    for i, layer in enumerate(found for found in model.mlp.layers if isinstance(found, nn.Linear)):
        views[f"dnn__kernel{i}"], views[f"dnn__bias{i}"] = layer.weight.T, layer.bias
    cross = getattr(model, "cross", None)
    if hasattr(cross, "gate"):
        for i, bias in enumerate(cross.biases):
            views[f"cross_net_mix__U_list{i}"] = cross.up[i]
            views[f"cross_net_mix__V_list{i}"] = cross.down[i]
            views[f"cross_net_mix__C_list{i}"] = cross.core[i]
            views[f"cross_net_mix__bias{i}"] = bias.unsqueeze(1)
        for expert, gate in enumerate(cross.gate):
            suffix = f"_{expert}" if expert else ""
            views[f"cross_net_mix__dense{suffix}__kernel"] = gate.unsqueeze(1)
    elif cross is not None:
        for i, (kernel, bias) in enumerate(zip(cross.kernels, cross.biases, strict=True)):
            views[f"cross_net__kernel{i}"], views[f"cross_net__bias{i}"] = kernel, bias.unsqueeze(1)
    return views
