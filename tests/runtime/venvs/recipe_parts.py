"""Small wheels, and recipes of them, that need neither an index nor a build; and processes that build them."""

import base64
import contextlib
import dataclasses
import functools
import hashlib
import http.server
import io
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import filelock

from nrl.runtime.ray.nodes import PORTABLE
from nrl.runtime.venvs import environments
from nrl.runtime.venvs.building import ensure_env
from nrl.runtime.venvs.environments import DISTRIBUTION, Recipe, current_platform
from nrl.runtime.venvs.installer import run_uv
from nrl.runtime.venvs.wheels import Wheel, content_digest

__all__ = [
    "BACKEND",
    "bare_builder",
    "changed",
    "held",
    "hidden",
    "index_of",
    "project_of",
    "recipe_of",
    "run",
    "slow_source",
    "to_install",
    "wheel_of",
]

BASE = str(Path(sys._base_executable).resolve())  # type: ignore[attr-defined]


def wheel_of(name: str, version: str = "1.0", source: str = "", *, script: bool = False) -> Wheel:
    """A wheel with one module, which has the package's name; with `script`, a command of that name prints its file."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": source + "\ndef main():\n    print(__file__)\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if script:
        files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{name} = {name}:main\n"
    record = ""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in files.items():
            hashed = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={hashed},{len(text.encode())}\n"
            archive.writestr(path, text)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return Wheel(f"{name}-{version}-py3-none-any.whl", buffer.getvalue())


def recipe_of(*wheels: Wheel, executable: str = "tiny", requirements: Iterable[str] = (), **more: Any) -> Recipe:
    """The recipe that consists of these wheels, and of lines that are installed as they are."""
    packages = {
        wheel.name.split("-")[0]: {"version": wheel.version, "source": "local", "digest": content_digest(wheel)[:16]}
        for wheel in wheels
    }
    for line in requirements:
        name = line.replace("=", " ").split()[0]
        packages[name] = {"version": "1.0", "source": "index", "digest": hashlib.sha256(line.encode()).hexdigest()[:16]}
    python = ".".join(map(str, sys.version_info[:3]))
    inventory = {
        "format": 1,
        "python": python,
        "platform": current_platform(),
        "packages": dict(sorted(packages.items())),
    }
    return Recipe(
        name=f"{executable}-{hashlib.sha256(repr(inventory).encode()).hexdigest()[:12]}",
        executable=executable,
        python=python,
        platform=current_platform(),
        requirements=tuple(requirements),
        wheels={wheel.name: wheel.content for wheel in wheels},
        inventory=inventory,
        **more,
    )


def run(*command: str | Path, **env: str) -> str:
    """What a command prints that ends well."""
    done = subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, timeout=120, env={**os.environ, **env}, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def changed(recipe: Recipe, **changes: Any) -> Recipe:
    """A recipe but for some of its fields."""
    return dataclasses.replace(recipe, **changes)


def hidden(folder: Path) -> list[str]:
    """What builders left in the folder, but for locks."""
    return [each.name for each in folder.iterdir() if each.name.startswith(".") and not each.name.endswith(".lock")]


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # uv asks for a hundred packages at once


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def index_of(folder: Path, *wheels: Wheel) -> Iterator[tuple[list[str], dict[str, str]]]:
    """An index of these wheels, which this process serves: their lines, and uv's settings for it."""
    lines = []
    for wheel in wheels:
        place = folder / wheel.name.split("-")[0]
        place.mkdir(parents=True, exist_ok=True)
        (place / wheel.name).write_bytes(wheel.content)
        digest = hashlib.sha256(wheel.content).hexdigest()
        with (place / "index.html").open("a") as page:  # which has a line for each version
            page.write(f'<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>\n')
        lines.append(f"{place.name}=={wheel.version} --hash=sha256:{digest}")
    handler = functools.partial(_Quiet, directory=str(folder))
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield (
                lines,
                {
                    "UV_DEFAULT_INDEX": f"http://127.0.0.1:{server.server_port}",
                    "UV_CACHE_DIR": str(folder.parent / "cache"),
                    "UV_HTTP_RETRIES": "0",
                },
            )
        finally:
            server.shutdown()
            thread.join()


