"""Random models, sharding plans, rules and optimizers equal float64 loops, or are refused when they should be."""

import random
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded

from random_problems.drawing import Problem, problems, refusals
from random_problems.in_loops import solve
from random_problems.training import Trained, trainers

EXAMPLES = 60
"""Without --fuzz, always the same ones."""


@pytest.mark.parametrize("world", [1, 2])
def test_random_problems_equal_plain_loops(world: int, pytestconfig: pytest.Config) -> None:
    """A failing problem is shown after it has been simplified; it can be passed to :func:`check` as it is."""
    number = pytestconfig.getoption("--fuzz")
    given_seed = pytestconfig.getoption("--hypothesis-seed", None)
    chosen = random.SystemRandom().randrange(2**32) if given_seed is None else int(given_seed)
    with trainers(world) as processes:

        @settings(
            max_examples=number or EXAMPLES,
            derandomize=number is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(problems(world))
        def check(problem: Problem) -> None:
            assert_solved(problem, processes.train(problem))

        if number:
            print(f"to repeat: --fuzz {number} --hypothesis-seed={chosen}")
            check = seeded(chosen)(check)
        check()


def assert_solved(problem: Problem, outcomes: list[Trained]) -> None:
    expected = refusals(problem)
    for outcome in outcomes:
        if outcome.refusal:
            assert any(re.search(each, outcome.refusal) for each in expected), f"refused: {outcome.refusal}"
        else:
            assert not expected, f"not refused: {expected}"
    if expected:
        return
    solution = solve(problem)
    state = outcomes[0].state
    assert state.keys() == solution.state.keys()
    for key, value in solution.state.items():
        error = (np.abs(state[key] - value) / solution.tolerance[key]).max()
        assert error <= 1, f"{key} differs by {error:.3g} times the tolerance"
    for c, t, _ in problem.tables():
        of_ranks = [each.stats[name] for each in outcomes if (name := problem.name(c, t)) in each.stats]
        rows, clipped = (sum(each) for each in zip(*of_ranks, strict=True))
        least, most = solution.clipped[f"c{c}.t{t}"]
        assert rows == solution.rows[f"c{c}.t{t}"], f"{rows} rows of c{c}.t{t}, not {solution.rows[f'c{c}.t{t}']}"
        assert least <= round(clipped) <= most, f"{clipped} clipped rows of c{c}.t{t}, not {least} to {most}"
