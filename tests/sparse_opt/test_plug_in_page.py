"""The tables of docs/plug_in.md, from the parameters of the tests that they report.

After a change of these parameters, replace the tables by: python tests/sparse_opt/test_plug_in_page.py
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "plug_in.md"
BEGIN, END = "<!-- Printed by tests/sparse_opt/test_plug_in_page.py. -->", "<!-- End of the printed part. -->"

COLUMNS = {
    "SGD": {"sgd"},
    "Adagrad": {"adagrad"},
    "row-wise Adagrad": {"rowwise_adagrad"},
    "Adam, `lazy`": {"lazy", "adam", "keras_adam"},
    "`dense`": {"dense"},
    "`replay`": {"replay"},
}
EXACT, UNTESTED, MISSING, REFUSED = "exact", "untested", "not in FBGEMM", "refused"

PLANS = {
    "table_wise": "table-wise",
    "row_wise": "row-wise",
    "column_wise": "column-wise",
    "table_row_wise": "table-row-wise, on two hosts",
    "grid": "grid, on two hosts",
    "data_parallel": "data-parallel (1)",
    "row_wise,columns_of_one_rank,column_wise": "row-wise and column-wise in one collection",
    "column_wise,data_parallel,table_wise": "column-wise, data-parallel and table-wise in one collection",
}
EXCLUDED = "an excluded table"
# Kinds of test_attach.py and test_plans.py by rows of the second table.
KINDS = {
    "bags of one id": ("one id",),
    "bags of several and repeated ids, empty bags, tables of several features": (
        "several and repeated ids, empty bags, a shared table",
    ),
    "ids' weights": ("weights",),
    "mean pooling": ("mean",),
    "ranks without ids or without rows": (
        "no ids in half of the batch",
        "no ids in half of the batch, ranks without rows",
    ),
    "`EmbeddingCollection` (sequences)": ("sequences",),
    "a variable batch size per feature (2)": ("a variable batch size",),
    "several backward passes for a step": (
        "two passes for a step",
        "two passes for a step, sequences",
        "four passes for a step",
    ),
    "`clip_columns` (3)": ("leading columns", "only the leading columns"),
    "L2 in the batch's rows (3); under `dense` and `replay` in all rows": ("L2",),
}


def module(name: str) -> ModuleType:
    """A module of tests."""
    for folder in ("support", "sparse_opt", *(f"sparse_opt/{each}" for each in ("clipping", "optim"))):
        if str(TESTS / folder) not in sys.path:
            sys.path.append(str(TESTS / folder))
    return import_module(name)


def parameters(test: Callable[..., None], name: str) -> list[Any]:
    """Values of a parameter of a test."""
    for mark in test.pytestmark:
        if mark.name == "parametrize" and mark.args[0] == name:
            return list(mark.args[1])
    raise LookupError(f"{test.__name__} has no parameter {name}")


def row(title: str, optimizers: set[str], otherwise: Sequence[str] = ()) -> str:
    """A row of a table: exact for the optimizers, and otherwise what is given for each column, or untested."""
    cells = [EXACT if own & optimizers else UNTESTED for own in COLUMNS.values()]
    cells = [each if cell == UNTESTED and each else cell for cell, each in zip(cells, otherwise or cells, strict=True)]
    return f"| {' | '.join((title, *cells))} |"


def header(title: str) -> Iterator[str]:
    yield f"| {title} | {' | '.join(COLUMNS)} |"
    yield f"|---|{'---|' * len(COLUMNS)}"


def plans() -> Iterator[str]:
    """The first table."""
    tests = module("test_plans")
    assert PLANS.keys() == set(tests.PLANS)
    plain = [case for case in tests.cases() if case == type(case)(optimizer=case.optimizer, sharding=case.sharding)]
    yield from header("sharding")
    for plan, title in PLANS.items():
        yield row(title, {case.optimizer for case in plain if case.sharding == plan})
    assert len(parameters(module("test_requirements").test_2d_parallelism_is_refused, "attach")) == 2
    yield row("2D parallelism (`DMPCollection`)", set(), [REFUSED] * len(COLUMNS))


def kinds() -> Iterator[str]:
    """The second table."""
    loops, ranks, groups = module("test_attach"), module("test_plans"), module("test_group_clip")
    assert {each for own in KINDS.values() for each in own} == {*loops.KINDS, *ranks.KINDS} - {EXCLUDED}
    of_ranks = [
        (kind, case.optimizer) for kind, own in ranks.KINDS.items() for case in ranks.cases() if fits(case, own)
    ]
    yield from header("tables, ids and settings")
    for title, names in KINDS.items():
        found = {optimizer for kind, optimizer in (*loops.ONE_PROCESS, *of_ranks) if kind in names}
        left_out = {each for each in loops.OPTIMIZERS for name in names if name in loops.KINDS} - found
        yield row(title, found, [MISSING if own & left_out else "" for own in COLUMNS.values()])
    rules = parameters(module("test_table_rules").test_each_table_has_its_own_rule, "attach")
    excluded = {optimizer for kind, optimizer in of_ranks if kind == EXCLUDED}
    yield row("a rule for each table, `exclude`", {*excluded, *rules})
    processors = module("test_feature_processors")
    adam = parameters(processors.test_positions_get_their_gradients_under_embedding_adam, "absent_rows")
    yield row("trained ids' weights, as of feature processors", {"sgd", *adam})
    scaled = {case.optimizer.split()[-1] for case in module("test_loss_scale").CASES.values()}
    yield row("losses scaled by a `GradScaler`", scaled)
    half = parameters(loops.TestBackEnds.test_half_precision_tables, "optimizer")
    yield row("tables in float16", set(half), ["", "", "", "", "", REFUSED])
    adam = parameters(groups.test_adam_sees_the_clipped_gradient, "absent_rows")
    names = ", ".join(f"`{name}`" for name in groups.RULES)
    fused = {case.optimizer for case in groups.CASES}
    yield row(f"rules for tables: {names}", {*fused, *adam}, ["", "", "", "", "", REFUSED])


def fits(case: Any, settings: dict[str, Any]) -> bool:
    """True if a case is of the kind that has these settings, and of no other."""
    single = case.max_ids == 1 and "clip_columns" in case.extra  # as attach_cowclip needs
    plain = {"max_ids": 1} if single else {}
    return bool(case == type(case)(optimizer=case.optimizer, sharding=case.sharding, **plain, **settings))


def loops() -> Iterator[str]:
    """The third table."""
    pipelines, keyed = module("test_pipelines"), module("test_keyed_optimizer")
    models = module("test_upstream_models")
    yield "| around it | `attach_cowclip` | `EmbeddingAdam` |"
    yield "|---|---|---|"
    named = ", ".join(f"`{each.__name__}`" for each in pipelines.PIPELINES.values())
    for title, test in (
        (named, pipelines.test_pipelines_equal_the_plain_loop),
        ("`TrainPipelineSemiSync` (4)", pipelines.test_semi_synchronous_training_equals_a_loop_that_looks_up_ahead),
        ("`EvalPipelineSparseDist`", pipelines.test_evaluation_in_a_pipeline),
        ("`torch.compile`, before or after attaching", pipelines.test_a_compiled_model_trains_as_without),
    ):
        modes = parameters(test, "mode")
        attach = EXACT if "attach" in modes else UNTESTED
        yield f"| {title} | {attach} | {EXACT}: {', '.join(f'`{each}`' for each in modes if each != 'attach')} |"
    assert module("test_requirements").test_a_cache_that_is_filled_meanwhile_is_refused_by_embedding_adam
    yield f"| `PrefetchTrainPipelineSparseDist` (`prefetch_pipeline`) | {UNTESTED} (CUDA only) | {REFUSED} |"
    schedulers = parameters(keyed.test_schedulers_drive_the_next_backward, "name")
    yield f"| torch's schedulers: {', '.join(schedulers)} | {UNTESTED} | {EXACT}: `replay` |"
    wrappers = parameters(keyed.test_wrappers_drive_save_and_load, "name")
    assert set(wrappers) == {"warmup", "combined", "clipping", "keyed"}
    assert keyed.test_wrappers_drive_fused_optimizers_under_the_clip
    names = "`WarmupOptimizer`, `CombinedOptimizer`, `GradientClippingOptimizer`, `KeyedOptimizerWrapper`"
    yield f"| {names} | {EXACT}: the first and the third | {EXACT}: `replay` |"
    assert list(models.MODELS) == parameters(models.test_a_clip_that_binds_equals_autograd, "name")
    yield f"| models: {', '.join(models.MODELS)} | {EXACT} | {UNTESTED} |"


def printed() -> str:
    """The part of the page between ``BEGIN`` and ``END``."""
    return "\n".join((BEGIN, "", *plans(), "", *kinds(), "", *loops(), "", END))


def test_the_page_has_the_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page[page.index(BEGIN) : page.index(END) + len(END)] == printed()


if __name__ == "__main__":
    print(printed())
