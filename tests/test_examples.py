"""The examples are short, run, and leave behind what the documentation says."""

import ast
import importlib.util
import io
import json
import math
import subprocess
import sys
import tokenize
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import yaml

import nrl
from nrl import Layout, config, tiny
from nrl.backends import TRAINERS, Model, Optimizer, adamw
from nrl.cli.cli import main as command_line
from nrl.data import read_jsonl
from nrl.errors import ConfigError, DataError, ModelError, NrlError, RolloutMismatch
from nrl.runtime import Slots
from tests.jsonlines import lines

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
GSM8K = ROOT / "tests" / "data" / "gsm8k_sample.jsonl"
KEYS = {
    "step", "loss", "grad_norm", "reward", "tokens_per_second", "time/rollout", "time/train", "time/total", "lag",
    "mismatch/kl", "mismatch/ess", "mismatch/max_abs", "mismatch/chi2", "mismatch/max_ratio",
}  # fmt: skip


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # attrs looks types up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_at_most_90_lines_of_code(path: Path) -> None:
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    code = {line for token in tokens if token.type not in nothing for line in range(token.start[0], token.end[0] + 1)}
    assert len(code) <= 90


def test_no_example_stands_before_a_module_of_python() -> None:
    """Python finds what lies beside a script first: a `math.py` there would end each of them at its first import."""
    assert {path.stem for path in EXAMPLES} & sys.stdlib_module_names == set()


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem != "zoo"], ids=lambda path: path.stem)
def test_code_that_lies_with_a_model_runs_only_where_the_configuration_says_so(path: Path, tmp_path: Path) -> None:
    """Every example passes it on: the error names the key, and with it another error comes."""
    (tmp_path / "mine.py").write_text("raise ImportError('it ran')")
    auto = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model", "AutoTokenizer": ["mine.T", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": auto}))
    tiny.tokenizer().save_pretrained(tmp_path)
    module = load(path.stem)
    names = [field.name for field in attrs.fields(module.Config) if field.name in ("model", "reward", "teacher")]
    for trusted, error in [(False, "trust_remote_code=true"), (True, "it ran")]:
        given = dict.fromkeys(names, str(tmp_path)) | {"trust_remote_code": trusted, "out": str(tmp_path / "out")}
        with pytest.raises(NrlError, match=error):
            module.main(module.Config(**given))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_evaluation_takes_no_row_twice(path: Path) -> None:
    """`take` begins the next epoch where a source has no more rows; `nrl.data.epoch` does not."""
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert [call.lineno for call in calls if isinstance(call, ast.Attribute) and call.attr == "take"] == []


def test_the_loop_of_grpo_has_at_most_25_lines() -> None:
    tree = ast.parse((ROOT / "examples" / "grpo.py").read_text())
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    assert main.end_lineno is not None
    assert main.end_lineno - main.lineno + 1 <= 25


class Asked(Exception):
    """A trainer has been asked for."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_configuration_names_the_trainer_and_its_layout(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All axes as ``layout``, or ``dp`` as the short form; and no trainer that is not one of `TRAINERS`."""
    module = load(path.stem)
    asked = list[tuple[int, Layout]]()

    def other(slots: Slots, model: Model, optimizer: Optimizer, *, layout: Layout, **_: Any) -> Any:
        asked.append((len(slots), layout))
        raise Asked

    monkeypatch.setitem(TRAINERS, "fsdp", other)
    layouts = {"layout.tp=2": Layout(tp=2), "dp=3": Layout(3), "dp=2 layout.pp=2": Layout(2, pp=2), "": Layout()}
    if path.stem == "zoo":  # which never had the short form
        layouts = {"layout.dp=3": Layout(3), "": Layout()}
    for given, layout in layouts.items():
        cfg = config.load(module.Config, [*given.split(), "trainer=fsdp", f"out={tmp_path / str(len(asked))}"])
        with pytest.raises(Asked):
            module.main(cfg)
        assert asked.pop() == (layout.slots, layout)
    with pytest.raises(ConfigError, match="trainer: expected 'fsdp' or 'megatron', found 'fsdq'"):
        config.load(module.Config, ["trainer=fsdq"])
    assert "fsdp.trainer" not in path.read_text()


