"""What differs between hosts, and what the way between two of them is: each finding is made to appear."""

import copy
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import pytest

from nrl.ops.doctor.findings import Finding
from nrl.ops.doctor.host_diff import (
    describe_failed_link,
    describe_link,
    judge_clock,
    judge_slots,
    list_differences,
    pair_in_rounds,
)
from nrl.ops.doctor.remote_checks import describe_error
from nrl.runtime.node.machine import PACKAGES, Facts
from nrl.runtime.venvs.environments import DISTRIBUTION

GIB = 1 << 30
GPUS = {
    "driver": "580.1",
    "cuda": "13.0",
    "devices": [{"name": "NVIDIA H100"}] * 8,
    "links": [],
    "error": "",
    "unseen": [],
}
HOST: Facts = {
    "addresses": ["10.77.0.1"],
    "python": "3.12.4",
    "platform": "linux-x86_64",
    "packages": dict.fromkeys(PACKAGES, "1.0"),
    "lock": {"path": "/nrl/uv.lock", "digest": "aa"},
    "cores": {"machine": 8, "allowed": 8, "quota": None, "usable": 8},
    "memory": {"total": 64 * GIB, "available": 60 * GIB, "limit": None},
    "gpus": GPUS,
}

SAME = ["Python", *PACKAGES, "lock", "platform", "cores", "memory", "GPUs"]


def compared(change: Callable[[Facts], object]) -> list[Finding]:
    other = copy.deepcopy(HOST)
    change(other)
    return list(list_differences({"a": HOST, "b": other}, HOST))


def test_equal_hosts_are_one_line() -> None:
    [same] = compared(lambda facts: None)
    assert (same.level, same.host) == ("ok", "")
    assert same.found == f"all 2 have the same {', '.join(SAME)}"
    assert list(list_differences({"a": HOST}, HOST)) == []


@pytest.mark.parametrize(
    ("change", "level", "said", "differing"),
    [
        ({"python": "3.11.4"}, "failed", "Python 3.11.4; the program's is 3.12.4", "Python"),
        ({"python": "3.12.1"}, "warning", "Python 3.12.1; the program's is 3.12.4, with which environments", "Python"),
        ({"packages": {**HOST["packages"], "ray": "2.9"}}, "failed", "ray 2.9; the program has 1.0", "ray"),
        ({"packages": {**HOST["packages"], "torch": "2.9"}}, "warning", "torch 2.9; the program has 1.0", "torch"),
        (
            {"packages": {**HOST["packages"], DISTRIBUTION: None}},
            "note",
            f"{DISTRIBUTION} is not installed; the program has 1.0",
            DISTRIBUTION,
        ),
        (
            {"lock": {"path": "/old/uv.lock", "digest": "bb"}},
            "warning",
            "/old/uv.lock differs from the program's",
            "lock",
        ),
        ({"platform": "linux-aarch64"}, "failed", "it is linux-aarch64, the program's host linux-x86_64", "platform"),
        (
            {"cores": {"machine": 8, "allowed": 8, "quota": 4.0, "usable": 4}},
            "note",
            "4 cores; the program's host has 8",
            "cores",
        ),
        ({"memory": {"total": 32 * GIB}}, "note", "32 GiB of memory; the program's host has 64 GiB", "memory"),
        ({"addresses": ["127.0.1.1"]}, "warning", "its own name stands for 127.0.1.1", ""),
        ({"gpus": {**GPUS, "driver": "550.2"}}, "note", "NVIDIA driver 550.2; a has 580.1", "GPUs"),
        ({"gpus": {**GPUS, "devices": [{"name": "NVIDIA L4"}]}}, "warning", "NVIDIA L4; a has NVIDIA H100", "GPUs"),
    ],
)
def test_what_differs_is_named_by_host(change: Mapping[str, Any], level: str, said: str, differing: str) -> None:
    [[finding], [same]] = [
        [each for each in compared(lambda facts: facts.update(change)) if (each.level == "ok") == well]
        for well in (False, True)
    ]
    assert (finding.level, finding.host) == (level, "b")
    assert finding.found.startswith(said)
    assert same.values["same"] == [each for each in SAME if each != differing]


def test_a_name_that_leads_home_does_not_hide_that_locks_are_the_same() -> None:
    same, name = compared(lambda facts: facts.update(addresses=["127.0.1.1"]))
    assert (same.level, "lock" in same.values["same"], name.check) == ("ok", True, "host_name")


def test_a_host_without_gpus_does_not_differ_and_no_lock_is_no_other_lock() -> None:
    [same] = compared(lambda facts: facts.update(gpus=None, lock=None))
    assert (same.level, same.values["same"]) == ("ok", [each for each in SAME if each != "lock"])
    assert same.found.endswith("; locks were not compared: b has none")


