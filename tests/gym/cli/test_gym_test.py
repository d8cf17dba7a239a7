"""The command `nrl gym test`: what it finds in verifiers and environments that are wrong, and in those that ship."""

import asyncio
import ctypes
import json
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from contextvars import copy_context
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, TypedDict

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from nrl import tiny
from nrl.cli.cli import main
from nrl.envs import (
    Trace,
    choice,
    number,
    score_of,
)
from nrl.envs.inprocess.call_with_timeout import Calls
from nrl.envs.inprocess.tracebacks import Failed
from nrl.envs.library import arithmetic
from nrl.envs.library.python_tool import Interpreter
from nrl.envs.pool.pool import pooled
from nrl.envs.tools import tool
from nrl.gym.cli.adversarial import hostile, huge, mutants
from nrl.gym.cli.arguments import arguments
from nrl.gym.cli.audit import Audit
from nrl.gym.cli.findings import FAULTS
from nrl.gym.cli.leak_check import Growth, Usage, growth, usage
from nrl.gym.cli.reference_answers import Way, ways
from tests.backends.openai.test_openai import serving
from tests.envs.test_llm_judge import replying
from tests.jsonlines import lines

DATA = Path(__file__).parents[2] / "data"
VERIFIERS = r"""
import mmap, os, random, threading, time
import nrl
from nrl.envs import Score, extracts, number, of_group

def good(task, trace):
    return number(task, trace)

async def later(task, trace):
    return {"right": number(task, trace).reward, "brief": 0.0}

@of_group
def compared(task, traces):
    return [number(task, trace).reward for trace in traces]

@of_group
def best(task, traces):
    rewards = [number(task, trace).reward for trace in traces]
    return [float(reward > sum(rewards) / len(rewards)) for reward in rewards]

@of_group
def last(task, traces):
    return [float(place == len(traces) - 1) for place in range(len(traces))]

@of_group
def alone(task, traces):
    return [number(task, traces[0])]

def make():
    return good

def everything(task, trace):
    return 1.0

def contains(task, trace):
    return float(task["answer"] in trace.text)

def nothing(task, trace):
    return 0.0

def lenient(task, trace):
    return float(not trace.text.strip() or number(task, trace).reward)

def injected(task, trace):
    return float("reward is 1" in trace.text or number(task, trace).reward)

def echoed(task, trace):
    return float(trace.text == task["prompt"] or number(task, trace).reward)

def first_of_many(task, trace):
    return float(len(trace.text) > 99 and task["answer"] in trace.text or number(task, trace).reward)

def long(task, trace):
    return float(len(trace.text) > 50_000 or number(task, trace).reward)

def often(task, trace):
    return float(trace.text.count("\n") > 100 and trace.text[-1].isdigit() or number(task, trace).reward)

def near(task, trace):
    found = number(task | {"answer": int(task["answer"]) + 1}, trace).reward
    return max(found, number(task, trace).reward)

def known(task, trace):
    return float(any(number({"answer": each}, trace).reward for each in (29, 17, task["answer"])))

def raises(task, trace):
    return float(int(trace.text) == int(task["answer"]))

def text(task, trace):
    return "right"

def infinite(task, trace):
    return float("inf")

def skips(task, trace):
    return Score(status="skipped") if len(trace.text) > 1000 else number(task, trace)

def chance(task, trace):
    return float(number(task, trace).reward and random.random() < 0.5)

known_rewards = {}
def remembers(task, trace):
    key = task["answer"], trace.text
    if key not in known_rewards:
        known_rewards[key] = chance(task, trace)
    return known_rewards[key]
remembers.forget = known_rewards.clear

worked = {}
def counts(task, trace):
    key = task["answer"], trace.text
    if key not in worked:
        with open("worked", "a") as file:
            file.write("x")
        worked[key] = number(task, trace)
    return worked[key]
counts.forget = worked.clear

def elsewhere():
    from nrl.envs import exact, weighted
    return weighted(right=(1.0, nrl.pooled(counts, workers=1)), none=(0.0, exact))

before = [""]
def ordered(task, trace):
    last, before[0] = before[0], trace.text
    return float(number(task, trace).reward and (len(last) + sum(map(ord, last))) % 3 > 0)

def seeded(task, trace):
    return float(number(task, trace).reward and task["seed"] < 2**30)

def files(task, trace):
    with open("descriptors", "a") as file:
        print(os.open("/dev/null", os.O_RDONLY), file=file)
    return number(task, trace)

stop = os.path.abspath("stop")
def wait():
    while not os.path.exists(stop):
        time.sleep(0.05)

def threads(task, trace):
    threading.Thread(target=wait, daemon=True).start()
    return number(task, trace)

kept = []

def memory(task, trace):
    kept.append(mmap.mmap(-1, 2_000_000))  # what earlier tests gave back to the heap does not serve
    kept[-1].write(b"x" * 2_000_000)
    return number(task, trace)

def sleeps(task, trace):
    time.sleep(0.06 if len(trace.text) > 50_000 else 0)
    return number(task, trace)

def hangs(task, trace):
    time.sleep(0.5 if len(trace.text) > 900_000 and trace.text[0] == "9" else 0)
    return number(task, trace)

def computes(task, trace):
    parts = trace.text.split("+")
    plain = len(trace.text) < 99 and all(each.strip().isdigit() for each in parts)
    terms = [int(each) for each in parts] if plain else []
    return float(sum(terms) == int(task["answer"]))

def divides(task, trace):
    return float(trace.text in ("1/0", r"\frac{1}{0}") or number(task, trace).reward)

@extracts(lambda response: response.strip().lower().lstrip("-") or None)
def unsigned(task, trace):
    return float(trace.text.strip().lstrip("-") == task["answer"])

@extracts(lambda response: None)
def unread(task, trace):
    return 1.0

number_of_things = 3
def broken():
    return 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v.py").write_text(VERIFIERS)
    (tmp_path / "e.py").write_text(ENVIRONMENTS)
    yield tmp_path
    (tmp_path / "stop").touch()
    if (kept := tmp_path / "descriptors").exists():
        for each in kept.read_text().split():
            os.close(int(each))


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """What the command says, on one line."""
    assert main(["gym", "test", *arguments]) == status
    found = capsys.readouterr()
    return " ".join((found.err if status == 2 else found.out).split())


def said_alone(*arguments: str) -> str:
    """The same of a process of its own, where nothing grows but what the audit does."""
    made = subprocess.run([sys.executable, "-m", "nrl", "gym", "test", *arguments], stdout=subprocess.PIPE, text=True)
    assert made.returncode == 0, made.stdout
    return " ".join(made.stdout.split())


def found(out: str = "gym_test.jsonl") -> dict[str, str]:
    """The faults of a file, and what it says of them."""
    return {each["fault"]: each["what"] for each in lines(Path(out)) if "fault" in each}


FEW = ["data=arithmetic", "limit=3", "slow=30"]


# --- verifiers


@pytest.mark.parametrize("name", ["good", "later", "compared", "best", "make"])
def test_a_good_verifier_passes(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    shown = said(capsys, f"v.py:{name}", *FEW)
    assert f"nothing is wrong with v.py:{name}; gym_test.jsonl has all that was tried" in shown
    first, *tried = lines(here / "gym_test.jsonl")
    assert (first["gym_test"], first["data"], first["limit"]) == (f"v.py:{name}", "arithmetic", 3)
    kinds = {each["kind"] for each in tried}
    assert kinds == {
        "gold", "form", "mutated", "other", "candidates", "repeated", "reasoning", "injected", "question",
        "operands", "undefined", "empty", "huge",
    }  # fmt: skip
    gold = [each for each in tried if each["kind"] == "gold"]
    assert [each["reward"] for each in gold] == [1.0] * 3
    assert [each["text"] for each in gold] == [arithmetic.task(0, place)["answer"] for place in range(3)]
    assert not any(each["wrong"] or each["faults"] for each in tried)
    huge = next(each for each in tried if each["how"] == "digits")
    assert huge["characters"] == 1_000_000
    assert len(huge["text"]) < 1100


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("everything", "mutated other candidates repeated reasoning injected question operands undefined empty huge"),
        ("computes", "operands"),
        ("divides", "undefined"),
        ("contains", "mutated candidates reasoning"),
        ("nothing", "gold"),
        ("lenient", "empty"),
        ("injected", "injected"),
        ("echoed", "question"),
        ("first_of_many", "candidates"),
        ("long", "huge"),
        ("often", "repeated"),
        ("near", "mutated"),
        ("known", "other repeated reasoning"),
        ("raises", "raises"),
        ("text", "gold raises"),
        ("infinite", "gold raises"),
        ("skips", "left_out"),
        ("chance", "varies"),
        ("remembers", "varies"),
        ("ordered", "order"),
        ("seeded", "seed"),
    ],
)
def test_what_is_wrong_is_found_by_name(here: Path, name: str, faults: str) -> None:
    limit = "limit=8" if name in ("chance", "remembers", "ordered") else "limit=3"
    assert main(["gym", "test", f"v.py:{name}", "data=arithmetic", limit, "slow=30"]) == 1
    seen = found()
    assert set(seen) >= set(faults.split())
    assert set(seen) <= {*faults.split(), "gold", "question", "huge", "repeated"}
    for each in faults.split():
        assert seen[each].startswith(f"{FAULTS[each]}: ")


@pytest.mark.parametrize(("name", "what"), [("files", "files: "), ("threads", "threads: "), ("memory", "memory: ")])
def test_what_is_not_given_back_is_found(here: Path, capsys: pytest.CaptureFixture[str], name: str, what: str) -> None:
    shown = said(capsys, f"v.py:{name}", "data=arithmetic", "limit=2", "slow=30", "sessions=100", status=1)
    assert "not all that sessions took was given back: " in shown
    assert what in found()["leaks"]
    (grown,) = [each for each in lines(here / "gym_test.jsonl") if "sessions" in each and "before" in each]
    assert grown["sessions"] == 100
    assert grown["after"][what[:-2]] > grown["halfway"][what[:-2]] > grown["before"][what[:-2]] >= 0
    assert "100 sessions: memory" in shown
    assert set(found()) == {"leaks"}


def test_many_calls_of_a_good_verifier_leak_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing is wrong" in said(capsys, "number", "data=arithmetic", "limit=2", "slow=30", "sessions=500")


@pytest.mark.parametrize("name", ["counts", "elsewhere"])
def test_sessions_are_not_answered_from_memory(here: Path, name: str) -> None:
    """Each is a call that a verifier which remembers has to work for, also in a process and as a part of another."""
    found = list[int]()
    for sessions in (0, 50):
        assert main(["gym", "test", f"v.py:{name}", *FEW, f"sessions={sessions}"]) == 0
        found.append((here / "worked").stat().st_size)
        (here / "worked").unlink()
    assert found[1] - found[0] == 50


@pytest.mark.parametrize(
    ("target", "module", "data"),
    [
        ("math", "library.mathematics.verifying", [f"data={DATA / 'math_sample.jsonl'}"]),
        ("reasoning_gym", "library.reasoning.tasks", []),
    ],
)
def test_sessions_reach_the_processes(
    here: Path, monkeypatch: pytest.MonkeyPatch, target: str, module: str, data: list[str]
) -> None:
    """Those of answers that are decided in a process; none of them is answered from memory."""
    asked, before = list[str](), list[int]()

    async def sessions_from_here(session: Any, sessions: int) -> Growth:
        before.append(len(asked))
        return await growth(session, sessions)

    def counted(*args: Any, **options: Any) -> Any:
        ask: Any = pooled(*args, **options)

        async def call(request: Any, more: Any) -> Any:
            if request[0] not in ("names", "make"):
                asked.append(repr((request, more)))
            return await ask(request, more)

        return call

    monkeypatch.setattr(f"nrl.envs.{module}.pooled", counted)
    monkeypatch.setattr("nrl.gym.cli.verifier_fuzz.growth", sessions_from_here)
    assert main(["gym", "test", target, *data, "limit=2", "slow=60", "sessions=60", "allow=left_out,varies,order"]) == 0
    assert len(asked) - before[0] >= 15
    assert set(asked[before[0] :]) <= set(asked[: before[0]])  # which memory would have answered


def test_a_verifier_of_groups_compares_each_answer_with_the_right_one(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "mutated" in said(capsys, "v.py:last", *FEW, status=1)
    shown = said(capsys, "v.py:alone", *FEW, status=1)
    assert "EnvError: the verifier of a group gave 1 verdicts for 2 episodes" in shown
    assert "; return one for each, in order" in shown


@pytest.mark.parametrize(
    ("target", "column", "status"),
    [("constraints", "response", 1), ("v.py:make", "answer", 0), ("code", "response", 0), ("code", None, 0)],
)
def test_the_column_of_right_answers_is_found(
    here: Path, capsys: pytest.CaptureFixture[str], target: str, column: str | None, status: int
) -> None:
    """The tasks that come with `constraints` and `code` have a response; others may have tests alone."""
    row = {"prompt": "Add.", "tests": ["assert add(1, 2) == 3"]}
    (here / "alone.jsonl").write_text(json.dumps(row) + "\n")
    more = {"answer": ["data=arithmetic"], None: ["data=alone.jsonl", "chat=false"]}.get(column, [])
    shown = said(capsys, target, "limit=2", "slow=30", *more, status=status)
    first, *tried = lines(here / "gym_test.jsonl")
    assert first.get("gold") == column
    assert ("no right answers were tried: the tasks have no 'answer', 'answers', 'response'" in shown) is (
        column is None
    )
    kinds = {each["kind"] for each in tried if "kind" in each}
    if column is None:
        assert kinds == {"injected", "question", "empty", "huge"}
        assert "raise SystemExit(0)" in "".join(each["text"] for each in tried)
    else:
        assert {"gold", "mutated"} <= kinds
        assert all(each["passed"] for each in tried if each.get("kind") == "gold")


def test_nothing_may_be_equal_to_an_answer_that_is_not_known(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "rows.jsonl").write_text(json.dumps({"question": "Name a number."}) + "\n")
    shown = said(capsys, "v.py:unread", "data=rows.jsonl", "slow=30", status=1)
    assert "injected (" in shown
    assert "may be equal" not in shown


def test_slow_calls_are_found(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "v.py:sleeps", "data=arithmetic", "limit=4", "slow=0.05", status=1)
    assert "slow (" in shown
    assert "calls took longer than slow=: task" in shown


def test_a_call_that_takes_too_long_has_failed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "v.py:hangs", "data=arithmetic", "limit=1", "slow=30", "options.timeout=0.2", status=1)
    assert "raises (1): calls raised, or took too long: 1 TimeoutError, such as task 0, huge (digits)" in shown


def test_errors_are_counted_by_kind(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "v.py:raises", *FEW, status=1)
    assert "ValueError, such as task 0, form (said): ValueError: invalid literal for int()" in shown


def test_an_equal_answer_is_told_and_does_not_count(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verifier's own extractor says that a number and its negative are equal."""
    shown = said(capsys, "v.py:unsigned", *FEW)
    assert "the sign (may be equal)" in shown.replace(" │ │ │ ", " ").replace("│ ", "")
    assert any(each["note"] == "may be equal" for each in lines(here / "gym_test.jsonl")[1:])


