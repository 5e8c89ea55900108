"""Mutants that `mutants` does not make: another comparison, another number, another sign, the opposite condition."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import Any

from mutants import Mutant

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


def operator_mutants(source: str) -> Iterator[Mutant]:
    """All of them for one module."""
    tree = ast.parse(source)
    for index, node in enumerate(ast.walk(tree)):
        for what, change in _changes(node):
            mutated = copy.deepcopy(tree)
            change(next(each for i, each in enumerate(ast.walk(mutated)) if i == index))
            yield Mutant(getattr(node, "lineno", 0), what, ast.unparse(ast.fix_missing_locations(mutated)))


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], object]]]:
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
