"""Whether an environment still is what it was built as."""

import csv
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["wrong_packages"]


def wrong_packages(env: Path, inventory: Mapping[str, Any]) -> Iterator[str]:
    """In what the packages of an environment differ from its inventory: versions, and files that are gone.

    Args:
        env: its folder.
        inventory: of it.
    """
    packages, there = inventory["packages"], dict[str, str]()
    site = next(env.glob("lib/python*/site-packages"), env)
    files = {f"{folder}/{file}" for folder, _, names in os.walk(site) for file in names}  # one by one takes seconds
    lacking = list[str]()
    for info in sorted(site.glob("*.dist-info")):
        name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
        name = re.sub(r"[-_.]+", "-", name).lower()
        there[name] = version if version == packages.get(name, {}).get("version") else _version(info) or version
        gone = [each for each in _listed(info) if f"{site}/{each}" not in files and not (site / each).exists()]
        if gone:
            lacking.append(f"{name} lacks {len(gone)} of its files, such as {gone[0]}")
    yield from (f"{name} is missing" for name in sorted(packages.keys() - there.keys()))
    yield from (f"{name} does not belong there" for name in sorted(there.keys() - packages.keys()))
    for name in sorted(there.keys() & packages.keys()):
        each = packages[name]
        if each["source"] != "url" and each["version"] != there[name]:
            yield f"{name} is {there[name]} instead of {each['version']}"
    yield from lacking


def _listed(info: Path) -> list[str]:
    """The files of a package, but for what Python makes; `importlib.metadata` would leave out those that are gone."""
    try:
        text = (info / "RECORD").read_text()
    except OSError:
        return []
    return [row[0] for row in csv.reader(text.splitlines()) if row and not row[0].endswith(".pyc")]


def _version(info: Path) -> str | None:
    """The version as a package says it: names of folders have it in another form, now and then."""
    try:
        found = re.search(r"^Version: *(\S+)", (info / "METADATA").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None
