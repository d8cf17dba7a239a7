"""What is installed on this host and what is around nrl: each finding of `nrl doctor` is made to appear."""

import http.server
import json
import os
import shutil
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from uv import find_uv_bin

from nrl.errors import ExecutableError
from nrl.ops.doctor import host_probe, installation, service_checks
from nrl.ops.doctor.findings import Check, Finding, make_note, make_ok
from nrl.ops.doctor.host_probe import look_at_torch
from nrl.ops.doctor.runner import run_checks
from nrl.runtime.node.machine import Facts, collect_facts
from nrl.runtime.venvs.environments import INVENTORY
from nrl.runtime.venvs.recipes import make_recipe

GPU = {
    "driver": "550.54",
    "cuda": "12.4",
    "devices": [{"name": "NVIDIA A100"}] * 2,
    "links": [],
    "error": "",
    "unseen": [],
}
TORCH: dict[str, Any] = {
    "version": "2.13.0+cu130",
    "cuda": "13.0",
    "hip": None,
    "devices": 0,
    "said": [],
    "chosen": "0",
}


@pytest.fixture(scope="module")
def here() -> Facts:
    return collect_facts()


def found(check: Check, machine: Facts) -> list[Finding]:
    return list(check(machine))


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(stat.S_IRWXU)
    return path


# --- what is installed


def test_python_is_one_that_nrl_needs(here: Facts) -> None:
    assert [each.level for each in found(installation.python, here)] == ["ok"]
    [old] = found(installation.python, {**here, "python": "3.11.4"})
    assert (old.level, old.found[:6]) == ("failed", "3.11.4")
    assert "<3.13,>=3.12" in old.found or ">=3.12,<3.13" in old.found


