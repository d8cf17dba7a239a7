"""What is no test: a program for a Python that has NeMo Gym; and that Python."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._nemo_gym import installed

collect_ignore = ["nemo_gym_process.py"]
_MORE = ["reasoning-gym>=0.1.19", "openapi-schema-validator==0.6.3", "tomli-w==1.2.0", "xmltodict==1.0.2"]


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with nemo-gym and what the servers of the tests need."""
    found = installed(tmp_path_factory.mktemp("nemo") / "env")
    subprocess.run([sys.executable, "-m", "uv", "pip", "install", "-q", "-p", str(found), *_MORE], check=True)
    return found
