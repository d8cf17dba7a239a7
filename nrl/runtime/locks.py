"""What an executable consists of, by the lock file that applies to this process.

There are three. A user's own uv project that depends on nrl has its lock; a checkout of nrl has nrl's; and an nrl
that was installed from a wheel carries selections of the lock that it was built from, as ``nrl/pylocks``.
"""

import configparser
import contextlib
import hashlib
import os
import platform
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from packaging.markers import Environment, Marker, default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from nrl.errors import ExecutableError
from nrl.runtime.executables import EXECUTABLES, Executable
from nrl.runtime.provision import here, uv

__all__ = ["Pin", "Project", "locked", "project", "python_of", "settings"]

_NRL = Path(__file__).parents[1]


class Project(NamedTuple):
    """Whose lock applies, and the folder of its pyproject.toml (of a wheel: where nrl is installed).

    >>> project().kind in ("checkout", "project", "wheel")
    True
    """

    kind: Literal["checkout", "project", "wheel"]
    root: Path


class Pin(NamedTuple):
    """One package of a selection: a line of requirements, or a path that a wheel is built from.

    >>> Pin("numpy", "2.3.5", "numpy==2.3.5 --hash=sha256:00").path is None
    True
    """

    name: str
    version: str
    line: str = ""
    origin: str | None = None  # an index other than the default one
    path: Path | None = None