def test_an_nrl_that_lies_on_the_path_alone_asks_for_nothing(here: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    assert [each.level for each in found(installation.python, {**here, "python": "3.11.4"})] == ["ok"]


def test_what_is_installed_is_the_lock(here: Facts) -> None:
    assert [(each.check, each.level) for each in found(installation.lock, here)] == [("uv", "ok"), ("lock", "ok")]


def test_another_package_and_another_uv_than_the_lock_has(
    here: Facts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = program(tmp_path / "uv", f'[ "$1" = --version ] && echo uv 0.1.0 || exec {find_uv_bin()} "$@"')
    monkeypatch.setitem(sys.modules, "uv", SimpleNamespace(find_uv_bin=lambda: str(other)))
    for name, version in (("rich", "14.0.99"), ("transformers", "4.0.0")):  # inside, and outside of what nrl asks for
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    needed, uv, lock = found(installation.lock, here)
    assert (needed.check, needed.level) == ("lock", "failed")
    assert needed.found == "nrl needs transformers<5.24,>=5.19 (4.0.0)"
    assert (uv.level, uv.values["version"]) == ("warning", "0.1.0")
    assert uv.found.startswith("0.1.0, ")
    assert lock.level == "warning"
    assert "rich 14.0.99 instead of" in lock.found
    assert [each.split()[0] for each in lock.values["differing"]] == ["rich", "transformers"]


def test_no_uv_and_a_lock_that_cannot_be_read(here: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", shutil.which("false", path="/usr/bin:/bin"))
    uv, lock = found(installation.lock, here)
    assert (uv.check, uv.level) == ("uv", "failed")
    assert "python -m pip install uv" in uv.todo
    assert (lock.check, lock.level) == ("lock", "failed")


def test_torch_that_cannot_be_imported(here: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [broken] = found(installation.torch, here)
    assert broken.level == "failed"
    assert "OSError: libcudart.so.13" in broken.found
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    assert look_at_torch(sys.executable, False, patience=0.2) == {"error": "it did not end within 0.2 s"}


def torch_of_files(folder: Path, libraries: bytes) -> None:
    """A torch whose libraries are these bytes, and which says on standard error when it is imported."""
    (folder / "torch/lib").mkdir(parents=True)
    (folder / "torch/lib/libtorch_python.so").write_bytes(libraries)
    (folder / "torch/version.py").write_text("__version__ = '2.0+cu99'; cuda = '9.9'; hip = None")
    (folder / "torch/__init__.py").write_text("raise ImportError('it is imported')")


def test_without_gpus_torch_is_not_imported_but_its_libraries_load(
    here: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = next((Path(sys.prefix) / "lib").glob("python*/site-packages/torch/lib/libtorch_global_deps.so"))
    torch_of_files(tmp_path, library.read_bytes())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # Its needs are beside the original
    monkeypatch.setenv(
        "LD_LIBRARY_PATH", ":".join(map(str, [library.parent, *library.parents[2].glob("nvidia/*/lib")]))
    )
    [whole] = found(installation.torch, here)
    assert (whole.level, whole.found) == ("ok", "2.0+cu99, built for CUDA 9.9")
    assert "it is imported" in look_at_torch(sys.executable, True)["error"]
    (tmp_path / "torch/lib/libtorch_python.so").write_bytes(b"half of it")
    [broken] = found(installation.torch, here)
    assert (broken.level, "it is imported" in broken.found) == ("failed", True)


def test_what_hides_gpus_is_left_out_where_ray_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert look_at_torch(sys.executable, False)["chosen"] == "7"
    assert look_at_torch(sys.executable, False, hidden=False)["chosen"] is None


@pytest.mark.parametrize(
    ("gpus", "cuda", "level", "said"),
    [
        (None, "13.0", "note", "no Python here has torch and Ray 2.60.0"),
        (GPU, "13.0", "failed", "the program's is built for CUDA 13.0, and driver 550.54 runs CUDA 12.4 at most"),
        (GPU, "12.8", "note", "driver 550.54 runs the program's, for CUDA 12.8"),
        (GPU, None, "note", "no Python here has torch and Ray 2.60.0"),
        ({**GPU, "devices": [], "cuda": None}, "13.0", "note", "no Python here has torch and Ray 2.60.0"),
    ],
)
def test_a_driver_is_judged_where_no_torch_is_yet(gpus: Any, cuda: str | None, level: str, said: str) -> None:
    finding = installation.judge_future_torch(gpus, {**TORCH, "cuda": cuda}, "2.60.0")
    assert (finding.level, said in finding.found) == (level, True)
    assert ("a driver for CUDA 13.0" in finding.todo) == (level == "failed")


@pytest.mark.parametrize(
    ("seen", "level", "said", "todo"),
    [
        ({}, "failed", "driver 550.54 runs CUDA 12.4 at most, so torch sees none of 2 GPU(s)", "driver for CUDA 13.0"),
        ({"cuda": "12.1", "why": "no device"}, "failed", "sees none of 2 GPU(s): no device", "dmesg"),
        ({"cuda": None}, "failed", "built for CPUs alone, sees none", "torch's build for CUDA"),
        ({"devices": 1}, "note", "sees 1 of 2 GPUs: CUDA_VISIBLE_DEVICES is 0", ""),
        ({"devices": 2, "nccl": "2.28.3"}, "ok", "sees 2 GPU(s); NCCL 2.28.3", ""),
        (
            {"devices": 2, "nccl": "2", "capabilities": ["70"], "built_for": ["sm_80", "sm_90", "compute_90"]},
            "failed",
            "built for compute_90, sm_80, sm_90, and a GPU here is sm_70",
            "lock a torch",
        ),
        (
            {"devices": 2, "nccl": "2", "capabilities": ["86", "121", "90"], "built_for": ["sm_80", "compute_90"]},
            "ok",
            "",
            "",
        ),
    ],
)
def test_torch_and_the_gpus(
    seen: dict[str, Any], level: str, said: str, todo: str, here: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch says on such machines is put in the place of what it says here: there is no GPU."""
    monkeypatch.setattr(installation, "look_at_torch", lambda python, gpus: {**TORCH, **seen})
    last = found(installation.torch, {**here, "gpus": GPU})[-1]
    assert last.level == level
    assert said in last.found
    assert todo in last.todo


def test_torch_is_asked_for_gpus_of_which_nvidia_smi_says_nothing(here: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is imported, and has to see as many."""
    unseen = {**GPU, "driver": None, "cuda": None, "devices": [], "unseen": ["/dev/nvidia0"]}
    for devices, level in ((1, "ok"), (0, "failed")):
        asked = list[bool]()

        def look(python: str, gpus: bool, devices: int = devices, asked: list[bool] = asked) -> dict[str, Any]:
            asked.append(gpus)
            return {**TORCH, "devices": devices, "nccl": "2"}

        monkeypatch.setattr(installation, "look_at_torch", look)
        last = found(installation.torch, {**here, "gpus": unseen})[-1]
        assert (last.level, asked) == (level, [True])
        assert ("sees 1 GPU(s)" in last.found) == (level == "ok")


def test_environments_that_are_stale_damaged_or_half_built(
    here: Facts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NRL_VENV_DIR", str(tmp_path))
    [none] = found(installation.environments, here)
    assert (none.level, none.todo[:21]) == ("note", "`nrl venvs build base")
    wanted = make_recipe("base")

    def put(name: str, inventory: dict[str, Any]) -> None:
        env = tmp_path / name
        (env / "bin").mkdir(parents=True)
        site = env / "lib/python3.12/site-packages"
        for package, each in inventory["packages"].items():
            info = site / f"{package.replace('-', '_')}-{each['version']}.dist-info"
            info.mkdir(parents=True)
            (info / "RECORD").write_text(f'{package}/here.py,sha256=1,2\n"{package}/a, b.py",,\n{package}/here.pyc,,\n')
            (site / package).mkdir()
            (site / package / "here.py").touch()
            (site / package / "a, b.py").touch()
        (env / "bin/python").symlink_to(sys.executable)
        (env / INVENTORY).write_text(
            json.dumps({**inventory, "name": name, "executable": "base", "built": "2026-01-01T00:00:00Z"})
        )

    old = dict(wanted.inventory["packages"])
    old["torch"] = {**old["torch"], "version": "2.0.0"}
    put("base-0123456789ab", {**wanted.inventory, "packages": old})
    (tmp_path / ".base-77.1.building").mkdir()
    stale, begun = found(installation.environments, here)
    assert stale.level == "warning"
    assert f"torch 2.0.0 -> {here['packages']['torch'].partition('+')[0]}" in stale.found
    assert "nrl venvs build base" in stale.todo
    assert (begun.level, begun.found[:12]) == ("note", "1 incomplete")
    put(wanted.name, {**wanted.inventory})
    whole = found(installation.environments, here)[0]
    assert (whole.level, whole.found) == ("ok", f"{wanted.name} is complete, and is what the lock says")
    site = tmp_path / wanted.name / "lib/python3.12/site-packages"
    shutil.rmtree(next(site.glob("accelerate-*.dist-info")))
    (site / "rich" / "a, b.py").unlink()
    (site / "xyz-1.0.dist-info").mkdir()
    numpy = next(site.glob("numpy-*.dist-info"))
    numpy.rename(site / "numpy-1.0.dist-info")
    damaged = found(installation.environments, here)[0]
    assert damaged.level == "warning"
    assert damaged.found == (
        f"{wanted.name}: accelerate is missing, xyz does not belong there, numpy is 1.0 instead of "
        f"{wanted.inventory['packages']['numpy']['version']}, rich lacks 1 of its files, such as rich/a, b.py"
    )
    assert "`NRL_FORCE_REBUILD_VENVS=1 nrl venvs build base`" in damaged.todo


def test_environments_that_cannot_be_written_and_lack_the_source_or_whose_lock_cannot_be_read() -> None:
    made = SimpleNamespace(name="base-1", sources=["nrl-torch-0.1.0-aa"], inventory={})
    whole = {"name": "base-1", "executable": "base", "built": "", "wrong": []}
    image = {"folder": "/image", "writable": False, "whole": [whole], "begun": [], "sources": ["nrl-torch-0.1.0-bb"]}
    judged = installation.judge_environments
    [lacking] = judged(image, lambda name: made)  # type: ignore[arg-type,return-value]
    assert (lacking.level, "/image has no nrl-torch-0.1.0-aa beside it" in lacking.found) == ("warning", True)
    assert "set NRL_VENV_DIR" in lacking.todo
    for change in ({"writable": True}, {"sources": ["nrl-torch-0.1.0-aa"]}):
        [well] = judged({**image, **change}, lambda name: made)  # type: ignore[arg-type,return-value]
        assert well.level == "ok"

    def unreadable(name: str) -> Any:
        raise ExecutableError("the lock is broken")

    [broken] = judged(image, unreadable)
    assert (broken.level, broken.found) == ("warning", "base: the lock is broken")


# --- what is around nrl


def test_what_ray_has_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    [none] = found(service_checks.ray, collect_facts())
    assert (none.level, none.values["address"]) == ("ok", None)
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        file.write_text(f"{address}\n")
        [runs] = found(service_checks.ray, collect_facts())
        assert (runs.level, runs.found) == ("ok", f"a cluster runs here, at {address}")
    [stale] = found(service_checks.ray, collect_facts())
    assert stale.level == "warning"
    assert address in stale.found
    assert stale.todo.startswith(f"rm {file}")
    file.write_text("nonsense")
    assert found(service_checks.ray, collect_facts())[0].level == "warning"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    assert found(service_checks.ray, collect_facts())[0].found.startswith("RAY_ADDRESS is 10.0.0.9:6379")


@pytest.fixture
def mirror() -> Iterator[str]:
    """A server that answers as a hub does."""

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *said: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_the_hub_and_a_token_that_nobody_sees(here: Facts, monkeypatch: pytest.MonkeyPatch, mirror: str) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_nobody_shall_see_me")
    monkeypatch.setenv("HF_ENDPOINT", mirror)
    [reached] = found(service_checks.hub, here)
    assert (reached.level, reached.values["token"]) == ("ok", True)
    assert f"{mirror} answers" in reached.found
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    [lost] = found(service_checks.hub, here)
    assert lost.level == "note"
    assert "does not answer" in lost.found
    assert "HF_HUB_OFFLINE=1" in lost.todo
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    [offline] = found(service_checks.hub, here)
    assert (offline.level, offline.values["offline"]) == ("note", ["TRANSFORMERS_OFFLINE"])
    assert "nobody_shall" not in repr([reached, lost, offline])


def test_a_sandbox_that_is_missing_or_fails(here: Facts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = dict.fromkeys(("bwrap", "prlimit", "setpriv"))
    for name in wanted:
        program(tmp_path / name, "echo no permissions to create a new namespace >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    [fails] = found(service_checks.sandbox, here)
    assert fails.level == "note"
    assert "no permissions" in fails.found
    assert "namespaces" in fails.todo


@pytest.mark.skipif(shutil.which("bwrap") is not None, reason="bubblewrap is installed")
def test_a_sandbox_that_is_not_installed(here: Facts) -> None:
    [missing] = found(service_checks.sandbox, here)
    assert "apt-get install bubblewrap" in missing.found


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_sandbox_that_works(here: Facts) -> None:
    assert [each.level for each in found(service_checks.sandbox, here)] == ["ok"]


def test_a_folder_for_all_hosts_is_looked_at_on_one(tmp_path: Path) -> None:
    [well] = service_checks.shared(tmp_path)
    assert (well.level, well.values["path"], list(tmp_path.iterdir())) == ("ok", str(tmp_path), [])
    [missing] = service_checks.shared(tmp_path / "mistyped")
    assert (missing.level, missing.found) == ("failed", f"{tmp_path / 'mistyped'} does not exist")
    assert "mkdir -p" in missing.todo
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert [each.found for each in service_checks.shared(tmp_path / "file")] == [f"{tmp_path / 'file'} is no folder"]
    [closed] = service_checks.shared(Path("/proc"))
    assert (closed.level, closed.found.startswith("/proc cannot be written (")) == ("failed", True)


@pytest.mark.parametrize(("why", "level"), [("", "ok"), ("there is no bwrap", "note")])
def test_a_sandbox_of_another_host(why: str, level: str) -> None:
    finding = service_checks.judge_sandbox({"why": why})
    assert (finding.level, why in finding.found) == (level, True)
    assert ("apt-get install bubblewrap" in finding.todo) == bool(why)


def test_the_smallest_sandbox_runs_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bwrap", "prlimit", "setpriv"):
        program(tmp_path / name, "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert host_probe._look_at_sandbox() == {"why": ""}
    program(tmp_path / "bwrap", "echo no permissions >&2; exit 1")
    assert host_probe._look_at_sandbox() == {"why": "no permissions"}
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "prlimit").unlink()
    assert host_probe._look_at_sandbox() == {"why": "there is no prlimit"}


# --- running them


def test_checks_are_told_in_their_order_and_one_that_hangs_is_told_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    def slow(machine: Facts) -> Iterator[Finding]:
        time.sleep(0.3)
        yield make_ok("slow", str(machine["host"]))

    def hangs(machine: Facts) -> Iterator[Finding]:
        time.sleep(30)
        yield make_ok("hangs", "")

    def wrong(machine: Facts) -> Iterator[Finding]:
        yield make_ok("wrong", str(machine["nothing"]))

    def quick(machine: Facts) -> Iterator[Finding]:
        yield make_note("quick", "1")
        yield make_note("quick", "2")

    began = time.monotonic()
    some = list(run_checks([slow, hangs, wrong, quick], 1.0, lambda: {"host": "a"}))
    assert time.monotonic() - began < 10
    assert [(each.check, each.level) for each in some] == [
        ("slow", "ok"), ("hangs", "warning"), ("wrong", "failed"), ("quick", "note"), ("quick", "note"),
    ]  # fmt: skip
    assert some[0].found == "a"
    assert some[1].found == "late: no answer within 1 s, so nothing is known of it"
    assert some[1].todo.startswith("deadline= waits longer (1 s now)")
    assert "KeyError" in some[2].found


def test_a_wait_says_for_how_long(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl.ops.doctor.runner.SILENCE", 0.6)

    def slow(machine: Facts) -> Iterator[Finding]:
        time.sleep(0.9)
        yield make_ok("slow", "")

    assert [each.level for each in run_checks([slow], 60.0, dict)] == ["ok"]
    assert capsys.readouterr().err == "doctor: looking at slow, 1 s so far\n"


def test_facts_that_do_not_come_are_told() -> None:
    def dead() -> Facts:
        raise OSError("gone")

    def hangs() -> Facts:
        time.sleep(30)
        return {}

    [late] = run_checks([installation.python], 0.1, hangs)
    [wrong] = run_checks([installation.python], 5.0, dead)
    assert [(each.check, each.level) for each in (late, wrong)] == [("facts", "failed")] * 2
