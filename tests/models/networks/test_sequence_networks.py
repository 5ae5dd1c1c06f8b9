"""Sequences in the front and in networks of histories, against plain torch for one sample at a time."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from network_formulas import mlp, output
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
    along: str = ""


SEQUENCES = {
    "history": Field(tuple(f"history[{k}]" for k in range(LENGTH)), "item"),
    "tags": Field(("tags[0]", "tags[1]")),
}
ALONG = {
    "marks": Field(tuple(f"marks[{k}]" for k in range(LENGTH)), "", "history"),
    "cities": Field(tuple(f"cities[{k}]" for k in range(LENGTH)), "city", "history"),
}
FIELDS = ["history", "city", "item", "tags"]
HISTORIES = [[3, 1, 3], [], [5], [8, 7, 6, 2]]
TAGS = [[], [1, 2], [0], [2]]
ITEM, CITY = [3, 4, 5, 0], [0, 1, 1, 2]
MARKS, CITIES = [[0, 0, 1], [], [2], [1, 0, 2, 0]], [[2, 1, 1], [], [1], [0, 2, 0, 1]]
IDS = {"history": HISTORIES, "tags": TAGS, "marks": MARKS, "cities": CITIES}
IDS |= {"item": [[id_] for id_ in ITEM], "city": [[id_] for id_ in CITY]}
TABLES = {"history": "table", "item": "table", "cities": "city"}


def config(name: str, **dims: int) -> ModelConfig:
    return ModelConfig(name=name, embedding_dim=DIM, hidden=(6, 5), options=OPTIONS.get(name, {}), embedding_dims=dims)


def model_of(name: str, *, along: bool = False, **dims: int) -> nn.Module:
    """A network with random parameters; `dims` are the widths of fields with others than D."""
    torch.manual_seed(1)
    sequences = SEQUENCES | ALONG if along else SEQUENCES
    names = [("table", ITEMS, ["item", *SEQUENCES["history"].keys])]
    names.append(("city", 3, ["city", *ALONG["cities"].keys] if along else ["city"]))
    names.append(("tags", 3, list(SEQUENCES["tags"].keys)))
    names += [("marks", 3, list(ALONG["marks"].keys))] * along
    tables = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=physical_dim(dims.get(keys[0].partition("[")[0], DIM)),
            feature_names=keys,
        )
        for name, rows, keys in names
    ]
    fields = list(dict.fromkeys([*FIELDS, *sequences]))
    model = build_model(config(name, **dims), tables, 1, fields=fields, sequences=sequences)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def batch(model: nn.Module) -> tuple[Tensor, KeyedJaggedTensor]:
    sequences, ids, keys = model.front.sequences, list[list[int]](), list[str]()
    for name in model.front.fields:
        keys += sequences[name].keys if name in sequences else (name,)
        for back in range(len(sequences[name].keys) if name in sequences else 1, 0, -1):
            ids += [[ids[-back]] if len(ids) >= back else [] for ids in IDS[name]]
    lengths = torch.tensor([len(history) for history in ids], dtype=torch.int32)
    values = torch.tensor([id_ for one in ids for id_ in one], dtype=torch.int32)
    return torch.rand(len(ITEM), 1), KeyedJaggedTensor(keys, values, lengths=lengths, stride=len(ITEM))


def rows_of(model: nn.Module, table: str, ids: list[int]) -> Tensor:
    return model.front.embeddings.embedding_bags[table].weight[torch.tensor(ids, dtype=torch.int64)]


def embeddings(model: nn.Module, field: str, sample: int) -> Tensor:
    """Of all ids of a field, [n, D]."""
    rows, table = rows_of(model, TABLES.get(field, field), IDS[field][sample]), TABLES.get(field, field)
    own = dict(model.named_parameters()).get("front.layout.projections.kernels.7")
    number = {"table": 0, "marks": 1}.get(table)
    return rows[:, :DIM] if own is None or number is None else rows[:, :7] @ own[number]


def parts_of(model: nn.Module, sample: int) -> tuple[list[Tensor], list[Tensor]]:
    """Embeddings of the sequences of the history, [n, D] each, and of the fields that the first of them share."""
    along = "marks" in model.front.sequences
    parts, fields = (["history", "cities", "marks"], ["item", "city"]) if along else (["history"], ["item"])
    targets = [embeddings(model, field, sample)[0] for field in fields]
    return [embeddings(model, part, sample) for part in parts], targets


def logit(model: nn.Module, sample: int, dense: Tensor, given: dict[str, Tensor], *behind: Tensor) -> Tensor:
    """Of the MLP of all fields, pooled where they are not `given`, of further parts and dense features."""
    pooled = []
    for field in model.front.fields:
        own = embeddings(model, field, sample)
        pooled.append(given.get(field, own.mean(0) if len(own) else torch.zeros(DIM)))
    return output(model.output, mlp(model.mlp, torch.cat([*pooled, *behind, dense])))


def din(model: nn.Module, sample: int, dense: Tensor) -> Tensor:
    """Figure 2 of the paper, with the two embeddings, their product and difference as inputs of the activation unit."""
    unit, (parts, targets) = model.attention.units[0], parts_of(model, sample)
    target, interest = torch.cat(targets), torch.zeros(len(parts) * DIM)
    for step in torch.cat(parts, 1):
        shared = step[: len(target)]
        hidden = torch.cat([step, target, shared * target, shared - target]) @ unit.kernel + unit.bias
        hidden = torch.where(hidden > 0, hidden, unit.slope * hidden)
        interest = interest + (hidden @ unit.output[:, 0] + unit.output_bias) * step
    names = ("history", "cities", "marks")[: len(parts)]
    return logit(model, sample, dense, dict(zip(names, interest.split(DIM), strict=True)))


def norm(layer: nn.Module, x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.var(correction=0) + layer.eps).sqrt() * layer.weight + layer.bias


def bst(model: nn.Module, sample: int, dense: Tensor) -> Tensor:
    """Equations 2 to 7 of the paper for the items that there are, whose positions end at the scored item's."""
    module, dim = model.transformers, DIM // 2
    parts, targets = parts_of(model, sample)
    steps = [*sum(parts), sum(targets)]
    absent = LENGTH + 1 - len(steps)
    steps = [x + position for x, position in zip(steps, module.positions[0][absent:], strict=True)]
    for layer in module.layers:
        heads = [[] for _ in steps]
        for columns in (slice(0, dim), slice(dim, DIM)):
            query, key, value = (
                [x @ weight[:, columns] for x in steps] for weight in (layer.query, layer.key, layer.value)
            )
            for at, q in enumerate(query):
                weights = torch.softmax(torch.stack([q @ k for k in key]) / dim**0.5, 0)
                heads[at].append(sum(weight * v for weight, v in zip(weights, value, strict=True)))
        steps = [norm(layer.norms[0], x + torch.cat(h) @ layer.output) for x, h in zip(steps, heads, strict=True)]
        inner = [x @ layer.inner + layer.inner_bias for x in steps]
        inner = [torch.where(x > 0, x, 0.01 * x) @ layer.outer + layer.outer_bias for x in inner]
        steps = [norm(layer.norms[1], x + y) for x, y in zip(steps, inner, strict=True)]
    behind = torch.cat([*[torch.zeros(DIM)] * absent, *steps])
    return logit(model, sample, dense, {"history": torch.zeros(0)}, behind)


