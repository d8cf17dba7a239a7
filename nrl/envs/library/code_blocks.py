"""The program of an answer: which of its fenced blocks it is."""

import ast
import re
import warnings
from collections.abc import Collection
from typing import NamedTuple

__all__ = ["acts", "last_block", "parsed", "program_of"]

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})([^`]*)")
_LONGEST = 1 << 20  # characters of a program that is parsed
_PYTHON = ("python", "python3", "py", "py3", "{python}", "{.python}")


class _Block(NamedTuple):
    """A fenced block of a text: the language that its fence names, what is in it, and whether it is closed."""

    language: str
    text: str
    closed: bool


def _blocks(text: str) -> list[_Block]:
    found, opened, language, block = list[_Block](), "", "", list[str]()
    for line in text.splitlines(keepends=True):
        fence = _FENCE.fullmatch(line.rstrip())
        if not opened:
            if fence:
                opened, language, block = fence[1], fence[2].strip().partition(" ")[0].lower(), []
        elif fence and fence[1].startswith(opened) and not fence[2].strip():
            found.append(_Block(language, "".join(block), True))
            opened = ""
        else:
            block.append(line)
    return [*found, _Block(language, "".join(block), False)] if opened else found


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
    answer. Where no block is a program, the last closed one is run, and fails.

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
    named = [block for block, tree in programs if tree is not None and _defines(tree, names)]
    chosen = named or [block for block, _ in programs] or [block for block in blocks if block.closed]
    return chosen[-1].text if chosen else None


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
