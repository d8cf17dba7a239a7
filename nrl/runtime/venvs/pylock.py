"""The packages of a ``pylock.toml`` (PEP 751) for this platform, as requirements that any index can serve.

A line has a version and hashes instead of a URL. So packages come from whatever index stands in for PyPI on the driver
or a node, and no recipe has the host of an index.
"""

import platform
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from packaging.markers import Environment, Marker, default_environment
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from nrl.runtime.venvs.registry import Executable

__all__ = ["Pin", "choose_python", "marker_environment", "parse_pins"]

_TAGS = frozenset(sys_tags())


class Pin(NamedTuple):
    """One package of a selection: a line of requirements, or a path that a wheel is built from."""

    name: str
    version: str
    line: str = ""
    digest: str = ""  # the hashes of files that this platform could install
    origin: str | None = None  # an index other than the default one
    path: Path | None = None


def choose_python(executable: Executable) -> str:
    """Choose the Python version of an executable: the driver's, if the executable admits it.

    >>> choose_python(Executable("mine", python="2.7")), choose_python(Executable("mine")) == platform.python_version()
    ('2.7', True)
    """
    driver_version, version_asked = platform.python_version(), executable.python
    if version_asked is None or driver_version == version_asked or driver_version.startswith(f"{version_asked}."):
        return driver_version
    return version_asked


def marker_environment(executable: Executable) -> Environment:
    """Return the environment for markers: this platform, with the executable's Python."""
    environment = default_environment()
    if (python := choose_python(executable)) != platform.python_version():
        parts = (*python.split("."), "0", "0")[:3]
        environment["python_version"], environment["python_full_version"] = ".".join(parts[:2]), ".".join(parts)
    return environment


def parse_pins(text: str, base: Path, environment: Environment) -> dict[str, Pin]:
    """Parse the packages of a lock, by name.

    Args:
        text: the pylock.toml.
        base: the folder for relative paths in it.
        environment: for its markers.

    >>> text = '[[packages]]\\nname = "Tiny"\\nversion = "1.0"\\ndirectory = { path = "lib" }'
    >>> parse_pins(text, Path("/nowhere"), marker_environment(Executable("mine")))["tiny"].path
    PosixPath('/nowhere/lib')
    """
    pins = {}
    for package in tomllib.loads(text).get("packages", []):
        if "marker" not in package or Marker(package["marker"]).evaluate(environment, context="lock_file"):  # type: ignore[arg-type]
            pin = _parse_pin(package, base)
            pins[pin.name] = pin
    return pins


def _parse_pin(package: Mapping[str, Any], base: Path) -> Pin:
    name, number = canonicalize_name(package["name"]), package.get("version", "")
    if "directory" in package:
        return Pin(
            name,
            number,
            path=(base / package["directory"]["path"] / package["directory"].get("subdirectory", "")).resolve(),
        )
    if "vcs" in package:
        vcs = package["vcs"]
        location = vcs.get("url") or (base / vcs["path"]).resolve().as_uri()
        part = f"#subdirectory={vcs['subdirectory']}" if "subdirectory" in vcs else ""
        return Pin(name, vcs["commit-id"], f"{name} @ {vcs['type']}+{location}@{vcs['commit-id']}{part}")
    if "archive" in package:
        archive = package["archive"]
        if "path" in archive:
            return Pin(name, number, path=(base / archive["path"]).resolve())
        return Pin(name, number, f"{name} @ {archive['url']} --hash=sha256:{archive['hashes']['sha256']}")
    wheels = package.get("wheels", [])
    sources = [package["sdist"]] if "sdist" in package else []
    # A node may install any of the files, but a change in those of other platforms is no reason for another name
    installable = [wheel for wheel in wheels if not _TAGS.isdisjoint(parse_wheel_filename(_file_name(wheel))[3])]
    line = " ".join([f"{name}=={number}", *_hashes([*wheels, *sources])])
    index = str(package.get("index", "")).rstrip("/")
    default = index in ("", "https://pypi.org/simple")  # whatever index stands in for PyPI here serves it
    return Pin(name, number, line, " ".join(_hashes(installable or sources or wheels)), None if default else index)


def _hashes(files: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted({f"--hash={kind}:{value}" for file in files for kind, value in file.get("hashes", {}).items()})


def _file_name(file: Mapping[str, Any]) -> str:
    return str(file.get("name") or unquote(str(file.get("url") or file["path"]).split("#")[0].rsplit("/", 1)[-1]))
