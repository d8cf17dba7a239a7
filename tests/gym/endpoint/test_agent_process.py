"""Agents that are programs: what they are told, what they say, and what becomes of them."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import nrl
from nrl import tiny
from nrl.backends import hf
from nrl.envs.limits import limited
from nrl.gym.endpoint import program
from tests.processes import alive, settled

ASKS = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": task["prompt"]}]})
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body.encode())
with urllib.request.urlopen(asked) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
"""


@pytest.fixture(scope="module")
def sampler() -> Any:
    with nrl.cluster("local") as cluster:
        model = tiny.model(tokenizer=tiny.bpe(["user assistant Hi more"]))
        yield hf.sampler(cluster.reserve(1), model, nrl.Sampling(max_new_tokens=4))


def played(sampler: Any, tmp_path: Path, code: str, *, n: int = 1, **how: Any) -> Any:
    (tmp_path / "agent.py").write_text(ASKS + code)
    env = nrl.driven(program("python", str(tmp_path / "agent.py"), **how))
    return nrl.rollout(sampler, env, [{"prompt": "Hi", "answer": "4"}], n=n)


def test_a_program_asks_and_says_its_verdict(sampler: Any, tmp_path: Path) -> None:
    code = "print('thinking'); print(json.dumps({'asked': 1.0, 'own': float(os.environ['OWN'])}))"
    batch = played(sampler, tmp_path, code, n=2, env={"OWN": "0.5"})
    assert batch["rewards"].tolist() == [1.5, 1.5]
    assert batch["reward/own"].tolist() == [0.5, 0.5]
    assert (batch["loss_mask"].sum(1) > 0).all()


def test_a_program_that_says_nothing_leaves_the_verdict_to_others(sampler: Any, tmp_path: Path) -> None:
    assert played(sampler, tmp_path, "")["rewards"].tolist() == [0.0]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("sys.exit('no luck')", r"EnvError: program: python .*agent.py exited with 1; its last words: no luck"),
        (
            "print('done')",
            r"the last line that python .*agent.py prints is 'done', which is no JSON; print the verdict",
        ),
    ],
)
def test_a_program_that_fails_makes_its_row_invalid(code: str, why: str, sampler: Any, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=why):
        batch = played(sampler, tmp_path, code)
    assert batch["valid"].tolist() == [False]


def test_what_a_program_leaves_behind_is_not_waited_for(sampler: Any, tmp_path: Path) -> None:
    code = "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(1.0)"
    began = time.monotonic()
    assert played(sampler, tmp_path, code)["rewards"].tolist() == [1.0]
    assert time.monotonic() - began < 20


def test_when_its_episode_ends_a_program_is_killed_with_what_it_started(sampler: Any, tmp_path: Path) -> None:
    code = (
        "import subprocess, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "urllib.request.urlopen(asked)\n"
        "urllib.request.urlopen(asked)\n"
    )
    (tmp_path / "agent.py").write_text(ASKS + code)
    env = limited(nrl.driven(program(sys.executable, str(tmp_path / "agent.py"))), turns=2)  # of three
    began = time.monotonic()
    batch = nrl.rollout(sampler, env, [{"prompt": "Hi"}])
    assert batch["valid"].all()
    assert time.monotonic() - began < 20
    for pid in (tmp_path / "pids").read_text().split():
        assert not alive(int(pid))


RUN = """
import sys
import nrl
from nrl import tiny
from nrl.backends import hf
from nrl.gym.endpoint import program

with nrl.cluster("local") as cluster:
    model = tiny.model(tokenizer=tiny.bpe(["user assistant Hi more"]))
    sampler = hf.sampler(cluster.reserve(1), model, nrl.Sampling(max_new_tokens=4))
    nrl.rollout(sampler, nrl.driven(program(sys.executable, sys.argv[1])), [{"prompt": "Hi"}])
"""


def test_no_program_outlives_the_run_that_started_it(tmp_path: Path) -> None:
    """However the run ends: here it is killed."""
    code = (
        "import subprocess, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "agent.py").write_text(ASKS + code)
    run = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path / "agent.py")])
    pids = tmp_path / "pids"
    assert not settled(lambda: not pids.exists() or not pids.read_text(), 60)
    run.kill()
    run.wait()
    assert not settled(lambda: any(alive(int(pid)) for pid in pids.read_text().split()), 10)


def test_a_program_that_there_is_not_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match=r"there is no program '/nowhere/agent' here; give its path, or 'python'"):
        program("/nowhere/agent", "fast")


def test_there_has_to_be_a_command() -> None:
    with pytest.raises(ValueError, match="there is no command"):
        program()
