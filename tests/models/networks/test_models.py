"""Networks against plain torch: sizes, values and gradients, bags of several ids, and edge cases of a batch."""

import dataclasses
import inspect
import itertools
import math
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from network_formulas import FORMULAS
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.models import MODELS, ModelConfig, build_model, build_network, l2_kernels, physical_dim, require_model
from cowrec.models.layers import glorot_normal
from history_cases import FLAT

DIM = 3
ROWS = (11, 5, 7)
SMALL = {"embedding_dim": DIM, "hidden": (6, 5)}
MIXED = {"C0": 5, "C2": 5}
OPTIONS: dict[str, dict[str, object]] = {
    "dcn": {"layers": 2},
    "dcnmix": {"layers": 2, "experts": 3, "rank": 2},
    "dcnv2": {"layers": 2},
    "dlrm": {"bottom": (4, 3)},
    "xdeepfm": {"maps": (4, 2)},
    "autoint": {"layers": 2, "heads": 2, "attention_dim": 2, "deep": True},
    "masknet_serial": {"reduction": 1.5},
    "masknet_parallel": {"blocks": 2, "block_width": 4},
    "finalmlp": {"second": (4, 10), "heads": 5, "gate": (3,)},
    "fcn": {"exponential_layers": 3, "linear_layers": 2},
    "shared_bottom": {"tower": (4,)},
    "mmoe": {"experts": 3, "tower": (4,)},
    "ple": {"levels": 3, "task_experts": 2, "shared_experts": 1, "tower": (4,)},
}


def small(name: str, dims: dict[str, int] | None = None) -> ModelConfig:
    return ModelConfig(name=name, **SMALL, embedding_dims=dims or {}, options=OPTIONS.get(name, {}))


def tables(
    dim: int = DIM, rows: tuple[int, ...] = ROWS, pooling: str = "SUM", dims: dict[str, int] | None = None
) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=f"table_{i}",
            feature_names=[f"C{i}"],
            num_embeddings=count,
            embedding_dim=physical_dim((dims or {}).get(f"C{i}", dim)),
            pooling=PoolingType(pooling),
        )
        for i, count in enumerate(rows)
    ]


def small_model(
    name: str,
    num_dense: int = 2,
    dims: dict[str, int] | None = None,
    pooling: str = "SUM",
    tasks: int = 1,
    rows: tuple[int, ...] = ROWS,
) -> nn.Module:
    """A network with random parameters, biases included, and zeros in the spare columns of the tables."""
    torch.manual_seed(3)
    own = tables(rows=rows, pooling="MEAN" if pooling == "MEAN" else "SUM", dims=dims)
    weighted = pooling == "WEIGHTED"
    model = build_model(small(name, dims), own, num_dense, num_tasks=tasks, is_weighted=weighted)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
        for i, bag in enumerate(model.front.embeddings.embedding_bags.values()):
            bag.weight[:, (dims or {}).get(f"C{i}", DIM) + 1 :] = 0
    return model


def random_batch(
    batch: int, num_dense: int = 2, ids_per_bag: int | None = 1, *, weighted: bool = False
) -> tuple[Tensor, KeyedJaggedTensor]:
    """Dense features, and bags of ``ids_per_bag`` ids, or of 0 to 3 ids if it is None."""
    generator = torch.Generator().manual_seed(batch)
    least, most = (0, 3) if ids_per_bag is None else (ids_per_bag, ids_per_bag)
    lengths = torch.randint(least, most + 1, (len(ROWS) * batch,), generator=generator)
    per_field = lengths.view(len(ROWS), batch).sum(dim=1).tolist()
    ids = torch.cat(
        [torch.randint(0, rows, (n,), generator=generator) for rows, n in zip(ROWS, per_field, strict=True)]
    )
    weights = torch.randn(len(ids), generator=generator) if weighted else None
    sparse = KeyedJaggedTensor([f"C{i}" for i in range(len(ROWS))], ids, weights, lengths)
    return torch.rand(batch, num_dense, generator=generator), sparse


def logits_by_formula(name: str, model: nn.Module, dense: Tensor, sparse: KeyedJaggedTensor, pooling: str) -> Tensor:
    """The logits, computed with plain indexing and loops on the model's parameters."""
    bags, rows = sparse.to_dict(), []
    for i in range(len(ROWS)):
        weight = model.front.embeddings.embedding_bags[f"table_{i}"].weight
        bag, pooled = bags[f"C{i}"], []
        weights = torch.ones(len(bag.values())) if bag.weights_or_none() is None else bag.weights()
        weighted = weight[bag.values()] * weights[:, None]
        for ids in torch.split(weighted, bag.lengths().tolist()):
            row = ids.sum(dim=0)
            pooled.append(row / max(len(ids), 1) if pooling == "MEAN" else row)
        rows.append(pooled)
    kernels = dict(model.named_parameters()).get("front.layout.projections.kernels.5")  # C0's and C2's
    logits = []
    for sample, d in zip(zip(*rows, strict=True), dense, strict=True):
        embeddings, wide = [row[:DIM] for row in sample], [row[DIM] for row in sample]
        for kernel, i in enumerate((0, 2)) if kernels is not None else ():
            embeddings[i] = sum(sample[i][k] * kernels[kernel, k] for k in range(5))
            wide[i] = sample[i][5]
        logits.append(FORMULAS[name](model, torch.stack(embeddings), d, sum(wide)))
    return torch.stack(logits)