def project() -> Project:
    """Whose lock applies to this process.

    The first of these whose lock has nrl in it: the project whose environment this interpreter is, the one that the
    script is in, the one around the current folder, the checkout that nrl was imported from.

    >>> project().root.is_dir()
    True
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    starts = [Path(sys.prefix).parent, *([Path(script).resolve().parent] if script else []), Path.cwd(), _NRL.parent]
    for start in starts:
        for folder in (start, *start.parents):
            if (folder / "pyproject.toml").is_file() and (lock := _lock(folder)) is not None:
                if any(package["name"] == "nrl" for package in lock["package"]):
                    return Project("checkout" if _is_nrl(folder) else "project", folder)
                break
    return Project("wheel", _NRL)


def locked(executable: Executable, of: Project, kept: Path) -> dict[str, Pin]:
    """The packages of an executable by name, for this platform and without nrl if that comes from a wheel.

    Args:
        executable: what to select.
        of: whose lock applies.
        kept: a folder in which resolutions of additional requirements are kept: the same ones are resolved once.

    Raises:
        ExecutableError: the lock does not have the extras or groups, or additional requirements do not agree with it.
    """
    wanted, environment = list(executable.extras), _environment(executable)
    more: list[str] = []
    if of.kind == "project":
        known = {canonicalize_name(name) for name in _table(of.root).get("optional-dependencies", {})}
        foreign = [extra for extra in wanted if canonicalize_name(extra) not in known]
        text = _export(of.root, [extra for extra in wanted if extra not in foreign], executable.groups)
        pins, overrides = _pins(text, of.root, environment), _overrides(of.root)
        if foreign:  # nrl's extras: what its lock adds to nrl comes on top of the project
            own, own_overrides = _own(foreign, (), environment)
            more += [f"{pin.name}=={pin.version}" for pin in own.values() if pin.name not in pins and pin.path is None]
            overrides = {**own_overrides, **overrides}
    else:
        pins, overrides = _own(wanted, executable.groups, environment)
    # Ray does not connect two versions of itself, so an executable has the one that is here.
    with contextlib.suppress(PackageNotFoundError):
        if "ray" in pins and (ray := version("ray")) != pins["ray"].version:
            more.append(f"ray=={ray}")
            del pins["ray"]
    more += executable.requirements
    if more:
        pins = _resolved(executable, more, pins, overrides, of, kept, environment)
    return pins


def python_of(executable: Executable) -> str:
    """The Python version of an executable: the driver's own, if that is a version that it asks for.

    >>> python_of(Executable("mine", python="2.7")), python_of(Executable("mine")) == platform.python_version()
    ('2.7', True)
    """
    own, asked = platform.python_version(), executable.python
    return own if asked is None or own == asked or own.startswith(f"{asked}.") else asked


def settings() -> dict[str, str]:
    """This process's variables that say where uv gets packages; pip's index where uv has none of its own.

    >>> all(value for value in settings().values())
    True
    """
    names = ("UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS")
    found = {k: v for k, v in os.environ.items() if v and (k in names or k.startswith("UV_INDEX"))}
    config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    files = [config / "uv" / "uv.toml", Path("/etc/uv/uv.toml"), os.environ.get("UV_CONFIG_FILE")]
    if found or any(file and Path(file).exists() for file in files):
        return found
    if url := os.environ.get("PIP_INDEX_URL"):
        return {"UV_DEFAULT_INDEX": url}
    for path in (os.environ.get("PIP_CONFIG_FILE"), config / "pip" / "pip.conf", "~/.pip/pip.conf", "/etc/pip.conf"):
        parser = configparser.RawConfigParser()
        with contextlib.suppress(OSError, configparser.Error):
            if path and parser.read(Path(path).expanduser()) and parser.has_option("global", "index-url"):
                return {"UV_DEFAULT_INDEX": parser.get("global", "index-url")}
    return {}


# --- the three locks


def _lock(folder: Path) -> dict[str, Any] | None:
    """The lock of a project, which is beside its pyproject.toml or at the root of its workspace."""
    for each in (folder, *folder.parents):
        if (each / "uv.lock").is_file():
            with contextlib.suppress(tomllib.TOMLDecodeError):
                return tomllib.loads((each / "uv.lock").read_text())
    return None


def _table(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
    return table


def _is_nrl(folder: Path) -> bool:
    return _table(folder).get("name") == "nrl"


def _overrides(root: Path) -> dict[str, str]:
    found = (_lock(root) or {}).get("manifest", {}).get("overrides", [])
    return {each["name"]: f"{each['name']}{each.get('specifier', '')}" for each in found if "specifier" in each}


def _export(root: Path, extras: Iterable[str], groups: Iterable[str]) -> str:
    return uv(
        [
            *("export", "--quiet", "--frozen", "--format=pylock.toml", "--no-header", "--no-editable"),
            *("--no-default-groups", f"--python={sys.executable}"),
            *(flag for extra in extras for flag in ("--extra", extra)),
            *(flag for group in groups for flag in ("--group", group)),
        ],
        cwd=root,
        what=f"recipe: the lock of {root}",
    )


def _own(
    extras: Iterable[str], groups: Iterable[str], environment: Environment
) -> tuple[dict[str, Pin], dict[str, str]]:
    """A selection of nrl's own lock, and its overrides: the checkout's, or what an installed wheel carries."""
    root = _NRL.parent
    if (root / "pyproject.toml").is_file() and (root / "uv.lock").is_file() and _is_nrl(root):
        return _pins(_export(root, extras, groups), root, environment), _overrides(root)
    carried = {each.extras: _NRL / "pylocks" / f"pylock.{each.name}.toml" for each in EXECUTABLES.values()}
    carried = {key: path for key, path in carried.items() if len(key) < 2 and path.is_file()}
    lacking = [extra for extra in extras if (extra,) not in carried]
    if lacking or list(groups) or () not in carried:
        what = f"the extra '{lacking[0]}'" if lacking else f"the group '{next(iter(groups), '')}'"
        raise ExecutableError(
            f"recipe: the installed nrl has no lock for {what}; it has those of "
            f"{', '.join(sorted(key[0] for key in carried if key)) or 'nothing'}. Use `requirements` instead, or run "
            "from a uv project that depends on nrl and locks it"
        )
    pins: dict[str, Pin] = {}
    overrides: dict[str, str] = {}
    for key in ((), *((extra,) for extra in extras)):  # all from one lock, so they agree
        text = carried[key].read_text()
        pins |= _pins(text, _NRL, environment)
        lines = tomllib.loads(text)["tool"]["nrl"]["override-dependencies"]
        overrides |= {canonicalize_name(Requirement(line).name): line for line in lines}
    return pins, overrides


# --- pylock.toml


def _environment(executable: Executable) -> Environment:
    environment = default_environment()
    if (python := python_of(executable)) != platform.python_version():
        parts = (*python.split("."), "0", "0")[:3]
        environment["python_version"], environment["python_full_version"] = ".".join(parts[:2]), ".".join(parts)
    return environment


def _pins(text: str, base: Path, environment: Environment) -> dict[str, Pin]:
    """The packages of a pylock.toml that this platform gets; paths in it are relative to ``base``."""
    pins = {}
    for package in tomllib.loads(text).get("packages", []):
        if "marker" not in package or Marker(package["marker"]).evaluate(environment, context="lock_file"):  # type: ignore[arg-type]
            pin = _pin(package, base)
            pins[pin.name] = pin
    return pins


def _pin(package: Mapping[str, Any], base: Path) -> Pin:
    name, number = canonicalize_name(package["name"]), package.get("version", "")
    if "directory" in package:
        return Pin(
            name,
            number,
            path=(base / package["directory"]["path"] / package["directory"].get("subdirectory", "")).resolve(),
        )
    if "vcs" in package:
        vcs = package["vcs"]
        where = vcs.get("url") or (base / vcs["path"]).resolve().as_uri()
        part = f"#subdirectory={vcs['subdirectory']}" if "subdirectory" in vcs else ""
        return Pin(name, vcs["commit-id"], f"{name} @ {vcs['type']}+{where}@{vcs['commit-id']}{part}")
    if "archive" in package:
        archive = package["archive"]
        if "path" in archive:
            return Pin(name, number, path=(base / archive["path"]).resolve())
        return Pin(name, number, f"{name} @ {archive['url']} --hash=sha256:{archive['hashes']['sha256']}")
    files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
    hashes = sorted({f"--hash={kind}:{value}" for file in files for kind, value in file.get("hashes", {}).items()})
    index = str(package.get("index", "")).rstrip("/")
    default = index in ("", "https://pypi.org/simple")  # whatever index stands in for PyPI here serves it
    return Pin(name, number, " ".join([f"{name}=={number}", *hashes]), None if default else index)


def _resolved(
    executable: Executable,
    lines: list[str],
    pins: dict[str, Pin],
    overrides: Mapping[str, str],
    of: Project,
    kept: Path,
    environment: Environment,
) -> dict[str, Pin]:
    """The packages of a selection, and what more the lines need, of versions that agree with it."""
    for line in lines:
        try:
            Requirement(line)
        except InvalidRequirement as error:
            raise ExecutableError(
                f"recipe: executable '{executable.name}' has requirements with the line {line!r}, which is not one "
                f"({error}); write 'name>=1.0', or 'name @ file:///its/folder' for what is no index"
            ) from None
    fixed = [
        f"{pin.name}=={pin.version}" for pin in pins.values() if pin.version and pin.path is None and "==" in pin.line
    ]
    constraints = "".join(f"{line}\n" for line in fixed if line.split("==")[0] not in overrides)
    forced = "".join(f"{line}\n" for line in overrides.values())
    python = python_of(executable)
    key = hashlib.sha256("\0".join([*lines, constraints, forced, python, here()]).encode()).hexdigest()[:16]
    path = kept / f"pylock.{key}.toml"
    if not path.exists() or os.environ.get("NRL_FORCE_REBUILD_VENVS", "0") not in ("", "0"):
        kept.mkdir(parents=True, exist_ok=True)
        (kept / f"{key}.constraints.txt").write_text(constraints)
        (kept / f"{key}.overrides.txt").write_text(forced)
        root = of.root if of.kind != "wheel" else Path.cwd()
        text = uv(
            [
                *("pip", "compile", "--quiet", "--no-header", "--format=pylock.toml", f"--python={sys.executable}"),
                *(() if python == platform.python_version() else (f"--python-version={python}",)),
                *("--constraint", str(kept / f"{key}.constraints.txt")),
                *("--override", str(kept / f"{key}.overrides.txt"), "-"),
            ],
            cwd=root,
            what=f"recipe: the requirements {', '.join(lines)} of executable '{executable.name}', with the versions of "
            f"the lock of {of.root}",
            settings=settings(),
            stdin="\n".join(lines),
        )
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(text)
        scratch.rename(path)
        (kept / f"{key}.constraints.txt").unlink(missing_ok=True)
        (kept / f"{key}.overrides.txt").unlink(missing_ok=True)
    root = of.root if of.kind != "wheel" else Path.cwd()
    return {**_pins(path.read_text(), root, environment), **pins}
