"""Names that two commits have for the same things, from ``renames.toml``."""

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Renames", "RenamesError", "read_renames"]

SEPARATORS = {"options": ".", "metrics": "/", "columns": "/", "files": "/"}
WORD = re.compile(r"(?!(?:true|false|null|nan|inf)$)[a-z_][\w-]*", re.IGNORECASE)  # a number is not a word


class RenamesError(ValueError):
    """A table of renames that changes more than names, or names nothing."""


class Renames:
    """Old names and their new ones by section, and the entries that a run of BASE has had.

    Args:
        tables: new names by old name, by section: ``options``, ``metrics``, ``columns``, ``files``.

    Raises:
        RenamesError: for an unknown section, an entry that changes nothing or a value, and two that become one.

    >>> renames = Renames({"options": {"lag": "max_staleness", "inflight=wait": "in_flight=drain"}})
    >>> renames.rename_words("steps=2 lag=1 inflight=wait")
    'steps=2 max_staleness=1 in_flight=drain'
    >>> renames.list_unused()
    []
    """

    def __init__(self, tables: Mapping[str, Mapping[str, str]]) -> None:
        self._tables, self._used = tables, set[tuple[str, str]]()
        for section, entries in tables.items():
            if section not in SEPARATORS:
                raise RenamesError(f"renames: there is no section [{section}]; write one of {', '.join(SEPARATORS)}")
            if not isinstance(entries, Mapping):
                raise RenamesError(
                    f"renames: {section} = {entries!r} is no table; write [{section}] and entries below it"
                )
            sources: dict[str, str] = {}
            for old, new in entries.items():
                _check_entry(section, old, new)
                if new in sources:
                    raise RenamesError(
                        f"renames: [{section}] {sources[new]!r} and {old!r} both become {new!r}; give each its own name"
                    )
                sources[new] = old

    def rename(self, section: str, name: str) -> str:
        """Return the new name: the longest entry that is the name, or a leading part of it, applies."""
        entries, separator = self._tables.get(section, {}), SEPARATORS[section]
        parts = name.split(separator)
        for length in range(len(parts), 0, -1):
            old = separator.join(parts[:length])
            if old in entries:
                self._used.add((section, old))
                return separator.join([entries[old], *parts[length:]])
        return name

    def rename_all(self, section: str, names: Iterable[str]) -> dict[str, str]:
        """Return the new name of each name.

        Raises:
            RenamesError: where two names become one.
        """
        renamed, sources = {}, dict[str, str]()
        for name in names:
            renamed[name] = new = self.rename(section, name)
            if new in sources:
                raise RenamesError(
                    f"renames: [{section}] {sources[new]!r} and {name!r} of a run of BASE both become {new!r}; "
                    "give each its own name"
                )
            sources[new] = name
        return renamed

    def rename_metrics(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row of metrics with new names, in the same order."""
        renamed = self.rename_all("metrics", row)
        return {renamed[name]: value for name, value in row.items()}

    def rename_columns(self, value: Any) -> Any:
        """Return a row of columns with new names at each depth, in the same order."""
        if isinstance(value, dict):
            renamed = self.rename_all("columns", value)
            return {renamed[name]: self.rename_columns(item) for name, item in value.items()}
        return [self.rename_columns(item) for item in value] if isinstance(value, list) else value

    def rename_options(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return options by their new names; an entry that names a value as well takes precedence."""
        entries, renamed = self._tables.get("options", {}), self.rename_all("options", values)
        result = {}
        for name, value in values.items():
            if (word := f"{name}={value}") in entries:
                self._used.add(("options", word))
                new, _, value = entries[word].partition("=")
            else:
                new = renamed[name]
            if new in result:
                raise RenamesError(
                    f"renames: [options] two options of BASE become {new!r}, one of them {name!r}; "
                    "give each its own name"
                )
            result[new] = value
        return result

    def rename_words(self, words: str) -> str:
        """Return the words of a command line with new names."""
        values = dict(word.split("=", 1) for word in words.split())
        return " ".join(f"{name}={value}" for name, value in self.rename_options(values).items())

    def list_unused(self) -> list[str]:
        """Return the entries that occurred in nothing that was renamed."""
        names = ((section, old) for section, entries in self._tables.items() for old in entries)
        return [f"[{section}] {old!r}" for section, old in names if (section, old) not in self._used]


def read_renames(file: Path) -> Renames:
    """Read a table of renames."""
    return Renames(tomllib.loads(file.read_text()))


def _check_entry(section: str, old: str, new: Any) -> None:
    """Raise RenamesError for an entry that is no rename."""
    if not isinstance(new, str) or not old or not new or old == new:
        raise RenamesError(f'renames: [{section}] {old!r} = {new!r} is no rename; write old = "new", two names')
    if section != "options" or ("=" not in old and "=" not in new):
        return
    values = [word.partition("=")[2] for word in (old, new)]
    if not all(WORD.fullmatch(value) for value in values):
        raise RenamesError(
            f"renames: [options] {old!r} = {new!r} changes a value; a value may be renamed where it is a word: "
            '"inflight=wait" = "in_flight=drain"'
        )
