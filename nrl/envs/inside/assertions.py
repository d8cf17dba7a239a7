"""What a test asserts: the names of the program in it, and equality that forgives what does not matter."""

import ast
import builtins
from typing import Any

__all__ = ["equal", "forgiving", "independent_lines", "plain_classes", "unbound"]


def unbound(tree: Any) -> set[str]:
    """The names that a test reads and neither defines nor finds in Python."""
    read, bound = set(), {*dir(builtins), "__file__", "__name__"}
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Load()):
                read.add(name)
            case (
                ast.Name(name) | ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name) | ast.arg(name)
            ):
                bound.add(name)
            case ast.alias(name, asname):
                bound.add(asname or name.split(".")[0])
            case ast.ExceptHandler(_, str(name)) | ast.MatchAs(_, str(name)) | ast.MatchStar(str(name)):
                bound.add(name)
    return read - bound


def plain_classes(tree: Any) -> set[str]:
    """Return the names of classes of a test that its program may use: of such as a tree's nodes, not of tests.

    They derive from nothing, and consist of methods and annotated fields, none of which asserts anything.
    """
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("Test")
        and all(isinstance(base, ast.Name) and base.id == "object" for base in node.bases)
        and all(map(_is_part_of_plain_class, node.body))
    }


def _is_part_of_plain_class(node: Any) -> bool:
    if isinstance(node, ast.FunctionDef):
        return not node.name.startswith("test") and not any(isinstance(part, ast.Assert) for part in ast.walk(node))
    if isinstance(node, ast.AnnAssign):
        return node.value is None or isinstance(node.value, ast.Constant | ast.Call)
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def equal(found: Any, expected: Any) -> Any:
    """Whether a test's ``found == expected`` holds; floats have nine digits, and a tuple may stand for a list.

    NaN is equal to NaN: a test that expects it means it.
    """
    result = found == expected
    if result is not False:
        return result
    if isinstance(expected, list) and isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if isinstance(expected, tuple) and isinstance(found, tuple):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if isinstance(expected, dict) and isinstance(found, dict):
        return found.keys() == expected.keys() and all(equal(found[key], expected[key]) for key in expected)
    numbers = isinstance(found, int | float) and isinstance(expected, int | float)
    if numbers and found != found and expected != expected:
        return True
    if numbers and float in (type(found), type(expected)):
        try:
            return abs(found - expected) <= 1e-9 * max(abs(found), abs(expected))
        except OverflowError:
            return False
    return False


def forgiving(tree: Any) -> Any:
    """The test, with `equal` in place of ``==`` in what it asserts; not within a ``not``."""
    literals = (ast.List, ast.Tuple, ast.Dict, ast.Constant)

    class Equalities(ast.NodeTransformer):
        def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
            return node if isinstance(node.op, ast.Not) else self.generic_visit(node)

        def visit_Compare(self, node: ast.Compare) -> ast.AST:
            self.generic_visit(node)
            if len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
                return node
            left, right = node.left, node.comparators[0]
            sides = [right, left] if isinstance(left, literals) and not isinstance(right, literals) else [left, right]
            return ast.copy_location(ast.Call(ast.Name("__equal__", ast.Load()), sides, []), node)

    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            node.test = Equalities().visit(node.test)
    return ast.fix_missing_locations(tree)


def independent_lines(tree: Any) -> set[int]:
    """Return the lines of statements that read only names of Python, whose errors are not the program's doing."""
    simple = (ast.Expr, ast.Raise)
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, simple) and all(name in dir(builtins) for name in _names_read(node))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _names_read(tree: Any) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