def mlp_size(*widths: int) -> int:
    return sum(fan_in * fan_out + fan_out for fan_in, fan_out in itertools.pairwise(widths))


CRITEO_MLP = mlp_size(26 * 10 + 13, 400, 400, 400)


COUNTS = {"wdl": 430_814, "deepfm": 430_814, "dcn": 432_725, "dcnmix": 654_950, "dcnv2": 655_493}
COUNTS["finalmlp"] = 2 * (10 + mlp_size(10, 64, 273) + CRITEO_MLP) + 400 + 400 + 400 * 400 + 1


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_dense_parameters_at_the_shape_of_criteo(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.init, "trunc_normal_", lambda tensor, **_: tensor)  # values do not matter, and take seconds
    model = build_model(ModelConfig(name=name), tables(10, (4,) * 26), 13, device=torch.device("meta"))
    dense = [p for key, p in model.named_parameters() if not key.startswith("front.embeddings.")]
    assert sum(p.numel() for p in dense) == count
    assert not any(p.is_meta for p in dense)
    assert all(p.is_meta for p in model.front.parameters())


@pytest.mark.parametrize(("dim", "stored"), [(1, 4), (3, 4), (4, 8), (7, 8), (8, 12), (10, 12), (11, 12), (12, 16)])
def test_physical_dim(dim: int, stored: int) -> None:
    assert physical_dim(dim) == stored


