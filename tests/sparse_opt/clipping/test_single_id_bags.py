"""Output gradients that carry each row's clipped gradient to a fused optimizer; test_attach.py trains with them."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from cowrec.sparse_opt import CowClip, NoClip, attach_cowclip, clip_rows
from cowrec.sparse_opt.clipping.clipped_lookup import ClippedLookup
from cowrec.sparse_opt.clipping.table_rules import TableRules
from cowrec.sparse_opt.kernels.layout import LookupBackward
from cowrec.sparse_opt.tbe.discovery import find_lookups
from sharded_case import Case, dense_optimizer, gather_tables, process_group, sharded_model, train_step

BACK_ENDS = ["compiled", "torch"]


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(0, 1, str(tmp_path_factory.mktemp("group"))):
        yield


def clipped_lookup(case: Case, rule: CowClip | NoClip, columns: int, back_end: str) -> ClippedLookup:
    lookup, names = find_lookups(sharded_model(case, case.draw()["tables"]))[0][0], range(len(case.rows))
    clipped = ClippedLookup(lookup, TableRules(rule), {f"t{t}": columns for t in names})
    if back_end == "torch":
        clipped.rows = clipped.in_torch
    return clipped


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_sums_over_ids_are_the_row_gradients(back_end: str) -> None:
    """Compares with float64 loops, for repeated ids, bags without an id, and a shared table."""
    case = Case(max_ids=1)
    clipped = clipped_lookup(case, CowClip(r=1.0, zeta=1e-3), 5, back_end)
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 2, 4 * case.batch)
    ids = [rng.integers(0, case.rows[t], n) for t, n in zip((0, 1, 2, 2), lengths.reshape(4, -1).sum(1), strict=True)]
    offsets = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
    grad = torch.from_numpy(rng.normal(size=(case.batch, 4 * case.dim)).astype(np.float32))
    indices = torch.from_numpy(np.concatenate(ids))
    bags = clipped.bags.of({"indices": indices, "offsets": offsets})
    output_grad = clipped.rows.clipped_output_grad(LookupBackward(bags, None, grad), 0.1)
    assert output_grad.shape == grad.shape

    features = ((0,), (1,), (2, 3))
    for t, table in enumerate(case.draw()["tables"]):
        sums = np.zeros((2, *table.shape))
        counts = np.zeros(len(table), int)
        for feature in features[t]:
            part = slice(feature * case.dim, (feature + 1) * case.dim)
            for sample in range(case.batch):
                bag = slice(*offsets[feature * case.batch + sample :][:2].tolist())
                for i in indices[bag].tolist():
                    sums[0, i] += grad.numpy()[sample, part]
                    sums[1, i] += output_grad.numpy()[sample, part]
                    counts[i] += 1
                if bag.start == bag.stop:
                    assert not output_grad[sample, part].any()
        expected, got = (torch.from_numpy(each[counts > 0]) for each in sums)
        weights = torch.from_numpy(table[counts > 0]).double()
        expected += 2 * 0.1 * weights
        here = torch.from_numpy(counts[counts > 0])
        expected[:, :5] = clip_rows(expected[:, :5].clone(), weights[:, :5], here, CowClip(1.0, 1e-3))
        # The sum and its L2 are rounded to float32 before they may cancel.
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_the_l2_of_a_frequent_id_is_not_lost(back_end: str) -> None:
    """Divided over 2^15 occurrences, L2 would be below half a unit in the last place of each."""
    case = Case(rows=(1,), features=(("a",),), batch=1 << 15, max_ids=1)
    clipped = clipped_lookup(case, NoClip(), case.dim, back_end)
    weight = clipped.lookup.flat_weights().fill_(0.5)
    grad = torch.ones(case.batch, case.dim)
    grad[1::2] = -1
    ids, offsets = torch.zeros(case.batch, dtype=torch.int64), torch.arange(case.batch + 1)
    bags = clipped.bags.of({"indices": ids, "offsets": offsets})
    output_grad = clipped.rows.clipped_output_grad(LookupBackward(bags, None, grad), 1e-4)
    torch.testing.assert_close(output_grad.sum(0), 2e-4 * weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_no_ids_at_all(back_end: str) -> None:
    case = Case(rows=(5,), features=(("a",),))
    clipped = clipped_lookup(case, CowClip(), case.dim, back_end)
    none = {"indices": torch.zeros(0, dtype=torch.int64), "offsets": torch.zeros(5, dtype=torch.int64)}
    backward = LookupBackward(clipped.bags.of(none), None, torch.ones(4, case.dim))
    assert not clipped.rows.clipped_output_grad(backward, 0.1).any()


@pytest.mark.parametrize("sharding", ["table_wise", "data_parallel"])
def test_excluded_tables_keep_their_l2(sharding: str) -> None:
    case = Case(steps=1, max_ids=1, sharding=sharding)
    drawn = case.draw()
    model = sharded_model(case, drawn["tables"])
    attach_cowclip(model, CowClip(1e-3, 0.0), exclude=["t0"], single_id_bags=True, l2=0.5)
    bags, targets = drawn["steps"][0]
    silent = {name: np.zeros_like(target) for name, target in targets.items()}
    train_step(case, model, bags, silent, 0, case.batch)
    if dense := dense_optimizer(case, model):
        dense.step()
    used = np.unique(np.concatenate([ids for ids, _ in bags["a"]]))
    expected = drawn["tables"][0].astype(np.float64)
    expected[used] -= case.lr * 2 * 0.5 * expected[used]
    np.testing.assert_allclose(gather_tables(case, model)[0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"l2": 0.1}, r"l2 = 0.1 .* needs single_id_bags=True .* use cowrec's EmbeddingAdam, or l2 = 0"),
        ({"l2": -1.0, "single_id_bags": True}, "l2 must be >= 0 and finite, got -1.0"),
        ({"l2": float("nan"), "single_id_bags": True}, "l2 must be >= 0 and finite, got nan"),
    ],
)
def test_refuses(settings: dict, message: str) -> None:
    case = Case()
    with pytest.raises(ValueError, match=message):
        attach_cowclip(sharded_model(case, case.draw()["tables"]), CowClip(), **settings)
