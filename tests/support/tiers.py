"""Cases of a test that only the third tier runs."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def tiered(cases: Iterable[Any], first: Container[Any]) -> list[Any]:
    """The cases as parameters; those that are not among the first ones belong to the third tier."""
    return [case if case in first else pytest.param(case, marks=pytest.mark.thorough) for case in cases]
