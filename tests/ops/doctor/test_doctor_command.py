"""The command `nrl doctor` on one host: its lines, its document, its exit status."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from nrl.cli.cli import main
from nrl.ops.doctor import doctor_command
from nrl.ops.doctor.findings import Finding, make_failure, make_note, make_ok, make_warning


def test_this_host_is_looked_at_and_what_failed_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", "/proc/models")  # where there is no room at all
    assert main(["doctor", "--json", "deadline=200", "shared=/nowhere/runs"]) == 1
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found.keys() == {"nrl_doctor", "host", "time", "failed", "findings"}
    assert (found["nrl_doctor"], found["failed"]) == (1, True)
    assert all(
        each.keys() == {"check", "level", "found", "todo", "host", "values"}
        and each["level"] in ("ok", "note", "warning", "failed")
        for each in found["findings"]
    )
    seen = {each["check"]: each["values"] for each in found["findings"]}
    assert seen["torch"]["version"].startswith("2.")
    wrong = [each for each in found["findings"] if each["level"] == "failed"]
    assert [(each["check"], each["values"]["path"]) for each in wrong] == [
        ("disk", "/proc/models"),
        ("shared", "/nowhere/runs"),
    ]
    assert seen.keys() == {
        "python", "uv", "lock", "torch", "environments", "cores", "memory", "shared_memory", "disk", "mounts",
        "host_name", "open_files", "gpu", "ray", "hub", "sandbox", "shared",
    }  # fmt: skip


def test_a_finding_is_a_line_and_what_to_do_another(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def some(cfg: doctor_command.Doctor) -> Iterator[Finding]:
        yield make_ok("python", "3.12")
        print("what a library says")
        yield make_note("gpu", "there is none")
        yield make_warning("shared_memory", "small", "make it larger")

    monkeypatch.setattr(doctor_command, "_run_checks", some)
    monkeypatch.setattr("socket.gethostname", lambda: "host-a")
    assert main(["doctor"]) == 0
    written = capsys.readouterr()
    assert written.err == "what a library says\n"
    assert written.out == (
        "this host, host-a\n"
        "OK      python        3.12\n"
        "note    gpu           there is none\n"
        "WARNING shared memory small\n"
        "                      -> make it larger\n"
        "doctor: nothing failed, 1 warnings, 1 notes\n"
    )
    monkeypatch.setattr(doctor_command, "_run_checks", lambda cfg: iter([make_failure("uv", "none", "install it")]))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("doctor: 1 failed, 0 warnings, 0 notes\n")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("deadlin=3", "no such key; did you mean 'deadline'?"),
        ("deadline=0", "deadline"),
        ("hosts=2", "hosts=2 is how many hosts of a cluster have to be there; give cluster=auto as well, or HOST:PORT"),
        ("hosts=0 cluster=auto", "hosts is 0; give how many hosts have to be there, 1 at least"),
        ("--verbose", "options are written key=value"),
    ],
)
def test_a_mistake_in_the_command_is_status_2(given: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *given.split()]) == 2
    assert said in capsys.readouterr().err
