"""`[optimizer]` and `[clip]`: how the weights are updated."""

import dataclasses
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from cowrec.sparse_opt import CLIP_RULES, SCALING_RULES, ClipRule, NoClip

from .checks import require
from .nearest_name import require_known

LrDecay = Literal["none", "linear", "cosine", "step"]


@dataclass(frozen=True)
class OptimizerConfig:
    """`[optimizer]`: hyperparameters at a base batch size, and the rule that scales them to another.

    The defaults are for data that nothing is known about; the CowClip paper's values are in trainer/configs.

    Attributes:
        embedding: optimizer of the tables. "adam" is cowrec's Adam with coupled L2, on CPU and CUDA; the others are
            FBGEMM's fused ones ("fbgemm_adam" on CUDA only), with clip and L2 applied to the gradients of the batch's
            rows; every field then needs exactly one id per sample. "fbgemm_cowclip" is row-wise Adagrad with FBGEMM's
            COWCLIP mode, which differs from the paper: it counts the steps in which a row appeared, decayed or
            cumulative, instead of its occurrences in the batch; Adagrad accumulates the unclipped gradient; norms and
            scales are of complete rows, the wide weight included.
        absent_rows: for "adam", the update of rows without an id in the batch. "replay", the default, is the published
            algorithm: L2 and momentum move every row at every step; a row's steps are computed when it is next needed.
            "dense" computes the same at once, at the cost of the whole table. "lazy" skips these steps.
        base_batch_size: the batch size of embedding_lr, dense_lr, l2, betas and eps.
        scaling: the rule that scales these values to train.batch_size; "none" keeps them. "half_life", the default,
            keeps the quality of the base batch; "cowclip" is the published rule.
        embedding_lr, dense_lr, l2: values at the base batch size. l2 is on embeddings, wide weights and the linear
            kernel; by default 20 * (train.epochs - 1, at most 2) / (samples of the training split), between 1e-6 and
            1e-2.
        embedding_lr_factors: factors of the learning rate of single tables, embeddings and wide weights, by the name of
            their field, or of the table that fields share, such as `{ city = 0.5 }`; 0 leaves a table as it is.
            Scaling, warm-up and lr_decay apply to embedding_lr, of which each table keeps its share.
        weight_decay: decoupled weight decay of the tables (AdamW), embeddings and wide weights: each step multiplies
            all rows by ``1 - lr * weight_decay`` beside the clipped Adam step, with optimizer.absent_rows = "lazy"
            those of the batch alone. It is no part of the gradient, hence not clipped. Needs optimizer.embedding =
            "adam".
        dense_weight_decay: the same for all parameters of the network, biases included. Both are values at the base
            batch size; the scaling rules keep the decay of a sample.
        cross_l2: coefficient of the squares of the cross layers' parameters; not scaled.
        warmup_epochs: epochs over which the dense learning rate rises linearly from 1e-8.
        embedding_warmup_epochs: the same for the learning rate of the tables.
        lr_decay: how both learning rates fall. "linear" and "cosine": to 0 over train.epochs, in a straight line or
            half a wave. "step": by lr_decay_factor after every lr_decay_epochs. "none": they stay, as published. A
            stream has no epochs, so that neither this nor warm-up in epochs has an effect online.
        lr_decay_epochs, lr_decay_factor: for lr_decay = "step".
        betas, eps, adam_epsilon: Adam's values, dense and embedding, betas and eps at the base batch size;
            `adam_epsilon` selects the position of eps in the formula ("torch" or "keras").
        embedding_init_std: standard deviation of the tables' initial values; wide weights start at 0.
        weight_norm_coefficient, lower_bound: for "fbgemm_cowclip", whose limit of a row is
            ``counter * max(weight_norm_coefficient * ||w||, lower_bound)``; no scaling rule changes them.
        counter_halflife: for "fbgemm_cowclip": steps after which a row's appearance counts half; -1: every appearance
            counts fully; 0: only the present one counts.
    """

    embedding: Literal["adam", "rowwise_adagrad", "adagrad", "sgd", "fbgemm_adam", "fbgemm_cowclip"] = "adam"
    absent_rows: Literal["replay", "dense", "lazy"] | None = None
    base_batch_size: int = 1024
    scaling: str = "half_life"
    embedding_lr: float = 2e-3
    dense_lr: float = 1e-3
    l2: float | None = None
    embedding_lr_factors: dict[str, float] = field(default_factory=dict)
    weight_decay: float = 0.0
    dense_weight_decay: float = 0.0
    cross_l2: float = 0.0
    warmup_epochs: float = 0.0
    embedding_warmup_epochs: float = 0.0
    lr_decay: LrDecay = "none"
    lr_decay_epochs: float = 1.0
    lr_decay_factor: float = 0.5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    adam_epsilon: Literal["torch", "keras"] = "torch"
    embedding_init_std: float = 1e-2
    weight_norm_coefficient: float = 1.0
    lower_bound: float = 1e-5
    counter_halflife: int = -1

    @property
    def rates_follow_epochs(self) -> bool:
        """Whether learning rates depend on the number of epochs of the run."""
        return self.lr_decay in ("linear", "cosine")

    def __post_init__(self) -> None:
        require("optimizer.base_batch_size", self.base_batch_size, self.base_batch_size >= 1, "at least 1")
        require_known("optimizer.scaling", self.scaling, SCALING_RULES)
        for key in (
            *("embedding_lr", "dense_lr", "l2", "weight_decay", "dense_weight_decay", "cross_l2"),
            *("warmup_epochs", "embedding_warmup_epochs"),
            *("embedding_init_std", "weight_norm_coefficient", "lower_bound"),
        ):
            value = getattr(self, key)
            require(f"optimizer.{key}", value, value is None or 0 <= value < inf, "at least 0 and finite")
        for table, factor in self.embedding_lr_factors.items():
            key = f"optimizer.embedding_lr_factors.{table}"
            require(key, factor, 0 <= factor < inf, "at least 0 and finite")
        require("optimizer.lr_decay_epochs", self.lr_decay_epochs, 0 < self.lr_decay_epochs < inf, "above 0 and finite")
        require("optimizer.lr_decay_factor", self.lr_decay_factor, 0 <= self.lr_decay_factor <= 1, "from 0 to 1")
        require("optimizer.eps", self.eps, 0 < self.eps < inf, "above 0")
        require("optimizer.betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)")
        if self.embedding != "adam" and self.absent_rows not in (None, "lazy"):
            raise ValueError(
                f'optimizer.absent_rows = "{self.absent_rows}" needs optimizer.embedding = "adam", got'
                f" {self.embedding!r}: FBGEMM's fused optimizers move the rows of the batch alone; leave it out or"
                " change the optimizer"
            )
        if self.embedding != "adam" and self.weight_decay:
            raise ValueError(
                f'optimizer.weight_decay = {self.weight_decay} needs optimizer.embedding = "adam", got'
                f" {self.embedding!r}; use optimizer.l2, or change the optimizer"
            )
        require("optimizer.counter_halflife", self.counter_halflife, self.counter_halflife >= -1, "at least -1")


