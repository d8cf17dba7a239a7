"""A program outside of the repository: its own functions, its own package, an executable of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

PACKAGE = """
import dataclasses

FACTOR = 3

@dataclasses.dataclass
class Answer:
    text: str

class Mistake(Exception):
    pass

def tripled(x):
    return FACTOR * x
"""

SCRIPT = """
import asyncio
import pathlib
import sys

import torch

import nrl
from mine.helpers import Answer, Mistake, tripled

OFFSET = 1.0

nrl.register(nrl.Executable("moo", requirements=["cowsay==6.1"], env={"COW": "daisy"}))


def said(text):
    import os

    import cowsay

    return Answer(cowsay.get_output_string("cow", f"{text} {os.environ['COW']}")), sys.prefix


def shifted(x):
    return tripled(x) + OFFSET


def has_cowsay(task, trace):
    import cowsay

    return tripled(len(cowsay.char_names) > 0)


def fails():
    raise Mistake("of mine")


if __name__ == "__main__":
    try:
        import cowsay
    except ImportError:
        print("the driver has no cowsay")
    with nrl.cluster("ray") as cluster:
        mesh = cluster.reserve(1).mesh(executable="moo", name="herd")
        answer, prefix = nrl.shard_map(said, mesh, nrl.P(), nrl.P())("hello").result()
        assert isinstance(answer, Answer), type(answer)
        print(answer.text)
        print(pathlib.Path(prefix).name)
        print(nrl.shard_map(shifted, mesh, nrl.P("dp"), nrl.P("dp"))(torch.arange(3.0)).result().tolist())
        verify = nrl.on(mesh)(nrl.pooled(has_cowsay, workers=1, executable="moo"))  # there is no lock, where it runs
        print("the score is", asyncio.run(verify({}, nrl.envs.Trace())))
        try:
            nrl.shard_map(fails, mesh, (), nrl.P())().result()
        except Mistake as error:
            print("caught", error)
"""


def test_a_script_of_ones_own_with_an_executable_of_ones_own(tmp_path: Path) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "mine").mkdir(parents=True)
    elsewhere.mkdir()
    (project / "mine" / "__init__.py").touch()
    (project / "mine" / "helpers.py").write_text(PACKAGE)
    (project / "program.py").write_text(SCRIPT)
    environment = {**os.environ, "NRL_VENV_DIR": str(tmp_path / "venvs")}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, str(project / "program.py")],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the driver has no cowsay" in done.stdout
    assert "| hello daisy |" in done.stdout
    assert "\nmoo-" in done.stdout
    assert "[1.0, 4.0, 7.0]" in done.stdout
    assert "caught of mine" in done.stdout
    assert "the score is 3" in done.stdout
    assert [path.name[:4] for path in (tmp_path / "venvs").glob("moo-*")] == ["moo-"]
