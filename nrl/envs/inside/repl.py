"""An interpreter that keeps what it was told: runs pieces of code, and prints what they print."""

import ast
import linecache
import os
import sys
import traceback
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Read headers, ``mark length``, each with as many bytes of code behind it; write the mark after its output."""
    lines, out = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # what it reads is not for the code
    os.dup2(1, 2)  # one order of all output
    namespace: dict[str, Any] = {"__name__": "__main__"}
    while header := lines.readline():
        mark, length = header.split()
        _run(lines.read(int(length)).decode(), namespace)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # the code may have closed it
                continue
        os.write(out, mark)


def _run(code: str, namespace: dict[str, Any]) -> None:
    linecache.cache["<code>"] = (len(code), None, code.splitlines(keepends=True), "<code>")  # for tracebacks
    sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115  # exit() closes it
    try:
        tree = ast.parse(code, "<code>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<code>", "eval"), namespace)
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
    except BaseException as error:
        inner = error.__traceback__.tb_next if error.__traceback__ else None  # without this function
        try:
            traceback.print_exception(type(error), error, inner)
        except Exception:  # it has an unprintable text, or there is no output left
            return


if __name__ == "__main__":
    main()
