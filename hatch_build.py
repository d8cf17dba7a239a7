"""The build hook of the wheel: what a plain installation needs to build executables, which is the lock.

Overrides and the lock itself are no part of a wheel's metadata, so each selection of the lock goes into it as
`nrl/pylocks/pylock.<executable>.toml`, in the standard format of PEP 751.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__all__ = ["Pylocks"]


class Pylocks(BuildHookInterface):
    """Exports the selections that `tool.hatch.build.targets.wheel.hooks.custom.pylocks` in pyproject.toml names."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to a wheel; an editable installation has the lock beside it."""
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="nrl-pylocks-")
        for name, extras in self.config["pylocks"].items():
            path = Path(self._folder.name) / f"pylock.{name}.toml"
            path.write_text(export(Path(self.root), extras))
            build_data["force_include"][str(path)] = f"nrl/pylocks/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was exported."""
        if version != "editable":
            self._folder.cleanup()


def export(root: Path, extras: list[str]) -> str:
    """The packages of the lock under these extras, without nrl itself, and the overrides that it was resolved with."""
    from uv import find_uv_bin

    flags = [flag for extra in extras for flag in ("--extra", extra)]
    command = [find_uv_bin(), "export", "--quiet", "--frozen", "--format=pylock.toml", "--no-header"]
    command += ["--no-default-groups", "--no-emit-project", f"--python={sys.executable}", *flags]
    strange = ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")
    environment = {key: value for key, value in os.environ.items() if key not in strange}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` in {root} fails:\n{done.stderr}")
    overrides = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["uv"]["override-dependencies"]
    lines = "".join(f'    "{line}",\n' for line in overrides)
    return f"{done.stdout.rstrip()}\n\n[tool.nrl]\nextras = {json.dumps(extras)}\noverride-dependencies = [\n{lines}]\n"
