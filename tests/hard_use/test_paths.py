"""Folders with spaces and other characters that a shell reads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
ODD = """my $(project); it's "mine" & yours"""

_ADDS_UP = """
import sys
import torch
import nrl
from nrl.runtime import P, shard_map

def doubled(x):
    return 2 * x, [sys.executable]

with nrl.cluster("ray", deadline=100) as cluster:
    mesh = cluster.reserve(2).mesh(executable="system", name="odd")
    total, where = shard_map(doubled, mesh, P("dp"), (P("dp"), P()))(torch.ones(4))
    print(total.result().sum().item(), where.result() == [sys.executable])
"""


def test_the_processes_of_a_project_start_whatever_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / ODD
    folder.mkdir()
    (folder / ".venv").symlink_to(Path(sys.prefix))
    (folder / "program.py").write_text(_ADDS_UP)
    python = folder / ".venv" / "bin" / "python"
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(python), "program.py"], cwd=folder, env=variables, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "8.0 True"
