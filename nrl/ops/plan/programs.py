"""What ``nrl plan PROGRAM.py`` reads from a program's own configuration, without starting it."""

import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from nrl import config
from nrl.errors import ConfigError
from nrl.ops.plan.cli import Planning

__all__ = ["declared", "of_program"]

_SAME = ("dtype", "trainer", "layout", "max_tokens", "checkpointing", "offload", "optimizer")
"""Fields that mean the same in programs and in plans."""


def of_program(file: str, settings: Sequence[str]) -> tuple[Planning, frozenset[str]]:
    """The plan of a step of a program, whose module declares an attrs class ``Config``, as the examples do.

    ``key=value`` goes to the program if its configuration has the key, else to the plan; ``plan.key=value`` always goes
    to the plan, and wins over what the program says. Its module is run as a module that is imported: what stands under
    ``if __name__ == "__main__"`` is not.

    Args:
        file: the program.
        settings: arguments, and files of the program's configuration.

    Returns:
        The plan, and the keys that settings and files say.

    Raises:
        ConfigError: it has no such class; a setting is wrong; or values of the plan cannot be known from it, which are
            named.
    """
    try:
        cls = declared(file)
    except OSError as error:
        raise ConfigError(f"plan: {file} cannot be read: {error}") from error
    if cls is None:
        raise ConfigError(f"plan: {file} declares no attrs class named Config, which says what a program is given")
    known = {field.alias for field in attrs.fields(cls)}
    own, more = list[str](), list[str]()
    for each in settings:
        key, equals, _ = each.partition("=")
        if each.startswith("plan."):
            more.append(each.removeprefix("plan."))
        elif not equals or key.partition(".")[0] in known or key == "config" or "/" in key:
            own.append(each)
        else:
            more.append(each)
    program: Any = config.load(cls, own, program=f"nrl plan {file}", caller=f"plan: {Path(file).name}")
    given = {each.partition("=")[0].partition(".")[0] for each in more}
    found = {name: value for name, value in _read(program).items() if name not in given}
    if given & {"dp"}:
        found.pop("layout", None)
    unknown = [f"{name}=  ({why})" for name, why in _UNKNOWN.items() if name not in found and name not in given]
    if unknown:
        lines = "\n  ".join(unknown)
        raise ConfigError(f"plan: the configuration of {Path(file).name} does not say\n  {lines}\ngive them")
    planned = config.load(Planning, [*more, "model=unread"], program=f"nrl plan {file}", caller="plan")
    said = config.given_keys(cls, own) | config.given_keys(Planning, more)
    whole = attrs.evolve(planned, **_whole(planned, found, given))
    print(
        f"plan: one step of one model with the loss {whole.loss}: what a critic, a reference, a teacher or another "
        "loss of the program needs beside it is not counted",
        file=sys.stderr,
    )
    if getattr(program, "group_size", 1) > 1 and not whole.shared:
        print(
            "plan: rows of a group have their prompt in common, but the configuration does not say how long it is; "
            "they are counted without that. Give shared=, its tokens",
            file=sys.stderr,
        )
    return whole, said


_UNKNOWN = {
    "model": "a folder, or a name on the hub; the program's configuration has no model",
    "rows": "of one process's batch, in one optimizer step",
    "width": "tokens of the longest row, its prompt and its answer",
}
"""What a plan needs of a program, and has no default for."""


def declared(file: str) -> type | None:
    """The attrs class ``Config`` that a program's module declares; None: it declares none.

    Its module is run as one that is imported: what stands under ``if __name__ == "__main__"`` is not.
    Its errors are not caught.

    Args:
        file: the program.
    """
    here = str(Path(file).resolve().parent)
    sys.path.insert(0, here)
    try:
        names = runpy.run_path(file, run_name="nrl_plan")
    finally:
        sys.path.remove(here)
    for each in names.values():  # the types of its fields may be texts, whose module is gone later
        if isinstance(each, type) and each.__module__ == "nrl_plan" and attrs.has(each):
            attrs.resolve_types(each, names)
    found = names.get("Config")
    return found if isinstance(found, type) and attrs.has(found) else None


def _read(program: Any) -> dict[str, Any]:
    """What a configuration says of the plan's fields; rows are those of all processes."""
    found = {name: getattr(program, name) for name in _SAME if hasattr(program, name)}
    if getattr(program, "lora", None) is not None:
        raise ConfigError(
            "plan: the program trains an adapter (lora=), which plans do not know; plan it with lora=null"
        )
    if hasattr(program, "model"):
        found["model"] = program.model or _tiny()
    found["loss"] = "grpo" if hasattr(program, "sampling") else "sft"
    rows = _rows(program)
    if rows is not None:
        found["rows"] = rows
    width = getattr(program, "max_length", None) or getattr(program, "engine", {}).get("max_model_len")
    if width is not None:
        found["width"] = width
    return {name: value for name, value in found.items() if value is not None}


def _tiny() -> dict[str, Any]:
    from nrl import tiny

    source = tiny.model().source
    assert isinstance(source, Mapping)
    return dict(source)


_ROWS: Sequence[tuple[str, Callable[[Any], int]]] = (
    ("prompts", lambda cfg: cfg.prompts * getattr(cfg, "group_size", 1)),
    ("pairs", lambda cfg: 2 * cfg.pairs),
    ("rows", lambda cfg: cfg.rows),
)
"""Rows of a batch, by the field that says how many there are."""


def _rows(program: Any) -> int | None:
    """Rows of an optimizer step."""
    for name, count in _ROWS:
        if hasattr(program, name):
            return -(-count(program) // getattr(program, "updates", 1))
    return None


def _whole(planned: Planning, found: dict[str, Any], given: set[str]) -> dict[str, Any]:
    """Fields as the program says them, and what follows from them unless it was given."""
    layout = found.get("layout")
    if layout is not None:
        found["dp"] = layout.dp
        if "gpus" not in given:
            found["gpus"] = layout.slots
    if "rows" in found:
        found["rows"] = -(-found["rows"] // (layout or planned.layout).dp)
    width = found.get("width", planned.width)
    if "max_tokens" not in found and "max_tokens" not in given:
        found["max_tokens"] = max(planned.max_tokens, width)
    return found
