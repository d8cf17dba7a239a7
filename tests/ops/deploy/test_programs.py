"""`nrl deploy slurm`: the text of the script, what it refuses, and its functions, run by bash."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from nrl import config
from nrl.cli.cli import main
from nrl.errors import ConfigError
from nrl.ops.deploy import programs
from nrl.ops.deploy import slurm as of_slurm
from nrl.ops.deploy.slurm import Slurm, make_script
from nrl.ops.deploy.writing import write
from nrl.runtime.venvs import registry
from tests.processes import alive, settled

HOSTILE = ["prompt=a 'b' \"c\" $HOME `id` $(id) \\ ; & | > * {x,y} é 😀 #", "-n", "", "x=%j"]
"""Arguments of a program that a shell, YAML or Slurm would read otherwise."""


def deployed(program: Path, *settings: str) -> str:
    given = [f"program={program.name}", f"folder={program.parent}", "venv=/venvs/nrl", *settings]
    return make_script(config.load(Slurm, given))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that writes its arguments, and then waits for SIGTERM where it is told so."""
    path = tmp_path / "train.py"
    path.write_text(
        "import json, os, signal, sys, time\n"
        "def stop(*_):\n    print('saved', flush=True); time.sleep(0.2); os._exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print(json.dumps([sys.argv[1:], sorted(k for k in os.environ if k.startswith('SLURM_'))]), flush=True)\n"
        "if 'wait' in sys.argv:\n    time.sleep(60)\n"
        "sys.exit(7 if 'fail' in sys.argv else 0)\n"
    )
    return path


OPTIONS: dict[str, tuple[Sequence[str], str]] = {
    "name": (["name=other"], "#SBATCH --job-name=other"),
    "to": (["to=a b.sbatch"], "sbatch 'a b.sbatch'"),
    "nodes": (["nodes=4"], "#SBATCH --nodes=4"),
    "gpus": (["gpus=8"], "#SBATCH --gpus-per-node=8"),
    "gpu_type": (["gpus=8", "gpu_type=h100"], "#SBATCH --gpus-per-node=h100:8"),
    "cpus": (["cpus=16"], "#SBATCH --cpus-per-task=16"),
    "memory": (["memory=200G"], "#SBATCH --mem=200G"),
    "time": (["time=2-00:00:00"], "#SBATCH --time=2-00:00:00"),
    "grace": (["grace=300"], "#SBATCH --signal=B:USR1@300"),
    "partition": (["partition=gpu,big"], "#SBATCH --partition=gpu,big"),
    "account": (["account=team"], "#SBATCH --account=team"),
    "qos": (["qos=high"], "#SBATCH --qos=high"),
    "constraint": (["constraint=ib&h100"], "#SBATCH --constraint=ib&h100"),
    "reservation": (["reservation=r1"], "#SBATCH --reservation=r1"),
    "nodelist": (["nodelist=gpu[01-04]"], "#SBATCH --nodelist=gpu[01-04]"),
    "exclude": (["exclude=gpu07"], "#SBATCH --exclude=gpu07"),
    "options": (["options=[--comment=a b, --hold]"], "#SBATCH --comment='a b'\n#SBATCH --hold"),
    "seeds": (["seeds=4"], "#SBATCH --array=0-3\n"),
    "at_once": (["seeds=4", "at_once=2"], "#SBATCH --array=0-3%2\n"),
    "out": (["out=/data/it's", "logs=l"], "out='/data/it'"),
    "logs": (["logs=/data/logs"], "#SBATCH --output=/data/logs/%j.log"),
    "container": (["container=pyxis", "image=nrl.sqsh", "out=o"], "options+=(--container-image=nrl.sqsh"),
    "image": (["container=apptainer", "image=a b.sif"], "'a b.sif' \\\n"),
    "mounts": (["container=pyxis", "image=i", "mounts=[/data, /a:/b:ro]"], ",/data:/data,/a:/b:ro"),
    "venv": (["venv=/venvs/my env"], "export PATH='/venvs/my env'/bin:$PATH"),
    "executables": (["executables=[base, vllm]"], "nrl venvs build base vllm"),
    "doctor": (["doctor=true"], 'nrl doctor cluster=auto hosts="$SLURM_NNODES" shared="$shared" deadline=300'),
    "venvs": (["venvs=/local/venvs"], "export NRL_VENV_DIR=/local/venvs"),
    "setup": ([f"setup={__file__}"], f"source {__file__}"),
    "env": (["env={HF_HOME: /data/hf}"], "export HF_HOME=/data/hf"),
    "ports": (["ports=30000-30999"], "port=$((30000 + SLURM_JOB_ID % 4 * 250))"),
    "interface": (["interface=ib0"], "ip -o -4 address show dev ib0"),
    "object_store": (["object_store=2G"], f"--object-store-memory={2 * 1024**3}\n"),
    "arguments": (["arguments=[steps=3]"], "program train.py steps=3 checkpoints.grace=100 cluster=auto"),
}
"""For each option: settings, and what the script has for them, and otherwise has not."""


