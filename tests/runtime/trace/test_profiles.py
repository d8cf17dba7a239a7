"""Traces of single calls, where the environment asks for them."""

import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import nrl
from nrl.data import counting
from nrl.errors import ConfigError
from nrl.runtime.ray.nodes import interpreter_command
from nrl.runtime.trace import profiles, timeline


def operators(path: Path) -> set[str]:
    """The names of the CPU operators in a trace."""
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return {str(event["name"]) for event in events if event.get("cat") == "cpu_op"}


def call(mesh: str, name: str, size: int = 1) -> None:
    """A call on a mesh, in the way that meshes make it: asked for once, traced in each process."""
    path = profiles.trace_path(mesh, name)
    for rank in range(size):
        with profiles.tracing(path, rank):
            torch.ones(3, 3) @ torch.ones(3, 3)


# --- what is asked for


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("", {}),
        ("trainer:3", {"trainer": [3]}),
        ("trainer:3-5", {"trainer": [3, 4, 5]}),
        ("sampler:0,10", {"sampler": [0, 10]}),
        (" sampler : 0 , 2 - 4 ; trainer:7;", {"sampler": [0, 2, 3, 4], "trainer": [7]}),
        ("trainer:1;trainer:4", {"trainer": [1, 4]}),
        ("a:b:2", {"a:b": [2]}),
    ],
)
def test_steps_are_asked_for_by_mesh(text: str, steps: Mapping[str, list[int]]) -> None:
    found = {mesh: [step for each in ranges for step in each] for mesh, ranges in profiles.parse_steps(text).items()}
    assert found == steps


@pytest.mark.parametrize(
    "text", ["trainer", "3", "trainer:", ":3", "trainer:x", "trainer:5-3", "trainer:-1", "trainer:1,,2", "trainer:1 2"]
)
def test_what_cannot_be_read_is_refused_with_the_grammar(text: str) -> None:
    message = rf"NRL_PROFILE: '{text}' cannot be read; give <mesh>:<steps>, where .* NRL_PROFILE=trainer:3, trainer:3-5"
    with pytest.raises(ConfigError, match=message):
        profiles.parse_steps(f"sampler:1;{text}")


def test_a_run_refuses_it_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_PROFILE", "trainer=3")
    with pytest.raises(ConfigError, match="NRL_PROFILE: 'trainer=3' cannot be read"), nrl.run(Config(str(tmp_path))):
        pass


# --- torch's profiler


@attrs.frozen
class Config:
    out: str
    steps: int = 4


def program(out: Path) -> None:
    with nrl.run(Config(str(out))) as run:
        call("trainer", "init")
        for _ in run.steps(counting(), 2, name="warmup"):
            call("trainer", "train_step(sft_loss)")
        for _ in run.steps(counting()):
            call("sampler", "generate")
            call("trainer", "train_step(grpo_loss)", size=2)
            call("trainer", "logprobs")
        call("trainer", "export")


def test_the_calls_of_a_step_are_traced_by_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NRL_PROFILE", "trainer:1,3;sampler:0")
    program(tmp_path)
    found = sorted((tmp_path / "profile").iterdir())
    assert [path.name for path in found] == [
        "step0-sampler-rank0-0-generate.json",
        "step1-trainer-rank0-0-train_step(grpo_loss).json",
        "step1-trainer-rank0-1-logprobs.json",
        "step1-trainer-rank1-0-train_step(grpo_loss).json",
        "step3-trainer-rank0-2-train_step(grpo_loss).json",
        "step3-trainer-rank0-3-logprobs.json",
        "step3-trainer-rank1-2-train_step(grpo_loss).json",
    ]
    assert all("aten::matmul" in operators(path) for path in found)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NRL_PROFILE")]
    where = f"traces are in {tmp_path / 'profile'}, of so many calls: sampler 1, trainer 4"
    assert said == [f"NRL_PROFILE: {where}; see https://ui.perfetto.dev"]


def test_calls_on_a_mesh_of_this_process_are_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_PROFILE", "adder:2")
    with nrl.run(Config(str(tmp_path))) as run, nrl.cluster("local") as cluster:
        mesh = cluster.reserve(2).mesh(name="adder")
        cumulate = nrl.shard_map(lambda x: x.cumsum(0), mesh, nrl.P("dp"), nrl.P("dp"))
        for _ in run.steps(counting()):
            cumulate(torch.ones(4)).result()
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name.startswith("step2-adder-rank0-0-")
    assert "aten::cumsum" in operators(trace)
    assert timeline.busy_shares(tmp_path / "timeline.json")["train"]["adder"] > 0


