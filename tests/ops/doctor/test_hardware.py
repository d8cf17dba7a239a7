"""What a machine is, and what that means: each finding of `nrl doctor` that needs facts alone is made to appear."""

import copy
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nrl.ops.doctor.findings import Finding
from nrl.ops.doctor.hardware import HARDWARE
from nrl.runtime.node.gpus import inspect_gpus, parse_links
from nrl.runtime.node.machine import Facts, collect_facts, find_python_with_torch, list_folders
from nrl.runtime.venvs.environments import DISTRIBUTION, INVENTORY

GIB = 1 << 30
H100 = {"name": "NVIDIA H100 80GB HBM3", "memory": 80 * GIB, "used": 0, "mode": "Default", "mig": "Disabled"}
FOLDER = {"exists": True, "total": 500 * GIB, "free": 200 * GIB, "device": 1, "writable": True}
GOOD: Facts = {
    "host": "host-a",
    "addresses": ["10.77.0.1"],
    "cores": {"machine": 8, "allowed": 8, "quota": None, "usable": 8},
    "memory": {"total": 64 * GIB, "available": 60 * GIB, "limit": None},
    "link_mode": None,
    "folders": {name: {"path": f"/data/{name}", **FOLDER} for name in ("environments", "uv_cache", "hub", "temporary")}
    | {"shared_memory": {"path": "/dev/shm", **FOLDER, "total": 32 * GIB, "free": 32 * GIB}},
    "open_files": [65536, 65536],
    "gpus": {
        "driver": "580.1",
        "cuda": "13.0",
        "devices": [H100, H100],
        "links": [["X", "NV18"], ["NV18", "X"]],
        "error": "",
        "unseen": [],
    },
}


def judged(facts: Facts) -> list[Finding]:
    return [finding for check in HARDWARE for finding in check(facts)]


def test_a_good_machine_is_good() -> None:
    found = judged(GOOD)
    assert {each.level for each in found} == {"ok"}
    assert {each.check for each in found} == {check.__name__ for check in HARDWARE}
    said = {each.check: each.found for each in found}
    assert said["cores"] == "8"
    assert said["gpu"] == "2 x NVIDIA H100 80GB HBM3, 80 GiB; driver 580.1"
    assert said["links"] == "NV18"


WORSE: list[tuple[str, Any, str, str, str, str]] = [
    ("cores.quota", 2.5, "cores", "warning", "2.5 of the machine's 8: the cgroup allows 2.5", "OMP_NUM_THREADS="),
    ("memory.available", GIB, "memory", "warning", "64 GiB; 1.0 GiB available", "end what else runs"),
    ("memory.available", 0, "memory", "warning", "64 GiB; 0.0 GiB available", "end what else runs"),
    ("memory.limit", 3 * GIB, "memory", "warning", "3.0 GiB, the limit of the cgroup, of the machine's 64 GiB", "Ray"),
    ("memory.total", None, "memory", "note", "not known", ""),
    ("folders.shared_memory.exists", False, "shared_memory", "failed", "there is no /dev/shm", "tmpfs"),
    ("folders.shared_memory.writable", False, "shared_memory", "failed", "cannot be written", "chmod 1777 /dev/shm"),
    ("folders.shared_memory.total", 64 << 20, "shared_memory", "warning", "takes 9.3 GiB", "--shm-size"),
    ("folders.environments.writable", False, "disk", "failed", "cannot be written", "set NRL_VENV_DIR"),
    ("folders.hub.error", "Stale file handle", "disk", "failed", "(Stale file handle)", "HF_HOME"),
    ("folders.uv_cache.free", 5 * GIB, "disk", "warning", "uv cache: /data/uv_cache has 5.0 GiB free", "UV_CACHE_DIR"),
    ("folders.environments.free", GIB >> 1, "disk", "failed", "has 0.5 GiB free", "NRL_VENV_DIR"),
    ("folders.temporary.free", 20 * GIB, "disk", "warning", "96% full", "RAY_TMPDIR"),
    ("folders.temporary.path", "/" + "x" * 60, "disk", "warning", "has 61 characters", "RAY_TMPDIR"),
    ("folders.environments.device", 2, "mounts", "warning", "are on two mounts", "of one mount"),
    ("link_mode", "copy", "mounts", "warning", "UV_LINK_MODE is copy", "leave UV_LINK_MODE out"),
    ("addresses", [], "host_name", "warning", "host-a stands for no address", "/etc/hosts"),
    ("addresses", ["127.0.1.1", "10.0.0.3"], "host_name", "note", "host-a stands for 127.0.1.1, 10.0", "/etc/hosts"),
    ("open_files", [1024, 4096], "open_files", "warning", "1024 a process, at most 4096", "ulimit -n 65536"),
    ("gpus", None, "gpu", "note", "there is none", ""),
    ("gpus.error", "couldn't communicate", "gpu", "failed", "finds no GPU: couldn't communicate", "mend the driver"),
    ("gpus.devices", [], "gpu", "failed", "it lists none", "--gpus all"),
    ("gpus.devices", [H100, H100 | {"name": "NVIDIA A100"}], "gpu", "warning", "they differ", "CUDA_VISIBLE_DEVICES"),
    ("gpus.devices", [H100 | {"used": 9 * GIB}], "gpu", "warning", "GPU 0: 9.0 GiB of its memory are in use", "end it"),
    ("gpus.devices", [H100 | {"mode": "Exclusive_Process"}], "gpu", "warning", "Exclusive_Process", "-c DEFAULT"),
    ("gpus.devices", [H100 | {"mig": "Enabled"}], "gpu", "note", "GPU 0 is cut in parts", "CUDA_VISIBLE_DEVICES"),
    ("gpus.devices", [H100 | {"name": "Abacus"}], "gpu", "note", "how fast a Abacus is", ""),
    ("gpus.links", [["X", "SYS"], ["SYS", "X"]], "links", "note", "SYS: some GPUs", "keep `tp` within"),
    ("gpus.links", [], "links", "note", "not known", ""),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "check", "level", "found", "todo"), WORSE)
