"""Random problems for the clip: models of several collections, sharding plans, rules, optimizers and ways to train."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cowrec.sparse_opt import CLIP_RULES

STOCK = ("sgd", "adagrad", "rowwise_adagrad")
ADAM = ("lazy", "dense", "replay")
Rule = tuple[str, dict[str, float]]


@dataclass(frozen=True)
class Table:
    """A table, the features that look it up, and its sharding.

    ``shards`` are the (rank, columns) of column shards, or the (rank, 0) of a table on one rank, or of a host's first;
    each column shard of a grid is on the host of its rank.
    """

    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: str = "sum"
    plan: str = "table_wise"
    shards: tuple[tuple[int, int], ...] = ((0, 0),)
    dtype: str = "float32"

    @property
    def splits_columns(self) -> bool:
        return len(self.shards) > 1

    @property
    def is_dense(self) -> bool:
        """True if a dense optimizer applies its gradient."""
        return self.plan in ("data_parallel", "dense")

    def ranks(self, world: int) -> set[int]:
        """Ranks that look it up."""
        on_one = self.plan in ("table_wise", "dense", "column_wise")
        return {rank for rank, _ in self.shards} if on_one else set(range(world))


@dataclass(frozen=True)
class Collection:
    """Tables that are looked up together, with the most ids of a bag and the shape of its batches."""

    tables: tuple[Table, ...]
    sequence: bool = False
    weighted: bool = False
    variable_batch: bool = False  # one, two or four samples share a bag of a feature
    max_ids: int = 3

    @property
    def features(self) -> list[str]:
        return list(dict.fromkeys(name for table in self.tables for name in table.features))

    def samples_of_bag(self, feature: str) -> int:
        return 1 << self.features.index(feature) % 3 if self.variable_batch else 1

    def outputs(self) -> Iterator[tuple[int, str, str]]:
        """Table, feature, and TorchRec's name of the output, of each output."""
        for t, table in enumerate(self.tables):
            for name in table.features:
                is_shared = sum(name in own.features for own in self.tables) > 1
                yield t, name, f"{name}@t{t}" if is_shared else name


def scope_of(rule: Rule) -> str:
    """What a rule bounds the norm of."""
    return CLIP_RULES[rule[0]].scope