def test_what_had_no_trace_is_said_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NRL_PROFILE", "trianer:1;sampler:99")
    program(tmp_path)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("NRL_PROFILE")]
    assert said == [
        "NRL_PROFILE: no mesh is named 'trianer'; there were sampler, trainer",
        "NRL_PROFILE: mesh 'sampler' had no call in these steps of the main loop",
    ]
    assert not (tmp_path / "profile").exists()


def test_without_the_variable_nothing_is_asked_and_nothing_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NRL_PROFILE", raising=False)
    program(tmp_path)
    assert "NRL_PROFILE" not in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()
    assert profiles.trace_path("trainer", "train_step") is None


def test_a_path_is_absolute_and_a_file_name_whatever_the_call_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with profiles.profiling(Path("run {0}"), {"NRL_PROFILE": "a/b:0"}):
        timeline.step(0)
        try:
            path = profiles.trace_path("a/b", "../<lambda> of x" + 200 * "y")
        finally:
            timeline.step(None)
    assert path is not None
    assert path.startswith(f"{tmp_path}/run {{0}}/profile/step0-a_b-rank{{rank}}-0-.._")
    assert len(Path(path).name) < 150
    with profiles.tracing(path, 12):
        torch.ones(3).sum()
    assert [file.name[:20] for file in Path("run {0}/profile").iterdir()] == ["step0-a_b-rank12-0-."]


def test_a_call_that_fails_leaves_its_trace(tmp_path: Path) -> None:
    def fails() -> None:
        with profiles.tracing(str(tmp_path / "trace.json")):
            torch.ones(3).cumsum(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert "aten::cumsum" in operators(tmp_path / "trace.json")
    assert os.listdir(tmp_path) == ["trace.json"]  # noqa: PTH208 - hidden files too


def test_a_call_within_a_call_is_in_its_trace(tmp_path: Path) -> None:
    with profiles.tracing(str(tmp_path / "outer.json")):
        with profiles.tracing(str(tmp_path / "inner.json")):
            torch.ones(3).cumsum(0)
        torch.ones(3).sum()
    assert operators(tmp_path / "outer.json") >= {"aten::cumsum", "aten::sum"}
    assert not (tmp_path / "inner.json").exists()
    with profiles.tracing(str(tmp_path / "next.json")):
        torch.ones(3).sum()
    assert "aten::sum" in operators(tmp_path / "next.json")


def test_the_thread_that_runs_the_call_is_traced(tmp_path: Path) -> None:
    def work() -> None:
        with profiles.tracing(str(tmp_path / "trace.json")):
            x = torch.ones(3, requires_grad=True)
            (x * 2).sum().backward()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert operators(tmp_path / "trace.json") >= {"aten::mul", "aten::sum", "MulBackward0"}


def test_a_trace_that_cannot_be_written_is_said_and_the_call_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = []
    path = tmp_path / "file" / "trace.json"
    said = r"NRL_PROFILE: .*file/trace.json could not be written: (NotADir|FileExists)"
    with pytest.warns(UserWarning, match=said), profiles.tracing(str(path)):
        result.append(torch.ones(3).sum())
    assert result == [3.0]


@pytest.mark.gpu
def test_cuda_kernels_are_traced(tmp_path: Path) -> None:
    with profiles.tracing(str(tmp_path / "trace.json")):
        x = torch.ones(64, 64, device="cuda")
        (x @ x).sum().item()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)


# --- Nsight Systems


@pytest.mark.parametrize("environ", [{}, {"NRL_NSIGHT": ""}, {"NRL_NSIGHT": "sampler,other"}])
def test_meshes_that_are_not_asked_for_run_as_they_are(environ: Mapping[str, str]) -> None:
    assert profiles.nsight("trainer", environ) == []


def test_the_interpreter_is_started_under_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives the text to a shell, after `exec`; what stands in for nsys here says how it was called."""
    bin = tmp_path / "bin"
    bin.mkdir()
    nsys = bin / "nsys"
    nsys.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ] || [ "$1" = profile ]; do echo "$1"; shift; done\nexec "$@"\n'
    )
    nsys.chmod(0o755)
    python = tmp_path / "a $(venv); 'of' mine" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setenv("NRL_NSIGHT", "sampler, trainer")
    with profiles.profiling(tmp_path / "a run", {}):
        text = f"exec {interpreter_command('trainer', str(python))} -c {shlex.quote('print(1 + 1)')}"
    environ = os.environ | {"PATH": f"{bin}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, env=environ, check=True)
    assert done.stdout.splitlines() == [
        "profile",
        "--trace=cuda,cudnn,cublas,nvtx",
        "--stop-on-exit=true",
        f"--output={tmp_path}/a run/profile/nsight-trainer.%p",
        "2",
    ]
    assert (tmp_path / "a run" / "profile").is_dir()
