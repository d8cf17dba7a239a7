"""The program of an answer: which of its fenced blocks it is."""

import ast
import re
import warnings
from collections.abc import Collection, Sequence
from typing import NamedTuple

from nrl.envs.inside.assertions import unbound

__all__ = ["acts", "last_block", "parsed", "program_of"]

_FENCE = re.compile(  # also within items of lists and quotations
    r"(?P<quote>(?:[ \t]*>[ \t]?)*)(?P<indent>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)"
    r"(?P<marks>`{3,}|~{3,})(?P<info>[^`]*)"
)
_QUOTE = re.compile(r"(?:[ \t]*>[ \t]?)*")
_LONGEST = 1 << 20  # characters of a program that is parsed
_PYTHON = ("python", "python3", "py", "py3", "{python}", "{.python}")


class _Block(NamedTuple):
    """A fenced block of a text: the language that its fence names, what is in it, and whether it is closed."""

    language: str
    text: str
    closed: bool


def _blocks(text: str) -> list[_Block]:
    found, opening, lines = list[_Block](), None, list[str]()
    for line in text.splitlines(keepends=True):
        fence = _FENCE.fullmatch(line.rstrip())
        if opening is None:
            opening, lines = fence, []
        elif fence is not None and _closes(fence, opening):
            found.append(_block(opening, lines, closed=True))
            opening = None
        else:
            lines.append(line)
    return [*found, _block(opening, lines, closed=False)] if opening is not None else found


def _closes(fence: re.Match[str], opening: re.Match[str]) -> bool:
    """Whether a fence ends a block: it is as long, says nothing, and is indented by less than a block of code more."""
    is_bare = not fence["info"].strip() and not fence["indent"].strip()
    return is_bare and fence["marks"].startswith(opening["marks"]) and len(fence["indent"]) < len(opening["indent"]) + 4


def _block(opening: re.Match[str], lines: Sequence[str], *, closed: bool) -> _Block:
    """Return a block without the indentation and the marks of quotation that its opening fence has."""
    if opening["quote"]:
        lines = [line[_QUOTE.match(line).end() :] for line in lines]  # type: ignore[union-attr]
    indents = [len(line) - len(line.lstrip(" \t")) for line in lines if line.strip()]
    indent = min([len(opening["indent"]), *indents])
    text = "".join(line[indent:] if line.strip() else line.lstrip(" \t") for line in lines)
    return _Block(opening["info"].strip().partition(" ")[0].lower(), text, closed)


def last_block(text: str) -> str | None:
    """The last fenced block of a text; None, if there is none that is closed.

    >>> last_block("First\\n```python\\nx = 1\\n```\\nand then\\n```\\nx = 2\\n```\\n")
    'x = 2\\n'
    """
    return next((block.text for block in reversed(_blocks(text)) if block.closed), None)


def program_of(text: str, names: Collection[str] = (), *, truncated: bool = False) -> str | None:
    """The program of an answer: its last fenced block that is one in Python; None: it has no block.

    A block is a program if its fence says ``python``; or if it names no language and the block is Python that calls,
    defines or imports something, which an output or a shell command is not. Among several programs, those that define a
    name that the tests call come first. A block that is never closed is read if it is Python and no limit cut the
    answer. Where no block is a program, the last closed one is run, and fails. What a program or the tests need and
    the program does not define comes from the other programs: imports, functions, classes and constants.

    Args:
        text: the answer.
        names: that the tests call.
        truncated: whether a limit cut the answer.

    >>> program_of("```python\\nprint(1)\\n```\\nOutput:\\n```\\n1\\n```\\nRun it:\\n```bash\\npython main.py\\n```\\n")
    'print(1)\\n'
    """
    blocks = [block for block in _blocks(text) if block.closed or not truncated]
    read = [(block, parsed(block.text)) for block in blocks]
    programs = [
        (block, tree)
        for block, tree in read
        if (block.language in _PYTHON and (block.closed or tree is not None))
        or (block.language == "" and tree is not None and acts(tree))
    ]
    if not programs:
        return next((block.text for block in reversed(blocks) if block.closed), None)
    named = [index for index, (_, tree) in enumerate(programs) if tree is not None and _defines(tree, names)]
    place = named[-1] if named else len(programs) - 1
    chosen, tree = programs[place]
    # The definitions before it come first, the last of them first, and then those behind it.
    others = [*reversed(range(place)), *range(place + 1, len(programs))]
    sources = [(other, programs[other][0].text, programs[other][1]) for other in others]
    return chosen.text if tree is None else _joined(chosen.text, tree, names, sources)


def _joined(
    text: str, tree: ast.Module, names: Collection[str], others: Sequence[tuple[int, str, ast.Module | None]]
) -> str:
    """Return a program with the statements of other programs in front of it that define what it and the tests need."""
    known, needed = {name for statement in tree.body for name in _binds(statement)}, [*unbound(tree), *names]
    pieces = dict[tuple[int, int], str]()  # by the place of the program, and the line in it
    while needed:
        name = needed.pop()
        for place, source, other in others if name not in known else ():
            statements = [statement for statement in other.body if name in _binds(statement)] if other else []
            if statements:
                known |= _binds(statements[-1])
                needed += unbound(ast.Module([statements[-1]], []))
                pieces[place, statements[-1].lineno] = _source(source, statements[-1])
                break
    return "\n".join([*(pieces[key] for key in sorted(pieces)), text])


def _source(text: str, statement: ast.stmt) -> str:
    first = min([statement.lineno, *(mark.lineno for mark in getattr(statement, "decorator_list", []))])
    return "\n".join(text.splitlines()[first - 1 : statement.end_lineno])


def _binds(statement: ast.stmt) -> set[str]:
    """The names that a definition, an import or an assignment binds; of other statements none."""
    match statement:
        case ast.FunctionDef(name) | ast.ClassDef(name) | ast.AsyncFunctionDef(name):
            return {name}
        case ast.Assign(targets):
            return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        case ast.AnnAssign(ast.Name(name), value=ast.expr()):
            return {name}
        case ast.Import(aliases) | ast.ImportFrom(_, aliases):
            return {alias.asname or alias.name.partition(".")[0] for alias in aliases}
    return set()


def acts(tree: ast.Module) -> bool:
    """Whether a module calls, defines or imports something, as no output does that happens to be Python."""
    kinds = (ast.Call, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Lambda)
    return any(isinstance(node, kinds) for node in ast.walk(tree))


def parsed(source: str) -> ast.Module | None:
    """Parse a program; None: it is empty, too long, or no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in texts of the program
        try:
            return ast.parse(source) if source.strip() and len(source) <= _LONGEST else None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _defines(tree: ast.Module, names: Collection[str]) -> bool:
    for node in tree.body:
        match node:
            case ast.FunctionDef(name) | ast.ClassDef(name) | ast.AsyncFunctionDef(name):
                if name in names or name == "Solution":
                    return bool(names)
            case ast.Assign(targets):
                if any(isinstance(target, ast.Name) and target.id in names for target in targets):
                    return True
            case ast.ImportFrom(names=aliases):
                if any((alias.asname or alias.name) in names for alias in aliases):
                    return True
    return False
