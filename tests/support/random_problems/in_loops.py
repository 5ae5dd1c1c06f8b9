"""Problems of drawing.py, trained in numpy in float64 from the published formulas, with their tolerances."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from random_problems.drawing import Collection, Problem

Arrays = dict[str, np.ndarray]
Key = tuple[int, int]  # of a collection and a table in it
ROUNDING = {"float32": (2.0**-24, 0.0), "float16": (2.0**-11, 2.0**-25)}
"""Relative error, and absolute error of the smallest numbers."""
ROW_SHARDED = ("row_wise", "table_row_wise")
Limit = Callable[[dict[str, float], np.ndarray, np.ndarray, int], Any]
"""Limit of each row, or of all, from the values of the rule, norms of the weights [U], occurrences [U] and columns."""
LIMITS: dict[str, Limit] = {
    "none": lambda of, weight, count, columns: np.inf,
    "cowclip": lambda of, weight, count, columns: count * np.maximum(of["r"] * weight, of["zeta"]),
    "cowclip_reference": lambda of, weight, count, columns: (
        of["r"] * count * np.maximum(weight, of["r"] * np.sqrt(columns) * of["bound"])
    ),
    "constant": lambda of, weight, count, columns: of["max_norm"],
    "field": lambda of, weight, count, columns: of["max_norm"],
    "adaptive_field": lambda of, weight, count, columns: np.maximum(of["r"] * weight, of["zeta"]),
    "global": lambda of, weight, count, columns: of["max_norm"],
}


@dataclass(frozen=True)
class Solution:
    """Tables "c0.t0" and moments "c0.t0.exp_avg" after training, the tolerance of their elements, and statistics.

    ``rows`` are the updated rows of each table in all steps; ``clipped`` the least and the most that may count as
    clipped among them.
    """

    state: Arrays
    tolerance: Arrays
    rows: dict[str, int]
    clipped: dict[str, tuple[int, int]]


def solve(problem: Problem) -> Solution:
    """Trains exactly, and several times with rounding errors, which show what the arithmetic may change.

    Errors are those of single terms, gradients, states and weights. The tolerance of a row is twenty times the largest
    change of its elements, and 2e-6 of the largest that it ever had.
    """
    exact = _Loops(problem, None)
    noisy = [_Loops(problem, np.random.default_rng(n)) for n in range(3)]
    tolerance = {}
    for key, value in exact.state.items():
        start = exact.largest[key]
        change = np.max([np.abs(run.state[key] - value) for run in noisy], axis=0)
        tolerance[key] = 20 * change.max(1, keepdims=True) + 2e-6 * start + 1e-12
    return Solution(exact.state, tolerance, exact.rows, exact.clipped)


def row_gradients(
    problem: Problem, collection: Collection, t: int, drawn: Mapping[str, Any], rng: np.random.Generator | None
) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of the mean over the batch of sum(target * output) by a table's rows, and the rows' occurrences."""
    table = collection.tables[t]
    grads, counts = np.zeros((table.rows, table.dim)), np.zeros(table.rows, int)
    # For means over ranks TorchRec divides all outputs of the collection, sums by 1, and adds 1e-6 to the divisors.
    has_divisors = any(own.pooling == "mean" and own.plan in ROW_SHARDED for own in collection.tables)
    for number, name, output in collection.outputs():
        if number != t:
            continue
        share, targets = collection.samples_of_bag(name), drawn[f"target {output}"].astype(np.float64)
        for sample in range(problem.batch):
            ids, weights = drawn[name][sample // share * share]
            factors = weights.astype(np.float64) if collection.weighted else np.ones(len(ids))
            if table.pooling == "mean":
                factors = factors / max(len(ids), 1)
            if has_divisors:
                factors = factors / (1 + 1e-6 / (len(ids) if table.pooling == "mean" and len(ids) else 1))
            terms = factors[:, None] * targets[sample] / problem.batch
            if rng is not None:
                terms *= 1 + 2.0**-24 * rng.uniform(-1, 1, terms.shape)
            np.add.at(grads, ids, terms)
            if sample % share == 0:
                np.add.at(counts, ids, 1)
    return grads, counts


class _Loops:
    """One training, without or with rounding errors."""

    def __init__(self, problem: Problem, rng: np.random.Generator | None):
        self.problem, self._rng = problem, rng
        self._names = {(c, t): f"c{c}.t{t}" for c, t, _ in problem.tables()}
        initial = problem.initial()
        self._tables = {(c, t): initial[c][t].astype(np.float64) for c, t, _ in problem.tables()}
        # z of FTRL times alpha, with which it has the initial weight.
        beta = problem.wide[1] if problem.wide else 0.0
        self._ftrl = {key: -beta * table for key, table in self._tables.items()}
        self._moments = {key: [np.zeros_like(table), np.zeros_like(table)] for key, table in self._tables.items()}
        self.rows = dict.fromkeys(self._names.values(), 0)
        self.clipped = dict.fromkeys(self._names.values(), (0, 0))
        self.state, self.largest = self._state(), {}
        self._note_largest()
        for step, batch in enumerate(problem.batches(), start=1):
            self._take(step, batch)
            self.state = self._state()
            self._note_largest()

    def _state(self) -> Arrays:
        state = {self._names[key]: table.copy() for key, table in self._tables.items()}
        if self.problem.is_adam:
            for key, (first, second) in self._moments.items():
                state[f"{self._names[key]}.exp_avg"] = first.copy()
                state[f"{self._names[key]}.exp_avg_sq"] = second.copy()
        return state

    def _note_largest(self) -> None:
        for key, value in self.state.items():
            now = np.abs(value).max(1, keepdims=True)
            self.largest[key] = np.maximum(self.largest.get(key, 0), now)

    def _rounded(self, values: np.ndarray, dtype: str = "float32") -> np.ndarray:
        if self._rng is None:
            return values
        relative, absolute = ROUNDING[dtype]
        return values * (1 + relative * self._noise(values)) + absolute * self._noise(values)

    def _noise(self, values: np.ndarray) -> np.ndarray:
        return self._rng.uniform(-1, 1, values.shape)

    def _take(self, step: int, batch: list[dict[str, Any]]) -> None:
        problem, grads, counts, moved = self.problem, {}, {}, {}
        for key, weights in self._tables.items():
            c, t = key
            grads[key], counts[key] = row_gradients(problem, problem.collections[c], t, batch[c], self._rng)
            moved[key] = counts[key] > 0
            if problem.optimizer in ("dense", "replay"):
                moved[key] = np.ones(len(weights), bool)
            regularised = slice(problem.columns(*key) if problem.wide else None)
            grads[key][moved[key], regularised] += 2 * problem.l2 * weights[moved[key], regularised]
            grads[key] = self._rounded(grads[key])
        factors = self._factors(grads, counts, moved)
        for key, weights in self._tables.items():
            columns = problem.columns(*key)
            grads[key][:, :columns] *= factors[key][:, None]
            if problem.wide:
                self._update_wide(key, weights[:, columns:], grads[key][:, columns:])
            self._update(key, step, weights, grads[key], moved[key])
            dtype = problem.collections[key[0]].tables[key[1]].dtype
            weights[moved[key]] = self._rounded(weights[moved[key]], dtype)

    def _factors(self, grads: dict, counts: dict, moved: dict) -> dict[Key, np.ndarray]:
        """Clip factor of each row."""
        problem = self.problem
        norms, weight_norms = {}, {}
        for key, weights in self._tables.items():
            columns = problem.columns(*key)
            norms[key] = np.sqrt((grads[key][:, :columns] ** 2).sum(1))
            weight_norms[key] = np.sqrt((weights[:, :columns] ** 2).sum(1))
        clipped = [key for key in self._tables if key not in problem.exclude]
        of_all = np.sqrt(sum((norms[key][moved[key]] ** 2).sum() for key in clipped))
        factors = {}
        for key in self._tables:
            name, values = problem.rule_of(*key)
            norm, weight, occurrences = norms[key], weight_norms[key], np.maximum(counts[key], 1)
            if problem.scope == "field":
                norm = np.full_like(norm, np.sqrt((norm[moved[key]] ** 2).sum()))
                weight = np.full_like(weight, np.sqrt((weight[moved[key]] ** 2).sum()))
            elif problem.scope == "global":
                norm = np.full_like(norm, of_all)
            limit = LIMITS[name](values, weight, occurrences, problem.columns(*key))
            with np.errstate(divide="ignore", invalid="ignore"):
                factors[key] = np.where(norm > limit, limit / norm, 1.0)
            self._count(key, counts[key] > 0, norm, limit)
        return factors

    def _count(self, key: Key, present: np.ndarray, norm: np.ndarray, limit: Any) -> None:
        name = self._names[key]
        least, most = self.clipped[name]
        is_half = self.problem.collections[key[0]].tables[key[1]].dtype == "float16"
        margin = 0.1 if is_half else 1e-3
        self.rows[name] += int(present.sum())
        surely = present & (norm > limit * (1 + margin))
        perhaps = present & (norm > limit * (1 - margin))
        self.clipped[name] = (least + int(surely.sum()), most + int(perhaps.sum()))

    def _update(self, key: Key, step: int, weights: np.ndarray, grad: np.ndarray, moved: np.ndarray) -> None:
        problem, (first, second) = self.problem, self._moments[key]
        if problem.wide:
            weights, grad, first, second = (
                matrix[:, : problem.columns(*key)] for matrix in (weights, grad, first, second)
            )
        if problem.optimizer == "sgd":
            weights -= problem.lr * grad
        elif problem.is_adam:
            (beta1, beta2), lr = problem.betas, problem.lr * problem.rates[(step - 1) % len(problem.rates)]
            lr *= problem.lr_factor(*key)
            first[moved] = self._rounded(beta1 * first[moved] + (1 - beta1) * grad[moved])
            second[moved] = self._rounded(beta2 * second[moved] + (1 - beta2) * grad[moved] ** 2)
            if problem.adam_epsilon == "keras":
                size = lr * np.sqrt(1 - beta2**step) / (1 - beta1**step)
                change = size * first / (np.sqrt(second) + problem.eps)
            else:
                corrected = np.sqrt(second / (1 - beta2**step))
                change = lr * (first / (1 - beta1**step)) / (corrected + problem.eps)
            weights[moved] -= self._rounded(lr * problem.weight_decay * weights[moved])
            weights[moved] -= self._rounded(change[moved])
        else:
            squares = grad**2
            if problem.optimizer == "rowwise_adagrad":  # one state for the columns of each shard
                table = problem.collections[key[0]].tables[key[1]]
                ends = np.cumsum([columns for _, columns in table.shards]) if table.splits_columns else [table.dim]
                for part in np.split(squares, ends[:-1], axis=1):
                    part[:] = part.mean(1, keepdims=True)
            first[:] = self._rounded(first + squares)
            weights -= self._rounded(problem.lr * grad / (np.sqrt(first) + problem.eps))

    def _update_wide(self, key: Key, weights: np.ndarray, grad: np.ndarray) -> None:
        """FTRL-Proximal of McMahan et al. 2013, Algorithm 1, with lambda_1 = lambda_2 = 0, on the sum of the losses."""
        assert self.problem.wide
        alpha, beta = self.problem.wide
        alpha *= self.problem.lr_factor(*key)
        columns, grad = slice(self.problem.columns(*key), None), grad * self.problem.batch
        scaled_z, n = self._ftrl[key][:, columns], self._moments[key][1][:, columns]
        scaled_sigma = np.sqrt(n + grad**2) - np.sqrt(n)
        scaled_z += alpha * grad - scaled_sigma * weights
        n[:] = self._rounded(n + grad**2)
        moved = (grad != 0).any(1)
        weights[moved] = self._rounded(-scaled_z / (beta + np.sqrt(n)))[moved]
