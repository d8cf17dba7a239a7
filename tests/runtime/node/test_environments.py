"""From a recipe to a virtual environment: what is under its name is whole, whoever dies and whoever else builds."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from nrl.errors import DeadlineExceeded, ExecutableError
from nrl.runtime.executables.wheels import Wheel
from nrl.runtime.node.building import provide
from nrl.runtime.node.environments import INVENTORY, Recipe, default_folder, difference, inventories, sources, usable
from nrl.runtime.node.installer import uv
from tests.runtime.executables.recipe_parts import bare_builder, held, index_of, recipe_of, slow_source, wheel_of

TINY = wheel_of("tiny", source="x = 1", script=True)
OTHER = wheel_of("other")


def run(*command: str | Path) -> str:
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def hidden(folder: Path) -> list[str]:
    """What builders left in the folder, but for locks."""
    return [each.name for each in folder.iterdir() if each.name.startswith(".") and not each.name.endswith(".lock")]


def wait_for(path: Path, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"no {path} after {seconds} s"
        time.sleep(0.01)


# --- building


def test_an_environment_has_what_its_recipe_says(tmp_path: Path) -> None:
    recipe = recipe_of(TINY, OTHER)
    said: list[str] = []
    python = provide(recipe, folder=tmp_path, say=said.append)
    assert python == tmp_path / recipe.name / "bin" / "python"
    assert run(python, "-c", "import tiny, other; print(tiny.x, tiny.__file__)") == (
        f"1 {tmp_path}/{recipe.name}/lib/python3.12/site-packages/tiny/__init__.py"
    )
    assert run(python, "-c", "import sys; print(sys.version.split()[0])") == recipe.python
    assert said[0] == f"{recipe.name}: building it in {tmp_path}, 2 packages"
    assert said[1].startswith(f"{recipe.name}: built in ")
    assert hidden(tmp_path) == []
    ((env, found),) = inventories(tmp_path).items()
    assert env == python.parents[1]
    assert found["packages"] == recipe.inventory["packages"]
    assert (found["name"], found["executable"], found["python"]) == (recipe.name, "tiny", recipe.python)


def test_scripts_and_pyvenv_cfg_are_right_after_the_renaming(tmp_path: Path) -> None:
    recipe = recipe_of(TINY)
    env = provide(recipe, folder=tmp_path).parents[1]
    assert run(env / "bin" / "tiny").startswith(str(env))
    building = [
        path
        for path in env.rglob("*")
        if path.is_file() and not path.is_symlink() and b".building/venv" in path.read_bytes()
    ]
    assert building == []
    home = next(line.split(" = ")[1] for line in (env / "pyvenv.cfg").read_text().splitlines() if "home" in line)
    assert Path(home).is_dir()


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "a $(venv); 'of' \"mine\" & * % #"
    python = provide(recipe_of(TINY), folder=folder)
    assert run(python, "-c", "import tiny; print(tiny.x)") == "1"
    assert run(python.parent / "tiny").startswith(str(folder))
    assert provide(recipe_of(TINY, OTHER), folder=folder).exists()  # which is made of the first


def test_one_that_is_there_is_used_as_it_is(tmp_path: Path) -> None:
    recipe = recipe_of(TINY)
    env = provide(recipe, folder=tmp_path).parents[1]
    (env / "mine").touch()
    os.utime(env / INVENTORY, (0, 0))
    said: list[str] = []
    provide(changed(recipe, wheels={}), folder=tmp_path, say=said.append)  # it could not be built from this
    assert said == []
    assert (env / "mine").exists()
    assert (env / INVENTORY).stat().st_mtime > time.time() - 60  # the time of its last use


def changed(recipe: Recipe, **changes: Any) -> Recipe:
    return Recipe(**{**recipe.__dict__, **changes})


def test_the_folder_is_nrl_venv_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NRL_VENV_DIR", str(tmp_path / "deep" / "venvs"))
    assert provide(recipe_of(TINY)).is_relative_to(tmp_path / "deep" / "venvs")
    monkeypatch.delenv("NRL_VENV_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "nrl" / "venvs"


def test_an_environment_variable_of_another_environment_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH", "UV_PROJECT_ENVIRONMENT", "UV_PYTHON", "UV_LOCKED"):
        monkeypatch.setenv(name, str(tmp_path / "nowhere"))
    assert provide(recipe_of(TINY), folder=tmp_path).exists()


def test_packages_come_from_the_index_of_this_process_with_the_hashes_of_the_lock(tmp_path: Path) -> None:
    wrong = f"tiny==1.0 --hash=sha256:{'0' * 64}"
    with index_of(tmp_path / "simple", TINY) as (lines, settings):
        python = provide(recipe_of(requirements=lines, settings=settings), folder=tmp_path / "venvs")
        with pytest.raises(ExecutableError, match="(?s)tiny-.*`uv pip install` fails; its last lines:.*[Hh]ash"):
            provide(recipe_of(requirements=[wrong], settings=settings), folder=tmp_path / "venvs", say=print)
    assert run(python, "-c", "import tiny; print(tiny.x)") == "1"


def test_the_nodes_own_settings_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "of the node"))
    said = uv(["cache", "dir"], cwd=tmp_path, settings={"UV_CACHE_DIR": str(tmp_path / "of the driver")})
    assert said.strip() == str(tmp_path / "of the node")


# --- what differs


def test_only_what_differs_is_built_and_that_is_said_in_one_paragraph(tmp_path: Path) -> None:
    with index_of(tmp_path / "simple", OTHER) as (lines, settings):
        provide(recipe_of(TINY, requirements=lines, settings=settings), folder=tmp_path)
    old = next(iter(inventories(tmp_path)))
    shutil.rmtree(tmp_path / "cache")  # and the index cannot be reached any more
    new = recipe_of(wheel_of("tiny", source="x = 2", script=True), requirements=lines, settings=settings)
    said: list[str] = []
    python = provide(new, folder=tmp_path, say=said.append)
    built = json.loads((old / INVENTORY).read_text())["built"]
    assert said[0] == (
        f"{new.name} is not in {tmp_path}. The nearest there is {old.name}, built {built}; since then there have "
        "changed: the source of tiny 1.0. Only that is built now. To find it ready, run `nrl venvs build tiny` where "
        "that folder or image is made; to use what is there, go back to the lock and the source that it was made from."
    )
    assert run(python, "-c", "import tiny, other; print(tiny.x)") == "2"
    assert run(old / "bin" / "python", "-c", "import tiny, other; print(tiny.x)") == "1"  # as it was
    site = "lib/python3.12/site-packages/other/__init__.py"
    assert (python.parents[1] / site).stat().st_ino == (old / site).stat().st_ino  # not installed again
    assert run(python.parent / "tiny").startswith(str(python.parents[1]))


def test_what_left_the_recipe_leaves_the_environment(tmp_path: Path) -> None:
    provide(recipe_of(TINY, OTHER), folder=tmp_path)
    python = provide(recipe_of(TINY), folder=tmp_path)
    assert run(python, "-c", "from importlib.util import find_spec; print(find_spec('other'))") == "None"


def test_an_environment_that_shares_little_is_no_beginning(tmp_path: Path) -> None:
    wheels = [wheel_of(f"p{i}") for i in range(3)]
    provide(recipe_of(TINY, *wheels), folder=tmp_path)
    said: list[str] = []
    python = provide(recipe_of(TINY, OTHER, executable="mine"), folder=tmp_path, say=said.append)
    assert said[0].endswith("2 packages")  # nothing is said of other executables
    assert run(python, "-c", "from importlib.util import find_spec; print(find_spec('p0'))") == "None"


A = {"version": "1.0", "source": "index", "digest": "a"}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ({}, {}, ""),
        ({"python": "3.12.1"}, {"python": "3.12.2"}, "python 3.12.1 -> 3.12.2"),
        ({"platform": "linux-x86_64"}, {"platform": "darwin-arm64"}, "platform linux-x86_64 -> darwin-arm64"),
        ({"packages": {"p": A}}, {"packages": {"p": A}}, ""),
        ({"packages": {}}, {"packages": {"p": A}}, "p 1.0 is added"),
        ({"packages": {"p": A}}, {"packages": {}}, "p 1.0 is gone"),
        ({"packages": {"p": A}}, {"packages": {"p": {**A, "digest": "b"}}}, "the files of p"),
        ({"packages": {"p": A}}, {"packages": {"p": {**A, "source": "local"}}}, "the source of p 1.0"),
        (
            {"packages": {f"p{i}": A for i in range(9)}},
            {"packages": {f"p{i}": {**A, "version": "2"} for i in range(9)}},
            "p0 1.0 -> 2, p1 1.0 -> 2, p2 1.0 -> 2, p3 1.0 -> 2, p4 1.0 -> 2, p5 1.0 -> 2, and 3 more",
        ),
    ],
)
def test_differences_in_words(old: dict[str, Any], new: dict[str, Any], words: str) -> None:
    assert difference(old, new) == words


def test_what_is_forced_is_built_anew_once(tmp_path: Path) -> None:
    env = provide(recipe_of(TINY), folder=tmp_path).parents[1]
    (env / "lib/python3.12/site-packages/tiny/extra.py").touch()
    forced = recipe_of(TINY, force="this driver")
    assert provide(forced, folder=tmp_path).parents[1] == env
    assert not (env / "lib/python3.12/site-packages/tiny/extra.py").exists()
    (env / "mine").touch()
    provide(forced, folder=tmp_path)
    provide(recipe_of(TINY), folder=tmp_path)
    assert (env / "mine").exists()
    provide(recipe_of(TINY, force="another driver"), folder=tmp_path)
    assert not (env / "mine").exists()


def test_one_that_processes_run_in_is_not_replaced(tmp_path: Path) -> None:
    python = provide(recipe_of(TINY), folder=tmp_path)
    env, forced = python.parents[1], recipe_of(TINY, force="another driver")
    (env / "mine").touch()
    text = (
        f"provide: {env} is to be built again, and processes run in it, whose files would change under them; end them"
    )
    with held(env):
        assert provide(recipe_of(TINY), folder=tmp_path) == python
        with pytest.raises(ExecutableError) as caught:
            provide(forced, folder=tmp_path)
    assert str(caught.value) == f"{text} first, or unset NRL_FORCE_REBUILD_VENVS"
    assert (env / "mine").exists()
    assert hidden(tmp_path) == []
    provide(forced, folder=tmp_path)
    assert not (env / "mine").exists()


def test_one_that_a_process_enters_while_it_is_built_anew_is_not_replaced(tmp_path: Path) -> None:
    env = provide(recipe_of(TINY), folder=tmp_path).parents[1]
    (env / "mine").touch()
    with ExitStack() as stack:

        def say(line: str) -> None:
            if "building it in" in line:
                stack.enter_context(held(env))

        with pytest.raises(ExecutableError, match="processes run in it"):
            provide(recipe_of(TINY, force="another driver"), folder=tmp_path, say=say)
    assert (env / "mine").exists()
    assert hidden(tmp_path) == []


# --- sources


def sourced(**sources: str) -> Recipe:
    return changed(
        recipe_of(TINY), sources={name: wheel_of(name, source=text).content for name, text in sources.items()}
    )


def test_sources_lie_beside_and_one_environment_serves_them_all(tmp_path: Path) -> None:
    made, after = sourced(ours="x = 1", yours="x = 2"), sourced(theirs="x = 3")
    python = provide(made, folder=tmp_path)
    assert sources(made, python) == [str(tmp_path / ".sources" / name) for name in ("ours", "yours")]
    path = os.pathsep.join(sources(made, python))
    program = f"import sys; sys.path += {path!r}.split(':'); import ours, tiny, yours; print(ours.x, tiny.x, yours.x)"
    assert run(python, "-c", program) == "1 1 2"
    assert provide(after, folder=tmp_path, say=pytest.fail) == python
    assert sorted(each.name for each in (tmp_path / ".sources").iterdir()) == ["ours", "theirs", "yours"]


def test_a_source_that_is_there_and_whole_is_used_as_it_is(tmp_path: Path) -> None:
    made = sourced(ours="x = 1")
    (source,) = map(Path, sources(made, provide(made, folder=tmp_path)))
    (source / "mine").touch()
    os.utime(source / INVENTORY, (0, 0))
    provide(changed(made, sources={"ours": b"no zip file"}), folder=tmp_path)
    assert (source / "mine").exists()
    assert (source / INVENTORY).stat().st_mtime > time.time() - 60  # the time of its last use
    (source / INVENTORY).unlink()  # as of one that is half removed
    provide(made, folder=tmp_path)
    assert sorted(each.name for each in source.iterdir()) == [INVENTORY, "ours", "ours-1.0.dist-info"]
    assert [each.name for each in source.parent.iterdir()] == ["ours"]


def test_two_that_unpack_a_source_at_once_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sourced(ours="x = 1")
    provide(recipe_of(TINY), folder=tmp_path)
    found = zipfile.ZipFile.extractall

    def late(self: zipfile.ZipFile, to: Path) -> None:
        monkeypatch.setattr(zipfile.ZipFile, "extractall", found)
        provide(made, folder=tmp_path)  # another one, which is faster
        (tmp_path / ".sources" / "ours" / "first").touch()
        found(self, to)

    monkeypatch.setattr(zipfile.ZipFile, "extractall", late)
    provide(made, folder=tmp_path)
    assert (tmp_path / ".sources" / "ours" / "first").exists()
    assert [each.name for each in (tmp_path / ".sources").iterdir()] == ["ours"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_source_that_cannot_be_written(tmp_path: Path) -> None:
    made = sourced(ours="x = 1")
    provide(recipe_of(TINY), folder=tmp_path)
    (tmp_path / ".sources").symlink_to("/proc/nowhere")
    message = f"provide: ours is not in {tmp_path}, and cannot be built there .*; set NRL_VENV_DIR to a folder"
    with pytest.raises(ExecutableError, match=message):
        provide(made, folder=tmp_path)


# --- what is not whole is not used


def test_one_without_its_inventory_is_built_again(tmp_path: Path) -> None:
    recipe = recipe_of(TINY)
    env = provide(recipe, folder=tmp_path).parents[1]
    for damage in (lambda: (env / INVENTORY).unlink(), lambda: (env / INVENTORY).write_text("{")):
        damage()
        assert not usable(env)
        assert run(provide(recipe, folder=tmp_path), "-c", "import tiny; print(tiny.x)") == "1"


def test_one_whose_base_interpreter_is_gone_is_built_again(tmp_path: Path) -> None:
    recipe = recipe_of(TINY)
    python = provide(recipe, folder=tmp_path)
    python.unlink()
    python.symlink_to(tmp_path / "gone")
    assert not usable(python.parents[1])
    assert run(provide(recipe, folder=tmp_path), "-c", "import tiny; print(tiny.x)") == "1"


def test_one_that_was_moved_to_another_name_is_not_used(tmp_path: Path) -> None:
    recipe, other = recipe_of(TINY), recipe_of(OTHER)
    env = provide(recipe, folder=tmp_path).parents[1]
    shutil.copytree(env, tmp_path / other.name, symlinks=True)
    assert run(provide(other, folder=tmp_path), "-c", "import other") == ""


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
    assert not complete or usable(env)
    python = provide(recipe, folder=folder)
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
        provide(recipe_of(wheel_of("tiny", source="x = 0"), OTHER, executable="old"), folder=folder)  # to begin from
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
    until = time.monotonic() + 10
    while any(alive(pid) for pid in children):
        assert time.monotonic() < until, "uv goes on without its builder"
        time.sleep(0.01)
    (tmp_path / "slow" / "go").touch()
    assert any("building" in name for name in hidden(folder))
    assert run(provide(recipe, folder=folder, deadline=60), "-c", "import slow, tiny; print(tiny.x)") == "1"
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
        provide(recipe, folder=folder, deadline=0.5 + 0.5)
    (tmp_path / "slow" / "go").touch()
    outputs = [each.communicate(timeout=60) for each in (first, second)]
    assert [each.returncode for each in (first, second)] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] == f"{folder / recipe.name}/bin/python\n"
    assert "built in" in outputs[0][1]
    assert "built in" not in outputs[1][1]
    assert hidden(folder) == []


def test_who_waits_says_for_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("building", "installer"):
        monkeypatch.setattr(f"nrl.runtime.node.{module}.EVERY", 0.2)
    recipe = recipe_of(TINY, requirements=[slow_source(tmp_path / "slow")])
    said: dict[str, list[str]] = {"first": [], "second": []}
    threads = []
    for name in said:
        threads.append(
            threading.Thread(target=provide, args=[recipe], kwargs={"folder": tmp_path / "v", "say": said[name].append})
        )
        threads[-1].start()
        wait_for(tmp_path / "slow" / "begun")
    until = time.monotonic() + 30
    while not said["second"] and time.monotonic() < until:
        time.sleep(0.02)
    (tmp_path / "slow" / "go").touch()
    for thread in threads:
        thread.join(60)
    who = f"process {os.getpid()} on {socket.gethostname()} since "
    assert said["second"][0].startswith(f"{recipe.name}: {who}")
    assert " is building it; waiting, 0 s so far" in said["second"][0]
    assert any(" s so far" in line for line in said["first"][1:-1])
    assert said["first"][-1].startswith(f"{recipe.name}: built in ")


def test_building_has_the_deadline_too(tmp_path: Path) -> None:
    recipe = recipe_of(TINY, requirements=[slow_source(tmp_path / "slow")])
    message = f"(?s){recipe.name}: `uv pip install` was ended, because the time for it is over; its last lines:"
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=message):
        provide(recipe, folder=tmp_path / "venvs", deadline=1.5)
    assert time.monotonic() - started < 10
    (tmp_path / "slow" / "go").touch()
    assert hidden(tmp_path / "venvs") == []
    assert provide(recipe, folder=tmp_path / "venvs").exists()


# --- errors


def test_what_uv_says_is_in_the_error(tmp_path: Path) -> None:
    broken = Wheel("tiny-1.0-py3-none-any.whl", b"no zip file")
    recipe = changed(recipe_of(TINY), wheels={broken.name: broken.content})
    with pytest.raises(ExecutableError, match=r"(?s)tiny-\w+: `uv pip install` fails; its last lines:\n    .*tiny"):
        provide(recipe, folder=tmp_path)
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
        provide(recipe, folder=tmp_path)


def test_another_platform(tmp_path: Path) -> None:
    recipe = changed(recipe_of(TINY), platform="plan9-mips")
    with pytest.raises(
        ExecutableError, match="provide: tiny-.* is for plan9-mips, and node .* use nodes of the driver"
    ):
        provide(recipe, folder=tmp_path)


def test_the_drivers_interpreter_that_a_node_does_not_have() -> None:
    recipe = Recipe("system", "system", interpreter="/nowhere/python")
    with pytest.raises(ExecutableError, match="executable 'system' is the driver's own .* has no /nowhere/python; use"):
        provide(recipe)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_folder_that_cannot_be_written() -> None:
    message = "provide: tiny-.* is not in /proc/nowhere, and cannot be built there .*; set NRL_VENV_DIR to a folder"
    with pytest.raises(ExecutableError, match=message):
        provide(recipe_of(TINY), folder="/proc/nowhere")


def test_no_uv_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "uv").write_text("#!/bin/sh\nexit 127\n")  # a shim that refuses
    (tmp_path / "uv").chmod(0o755)
    with pytest.raises(ExecutableError, match=r"uv: none that runs on node .* install it there with"):
        uv(["--version"], cwd=tmp_path)