def test_what_is_worse_is_found(key: str, value: Any, check: str, level: str, found: str, todo: str) -> None:
    worse = copy.deepcopy(GOOD)
    *way, last = key.split(".")
    place = worse
    for each in way:
        place = place[each]
    place[last] = value
    wrong = [each for each in judged(worse) if each.check == check and each.level == level]
    assert [each for each in wrong if found in each.found and todo in each.todo], judged(worse)
    others = [each for each in judged(worse) if each.check != check and each.level != "ok"]
    assert others == [] or key.startswith(("gpus", "folders.shared_memory", "memory")), others


def test_the_mode_of_links_is_that_of_the_host_that_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_LINK_MODE", "copy")
    assert collect_facts()["link_mode"] == "copy"
    assert {each.level for each in judged(GOOD)} == {"ok"}  # of another host, where nobody asked for copies


def test_a_warning_has_to_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="does not say what to do"):
        Finding("disk", "warning", "full")


def test_this_machine_is_looked_up() -> None:
    found = collect_facts()
    assert found["host"] == socket.gethostname()
    assert found["packages"]["torch"]
    assert found["packages"][DISTRIBUTION]
    assert found["lock"]["path"].endswith("uv.lock")
    assert 0 < found["cores"]["allowed"] <= found["cores"]["machine"]
    assert 0 < found["memory"]["available"] <= found["memory"]["total"]
    assert found["folders"]["temporary"]["writable"]
    assert find_python_with_torch("2.60.0") == found["executable"]


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       1048576 kB\nMemFree: 1 kB\nMemAvailable:    524288 kB\n"


@pytest.mark.parametrize(
    ("files", "quota", "limit"),
    [
        ({}, None, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None, None),
        (
            {
                "proc/self/cgroup": "0::/jobs/mine\n",
                "sys/fs/cgroup/jobs/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/jobs/mine/cpu.max": "max 100000\n",
                "sys/fs/cgroup/jobs/mine/memory.max": "536870912\n",
                "sys/fs/cgroup/jobs/memory.max": "max\n",
            },
            1.5,
            1 << 29,
        ),
        (  # of version 1
            {
                "proc/self/cgroup": "4:memory:/\n3:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "268435456\n",
            },
            2.5,
            1 << 28,
        ),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            None,
            None,
        ),
    ],
)
def test_cgroups_are_read(files: dict[str, str], quota: float | None, limit: int | None, tmp_path: Path) -> None:
    found = collect_facts(written(tmp_path, {"proc/meminfo": MEMINFO, **files}))
    assert (found["cores"]["quota"], found["memory"]["limit"]) == (quota, limit)
    assert (found["memory"]["total"], found["memory"]["available"]) == (1 << 30, 1 << 29)


def test_a_machine_without_proc_is_looked_up_all_the_same(tmp_path: Path) -> None:
    found = collect_facts(tmp_path)
    assert found["memory"] == {"total": None, "available": None, "limit": None}
    assert found["cores"]["quota"] is None