def test_each_option_changes_the_script(program: Path) -> None:
    plain = deployed(program)
    for name, (settings, text) in OPTIONS.items():
        assert text in deployed(program, *settings), name
        assert text not in plain, name
    of_others = {"program", "folder", "force", "check"}  # which the other tests give
    assert {each.name for each in attrs.fields(Slurm)} == OPTIONS.keys() | of_others


def test_shellcheck_finds_nothing_in_any_variant(program: Path, tmp_path: Path) -> None:
    env = json.dumps({"A": HOSTILE[0]}, ensure_ascii=False)
    arguments = f"arguments={json.dumps(HOSTILE, ensure_ascii=False)}"
    of_containers = ("container", "image", "mounts")
    setup = program.parent / "a b"
    setup.touch()
    every = [each for name, (settings, _) in OPTIONS.items() if name not in of_containers for each in settings]
    container = ["image=a b.sif", "mounts=[/data, /a:/b:ro]", "out=o"]
    variants: list[list[str]] = [[], every, [*every, f"env={env}", f"setup={setup}", "out=a 'b' $c", arguments]]
    variants += [[*more, *container, f"container={each}"] for each in ("pyxis", "apptainer") for more in ([], every)]
    files = []
    for i, settings in enumerate([*variants, ["executables=[]"]]):
        files.append(tmp_path / f"{i}.sbatch")
        files[-1].write_text(deployed(program, *settings))
    found = subprocess.run(["shellcheck", "--severity=style", *files], capture_output=True, text=True)
    assert not found.stdout
    assert found.returncode == 0
    broken = tmp_path / "broken.sbatch"  # and it would find something
    broken.write_text(files[0].read_text().replace('mkdir -p "$logs"', "mkdir -p $logs"))
    assert "SC2086" in subprocess.run(["shellcheck", broken], capture_output=True, text=True).stdout


def functions(text: str) -> str:
    """Those of a script, without what it does."""
    return "\n".join(
        re.findall(r"^(?:answers|node|program|goes_on|tell|told)\(\) \{.*?\}$", text, re.MULTILINE | re.DOTALL)
    )


def command(text: str) -> str:
    (found,) = re.findall(r"-- (program .*) \|\| status=\$\?$", text, re.MULTILINE)
    return str(found)


@pytest.mark.parametrize("seeds", [None, 3])
def test_the_program_gets_its_arguments_as_they_were(program: Path, seeds: int | None) -> None:
    """Bash runs it; what Slurm sets for its own processes is gone."""
    settings = [] if seeds is None else [f"seeds={seeds}"]
    text = deployed(program, *settings, "out=a 'b' $HOME", "logs=l", f"arguments={config.dump(Words(HOSTILE))[7:]}")
    bash = f"{functions(text)}\ncd {shlex.quote(str(program.parent))}\nSLURM_ARRAY_TASK_ID=2\n{command(text)}"
    found = subprocess.run(["bash", "-c", bash], env=environment(), capture_output=True, text=True, check=True)
    more = ["out=a 'b' $HOME"] if seeds is None else ["seed=2", "out=a 'b' $HOME/seed-2"]
    assert json.loads(found.stdout) == [[*HOSTILE, "checkpoints.grace=100", "cluster=auto", *more], []]


def test_the_program_knows_how_much_time_it_has(program: Path) -> None:
    """Less than the job, in which Ray ends after it; what the user says stays."""
    for settings, seconds in (([], 100), (["grace=600"], 580), (["grace=20"], 15), (["grace=1"], 1)):
        assert f"program train.py checkpoints.grace={seconds} cluster=auto" in deployed(program, *settings)
    assert "train.py checkpoints.grace=9 cluster=auto" in deployed(program, "arguments=[checkpoints.grace=9]")
    assert "train.py checkpoints.grace=100 cluster=auto" in deployed(program, "arguments=[checkpoints.grace=100]")
    (program.parent / "some.yaml").write_text("checkpoints: {grace: 60}\n")
    assert "train.py some.yaml cluster=auto" in deployed(program, "arguments=[some.yaml]")
    (program.parent / "some.yaml").write_text("checkpoints: {grace: 110}\n")
    with pytest.raises(ConfigError, match=r"checkpoints.grace=110 and grace=120; .* 100 s at most: give grace=170"):
        deployed(program, "arguments=[some.yaml]")