@dataclass(frozen=True)
class ClipConfig:
    """`[clip]`: the rule for the embedding rows.

    A rule accepts its own values only; "none" ignores all values.

    Attributes:
        rule: one of the clip rules. "field", "adaptive_field" and "global" take the norm over the batch's rows, or over
            all rows with optimizer.absent_rows = "dense"; they cannot be combined with "replay".
        r, zeta, bound, max_norm: values of the rule at optimizer.base_batch_size; optimizer.scaling scales them to
            train.batch_size. max_norm is the threshold of "constant", "field" and "global".
        histogram: count rows by ``||g|| / limit``, in the steps after which metrics are written, into the report's
            `clip_histogram`.
    """

    rule: str = "cowclip"
    r: float | None = None
    zeta: float | None = None
    bound: float | None = None
    max_norm: float | None = None
    histogram: bool = False

    def __post_init__(self) -> None:
        require_known("clip.rule", self.rule, CLIP_RULES)
        self.build()

    def build(self) -> ClipRule:
        if self.rule == NoClip.name:  # so that the one override clip.rule=none turns any run's clip off
            return NoClip()
        kind: Any = CLIP_RULES[self.rule]
        values = {key: value for key, value in dataclasses.asdict(self).items() if key not in ("rule", "histogram")}
        given = {key: value for key, value in values.items() if value is not None}
        known = {each.name for each in dataclasses.fields(kind)}
        for key, value in given.items():
            if key not in known:
                takes = f"it takes {', '.join(sorted(known))}" if known else "it takes no values"
                raise ValueError(f"clip.{key} = {value} has no meaning for clip.rule = {self.rule!r}; {takes}")
        for each in dataclasses.fields(kind):
            if each.default is dataclasses.MISSING and each.name not in given:
                raise ValueError(f"clip.rule = {self.rule!r} needs clip.{each.name}")
        return kind(**given)