def test_grpo_leaves_behind_what_is_documented(tmp_path: Path) -> None:
    grpo = load("grpo")
    out = tmp_path / "run"
    small = {"warmup": 2, "warmup_rows": 8, "prompts": 4, "group_size": 4}
    grpo.main(grpo.Config(steps=3, dp=2, lag=1, verifiers=2, out=str(out), **small))
    metrics = lines(out / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert all(line.keys() >= KEYS for line in metrics)
    assert [line["lag"] for line in metrics] == [0, 1, 1]
    assert [line["step"] for line in lines(out / "warmup.jsonl")] == [0, 1]
    resolved = yaml.safe_load((out / "config.yaml").read_text())
    assert resolved["steps"] == 3
    assert resolved["optimizer"]["lr"] == 7e-4
    assert (out / "model" / "config.json").exists()
    assert (out / "model" / "tokenizer.json").exists()


def test_grpo_stops_where_the_sampler_does_not_get_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grpo = load("grpo")

    def metrics(name: str, max_mismatch: float) -> list[dict[str, Any]]:
        small = {"warmup": 20, "warmup_rows": 64, "prompts": 8, "group_size": 8, "eval_data": None}
        config = grpo.Config(steps=4, max_mismatch=max_mismatch, out=str(tmp_path / name), **small)
        grpo.main(config)
        return lines(tmp_path / name / "metrics.jsonl")

    assert [line["mismatch/kl"] < 1e-6 for line in metrics("right", 1e-6)] == [True] * 4
    publish, published = nrl.publish, list[int]()

    def first(*args: Any) -> None:
        if not published:
            published.append(publish(*args))

    monkeypatch.setattr(nrl, "publish", first)
    with pytest.raises(RolloutMismatch, match="a publish that was left out"):
        metrics("wrong", 0.02)
    stopped = [line["mismatch/kl"] for line in lines(tmp_path / "wrong" / "metrics.jsonl")]
    assert 1 < len(stopped) < 4
    assert [kl > 0.02 for kl in stopped] == [False] * (len(stopped) - 1) + [True]
    assert (tmp_path / "wrong" / "report.html").exists()
    published.clear()
    assert [line["mismatch/kl"] > 0.02 for line in metrics("any", math.inf)][-1]


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    grpo = load("grpo")
    rewards = []
    for name in ("a", "b"):
        config = grpo.Config(steps=2, warmup=3, warmup_rows=8, prompts=4, group_size=4, out=str(tmp_path / name))
        grpo.main(config)
        rewards.append([(line["reward"], line["loss"]) for line in lines(tmp_path / name / "metrics.jsonl")])
    assert rewards[0] == rewards[1]


def test_defaults_depend_on_whether_the_model_is_real() -> None:
    grpo = load("grpo")
    assert config.load(grpo.Config, []).warmup == 40
    real = config.load(grpo.Config, ["model=somewhere", "optimizer.clip=0.5"])
    assert (real.warmup, real.optimizer.lr, real.optimizer.clip) == (0, 1e-6, 0.5)
    assert (config.load(grpo.Config, []).max_mismatch, real.max_mismatch) == (2.0, 0.1)
    assert config.load(grpo.Config, ["max_mismatch=.inf"]).max_mismatch == math.inf
    assert config.load(grpo.Config, ["engine.max_model_len=2048"]).engine == {"max_model_len": 2048}


TOO_SMALL = {
    "dp": 0, "samplers": -1, "prompts": 0, "group_size": 0, "rows": 0, "pairs": 0, "lag": -1, "updates": 0,
    "patience": 0, "verifiers": -1, "warmup": -1, "warmup_rows": 0, "teaching": -1, "judging": -1, "evaluate_every": 0,
    "evaluate_prompts": 0, "evaluate_pairs": 0, "evaluate_rows": 0, "max_tokens": 0, "max_length": 0,
    "max_new_tokens": 0, "buffer": -1, "max_mismatch": -1.0, "top_k": -1, "truncation": 0.0, "lr": 0.0, "beta": 0.0,
    "desirable": 0.0, "undesirable": 0.0, "centering": -1.0, "clip": 0.0, "value_clip": 0.0, "gamma": -0.1,
    "lam": -0.1, "share": 0.0, "kl": -0.1, "steps": -1,
}  # fmt: skip


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_number_that_cannot_be_is_a_mistake_before_anything_starts(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every number among the options of every example: two or three lines, status 2 and no folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NRL_TRACEBACK", raising=False)
    module = load(path.stem)
    numbers = [field.name for field in attrs.fields(module.Config) if field.type in (int, float)]
    for name in sorted({*numbers} - {"seed"}):
        with pytest.raises(SystemExit) as ended:
            nrl.launch(nrl.retrying(module.main), module.Config, [f"{name}={TOO_SMALL[name]}"])
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert len(said.splitlines()) <= 3
        assert f"{name}=" in said or f"'{name}' must be " in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["grpo", "sft", "dpo"])
def test_an_evaluation_every_0_steps_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="'evaluate_every' must be >= 1: 0; from the command line"):
        config.load(load(name).Config, ["evaluate_every=0"])