@pytest.mark.parametrize(
    ("resources", "gpus", "level", "said"),
    [
        ({"CPU": 8.0}, None, "ok", "Ray hands out 8 CPU"),
        ({"CPU": 8.0, "GPU": 8.0}, GPUS, "ok", "Ray hands out 8 CPU and 8 GPU"),
        ({"CPU": 8.0}, GPUS, "warning", "Ray hands out 8 CPU and 0 GPU; the host has 8 of NVIDIA's GPUs"),
        ({"GPU": 9.0}, GPUS, "warning", "Ray hands out 0 CPU and 9 GPU; the host has 8 of NVIDIA's GPUs"),
        ({"GPU": 1.0}, None, "warning", "Ray hands out 0 CPU and 1 GPU; the host has 0 of NVIDIA's GPUs"),
        ({"GPU": 1.0}, {**GPUS, "devices": [], "unseen": ["/dev/nvidia0"]}, "ok", "Ray hands out 0 CPU and 1 GPU"),
    ],
)
def test_what_ray_hands_out(resources: dict[str, float], gpus: Any, level: str, said: str) -> None:
    [finding] = judge_slots("b", {"gpus": gpus}, resources)
    assert (finding.level, finding.found, finding.host) == (level, said, "b")


@pytest.mark.parametrize(
    ("offset", "uncertain", "level", "said"),
    [
        (0.002, 0.001, "ok", "2 ms ahead of the program's host (to 1.0 ms)"),
        (-0.4, 0.001, "ok", "400 ms behind"),
        (-90.0, 0.02, "warning", "90000 ms behind the program's host (to 20.0 ms)"),
        (0.6, 0.3, "ok", "600 ms ahead"),  # which the round trip may have made
        (0.6, 0.01, "warning", "600 ms ahead"),
    ],
)
def test_a_clock_is_wrong_by_more_than_the_round_trip(offset: float, uncertain: float, level: str, said: str) -> None:
    finding = judge_clock("b", offset, uncertain)
    assert (finding.level, finding.host) == (level, "b")
    assert finding.found.startswith(said)
    assert ("NTP" in finding.todo) == (level == "warning")


DUPLICATE = (
    "NCCL error in: NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.28.9\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000\n"
)


@pytest.mark.parametrize(
    ("text", "said", "todo"),
    [
        ("nowhere0: no such interface\nmore", "do not meet: RuntimeError: nowhere0: no such interface", "NCCL_SOCKET"),
        (DUPLICATE, "NCCL version 2.28.9: Duplicate GPU detected : rank 0 and", "its own, by CUDA_VISIBLE_DEVICES"),
    ],
)
def test_two_that_do_not_meet_say_what_nccl_says(text: str, said: str, todo: str) -> None:
    finding = describe_failed_link(
        "nccl", ("a", "b"), describe_error(RuntimeError(text)), ("10.77.0.1", "10.77.0.2"), "; or later"
    )
    assert finding.level == "failed"
    assert said in finding.found
    assert "\n" not in finding.found
    assert todo in finding.todo
    assert finding.todo.endswith("; or later")
    assert ("10.77.0.1 and 10.77.0.2" in finding.todo) == (text != DUPLICATE)


@pytest.mark.parametrize("count", range(1, 9))
def test_each_two_meet_once_and_nobody_twice_in_a_round(count: int) -> None:
    names = [str(each) for each in range(count)]
    every = list(pair_in_rounds(names))
    assert sorted(tuple(sorted(pair)) for some in every for pair in some) == sorted(combinations(names, 2))
    for some in every:
        there = [name for pair in some for name in pair]
        assert len(there) == len(set(there))


@pytest.mark.parametrize(
    ("rates", "latency", "level", "todo"),
    [
        ((3e9, 2e9), 1e-4, "ok", ""),
        ((3e7, 2e9), 1e-4, "warning", "1 GB of weights takes 33 s"),
        ((3e9, 2e8), 1e-4, "warning", "look at the slower way"),
        ((3e9, 2e9), 2e-2, "note", "so far apart"),
    ],
)
def test_the_way_between_two(rates: tuple[float, float], latency: float, level: str, todo: str) -> None:
    found = [{"rate": rate, "latency": latency, "interface": "eth0"} for rate in rates]
    finding = describe_link("gloo", ("a", "b"), found)
    assert finding.level == level
    assert todo in finding.todo
    assert "over eth0 and eth0" in finding.found
    assert finding.values["hosts"] == ["a", "b"]
