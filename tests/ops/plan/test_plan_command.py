"""The command `nrl plan`."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nrl.cli.cli import main
from nrl.ops.plan import fake_cuda, simulate
from nrl.ops.plan.analytic import estimate_step
from nrl.ops.plan.shapes import read_shape
from nrl.ops.plan.simulate import Step
from tests.ops.plan.test_gpus import TINY
from tests.ops.plan.test_search import BIG


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"tie_word_embeddings": True}))
    return str(tmp_path)


@pytest.fixture
def big(tmp_path: Path) -> str:
    (tmp_path / "big.json").write_text(json.dumps(BIG))
    return str(tmp_path / "big.json")


def test_closed_forms_alone(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", folder, "driven=false", "dp=2"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"closed forms, not driven: [\d.,]+M? parameters of a model", said)
    assert re.search(
        r" [\d.]+M tokens/s a device, HFU \d+%, MFU \d+%; from .* half of attention's squares, nothing at", said
    )
    lines = {line[:22].strip(): float(line[22:].split()[0]) for line in said.splitlines()[1:7]}
    assert list(lines) == ["parameters", "gradients", "moments", "activations", "log-probabilities", "peak"]
    assert sum(lines.values()) - lines["gradients"] - lines["peak"] == pytest.approx(lines["peak"], abs=0.03)


@pytest.mark.timeout(300)
def test_of_one_process(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", folder, "width=64", "gpu=a100", "loss=sft"]) == 0
    said = capsys.readouterr().out
    for part in ("peak", "with 6 GiB more it fits in 79.2 GiB", "TFLOP bfloat16", "2 calls varlen", "wait or copy"):
        assert part in said
    assert "estimate, not measured:" in said
    assert "from 312 TFLOP/s bfloat16, 19.5 float32, 2.039 TB/s of memory, 300 GB/s of NVLink" in said
    assert "collective" not in said
    assert "log-probabilities" in said
    at = said.index("peak of publish")
    assert "  wait or copy" in said[at:]  # each stage has its own, with their lines
    assert "transfer.py:" in said[at:]


def test_another_torch_has_closed_forms(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_cuda.check_torch, "__defaults__", ("2.12.0",))
    assert main(["plan", folder]) == 0
    said = capsys.readouterr().out
    assert "found torch 2.12.0, and fake CUDA tensors are tested with 2.13 alone" in said
    assert "so these are closed forms" in said
    assert "activations" in said


def test_what_does_not_fit_says_what_does(big: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", big, "dp=8", "driven=false"]) == 0
    said = capsys.readouterr().out
    assert "with 6 GiB more it does not fit, by 64." in said
    near = (
        "nearest that fits, by closed forms: trainer=fsdp dp=8 rows=2 max_tokens=16384 checkpointing=selective  (peak 4"
    )
    assert near in said
    on_eight = ["plan", big, "trainer=megatron", "layout.tp=2", "layout.dp=4", "rows=4", "max_tokens=32768"]
    assert main(on_eight) == 0
    assert "by closed forms: trainer=megatron dp=4 layout.tp=2 rows=4 max_tokens=8192 " in capsys.readouterr().out


def test_what_a_part_of_a_life_needs_is_asked_too(
    big: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive of a step that fits, with a publish that does not."""

    def found(step: Step) -> dict[str, Any]:
        counted = estimate_step(step)
        train = {"held": 1e9, "peak": counted["peak"], "peak_at": "here", "copied": {}, "waits": []}
        publish = {**train, "peak": 85e9, "peak_at": "reading.py:1"}
        return counted | {"stages": {"train": train, "publish": publish}}

    monkeypatch.setattr(simulate, "simulate_step", found)
    assert main(["plan", big, "dp=8", "checkpointing=true"]) == 0
    said = capsys.readouterr().out
    assert "does not fit, by 6.0 GiB, in 79.2 GiB" in said
    assert "publish does not fit, by 6.0 GiB: peak 79.16 GiB" in said
    assert "train does not fit" not in said
    assert "the most is held in publish, at reading.py:1" in said
    assert "the nearest that fits" in said


def test_a_search(big: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", big, "search=true", "gpus=8", "driven=false"]) == 0
    said = capsys.readouterr().out
    assert "layouts of 8 GPUs for 16 rows of 8192 tokens" in said
    assert "trainer=fsdp dp=8 rows=2 max_tokens=16384 checkpointing=selective" in said
    assert "trainer=megatron dp=" in said
    assert "held:" not in said


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        (["trainer=fsdp", "gpus=8"], "trainer=fsdp"),
        (["checkpointing=true", "gpus=8"], "checkpointing=true"),
        (["max_tokens=16384", "gpus=8"], "max_tokens=16384"),
        (["offload=cpu", "gpus=8"], "offload=cpu"),
        (["trainer=megatron", "layout.tp=4", "layout.dp=2"], "layout.tp=4"),  # dp without gpus= counts GPUs
        (["dp=2", "gpus=8"], "dp=2"),
    ],
    ids=str,
)
def test_a_search_holds_what_is_set(
    big: str, capsys: pytest.CaptureFixture[str], settings: list[str], held: str
) -> None:
    assert main(["plan", big, "search=true", "driven=false", *settings]) == 0
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if "trainer=" in line and not line.startswith("held")]
    assert lines
    assert all(f"{held} " in line + " " for line in lines)
    assert "of 8 GPUs" in said


