"""A folder with all that an executable needs, for hosts without a network.

uv installs from such a folder (``UV_OFFLINE=1 UV_FIND_LINKS=FOLDER``), but it does not fill one, so pip does. The lines
are those that a node would install, with the lock's hashes, which both compare with each file.
"""

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from nrl.errors import ExecutableError
from nrl.runtime.venvs.environments import default_folder
from nrl.runtime.venvs.installer import run_uv
from nrl.runtime.venvs.locks import find_project, select_pins, uv_settings
from nrl.runtime.venvs.registry import Executable, executable

__all__ = ["collect"]

_ARCHIVES = (".tar.gz", ".tgz", ".zip")
_SETUPTOOLS = ["setuptools>=40.8.0", "wheel"]  # PEP 517: what builds a package that does not say
_ASK = """
import functools, importlib, json, sys
sys.path[:0] = sys.argv[2:]
module, _, name = sys.argv[1].partition(":")
backend = functools.reduce(getattr, filter(None, name.split(".")), importlib.import_module(module))
hooks = [getattr(backend, f"get_requires_for_build_{kind}", list) for kind in ("wheel", "editable")]
print(json.dumps([line for hook in hooks for line in hook()]))
"""


def collect(names: Iterable[str | Executable], folder: Path, say: Callable[[str], None] = print) -> list[Path]:
    """Download the packages of executables, and the build requirements of packages that are no wheels.

    Args:
        names: the executables, or their names.
        folder: gets the files, and ``<executable>.txt``, the lines that say which ones it needs.
        say: gets a line for each executable.

    Returns:
        The files with lines.

    Raises:
        PlacementError: no executable has this name.
        ExecutableError: a package comes from no index, or cannot be downloaded; or this Python has no pip.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lists, builders, of_lock = list[Path](), set[str](), set[str]()
    for chosen in map(executable, names):
        pins = select_pins(chosen, find_project(), default_folder() / ".resolved", say)
        unindexed = [pin.name for pin in pins.values() if pin.line and not pin.line.startswith(f"{pin.name}==")]
        if unindexed:
            raise ExecutableError(
                f"wheels: executable '{chosen.name}' has {', '.join(unindexed)} from no index, so no folder can stand "
                "in for where it comes from; depend on a wheel of it in a folder or an index, or take uv's cache along "
                "instead (docs/dependencies.md)"
            )
        lines, origins = sorted(pin.line for pin in pins.values() if pin.line), {pin.origin for pin in pins.values()}
        file = folder / f"{chosen.name}.txt"
        file.write_text("".join(f"{line}\n" for line in lines))
        say(f"{chosen.name}: {len(lines)} packages into {folder}")
        _download(file, folder, ["--no-deps"], [_strip_index_name(origin) for origin in origins if origin])
        sources = {pin.path for pin in pins.values() if pin.path and pin.path.suffix != ".whl"}
        builders |= {
            line for path in sources for line in [*_build_requirements(path), *_extra_build_requirements(path, say)]
        }
        of_lock |= {f"{pin.name}=={pin.version}\n" for pin in pins.values() if pin.name == "uv"}
        lists.append(file)
    builders |= {
        line for file in folder.iterdir() if file.name.endswith(_ARCHIVES) for line in _build_requirements(file)
    }
    if builders:
        with tempfile.TemporaryDirectory() as scratch:
            build_lines, constraints = Path(scratch) / "build.txt", Path(scratch) / "constraints.txt"
            build_lines.write_text("".join(f"{line}\n" for line in sorted(builders)))
            constraints.write_text("".join(of_lock))  # Two versions of uv would both be unpacked.
            _download(build_lines, folder, [f"--constraint={constraints}"], [])
        say(f"what builds packages that are no wheels: {', '.join(sorted(builders))}")
    return lists


def _build_system(path: Path) -> dict[str, Any]:
    """Read the table `build-system` of a folder or a source archive; empty if it is missing."""
    text = ""
    with contextlib.suppress(FileNotFoundError, KeyError):
        if path.is_dir():
            text = (path / "pyproject.toml").read_text()
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as zipped:
                text = zipped.read(f"{zipped.namelist()[0].split('/')[0]}/pyproject.toml").decode()
        else:
            with tarfile.open(path) as archive:
                file = archive.extractfile(f"{archive.getnames()[0].split('/')[0]}/pyproject.toml")
                text = file.read().decode() if file else ""
    table: dict[str, Any] = tomllib.loads(text).get("build-system", {})
    return table


def _build_requirements(path: Path) -> list[str]:
    """Return the requirements to build a folder or a source archive."""
    return [str(line) for line in _build_system(path).get("requires", _SETUPTOOLS)]


def _extra_build_requirements(path: Path, say: Callable[[str], None]) -> list[str]:
    """Return the further requirements of a folder's build backend, which it reports when it runs."""
    if not path.is_dir():
        return []
    table = _build_system(path)
    backend, backend_path = (
        table.get("build-backend", "setuptools.build_meta:__legacy__"),
        table.get("backend-path", []),
    )
    command = ["run", "--quiet", "--no-project", "--isolated", f"--python={sys.executable}"]
    command += [*(f"--with={line}" for line in _build_requirements(path)), "python", "-c", _ASK, backend, *backend_path]
    answer = (
        run_uv(command, cwd=path, purpose=f"wheels: what builds {path}", settings=uv_settings(), say=say)
        .strip()
        .splitlines()[-1]
    )
    return [str(line) for line in json.loads(answer)]


def _download(lines: Path, folder: Path, options: Iterable[str], indexes: Iterable[str]) -> None:
    command = [
        *_find_pip(),
        "download",
        "--quiet",
        "--disable-pip-version-check",
        f"--dest={folder}",
        f"-r{lines}",
        *options,
    ]
    command += [*_index_options(uv_settings()), *(f"--extra-index-url={index}" for index in indexes)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        last = "\n".join(f"    {line}" for line in run.stderr.splitlines()[-15:])
        raise ExecutableError(f"wheels: `pip download -r {lines.name}` fails; its last lines:\n{last}")


def _find_pip() -> list[str]:
    """Find a command that runs pip: this Python's, its base Python's, or the bundled one."""
    base = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
    for python in (sys.executable, base):
        if subprocess.run([python, "-Ic", "import pip"], capture_output=True).returncode == 0:
            return [python, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")  # the wheel that Python makes new environments with; starts slowly
    bundled = sorted(Path(str(spec.origin)).parent.glob("_bundled/pip-*.whl")) if spec else []
    if not bundled:
        raise ExecutableError(
            f"wheels: {sys.executable} has no pip, which downloads packages; install it with `uv pip install pip`"
        )
    return [sys.executable, f"{bundled[-1]}/pip"]


def _index_options(of_uv: Mapping[str, str]) -> list[str]:
    """Return uv's variables for indexes as options of pip; without them, pip has its own configuration."""
    default = of_uv.get("UV_DEFAULT_INDEX") or of_uv.get("UV_INDEX_URL")
    extra = f"{of_uv.get('UV_INDEX', '')} {of_uv.get('UV_EXTRA_INDEX_URL', '')}".split()
    folders = of_uv.get("UV_FIND_LINKS", "").replace(",", " ").split()
    return [
        *([f"--index-url={_strip_index_name(default)}"] if default else []),
        *(f"--extra-index-url={_strip_index_name(entry)}" for entry in extra),
        *(f"--find-links={entry}" for entry in folders),
    ]


def _strip_index_name(index: str) -> str:
    return re.sub(r"^[\w.-]+=", "", index)