@dataclass(frozen=True)
class Problem:
    """A model, its attachment and its training.

    ``idle`` names the ranks without ids, in every other step: of as many ranks as there are ``parts`` or processes.
    """

    collections: tuple[Collection, ...]
    world: int = 1
    seed: int = 0
    steps: int = 2
    passes: int = 1
    pass_size: int = 4  # samples of a rank's backward pass
    idle: tuple[int, ...] = ()
    parts: int = 0
    optimizer: str = "sgd"
    lr: float = 0.1
    rates: tuple[float, ...] = (1.0,)  # of Adam's steps, relative to lr; they repeat
    lr_factors: tuple[tuple[int, int, float], ...] = ()  # (collection, table, factor) of Adam's rate
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    adam_epsilon: str = "torch"
    l2: float = 0.0
    weight_decay: float = 0.0
    wide: tuple[float, float] | None = None  # (alpha, beta) of FTRL, for the columns that are not clipped
    rule: Rule = field(default_factory=lambda: ("none", {}))
    own_rules: tuple[tuple[int, int, Rule], ...] = ()  # (collection, table, rule), of the scope of the common rule
    exclude: tuple[tuple[int, int], ...] = ()  # (collection, table)
    clip_columns: int | tuple[tuple[int, int, int], ...] | None = None  # or (collection, table, columns)
    single_id_bags: bool = False
    pipelined: bool = False
    reads: bool = False  # evaluates other samples, and takes the model's state, between the steps
    backend: str = "compiled"  # what works on rows: kernels of the device, "torch", or "triton" in its interpreter

    @property
    def batch(self) -> int:
        return self.world * self.passes * self.pass_size

    @property
    def is_adam(self) -> bool:
        return self.optimizer in ADAM

    @property
    def scope(self) -> str:
        return scope_of(self.rule)

    def tables(self) -> list[tuple[int, int, Table]]:
        return [
            (c, t, table) for c, collection in enumerate(self.collections) for t, table in enumerate(collection.tables)
        ]

    def name(self, c: int, t: int) -> str:
        """Name of a table in the model: each collection calls its tables t0, t1 and so on."""
        several = sum(len(collection.tables) > t for collection in self.collections) > 1
        return f"c{c}.t{t}" if several else f"t{t}"

    def columns(self, c: int, t: int) -> int:
        """Leading columns of a table that are clipped."""
        dim = self.collections[c].tables[t].dim
        if isinstance(self.clip_columns, int):
            return self.clip_columns
        return {(c, t): columns for c, t, columns in self.clip_columns or ()}.get((c, t), dim)

    def rule_of(self, c: int, t: int) -> Rule:
        """Rule of a table."""
        if (c, t) in self.exclude:
            return "none", {}
        return {(c, t): rule for c, t, rule in self.own_rules}.get((c, t), self.rule)

    def lr_factor(self, c: int, t: int) -> float:
        """Factor of a table's learning rate."""
        return {(c, t): factor for c, t, factor in self.lr_factors}.get((c, t), 1.0)

    def initial(self) -> list[list[np.ndarray]]:
        """Draws the tables, [collection][table]; some rows are zero."""
        rng = np.random.default_rng((self.seed, 0))
        found = []
        for collection in self.collections:
            found.append([])
            for table in collection.tables:
                weights = rng.normal(0, 0.05, (table.rows, table.dim)) * 10 ** rng.uniform(-3, 1, (table.rows, 1))
                weights[::9] = 0
                found[-1].append(weights.astype(table.dtype).astype(np.float32))
        return found

    def batches(self) -> list[list[dict[str, Any]]]:
        """Draws bags [step][collection][feature][sample] -> (ids, weights) and output gradients "target <output>".

        A bag belongs to the first of its samples. Samples are ordered by rank, then by pass.
        """
        rng, steps = np.random.default_rng((self.seed, 1)), []
        of_rank = self.batch // (self.parts or self.world)
        for step in range(self.steps):
            steps.append([])
            for collection in self.collections:
                drawn: dict[str, Any] = {}
                for name in collection.features:
                    rows = min(table.rows for table in collection.tables if name in table.features)
                    counts = rng.integers(0, collection.max_ids + 1, self.batch)
                    for rank in self.idle if step % 2 == 0 else ():
                        counts[rank * of_rank : (rank + 1) * of_rank] = 0
                    ids = [np.minimum(rng.zipf(1.3, n) - 1, rows - 1).astype(np.int64) for n in counts]
                    drawn[name] = [(own_ids, rng.uniform(-0.5, 2, len(own_ids)).astype(np.float32)) for own_ids in ids]
                for t, _, output in collection.outputs():
                    shape = (self.batch, collection.tables[t].dim)
                    scale = 10 ** rng.uniform(-3, 1, (self.batch, 1))
                    drawn[f"target {output}"] = (rng.normal(size=shape) * scale).astype(np.float32)
                steps[-1].append(drawn)
        return steps


