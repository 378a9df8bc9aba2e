"""Mutants of one source file: cosmic-ray's operators, a few of our own, and what is left alone as no test could tell.

A mutant is named by its place in the list of a module, so that a seed draws the same sample as long as the file stays.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol

parse: Callable[[str], Any] = import_module("parso").parse  # comes with cosmic-ray, has no types

Position = tuple[int, int]
Span = tuple[Position, Position]

# One replacement that keeps the types and one that moves a boundary; the rest of cosmic-ray's table (`+` to `<<`)
# mostly raises TypeError, which any test notices: such mutants would flatter the score.
BINARY = (
    ("Add", "Sub"), ("Sub", "Add"), ("Mul", "FloorDiv"), ("Mul", "Add"), ("Div", "Mul"), ("FloorDiv", "Mul"),
    ("Mod", "FloorDiv"), ("Pow", "Mul"), ("BitOr", "BitAnd"), ("BitAnd", "BitOr"), ("LShift", "RShift"),
)  # fmt: skip
COMPARISON = (
    ("Lt", "LtE"), ("Lt", "GtE"), ("LtE", "Lt"), ("LtE", "Gt"), ("Gt", "GtE"), ("Gt", "LtE"), ("GtE", "Gt"),
    ("GtE", "Lt"), ("Eq", "NotEq"), ("NotEq", "Eq"), ("Is", "IsNot"), ("IsNot", "Is"),
)  # fmt: skip
UNARY = ("ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_USub")
PLAIN = (
    "AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer", "RemoveDecorator",
    "ZeroIterationForLoop",
)  # fmt: skip
CACHES = {"lru_cache", "cache", "dataclass", "overload", "property", "final", "override"}


class Operator(Protocol):
    """The interface of cosmic-ray's operators."""

    def mutation_positions(self, node: Any) -> Iterable[Span]:
        """A span for each way to mutate the node."""

    def mutate(self, node: Any, index: int) -> Any:
        """The node mutated in the way of that index, None to drop it."""


class SwapMembership:
    """`in` and `not in`, which cosmic-ray leaves alone."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        if node.type == "comparison":
            yield from ((child.start_pos, child.end_pos) for child in self._membership(node))

    def mutate(self, node: Any, index: int) -> Any:
        child = self._membership(node)[index]
        child_at = node.children.index(child)
        text = " in" if child.get_code().split() == ["not", "in"] else " not in"
        node.children[child_at] = parse(text)
        return node

    @staticmethod
    def _membership(node: Any) -> list[Any]:
        return [child for child in node.children[1::2] if child.get_code().split()[-1] == "in"]


class NegateFilter:
    """The condition of a comprehension."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        if node.type in ("comp_if", "sync_comp_for") and node.children[0].value == "if":
            yield node.children[1].start_pos, node.children[1].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.children[1] = parse(f" not ({node.children[1].get_code().strip()})")
        return node


class DropKeyword:
    """A keyword argument left to its default: the lost update of code that builds its states with `replace`."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        if node.type == "argument" and getattr(node.children[1], "value", "") == "=":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        following = node.get_next_sibling()
        if following is not None and getattr(following, "value", "") == ",":
            following.value = ""
        return None


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file: the node's number in the walk, the operator and which of its ways."""

    operator: str
    node: int
    way: int
    line: int


@lru_cache(maxsize=1)
def operators() -> dict[str, tuple[Operator, frozenset[str]]]:
    """Operators by name, with the node types they look at (empty: any)."""
    provider = import_module("cosmic_ray.operators.provider").OperatorProvider()
    known: dict[str, tuple[Operator, frozenset[str]]] = {}
    for kind, pairs, types in (("Binary", BINARY, "operator"), ("Comparison", COMPARISON, "comparison")):
        for before, after in pairs:
            name = f"Replace{kind}Operator_{before}_{after}"
            known[name] = (provider[name](), frozenset((types,)))
    known |= {name: (provider[name](), frozenset(("factor", "not_test"))) for name in UNARY}
    known |= {name: (provider[name](), frozenset()) for name in PLAIN}
    own: Sequence[Operator] = (SwapMembership(), NegateFilter(), DropKeyword())
    return known | {type(operator).__name__: (operator, frozenset()) for operator in own}


def _walk(node: Any) -> Iterator[Any]:
    yield node
    for child in getattr(node, "children", ()):
        yield from _walk(child)


def _span(node: ast.expr | ast.stmt) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0)


def _annotations(node: ast.AST) -> Iterator[ast.expr | ast.stmt | None]:
    match node:
        case ast.arg() | ast.AnnAssign():
            yield node.annotation
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield node.returns
            yield from (each for each in node.decorator_list if _name(each) in CACHES)
        case ast.ClassDef():
            yield from (each for each in node.decorator_list if _name(each) in CACHES)
        case ast.If() if _name(node.test) == "TYPE_CHECKING":
            yield node
        case ast.Raise():
            yield node.exc  # the words of an error, not the fact of it


def _name(node: ast.expr) -> str:
    match node:
        case ast.Call():
            return _name(node.func)
        case ast.Attribute():
            return node.attr
        case ast.Name():
            return node.id
        case _:
            return ""


def untouched(source: str) -> list[Span]:
    """Spans in which a change is equivalent by construction: annotations, caches, data class flags, words of errors."""
    nodes = (each for node in ast.walk(ast.parse(source)) for each in _annotations(node))
    return [_span(each) for each in nodes if each is not None]


def _inside(span: Span, spans: Sequence[Span]) -> bool:
    return any(start <= span[0] and span[1] <= end for start, end in spans)


def _decorates_untouched(operator: str, node: Any) -> bool:
    return operator == "RemoveDecorator" and any(f"@{each}" in node.get_code() for each in CACHES)


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a file that a test could notice."""
    left_alone = untouched(source)
    return [
        Mutant(name, number, way, span[0][0])
        for number, node in enumerate(_walk(parse(source)))
        for name, (operator, types) in operators().items()
        if (not types or node.type in types) and not _decorates_untouched(name, node)
        for way, span in enumerate(operator.mutation_positions(node))
        if not _inside(span, left_alone)
    ]


def mutated(source: str, mutant: Mutant) -> str:
    """The file with one change."""
    tree = parse(source)
    node = next(each for number, each in enumerate(_walk(tree)) if number == mutant.node)
    changed = operators()[mutant.operator][0].mutate(node, mutant.way)
    if changed is not node:
        siblings = node.parent.children
        at = siblings.index(node)
        siblings[at : at + 1] = [] if changed is None else [changed]
    return str(tree.get_code())


def difference(source: str, after: str) -> str:
    """The changed lines, before and after."""
    before_lines, after_lines = source.splitlines(), after.splitlines()
    changed = [
        (old.strip(), new.strip()) for old, new in zip(before_lines, after_lines, strict=False) if old != new
    ] or [("", "")]
    return f"{changed[0][0]}  ->  {changed[0][1]}"
