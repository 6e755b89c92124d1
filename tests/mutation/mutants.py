"""Mutants: small changes to the functions of a module, each of which a good suite notices.

A mutant changes one operator, number or statement inside a function, or the number of a module's constant. Functions
are replaced in place by giving them the mutant's code, so that whoever imported them has it too, without a reload.
"""

import ast
import copy
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    """One change.

    Attributes:
        place: "module.function" that it is in, or the constant.
        text: the source's line.
        change: the statement or expression before and after, one line each.
    """

    module: str
    place: str
    line: int
    text: str
    change: str
    tree: ast.Module
    part: ast.AST
    becomes: ast.AST

    @property
    def name(self) -> str:
        """What it is called in accepted.toml: it stays while other lines come and go."""
        return f"{self.place}: {self.change} in {self.text}"

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.name}"


def mutants_of(module: str, source: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    tree = ast.parse(source)
    found, lines = list[Mutant](), source.splitlines()
    for place, node in _functions(tree):
        for part in _mutable(node):
            found += [_mutant(module, place, lines, tree, part, *change) for change in _changes(part)]
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            for part in ast.walk(statement.value):
                if isinstance(part, ast.Constant) and type(part.value) in (int, float):
                    place = statement.targets[0].id
                    found += [_mutant(module, place, lines, tree, part, *change) for change in _changes(part)]
    return sorted(found, key=lambda mutant: mutant.line)


def apply(mutant: Mutant, module: ModuleType) -> None:
    """Make the imported module the mutant."""
    changed: dict[str, Any] = {"__name__": module.__name__, "__file__": module.__file__}
    tree = _Replaced(mutant.part, mutant.becomes).visit(copy.copy(mutant.tree))
    exec(compile(ast.fix_missing_locations(tree), str(module.__file__), "exec"), changed)
    codes = dict(_code_of(changed))
    for name, function in _code_of(vars(module)):
        function.__code__ = codes[name].__code__
    for name, value in changed.items():
        if isinstance(value, int | float | np.generic) and not name.startswith("__"):
            setattr(module, name, value)


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name not in ("__init__", "__repr__"):
                    yield f"{node.name}.{inner.name}", inner


def _code_of(names: dict[str, Any]) -> Iterator[tuple[str, FunctionType]]:
    """Functions and methods defined in a module, by qualified name."""
    for name, value in names.items():
        if isinstance(value, FunctionType) and value.__module__ == names["__name__"]:
            yield name, value
        elif isinstance(value, type) and value.__module__ == names["__name__"]:
            for inner, member in vars(value).items():
                function = getattr(member, "__func__", getattr(member, "fget", member))
                if isinstance(function, FunctionType) and function.__qualname__ == f"{name}.{inner}":
                    yield f"{name}.{inner}", function


def _mutable(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Parts of a function's body: no annotations, docstrings, `strict` of zip or what errors say."""
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop(0)
        is_guard = isinstance(node, ast.keyword) and node.arg == "strict"
        if isinstance(node, ast.Raise | ast.JoinedStr) or is_guard or _is_text(node):
            continue
        yield node
        if isinstance(node, ast.AnnAssign):
            left += [] if node.value is None else [node.value]
        elif isinstance(node, ast.FunctionDef):
            left += node.body
        else:
            left += list(ast.iter_child_nodes(node))


def _is_text(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else node
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _changes(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """What a node becomes in each of its mutants, and how to call that."""
    match node:
        case ast.Compare() | ast.BinOp() | ast.AugAssign():
            op = node.ops[0] if isinstance(node, ast.Compare) else node.op
            if type(op) in _SWAPPED:
                yield _swapped(node, _SWAPPED[type(op)]())
            if isinstance(node, ast.AugAssign):
                yield ast.Pass(), "pass"
        case ast.BoolOp():
            yield _swapped(node, _SWAPPED[type(node.op)]())
            for i in range(len(node.values)):
                rest = [copy.deepcopy(v) for n, v in enumerate(node.values) if n != i]
                less = rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
                yield less, ast.unparse(less)
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand, ast.unparse(node.operand)
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value), str(not node.value)
        case ast.Constant(value=int() | float() as number):
            yield ast.Constant(number + 1), str(number + 1)
        case ast.Name() if node.id in _NAMES:
            yield ast.Name(_NAMES[node.id], node.ctx), _NAMES[node.id]
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass(), "pass"
        case ast.Break() | ast.Continue():
            yield ast.Pass(), "pass"


def _swapped(node: Any, op: Any) -> tuple[ast.AST, str]:
    changed = copy.deepcopy(node)
    if isinstance(node, ast.Compare):
        changed.ops[0] = op
    else:
        changed.op = op
    return changed, ast.unparse(changed)


def _mutant(
    module: str, place: str, lines: list[str], tree: ast.Module, part: Any, becomes: ast.AST, after: str
) -> Mutant:
    first = ast.unparse(part).split("\n")[0]
    text = lines[part.lineno - 1].strip()
    return Mutant(module, place, part.lineno, text, f"{first} -> {after.split(chr(10))[0]}", tree, part, becomes)


class _Replaced(ast.NodeTransformer):
    """A copy of the tree in which one node is another; the rest is shared."""

    def __init__(self, node: ast.AST, by: ast.AST) -> None:
        self._node = node
        self._by = by

    def visit(self, node: ast.AST) -> Any:
        """Copy on the way down, since NodeTransformer changes what it visits."""
        if node is self._node:
            return ast.copy_location(self._by, node)
        return self.generic_visit(copy.copy(node))

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """As in NodeTransformer, with lists of the node's own."""
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                setattr(node, name, [self.visit(v) if isinstance(v, ast.AST) else v for v in value])
            elif isinstance(value, ast.AST):
                setattr(node, name, self.visit(value))
        return node