def small_problem(
    *,
    rows: Sequence[int] = (40, 7, 300),
    features: Sequence[Sequence[str]] = (("a",), ("b",), ("c", "d")),  # table 2 is shared by two features
    dim: int = 8,
    batch: int = 32,  # a power of two, so that dividing by it rounds nothing
    sharding: str = "table_wise",  # or one for each table, comma-separated, which repeat; likewise pooling
    pooling: str = "sum",
    dtype: str = "float32",
    world: int = 1,
    passes: int = 1,
    sequence: bool = False,
    weighted: bool = False,
    variable_batch: bool = False,
    max_ids: int = 4,
    **settings: Any,
) -> Problem:
    """A problem of one collection, whose tables t0, t1 ... have one width."""
    tables = []
    for t, (own_rows, own_features) in enumerate(zip(rows, features, strict=True)):
        plan, own_pooling = (choices.split(",")[t % (choices.count(",") + 1)] for choices in (sharding, pooling))
        # Of two ranks each holds both tables that are split; of four, which stand for two hosts, two hold each.
        shards = {
            "column_wise": ((t % world, dim // 2), ((t + 1) % world, dim // 2)),
            "columns_of_one_rank": ((t % world, dim // 2),) * 2,
            "grid_shard": ((2 * (t % 2), dim // 2), (2 - 2 * (t % 2), dim // 2)),
            "table_row_wise": ((2 * (t % 2) if world == 4 else 0, 0),),
        }.get(plan, ((t % world, 0),))
        plan = plan.replace("columns_of_one_rank", "column_wise")
        tables.append(Table(own_rows, dim, tuple(own_features), own_pooling, plan, shards, dtype))
    collection = Collection(tuple(tables), sequence, weighted, variable_batch, max_ids)
    return Problem((collection,), world, passes=passes, pass_size=batch // world // passes, **{"steps": 3} | settings)


def refusals(problem: Problem) -> list[str]:
    """Messages with which attaching must refuse the problem, as regular expressions; none if it must train.

    These are all kinds of refusal that a problem of :func:`problems` may meet.
    """
    found, tables = [], problem.tables()
    clipped = [table for c, t, table in tables if (c, t) not in problem.exclude]
    scope = problem.scope if clipped else "row"  # a rule that no table is under needs no norm
    shares_outputs = any(not (problem.collections[c].sequence or table.is_dense) for c, _, table in tables)
    if shares_outputs and not (problem.is_adam or problem.single_id_bags):
        if problem.l2:
            found.append("under a stock fused optimizer needs single_id_bags=True")
        if problem.clip_columns is not None:
            found.append("clip_columns under a stock fused optimizer needs single_id_bags=True")
    if any(problem.columns(c, t) > table.dim for c, t, table in tables):
        found.append(r"clip_columns of table '\S+' must be in")
    if scope == "field" and any(table.splits_columns for table in clipped):
        found.append(r"needs the norm of the complete table '\S+', which is sharded column-wise")
    if scope == "global":
        if any(table.plan == "data_parallel" for table in clipped):
            found.append(r"needs the norm over all tables, but '\S+' is data-parallel")
        lookups = [lookups_of(problem, rank) for rank in range(problem.world)]
        if any(len(lookup) > 1 for lookup in lookups):
            found.append(r"looks up '\S+' and '\S+' separately")
        if not all(lookups):
            found.append("holds no table")
    if scope == "row" and has_opposite_lookups(problem):
        found.append("in another order on some ranks|on some ranks in another order")
    if problem.optimizer == "replay":
        if scope != "row":
            found.append("needs the norm of every row in every step")
        bound = [problem.rule_of(c, t) for c, t, table in tables if table.splits_columns]
        if any(name != "none" and 2 * problem.l2 > 0.999 * of.get("r", 0.0) and problem.l2 > 0 for name, of in bound):
            found.append("an absent row's L2 may exceed its limit alone")
        if any(table.dtype != "float32" for _, _, table in tables):
            found.append("replay computes missed steps in float32")
    return found


def lookups_of(problem: Problem, rank: int) -> list[tuple[Any, ...]]:
    """What distinguishes the lookups of a rank, except those of data-parallel tables."""
    kinds = [
        (c, table.plan, table.dtype, table.pooling)
        for c, _, table in problem.tables()
        if table.plan != "data_parallel" and rank in table.ranks(problem.world)
    ]
    return list(dict.fromkeys(kinds))


def has_opposite_lookups(problem: Problem) -> bool:
    """True if two ranks look up column shards of two kinds of tables in opposite orders."""
    orders = set()
    for rank in range(problem.world):
        here = [
            ((c, table.dtype, table.pooling), table.splits_columns)
            for c, _, table in problem.tables()
            if table.plan == "column_wise" and rank in table.ranks(problem.world)
        ]
        order = [kind for kind in dict.fromkeys(kind for kind, _ in here) if (kind, True) in here]
        orders |= {(one, other) for n, one in enumerate(order) for other in order[n + 1 :]}
    return any((other, one) in orders for one, other in orders)


@st.composite
def problems(draw: st.DrawFn, world: int) -> Problem:
    """Draws a problem that trains or that attaching refuses."""
    optimizer = draw(st.sampled_from([*STOCK, *ADAM]))
    single = optimizer in STOCK and draw(st.integers(0, 2)) == 0
    passes = draw(st.sampled_from([1, 1, 1, 2, 3]))
    collections = [draw(_collections(world, optimizer, single, passes))]
    if draw(st.integers(0, 3)) == 0:
        collections.append(draw(_collections(world, optimizer, single, passes)))
    names = [(c, t) for c, collection in enumerate(collections) for t in range(len(collection.tables))]
    exclude = draw(st.lists(st.sampled_from(names), unique=True, max_size=2)) if draw(st.integers(0, 3)) == 0 else []
    rule = draw(_rules())
    own_rules = []
    scope = scope_of(rule)
    if scope != "global" and draw(st.integers(0, 3)) == 0:
        named = draw(st.lists(st.sampled_from(names), unique=True, max_size=3))
        of_scope = st.sampled_from([name for name in CLIP_RULES if name != "none" and scope_of((name, {})) == scope])
        own_rules = [(*table, draw(_rules(draw(of_scope)))) for table in named if table not in exclude]
    has_l2 = draw(st.booleans()) if optimizer in ADAM or single else draw(st.integers(0, 9)) == 0
    adam: dict[str, Any] = {}
    if optimizer in ADAM:
        adam["lr"] = draw(st.sampled_from([1e-3, 1e-2]))
        adam["rates"] = draw(st.sampled_from([(1.0,), (0.25, 1.0, 0.0)]))
        adam["betas"] = draw(st.sampled_from([(0.9, 0.999), (0.0, 0.9), (0.0, 0.0)]))
        adam["eps"] = draw(st.sampled_from([1e-8, 1e-6, 1e-3]))
        adam["adam_epsilon"] = draw(st.sampled_from(["torch", "keras"]))
        adam["weight_decay"] = draw(st.sampled_from([0.0, 0.1, 10.0]))
        of_tables = st.tuples(st.sampled_from(names), st.sampled_from([0.0, 0.3, 3.0]))
        drawn = dict(draw(st.lists(of_tables, max_size=2))) if draw(st.booleans()) else {}
        adam["lr_factors"] = tuple((c, t, factor) for (c, t), factor in drawn.items())
    clip_columns = draw(_clip_columns(collections, optimizer, single))
    if optimizer in ADAM and clip_columns is not None and draw(st.booleans()):
        adam["wide"] = draw(st.sampled_from([(0.1, 1.0), (1.0, 1e-2)]))
    return Problem(
        collections=tuple(collections),
        world=world,
        seed=draw(st.integers(0, 2**32 - 1)),
        steps=draw(st.integers(1, 9 if optimizer == "replay" else 4)),
        passes=passes,
        pass_size=draw(st.sampled_from([4, 8])) if _vary(collections) else draw(st.integers(1, 9)),
        idle=draw(st.sampled_from([(), (), (0,), tuple(range(world)), (world - 1,)])),
        optimizer=optimizer,
        l2=draw(st.sampled_from([1e-5, 1e-3, 0.3])) if has_l2 else 0.0,
        rule=rule,
        own_rules=tuple(own_rules),
        exclude=tuple(exclude),
        clip_columns=clip_columns,
        single_id_bags=single,
        pipelined=draw(st.booleans()) and not _vary(collections),
        reads=draw(st.booleans()),
        backend=draw(st.sampled_from(["compiled", "compiled", "torch"])),
        **adam,
    )


def _vary(collections: Sequence[Collection]) -> bool:
    return any(collection.variable_batch for collection in collections)


@st.composite
def _collections(draw: st.DrawFn, world: int, optimizer: str, single: bool, passes: int) -> Collection:
    sequence = draw(st.integers(0, 3)) == 0
    weighted = draw(st.booleans()) and (sequence or not single)
    # FBGEMM has no Adagrad with a variable batch size on CPU; passes with one are refused in the backward.
    varies = not sequence and optimizer != "adagrad" and passes == 1 and draw(st.integers(0, 4)) == 0
    plans = ["table_wise", "row_wise", "column_wise", "column_wise"]
    if not sequence:  # TorchRec has no such sequences
        plans.append("table_row_wise")
        if not varies:  # FBGEMM has no dense lookups of sequences and of variable batches on CPU
            plans += ["data_parallel"] if optimizer == "rowwise_adagrad" else ["data_parallel", "dense"]
    plan = draw(st.sampled_from([*plans, "mixed", "mixed"]))
    # FBGEMM has no weighted means. TorchRec's divisors of row-wise means are wrong under a variable batch size, and
    # beside tables of other shardings.
    may_average = not (weighted or sequence or single or varies or plan == "mixed")
    poolings = ["sum", "mean"] if may_average else ["sum"]
    pooling = draw(st.sampled_from(poolings if varies else [*poolings, "mixed"]))
    common_dim = draw(st.sampled_from([4, 8, 12, 16])) if sequence or draw(st.booleans()) else None
    # FBGEMM needs one width of all column shards of sequences, TorchRec of those of a table on one rank.
    shard_dim = draw(_shard_dims(common_dim)) if sequence else None
    tables = []
    for _ in range(draw(st.integers(1, 4))):
        own = draw(st.sampled_from(plans)) if plan == "mixed" else plan
        dim = common_dim or draw(st.sampled_from([4, 8, 12, 16]))
        number = len(tables)
        # Features of their own, and one that several tables may have.
        features = draw(st.sampled_from([[f"f{number}"], [f"f{number}"], [f"f{number}", f"g{number}"], ["shared"]]))
        least = world if own in ("row_wise", "table_row_wise") else 1  # FBGEMM has no lookup without rows on CPU
        half = not (varies or own in ("data_parallel", "dense")) and draw(st.integers(0, 9)) == 0
        rows = draw(st.one_of(st.integers(least, 6), st.integers(least, 300)))
        own_pooling = draw(st.sampled_from(poolings)) if pooling == "mixed" else pooling
        on_one = [(draw(st.integers(0, world - 1)), 0)] if own != "column_wise" else []
        shards = tuple(on_one or draw(_column_shards(world, dim, shard_dim)))
        dtype = "float16" if half else "float32"
        tables.append(Table(rows, dim, tuple(features), own_pooling, own, shards, dtype))
    max_ids = 1 if single and not sequence else draw(st.integers(1, 6))
    return Collection(tuple(tables), sequence, weighted, varies, max_ids)


@st.composite
def _column_shards(draw: st.DrawFn, world: int, dim: int, shard_dim: int | None) -> list[tuple[int, int]]:
    columns = shard_dim or draw(_shard_dims(dim))
    return [(draw(st.integers(0, world - 1)), columns) for _ in range(dim // columns)]


def _shard_dims(dim: int) -> st.SearchStrategy[int]:
    return st.sampled_from([number for number in (4, 8, 12, 16) if dim % number == 0])


@st.composite
def _rules(draw: st.DrawFn, name: str = "") -> Rule:
    name = name or draw(st.sampled_from(["cowclip"] * 4 + [name for name in CLIP_RULES if name != "cowclip"]))
    r, floor = draw(st.sampled_from([1e-3, 0.1, 1.0, 1e3])), draw(st.sampled_from([0.0, 1e-5, 1e-3, 1.0]))
    values = {"r": r, "zeta": floor, "bound": floor, "max_norm": draw(st.sampled_from([1e-4, 1e-2, 0.3, 1e3]))}
    kind: Any = CLIP_RULES[name]
    return name, {value.name: values[value.name] for value in fields(kind)}


@st.composite
def _clip_columns(draw: st.DrawFn, collections: Sequence[Collection], optimizer: str, single: bool) -> Any:
    if draw(st.integers(0, 3 if optimizer in ADAM or single else 9)):
        return None
    dims = [table.dim for collection in collections for table in collection.tables]
    if draw(st.booleans()):
        return draw(st.integers(1, min(dims) if draw(st.integers(0, 4)) else max(dims)))
    tables = [(c, t, table) for c, collection in enumerate(collections) for t, table in enumerate(collection.tables)]
    return tuple((c, t, draw(st.integers(1, table.dim))) for c, t, table in tables if draw(st.booleans()))
