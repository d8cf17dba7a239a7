"""docs/from_one_gpu_to_many.md: its programs and plans take the settings that the page gives them."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from nrl import config
from nrl.cli.cli import main
from nrl.ops.plan.planned_programs import plan_program
from tests.test_docs import FENCE, ROOT

PAGE = ROOT / "docs" / "from_one_gpu_to_many.md"


def commands(beginning: str) -> list[list[str]]:
    """The words of the page's commands that begin so, behind these."""
    text = "".join(found[3] for found in FENCE.finditer(PAGE.read_text())).replace("\\\n", " ")
    lines = [re.sub(r"\s+#.*$", "", line).removeprefix("uv run ") for line in text.splitlines()]
    return [shlex.split(line.removeprefix(beginning)) for line in lines if line.startswith(beginning)]


PROGRAMS, PLANS, DEPLOYED = commands("python "), commands("nrl plan "), commands("nrl deploy ")


def test_the_page_has_a_command_for_each_step() -> None:
    assert len(PROGRAMS) == 6
    assert len(PLANS) == 2
    assert len(commands("nrl doctor")) == 3
    assert len(DEPLOYED) == 2


@pytest.mark.parametrize("words", PROGRAMS, ids=" ".join)
def test_a_program_of_the_page_takes_its_settings(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cfg = config.load(runpy.run_path(words[0])["Config"], words[1:], program=words[0])
    out = next(word.removeprefix("out=") for word in words if word.startswith("out="))
    assert cfg.out == out
    assert cfg.layout.slots + cfg.samplers == {"laptop": 2, "ray": 3, "one": 1, "several": 16}.get(Path(out).name, 8)


@pytest.mark.parametrize("words", PLANS, ids=" ".join)
def test_a_plan_of_the_page_knows_all_that_it_needs(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    planned, _ = plan_program(words[0], words[1:])
    assert planned.gpu == "h100"
    assert planned.layout.dp == (4 if "dp=4" in words else 1)


@pytest.mark.parametrize("words", DEPLOYED, ids=" ".join)
def test_a_job_of_the_page_is_written_and_its_program_takes_its_settings(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    to = tmp_path / words[0]
    cut = words.index("--")
    assert main(["deploy", *words[:cut], f"to={to}", *words[cut:]]) == 0
    text = to.read_text() if to.is_file() else "".join(file.read_text() for file in sorted(to.iterdir()))
    grace = {"slurm": 100, "kubernetes": 120}[words[0]]
    assert words[0] != "slurm" or "nrl venvs build base vllm ||" in text  # which the file of settings asks for
    assert " ".join([words[1], *words[cut + 1 :], f"checkpoints.grace={grace}", "cluster=auto"]) in text
    cfg = config.load(runpy.run_path(words[1])["Config"], words[cut + 1 :], program=words[1])
    assert cfg.layout.slots + cfg.samplers == 16
