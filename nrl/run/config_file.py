"""The ``config.yaml`` of a run's folder: the configuration of the last start, and the keys that may change.

The configuration of an earlier start is kept beside it, as ``config.1.yaml`` and so on.
"""

from pathlib import Path
from typing import Any

import yaml

from nrl.errors import ConfigError

__all__ = ["check_same", "read_config", "replace", "write"]

_WIDEST = 80  # characters of a value in a message
_PLACE = ("cluster", "trainer", "dp", "layout", "samplers", "verifiers", "max_tokens", "checkpointing", "deadline")
"""Keys that decide where and in what parts a step is computed: its numbers are the same, to rounding."""
_MAY_CHANGE = frozenset({"out", "steps", "checkpoints", "sinks", "optimizer", *_PLACE})
_MAY_HOLD = frozenset({"checkpoints", "optimizer", "layout"})
"""Those of them that may be mappings. Another mapping of these names, such as ``trainer``, has settings of its own."""
_PREFIXED = ("_optimizer", "_layout")
"""Endings of a key that make it one of that kind, such as ``critic_optimizer``."""


def write(out: Path, text: str) -> None:
    """Write a configuration to ``config.yaml``, whole or not at all, and report what a resumed run changes.

    Args:
        out: the folder.
        text: the configuration, with secrets masked: another secret is no other configuration.

    Raises:
        ConfigError: the folder holds checkpoints of another configuration, or of an unknown one.
    """
    path = out / "config.yaml"
    if path.exists() and (before := path.read_bytes()) != text.encode():
        old, new, has_checkpoints = read_config(path), yaml.safe_load(text), (out / "checkpoints").exists()
        if old is None and has_checkpoints:
            raise ConfigError(
                f"run: {path} is empty or damaged, so nobody knows which configuration the checkpoints in out={out} "
                "are of; give another folder. If they are of this one, remove that file"
            )
        was = new if old is None else old
        changed = _differences(was, new)
        refused = _select_refused(changed)
        if refused and has_checkpoints:
            raise ConfigError(
                f"run: out={out} holds a run with another {', '.join(refused)} ("
                + "; ".join(refused.values())
                + "), so it would not be the run whose checkpoints are there; give another folder. If you mean it, "
                f"remove {path}"
            )
        number = next(i for i in range(1, 10**6) if not path.with_suffix(f".{i}.yaml").exists())
        aside = path.with_suffix(f".{number}.yaml")
        aside.write_bytes(before)
        if old is None:
            print(f"run: {path} is empty or damaged; it is {aside.name} now", flush=True)
        else:
            print(f"run: going on with another configuration: {'; '.join(changed.values())}", flush=True)
    replace(path, text)


def check_same(text: str, before: str | None, where: object) -> None:
    """Check that checkpoints that this run has not had before are of the same configuration.

    Args:
        text: the configuration of this run.
        before: of the run that made them; None: nobody knows.
        where: they are.

    Raises:
        ConfigError: the configurations differ.
    """
    if before is not None and (refused := _select_refused(_differences(yaml.safe_load(before), yaml.safe_load(text)))):
        raise ConfigError(
            f"run.restore: {where} holds checkpoints of a run with another {', '.join(refused)} ("
            + "; ".join(refused.values())
            + "), so it would not be the run that they are of; give each run a checkpoints.to= of its own"
        )


def _select_refused(changed: dict[str, str]) -> dict[str, str]:
    """Return the changes that a run does not go on with."""
    return {key: change for key, change in changed.items() if not _may_change(key)}


def _may_change(key: str) -> bool:
    name, _, below = key.partition(".")
    name = next((ending.removeprefix("_") for ending in _PREFIXED if name.endswith(ending)), name)
    return name in (_MAY_HOLD if below else _MAY_CHANGE)


def _differences(was: dict[str, Any], new: dict[str, Any], above: str = "") -> dict[str, str]:
    """By dotted key, the old and the new value in words, cut short."""
    differences: dict[str, str] = {}
    for key in was | new:
        old, value = was.get(key), new.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            differences |= _differences(old, value, f"{above}{key}.")
        elif old != value:
            differences[f"{above}{key}"] = f"{above}{key}: {_short(old)} -> {_short(value)}"
    return differences


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}..."


def read_config(path: Path) -> dict[str, Any] | None:
    """Read a ``config.yaml``. None: it is missing, empty, damaged, or no mapping."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, RecursionError, yaml.YAMLError):
        return None
    return content if isinstance(content, dict) else None


def replace(path: Path, text: str) -> None:
    """Write a file, all of it or nothing."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
