"""Build wheels that no index has: nrl itself, a user's project, and the folders that it depends on."""

import base64
import contextlib
import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path, PurePosixPath

import attrs

from nrl.errors import ExecutableError
from nrl.runtime.venvs.environments import DISTRIBUTION, current_platform, mark_used, parse_package
from nrl.runtime.venvs.installer import run_uv

__all__ = ["Wheel", "build_wheel", "content_digest", "repack"]


@attrs.frozen
class Wheel:
    """A wheel: its file name, and its content."""

    name: str
    content: bytes = attrs.field(repr=False)

    @property
    def package(self) -> str:
        """Normalised name of the package."""
        return parse_package(self.name)

    @property
    def version(self) -> str:
        """The version in the file's name."""
        return self.name.split("-")[1]

    def works_anywhere(self) -> bool:
        """Return whether the files need no installation: Python code alone, without scripts or data."""
        with zipfile.ZipFile(io.BytesIO(self.content)) as archive:
            elsewhere = [name for name in archive.namelist() if ".data/" in name or name.endswith(".pth")]
        return self.name.endswith("-none-any.whl") and not elsewhere


def build_wheel(path: Path, cache: Path, say: Callable[[str], None] | None = None) -> Wheel:
    """Build the wheel of a folder or of a source archive; the wheel of an unchanged folder comes from the cache.

    Args:
        path: the folder with its pyproject.toml, or a file; a wheel is returned as it is.
        cache: a folder for wheels.
        say: gets a line of progress now and then.

    Raises:
        ExecutableError: there is nothing at ``path``, or it cannot be built.
    """
    if not path.exists():
        raise ExecutableError(f"recipe: the lock depends on {path}, which is not there")
    if path.suffix == ".whl":
        return Wheel(path.name, path.read_bytes())
    if path == Path(__file__).resolve().parents[3]:  # the nrl that runs here needs no build backend
        with contextlib.suppress(PackageNotFoundError):
            return repack(Distribution.from_name(DISTRIBUTION), path / "nrl")
    # On a node nrl's own wheel needs no locks; with them, any change of the lock would change the wheel
    hooks = {"HATCH_BUILD_NO_HOOKS": "true"} if (path / "nrl" / "runtime" / "__init__.py").is_file() else {}
    key = hashlib.sha256(f"{_tree_digest(path)} {sys.version} {current_platform()} {hooks}".encode()).hexdigest()[:16]
    cached = cache / key
    with contextlib.suppress(OSError, zipfile.BadZipFile):  # not there, not whole, or somebody removes it
        return _wheel_in(cached)
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".building.", dir=cache))
    try:
        arguments = ["build", "--quiet", "--wheel", f"--python={sys.executable}", f"--out-dir={scratch}", str(path)]
        run_uv(arguments, cwd=cache, purpose=f"recipe: the wheel of {path}", settings=hooks, say=say)
        wheel = _wheel_in(scratch)
        shutil.rmtree(cached, ignore_errors=True)
        with contextlib.suppress(OSError):  # another process was faster
            scratch.rename(cached)
        return wheel
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _wheel_in(folder: Path) -> Wheel:
    """Read the wheel in a folder; raise unless it is complete."""
    file = next(folder.glob("*.whl"), folder / "wheel")
    content = file.read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)):  # its directory is at the end
        pass
    mark_used(folder)
    return Wheel(file.name, content)


def _tree_digest(path: Path) -> str:
    """Compute a digest of the files that a wheel is built from: files that git does not ignore; without git, all."""
    digest = hashlib.sha256()
    for file in sorted(_files(path)):
        inside = file.relative_to(path) if path.is_dir() else file.name
        digest.update(f"{inside}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--exclude=__pycache__"]
    variables = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        run = subprocess.run(git, cwd=path, env=variables, capture_output=True, text=True, check=True, timeout=60)
        listing = run.stdout
    except (OSError, subprocess.SubprocessError):
        listing = ""
    if listing:
        for name in listing.split("\0"):
            file = path / name
            if name and file.is_dir() and not file.is_symlink():  # a submodule
                yield from _files(file)
            elif name and file.is_file():
                yield file
        return
    skipped = {"__pycache__", "build", "dist", "node_modules", "venv"}
    for folder, names, files in os.walk(path):
        names[:] = [
            folder_name
            for folder_name in names
            if folder_name not in skipped and not folder_name.startswith(".") and ".egg-info" not in folder_name
        ]
        yield from (Path(folder) / file for file in files if not file.endswith(".pyc"))


def content_digest(wheel: Wheel) -> str:
    """Compute a digest of the files that a wheel installs; dates and most metadata do not change it."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(io.BytesIO(wheel.content)) as archive:
        for name in sorted(archive.namelist()):
            content = archive.read(name)
            if ".dist-info/" in name:
                if name.endswith(("/RECORD", "/WHEEL")) or "/licenses/" in name:
                    continue
                if name.endswith("/METADATA"):
                    head = content.split(b"\n\n")[0].splitlines()
                    content = b"\n".join(sorted(line for line in head if line.startswith((b"Name:", b"Version:"))))
            digest.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


def repack(distribution: Distribution, modules: Path | None = None) -> Wheel:
    """Make a wheel of the files of a package that is installed in this environment.

    Args:
        distribution: the installed package.
        modules: of an editable package, the folder of its modules.

    Raises:
        ExecutableError: its record does not list its files, or some of them are gone.
    """
    name = distribution.metadata["Name"]
    files = [
        file
        for row in csv.reader((distribution.read_text("RECORD") or "").splitlines())
        if row and not (file := PurePosixPath(row[0])).is_absolute() and not {"..", "pylocks"} & {*file.parts}
    ]
    left_out = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json")
    # Installing with `--target` writes them anew.
    scripts = {PurePosixPath("bin", entry.name) for entry in distribution.entry_points}
    files = [
        file
        for file in files
        if file.suffix != ".pyc"
        and file not in scripts
        and not (file.parts[0].endswith(".dist-info") and file.name in left_out)
    ]
    info = next((file.parts[0] for file in files if file.parts[0].endswith(".dist-info")), None)
    missing = [str(file) for file in files if not Path(str(distribution.locate_file(file))).is_file()]
    if info is None or missing:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}").get("url", "its index")
        raise ExecutableError(
            f"recipe: the installed package {name} cannot be sent to other nodes, because "
            + (f"its file {missing[0]} is gone" if missing else "its record lists no files")
            + f"; install it again with `uv pip install --reinstall`, from {origin}"
        )
    tag = next(
        (
            line.split(":")[1].strip()
            for line in (distribution.read_text("WHEEL") or "").splitlines()
            if line.startswith("Tag:")
        ),
        "py3-none-any",
    )
    contents = {str(file): Path(str(distribution.locate_file(file))).read_bytes() for file in files}
    if modules is not None:
        contents = {entry: content for entry, content in contents.items() if entry.startswith(info)}  # no .pth
        sources = [file for file in _files(modules) if file.suffix != ".pyc"]
        contents |= {file.relative_to(modules.parent).as_posix(): file.read_bytes() for file in sources}
    buffer, record = io.BytesIO(), []
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(inside: str, content: bytes) -> None:
            archive.writestr(zipfile.ZipInfo(inside, (1980, 1, 1, 0, 0, 0)), content)

        for entry, content in sorted(contents.items()):
            hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{entry},sha256={hashed},{len(content)}\n")
            add(entry, content)
        add(f"{info}/RECORD", "".join([*record, f"{info}/RECORD,,\n"]).encode())
    return Wheel(f"{info.removesuffix('.dist-info')}-{tag}.whl", buffer.getvalue())
