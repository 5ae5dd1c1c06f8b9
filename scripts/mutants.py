"""Shows what the tests protect: draws small faults by a seed, plants them one at a time, and runs the tests.

    python scripts/mutants.py draw --seed 25 --count 120 --output mutants.jsonl
    python scripts/mutants.py run mutants.jsonl --count 40 --output caught.jsonl [--coverage build/coverage/data]

A mutant is one changed line of a function: a comparison, a sign, a factor, a constant or a condition. It names the
function and the line's text instead of a place, so it can be planted again after code has moved; mutants whose line is
gone are passed over. ``run`` changes files of the checkout while it works and puts them back; run it in a clone.
"""

import argparse
import ast
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("sparse_opt", "models", "data_pipeline", "trainer")
MOST_SECONDS = 900.0
"""Time after which a mutant counts as caught: a changed condition may keep a loop from ending."""
SWAPS: dict[type, str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*",
    ast.FloorDiv: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The functions of a module by qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node


def changed_text(node: ast.AST, source: str) -> str | None:
    """The text that a mutant puts in place of ``node``, or None where it changes nothing here."""

    def text(child: ast.AST) -> str:
        return ast.get_source_segment(source, child) or ""

    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in SWAPS:
            return f"{text(left)} {SWAPS[type(op)]} {text(right)}"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPS:
            return f"({text(left)}) {SWAPS[type(op)]} ({text(right)})"
        case ast.BoolOp(op=op, values=values):
            return f" {SWAPS[type(op)]} ".join(f"({text(value)})" for value in values)
        case ast.Constant(value=bool(value)):
            return str(not value)
        case ast.Constant(value=int(value)):
            return str(value + 1)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"bool({text(operand)})"
    return None


def candidates(root: Path) -> list[dict[str, str]]:
    """Every mutant of the packages, in a fixed order."""
    found = []
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            source = file.read_text(encoding="utf-8")
            lines = source.splitlines()
            for name, function in functions(ast.parse(source)):
                body = [node for part in getattr(function, "body", []) for node in ast.walk(part)]
                for node in sorted(body, key=lambda n: (getattr(n, "lineno", 0), getattr(n, "col_offset", 0))):
                    new = changed_text(node, source)
                    if new is None or node.lineno != node.end_lineno:  # type: ignore[attr-defined]
                        continue
                    raw = lines[node.lineno - 1].encode()  # type: ignore[attr-defined]
                    start, end = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
                    after = (raw[:start] + new.encode() + raw[end:]).decode()
                    before = lines[node.lineno - 1]  # type: ignore[attr-defined]
                    found.append(
                        {"package": package, "function": name, "before": before.strip(), "after": after.strip()}
                    )
    return found


def place_of(mutant: dict[str, str], root: Path) -> tuple[Path, int] | None:
    """File and line (from 1) at which a mutant can be planted; None where its line is gone."""
    for file in sorted((root / mutant["package"]).rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        if mutant["before"] not in source:
            continue
        lines = source.splitlines()
        for name, function in functions(ast.parse(source)):
            if name.rpartition(".")[2] == mutant["function"].rpartition(".")[2]:
                for number in range(function.lineno, (function.end_lineno or 0) + 1):  # type: ignore[attr-defined]
                    if lines[number - 1].strip() == mutant["before"]:
                        return file, number
    return None


def tests_of(file: Path, line: int, coverage: Path | None) -> list[str]:
    """Tests that run a line, by the contexts of a coverage file; else the tests beside the file, then all."""
    if coverage is not None:
        from coverage import CoverageData

        data = CoverageData(str(coverage))
        data.read()
        contexts = data.contexts_by_lineno(str(file)).get(line, [])
        found = sorted({context.partition("|")[0] for context in contexts} - {""})
        if found:
            return random.Random(0).sample(found, min(len(found), 60))
    folder = ROOT / "tests" / file.relative_to(ROOT).parent
    while not any(folder.glob("test_*.py")):
        folder = folder.parent
    return [str(folder.relative_to(ROOT)), f"tests/{file.relative_to(ROOT).parts[0]}"]


def caught_by(tests: list[str], arguments: list[str]) -> str | None:
    """The first test that fails, "timeout" where the tests do not end, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments, *dict.fromkeys(tests)]
    try:
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return "timeout"
    if ran.returncode in (0, 5):
        return None
    named = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return named[0] if named else ran.stdout[-500:] + ran.stderr[-500:]


def run(options: argparse.Namespace) -> None:
    """Plants the first ``count`` mutants that fit and writes which of them a test catches."""
    mutants: list[dict[str, Any]] = [json.loads(line) for line in options.mutants.read_text().splitlines()]
    planted = 0
    for mutant in mutants:
        place = place_of(mutant, ROOT)
        if place is None or planted == options.count:
            continue
        planted += 1
        file, number = place
        source = file.read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        indent = lines[number - 1][: len(lines[number - 1]) - len(lines[number - 1].lstrip())]
        lines[number - 1] = f"{indent}{mutant['after']}\n"
        tests = tests_of(file, number, options.coverage)
        try:
            file.write_text("".join(lines), encoding="utf-8")
            test = caught_by(tests, options.pytest)
        finally:
            file.write_text(source, encoding="utf-8")
        row = mutant | {"file": str(file.relative_to(ROOT)), "caught_by": test}
        with options.output.open("a") as output:
            output.write(json.dumps(row) + "\n")
        print(f"{planted:3} {'caught' if test else 'MISSED'} {row['file']}: {mutant['after']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    draw = commands.add_parser("draw", help="write mutants, drawn by a seed")
    draw.add_argument("--seed", type=int, default=25)
    draw.add_argument("--count", type=int, default=120)
    draw.add_argument("--output", type=Path, required=True)
    runs = commands.add_parser("run", help="plant them one at a time and run the tests")
    runs.add_argument("mutants", type=Path)
    runs.add_argument("--count", type=int, default=40)
    runs.add_argument("--coverage", type=Path, help="coverage data with contexts (--cov-context=test)")
    runs.add_argument("--pytest", nargs="*", default=[], help="further arguments of pytest")
    runs.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "run":
        run(options)
        return
    drawn = random.Random(options.seed).sample(candidates(ROOT), options.count)
    options.output.write_text("".join(json.dumps(mutant) + "\n" for mutant in drawn))


if __name__ == "__main__":
    main()
