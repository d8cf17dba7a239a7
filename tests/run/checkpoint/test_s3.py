"""Checkpoints by the API of S3, which a server on this machine speaks."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["alone", pytest.param("on_ray", marks=pytest.mark.ray)])
def test_a_run_whose_checkpoints_are_in_s3(part: str, tmp_path: Path) -> None:
    """Resumed to the bit, elsewhere; pruned, exported; a damaged part, a wrong bucket, and no server at all."""
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    extra = ["--with", "moto[server]>=5", "--with", "s3fs"]
    command = [uv, "run", "--no-sync", *extra, "python"]
    probe = subprocess.run([*command, "-c", "import moto, s3fs"], cwd=ROOT, capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"moto and s3fs cannot be installed here: {probe.stderr[-300:]}")
    program = [*command, "-m", "tests.checkpoint.on_s3", str(tmp_path), part]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
