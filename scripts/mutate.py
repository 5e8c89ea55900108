"""Mutation testing of a package: breaks it in one place at a time, and asks whether the tests notice.

    python scripts/mutate.py --count 100 --seed 1 src/longshore/cache tests/cache

Mutants are made from the syntax tree, never by hand, and only in code (no docstrings, no annotations):

    comparison   <  becomes <=, == becomes !=, `is` becomes `is not`, `in` becomes `not in`, ...
    number       n becomes n + 1
    logic        `and` becomes `or`, and back; a condition becomes its opposite
    arithmetic   + becomes -, and back
    statement    an assignment or a call on its own is left out
    boolean      True becomes False, and back

Each runs in a copy of the tree. A mutant that no test notices *survives*: it is printed, to be killed by a test or to
be explained. The exit status is 0 whatever the score.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
TIMEOUT = 300.0


class Mutant(NamedTuple):
    """One change: where, what, and the source with it."""

    path: Path
    line: int
    what: str
    source: str


def mutants(path: Path) -> Iterator[Mutant]:
    """Every mutant of one module."""
    tree = ast.parse(path.read_text())
    for index, node in enumerate(ast.walk(tree)):
        for what, change in changes(node):
            mutated = copy.deepcopy(tree)
            target = next(each for i, each in enumerate(ast.walk(mutated)) if i == index)
            change(target)
            yield Mutant(path, getattr(node, "lineno", 0), what, ast.unparse(ast.fix_missing_locations(mutated)))


def changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], object]]]:
    """What can be changed about a node: a description, and what does it to a copy of the node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        other = COMPARISONS[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} -> {other.__name__}", lambda n: n.ops.__setitem__(0, other())
    elif isinstance(node, ast.BoolOp):
        swapped = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} -> {swapped.__name__}", lambda n: setattr(n, "op", swapped())
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        sign = ARITHMETIC[type(node.op)]
        yield f"{type(node.op).__name__} -> {sign.__name__}", lambda n: setattr(n, "op", sign())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield f"{node.value} -> {node.value + 1}", lambda n: setattr(n, "value", n.value + 1)
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "condition -> its opposite", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    if hasattr(node, "body") and isinstance(node.body, list):
        for i, statement in enumerate(node.body):
            call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            if call or isinstance(statement, ast.AugAssign):
                text = ast.unparse(statement).splitlines()[0][:60]
                yield f"without `{text}`", lambda n, i=i: n.body.__setitem__(i, ast.Pass())


def notices(root: Path, mutant: Mutant, tests: list[str], python: str) -> bool:
    """Whether the tests fail on a copy of the tree with `mutant` in place; too slow counts as failing."""
    target = root / mutant.path
    original = target.read_text()
    target.write_text(mutant.source)
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return True
    finally:
        target.write_text(original)
    return done.returncode != 0


def main() -> None:
    """Make mutants, try them, say which survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("tests", nargs="+", help="what pytest is given")
    parser.add_argument("--count", type=int, default=100, help="mutants to try; all with 0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    given = parser.parse_args()
    every = [mutant for path in sorted(given.package.rglob("*.py")) for mutant in mutants(path)]
    dice = random.Random(given.seed)  # noqa: S311 - a sample that can be drawn again
    chosen = dice.sample(every, min(given.count or len(every), len(every)))
    begun, survivors, tried = time.monotonic(), [], 0
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "tree"
        shutil.copytree(Path.cwd(), root, ignore=shutil.ignore_patterns(".git", "*.pyc", ".venv", "shared"))
        for mutant in chosen:
            if time.monotonic() - begun > given.seconds:
                break
            tried += 1
            if not notices(root, mutant, given.tests, sys.executable):
                survivors.append(mutant)
                print(f"survived: {mutant.path}:{mutant.line}: {mutant.what}", flush=True)
    print(f"{tried - len(survivors)} of {tried} mutants noticed ({len(every)} possible, seed {given.seed})")


if __name__ == "__main__":
    main()
