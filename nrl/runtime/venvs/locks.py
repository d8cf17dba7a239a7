"""The packages of an executable, from the lock file that applies to this process.

There are three. A user's uv project that depends on nrl has its own lock; a checkout of nrl has nrl's; and an nrl that
was installed from a wheel carries selections of the lock that it was built from, as ``nrl/pylocks``.
"""

import configparser
import contextlib
import hashlib
import os
import platform
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from packaging.markers import Environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from nrl.errors import ExecutableError
from nrl.flags import flag
from nrl.runtime.venvs.environments import DISTRIBUTION, current_platform, mark_used
from nrl.runtime.venvs.installer import run_uv
from nrl.runtime.venvs.pylock import Pin, choose_python, marker_environment, parse_pins
from nrl.runtime.venvs.registry import Executable

__all__ = ["Project", "find_project", "is_rebuild_forced", "select_pins", "uv_settings"]

_NRL = Path(__file__).resolve().parents[2]
_RESOLVED: set[Path] = set()  # This process has resolved these; with NRL_FORCE_REBUILD_VENVS it resolves each once.


class Project(NamedTuple):
    """Whose lock applies, and the folder of its pyproject.toml (of a wheel: where nrl is installed)."""

    kind: Literal["checkout", "project", "wheel"]
    root: Path


class _Resolution(NamedTuple):
    """The arguments of `select_pins`, for functions that resolve requirements beyond the lock."""

    executable: Executable
    project: Project
    cache: Path
    say: Callable[[str], None] | None


