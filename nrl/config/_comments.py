"""The comments at the ends of a class's lines, as help for its fields."""

import ast
import inspect
import io
import textwrap
import tokenize

__all__ = ["comments"]


def comments(cls: type) -> dict[str, str]:
    """The comment behind each field of a class, by the field's name; empty where there is no source to read.

    >>> from nrl.config import _comments
    >>> comments(str)
    {}
    """
    try:
        source = textwrap.dedent(inspect.getsource(cls))
        body = ast.parse(source).body[0]
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # made in a notebook, by `type`, or in C
        return {}
    by_line = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    fields = [node for node in getattr(body, "body", []) if isinstance(node, ast.AnnAssign)]
    return {
        node.target.id: by_line[node.end_lineno]
        for node in fields
        if isinstance(node.target, ast.Name) and node.end_lineno in by_line
    }
