"""Public names and their parameters, which change only with an entry in CHANGELOG.md.

After a wanted change: python tests/test_public_api.py > tests/public_api.txt
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cowrec.data_pipeline
import cowrec.models
import cowrec.sparse_opt
import cowrec.trainer

RECORDED = Path(__file__).parent / "public_api.txt"
TASKS = Path(__file__).parents[1] / "docs" / "site" / "hooks.py"
PACKAGES = (cowrec.sparse_opt, cowrec.models, cowrec.data_pipeline, cowrec.trainer)
MARKS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def parameters(value: Any) -> Iterator[str]:
    """Names of the parameters; ``=`` marks those with a default, ``*`` comes before keyword-only ones."""
    keyword_only = False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            yield "*"
        yield (
            MARKS.get(parameter.kind, "")
            + parameter.name
            + ("" if parameter.default is inspect.Parameter.empty else "=")
        )


def public_api() -> Iterator[str]:
    """A line for each public name, with the methods of classes below it."""
    for package in PACKAGES:
        for name in package.__all__:
            value = getattr(package, name)
            called = f"({', '.join(parameters(value))})" if inspect.isfunction(value) or inspect.isclass(value) else ""
            yield f"{package.__name__}.{name}{called}"
            if inspect.isclass(value):
                own = {key: member for key, member in vars(value).items() if not key.startswith("_")}
                for key, member in sorted(own.items()):
                    plain = member.__func__ if isinstance(member, staticmethod | classmethod) else member
                    if inspect.isfunction(plain):
                        yield f"    {key}({', '.join(parameters(plain))})"
                    elif isinstance(plain, property):
                        yield f"    {key}"


def test_public_names_and_parameters_are_the_recorded_ones() -> None:
    remedy = "if this is wanted, run: python tests/test_public_api.py > tests/public_api.txt"
    assert list(public_api()) == RECORDED.read_text(encoding="utf-8").splitlines(), remedy


def test_the_site_lists_each_public_name_once() -> None:
    statements = ast.parse(TASKS.read_text(encoding="utf-8")).body
    assigned = [statement for statement in statements if isinstance(statement, ast.Assign)]
    tasks = next(
        ast.literal_eval(statement.value) for statement in assigned if ast.unparse(statement.targets[0]) == "TASKS"
    )
    for package in PACKAGES:
        listed = " ".join(tasks[package.__name__.removeprefix("cowrec.")].values()).split()
        public = [name for name in package.__all__ if not name.startswith("_")]
        assert sorted(listed) == sorted(public), "mend TASKS in docs/site/hooks.py"


if __name__ == "__main__":
    print("\n".join(public_api()))
