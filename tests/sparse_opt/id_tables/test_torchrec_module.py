"""The id table as a managed-collision module of a real TorchRec collection."""

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cowrec.sparse_opt import IdTableConfig, IdTableModule

SHARED = IdTableConfig(40, ("a", "b"), "refuse")
SINGLE = IdTableConfig(6, ("c",), "oldest", expire_after=50)


def collection() -> ManagedCollisionEmbeddingBagCollection:
    """Tables of ones, whose rows are set to zero when a new id gets them."""
    bags: list[EmbeddingBagCollection] = []

    def zero(table: str) -> object:
        def reset(rows: torch.Tensor) -> None:
            with torch.no_grad():
                bags[0].embedding_bags[table].weight[rows] = 0.0

        return reset

    modules = {name: IdTableModule(config, on_new_rows=zero(name)) for name, config in TABLES.items()}
    configs = [
        EmbeddingBagConfig(
            name=name, num_embeddings=modules[name].output_size(), embedding_dim=4, feature_names=list(config.features)
        )
        for name, config in TABLES.items()
    ]
    bags.append(EmbeddingBagCollection(tables=configs))
    with torch.no_grad():
        for bag in bags[0].embedding_bags.values():
            bag.weight.fill_(1.0)
    return ManagedCollisionEmbeddingBagCollection(
        bags[0], ManagedCollisionCollection(modules, configs), return_remapped_features=True
    )


TABLES = {"shared": SHARED, "single": SINGLE}


def features(a: list[int], b: list[int], c: list[int]) -> KeyedJaggedTensor:
    """One id a bag."""
    values = torch.tensor([*a, *b, *c], dtype=torch.int64)
    return KeyedJaggedTensor(["a", "b", "c"], values, lengths=torch.ones(len(values), dtype=torch.int64))


def test_training_equals_a_dictionary_of_vectors() -> None:
    """Ten steps of SGD: each id of each feature has its own vector, which gradient descent starts from zeros."""
    model = collection()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    vectors: dict[tuple[str, int], torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        a, b = torch.randint(-(2**63), 2**63 - 1, (5,), generator=generator).fmod(9).add(20).view(1, 5).repeat(2, 1)
        c = torch.tensor([30, 31, 30, 32, 30])
        goals = torch.randn(3, 5, 4, generator=generator)
        output, _ = model(features(a.tolist(), b.tolist(), c.tolist()))
        pooled = torch.stack([output[name] for name in "abc"])
        optimizer.zero_grad()
        (pooled * goals).sum().backward()
        optimizer.step()
        for name, ids, wanted, found in zip("abc", (a, b, c), goals, pooled.detach(), strict=True):
            expected = torch.stack([vectors.setdefault((name, int(id)), torch.zeros(4)) for id in ids])
            torch.testing.assert_close(found, expected)
            for id, goal in zip(ids, wanted, strict=True):
                vectors[name, int(id)] = vectors[name, int(id)] - 0.5 * goal


def test_evaluation_changes_nothing() -> None:
    model = collection()
    _, trained = model(features([5, 6], [5, 5], [7, 8]))
    model.eval()
    output, rows = model(features([6, 9], [5, 6], [8, 1]))
    assert rows["a"].values().tolist() == [trained["a"].values()[1], 0]
    assert rows["b"].values().tolist() == [trained["b"].values()[0], 0]
    assert rows["c"].values().tolist() == [trained["c"].values()[1], 1]
    assert trained["a"].values()[0] != trained["b"].values()[0], "the same id in two features"
    assert output["a"].tolist() == [[0.0] * 4, [1.0] * 4], "the new id's row is zero, the row of unknown ids is not"
    assert model._managed_collision_collection.open_slots()["shared"].tolist() == [37]


def test_evicted_rows_are_returned_once() -> None:
    module = IdTableModule(SINGLE)
    values = KeyedJaggedTensor(["c"], torch.tensor([4, 5, 4]), lengths=torch.ones(3, dtype=torch.int64)).to_dict()
    rows = module(values)["c"].values()
    evicted = module.evict()
    assert evicted is not None
    assert evicted.tolist() == [rows[0], rows[1]]
    assert module.evict() is None


def test_the_state_is_saved_with_the_module() -> None:
    model, other = collection(), collection()
    model(features([5, 6], [5, 5], [7, 8]))
    other(features([1000, 6], [5, 50], [70, 80]))
    other.load_state_dict(model.state_dict())
    for step in range(3):
        batch = features([5, 60 + step], [6, 5], [9, 10 + step])
        output, rows = model(batch)
        other_output, other_rows = other(batch)
        assert torch.equal(rows.values(), other_rows.values())
        assert torch.equal(output.values(), other_output.values())


def test_cuda_and_sharding_are_rejected() -> None:
    with pytest.raises(ValueError, match="on the CPU"):
        IdTableModule(SINGLE, device=torch.device("cuda"))
    with pytest.raises(NotImplementedError, match="cannot be sharded"):
        IdTableModule(SINGLE).rebuild_with_output_id_range((0, 4), [0, 4])