def find_project() -> Project:
    """Find whose lock applies to this process.

    It is the first of these whose lock has nrl in it: the project whose environment this interpreter is, the one that
    the script is in, the one around the current folder, the checkout that nrl was imported from.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    starts = [Path(sys.prefix).parent, *([Path(script).resolve().parent] if script else []), Path.cwd(), _NRL.parent]
    for start in starts:
        for folder in (start, *start.parents):
            if (folder / "pyproject.toml").is_file() and (lock := _read_lock(folder)) is not None:
                is_own = _is_nrl(folder)
                if (
                    folder == _NRL.parent
                    if is_own
                    else any(package["name"] == DISTRIBUTION for package in lock["package"])
                ):
                    return Project("checkout" if is_own else "project", folder)
                break
    return Project("wheel", _NRL)


def select_pins(
    executable: Executable, lock_project: Project, cache: Path, say: Callable[[str], None] | None = None
) -> dict[str, Pin]:
    """Select the packages of an executable by name, for this platform; without nrl if it comes from a wheel.

    Args:
        executable: what to select.
        lock_project: whose lock applies.
        cache: a folder for resolutions of additional requirements, so that the same ones are resolved once.
        say: gets a line of progress now and then.

    Raises:
        ExecutableError: the lock does not have the extras or groups, or additional requirements do not agree with it.
    """
    extras, environment = list(executable.extras), marker_environment(executable)
    resolution, further = _Resolution(executable, lock_project, cache, say), list[str]()
    if lock_project.kind == "project":
        own_extras = {
            canonicalize_name(name) for name in _read_project_table(lock_project.root).get("optional-dependencies", {})
        }
        foreign = [extra for extra in extras if canonicalize_name(extra) not in own_extras]
        text = _export(lock_project.root, [extra for extra in extras if extra not in foreign], executable.groups)
        pins, overrides = parse_pins(text, lock_project.root, environment), _read_overrides(lock_project.root)
        # By the name of an index uv finds its credentials.
        indexes = (
            tomllib.loads((lock_project.root / "pyproject.toml").read_text())
            .get("tool", {})
            .get("uv", {})
            .get("index", [])
        )
        named = {index["url"].rstrip("/"): f"{index['name']}={index['url']}" for index in indexes if "name" in index}
        pins = {pin.name: pin._replace(origin=named.get(str(pin.origin), pin.origin)) for pin in pins.values()}
        if foreign:
            pins, overrides = _with_foreign(resolution, foreign, pins, overrides)
    else:
        pins, overrides = _select_own_pins(extras, executable.groups, environment)
    # Ray does not connect two versions of itself, so an executable has the driver's.
    with contextlib.suppress(PackageNotFoundError):
        if "ray" in pins and (ray := version("ray")) != pins["ray"].version:
            further.append(f"ray=={ray}")
            del pins["ray"]
    further += executable.requirements
    if further:
        pins = _resolve(resolution, further, pins, overrides)
    return pins


def _with_foreign(
    resolution: _Resolution, extras: list[str], pins: dict[str, Pin], overrides: dict[str, str]
) -> tuple[dict[str, Pin], dict[str, str]]:
    """Select the packages of a user's project, and nrl's locked packages for extras of nrl, if both agree."""
    own_pins, own_overrides = _select_own_pins(extras, (), marker_environment(resolution.executable))
    overrides = {**own_overrides, **overrides}
    lines = [f"{pin.name}=={pin.version}" for pin in own_pins.values() if pin.name not in pins and pin.path is None]
    try:
        return _resolve(resolution, lines, pins, overrides), overrides
    except ExecutableError as error:
        needed = ", ".join(f'"{line}"' for line in overrides.values())
        raise ExecutableError(
            f"recipe: the project {resolution.project.root} has no extra '{extras[0]}' for executable "
            f"'{resolution.executable.name}', and what nrl's lock has for it does not agree with the project's. Add to "
            "its pyproject.toml, under "
            f'[project.optional-dependencies], {extras[0]} = ["{DISTRIBUTION}[{extras[0]}]"] and, under [tool.uv], '
            f"override-dependencies = [{needed}], and lock it again. In detail: {error}"
        ) from error


def uv_settings() -> dict[str, str]:
    """Return this process's variables for uv's indexes; pip's index if uv has none of its own."""
    names = ("UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS")
    variables = {k: v for k, v in os.environ.items() if v and (k in names or k.startswith("UV_INDEX"))}
    config = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config"))  # noqa: PTH111 - ~ may be nowhere
    files = [config / "uv" / "uv.toml", Path("/etc/uv/uv.toml"), os.environ.get("UV_CONFIG_FILE")]
    if variables or any(file and os.path.exists(file) for file in files):  # noqa: PTH110 - a Path raises where it may not look
        return variables
    if url := os.environ.get("PIP_INDEX_URL"):
        return {"UV_DEFAULT_INDEX": url}
    for path in (os.environ.get("PIP_CONFIG_FILE"), config / "pip" / "pip.conf", "~/.pip/pip.conf", "/etc/pip.conf"):
        parser = configparser.RawConfigParser()
        with contextlib.suppress(OSError, RuntimeError, configparser.Error):
            if path and parser.read(Path(path).expanduser()) and parser.has_option("global", "index-url"):
                return {"UV_DEFAULT_INDEX": parser.get("global", "index-url")}
    return {}


def is_rebuild_forced() -> bool:
    """Return whether ``NRL_FORCE_REBUILD_VENVS`` asks to resolve and build anew."""
    return flag("NRL_FORCE_REBUILD_VENVS")


# --- the three locks


def _read_lock(folder: Path) -> dict[str, Any] | None:
    """Read the lock of a project, from its folder or from the root of its workspace."""
    for parent in (folder, *folder.parents):
        if (parent / "uv.lock").is_file():
            with contextlib.suppress(tomllib.TOMLDecodeError):
                return tomllib.loads((parent / "uv.lock").read_text())
    return None


def _read_project_table(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text()).get("project", {})
    return table


def _is_nrl(folder: Path) -> bool:
    return _read_project_table(folder).get("name") == DISTRIBUTION


def _read_overrides(root: Path) -> dict[str, str]:
    entries = (_read_lock(root) or {}).get("manifest", {}).get("overrides", [])
    return {entry["name"]: f"{entry['name']}{entry.get('specifier', '')}" for entry in entries if "specifier" in entry}


def _export(root: Path, extras: Iterable[str], groups: Iterable[str]) -> str:
    return run_uv(
        [
            *("export", "--quiet", "--frozen", "--format=pylock.toml", "--no-header", "--no-editable"),
            *("--no-default-groups", f"--python={sys.executable}"),
            *(flag for extra in extras for flag in ("--extra", extra)),
            *(flag for group in groups for flag in ("--group", group)),
        ],
        cwd=root,
        purpose=f"recipe: the lock of {root}",
    )