def test_folders_are_where_variables_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("NRL_VENV_DIR", "UV_CACHE_DIR", "HF_HOME", "RAY_TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    (tmp_path / "NRL_VENV_DIR").mkdir()
    assert {str(path.name) for path in list_folders().values()} == {
        "NRL_VENV_DIR",
        "UV_CACHE_DIR",
        "HF_HOME",
        "RAY_TMPDIR",
        "shm",
    }
    found = collect_facts()["folders"]
    assert found["environments"]["exists"]
    assert not found["uv_cache"]["exists"]
    assert found["uv_cache"]["free"] == pytest.approx(found["environments"]["free"], rel=0.1)


def test_an_environment_with_torch_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where this process's own interpreter has none, as on a node whose Ray was installed alone."""
    monkeypatch.setenv("NRL_VENV_DIR", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, ray in (("base-1", "2.60.0"), ("base-2", "2.59.0"), ("tiny-1", None)):
        versions = {"torch": "2.13.0", "ray": ray} if ray else {"torch": "2.13.0"}
        packages = {each: {"version": version} for each, version in versions.items()}
        inventory = f'{{"name": "{name}", "packages": {packages}}}'.replace("'", '"')
        written(tmp_path / name, {"bin/python": "", INVENTORY: inventory})
    assert find_python_with_torch("2.60.0") == str(tmp_path / "base-1" / "bin" / "python")
    assert find_python_with_torch("2.61.0") is None


XML = """<?xml version="1.0" ?>
<nvidia_smi_log><driver_version>580.65.06</driver_version><cuda_version>13.0</cuda_version>
<gpu id="0"><product_name>NVIDIA H100 80GB HBM3</product_name><compute_mode>Default</compute_mode>
<mig_mode><current_mig>Disabled</current_mig></mig_mode>
<fb_memory_usage><total>81559 MiB</total><used>4 MiB</used></fb_memory_usage></gpu>
<gpu id="1"><product_name>NVIDIA H100 80GB HBM3</product_name><compute_mode>Default</compute_mode>
<fb_memory_usage><total>81559 MiB</total><used>70000 MiB</used></fb_memory_usage></gpu></nvidia_smi_log>
"""
TOPO = """\x1b[4m	GPU0	GPU1	NIC0	CPU Affinity	NUMA Affinity\x1b[0m
GPU0	 X 	NV18	PXB	0-51	0
GPU1	NV18	 X 	SYS	52-103	1
NIC0	PXB	SYS	 X

Legend:
  X    = Self
"""


def program(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(stat.S_IRWXU)
    return folder / name


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program in the place of nvidia-smi, which has no GPU to speak of here."""

    def put(text: str) -> None:
        program(tmp_path, "nvidia-smi", text)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    (tmp_path / "xml").write_text(XML)
    (tmp_path / "topo").write_text(TOPO)
    return put


def test_gpus_are_as_nvidia_smi_says(nvidia_smi: Callable[[str], None], tmp_path: Path) -> None:
    nvidia_smi(f'case "$1" in -q) cat {tmp_path}/xml;; topo) cat {tmp_path}/topo;; esac')
    found = inspect_gpus()
    assert found is not None
    assert (found["driver"], found["cuda"], found["error"]) == ("580.65.06", "13.0", "")
    assert [each["used"] for each in found["devices"]] == [4 << 20, 70000 << 20]
    assert [each["mig"] for each in found["devices"]] == ["Disabled", ""]
    assert found["links"] == [["X", "NV18"], ["NV18", "X"]]
    busy = [each for each in judged(GOOD | {"gpus": found}) if each.level == "warning"]
    assert [each.found for each in busy] == ["GPU 1: 68 GiB of its memory are in use already"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("echo NVIDIA-SMI has failed, because; exit 9", "NVIDIA-SMI has failed, because"),
        ("echo Failed to initialize NVML >&2; exit 18", "Failed to initialize NVML"),
        ("echo no XML", "syntax error"),
    ],
)
def test_a_driver_that_is_broken_is_told(nvidia_smi: Callable[[str], None], text: str, error: str) -> None:
    nvidia_smi(text)
    found = inspect_gpus()
    assert found is not None
    assert error in found["error"]
    assert [each.level for each in judged(GOOD | {"gpus": found}) if each.check == "gpu"] == ["failed"]


def test_gpus_without_nvidia_smi_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in a container that was given the devices, and not the driver's programs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("nrl.runtime.node.gpus._DEVICES", str(tmp_path))
    assert inspect_gpus() is None
    for name in ("nvidiactl", "nvidia1", "nvidia0"):
        (tmp_path / name).touch()
    found = inspect_gpus()
    assert found is not None
    assert found["unseen"] == [f"{tmp_path}/nvidia0", f"{tmp_path}/nvidia1"]
    [finding] = [each for each in judged(GOOD | {"gpus": found}) if each.check == "gpu"]
    assert (finding.level, finding.todo[:12]) == ("warning", "put it there")
    assert f"there is {tmp_path}/nvidia0, {tmp_path}/nvidia1, and no nvidia-smi" in finding.found


def test_links_that_are_not_there_are_empty() -> None:
    assert parse_links("nonsense", 2) == []
    assert parse_links(TOPO, 3) == []
