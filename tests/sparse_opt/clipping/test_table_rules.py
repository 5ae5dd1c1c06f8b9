"""Rules for single tables, and detaching without a handle; plain loops in float64 are the reference."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from cowrec.sparse_opt import (
    AdamConfig,
    ClipRule,
    ConstantClip,
    CowClip,
    EmbeddingAdam,
    FieldClip,
    GlobalClip,
    NoClip,
    attach_cowclip,
    detach_cowclip,
)
from cowrec.sparse_opt.clipping.table_rules import table_rules
from sharded_case import Case, gather_tables, process_group, row_gradients, sharded_model, train_step

CASE = Case(lr=0.1)
ROWS: dict[str, ClipRule] = {"t0": CowClip(1e-2, 1e-5), "t1": ConstantClip(1e-3), "*": CowClip(0.1, 1e-4)}
TABLES: dict[str, ClipRule] = {"t0": FieldClip(1e-3), "t2": FieldClip(1e-2)}


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    with process_group(0, 1, str(tmp_path)):
        yield


def fresh() -> Any:
    return sharded_model(CASE, CASE.draw()["tables"])


def like_sgd(absent_rows: str) -> AdamConfig:
    """Adam whose update is lr * g, because eps hides the second moment."""
    return AdamConfig(lr=CASE.lr * 1e7, betas=(0.0, 0.0), eps=1e7, absent_rows=absent_rows)


def train(model: Any, steps: slice = slice(None)) -> list[np.ndarray]:
    for bags, targets in CASE.draw()["steps"][steps]:
        train_step(CASE, model, bags, targets, 0, CASE.batch)
    return gather_tables(CASE, model)


def plain_loop(rules: Mapping[str, ClipRule], start: list[np.ndarray], steps: slice = slice(None)) -> list[np.ndarray]:
    tables = [table.astype(np.float64) for table in start]
    for bags, targets in CASE.draw()["steps"][steps]:
        for t, w in enumerate(tables):
            rule = rules.get(f"t{t}", rules.get("*", NoClip()))
            grad, counts = row_gradients(CASE, bags, targets, t)
            norms, limits = np.linalg.norm(grad, axis=1), np.full(len(w), np.inf)
            if isinstance(rule, CowClip):
                limits = counts * np.maximum(rule.r * np.linalg.norm(w, axis=1), rule.zeta)
            elif isinstance(rule, FieldClip):
                norms, limits = np.full(len(w), np.linalg.norm(grad)), np.full(len(w), rule.max_norm)
            elif isinstance(rule, ConstantClip):
                limits = np.full(len(w), rule.max_norm)
            w -= CASE.lr * grad * np.minimum(1, limits / norms.clip(1e-30))[:, None]
    return tables


def assert_close(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # three steps in float32


@pytest.mark.parametrize("attach", ["fused", "lazy", "replay", "dense"])
@pytest.mark.parametrize(
    ("rules", "exclude"), [(ROWS, ()), (ROWS, ("t2",)), (TABLES, ("t1",))], ids=["rows", "rows but one", "tables"]
)
def test_each_table_has_its_own_rule(rules: dict[str, ClipRule], exclude: tuple[str, ...], attach: str) -> None:
    model = fresh()
    if attach == "fused":
        attach_cowclip(model, rules, exclude=exclude)
    elif attach == "replay" and rules is TABLES:
        with pytest.raises(ValueError, match=r"clip.rule = 'field' needs the norm of every row in every step"):
            EmbeddingAdam(model, like_sgd(attach), rules, exclude=exclude)
        return
    else:
        EmbeddingAdam(model, like_sgd(attach), rules, exclude=exclude)
    known = {name: rule for name, rule in rules.items() if name != "*"} | dict.fromkeys(exclude, NoClip())
    expected = plain_loop(known if exclude else known | {"*": rules.get("*", NoClip())}, CASE.draw()["tables"])
    assert_close(train(model), expected)


@pytest.mark.parametrize(
    ("rules", "exclude", "message"),
    [
        ({"t0": CowClip()}, (), r"the rules name none for table 't1'; name it, or give all others a rule as '\*'"),
        ({"t00": CowClip(), "*": NoClip()}, (), r"rule names table 't00', which .* did you mean 't0'"),
        ({"t0": CowClip(), "*": NoClip()}, ("t0",), r"table 't0' has a rule and is named in exclude"),
        ({"t0": CowClip(), "*": FieldClip(1.0)}, (), r"'field' and 'cowclip' cannot be mixed: .* of a table, .* a row"),
        ({"t0": GlobalClip(2.0), "*": GlobalClip(1.0)}, (), r"'global' and 'global' cannot be mixed"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules: Any, exclude: tuple[str, ...], message: str) -> None:
    model = fresh()
    for attach in (attach_cowclip, lambda *args, **more: EmbeddingAdam(args[0], AdamConfig(), args[1], **more)):
        with pytest.raises(ValueError, match=message):
            attach(model, rules, exclude=exclude)


def test_an_unclipped_table_may_be_column_wise_under_replay() -> None:
    """Replay refuses a column-wise table only where its own rule may bound an absent row."""
    case = Case(sharding="column_wise,table_wise")
    config = AdamConfig(l2=1e-2, absent_rows="replay")
    narrow, wide = CowClip(1e-2, 1e-5), CowClip(1.0, 1e-5)
    EmbeddingAdam(sharded_model(case, case.draw()["tables"]), config, {"t0": wide, "t1": narrow, "t2": wide})
    with pytest.raises(ValueError, match="table 't0' is sharded column-wise, and an absent row's L2 may exceed"):
        EmbeddingAdam(sharded_model(case, case.draw()["tables"]), config, {"t0": narrow, "*": wide})


@pytest.mark.parametrize("attach", ["fused", "replay"])
def test_a_lost_handle(attach: str) -> None:
    """Rules of a first attachment end with it; after detaching, the fused optimizer trains alone."""
    model, rule = fresh(), {"*": CowClip(1e-2, 1e-5)}

    def again() -> None:
        if attach == "fused":
            attach_cowclip(model, rule["*"])
        else:
            EmbeddingAdam(model, like_sgd(attach), rule["*"])

    detach_cowclip(model)
    expected = CASE.draw()["tables"]
    again()
    with pytest.raises(ValueError, match=r"attached already; .* or detach_cowclip\(model\)"):
        again()
    for step, rules in enumerate((rule, {}, rule)):
        expected = plain_loop(rules, expected, slice(step, step + 1))
        assert_close(train(model, slice(step, step + 1)), expected)
        again() if step == 1 else detach_cowclip(model)


def test_rules_of_tables_change_between_stages() -> None:
    model = fresh()
    optimizer = EmbeddingAdam(model, like_sgd("replay"), ROWS)
    expected = plain_loop(ROWS, CASE.draw()["tables"], slice(0, 1))
    train(model, slice(0, 1))
    later = {"t0": CowClip(2e-2, 1e-4), "t1": ConstantClip(2e-3), "*": CowClip(0.2, 1e-3)}
    optimizer.reconfigure(like_sgd("replay"), later)
    assert_close(train(model, slice(1, 3)), plain_loop(later, expected, slice(1, 3)))
    with pytest.raises(ValueError, match="the clip rule cannot change from 't0: cowclip"):
        optimizer.reconfigure(like_sgd("replay"), CowClip())


def test_the_name_of_one_table_has_precedence_over_one_that_collections_share() -> None:
    towers = nn.ModuleDict({"a": fresh().module["ebc"], "b": fresh().module["ebc"]})
    rule, other = CowClip(0.25), CowClip(1.0)
    for names in (["t0", "a.t0"], ["a.t0", "t0"]):
        rules = table_rules(towers, {name: rule if name == "a.t0" else other for name in names} | {"*": NoClip()}, ())
        assert (rules.of("a.t0"), rules.of("b.t0")) == (rule, other)