def _select_own_pins(
    extras: Iterable[str], groups: Iterable[str], environment: Environment
) -> tuple[dict[str, Pin], dict[str, str]]:
    """Select from nrl's own lock, with the lock's overrides, in the checkout or in an installed wheel."""
    root = _NRL.parent
    if (root / "pyproject.toml").is_file() and (root / "uv.lock").is_file() and _is_nrl(root):
        return parse_pins(_export(root, extras, groups), root, environment), _read_overrides(root)
    texts = [path.read_text() for path in sorted((_NRL / "pylocks").glob("pylock.*.toml"))]
    carried = {tuple(tomllib.loads(text)["tool"]["nrl"]["extras"]): text for text in texts}
    lacking = [extra for extra in extras if (extra,) not in carried]
    if lacking or list(groups) or () not in carried:
        subject = f"the extra '{lacking[0]}'" if lacking else f"the group '{next(iter(groups), '')}'"
        raise ExecutableError(
            f"recipe: the installed nrl has no lock for {subject}; it has those of "
            f"{', '.join(sorted(key[0] for key in carried if key)) or 'nothing'}. Use `requirements` instead, or run "
            "from a uv project that depends on nrl and locks it"
        )
    pins: dict[str, Pin] = {}
    overrides: dict[str, str] = {}
    for key in ((), *((extra,) for extra in extras)):  # all from one lock, so they agree
        text = carried[key]
        pins |= parse_pins(text, _NRL, environment)
        lines = tomllib.loads(text)["tool"]["nrl"]["override-dependencies"]
        overrides |= {canonicalize_name(Requirement(line).name): line for line in lines}
    return pins, overrides


def _resolve(
    resolution: _Resolution, lines: list[str], pins: dict[str, Pin], overrides: Mapping[str, str]
) -> dict[str, Pin]:
    """Resolve the packages of a selection and of further requirements, in versions that agree."""
    executable, lock_project, cache, say = resolution
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
    python = choose_python(executable)
    key = hashlib.sha256("\0".join([*lines, constraints, forced, python, current_platform()]).encode()).hexdigest()[:16]
    path, root = cache / f"pylock.{key}.toml", lock_project.root if lock_project.kind != "wheel" else Path.cwd()
    few = lines if len(lines) < 6 else [*lines[:3], f"and {len(lines) - 3} more"]
    text = None if is_rebuild_forced() and path not in _RESOLVED else _read_resolution(path)
    if text is None:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            for name, content in (("constraints", constraints), ("overrides", forced)):
                (Path(scratch) / f"{name}.txt").write_text(content)
            text = run_uv(
                [
                    *("pip", "compile", "--quiet", "--no-header", "--format=pylock.toml", f"--python={sys.executable}"),
                    *(() if python == platform.python_version() else (f"--python-version={python}",)),
                    *("--constraint", f"{scratch}/constraints.txt", "--override", f"{scratch}/overrides.txt", "-"),
                ],
                cwd=root,
                say=say,
                purpose=f"recipe: the requirements {', '.join(few)} of executable '{executable.name}', with the "
                f"versions of the lock of {lock_project.root}",
                settings=uv_settings(),
                stdin="\n".join(lines),
            )
            (Path(scratch) / "pylock.toml").write_text(f"{_make_mark(text)}\n{text}")
            (Path(scratch) / "pylock.toml").rename(path)
        _RESOLVED.add(path)
    return {**parse_pins(text, root, marker_environment(executable)), **pins}


def _read_resolution(path: Path) -> str | None:
    """Read an earlier resolution, if it is complete: a machine that stops may leave an empty file."""
    try:
        mark, _, text = path.read_text().partition("\n")
    except (OSError, ValueError):
        return None
    if mark != _make_mark(text):
        return None
    mark_used(path)
    return text


def _make_mark(text: str) -> str:
    return f"# sha256 of what follows: {hashlib.sha256(text.encode()).hexdigest()}"
