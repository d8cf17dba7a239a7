"""Plans of ``nrl plan PROGRAM.py``, from a program's own configuration, without starting it."""

import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from nrl import config
from nrl.errors import ConfigError
from nrl.ops.plan.plan_command import Planning

__all__ = ["load_config_class", "plan_program"]

_SAME = ("dtype", "trainer", "layout", "max_tokens", "checkpointing", "offload", "optimizer")
"""Fields that mean the same in programs and in plans."""


def plan_program(file: str, settings: Sequence[str]) -> tuple[Planning, frozenset[str]]:
    """Make the plan of a program's step. Its module declares an attrs class ``Config``, as the examples do.

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
        cls = load_config_class(file)
    except OSError as error:
        raise ConfigError(f"plan: {file} cannot be read: {error}") from error
    if cls is None:
        raise ConfigError(f"plan: {file} declares no attrs class named Config, which says what a program is given")
    aliases = {field.alias for field in attrs.fields(cls)}
    program_settings, plan_settings = list[str](), list[str]()
    for setting in settings:
        key, equals, _ = setting.partition("=")
        if setting.startswith("plan."):
            plan_settings.append(setting.removeprefix("plan."))
        elif not equals or key.partition(".")[0] in aliases or key == "config" or "/" in key:
            program_settings.append(setting)
        else:
            plan_settings.append(setting)
    program: Any = config.load(cls, program_settings, program=f"nrl plan {file}", caller=f"plan: {Path(file).name}")
    keys_set = {setting.partition("=")[0].partition(".")[0] for setting in plan_settings}
    fields = {name: value for name, value in _read_fields(program).items() if name not in keys_set}
    if keys_set & {"dp"}:
        fields.pop("layout", None)
    unknown = [
        f"{name}=  ({reason})" for name, reason in _UNKNOWN.items() if name not in fields and name not in keys_set
    ]
    if unknown:
        lines = "\n  ".join(unknown)
        raise ConfigError(f"plan: the configuration of {Path(file).name} does not say\n  {lines}\ngive them")
    planned = config.load(Planning, [*plan_settings, "model=unread"], program=f"nrl plan {file}", caller="plan")
    all_keys_set = config.given_keys(cls, program_settings) | config.given_keys(Planning, plan_settings)
    plan = attrs.evolve(planned, **_complete_fields(planned, fields, keys_set))
    print(
        f"plan: one step of one model with the loss {plan.loss}: what a critic, a reference, a teacher or another "
        "loss of the program needs beside it is not counted",
        file=sys.stderr,
    )
    if getattr(program, "group_size", 1) > 1 and not plan.shared:
        print(
            "plan: rows of a group have their prompt in common, but the configuration does not say how long it is; "
            "they are counted without that. Give shared=, its tokens",
            file=sys.stderr,
        )
    return plan, all_keys_set


_UNKNOWN = {
    "model": "a folder, or a name on the hub; the program's configuration has no model",
    "rows": "of one process's batch, in one optimizer step",
    "width": "tokens of the longest row, its prompt and its answer",
}
"""Fields that a plan needs from a program, without a default."""


def load_config_class(file: str) -> type | None:
    """Load the attrs class ``Config`` that a program's module declares, or None.

    Its module is run as one that is imported: what stands under ``if __name__ == "__main__"`` is not.
    Its errors are not caught.

    Args:
        file: the program.
    """
    folder = str(Path(file).resolve().parent)
    sys.path.insert(0, folder)
    try:
        names = runpy.run_path(file, run_name="nrl_plan")
    finally:
        sys.path.remove(folder)
    for value in names.values():  # the types of its fields may be texts, whose module is gone later
        if isinstance(value, type) and value.__module__ == "nrl_plan" and attrs.has(value):
            attrs.resolve_types(value, names)
    cls = names.get("Config")
    return cls if isinstance(cls, type) and attrs.has(cls) else None


def _read_fields(program: Any) -> dict[str, Any]:
    """Read the plan's fields from a configuration; rows are those of all processes."""
    fields = {name: getattr(program, name) for name in _SAME if hasattr(program, name)}
    if getattr(program, "lora", None) is not None:
        raise ConfigError(
            "plan: the program trains an adapter (lora=), which plans do not know; plan it with lora=null"
        )
    if hasattr(program, "model"):
        fields["model"] = program.model or _tiny_config()
    fields["loss"] = "grpo" if hasattr(program, "sampling") else "sft"
    rows = _count_rows(program)
    if rows is not None:
        fields["rows"] = rows
    width = getattr(program, "max_length", None) or getattr(program, "engine", {}).get("max_model_len")
    if width is not None:
        fields["width"] = width
    return {name: value for name, value in fields.items() if value is not None}


def _tiny_config() -> dict[str, Any]:
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


def _count_rows(program: Any) -> int | None:
    """Count the rows of an optimizer step."""
    for name, count in _ROWS:
        if hasattr(program, name):
            return -(-count(program) // getattr(program, "updates", 1))
    return None


def _complete_fields(planned: Planning, fields: dict[str, Any], keys_set: set[str]) -> dict[str, Any]:
    """Return the program's fields, and fields derived from them that were not set."""
    layout = fields.get("layout")
    if layout is not None:
        fields["dp"] = layout.dp
        if "gpus" not in keys_set:
            fields["gpus"] = layout.slots
    if "rows" in fields:
        fields["rows"] = -(-fields["rows"] // (layout or planned.layout).dp)
    width = fields.get("width", planned.width)
    if "max_tokens" not in fields and "max_tokens" not in keys_set:
        fields["max_tokens"] = max(planned.max_tokens, width)
    return fields
