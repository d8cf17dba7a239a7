"""Building: what is under a name is whole, whoever dies and whoever else builds, and errors say what to do."""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nrl.errors import DeadlineExceeded, ExecutableError
from nrl.runtime.venvs.building import ensure_env
from nrl.runtime.venvs.environments import INVENTORY, Recipe, is_in_use, is_usable, lock_env
from nrl.runtime.venvs.installer import run_uv
from nrl.runtime.venvs.wheels import Wheel
from tests.runtime.venvs.recipe_parts import (
    bare_builder,
    changed,
    hidden,
    recipe_of,
    run,
    slow_source,
    wheel_of,
)

TINY = wheel_of("tiny", source="x = 1", script=True)
OTHER = wheel_of("other")


def wait_for(path: Path, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"no {path} after {seconds} s"
        time.sleep(0.01)


def test_one_without_its_inventory_is_built_again(tmp_path: Path) -> None:
    recipe = recipe_of(TINY)
    env = ensure_env(recipe, folder=tmp_path).parents[1]
    for damage in (lambda: (env / INVENTORY).unlink(), lambda: (env / INVENTORY).write_text("{")):
        damage()
        assert not is_usable(env)
        assert run(ensure_env(recipe, folder=tmp_path), "-c", "import tiny; print(tiny.x)") == "1"


def test_one_whose_base_interpreter_is_gone_is_built_again(tmp_path: Path) -> None:
    recipe = recipe_of(TINY)
    python = ensure_env(recipe, folder=tmp_path)
    python.unlink()
    python.symlink_to(tmp_path / "gone")
    assert not is_usable(python.parents[1])
    assert run(ensure_env(recipe, folder=tmp_path), "-c", "import tiny; print(tiny.x)") == "1"


def test_a_folder_that_is_no_environment_is_neither_held_nor_used(tmp_path: Path) -> None:
    lock_env(tmp_path / "gone")
    assert not is_in_use(tmp_path / "gone")
    assert not is_usable(tmp_path / "gone")


def test_one_that_was_moved_to_another_name_is_not_used(tmp_path: Path) -> None:
    recipe, other = recipe_of(TINY), recipe_of(OTHER)
    env = ensure_env(recipe, folder=tmp_path).parents[1]
    shutil.copytree(env, tmp_path / other.name, symlinks=True)
    assert run(ensure_env(other, folder=tmp_path), "-c", "import other") == ""


CHANGES = ("os.rename", "os.mkdir", "os.link", "subprocess.Popen", "os.remove", "os.rmdir", "tempfile.mkdtemp")


KILL_AT = """
import os, signal
left = {n}
def count(event, args):
    global left
    if event in {events!r} or (event == "open" and isinstance(args[1], str) and args[1][0] in "wax"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
"""


def check_killed(recipe: Recipe, folder: Path, killed: subprocess.Popen[str]) -> bool:
    """After a builder was killed: nothing half-built is used, and the next one builds it; whether it was killed."""
    _, said = killed.communicate(timeout=60)
    assert killed.returncode in (0, -signal.SIGKILL), said
    env = folder / recipe.name
    complete = env.exists()
    assert not complete or is_usable(env)
    python = ensure_env(recipe, folder=folder)
    assert run(python, "-c", "import tiny, other; print(tiny.x, other.__file__)").startswith(f"1 {folder}")
    assert run(python.parent / "tiny").startswith(str(env))
    # What was left after the renaming waits for the next build of this name, or for `nrl venvs prune`.
    assert complete or [name for name in hidden(folder) if "building" in name] == []
    return killed.returncode != 0


def test_a_builder_that_was_killed_at_two_moments(tmp_path: Path) -> None:
    recipe = recipe_of(TINY, OTHER)
    for n in (6, 12):
        builder = bare_builder(
            recipe, tmp_path / str(n), tmp_path / "scratch", prelude=KILL_AT.format(n=n, events=CHANGES)
        )
        assert check_killed(recipe, tmp_path / str(n), builder)


@pytest.mark.slow
def test_a_builder_that_was_killed_at_any_change_of_a_path(tmp_path: Path) -> None:
    recipe, n, killed = recipe_of(TINY, OTHER), 1, True
    while killed:
        folder = tmp_path / str(n)
        ensure_env(recipe_of(wheel_of("tiny", source="x = 0"), OTHER, executable="old"), folder=folder)  # to begin from
        builder = bare_builder(recipe, folder, tmp_path / "scratch", prelude=KILL_AT.format(n=n, events=CHANGES))
        killed = check_killed(recipe, folder, builder)
        n += 1
    assert n > 10


@pytest.mark.slow
def test_a_builder_that_was_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    recipe, chance = recipe_of(TINY, OTHER), random.Random(0)
    started = time.monotonic()
    assert not check_killed(recipe, tmp_path / "first", bare_builder(recipe, tmp_path / "first", tmp_path / "scratch"))
    takes, killed = time.monotonic() - started, 0
    for n in range(20):
        builder = bare_builder(recipe, tmp_path / str(n), tmp_path / "scratch")
        time.sleep(chance.uniform(0, takes))
        builder.kill()
        killed += check_killed(recipe, tmp_path / str(n), builder)
    assert killed >= 5


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end a child with its parent")
def test_uv_ends_with_its_builder_and_the_lock_too(tmp_path: Path) -> None:
    recipe = recipe_of(TINY, OTHER, requirements=[slow_source(tmp_path / "slow")])
    folder = tmp_path / "venvs"
    builder = bare_builder(recipe, folder, tmp_path / "scratch")
    wait_for(tmp_path / "slow" / "begun")
    children = [int(pid) for pid in Path(f"/proc/{builder.pid}/task/{builder.pid}/children").read_text().split()]
    assert len(children) == 1
    builder.kill()
    builder.communicate()
    until = time.monotonic() + 60
    while any(alive(pid) for pid in children):
        assert time.monotonic() < until, "uv goes on without its builder"
        time.sleep(0.01)
    (tmp_path / "slow" / "go").touch()
    assert any("building" in name for name in hidden(folder))
    assert run(ensure_env(recipe, folder=folder, deadline=250), "-c", "import slow, tiny; print(tiny.x)") == "1"
    assert hidden(folder) == []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


# --- several builders


def test_two_builders_at_once_build_it_once_and_a_third_that_waits_too_long_says_who_builds(tmp_path: Path) -> None:
    recipe = recipe_of(TINY, requirements=[slow_source(tmp_path / "slow")])
    folder = tmp_path / "venvs"
    first = bare_builder(recipe, folder, tmp_path / "first")
    wait_for(tmp_path / "slow" / "begun")
    second = bare_builder(recipe, folder, tmp_path / "second")
    message = (
        f"provide: {recipe.name} in .* was waited for for 1 s, and process {first.pid} on {socket.gethostname()} since "
        "20.* still holds its lock; give a longer deadline, or end that process"
    )
    with pytest.raises(DeadlineExceeded, match=message):
        ensure_env(recipe, folder=folder, deadline=0.5 + 0.5)
    (tmp_path / "slow" / "go").touch()
    outputs = [each.communicate(timeout=60) for each in (first, second)]
    assert [each.returncode for each in (first, second)] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] == f"{folder / recipe.name}/bin/python\n"
    assert "built in" in outputs[0][1]
    assert "built in" not in outputs[1][1]
    assert hidden(folder) == []


