"""`nrl gym init`: what it writes passes its own test and the audit, and what is there is not touched."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples import grpo
from nrl import tiny
from nrl.cli.cli import main
from nrl.envs.types import is_env
from nrl.gym.config.resolving import ask
from nrl.gym.config.run_registry import places
from nrl.gym.config.servers import gym

EXAMPLES = Path(grpo.__file__).parent


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_it_writes_passes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gym", "init", "games/find_it"]) == 0
    assert "cd games/find_it && pytest && nrl gym run gym.yaml" in capsys.readouterr().out
    made = folder / "games" / "find_it"
    assert sorted(each.name for each in made.iterdir()) == [
        ".gitignore", "README.md", "find_it.py", "gym.yaml", "test_find_it.py",
    ]  # fmt: skip
    assert not any("NAME" in each.read_text() for each in made.iterdir())
    assert max(len(line) for each in made.iterdir() for line in each.read_text().splitlines()) <= 120
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(made), str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=made)
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    monkeypatch.chdir(made)
    assert main(["gym", "test", "find_it.py:env", "limit=20"]) == 0
    assert gym(["gym.yaml"]).servers["find_it"].environment == "find_it.py:env"
    assert gym(["gym.yaml"]).folder() == made
    names: dict[str, object] = {}
    exec((made / "find_it.py").read_text(), names)
    assert is_env(names["env"])


@pytest.mark.slow
def test_every_command_of_its_page_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model that is there, and any port that is free."""
    monkeypatch.setenv("NRL_GYM_DIR", str(folder / "gyms"))
    assert main(["gym", "init", "find_it"]) == 0
    made = folder / "find_it"
    tiny.save(tiny.model(), folder / "model")
    page, training = (each.partition("```")[0] for each in (made / "README.md").read_text().split("```sh\n")[1:])
    running = list[subprocess.Popen[bytes]]()
    put = {"Qwen/Qwen3-0.6B": str(folder / "model"), "pytest": "-m pytest -p no:cacheprovider", "nrl": "-m nrl"}
    try:
        for line in page.splitlines():
            program, *words = shlex.split(line, comments=True)
            words = [value.replace("Qwen/Qwen3-0.6B", put["Qwen/Qwen3-0.6B"]) for value in words]
            command = [sys.executable, *put[program].split(), *words]
            if words[:2] == ["gym", "run"]:
                running.append(subprocess.Popen([*command, "head_server.port=0"], cwd=made))
                while not (places() and ask(places()[0])["ready"]):
                    assert running[0].poll() is None
                    time.sleep(0.05)
                continue
            done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=made)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        program, script, *words = shlex.split(training.splitlines()[0], comments=True)
        less = ["steps=1", "prompts=2", "group_size=2", "evaluate_prompts=2", "out=out"]
        command = [sys.executable, script.replace("NRL", str(EXAMPLES.parent)), *words, *less]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=made)
        assert (program, done.returncode) == ("python", 0), done.stdout + done.stderr
        assert "env: gym.yaml" in (made / "out" / "config.yaml").read_text()
    finally:
        for each in running:
            each.terminate()
            assert each.wait(300) == 143
    assert len(running) == 1
    assert len(page.splitlines()) == 5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "gym init: found no name; give one name, as in nrl gym init guess"),
        (("a", "b"), "gym init: found a b; give one name"),
        (("name=a",), "gym init: found name=a; give one name"),
        (("--force",), "gym init: found --force; give one name"),
        (
            ("My-Game",),
            "gym init: 'My-Game' cannot name a file of Python; use small letters, digits and _",
        ),
        (("class",), "gym init: 'class' cannot name a file of Python"),
        (("math",), "gym init: math is a module of Python's own, which the new file would hide; choose another name"),
        (("torch",), "gym init: torch is a package that is needed here, which the new file would hide"),
        (("here",), "gym init: here is there already, and nothing of it was touched; choose another name"),
    ],
)
def test_mistakes_are_told(
    folder: Path, args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "here").mkdir()
    (folder / "here" / "mine").write_text("mine")
    assert main(["gym", "init", *args]) == 2
    assert message in capsys.readouterr().err
    assert [str(each.relative_to(folder)) for each in folder.rglob("*")] == ["here", "here/mine"]


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gym", "init", "--help"]) == 0
    assert "usage: nrl gym init NAME" in capsys.readouterr().out