def hstu(model: nn.Module, sample: int, dense: Tensor) -> Tensor:
    """Equations 1 to 3 of the paper for the items that there are, each of which sees those before it."""
    dim, (parts, targets) = DIM // 2, parts_of(model, sample)
    steps = [*sum(parts), sum(targets)]
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
    return logit(model, sample, dense, {"history": steps[-1]})


FORMULAS = {"din": din, "bst": bst, "hstu": hstu}


WIDE = {"item": 7, "history": 7}


@pytest.mark.parametrize(("along", "dims"), [(False, {}), (True, {}), (False, WIDE), (True, WIDE | {"marks": 7})])
@pytest.mark.parametrize("name", OF_HISTORIES)
def test_logits_and_gradients_follow_the_paper(name: str, along: bool, dims: dict[str, int]) -> None:
    """Histories of 3, 0, 1 and 4 items, of which some repeat and one is the scored one."""
    model = model_of(name, along=along, **dims)
    dense, sparse = batch(model)
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
    model = model_of("deepfm")
    dense, sparse = batch(model)
    x = model.front(dense, sparse)
    history, mask = x.sequences["history"]
    assert mask.tolist() == [[k >= LENGTH - len(ids) for k in range(LENGTH)] for ids in HISTORIES]
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
    model = model_of(name)
    dense, sparse = batch(model)
    with torch.no_grad():
        model.front.embeddings.embedding_bags["table"].weight[1] = 0
    network = build_network(config(name), FIELDS, 1, sequences=SEQUENCES)
    network.load_state_dict({key: value for key, value in model.state_dict().items() if ".embeddings." not in key})
    looked_up = model.front.embeddings(sparse).to_dict()
    rows = torch.stack([looked_up[key] for key in sparse.keys()], 1)  # noqa: SIM118
    lengths = torch.tensor([[len(history) for history in one] for one in (HISTORIES, TAGS)]).t()
    assert torch.equal(network(dense, (rows, lengths)), model(dense, sparse))


def test_what_histories_need_is_said() -> None:
    with pytest.raises(ValueError, match='"din" needs a field of kind sequence that shares the table'):
        build_network(config("din"), ["item"], 1)
    with pytest.raises(ValueError, match="heads = 3 must divide"):
        build_network(ModelConfig("bst", DIM, options={"heads": 3}), FIELDS, 1, sequences=SEQUENCES)
    own = ModelConfig(name="deepfm", embedding_dim=DIM, embedding_dims={"item": 7})
    with pytest.raises(ValueError, match=r"'history' shares the table of 'item', .* are 4 and 7 wide; give both"):
        build_network(own, FIELDS, 1, sequences=SEQUENCES)
    with pytest.raises(ValueError, match=r"'history' shares the table of 'item', .* are 7 and 4 wide; give both"):
        model_of("deepfm", history=7)
