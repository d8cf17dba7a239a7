"""Environment variables and home folders in the texts of a configuration."""

import os
import re
from collections.abc import Mapping
from typing import Any

from nrl.config._yaml import Found, Problems, Word

__all__ = ["expand_home", "expand_variables"]

_VARIABLE = re.compile(r"\$\{oc\.env:([^{},]*)(?:,([^{}]*))?\}")  # as OmegaConf writes it
_HOME = re.compile(r"~[\w.-]*/")


def expand_variables(value: Any) -> Any:
    """Put environment variables into texts; anything else stays as it is.

    ``${oc.env:NAME}`` and ``${oc.env:NAME,default}`` are environment variables. A value that is nothing else has no
    type until its field gives it one, like text on the command line.

    Args:
        value: mappings, lists and scalars.

    Raises:
        Problems: there is no such environment variable, and no default for it.

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
    if problems := [problem for _, found in items.values() for problem in found]:
        raise Problems(*problems)
    values = {key: item for key, (item, _) in items.items()}
    return values if isinstance(value, Mapping) else list(values.values())


def _expand_item(key: Any, value: Any) -> tuple[Any, list[Found]]:
    try:
        return expand_variables(value), []
    except Problems as error:
        return None, [((key, *path), text) for path, text in error.found]


def _expand_text(text: str) -> str:
    def variable(match: re.Match[str]) -> str:
        name, default = match[1].strip(), match[2]
        if name not in os.environ and default is None:
            raise Problems(((), f"{match[0]}: there is no environment variable {name}; set it"))
        return os.environ.get(name, (default or "").strip())

    result = _VARIABLE.sub(variable, text)
    return Word(result) if isinstance(text, Word) or _VARIABLE.fullmatch(text) else result


def expand_home(text: str) -> str:
    """Expand a text that begins with ``~/`` or ``~name/``, which is a path in a home folder; others stay as they are.

    >>> expand_home("a~/b"), expand_home("~ 3 hours")
    ('a~/b', '~ 3 hours')
    """
    return os.path.expanduser(text) if _HOME.match(text) else text  # noqa: PTH111 - a Path would drop a last slash
