"""Rules for single tables that are refused or change, and detaching without a handle.

That each table trains under its own rule is tested by the random problems.
"""

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
from random_problems.drawing import small_problem
from random_problems.training import assert_equal, sharded_model, state_of, train_step

pytest_plugins = ["one_group"]
pytestmark = pytest.mark.usefixtures("group")
CASE = small_problem()
ROWS: dict[str, ClipRule] = {"t0": CowClip(1e-2, 1e-5), "t1": ConstantClip(1e-3), "*": CowClip(0.1, 1e-4)}


def fresh(like: nn.Module | None = None) -> Any:
    """The model, with the tables of another."""
    model = sharded_model(CASE)
    if like:
        model.load_state_dict(like.state_dict())
    return model


def like_sgd(absent_rows: str) -> AdamConfig:
    """Adam whose update is lr * g, because eps hides the second moment."""
    return AdamConfig(lr=CASE.lr * 1e7, betas=(0.0, 0.0), eps=1e7, absent_rows=absent_rows)


def train(model: Any, step: int) -> dict[str, np.ndarray]:
    train_step(CASE, model, step)
    return state_of(model)


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
    case = small_problem(sharding="column_wise,table_wise")
    config = AdamConfig(l2=1e-2, absent_rows="replay")
    narrow, wide = CowClip(1e-2, 1e-5), CowClip(1.0, 1e-5)
    EmbeddingAdam(sharded_model(case), config, {"t0": wide, "t1": narrow, "t2": wide})
    with pytest.raises(ValueError, match="table 't0' is sharded column-wise, and an absent row's L2 may exceed"):
        EmbeddingAdam(sharded_model(case), config, {"t0": narrow, "*": wide})


@pytest.mark.parametrize("attach", ["fused", "replay"])
def test_a_lost_handle(attach: str) -> None:
    """A first attachment ends with detaching; the fused optimizer then trains alone. Compared with new models."""
    model, rule = fresh(), CowClip(1e-2, 1e-5)

    def attach_to(each: Any) -> None:
        if attach == "fused":
            attach_cowclip(each, rule)
        else:
            EmbeddingAdam(each, like_sgd(attach), rule)

    detach_cowclip(model)
    attach_to(model)
    with pytest.raises(ValueError, match=r"attached already; .* or detach_cowclip\(model\)"):
        attach_to(model)
    for step, is_attached in enumerate((True, False, True)):
        other = fresh(model)
        if is_attached:
            attach_to(other)
        assert_equal(train(model, step), train(other, step))
        attach_to(model) if step == 1 else detach_cowclip(model)


def test_rules_of_tables_change_between_stages() -> None:
    """Each stage is that of a new model under its rules."""
    later = {"t0": CowClip(2e-2, 1e-4), "t1": ConstantClip(2e-3), "*": CowClip(0.2, 1e-3)}
    model = fresh()
    optimizer = EmbeddingAdam(model, like_sgd("replay"), ROWS)
    for step, rules in enumerate((ROWS, later)):
        other, before = fresh(model), state_of(model)
        EmbeddingAdam(other, like_sgd("replay"), rules)
        optimizer.reconfigure(like_sgd("replay"), rules)
        after = train(model, step)
        assert not np.array_equal(after["c0.t1"], before["c0.t1"])
        assert_equal(after, train(other, step))
    with pytest.raises(ValueError, match="the clip rule cannot change from 't0: cowclip"):
        optimizer.reconfigure(like_sgd("replay"), CowClip())


def test_the_name_of_one_table_has_precedence_over_one_that_collections_share() -> None:
    towers = nn.ModuleDict({"a": fresh().module.c0, "b": fresh().module.c0})
    rule, other = CowClip(0.25), CowClip(1.0)
    for names in (["t0", "a.t0"], ["a.t0", "t0"]):
        rules = table_rules(towers, {name: rule if name == "a.t0" else other for name in names} | {"*": NoClip()}, ())
        assert (rules.of("a.t0"), rules.of("b.t0")) == (rule, other)


@pytest.mark.parametrize("rule", [0.5, CowClip, {"t0": CowClip(), "*": "cowclip"}])
def test_what_is_no_rule_is_named(rule: Any) -> None:
    model, message = fresh(), r"rule must be a clip rule.*got (0\.5|the class CowClip|'cowclip')"
    for attach in (attach_cowclip, lambda attached, given: EmbeddingAdam(attached, AdamConfig(), given)):
        with pytest.raises(TypeError, match=message):
            attach(model, rule)
