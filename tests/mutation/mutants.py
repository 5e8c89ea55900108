"""Every way to weaken a module by one change, found in its syntax tree.

A mutant is the module with one statement gone, one condition never met, one operand dropped, one gate open, ...
Nothing here names a line of the product: what is added there is mutated too.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Mutant(NamedTuple):
    """`source` is the whole module."""

    line: int
    what: str
    source: str


class _Change(NamedTuple):
    """`apply` changes the node of a copy of the tree that stands where `node` does."""

    node: ast.AST
    what: str
    apply: Callable[[ast.AST], ast.AST | None]


def mutants(source: str) -> Iterator[Mutant]:
    """All mutants of a module."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    types = {part for node in nodes for part in _type_parts(node)}
    for index, node in enumerate(nodes):
        if node in types:
            continue
        for change in _changes(node):
            other = copy.deepcopy(tree)
            target = list(ast.walk(other))[index]
            mutated = _Replace(target, change.apply(target)).visit(other)
            line = getattr(node, "lineno", 0)
            shown = ast.unparse(change.node).splitlines()[0]
            yield Mutant(line, f"{change.what}: {shown}", ast.unparse(ast.fix_missing_locations(mutated)))


def _type_parts(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of the annotations of `node`, which no test can notice."""
    for field in ("annotation", "returns"):
        if (annotation := getattr(node, field, None)) is not None:
            yield from ast.walk(annotation)


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, replacement: ast.AST | None) -> None:
        self.target, self.replacement = target, replacement

    def visit(self, node: ast.AST) -> ast.AST | None:
        return self.replacement if node is self.target else self.generic_visit(node)


def _changes(node: ast.AST) -> Iterator[_Change]:  # noqa: PLR0912 - one case for each kind of node
    match node:
        case ast.Expr(value=ast.Call() as call) if not _is_log(call):
            yield _Change(node, "call removed", lambda _: ast.Pass())
        case ast.Expr(value=ast.Yield(value=ast.Call(func=ast.Name(id="WaitCondition")))):
            yield _Change(node, "gate opened", _open)
        case ast.Call(func=ast.Attribute(attr="wait_for")):
            yield _Change(node, "wait taken for met", lambda _: ast.Constant(True))
        case ast.AugAssign():
            yield _Change(node, "change removed", lambda _: ast.Pass())
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield _Change(node, "record removed", lambda _: ast.Pass())
        case ast.If() if not _is_declaration(node):
            yield _Change(node.test, "condition never met", _never)
        case ast.BoolOp():
            for index in range(len(node.values)):
                yield _Change(node.values[index], "operand dropped", _without_value(index))
        case ast.FunctionDef(returns=ast.Name(id="bool")) if _returns(node):
            yield _Change(_returns(node)[-1], f"{node.name} always true", _always_true)
        case ast.Call(func=ast.Name(id="Access"), args=[_, _, writes]) if ast.unparse(writes) != "False":
            yield _Change(node, "write taken for a read", _reads_only)
        case ast.Call(args=[_, *rest]):
            for index, argument in enumerate(rest, 1):
                if isinstance(argument, ast.Attribute) and argument.attr in {"wait_events", "after"}:
                    yield _Change(node, "nothing waited for", _no_events(index))
        case ast.Dict(keys=[ast.Tuple(), *_]):
            for index in range(len(node.keys)):
                yield _Change(node.keys[index] or node, "edge dropped", _without_key(index))
        case ast.List(elts=[_, *_]) if isinstance(node.ctx, ast.Load):
            for index in range(len(node.elts)):
                yield _Change(node.elts[index], "element dropped", _without_element(index))


def _is_log(call: ast.Call) -> bool:
    return (
        isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name) and call.func.value.id == "_log"
    )


def _is_declaration(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _returns(node: ast.FunctionDef) -> list[ast.Return]:
    return [child for child in ast.walk(node) if isinstance(child, ast.Return) and child.value is not None]


def _open(node: ast.AST) -> ast.AST:
    gate = node.value.value  # type: ignore[attr-defined]
    gate.args[0] = ast.parse("lambda: True", mode="eval").body
    return node


def _never(node: ast.AST) -> ast.AST:
    node.test = ast.Constant(False)  # type: ignore[attr-defined]
    return node


def _always_true(node: ast.AST) -> ast.AST:
    _returns(node)[-1].value = ast.Constant(True)  # type: ignore[arg-type]
    return node


def _reads_only(node: ast.AST) -> ast.AST:
    node.args[2] = ast.Constant(False)  # type: ignore[attr-defined]
    return node


def _without_value(index: int) -> Callable[[ast.AST], ast.AST]:
    def apply(node: ast.AST) -> ast.AST:
        values = node.values  # type: ignore[attr-defined]
        del values[index]
        return values[0] if len(values) == 1 else node

    return apply


def _without_element(index: int) -> Callable[[ast.AST], ast.AST]:
    def apply(node: ast.AST) -> ast.AST:
        del node.elts[index]  # type: ignore[attr-defined]
        return node

    return apply


def _without_key(index: int) -> Callable[[ast.AST], ast.AST]:
    def apply(node: ast.AST) -> ast.AST:
        del node.keys[index]  # type: ignore[attr-defined]
        del node.values[index]  # type: ignore[attr-defined]
        return node

    return apply


def _no_events(index: int) -> Callable[[ast.AST], ast.AST]:
    def apply(node: ast.AST) -> ast.AST:
        node.args[index] = ast.Tuple([], ast.Load())  # type: ignore[attr-defined]
        return node

    return apply