def test_what_is_built_first_follows_the_program(program: Path) -> None:
    given = "arguments=[trainer=megatron, sampler=vllm-cpu]"
    assert "nrl venvs build base mcore vllm-cpu ||" in deployed(program, given)
    assert "nrl venvs build base ||" in deployed(program, "arguments=[sampler=hf]")
    (program.parent / "some.yaml").write_text("sampler: vllm\ntrainer: megatron\n")
    assert "nrl venvs build base mcore vllm ||" in deployed(program, "arguments=[some.yaml]")
    assert "nrl venvs build base vllm ||" in deployed(program, "arguments=[some.yaml, trainer=fsdp]")
    assert "nrl venvs build base vllm ||" in deployed(program, "arguments=[trainer=fsdp, config=some.yaml]")
    (program.parent / "some.toml").write_text('sampler = "vllm-cpu"\n')
    assert "nrl venvs build base vllm-cpu ||" in deployed(program, "arguments=[some.toml]")
    (program.parent / "bad.yaml").write_text("sampler: [vllm\n")
    assert "nrl venvs build base ||" in deployed(program, "arguments=[bad.yaml]")
    assert "nrl venvs build gym ||" in deployed(program, given, "executables=[gym]")


def test_a_job_ends_where_its_setup_fails(
    program: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Wherever it is submitted."""
    (program.parent / "fails.sh").write_text("false\n")
    monkeypatch.chdir(program.parent)
    text = deployed(program, "setup=fails.sh").partition("set -euo pipefail")[0]
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, cwd=elsewhere)
    assert done.returncode == 1
    assert f"in {elsewhere}, this failed: source {program.parent}/fails.sh\n" in done.stderr


@pytest.mark.parametrize("status", [0, 1])
def test_a_job_whose_nodes_the_doctor_finds_ill_ends_before_its_program(
    program: Path, status: int, tmp_path: Path
) -> None:
    text = deployed(program, "doctor=true", f"out={tmp_path}/a b/run", "logs=l")
    (ask,) = re.findall(r"^# What it finds .*?^fi$", text, re.MULTILINE | re.DOTALL)
    told = f'told() {{ echo "${{@: -2:1}}"; return {status}; }}'
    bash = f"asked='' SLURM_NNODES=2 SLURMD_NODENAME=a\n{told}\n{ask}\necho on"
    done = subprocess.run(["bash", "-c", bash], env=environment(), capture_output=True, text=True)
    said = "job: something has FAILED on these nodes, as said above; the program was not started\n"
    asked = f"shared={tmp_path}/a b\n"  # the disk of the run, where nothing may be yet
    assert (done.returncode, done.stdout, done.stderr) == ((1, asked, said) if status else (0, f"{asked}on\n", ""))
    assert (tmp_path / "a b").is_dir()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_step_ends_early_when_the_job_is_told_to(program: Path, number: int) -> None:
    """Such as the building of environments, which the program does not begin before."""
    text = deployed(program)
    traps = "\n".join(re.findall(r"^trap .*$", text, re.MULTILINE))
    (build,) = re.findall(r"^told --output=.*\n.*exit 1; }$", text, re.MULTILINE)
    step = "step() { echo begun; trap - USR1; exec sleep 60; }"
    begun = f"set -euo pipefail\nlogs=l requeue='' asked='' driver=''\n{functions(text)}\n{step}\n{traps}"
    bash = f"{begun}\n{build}\necho $asked $requeue"
    with subprocess.Popen(["bash", "-c", bash], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "begun\n"
        running.send_signal(number)
        assert running.stdout.readline() == ("yes yes\n" if number == signal.SIGUSR1 else "yes\n")
        assert running.wait(20) == 0


CONFIG = """
from __future__ import annotations
import attrs, helper, nrl
from nrl.run.checkpoint import Checkpoints

print("at import")

@attrs.frozen
class Config:
    out: str
    cluster: str
    checkpoints: Checkpoints
    steps: int = attrs.field(default=3, validator=attrs.validators.le(9))
    seed: int = 7
    layout: nrl.Layout = nrl.Layout()
    samplers: int = 1

nrl.register(nrl.Executable("judge"))

if __name__ == "__main__":
    nrl.launch(nrl.retrying(print), Config)
"""


@pytest.fixture
def configured(program: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program whose settings can be checked here, and whose executable is not there afterwards."""
    program.write_text(CONFIG)
    (program.parent / "helper.py").touch()
    (program.parent / "some.yaml").write_text("steps: 5\nlayout: {dp: 7}\n")
    monkeypatch.setattr(registry, "EXECUTABLES", dict(registry.EXECUTABLES))
    monkeypatch.setattr(programs, "EXECUTABLES", registry.EXECUTABLES)
    monkeypatch.setattr(of_slurm, "EXECUTABLES", registry.EXECUTABLES)
    return program


UNFIT = {
    ("arguments=[stepps=3]",): "  stepps: no such key; did you mean 'steps'?; from the command line",
    ("arguments=[--steps=3]",): "  --steps=3: options are written key=value, without dashes; --help prints every key",
    ("arguments=[steps=10]",): "steps: 'steps' must be <= 9: 10; from the command line",
    ("arguments=[some.yaml, steps=many]",): "steps: expected int, found 'many'",
    ("arguments=[checkpoints.gracee=3]",): "did you mean 'checkpoints.grace'?",
    ("nodes=2", "gpus=4", "arguments=[some.yaml, samplers=2]"): "the program takes 9 slots, 7 by its layout and 2 for "
    "samplers; nodes=2 with gpus=4 have 8 GPUs: give more of them, or it less",
    ("executables=[base, judges]",): "there is no executable named 'judges'; did you mean 'judge'? (one of",
}


@pytest.mark.parametrize("settings", UNFIT)
def test_what_the_program_would_refuse_on_the_nodes_is_refused_here(
    configured: Path, settings: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(UNFIT[settings])):
        deployed(configured, *settings)


def test_a_program_is_asked_with_the_words_that_the_job_will_give_it(
    configured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as found:
        deployed(configured, "seeds=2", "out=/data/o", "arguments=[some.yaml, config=some.yaml, cluster=auto, a=1]")
    first, second = str(found.value).splitlines()
    added = "checkpoints.grace=100 cluster=auto seed=0 out=/data/o/seed-0"
    assert first == f"deploy slurm: train.py with {added}, which the job gives it: 1 problem"
    assert second.startswith("  a: no such key; ")
    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "",
        "deploy slurm: importing train.py, whose Config takes the settings\nat import\n",
    )
    here = Path.cwd()
    assert "program train.py some.yaml samplers=1 " in deployed(
        configured, "gpus=8", "arguments=[some.yaml, samplers=1]"
    )
    assert Path.cwd() == here
    assert "program train.py stepps=1 " in deployed(configured, "check=false", "arguments=[stepps=1]")
    assert "program train.py nowhere.yaml " in deployed(configured, "check=false", "arguments=[nowhere.yaml]")


def test_help_behind_the_dashes_is_the_programs_own(configured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = configured.parent / "job.sbatch"
    with pytest.raises(SystemExit, match="0"):
        main(["deploy", "slurm", "train.py", f"folder={configured.parent}", f"to={target}", "--", "--help"])
    assert "usage: train.py " in capsys.readouterr().out
    assert not target.exists()


def test_what_cannot_be_imported_here_is_not_checked_and_somebody_says_so(
    configured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configured.write_text(CONFIG.replace("helper", "nowhere.module"))
    assert "program train.py stepps=1 " in deployed(configured, "arguments=[stepps=1]")
    said = (
        "train.py cannot be imported here (ModuleNotFoundError: No module named 'nowhere'), so nobody has checked its"
    )
    assert f"deploy slurm: {said} settings\n" in capsys.readouterr().err
    given = ["container=apptainer", "image=i", "out=o", "arguments=[/inside/a.yaml, stepps=1]"]
    assert " stepps=1 " in deployed(configured, *given)
    said = "deploy slurm: /inside/a.yaml is not here, so nobody has checked the settings of train.py\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('if __name__ == "__main__":', "if True:"),
        ("class Config", "class Other"),
        ("@attrs.frozen", "@str"),
        ("Config)", "Config, [])"),
        ("Config)", "Config, args=[])"),
        ("nrl.launch", "print"),
    ],
)
def test_no_program_is_imported_that_might_do_more_than_declare_its_settings(
    configured: Path, old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configured.write_text(CONFIG.replace(old, new))
    assert "program train.py stepps=1 " in deployed(configured, "arguments=[stepps=1]")
    assert capsys.readouterr() == ("", "")


def test_an_executable_of_the_programs_own_is_built_from_its_file(
    configured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nrl venvs build --import=train.py base judge ||" in deployed(configured, "executables=[base, judge]")
    assert "nrl venvs build base ||" in deployed(configured)
    configured.write_text(CONFIG.replace("seed: int = 7", 'seed: int = 7\n    sampler: str = "vllm"'))
    assert "nrl venvs build base vllm ||" in deployed(configured)  # by a default in the code
    assert "nrl venvs build base ||" in deployed(configured, "check=false")
    capsys.readouterr()
    configured.write_text(CONFIG.replace("nrl.launch(", "print("))
    assert "nrl venvs build --import=train.py else ||" in deployed(configured, "executables=[else]")
    assert capsys.readouterr().err == (
        "deploy slurm: it is not known here whether train.py registers the executable 'else'; if it does not, the job "
        "ends before the program starts\n"
    )


@attrs.frozen
class Words:
    words: list[str]


def environment() -> dict[str, str]:
    folder = str(Path(sys.executable).parent)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_reaches_the_program_which_may_take_its_time(program: Path, number: int) -> None:
    """The time limit's (USR1), and Slurm's own; the status is the program's."""
    bash = f"{functions(deployed(program))}\nprogram {shlex.quote(str(program))} wait"
    with subprocess.Popen(["bash", "-c", bash], env=environment(), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.send_signal(number)
        assert running.stdout.readline() == "saved\n"
        assert running.wait(20) == 143


def test_the_status_is_that_of_the_program(program: Path) -> None:
    bash = f"{functions(deployed(program))}\nprogram {shlex.quote(str(program))} fail"
    assert subprocess.run(["bash", "-c", bash], env=environment(), stdout=subprocess.PIPE).returncode == 7


def test_a_signal_to_all_processes_is_none_for_the_program(program: Path) -> None:
    """As Slurm sends it where it tracks processes by their parents."""
    bash = f"{functions(deployed(program))}\nprogram {shlex.quote(str(program))} wait"
    words = ["setsid", "bash", "-c", bash]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        running.stdout.readline()
        os.killpg(running.pid, signal.SIGUSR1)
        assert running.stdout.readline() == "saved\n"
        assert running.wait(20) == 143


def test_ray_ends_at_once_and_its_files_are_kept(program: Path, tmp_path: Path) -> None:
    """The function `node` around another process that is called ray: a signal ends its whole group, not before."""
    fake = tmp_path / "bin" / "ray"  # what is tested is what happens around Ray, which other tests start
    fake.parent.mkdir()
    fake.write_text(
        f"#!/usr/bin/env bash\ntrap '' TERM\nmkdir -p {tmp_path}/temp/session_latest/logs\n"
        f"echo ':actor_name:trainer[1]' >{tmp_path}/temp/session_latest/logs/worker-ab-01-5.out\n"
        f'sleep 61 & echo $! >{tmp_path}/child\necho "$@"\nsleep 62\n'
    )
    fake.chmod(0o755)
    given = environment() | {
        "PATH": f"{fake.parent}:{os.environ['PATH']}",
        "SLURM_NODEID": "0",
        "SLURM_CPUS_ON_NODE": "2",
        "RAY_ADDRESS": "127.0.0.1:20000",
        "head": "127.0.0.1",
        "port": "20000",
        "temp": f"{tmp_path}/temp",
        "logs": f"{tmp_path}/logs",
    }
    words = ["bash", "-c", f"{functions(deployed(program, 'gpus=8'))}\nnode"]
    with subprocess.Popen(words, env=given, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        options = running.stdout.readline().split()
        assert {"--head", "--num-cpus=2", "--num-gpus=8", "--port=20000", "--max-worker-port=20199"} <= set(options)
        running.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert running.poll() is None
        running.send_signal(signal.SIGUSR2)
        assert running.wait(20) == 0
    assert not settled(lambda: alive(int((tmp_path / "child").read_text())), 5)
    assert (tmp_path / "logs/node-0/trainer[1].out").exists()
    assert not (tmp_path / "temp").exists()


def test_a_head_that_does_not_start_is_tried_again(program: Path, tmp_path: Path) -> None:
    """Three times, since Ray gives itself 30 s, which a busy disk may not; then the job ends with its status."""
    ray = tmp_path / "ray"
    ray.write_text("#!/usr/bin/env bash\necho tried\nexit 3\n")
    ray.chmod(0o755)
    given = environment() | {"SLURM_NODEID": "0", "SLURM_CPUS_ON_NODE": "2", "RAY_ADDRESS": "127.0.0.1:20000"}
    given |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "head": "127.0.0.1", "port": "20000"}
    given |= {"temp": f"{tmp_path}/temp", "logs": f"{tmp_path}/logs"}
    (tmp_path / "temp").mkdir()
    (tmp_path / "temp/ray_current_cluster").touch()  # of a start that was killed
    words = ["bash", "-c", f"sleep() {{ :; }}\n{functions(deployed(program))}\nnode"]
    found = subprocess.run(words, env=given, capture_output=True, text=True)
    assert (found.stdout, found.returncode) == ("tried\n" * 3, 3)
    assert (tmp_path / "logs/ended").exists()  # which ends the job, since the other nodes go on
    assert "step --kill-on-bad-exit=0 --wait=0 " in deployed(program)


def test_a_job_ends_where_its_head_does_not_start(program: Path, tmp_path: Path) -> None:
    """Although the other nodes' part of the step goes on."""
    (loop,) = re.findall(r"^    nodes=\$!\n(    until .*?^    done)$", deployed(program), re.MULTILINE | re.DOTALL)
    (tmp_path / "ended").touch()
    bash = f"logs={tmp_path} asked=''; sleep 60 & nodes=$!; trap 'kill $nodes' EXIT\n{loop}\necho on"
    done = subprocess.run(["bash", "-c", bash], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"job: Ray does not start on .*; see .*/node-0.log\n", done.stderr)


def test_a_job_is_not_requeued_after_three_starts_that_came_no_further(program: Path, tmp_path: Path) -> None:
    """A step more is enough. In a container the folder may be elsewhere, so of one without a run nothing is known."""
    contained = ["container=apptainer", "image=i", "mounts=[/tmp]"]
    for settings, name in ([], "a b"), (["seeds=3"], "a b/seed-2"), (contained, "a b"):
        text = deployed(program, f"out={tmp_path}/{len(settings)}/a b", "logs=l", *settings)
        (end,) = re.findall(r"^if \[ -n \"\$requeue\" .*", text, re.MULTILINE | re.DOTALL)
        logs = tmp_path / f"{len(settings)}" / "start-0"
        logs.mkdir(parents=True)
        given = f"SLURM_ARRAY_JOB_ID=5 SLURM_ARRAY_TASK_ID=2 logs={logs} requeue=yes status=143\n"
        given += 'scontrol() { echo "$*"; }\nset -euo pipefail\n'

        def ended(bash: str = f"{functions(text)}\n{given}{end}") -> str:
            done = subprocess.run(["bash", "-c", bash], env=environment(), capture_output=True, text=True)
            assert done.returncode == 143
            return done.stdout + done.stderr

        number = "5_2" if "seeds=3" in settings else "7"  # of an array, 5 alone is the one of all its jobs
        again = f"job: requeued, to go on from the last checkpoint\nrequeue {number}\n"
        no_more = "job: not requeued: three starts came no further than one before them; give more time= or grace=\n"
        run = tmp_path / f"{len(settings)}" / name
        first = [ended() for _ in range(3)]  # each ended within its first step, and left no folder
        assert first == ([again] * 3 if settings == contained else [again] * 2 + [no_more])
        (logs.parent / "steps").unlink(missing_ok=True)
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.yaml").touch()
        assert [ended() for _ in range(2)] == [again] * 2
        (run / "metrics.jsonl").write_text("{}\n{}\n")
        assert [ended() for _ in range(3)] == [again] * 3
        (run / "metrics.jsonl").write_text("{}\n")  # of a start that began again, and did less
        assert ended() == no_more


REFUSED = {
    "nodes=0": "'nodes' must be >= 1: 0",
    "name=a b": "expected a name of letters, digits and ._-, found 'a b'",
    "time=soon": "expected a time such as 30 (minutes), 24:00:00 or 2-00:00:00, found 'soon'",
    "memory=9Q": "expected a size such as 200G, or 0 for all of it, found '9Q'",
    "object_store=much": "expected a size such as 20G, found 'much'",
    "partition=a b": "expected a word of Slurm, without spaces and quotes, found 'a b'",
    "options=[--comment=it's]": 'expected an option of sbatch, such as --mail-type=END, found "--comment=it\'s"',
    "options=[-x]": "expected an option of sbatch, such as --mail-type=END, found '-x'",
    "env={A-B: x}": "expected names of environment variables, found 'A-B'",
    "ports=20000": "expected a range of ports, such as 20000-29999, found '20000'",
    "executables=[a b]": "expected names of executables, such as base, found 'a b'",
    "mounts=[/data:ro]": "expected mounts such as /data or /host:/inside, found '/data:ro'",
    "mounts=[data]": "expected mounts such as /data or /host:/inside, found 'data'",
    "interface=a b": "expected the name of a network interface, such as ib0, found 'a b'",
    "container=docker": "expected 'pyxis' or 'apptainer', found 'docker'",
}
CONTRADICTIONS = {
    ("grace=120", "time=2"): "deploy slurm: grace=120 s is not within time=2; give less of it",
    ("ports=20000-20100",): "ports=20000-20100 is no range of 250 ports or more from 1024 to 65535",
    ("ports=80-10000",): "ports=80-10000 is no range",
    ("at_once=2",): "found at_once=2 without seeds=, which makes several jobs",
    ("gpu_type=h100",): "found gpu_type=h100 and gpus=0; give gpus=, the number in a node",
    ("image=i",): "found image= without a container; give container=pyxis or apptainer",
    ("mounts=[/a]",): "found mounts= without a container",
    ("container=pyxis",): "container=pyxis needs image=",
    ("container=pyxis", "image=i", "out=/data/run"): "out=/data/run is in none of the container's mounts, ",
    ("container=pyxis", "image=i", "mounts=[/data:/d:ro]", "out=/data/run"): ", /d; add mounts=",
    ("folder=/nowhere",): "found no file program=train.py in /nowhere; folder= says where it is",
    ("options=[--time=1]",): "found --time=1 among options=, and the script has --time of its own; give time= instead",
    ("options=[--nodes=3]",): "the script has --nodes of its own; give nodes= instead",
    ("options=[--hold, --signal=B:TERM@5]",): "the script has --signal of its own; give grace= instead",
    ("options=[--sig=B:TERM@5]",): "found --sig=B:TERM@5 among options=, and the script has --signal of its own",
    ("options=[--no-requeue]",): "the script has --no-requeue of its own; edit the script where you want another",
    ("options=[--exclusive=user]",): "the script has --exclusive of its own; give cpus= of the job's own instead",
    ("options=[--gpus-per-socket=4]",): "the script has --gpus-per-socket of its own; give gpus= and gpu_type= instead",
    ("options=[--ntasks-per-gpu=1]",): "the script has --ntasks-per-gpu of its own; give nodes= instead",
    ("options=['--gres=gpu:8']",): "found GPUs in options=, of which Ray would not know; give gpus= and gpu_type=",
    ("env.RAY_ADDRESS=a:1",): "found RAY_ADDRESS among the variables, which the files set themselves; leave it out",
    ("env.NRL_VENV_DIR=/v",): "found NRL_VENV_DIR among the variables, which the files set themselves; give venvs= ins",
    ("env.SLURM_JOB_ID=7",): "found SLURM_JOB_ID among the variables",
    ('setup="/nowhere.sh"',): "found no file setup=/nowhere.sh; give one that the first node has, too",
    ("arguments=[nowhere.yaml]",): "deploy slurm: found no file nowhere.yaml in /",
    ("arguments=[config=nowhere.toml]",): "deploy slurm: found no file nowhere.toml in /",
    ("executables=[base, basee]",): "there is no executable named 'basee'; did you mean 'base'? (one of the program's",
    ("executables=[xyz]",): "there is no executable named 'xyz'; there are system, base, vllm, ",
    ("seeds=2", "arguments=[seed=1]"): "found seed= after `--` and seeds=2; give one of them",
    ("arguments=[cluster=local]",): "found cluster=local after `--`; the program joins the cluster of the job",
    ("arguments=[out=x]",): "found out=x after `--`; give it before, since the files name that folder, too",
    ("arguments=[checkpoints.grace=200]",): "found checkpoints.grace=200 and grace=120; the program is killed then",
    ("arguments=[checkpoints.grace=101]",): "what it may take has to be less, 100 s at most: give grace=161",
    ("env={HF_TOKEN: hf_abc}",): "HF_TOKEN looks like a secret, which a file must not hold; export it in the shell",
    ("arguments=[engine.api_key=abc]",): "engine.api_key looks like a secret, which a file must not hold",
    ('setup="a\\nrm -rf x"',): "setup has a character that cannot be printed; found",
    ("out=my run",): "my run-logs, which Slurm misreads; give logs= without spaces, quotes, %",
    ("logs=/data/%j",): "the logs are in /data/%j, which Slurm misreads",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_values_that_slurm_would_refuse_are_refused(program: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(REFUSED[setting])):
        deployed(program, setting)


@pytest.mark.parametrize("settings", CONTRADICTIONS)
def test_settings_that_contradict_each_other_are_refused(program: Path, settings: tuple[str, ...]) -> None:
    plain = [each if not each.startswith("setup=") else f"setup={each[7:-1].encode().decode('unicode_escape')}"
             for each in settings]  # fmt: skip
    with pytest.raises(ConfigError, match=re.escape(CONTRADICTIONS[settings])):
        deployed(program, *plain)


def test_no_option_and_no_variable_of_the_script_can_be_given_twice(program: Path) -> None:
    every = [each for name, (settings, _) in OPTIONS.items() if name not in {"image", "mounts", "container"}
             for each in settings if not name.startswith(("env", "options", "cpus"))]  # fmt: skip
    text = deployed(program, *every) + deployed(program, "cpus=2")
    for option in sorted(set(re.findall(r"^#SBATCH --([a-z-]+)", text, re.MULTILINE)) - {"exclusive"}):
        with pytest.raises(ConfigError, match=f"among options=, and the script has --{option} of its own"):
            deployed(program, f"options=[--{option}=1]")
    exports = re.findall(r"^export (.*)$", text, re.MULTILINE)
    names = {name for each in exports for name in re.findall(r"(?:^| )(\w+)=", each)}
    names |= {*re.findall(r"^(\w+)=", text, re.MULTILINE), *re.findall(r"\$\{?(SLURMD?_\w+)", text)}
    assert len(names) > 20
    for name in sorted(names):
        with pytest.raises(ConfigError, match=f"found {name} among the variables"):
            deployed(program, f"env={{{name}: x}}")
    assert "#SBATCH --exclusive=user\n" in deployed(program, "cpus=2", "options=[--exclusive=user]")
    assert "#SBATCH --gres=lscratch:9\n" in deployed(program, "options=['--gres=lscratch:9']")


def test_a_file_that_differs_stays(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without force=true; the same settings write the same file, and nobody minds."""
    target = program.parent / "job.sbatch"
    given = ["deploy", "slurm", "train.py", f"folder={program.parent}", f"to={target}"]
    assert main([*given, "--", "steps=3", "cluster=auto"]) == 0
    said = capsys.readouterr().out
    assert (
        said == f"{target} is written; submit it with\n  mkdir -p {program.parent}/runs/train-logs && sbatch {target}\n"
    )
    assert main([*given, "--", "steps=3"]) == 0
    target.write_text(target.read_text() + "# mine\n")
    assert main([*given, "--", "steps=3"]) == 2
    assert f"deploy slurm: {target} differs from what would be written; give force=true" in capsys.readouterr().err
    assert target.read_text().endswith("# mine\n")
    assert main([*given, "force=true", "--", "steps=3"]) == 0
    assert not target.read_text().endswith("# mine\n")
    assert main(["deploy", "slurm", "train.py", f"folder={program.parent}", f"to={program}/job"]) == 2
    assert "deploy slurm: a file cannot be written: " in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_help_explains_every_option(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["deploy", kind, "--help"])
    text: Any = capsys.readouterr().out
    assert f"usage: nrl deploy {kind} PROGRAM.py [key=value ...] [-- ARGUMENTS]" in text
    keys = re.findall(r"^  (\w+): .*\n(      .*)?", text, re.MULTILINE)
    assert len(keys) > 30
    assert [key for key, explained in keys if not explained] == []


def test_files_are_written_all_or_none(tmp_path: Path) -> None:
    first, closed = tmp_path / "first.yaml", tmp_path / "file" / "second.yaml"
    first.write_text("mine")
    first.chmod(0o750)
    closed.parent.write_text("no folder")
    with pytest.raises(ConfigError, match="deploy: a file cannot be written: .*file"):
        write({first: "new", closed: "new"}, force=True, command="deploy")
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"first.yaml": "mine", "file": "no folder"}
    (tmp_path / "link").symlink_to(first)
    write({tmp_path / "link": "new", tmp_path / "folder" / "second.yaml": "new"}, force=True, command="deploy")
    assert (first.read_text(), first.stat().st_mode & 0o777) == ("new", 0o750)
    assert (tmp_path / "link").is_symlink()
    assert [each.name for each in (tmp_path / "folder").iterdir()] == ["second.yaml"]