def test_who_waits_says_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("building", "installer"):
        monkeypatch.setattr(f"nrl.runtime.venvs.{module}.PROGRESS_SECONDS", 0.2)
    recipe = recipe_of(TINY, requirements=[slow_source(tmp_path / "slow")])
    said: dict[str, list[str]] = {"first": [], "second": []}
    threads = []
    for name in said:
        threads.append(
            threading.Thread(
                target=ensure_env, args=[recipe], kwargs={"folder": tmp_path / "v", "say": said[name].append}
            )
        )
        threads[-1].start()
        wait_for(tmp_path / "slow" / "begun")
    until = time.monotonic() + 60
    while not said["second"] and time.monotonic() < until:
        time.sleep(0.02)
    (tmp_path / "slow" / "go").touch()
    for thread in threads:
        thread.join(60)
    who = f"process {os.getpid()} on {socket.gethostname()} since "
    assert said["second"][0].startswith(f"{recipe.name}: {who}")
    assert re.search(r" is building it; waiting, \d+ s so far", said["second"][0])
    assert any(" s so far" in line for line in said["first"][1:-1])
    assert said["first"][-1].startswith(f"{recipe.name}: built in ")


def test_building_has_the_deadline_too(tmp_path: Path) -> None:
    recipe = recipe_of(TINY, requirements=[slow_source(tmp_path / "slow")])
    message = f"(?s){recipe.name}: `uv pip install` was ended, because the time for it is over; its last lines:"
    with pytest.raises(DeadlineExceeded, match=message):  # before the source, which waits, is built
        ensure_env(recipe, folder=tmp_path / "venvs", deadline=5)
    (tmp_path / "slow" / "go").touch()
    assert hidden(tmp_path / "venvs") == []
    assert ensure_env(recipe, folder=tmp_path / "venvs").exists()


