"""Other projects' evaluations of a served model, and nrl's own: the same number. Their packages are installed here."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import nrl
from nrl import data, tiny
from nrl.algos import sft_loss
from nrl.backends import fsdp
from nrl.cli.cli import main
from tests.cli.test_serve import started

pytestmark = pytest.mark.slow

ADDER = """
task: adder
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], do_sample: false, max_gen_toks: 4}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""
INSPECT = """
from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import exact
from inspect_ai.solver import generate

@task
def adder():
    rows = json_dataset({rows!r}, FieldSpec(input="question", target="answer"))
    return Task(dataset=rows, solver=generate(), scorer=exact())
"""
SUMS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt some sums, in a folder."""
    tokenizer = tiny.bpe(["user assistant 0123456789+=", tiny.CHATML])
    small = tiny.model(tokenizer=tokenizer)
    rows = [{"prompt": [{"role": "user", "content": each["question"]}], "response": each["answer"]} for each in SUMS]
    taught = nrl.batched(data.tasks(rows[::2]), 16, collate=partial(data.supervised, tokenizer=tokenizer))
    folder = tmp_path_factory.mktemp("model") / "adder"
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), small, nrl.adamw(lr=2e-3))
        state, step = trainer.init(), trainer.train_step(sft_loss)
        for batch in taught.take(120):
            state, _ = step(state, batch)
        trainer.export(state.params, folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, SUMS)))
    return path


@pytest.fixture(scope="module")
def own(model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """How often the answer is right, as `nrl eval` says."""
    out = tmp_path_factory.mktemp("own") / "out"
    assert main(["eval", str(rows), f"model={model}", "env=exact", "max_new_tokens=4", f"out={out}"]) == 0
    found = float(json.loads((out / "metrics.json").read_text())["metrics"]["eval/reward"])
    assert 0.1 < found < 0.95
    return found


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    url, process = started(str(model), "name=m", NRL_SERVE_TOKEN="sk-session")
    yield url
    process.terminate()
    process.wait(20)
    process.stdout.close()  # type: ignore[union-attr]


def installed(folder: Path, *packages: str) -> Path:
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(folder)], check=True)
    subprocess.run([*uv, "pip", "install", "-q", "-p", str(folder / "bin" / "python"), *packages], check=True)
    return folder / "bin"


def run(*command: Any, cwd: Path, **variables: str) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(cwd / "home")}
    subprocess.run(list(map(str, command)), check=True, cwd=cwd, env={**os.environ, **offline, **variables})


def test_lm_eval(url: str, rows: Path, own: float, tmp_path: Path) -> None:
    (tmp_path / "adder.yaml").write_text(ADDER.format(rows=rows))
    where = f"model=m,base_url={url}/chat/completions,num_concurrent=8,max_retries=1"
    run(
        *(installed(tmp_path / "venv", "lm-eval[api]==0.4.13") / "lm_eval", "run"),
        *("--model", "local-chat-completions", "--model_args", where, "--tasks", "adder"),
        *("--include_path", tmp_path, "--apply_chat_template", "--output_path", tmp_path / "out"),
        cwd=tmp_path,
        OPENAI_API_KEY="sk-session",
    )
    (found,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(found.read_text())["results"]["adder"]["exact_match,none"] == pytest.approx(own)


def test_inspect(url: str, rows: Path, own: float, tmp_path: Path) -> None:
    (tmp_path / "adder.py").write_text(INSPECT.format(rows=str(rows)))
    run(
        *(installed(tmp_path / "venv", "inspect-ai==0.3.285", "openai") / "inspect", "eval", "adder.py"),
        *("--model", "openai-api/nrl/m", "--temperature", "0", "--max-tokens", "4"),
        *("--display", "plain", "--log-dir", tmp_path / "logs", "--log-format", "json"),
        cwd=tmp_path,
        NRL_API_KEY="sk-session",
        NRL_BASE_URL=url,
    )
    (found,) = (tmp_path / "logs").glob("*.json")
    log = json.loads(found.read_text())
    assert log["status"] == "success"
    assert log["results"]["scores"][0]["metrics"]["mean"]["value"] == pytest.approx(own)