def test_custom_loss_checks_itself_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    custom = load("custom_loss")
    custom.check()
    assert "the loss is what it should be" in capsys.readouterr().out
    custom.main(custom.Config(steps=1, warmup=1, out=str(tmp_path / "run")))
    assert lines(tmp_path / "run" / "metrics.jsonl")[0].keys() >= KEYS


@pytest.fixture(scope="module")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like those on a hub: a Qwen3-shaped model, a byte-level BPE tokenizer, a chat template."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    rows = read_jsonl(GSM8K)
    tokenizer = tiny.bpe((text for row in rows for text in (row["question"], row["answer"])), vocab_size=512)
    tiny.save(tiny.model(tokenizer=tokenizer, initializer_range=0.02, **sizes), folder)
    return folder


def test_grpo_on_gsm8k_through_the_whole_path(real_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [
        sys.executable, "examples/grpo.py", f"model={real_model}", f"data={GSM8K}", "steps=5", "prompts=4",
        "group_size=2", "sampling.max_new_tokens=16", f"out={out}", "env=math", f"eval_data={GSM8K}",
        "evaluate_prompts=4",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    metrics = lines(out / "metrics.jsonl")
    assert len(metrics) == 5
    assert all(line["reward"] is not None and 0 <= line["reward"] <= 1 for line in metrics)
    assert all(line["invalid"] == 0 for line in metrics)
    assert 0 <= metrics[-1]["eval/reward"] <= 1
    assert not (out / "warmup.jsonl").exists()
    held_out = [str(GSM8K), "format=gsm8k", "env=math", "limit=4", "max_new_tokens=16"]
    assert command_line(["eval", *held_out, f"model={out}", f"out={tmp_path / 'eval'}"]) == 0
    found = json.loads((tmp_path / "eval" / "metrics.json").read_text())
    assert (found["tasks"], found["metrics"]["eval/invalid"]) == (4, 0)


def test_prompts_that_fill_the_context_are_counted(real_model: Path, tmp_path: Path) -> None:
    grpo = load("grpo")
    rows = [{"question": "one " * 2000, "answer": "#### 1"}, {"question": "two?", "answer": "#### 2"}]
    data = tmp_path / "long.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = grpo.Config(
        model=str(real_model), data=str(data), steps=1, prompts=2, group_size=4, out=str(tmp_path / "run"),
        sampling=grpo.Sampling(max_new_tokens=4),
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"4 of 8 episodes failed .* fills the context of 512"):
        grpo.main(cfg)
    assert lines(tmp_path / "run" / "metrics.jsonl")[0]["invalid"] == 4


def test_bad_input_ends_in_a_clear_error(tmp_path: Path) -> None:
    grpo = load("grpo")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    for wrong, error, said in [
        ({"data": "nowhere.jsonl"}, DataError, "nowhere.jsonl"),
        ({"data": str(empty)}, DataError, "no rows"),
        ({"model": str(tmp_path / "no-model")}, ModelError, "no such folder"),
        ({"out": str(empty)}, ConfigError, "is a file"),
    ]:
        config = {"steps": 1, "out": str(tmp_path / error.__name__ / said.replace(" ", "-"))} | wrong
        with pytest.raises(error, match=said):
            grpo.main(grpo.Config(**config))


def test_sft_with_its_defaults_learns_and_is_measured(tmp_path: Path) -> None:
    sft = load("sft")
    sft.main(sft.Config(steps=25, rows=32, evaluate_every=8, evaluate_rows=64, out=str(tmp_path / "run")))
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    measured = {line["step"]: line["eval/loss"] for line in metrics if "eval/loss" in line}
    assert list(measured) == [0, 8, 16, 24]
    assert measured[24] < 0.7 * measured[0]
    assert (tmp_path / "run" / "model" / "config.json").exists()
    assert (tmp_path / "run" / "report.html").exists()


def test_dpo_with_its_defaults_learns_and_is_measured(tmp_path: Path) -> None:
    dpo = load("dpo")
    dpo.main(dpo.Config(steps=21, pairs=32, evaluate_every=10, evaluate_pairs=64, out=str(tmp_path / "run")))
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    measured = {line["step"]: line["eval/accuracy"] for line in metrics if "eval/accuracy" in line}
    assert list(measured) == [0, 10, 20]
    assert measured[20] > measured[0]


def test_sft_on_gsm8k_begins_at_a_uniform_guess_and_learns(real_model: Path, tmp_path: Path) -> None:
    sft = load("sft")
    data = tmp_path / "train.jsonl"
    rows = GSM8K.read_text().splitlines(keepends=True)
    data.write_text("".join(rows[:-8]))
    eval_file = tmp_path / "test.jsonl"
    eval_file.write_text("".join(rows[-8:]))
    cfg = sft.Config(
        model=str(real_model), data=str(data), eval_data=str(eval_file), format="gsm8k", steps=20, rows=8,
        evaluate_rows=8, evaluate_every=19, max_length=512, optimizer=adamw(lr=5e-3), out=str(tmp_path / "run"),
    )  # fmt: skip
    sft.main(cfg)
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics[0]["loss"] == pytest.approx(math.log(512), rel=0.05)
    assert metrics[-1]["eval/loss"] < math.log(512) - 1  # nats, on rows that were not trained on


def test_dpo_on_64_real_pairs(real_model: Path, tmp_path: Path) -> None:
    dpo = load("dpo")
    pairs = str(ROOT / "tests" / "data" / "gsm8k_preferences.jsonl")
    cfg = dpo.Config(
        model=str(real_model), data=pairs, eval_data=pairs, steps=5, pairs=16, evaluate_pairs=64, evaluate_every=100,
        max_length=512, optimizer=adamw(lr=2e-3), out=str(tmp_path / "run"),
    )  # fmt: skip
    dpo.main(cfg)
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics[-1]["eval/accuracy"] > 0.9


@pytest.mark.parametrize(("name", "size", "n"), [("reward_model", "pairs", 16), ("kto", "rows", 8)])
def test_on_real_pairs(name: str, size: str, n: int, real_model: Path, tmp_path: Path) -> None:
    """It begins at a guess, since the model knows nothing, and learns these pairs by heart."""
    example = load(name)
    pairs = str(ROOT / "tests" / "data" / "gsm8k_preferences.jsonl")
    config = {"steps": 8, size: n, f"evaluate_{size}": n, "evaluate_every": 100, "optimizer": adamw(lr=1e-3)}
    config["max_length"] = 512  # positions of the model: three rows have more tokens, and are left out
    example.main(example.Config(model=str(real_model), data=pairs, eval_data=pairs, out=str(tmp_path), **config))
    metrics = lines(tmp_path / "metrics.jsonl")
    assert metrics[0]["loss"] == pytest.approx(math.log(2) if name == "reward_model" else 0.5, abs=1e-5)
    assert metrics[-1]["eval/loss"] < metrics[0]["loss"] - 0.02


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("steps", "least"), [(100, 0.6), pytest.param(300, 0.8, marks=pytest.mark.slow)])
def test_grpo_learns_to_add(steps: int, least: float, tmp_path: Path) -> None:
    """With its defaults, which make 300 steps."""
    grpo = load("grpo")
    nrl.launch(nrl.retrying(grpo.main), grpo.Config, [f"steps={steps}", f"out={tmp_path / 'run'}"])
    rewards = [line["reward"] for line in lines(tmp_path / "run" / "metrics.jsonl")]
    assert sum(rewards[:5]) / 5 < 0.4
    assert sum(rewards[-5:]) / 5 > least