@pytest.mark.parametrize(
    ("pooling", "ids_per_bag", "dims", "num_dense", "samples"),
    [("SUM", 1, {}, 2, 1), ("WEIGHTED", None, {}, 0, 9), ("MEAN", None, {}, 2, 9), ("SUM", None, MIXED, 2, 9)],
)
@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        *((name, 1) for name in FLAT),
        *((name, tasks) for name in ("shared_bottom", "mmoe", "ple") for tasks in (2, 3)),
    ],
)
def test_logits_and_gradients_match_the_formula(
    name: str, tasks: int, pooling: str, ids_per_bag: int | None, dims: dict[str, int], num_dense: int, samples: int
) -> None:
    """Both sides are float32 sums of about ten terms of size 1, so that 1e-5 leaves a factor of ten."""
    model = small_model(name, num_dense, dims, pooling, tasks)
    dense, sparse = random_batch(samples, num_dense, ids_per_bag, weighted=pooling == "WEIGHTED")
    logits, expected = model(dense, sparse), logits_by_formula(name, model, dense, sparse, pooling)
    assert logits.shape == ((samples, tasks) if tasks > 1 else (samples,))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)

    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    parameters = dict(model.named_parameters())
    got = torch.autograd.grad((logits * direction).sum(), list(parameters.values()))
    want = torch.autograd.grad((expected * direction).sum(), list(parameters.values()))
    for key, mine, plain in zip(parameters, got, want, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("shape", [(300, 200), (4, 150, 32)])
def test_glorot_normal_is_the_truncated_one(shape: tuple[int, ...]) -> None:
    """Variance 2 / (fan_in + fan_out) after truncation at two deviations of the full normal; 2% for >= 19,200 draws."""
    torch.manual_seed(0)
    values = glorot_normal(*shape).detach()
    std = math.sqrt(2 / (math.prod(shape[:-2]) * (shape[-2] + shape[-1])))
    assert values.std().item() == pytest.approx(std, rel=0.02)
    assert values.abs().max() <= 2 * std / 0.8796
    assert values.abs().max() > 1.9 * std / 0.8796


def test_initial_biases_are_zero_and_the_seed_sets_the_other_weights() -> None:
    for name in FLAT:
        torch.manual_seed(7)
        first = build_model(small(name), tables(), 2, device=torch.device("meta"))
        torch.manual_seed(7)
        second = build_model(small(name), tables(), 2, device=torch.device("meta"))
        for (key, mine), other in zip(first.named_parameters(), second.parameters(), strict=True):
            if not mine.is_meta:
                assert torch.equal(mine, other)
                assert bool(mine.any()) != ("bias" in key), key


@pytest.mark.parametrize("name", FLAT)
def test_weights_have_the_same_names_with_and_without_dropout(name: str) -> None:
    """Those of one can be loaded into the other: a server's, or one that a run starts from."""
    dropping = build_model(dataclasses.replace(small(name), dropout=0.5), tables(), 2)
    dropping.load_state_dict(small_model(name).state_dict())


def test_dropout_is_off_while_evaluating() -> None:
    model = build_model(ModelConfig(name="wdl", embedding_dim=DIM, hidden=(64, 64), dropout=0.5), tables(), 2)
    batch = random_batch(9)
    assert not torch.equal(model(*batch), model(*batch))
    model.eval()
    assert torch.equal(model(*batch), model(*batch))


def test_regularised_kernels() -> None:
    groups = l2_kernels(small_model("dcnmix"))
    assert [tuple(p.shape) for p in groups["linear"]] == [(2, 1)]
    assert len(groups["cross"]) == 6
    assert l2_kernels(small_model("wdl", num_dense=0)) == {"linear": [], "cross": []}


def build(tables: list[EmbeddingBagConfig], num_dense: int = 2, *, weighted: bool = False, **config: object) -> object:
    return build_model(ModelConfig(**config), tables, num_dense, is_weighted=weighted)


def network(fields: tuple[str, ...] = ("C0", "C1"), num_dense: int = 2, tasks: int = 1, **config: object) -> object:
    return build_network(ModelConfig(**config), fields, num_dense, num_tasks=tasks)


def options(name: str = "dcnmix", **options: object) -> None:
    require_model(ModelConfig(name=name, options=options))


UNKNOWN = r'model.name is "deepfn"; did you mean "deepfm"[?] known: wdl, deepfm'
NARROW = r"table_0 is 4 wide, but embedding_dim = 4 needs physical_dim\(4\) = 8"
MIXED_WIDTH = r"table_1 is 12 wide, but embedding_dims.C1 = 4 needs physical_dim\(4\) = 8"
LABELS = r'"deepfm" computes one logit, but the data have 2 labels; .*shared_bottom'
REFUSED = [
    (lambda: ModelConfig(embedding_dim=0), "model.embedding_dim must be at least 1, got 0"),
    (lambda: ModelConfig(dropout=1.0), r"model.dropout must be in \[0, 1\), got 1.0"),
    (lambda: options(expert=2), r'"dcnmix" has no option expert .*= 2\); did you mean model.options.experts[?]'),
    (lambda: options(experts=-1), "model.options.experts = -1: input should be greater than or equal to 1"),
    (lambda: build(tables(), name="deepfn"), UNKNOWN),
    (lambda: build(tables(3), name="wdl", embedding_dim=4), NARROW),
    (lambda: build(tables(10), name="wdl", embedding_dims={"C1": 4}), MIXED_WIDTH),
    (lambda: build([], name="wdl"), r"at least one sparse field, got none; .* transform = .buckets"),
    (lambda: build(tables(rows=(5,)), 0, name="dlrm", **SMALL), "needs two fields, or dense features"),
    (lambda: network(embedding_dims={"C1x": 4}), r"model.embedding_dims names 'C1x', .* did you mean 'C1'?"),
    (lambda: network(name="finalmlp", hidden=(6,), options={"heads": 4}), r"heads = 4 must divide .* = \[6\]"),
    (lambda: network(name="deepfm", tasks=2), LABELS),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_be_built_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_dlrm_of_one_field_and_dense_features_is_built() -> None:
    build_model(small("dlrm"), tables(rows=(5,)), 1)


@pytest.mark.parametrize("name", [name for name in FLAT if name != "fm"])  # it has no matrix product
def test_under_autocast_logits_are_float32_and_near_those_without(name: str) -> None:
    """Each sample has rows of its own, so that a table's gradient is a sample's; all but a quarter are within 5 %.

    Roundings of 2^-9 add up over layers. A sample with a unit so near its ReLU's kink that rounding carries it over has
    another derivative: up to one in ten, and which, depends on the version of torch.
    """
    batch = 64
    model, dense = small_model(name, rows=(batch,) * len(ROWS)), random_batch(batch)[0]
    lengths = torch.ones(len(ROWS) * batch, dtype=torch.int64)
    sparse = KeyedJaggedTensor(
        [f"C{i}" for i in range(len(ROWS))], torch.arange(batch).repeat(len(ROWS)), None, lengths
    )
    found = []
    for half in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(dense, sparse)
        logits.sum().backward()
        bags = model.front.embeddings.embedding_bags.values()
        found.append((logits.detach(), torch.cat([bag.weight.grad.clone() for bag in bags], 1)))
    (logits, gradients), (logits_of_half, of_half) = found
    assert logits_of_half.dtype == of_half.dtype == torch.float32
    torch.testing.assert_close(logits_of_half, logits, rtol=0, atol=0.05 * logits.abs().max().item())
    assert not torch.equal(logits_of_half, logits)
    assert not torch.equal(of_half, gradients)
    near = (of_half - gradients).norm(dim=1) <= 0.05 * gradients.norm(dim=1)
    assert near.float().mean() >= 0.75, f"{int(near.sum())} of {batch}"


def test_the_page_lists_every_network_with_its_options() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (.*) ?\|$", page.partition("## A network")[0], re.MULTILINE))
    assert list(rows) == list(MODELS)
    for name, text in rows.items():
        own = inspect.signature(MODELS[name]).parameters.values()
        options = {option.name: option.default for option in own if option.kind is inspect.Parameter.KEYWORD_ONLY}
        listed = dict(re.findall(r"`(\w+)(?: = ([^`]*))?`", text))
        assert listed.keys() - {"hidden", "embedding_dim"} == options.keys(), name
        for key, default in options.items():
            if default is not None:
                assert tomllib.loads(f"x = {listed[key]}")["x"] == (
                    list(default) if type(default) is tuple else default
                )
