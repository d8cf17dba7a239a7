"""A user's mistake, in every example and in the command: a few lines that say what to do, and nothing left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nrl import tiny

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NRL = [sys.executable, "-m", "nrl"]


def refused(command: list[str], here: Path, status: int = 2) -> list[str]:
    """The lines of a command that cannot do what it was asked, and left nothing but what was there."""
    before = sorted(here.rglob("*"))
    environment = {name: value for name, value in os.environ.items() if name != "NRL_TRACEBACK"}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=240)
    lines = done.stderr.splitlines()
    assert done.returncode == status, done.stderr
    assert 1 <= len(lines) <= 3, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "\x1b" not in done.stderr
    assert sorted(here.rglob("*")) == before
    return lines


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples(path: Path, tmp_path: Path) -> None:
    lines = refused([sys.executable, str(path), "stps=5"], tmp_path)
    assert lines == [f"{path.name}: load(Config): 1 problem", lines[1]]
    assert "stps: no such key; did you mean 'steps'?" in lines[1]
    for asked in ("model=./nowhere", "out=new/folder data=nowhere.jsonl"):
        lines = refused([sys.executable, str(path), *asked.split(" ")], tmp_path)
        assert re.match(rf"{path.name}: ", lines[0])
        # not every example has a model or one file of data to name
        unknown = "no such key" in lines[1] or "needs" in lines[0] or "data: expected dict" in lines[1]
        assert unknown or "nowhere" in lines[0]
        assert unknown or lines[-1].endswith("in main; NRL_TRACEBACK=1 shows the traceback")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("updates=0", "updates: 'updates' must be >= 1: 0"),
        ("max_mismatch=-1", "'max_mismatch' must be > 0: -1"),
        ("prompts=0", "'prompts' must be >= 1: 0"),
        ("group_size=0", "'group_size' must be >= 1: 0"),
        ("steps=-1", "run: steps=-1; give 0 or more"),
        ("dp=0", "'dp' must be >= 1: 0"),
        ("samplers=-1", "'samplers' must be >= 0: -1"),
        ("lag=-1", "'lag' must be >= 0: -1"),
        ("warmup=-1", "'warmup' must be >= 0: -1"),
        ("engine.api_key=x", "hf.sampler: it has no engine to set api_key of"),
        ("sampler=vllm-cpu engine.tokenizer=x", "vllm.sampler: tokenizer are set by nrl"),
        ("dtype=float16", "dtype: expected"),
        ("sampling.temperature=-1", "'temperature' must be >= 0: -1"),
        ("optimizer.lr=-1", "lr"),
        ("checkpoints.every=0", "'every' must be >= 1: 0"),
        ("sinks=[excel]", "excel"),
    ],
)
def test_bad_values_of_grpo(arguments: str, said: str, tmp_path: Path) -> None:
    lines = refused([sys.executable, str(ROOT / "examples" / "grpo.py"), *arguments.split(" ")], tmp_path)
    assert said in "\n".join(lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("report nowhere", "report: out=nowhere is not a folder"),
        ("eval nowhere.jsonl model=model", "'nowhere.jsonl' is neither a file"),
        ("eval arithmetic limit=4 model=./nowhere", "there is no such folder"),
        (
            "eval arithmetic limit=4 model=model out=new env=none",
            "env=none: there is no such environment; there are choice, ",
        ),
        ("eval arithmetic limit=4 model=empty out=new", "neither the folder of a model"),
        ("eval arithmetic limit=4 model=half out=new/folder", "the folder cannot be loaded as a causal language model"),
        ("eval arithmetic limit=4 mdel=model", "did you mean 'model'?"),
        (
            "eval arithmetic limit=4 model=model sampler=openai url=http://me:hunter2@localhost:9/v1",
            "could not be reached",
        ),
        ("venvs path nothing", "nothing"),
    ],
)
def test_the_command(arguments: str, said: str, tmp_path: Path) -> None:
    for name in ("model", "half"):
        tiny.save(tiny.model(), tmp_path / name)
    (tmp_path / "half" / "model.safetensors").unlink()
    (tmp_path / "empty").mkdir()
    lines = refused([*NRL, *arguments.split(" ")], tmp_path)
    assert lines[0].startswith("nrl: ")
    assert said in "\n".join(lines)
    assert "hunter2" not in "\n".join(lines)


def test_an_interrupt_is_one_line(tmp_path: Path) -> None:
    """Before there is anything worth keeping, and after."""
    for out, metrics in (("none", 0), ("some", 1)):
        command = [sys.executable, str(ROOT / "examples" / "sft.py"), f"out={out}", "steps=100000"]
        file = tmp_path / out / ("metrics.jsonl" if metrics else "config.yaml")
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as running:
            until = time.monotonic() + 120
            while not (file.exists() and file.stat().st_size) and time.monotonic() < until:
                time.sleep(0.002)
            running.send_signal(signal.SIGINT)
            _, said = running.communicate(timeout=120)
        assert (running.returncode, said.decode()) == (130, "sft.py: interrupted\n")
        assert (tmp_path / out).exists() is bool(metrics)


def test_a_bug_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "it.py").write_text(
        "import attrs, nrl\n@attrs.frozen\nclass Config:\n    out: str | None = None\n"
        "def main(cfg):\n    with nrl.run(cfg):\n        assert 1 == 2\nnrl.launch(nrl.retrying(main), Config)\n"
    )
    done = subprocess.run([sys.executable, "it.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert "assert 1 == 2" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["it.py"]


@pytest.mark.ray
def test_what_an_actor_raises_reads_as_well(tmp_path: Path) -> None:
    """The message once, and not the traceback of the process it was raised in."""
    tiny.save(tiny.model(), tmp_path / "half")
    (tmp_path / "half" / "model.safetensors").unlink()
    command = [sys.executable, str(ROOT / "examples" / "sft.py"), "cluster=ray", "model=half", "data=arithmetic"]
    lines = refused(command, tmp_path)
    assert "the folder cannot be loaded as a causal language model" in lines[0]
    assert lines[1] == "  raised in rank 0 of mesh 'trainer'"
