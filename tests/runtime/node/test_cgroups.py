"""What a process may use, by files in the form of both versions of cgroups."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cloudpickle
import filelock
import pytest

from nrl.ops.doctor.hardware import memory
from nrl.runtime.node import cgroups
from nrl.runtime.node.clock import read_clock_and_cores
from nrl.runtime.node.machine import collect_facts
from nrl.runtime.node.probe import Probe
from nrl.runtime.ray.nodes import PORTABLE

BASE = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
GIB = 1 << 30


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with 128 processors, none of which a mask leaves out."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(128)), raising=False)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 128),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 128),
        ({"sys/fs/cgroup/cpu.max": "800000 100000\n"}, 8),
        ({"sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "25600000 100000\n"}, 128),
        ({"sys/fs/cgroup/cpu.max": "nonsense\n"}, 128),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 128),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "800000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_cores_are_those_of_the_mask_and_of_the_quota(
    files: dict[str, str], cores: int, large: None, tmp_path: Path
) -> None:
    assert cgroups.usable_cores(written(tmp_path, files)) == cores
    assert collect_facts(tmp_path)["cores"]["usable"] == cores


def test_a_mask_that_is_less_than_the_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 7}, raising=False)
    assert cgroups.usable_cores(written(tmp_path, {"sys/fs/cgroup/cpu.max": "800000 100000\n"})) == 2


def test_a_host_says_what_its_quota_allows(large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "cpu_quota", lambda root: 8.0)
    assert read_clock_and_cores()[1] == 8


def test_it_travels_to_a_python_that_has_no_nrl(tmp_path: Path) -> None:
    for module in PORTABLE:
        cloudpickle.register_pickle_by_value(module)
    try:
        (tmp_path / "shipped").write_bytes(cloudpickle.dumps((read_clock_and_cores, Probe)))
    finally:
        for module in PORTABLE:
            cloudpickle.unregister_pickle_by_value(module)
    (tmp_path / "site").mkdir()
    for package in (cloudpickle, filelock):
        shutil.copytree(Path(str(package.__file__)).parent, tmp_path / "site" / package.__name__)
    program = (
        f"import pickle, sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import importlib.util; assert importlib.util.find_spec('nrl') is None\n"
        f"clock_and_cores, Probe = pickle.load(open({str(tmp_path / 'shipped')!r}, 'rb'))\n"
        "print(clock_and_cores()[1], Probe().collect_facts('2.60.0')['cores']['usable'])"
    )
    done = subprocess.run([BASE, "-I", "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == [str(cgroups.usable_cores())] * 2, done.stderr


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "limit", "left"),
    [
        ({}, None, None),
        ({f"{V2}/memory.max": "max\n", f"{V2}/memory.current": "1024\n"}, None, None),
        ({f"{V2}/memory.max": f"{8 * GIB}\n"}, 8 * GIB, None),
        ({f"{V2}/memory.max": f"{8 * GIB}\n", f"{V2}/memory.current": f"{8 * GIB}\n"}, 8 * GIB, 0),
        (
            {
                f"{V2}/memory.max": f"{8 * GIB}\n",
                f"{V2}/memory.current": f"{8 * GIB}\n",
                f"{V2}/memory.stat": f"anon 1\ninactive_file {3 * GIB}\nactive_file 7\n",
            },
            8 * GIB,
            3 * GIB,
        ),
        (  # the group around has more, and less of it is left
            {
                "proc/self/cgroup": "0::/jobs/mine\n",
                f"{V2}/jobs/mine/memory.max": f"{8 * GIB}\n",
                f"{V2}/jobs/mine/memory.current": f"{GIB}\n",
                f"{V2}/jobs/memory.max": f"{16 * GIB}\n",
                f"{V2}/jobs/memory.current": f"{15 * GIB}\n",
            },
            8 * GIB,
            GIB,
        ),
        (
            {
                f"{V1}/memory.limit_in_bytes": f"{8 * GIB}\n",
                f"{V1}/memory.usage_in_bytes": f"{7 * GIB}\n",
                f"{V1}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
            },
            8 * GIB,
            2 * GIB,
        ),
    ],
)
def test_memory_is_what_the_limit_leaves(
    files: dict[str, str], limit: int | None, left: int | None, tmp_path: Path
) -> None:
    meminfo = f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n"
    root = written(tmp_path, {"proc/meminfo": meminfo, **files})
    assert cgroups.memory_limit(root) == (limit, left)
    found = collect_facts(root)
    assert found["memory"] == {
        "total": 64 * GIB,
        "available": 60 * GIB if left is None else left,
        "limit": limit,
    }
    [finding] = memory(found)
    assert (finding.level == "warning") == (left is not None), finding
    assert left != 0 or finding.found.endswith("; 0.0 GiB available")