def test_moments_of_a_search(big: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that somebody gives are held; of Megatron's trainer they are float32."""
    tables = []
    for moments in ("moments=4", "optimizer.moments=bfloat16", "moments=8"):
        assert main(["plan", big, "search=true", "driven=false", "gpus=8", moments]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] != tables[2]
    assert ["trainer=megatron" in table for table in tables] == [False, False, True]


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_the_best_of_a_search_are_driven(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", folder, "search=true", "gpus=2", "width=64"]) == 0
    assert sum(line.endswith("  driven") for line in capsys.readouterr().out.splitlines()) == 3


def test_megatron(big: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", big, "trainer=megatron", "layout.tp=4", "layout.pp=2", "rows=8", "max_tokens=8192"]) == 0
    said = capsys.readouterr().out
    for part in ("which is not driven", "at stage 0", "GiB tensor", "GiB pipeline", "bubble"):
        assert part in said
    again = ["trainer=megatron", "layout.tp=2", "checkpointing=true"]
    assert main(["plan", big, *again]) == 0
    found = re.search(r"with 6 GiB and (.*) GiB of activations, which may be twice as many,", capsys.readouterr().out)
    assert found
    assert float(found[1]) > 0
    assert main(["plan", big, "trainer=megatron", "layout.tp=3"]) == 2
    assert "megatron.trainer: tp = 3 does not divide num_key_value_heads=8" in capsys.readouterr().err
    assert main(["plan", big, "layout.tp=4"]) == 2
    assert "trainer=fsdp shards over dp alone, and all of it. Give trainer=megatron" in capsys.readouterr().err


def test_an_example(big: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [f"model={big}", "dtype=bfloat16", "layout.dp=8", "checkpointing=true", "driven=false"]
    assert main(["plan", "examples/grpo.py", *settings]) == 2
    said = capsys.readouterr().err
    assert "the configuration of grpo.py does not say" in said
    assert "width=  (tokens of the longest row, its prompt and its answer)" in said
    assert main(["plan", "examples/grpo.py", *settings, "width=8192", "plan.rows=2"]) == 0
    program, said = capsys.readouterr()
    assert "with the loss grpo: what a critic, a reference, a teacher or another loss of the program needs" in said
    assert main(["plan", big, "dp=8", "checkpointing=true", "driven=false"]) == 0
    assert capsys.readouterr().out == program
    assert main(["plan", "examples/sft.py", "dtype=bfloat16", "driven=false"]) == 0  # its rows have max_length


def test_programs_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.py").write_text("")
    assert main(["plan", str(tmp_path / "empty.py")]) == 2
    assert "declares no attrs class named Config" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "none.py")]) == 2
    assert "none.py cannot be read" in capsys.readouterr().err
    assert main(["plan", "examples/grpo.py", "lora={r: 8}", "width=64"]) == 2
    assert "trains an adapter (lora=), which plans do not know" in capsys.readouterr().err


@pytest.mark.parametrize("shared", [8155, 8192, 9000])
def test_a_prompt_is_shorter_than_rows(folder: str, shared: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", folder, "width=8192", "driven=false", f"shared={shared}"]) == 2
    assert f"found shared={shared}, and the shortest of 2 rows of width=8192 has 8155" in capsys.readouterr().err
    assert main(["plan", folder, "width=8192", "driven=false", "shared=8154"]) == 0
    assert "log-probabilities" in capsys.readouterr().out


def test_an_allowance_is_room(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", folder, "driven=false", "allowance=-3"]) == 2
    assert "allowance" in capsys.readouterr().err


def test_a_rank_that_there_is_not(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", folder, "dp=2", "rank=2"]) != 0
    assert "plan: found rank=2 of dp=2 processes; give one from 0 to the last" in capsys.readouterr().err
    for settings in (["driven=false"], ["search=true"], ["trainer=megatron"], ["moments=6"]):
        assert main(["plan", folder, "dp=2", "rank=1", *settings]) == 2
        assert "plan: found rank=1, and closed forms are of any process; leave rank= out" in capsys.readouterr().err


def test_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tmp_path)]) == 2
    assert f"plan: model={tmp_path} has no config.json that can be read" in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_weights_on_the_host_and_moments_in_bfloat16(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", folder, "width=64", "offload=cpu", "moments=4"]) == 0
    said = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert said["moments"].split()[1:] == ["0.00", "GiB"]
    assert said["on the host"].endswith("GiB, parameters, gradients and moments")
    assert "closed forms, not driven" not in " ".join(said)
    assert main(["plan", folder, "offload=cpu", "trainer=megatron"]) != 0
    assert "Megatron's trainer has adamw with moments in float32, without groups, and no offload" in (
        capsys.readouterr().err
    )


def test_options_as_other_programs_have_them(big: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", big, "dp=8", "driven=false", "gpu=h200", "search=true"]) == 0
    said = capsys.readouterr().out
    for settings in (
        ["--gpu", "h200", big, "--dp=8", "--driven=false", "--search"],
        ["--search", big, "--driven", "--gpu=h200", "--dp", "8", "driven=false"],
    ):
        assert main(["plan", *settings]) == 0
        assert capsys.readouterr().out == said
    assert main(["plan", big, "--gpu"]) == 2
    assert "plan: --gpu has no value; write gpu=VALUE, or --gpu VALUE" in capsys.readouterr().err
    assert main(["plan", big, "--gpu", "dp=8"]) == 2
    assert "plan: --gpu has no value" in capsys.readouterr().err
    assert main(["plan", big, "--gpus-of-mine", "3"]) == 2
    assert "--gpus-of-mine: options are written key=value, without dashes" in capsys.readouterr().err


RECIPE = """
dtype: bfloat16
dp: 8
engine: {max_model_len: 4096}
checkpointing: true
prompts: 64
group_size: 32
updates: 4
"""


def test_a_recipe_as_it_is_planned(big: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "config.yaml"
    recipe.write_text(f"model: {big}\n{RECIPE}")
    program = ["plan", "examples/grpo.py", str(recipe), "layout.dp=64", "--gpu", "h100", "driven=false"]
    plain = ["plan", big, "dp=64", "rows=8", "width=4096", "max_tokens=16384", "checkpointing=true", "driven=false"]
    assert main(program) == 0
    said = capsys.readouterr().out
    assert main(plain) == 0
    assert capsys.readouterr().out == said
    # Another number of processes has its part of the 512 rows
    for dp in ("plan.dp=16", "plan.layout.dp=16"):
        assert main([*program, dp]) == 0
        told = capsys.readouterr()
        assert "rows of a group have their prompt in common, but" in told.err
        assert main([*(word for word in plain if word not in ("dp=64", "rows=8")), "dp=16", "rows=32"]) == 0
        assert capsys.readouterr().out == told.out
    assert main([*program, "shared=1024"]) == 0
    assert "have their prompt in common" not in capsys.readouterr().err
    # Its 512 rows a step stay as many
    assert main([*program, "--search"]) == 0
    said = capsys.readouterr().out
    assert "of 64 GPUs for 512 rows of 4096 tokens" in said
    assert "held: checkpointing=True" in said


@pytest.mark.parametrize(
    ("settings", "moments"),
    [
        (["optimizer.moments=bfloat16"], 4.0),
        (["optimizer.kind=sgd"], 0.0),
        (["optimizer={kind: sgd, momentum: 0.9}"], 4.0),
        (["optimizer.kind=muon"], None),
        (["offload=cpu"], 0.0),
        (["plan.moments=6"], 6.0),
        ([], 8.0),
    ],
    ids=str,
)
def test_the_optimizer_of_a_program(
    big: str, capsys: pytest.CaptureFixture[str], settings: list[str], moments: float | None
) -> None:
    """As it will be used; offload is no setting of this program, so it is the plan's."""
    given = [f"model={big}", "dtype=bfloat16", "dp=8", "width=64", "driven=false", "max_tokens=16384", *settings]
    assert main(["plan", "examples/grpo.py", *given]) == 0
    said = {line[:22].strip(): line[22:].split()[0] for line in capsys.readouterr().out.splitlines() if line[22:]}
    model = read_shape(BIG)
    kept = 8.0 * model.parameters - 4.0 * model.matrices if moments is None else moments * model.parameters
    assert float(said["moments"]) == pytest.approx(kept / 8 / 2**30, abs=0.006)


def test_an_optimizer_of_ones_own(tmp_path: Path, big: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "mine.py"
    program.write_text(
        "import attrs, torch\nfrom nrl.backends import Optimizer, own\n"
        "@attrs.frozen\nclass Config:\n    model: str = 'tiny'\n    rows: int = 8\n    max_length: int = 64\n"
        "    optimizer: Optimizer = own(torch.optim.Adagrad, lr=1.0)\n"
    )
    assert main(["plan", str(program), f"model={big}"]) == 2
    assert "Use closed forms (driven=false), with moments= as its bytes for a parameter" in capsys.readouterr().err
    assert main(["plan", str(program), f"model={big}", "driven=false"]) == 2
    assert "give moments=, its bytes for a parameter" in capsys.readouterr().err
    assert main(["plan", str(program), f"model={big}", "moments=4"]) == 0
    assert "closed forms, not driven" in capsys.readouterr().out


def test_the_first_message_comes_before_what_is_slow(folder: str) -> None:
    said = """
import os, sys
from nrl.cli.cli import main
class Err:
    def write(self, text):
        os.write(1, f"{text} {'torch' in sys.modules}".encode())
        os._exit(0)
sys.stderr = Err()
main(["plan", sys.argv[1]])
"""
    done = subprocess.run([sys.executable, "-c", said, folder], capture_output=True, text=True, check=True)
    assert done.stdout == "plan: importing torch False"