BACKEND = """
import pathlib, zipfile
info = "{package}-1.0.dist-info"
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / "{package}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("{name}/__init__.py", pathlib.Path("{name}/__init__.py").read_text())
        archive.writestr(info + "/METADATA", "Metadata-Version: 2.1\\nName: {package}\\nVersion: 1.0\\n")
        archive.writestr(info + "/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(info + "/RECORD", "{name}/__init__.py,,\\n")
    return "{package}-1.0-py3-none-any.whl"
def build_editable(*arguments):
    raise RuntimeError("never needed")
"""


def project_of(folder: Path) -> Path:
    """A uv project with its lock, which counts because a package in the place of nrl is in it."""
    root = folder / "project"
    for path, name, package in (
        (root, "app", "app"),
        (root / "libs" / "nrl", "nrl", DISTRIBUTION.replace("-", "_")),
    ):
        (path / name).mkdir(parents=True)
        (path / name / "__init__.py").write_text("x = 1\n")
        (path / "backend.py").write_text(BACKEND.format(name=name, package=package))
    (root / "pyproject.toml").write_text(
        '[project]\nname = "app"\nversion = "0.1"\nrequires-python = ">=3.12"\n'
        f'dependencies = ["{DISTRIBUTION}", "one"]\n'
        '[project.optional-dependencies]\nextra = ["two"]\n'
        '[dependency-groups]\ndev = ["three"]\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[tool.uv.sources]\n{DISTRIBUTION} = {{ path = "libs/nrl", editable = true }}\n'
    )
    (root / "libs" / "nrl" / "pyproject.toml").write_text(
        f'[project]\nname = "{DISTRIBUTION}"\nversion = "9.9"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    run_uv(["lock", "--quiet", f"--python={sys.executable}"], cwd=root)
    return root


def to_install(root: Path, file: str = "app.pth") -> None:
    """Let the project's wheel have a file for which it has to be installed."""
    mark = '        archive.writestr("app/'
    text = (root / "backend.py").read_text()
    (root / "backend.py").write_text(text.replace(mark, f'        archive.writestr("{file}", "")\n{mark}', 1))


def slow_source(folder: Path) -> str:
    """A line of requirements for a package whose build says that it has begun, and then waits for the file `go`."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "slow"\nversion = "1.0"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    wheel = wheel_of("slow")
    (folder / "backend.py").write_text(
        "import pathlib, time\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):\n"
        "    (folder / 'begun').touch()\n"
        "    until = time.monotonic() + 60\n"
        "    while not (folder / 'go').exists() and time.monotonic() < until:\n"
        "        time.sleep(0.02)\n"
        f"    (pathlib.Path(wheel_directory) / {wheel.name!r}).write_bytes({wheel.content!r})\n"
        f"    return {wheel.name!r}\n"
    )
    return f"slow @ {folder.as_uri()}"


def bare_builder(recipe: Recipe, folder: Path, scratch: Path, *, prelude: str = "") -> subprocess.Popen[str]:
    """A process that provides the recipe with a Python that has no nrl, as on a node; it prints the interpreter.

    `provide` goes there by value, together with the recipe.
    """
    site = scratch / "site"
    if not site.exists():
        site.mkdir(parents=True)
        for package in (cloudpickle, filelock):
            shutil.copytree(Path(str(package.__file__)).parent, site / package.__name__)
    for module in PORTABLE:
        cloudpickle.register_pickle_by_value(module)
    try:
        shipped = cloudpickle.dumps((ensure_env, recipe))
    finally:
        for module in PORTABLE:
            cloudpickle.unregister_pickle_by_value(module)
    (scratch / "shipped").write_bytes(shipped)
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import importlib.util; assert importlib.util.find_spec('nrl') is None\n"
        f"import pickle; provide, recipe = pickle.load(open({str(scratch / 'shipped')!r}, 'rb'))\n"
        f"{prelude}\n"
        f"print(provide(recipe, folder={str(folder)!r}, say=lambda line: print(line, file=sys.stderr, flush=True)))\n"
    )
    return subprocess.Popen(
        [BASE, "-I", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=scratch
    )


@contextlib.contextmanager
def held(env: Path) -> Iterator[None]:
    """While entered, a process runs in an environment, as those of a mesh do."""
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import environments as p; p.lock_env(p.Path(sys.argv[2]))"
    )
    command = [
        sys.executable,
        "-c",
        f"{program}; print(flush=True); time.sleep(600)",
        Path(environments.__file__).parent,
    ]
    with subprocess.Popen([*map(str, command), str(env)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield
        finally:
            process.kill()
