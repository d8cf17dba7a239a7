"""What an `Executable` gives to its processes is known to them, and stands in no log of Ray."""

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]

_PROGRAM = """
import os, sys, time
import ray, torch
import nrl
from nrl.runtime import Executable, P, shard_map

SECRET, OWN = sys.stdin.read().split()
os.environ["OWN_TOKEN"] = OWN  # of the program itself, as HF_TOKEN often is

def seen(x):
    return x, [os.environ.get("SERVICE_TOKEN"), os.environ.get("TORCH_CPP_LOG_LEVEL"), os.environ["OMP_NUM_THREADS"]]

def fails(x):
    raise ValueError("no")

env = {"SERVICE_TOKEN": SECRET, "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "3"}
with nrl.cluster("ray", deadline=100) as cluster:
    slots = cluster.reserve(2)
    mesh = slots.mesh(executable=Executable("system", env=env), name="told")
    _, found = shard_map(seen, mesh, P("dp"), (P("dp"), P()))(torch.ones(2))
    assert found.result() == [SECRET, "ERROR", "3"], found.result()
    try:
        shard_map(fails, mesh, P("dp"), P("dp"))(torch.ones(2)).result()
    except ValueError as error:
        assert SECRET not in str(error.__notes__)
    broken = slots.mesh(executable=Executable("system", env=env | {"PYTHONPATH": sys.argv[1]}), name="broken")
    try:
        shard_map(seen, broken, P("dp"), (P("dp"), P()))(torch.ones(2))[1].result()
    except nrl.errors.ClusterError as error:
        print("broken", type(error).__name__)
        assert SECRET not in str(error)
    time.sleep(2)  # in which Ray writes
    print("session", ray._private.worker._global_node.get_session_dir_path())
"""


@pytest.fixture
def short() -> Iterator[Path]:
    """Ray's folder has sockets, whose paths may not be long."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def test_no_log_of_ray_has_a_value(tmp_path: Path, short: Path) -> None:
    """Also not where a process does not start, which Ray and nrl say much about."""
    bad = tmp_path / "bad"
    (bad / "torch").mkdir(parents=True)
    (bad / "torch" / "__init__.py").write_text("raise ImportError('not this one')")
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    given = [secrets.token_hex(16) for _ in range(2)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(short)}
    command = [sys.executable, str(program), str(bad)]
    done = subprocess.run(
        command, input=" ".join(given), env=variables, capture_output=True, text=True, cwd=tmp_path, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert "broken FailedStart" in done.stdout
    session = Path(done.stdout.rpartition("session ")[2].strip())
    files = [path for path in session.rglob("*") if path.is_file()]
    logs = {path: path.read_bytes() for path in files}
    assert any(b"OMP_NUM_THREADS" in text for text in logs.values())  # those that have to be there early are in them
    for value in given:
        assert [(path, oct(path.stat().st_mode)) for path, text in logs.items() if value.encode() in text] == []
        assert value not in done.stdout + done.stderr
