"""Sequences in the front and in networks of histories, against plain torch for one sample at a time."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.models import ModelConfig, build_model, build_network, physical_dim
from history_cases import OF_HISTORIES

DIM, LENGTH, ITEMS = 4, 4, 9
OPTIONS: dict[str, dict[str, object]] = {"din": {"attention": 5}, "bst": {"layers": 2, "heads": 2}}
OPTIONS["hstu"] = OPTIONS["bst"]


class Field(NamedTuple):
    keys: tuple[str, ...]
    shares: str = ""


SEQUENCES = {
    "history": Field(tuple(f"history[{k}]" for k in range(LENGTH)), "item"),
    "tags": Field(("tags[0]", "tags[1]")),
}
FIELDS = ["history", "city", "item", "tags"]
HISTORIES = [[3, 1, 3], [], [5], [8, 7, 6, 2]]
TAGS = [[], [1, 2], [0], [2]]
ITEM, CITY = [3, 4, 5, 0], [0, 1, 1, 2]


def config(name: str) -> ModelConfig:
    return ModelConfig(name=name, embedding_dim=DIM, hidden=(6, 5), options=OPTIONS.get(name, {}))


def model_of(name: str) -> nn.Module:
    """A network with random parameters."""
    torch.manual_seed(1)
    names = [("table", ITEMS, ["item", *SEQUENCES["history"].keys]), ("city", 3, ["city"])]
    names.append(("tags", 3, list(SEQUENCES["tags"].keys)))
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=physical_dim(DIM), feature_names=keys)
        for name, rows, keys in names
    ]
    model = build_model(config(name), tables, 1, fields=FIELDS, sequences=SEQUENCES)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def batch() -> tuple[Tensor, KeyedJaggedTensor]:
    fields = ((HISTORIES, LENGTH), ([[each] for each in CITY], 1), ([[each] for each in ITEM], 1), (TAGS, 2))
    ids: list[list[int]] = []
    for values, length in fields:
        for back in range(length, 0, -1):
            ids += [[each[-back]] if len(each) >= back else [] for each in values]
    keys = [key for name in FIELDS for key in (SEQUENCES[name].keys if name in SEQUENCES else (name,))]
    lengths = torch.tensor([len(each) for each in ids], dtype=torch.int32)
    values = torch.tensor([each for one in ids for each in one], dtype=torch.int32)
    return torch.rand(len(ITEM), 1), KeyedJaggedTensor(keys, values, lengths=lengths, stride=len(ITEM))


def rows_of(model: nn.Module, table: str, ids: list[int]) -> Tensor:
    return model.front.embeddings.embedding_bags[table].weight[torch.tensor(ids, dtype=torch.int64)]


def mlp(layers: nn.Module, x: Tensor) -> Tensor:
    for layer in (each for each in layers.layers if isinstance(each, nn.Linear)):
        x = torch.clamp(layer.weight @ x + layer.bias, min=0)
    return x


def din(model: nn.Module, sample: int, dense: Tensor) -> Tensor:
    """Figure 2 of the paper, with the two embeddings and their product as inputs of the activation unit."""
    unit, target = model.attention.units[0], rows_of(model, "table", ITEM)[sample, :DIM]
    interest = torch.zeros(DIM)
    for step in rows_of(model, "table", HISTORIES[sample])[:, :DIM]:
        hidden = torch.cat([step, target, step * target]) @ unit.kernel + unit.bias
        hidden = torch.where(hidden > 0, hidden, unit.slope * hidden)
        interest = interest + (hidden @ unit.output[:, 0] + unit.output_bias) * step
    tags = rows_of(model, "tags", TAGS[sample])[:, :DIM]
    city = rows_of(model, "city", CITY)[sample, :DIM]
    pooled = tags.mean(0) if len(tags) else torch.zeros(DIM)
    x = mlp(model.mlp, torch.cat([interest, city, target, pooled, dense]))
    return x @ model.output.kernel[:, 0] + model.output.bias[0]


def norm(layer: nn.Module, x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.var(correction=0) + layer.eps).sqrt() * layer.weight + layer.bias


def bst(model: nn.Module, sample: int, dense: Tensor) -> Tensor:
    """Equations 2 to 7 of the paper for the items that there are, whose positions end at the scored item's."""
    module, dim = model.transformers, DIM // 2
    ids = [*HISTORIES[sample], ITEM[sample]]
    steps = list(rows_of(model, "table", ids)[:, :DIM] + module.positions[0][LENGTH + 1 - len(ids) :])
    for layer in module.layers:
        heads = [[] for _ in steps]
        for columns in (slice(0, dim), slice(dim, DIM)):
            query, key, value = (
                [x @ each[:, columns] for x in steps] for each in (layer.query, layer.key, layer.value)
            )
            for at, q in enumerate(query):
                weights = torch.softmax(torch.stack([q @ k for k in key]) / dim**0.5, 0)
                heads[at].append(sum(weight * v for weight, v in zip(weights, value, strict=True)))
        steps = [norm(layer.norms[0], x + torch.cat(h) @ layer.output) for x, h in zip(steps, heads, strict=True)]
        inner = [x @ layer.inner + layer.inner_bias for x in steps]
        inner = [torch.where(x > 0, x, 0.01 * x) @ layer.outer + layer.outer_bias for x in inner]
        steps = [norm(layer.norms[1], x + y) for x, y in zip(steps, inner, strict=True)]
    absent = [torch.zeros(DIM)] * (LENGTH + 1 - len(ids))
    tags = rows_of(model, "tags", TAGS[sample])[:, :DIM]
    others = [rows_of(model, "city", CITY)[sample, :DIM], rows_of(model, "table", ITEM)[sample, :DIM]]
    others.append(tags.mean(0) if len(tags) else torch.zeros(DIM))
    x = mlp(model.mlp, torch.cat([*others, *absent, *steps, dense]))
    return x @ model.output.kernel[:, 0] + model.output.bias[0]