# --- errors


def test_what_uv_says_is_in_the_error(tmp_path: Path) -> None:
    broken = Wheel("tiny-1.0-py3-none-any.whl", b"no zip file")
    recipe = changed(recipe_of(TINY), wheels={broken.name: broken.content})
    with pytest.raises(ExecutableError, match=r"(?s)tiny-\w+: `uv pip install` fails; its last lines:\n    .*tiny"):
        ensure_env(recipe, folder=tmp_path)
    assert [each.name for each in tmp_path.iterdir() if not each.name.endswith(".lock")] == []


def test_on_a_node_without_nrl_errors_are_built_in_ones(tmp_path: Path) -> None:
    recipe = changed(recipe_of(TINY), wheels={TINY.name: b"no zip file"})
    builder = bare_builder(recipe, tmp_path / "venvs", tmp_path / "scratch")
    _, err = builder.communicate(timeout=60)
    assert builder.returncode == 1
    assert f"\nRuntimeError: {recipe.name}: `uv pip install` fails" in err


def test_a_python_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS", "never")
    recipe = changed(recipe_of(TINY), python="3.12.99")
    with pytest.raises(ExecutableError, match=r"tiny-\w+: `uv venv --quiet` fails; its last lines:\n    \w"):
        ensure_env(recipe, folder=tmp_path)


def test_another_platform(tmp_path: Path) -> None:
    recipe = changed(recipe_of(TINY), platform="plan9-mips")
    with pytest.raises(
        ExecutableError, match="provide: tiny-.* is for plan9-mips, and node .* use nodes of the driver"
    ):
        ensure_env(recipe, folder=tmp_path)


def test_the_drivers_interpreter_that_a_node_does_not_have() -> None:
    recipe = Recipe("system", "system", interpreter="/nowhere/python")
    with pytest.raises(ExecutableError, match="executable 'system' is the driver's own .* has no /nowhere/python; use"):
        ensure_env(recipe)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_folder_that_cannot_be_written() -> None:
    message = "provide: tiny-.* is not in /proc/nowhere, and cannot be built there .*; set NRL_VENV_DIR to a folder"
    with pytest.raises(ExecutableError, match=message):
        ensure_env(recipe_of(TINY), folder="/proc/nowhere")


def test_no_uv_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "uv").write_text("#!/bin/sh\nexit 127\n")  # a shim that refuses
    (tmp_path / "uv").chmod(0o755)
    with pytest.raises(ExecutableError, match=r"uv: none that runs on node .* install it there with"):
        run_uv(["--version"], cwd=tmp_path)
