"""Environment variables and home folders in the texts of a configuration."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nrl.config._yaml import Problem, Problems, Word

__all__ = ["ENVIRONMENT", "expand_home", "expand_variables", "find_references", "variable_value"]

ENVIRONMENT = "oc.env:"
"""What begins the name of an environment variable in a reference, as in OmegaConf.

>>> ENVIRONMENT
'oc.env:'
"""
_HOME = re.compile(r"~[\w.-]*/")


def expand_variables(value: Any) -> Any:
    """Put environment variables into texts; anything else stays as it is.

    ``${oc.env:NAME}`` and ``${oc.env:NAME,default}`` are environment variables; a default may have such ones, too. A
    value that is nothing else has no type until its field gives it one, like text on the command line.

    Args:
        value: mappings, lists and scalars.

    Raises:
        Problems: an environment variable is not set and has no default.

    >>> import os
    >>> os.environ["RUNS"] = "/data/runs"
    >>> expand_variables({"out": "${oc.env:RUNS}/qwen", "steps": "${oc.env:MANY_STEPS,20}", "note": "$5"})
    {'out': '/data/runs/qwen', 'steps': '20', 'note': '$5'}
    """
    if isinstance(value, Mapping):
        items = {key: _expand_item(key, item) for key, item in value.items()}
    elif isinstance(value, list):
        items = {index: _expand_item(index, item) for index, item in enumerate(value)}
    else:
        return _expand_text(value) if isinstance(value, str) else value
    if problems := [problem for _, problems_of_item in items.values() for problem in problems_of_item]:
        raise Problems(*problems)
    values = {key: item for key, (item, _) in items.items()}
    return values if isinstance(value, Mapping) else list(values.values())


def _expand_item(key: Any, value: Any) -> tuple[Any, list[Problem]]:
    try:
        return expand_variables(value), []
    except Problems as error:
        return None, [((key, *path), text) for path, text in error.problems]


def _expand_text(text: str) -> str:
    spans = [span for span in find_references(text) if span[2].startswith(ENVIRONMENT)]
    result, last = "", 0
    for start, end, body in spans:
        try:
            value = variable_value(body, _expand_text)
        except KeyError as error:
            name = error.args[0]
            message = f"{text[start:end]}: there is no environment variable {name}; set it"
            raise Problems(((), message if name else f"{text[start:end]}: it names no environment variable")) from None
        result, last = result + text[last:start] + value, end
    result += text[last:]
    is_reference = [(start, end) for start, end, _ in spans] == [(0, len(text))]
    return Word(result) if isinstance(text, Word) or is_reference else result


def find_references(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield where each ``${...}`` of a text begins and ends, and what stands within; of nested ones the outermost.

    >>> list(find_references("a/${b,${c}}/d"))
    [(2, 11, 'b,${c}')]
    """
    start = text.find("${")
    while start >= 0:
        depth = 0
        for index in range(start + 1, len(text)):
            depth += (text[index] == "{") - (text[index] == "}")
            if not depth:
                yield start, index + 1, text[start + 2 : index]
                start = index
                break
        start = text.find("${", start + 1)


def variable_value(body: str, expand: Callable[[str], str]) -> str:
    """Return the value of an environment variable, or its default.

    Args:
        body: what stands within the reference, such as ``"oc.env:NAME,default"``.
        expand: expands the default, if the variable is not set.

    Raises:
        KeyError: the variable is not set and has no default; its argument is the name.

    >>> variable_value("oc.env:NOT_SET, ${b}", str.upper)
    '${B}'
    """
    name, comma, default = body.removeprefix(ENVIRONMENT).partition(",")
    name = name.strip()
    if name and name in os.environ:
        return os.environ[name]
    if not comma:
        raise KeyError(name)
    return expand(default.strip())


def expand_home(text: str) -> str:
    """Expand a text that begins with ``~/`` or ``~name/``, which is a path in a home folder; others stay as they are.

    >>> expand_home("a~/b"), expand_home("~ 3 hours")
    ('a~/b', '~ 3 hours')
    """
    return os.path.expanduser(text) if _HOME.match(text) else text  # noqa: PTH111 - a Path would drop a last slash
