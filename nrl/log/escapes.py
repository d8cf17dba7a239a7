"""Control characters in text of others: models, environments, users and servers."""

import re

__all__ = ["printable"]

# All but tab and line feed: escape sequences move the cursor, hide text, or set the title and the clipboard of a
# terminal, and marks of direction show text in another order than it has
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    r"""Return a text that a terminal shows as it is: control characters become visible, such as ``\x1b``.

    Line feeds and tabs stay, and line ends of Windows become line feeds.

    Args:
        text: any.

    >>> printable("\x1b[2Jdone\r\n")
    '\\x1b[2Jdone\n'
    """
    if text.isprintable():
        return text
    return _CONTROL.sub(_visible, text.replace("\r\n", "\n"))


def _visible(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