def test_faults_that_are_allowed_are_shown_and_do_not_count(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "v.py:lenient", *FEW, "allow=empty,huge")
    assert "empty (9, allowed): empty answers passed: task 0 (nothing), a reward of 1 for ''" in shown
    assert [each["allowed"] for each in lines(here / "gym_test.jsonl") if "fault" in each] == [True, True]


def test_the_form_of_responses_is_found_out_or_given(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "exact", *FEW)
    assert "bare 3 of 3, said 0 of 3, boxed 0 of 3, marked 0 of 3, tagged 0 of 3, fenced 0 of 3" in shown
    assert "gold (3): right answers did not pass" in said(capsys, "exact", *FEW, "form=Well: {}", status=1)
    assert {each["text"][:6] for each in lines(here / "gym_test.jsonl")[1:] if each.get("kind") == "other"} == {
        "Well: "
    }


def test_the_same_audit_has_the_same_answers(here: Path) -> None:
    texts = []
    (here / "a").mkdir()
    (here / "a" / "one.jsonl").touch()
    for out in ("a/one.jsonl", "a/two.jsonl"):
        assert main(["gym", "test", "number", *FEW, f"out={out}"]) == 0
        texts.append([each["text"] for each in lines(here / out)[1:]])
    assert texts[0] == texts[1]
    assert main(["gym", "test", "number", *FEW, "out=a/two.jsonl", "seed=1"]) == 0  # its own file is written anew
    assert lines(here / "a" / "two.jsonl")[0]["seed"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nmber"], "env=nmber: there is no such environment; did you mean 'number'?"),
        (["gone.py:x"], "env=gone.py:x: there is no file gone.py"),
        (["v.py:gone"], "env=v.py:gone: v.py has no 'gone'"),
        (
            ["v.py:number_of_things"],
            "env=v.py:number_of_things is an int; give an Environment",
        ),
        (["v.py:broken"], "env=v.py:broken returned an int; let it return an Environment or a verifier"),
        (["number", "options.tiemout=3"], "env=number takes no 'tiemout'; did you mean 'timeout'"),
        (["number", "exact"], "gym test: found number and exact; give one target, and all else as key=value"),
        (["number", "form=42"], "form=42 does not say where the answer stands; give a text with {} there"),
        (["number", "allow=mutatd"], "allow=mutatd: there is no such fault; there are gold, mutated, other"),
        (["number", "out=."], "gym test: out=. is a folder; give a file"),
        (["number", "out=v.py"], "gym test: out=v.py holds something else; give another file, or remove it"),
        (["number", "gold=solution"], "gym test: task 0 has no 'solution', only 'seed', 'prompt', 'answer'"),
        (["number", "data=gone.jsonl"], "'gone.jsonl' is neither a file"),
        (
            ["number", "data=rows.jsonl"],
            "rows.jsonl, line 1: number: task['answer'] is {'a': 1}; give a string or a number",
        ),
        (["constraint"], "did you mean 'constraints'?"),
        (["number", "limit=0"], "limit"),
        (["number", "slow=0"], "slow"),
        (["number", "sesions=3"], "sesions"),
        (["--slow=3"], "slow"),
    ],
)
def test_mistakes_are_explained(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (here / "rows.jsonl").write_text(json.dumps({"question": "?", "answer": {"a": 1}}) + "\n")
    more = [] if any(each.startswith("data=") for each in arguments) else ["data=arithmetic"]
    assert message in said(capsys, "limit=2", *arguments, *more, status=2)
    assert (here / "v.py").read_text() == VERIFIERS


@pytest.mark.parametrize("arguments", [["gym"], ["gym", "tst"]])
def test_the_group_has_one_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: nrl gym" in capsys.readouterr().err


# --- environments

ENVIRONMENTS = """
import os, random
from nrl.envs import Environment, Step, number, single_turn
from nrl.envs.tools import tool, tool_use

def reset(task):
    return (random.Random(task["seed"]).randint(1, 1000), 3), "Guess a number. What is it?"

def step(state, turn):
    right, left = state
    if turn.strip() == str(right):
        return Step(state, 1.0)
    return Step((right, left - 1), 0.0, left == 1, None if left == 1 else "No.")

good = Environment(reset, step, close=lambda state: None)
async def later_reset(task):
    return reset(task)
async def later_step(state, turn):
    return step(state, turn)
later = Environment(later_reset, later_step)
def make():
    return good
asked = single_turn(number)
def unsaid(task, trace):
    return float(not trace.text)
judged = Environment(reset, lambda s, t: step(s, t)._replace(reward=0.0), verifier=unsaid)

silent = Environment(reset, lambda s, t: Step(s, float(not t)))
junk = Environment(reset, lambda s, t: Step(s, float(len(set(t)) > 60 or "{" in t or len(t) > 999 or "jkl" in t)))
echo = Environment(reset, lambda s, t: Step(s, float("guess" in t.lower() and "it?" in t)))
def lucky(state, turn):
    said = any(each in turn.lower() for each in ("guess a", "jkl", "the reward", "{"))
    return Step(state, float(0 < len(turn) < 60 and not said))
luck = Environment(reset, lucky)
def look(at: str) -> str:
    "Look at a thing."
    return at
calls = Environment(lambda task: (*reset(task), [tool(look)]), lambda s, t: Step(s, float(len(t.calls) > 0)))
uses = Environment(calls.reset, lambda s, t: Step(s, float(len(t.calls) > 0 and not t.malformed)))
def shuts(at: str) -> str:
    "Look at a thing, and break what looks."
    if not at or len(at) > 500:
        raise OSError("broken")
    return at
broken_tool = tool_use([tool(shuts)], lambda task, trace: 0.0, turns=3)
endless = Environment(reset, lambda s, t: Step(s, 0.0, False, "Go on."))
raises = Environment(reset, lambda s, t: Step(s, float(int(t) == 3)))
unreset = Environment(lambda task: "Hello", step)
unasked = Environment(lambda task: (0, 3.5), step)
untooled = Environment(lambda task: (0, "Hello", look), step)
unstepped = Environment(reset, lambda s, t: 1.0)
unpaid = Environment(reset, lambda s, t: Step(s, "much"))
def refuse(state):
    raise OSError("busy")
unclosed = Environment(reset, step, refuse)
varied = Environment(reset, lambda s, t: Step(s, random.random() / 2))

turns = [0]
def shared_reset(task):
    turns[0] = 0
    return None, "Go on."
def shared_step(state, turn):
    turns[0] += 1
    return Step(None, turns[0] / 10, turns[0] >= 3, "Go on.")
shared = Environment(shared_reset, shared_step)

def leaky(task):
    with open("descriptors", "a") as file:
        print(os.open("/dev/null", os.O_RDONLY), file=file)
    return reset(task)
leaks = Environment(leaky, step)
closed = []
counted = Environment(lambda task: ([0], "Go on."), lambda s, t: Step(s, 0.0, False, "Go on."),
    lambda s: closed.append(s[0]) or s.__setitem__(0, s[0] + 1))
"""


def test_without_data_its_own_tasks_are_taken(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing is wrong with choice" in said(capsys, "choice", "limit=2", "slow=30")
    message = "env=e.py:good brings no tasks; say where they come from, as data=FILE"
    assert message in said(capsys, "e.py:good", status=2)


@pytest.mark.parametrize("name", ["good", "later", "make"])
def test_a_good_environment_passes(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert f"nothing is wrong with e.py:{name}" in said(capsys, f"e.py:{name}", *FEW)
    tried = lines(here / "gym_test.jsonl")[1:]
    assert {each["kind"] for each in tried} == {"silent", "junk", "echo", "random", "leaves"}
    assert {each["turns"] for each in tried if each["kind"] != "leaves"} == {3}
    assert {each["turns"] for each in tried if each["kind"] == "leaves"} == {0}


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("silent", "silent"),
        ("junk", "junk"),
        ("echo", "echo"),
        ("luck", "random"),
        ("calls", "calls uses"),
        ("uses", "uses"),
        ("broken_tool", "raises"),
        ("judged", "silent"),
        ("endless", "endless"),
        ("raises", "raises"),
        ("unreset", "raises"),
        ("unasked", "raises"),
        ("untooled", "raises"),
        ("unstepped", "raises"),
        ("unpaid", "raises"),
        ("unclosed", "close"),
        ("varied", "varies"),
        ("shared", "order"),
    ],
)
def test_what_is_wrong_with_an_environment_is_found_by_name(here: Path, name: str, faults: str) -> None:
    assert main(["gym", "test", f"e.py:{name}", *FEW, "turns=5"]) == 1
    assert list(found()) == faults.split()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "unreset",
            "EnvError: the environment's reset returned a str; return (state, prompt), or (state, prompt, tools)",
        ),
        ("unasked", "; give text, a list of messages, or token ids"),
        ("untooled", "EnvError: the environment's reset returned something else than a list of tools as its third"),
        ("unstepped", "EnvError: the environment's step returned float; return a Step(state, reward, ...)"),
        ("unpaid", "EnvError: the verdict is 'much', of which no reward can be made"),
        ("unclosed", "episodes could not be closed: task 0, silent (silent): OSError: busy"),
        ("endless", "it had 5 turns and was not done"),
        ("shared", "played beside others"),
        ("varied", "played again"),
    ],
)
def test_faults_of_environments_say_what_to_do(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    assert message in said(capsys, f"e.py:{name}", *FEW, "turns=5", status=1)


def test_the_right_answer_at_once_has_to_pass_where_it_is_known(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing is wrong with e.py:asked" in said(capsys, "e.py:asked", *FEW, "gold=answer")
    assert "gold (3): right answers did not pass" in said(capsys, "e.py:good", *FEW, "gold=answer", status=1)


def test_tools_are_run_with_sensible_and_with_hostile_arguments(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real interpreter, also in the sessions that look for leaks."""
    told = list[tuple[str, str]]()
    run = Interpreter.run

    def heard(interpreter: Interpreter, code: str) -> str:
        told.append((code, "it ended"))  # unless it answers
        answer = run(interpreter, code)
        told[-1] = code, answer
        return answer

    monkeypatch.setattr(Interpreter, "run", heard)
    audit = ["gym", "test", "python", "limit=6", "slow=60"]
    assert main(audit) == 0
    assert ("print(6 * 7)", "42\n") in told
    assert any("ZeroDivisionError" in answer for _, answer in told)
    assert ("import os\nos._exit(0)", "it ended") in told
    alone = len(told)
    assert main([*audit, "sessions=7"]) == 0  # each policy once
    assert len(told) > 2 * alone


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.booleans())
def test_arguments_fit_the_parameters(seed: int, hostile: bool) -> None:
    made = tool(described)
    found = arguments(made.schema["function"]["parameters"], Random(seed), seen="What is it?", hostile=hostile)
    assert {"text", "count", "share", "kind", "tree"} <= set(found)
    for name, value in found.items():
        made.parameters[name].validate_python(value, strict=name == "count")


class Tree(TypedDict):
    """A node."""

    name: str
    below: list["Tree"]


def described(
    text: Annotated[str, Field(min_length=3, max_length=8)],
    count: Annotated[int, Field(ge=2, le=5)],
    share: Annotated[float, Field(gt=0)],
    kind: Literal["a", "b"],
    tree: Tree,
    more: dict[str, int] | bool | None = None,
) -> str:
    """Takes all kinds of arguments."""
    return text


def test_an_environment_that_keeps_files_leaks(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "files: " in said(capsys, "e.py:leaks", *FEW, "sessions=60", status=1)


def test_each_episode_is_closed_once(here: Path) -> None:
    """Also one that ends before its first turn, and one that does not end."""
    assert main(["gym", "test", "e.py:counted", *FEW, "turns=3", "sessions=20", "allow=endless"]) == 0


# --- its parts


@pytest.mark.parametrize(
    ("asked", "gold", "texts"),
    [
        ("17+12=", "29", ["12+17", "12 + 17 + 0"]),
        ("What is 17 * 13?", "221", ["13*17", "13 * 17 * 1"]),
        ("17+12=", r"\boxed{29}", ["12+17", r"\boxed{12+17}", "12 + 17 + 0", r"\boxed{12 + 17 + 0}"]),
        ("0+5=", "5", []),  # of which a reader may take the 5
        ("1+2+3=", "6", []),
        ("2*3-1=", "5", []),
        ("1.5+2=", "3.5", []),
        ("2+1.5=", "3.5", []),
        ("How many?", "3", []),
    ],
)
def test_sums_and_products_are_written_in_another_way(asked: str, gold: str, texts: list[str]) -> None:
    way, *_ = ways({}, [gold])
    every = hostile(way, [gold], [], asked, Random(0))
    assert [each.text for each in every if each.kind == "operands"] == texts


@pytest.mark.parametrize(
    ("gold", "texts"),
    [
        (r"So \boxed{0}.", [r"So \boxed{1/0}.", r"So \boxed{0^0}.", r"So \boxed{\frac{1}{0}}."]),
        ("1/0", ["0^0", r"\frac{1}{0}"]),  # a task may ask for what has no value
        ("```python\nx = 1\n```", []),
    ],
)
def test_what_has_no_value_is_an_answer(gold: str, texts: list[str]) -> None:
    way, *_ = ways({}, [gold])
    assert [each.text for each in hostile(way, [gold], [], "", Random(0)) if each.kind == "undefined"] == texts


@settings(max_examples=25)
@given(st.integers(-2000, 2000), st.lists(st.integers(-50, 50).map(str), max_size=4))
def test_no_hostile_response_says_the_right_number(value: int, others: list[str]) -> None:
    for way in ways({}, [str(value)]):
        texts = hostile(way, [str(value)], others, "", Random(0))
        assert [each.text for each in texts if score_of(number({"answer": value}, Trace("", [each.text]))).reward] == []


def test_no_hostile_response_chooses_the_right_letter() -> None:
    for letter in "ABCDad":
        way, *_ = ways({}, [letter])
        for each in hostile(way, [letter], ["A", "B", "C", "D"], "A, B, C or D?", Random(0)):
            assert score_of(choice({"answer": letter}, Trace("", [each.text]))).reward == 0.0, each


@pytest.mark.parametrize(
    ("task", "gold", "text"),
    [
        ({}, "Add.\n#### 42\n", "Add.\n#### 43\n"),
        ({}, r"So \boxed{42}.", r"So \boxed{43}."),
        ({}, "Look:\n```python\nx = 42\n```\nDone 7.", "Look:\n```python\nx = 43\n```\nDone 7."),
        ({"choices": ["x", "y"]}, "y", "A"),
        ({}, "-1.50", "-2.50"),
        ({}, "Paris", None),
    ],
)
def test_a_right_answer_is_changed_where_it_stands(task: Any, gold: str, text: str | None) -> None:
    way, *_ = ways(task, [gold])
    first = next(mutants(way.core, Random(3)))
    changed = way.saying(first[1])
    assert changed != way.text
    if task:
        assert way.text == "B"
    elif text is None:
        assert sum(a != b for a, b in zip(changed, gold, strict=True)) == 1
    else:
        assert changed == text


def test_huge_responses_are_huge() -> None:
    sizes = {each.how: len(each.text) for each in huge(Way("bare", "", "42", ""), "43")}
    assert sizes.pop("backslashes") == 65_536
    assert all(900_000 < size < 1_100_000 for size in sizes.values())


def test_what_fills_once_does_not_leak() -> None:
    kept = list[bytearray]()

    async def session(number: int) -> None:
        if number < 10:
            kept.append(bytearray(b"x" * (4 << 20)))

    assert asyncio.run(growth(session, 100)).leaks() == {}
    before = Usage(100 << 20, 10, 2, 0)
    full = attrs.evolve(before, memory=150 << 20, files=30)
    assert Growth(100, before, full, full).leaks() == {}
    after = Usage(200 << 20, 50, 2, 7)
    assert Growth(100, before, full, after).leaks() == {
        "files": "10 -> 50", "processes": "0 -> 7", "memory": "100 -> 200 MiB",
    }  # fmt: skip


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_what_the_c_library_keeps_is_not_what_leaks() -> None:
    kept = list[bytearray]()

    async def session(number: int) -> None:
        blocks = [bytearray(b"x" * 100_000) for _ in range(500)]
        kept.append(blocks[-1])  # above the others, which are free and would stay resident

    async def nothing(number: int) -> None: ...

    before = asyncio.run(growth(nothing, 1)).after.memory  # what earlier tests have left free is given back, too
    assert asyncio.run(growth(session, 20)).after.memory - before < 20 << 20


def test_threads_that_make_calls_are_not_what_leaks() -> None:
    """A busy machine makes a quick call wait, for which there is one thread more, and not one fewer after it."""
    blocked = threading.Event()

    async def called() -> tuple[int, int]:
        first, before, calls = threading.active_count(), usage().threads, Calls()
        asked = [calls.begin(blocked.wait, timeout=60.0, context=copy_context()) for _ in range(3)]
        asked.append(calls.begin(asyncio.sleep, 0.0, timeout=60.0, context=copy_context()))
        try:
            async with asyncio.timeout(60):
                while threading.active_count() - first < 4:
                    await asyncio.sleep(0.05)
            return before, usage().threads
        finally:
            blocked.set()
            await asyncio.gather(*asked)
            calls.close()

    before, meanwhile = asyncio.run(called())
    assert before == meanwhile


def test_a_thread_whose_call_was_given_up_is_one_more() -> None:
    async def called(until: threading.Event) -> int:
        before, calls = usage().threads, Calls()
        try:
            with pytest.raises(Failed, match="did not return within"):
                await calls.begin(until.wait, timeout=0.2, context=copy_context())
            return usage().threads - before
        finally:
            until.set()
            calls.close()

    assert asyncio.run(called(threading.Event())) == 1


def test_a_thread_of_the_environments_own_is_one_more() -> None:
    until, before = threading.Event(), usage().threads
    thread = threading.Thread(target=until.wait, name="environment: watcher")
    thread.start()
    try:
        assert usage().threads - before == 1
    finally:
        until.set()
        thread.join()


# --- what ships


LONG = ("code", "fhaviary", "python")
"""Those of which a session takes a tenth of a second, since it starts a process or plays a hundred turns."""

SHIPPED = {
    "number": ["number", f"data={DATA / 'gsm8k_sample.jsonl'}"],
    "number, of answers alone": ["number", f"data={DATA / 'gsm8k_sample.jsonl'}", "format=gsm8k"],
    "number_or_wrong": ["number_or_wrong", f"data={DATA / 'gsm8k_sample.jsonl'}"],
    "exact": ["exact", f"data={DATA / 'gsm8k_sample.jsonl'}", "format=gsm8k"],
    "exact, of texts": ["exact", f"data={DATA / 'squad_sample.jsonl'}", "format=squad"],
    "choice": ["choice", f"data={DATA / 'choices_sample.jsonl'}"],
    "constraints": [
        "constraints", f"data={DATA / 'constraints_sample.jsonl'}", "gold=response",
        "allow=mutated,candidates",  # of which nothing is said
    ],
    "math_verifier": ["math", f"data={DATA / 'math_sample.jsonl'}"],
    "code": ["code", f"data={DATA / 'programs_sample.jsonl'}", "gold=response"],
    "short_answer": ["nrl.envs:short_answer", f"data={DATA / 'squad_sample.jsonl'}", "format=squad", "gold=answers"],
    "short_answer, of its own tasks": ["short_answer"],
    "searching": ["nrl.envs:searching", "gold=answer"],
    "sliding_puzzle": ["nrl.envs:sliding_puzzle"],
    "tic_tac_toe": ["nrl.envs:tic_tac_toe", "allow=echo"],  # the last number of a board is a move, which may win
}  # fmt: skip


@pytest.mark.parametrize("name", SHIPPED)
def test_nothing_is_wrong_with_what_ships(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    limit = 2 if name == "code" else 5
    assert "nothing is wrong with" in said(capsys, *SHIPPED[name], f"limit={limit}", "slow=30")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SHIPPED)
def test_nothing_is_wrong_with_all_that_ships(here: Path, name: str) -> None:
    sessions = 1000 if name in LONG else 10_000
    print(said_alone(*SHIPPED[name], f"sessions={sessions}", "slow=10"))


ELSEWHERE = {
    "python": ["python", "gold=answer"],
    "reasoning_gym": ["reasoning_gym"],
    "textarena": ["textarena", "allow=echo"],  # a number that the rules name is a guess, which may be right
    # It pays for every story, and ends where one is printed
    "fhaviary": ["fhaviary", "data=arithmetic", "allow=endless,calls,uses"],
    "reward_model": ["reward_model", "options.model=rewarding", "allow=gold"],  # its head is not trained
    "judge": ["judge", "options.url=URL"],
}
"""Those that need other processes, or a model."""


@pytest.fixture(params=ELSEWHERE)
def elsewhere(request: pytest.FixtureRequest, here: Path) -> Iterator[list[str]]:
    """The target, its options, and what is behind it: a folder with a model; a server.

    The judge of that compares what stands between the marks with the right answer.
    """

    def reply(body: Mapping[str, Any]) -> str:
        asked = body["messages"][1]["content"]
        right = asked.partition("A right answer:\n")[2].partition("\n")[0]
        given = asked.partition("The answer to judge:\n")[2].split("\n")[1:-1]
        return f"SCORE: {10 if given == [right] else 0}"

    words = ELSEWHERE[request.param]
    with ExitStack() as stack:
        if request.param == "reward_model":
            tiny.save(tiny.model(head="reward"), here / "rewarding")
        if request.param == "judge":
            url = stack.enter_context(serving(replying(reply, deque(maxlen=1))))  # one that grew would be its leak
            words = [word.replace("URL", url) for word in words]
        yield words


@pytest.mark.timeout(600)  # an environment may have to be built
def test_nothing_is_wrong_with_what_runs_elsewhere(elsewhere: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, *elsewhere, "limit=2", "slow=30")
    assert f"nothing is wrong with {elsewhere[0]}" in shown


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_is_wrong_with_all_that_runs_elsewhere(elsewhere: list[str]) -> None:
    limit, sessions = 20 if elsewhere[0] == "judge" else 10, 1000 if elsewhere[0] in LONG else 10_000
    shown = said_alone(*elsewhere, f"limit={limit}", f"sessions={sessions}", "slow=30")
    assert f"nothing is wrong with {elsewhere[0]}" in shown
    print(shown)


def test_of_several_environments_each_verifier_gets_what_it_is_for(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of them judges a single trace, though others may judge groups."""
    (here / "mixed.py").write_text(
        "from nrl.envs import Environment, Step, by_source\n\n\n"
        "def right(task, trace):\n    return float(trace.text == task['answer'])\n\n\n"
        "env = by_source(Environment(lambda task: (0, task['prompt']), lambda state, turn: Step(state), None, right))\n"
    )
    (here / "some.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "source": 0}\n')
    said(capsys, "mixed.py:env", "data=some.jsonl", "chat=false", "gold=answer", "slow=30", status=0)


def test_help_says_what_each_key_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["gym", "test", "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for field in attrs.fields(Audit):
        assert re.search(rf"^  {field.name}: .*\n      \S", shown, re.MULTILINE), field.name
