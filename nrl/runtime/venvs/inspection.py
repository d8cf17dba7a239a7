"""Comparison of an environment with its inventory."""

import csv
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["list_wrong_packages"]


def list_wrong_packages(env: Path, inventory: Mapping[str, Any]) -> Iterator[str]:
    """Yield differences between the packages of an environment and its inventory: versions, and missing files.

    Args:
        env: the environment's folder.
        inventory: the environment's inventory.
    """
    packages, installed = inventory["packages"], dict[str, str]()
    site = next(env.glob("lib/python*/site-packages"), env)
    # Testing files one by one takes seconds.
    files = {f"{folder}/{file}" for folder, _, names in os.walk(site) for file in names}
    lacking = list[str]()
    for info in sorted(site.glob("*.dist-info")):
        name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
        name = re.sub(r"[-_.]+", "-", name).lower()
        installed[name] = (
            version if version == packages.get(name, {}).get("version") else _read_version(info) or version
        )
        missing = [
            entry for entry in _list_files(info) if f"{site}/{entry}" not in files and not (site / entry).exists()
        ]
        if missing:
            lacking.append(f"{name} lacks {len(missing)} of its files, such as {missing[0]}")
    yield from (f"{name} is missing" for name in sorted(packages.keys() - installed.keys()))
    yield from (f"{name} does not belong there" for name in sorted(installed.keys() - packages.keys()))
    for name in sorted(installed.keys() & packages.keys()):
        entry = packages[name]
        if entry["source"] != "url" and entry["version"] != installed[name]:
            yield f"{name} is {installed[name]} instead of {entry['version']}"
    yield from lacking


def _list_files(info: Path) -> list[str]:
    """List the files of a package without bytecode; `importlib.metadata` would leave out missing files."""
    try:
        text = (info / "RECORD").read_text()
    except OSError:
        return []
    return [row[0] for row in csv.reader(text.splitlines()) if row and not row[0].endswith(".pyc")]


def _read_version(info: Path) -> str | None:
    """Read the version from a package's metadata: folder names may have it in another form."""
    try:
        match = re.search(r"^Version: *(\S+)", (info / "METADATA").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None