def hstu(model: nn.Module, sample: int, dense: Tensor) -> Tensor:
    """Equations 1 to 3 of the paper for the items that there are, each of which sees those before it."""
    ids, dim = [*HISTORIES[sample], ITEM[sample]], DIM // 2
    steps = list(rows_of(model, "table", ids)[:, :DIM])
    for layer in model.interests.stacks[0]:
        gate, value, query, key = (
            [x[k : k + DIM] for x in (F.silu(norm(layer.norms[0], x) @ layer.inner + layer.inner_bias) for x in steps)]
            for k in range(0, 4 * DIM, DIM)
        )
        new = []
        for i, x in enumerate(steps):
            heads = torch.zeros(DIM)
            for j in range(i + 1):
                scores = [(query[i][k : k + dim] @ key[j][k : k + dim]).repeat(dim) for k in (0, dim)]
                weights = F.silu(torch.cat(scores) + layer.distance_bias[i - j]) / (LENGTH + 1)
                heads = heads + weights * value[j]
            new.append(x + (norm(layer.norms[1], heads) * gate[i]) @ layer.outer + layer.outer_bias)
        steps = new
    tags = rows_of(model, "tags", TAGS[sample])[:, :DIM]
    parts = [steps[-1], rows_of(model, "city", CITY)[sample, :DIM], rows_of(model, "table", ITEM)[sample, :DIM]]
    x = mlp(model.mlp, torch.cat([*parts, tags.mean(0) if len(tags) else torch.zeros(DIM), dense]))
    return x @ model.output.kernel[:, 0] + model.output.bias[0]


FORMULAS = {"din": din, "bst": bst, "hstu": hstu}


@pytest.mark.parametrize("name", OF_HISTORIES)
def test_logits_and_gradients_follow_the_paper(name: str) -> None:
    """Histories of 3, 0, 1 and 4 items, of which some repeat and one is the scored one."""
    model, (dense, sparse) = model_of(name), batch()
    logits = model(dense, sparse)
    expected = torch.stack([FORMULAS[name](model, sample, dense[sample]) for sample in range(len(ITEM))])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(len(ITEM))
    found = torch.autograd.grad(logits @ weights, [*model.parameters()], allow_unused=True)
    wanted = torch.autograd.grad(expected @ weights, [*model.parameters()], allow_unused=True)
    for (key, parameter), one, other in zip(model.named_parameters(), found, wanted, strict=True):
        zeros = torch.zeros_like(parameter)
        one, other = zeros if one is None else one, zeros if other is None else other
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def test_the_front_gives_rows_masks_and_their_mean() -> None:
    model, (dense, sparse) = model_of("deepfm"), batch()
    x = model.front(dense, sparse)
    history, mask = x.sequences["history"]
    assert mask.tolist() == [[k >= LENGTH - len(each) for k in range(LENGTH)] for each in HISTORIES]
    for sample, ids in enumerate(HISTORIES):
        own = rows_of(model, "table", ids)
        assert torch.equal(history[sample, LENGTH - len(ids) :], own)
        assert not history[sample, : LENGTH - len(ids)].any()
        mean = own.mean(0) if ids else torch.zeros(own.shape[1])
        torch.testing.assert_close(x.rows[sample, FIELDS.index("history")], mean)
    assert torch.equal(x.rows[:, FIELDS.index("item")], rows_of(model, "table", ITEM))
    assert [*x.sequences] == ["history", "tags"]


@pytest.mark.parametrize("name", ["deepfm", *OF_HISTORIES])
def test_rows_that_are_looked_up_elsewhere_give_the_same_logits(name: str) -> None:
    """A row of zeros within a history counts, as the mask comes from the lengths."""
    model, (dense, sparse) = model_of(name), batch()
    with torch.no_grad():
        model.front.embeddings.embedding_bags["table"].weight[1] = 0
    network = build_network(config(name), FIELDS, 1, sequences=SEQUENCES)
    network.load_state_dict({key: value for key, value in model.state_dict().items() if ".embeddings." not in key})
    looked_up = model.front.embeddings(sparse).to_dict()
    rows = torch.stack([looked_up[key] for key in sparse.keys()], 1)  # noqa: SIM118
    lengths = torch.tensor([[len(each) for each in one] for one in (HISTORIES, TAGS)]).t()
    assert torch.equal(network(dense, (rows, lengths)), model(dense, sparse))


def test_what_histories_need_is_said() -> None:
    with pytest.raises(ValueError, match='"din" needs a field of kind sequence that shares the table'):
        build_network(config("din"), ["item"], 1)
    with pytest.raises(ValueError, match="heads = 3 must divide"):
        build_network(ModelConfig("bst", DIM, options={"heads": 3}), FIELDS, 1, sequences=SEQUENCES)
    own = ModelConfig(name="deepfm", embedding_dim=DIM, embedding_dims={"item": 7})
    with pytest.raises(ValueError, match=r"model.embedding_dims.item = 7, but the sequence 'history'"):
        build_network(own, FIELDS, 1, sequences=SEQUENCES)
