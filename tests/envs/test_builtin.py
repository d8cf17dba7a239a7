"""Environments by name: what `env=` and `data=` of a configuration may say."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nrl
from nrl.batch.metrics import finalize
from nrl.envs import Environment, Score, Step, Trace, exact, extractor, number, single_turn
from nrl.envs.builtin import ENVIRONMENTS
from nrl.envs.registry import named
from nrl.envs.tools import ToolError
from nrl.errors import ConfigError, DataError, EnvError
from nrl.gym import addresses
from nrl.gym.config.resolving import Replicas
from nrl.gym.http.serve_app import Server
from tests.rollout.scripted import Scripted

OWN = '''
from nrl.envs import Environment, Step

LIMIT = 3


def judge(task, trace, letter="a", weight=1.0):
    return weight * trace.text.count(letter)


def make(*, turns=2):
    """Says hello until the turns are over."""

    def step(state, turn):
        return Step(state + 1, reward=float(state), done=state + 1 == turns, observation="again ")

    def tasks(seed, index):
        return {"prompt": f"{seed} {index} "}

    return Environment(lambda task: (0, task["prompt"]), step, tasks=tasks)


env = make()


def strict(*, letter):
    return lambda task, trace: float(trace.text == letter)


def wrong():
    return 7


def between(low, high):
    return lambda task, trace: float(low < int(trace.text) < high)


def alone(trace):
    return 1.0


def broken(turns=2):
    raise ValueError("turns are not what they were")
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in "xyz"))
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps({"prompt": each, "answer": "1"}) + "\n" for each in "xyz"))
    (tmp_path / "broken.py").write_text("def env(:\n")
    (tmp_path / "failing.py").write_text("one = 1\nenv = one / 0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def verdict(env: Any, text: str, **task: Any) -> Any:
    verify: Any = named(env, task.pop("options", {}), ENVIRONMENTS)
    found = verify(task, Trace("", [text]))
    return asyncio.run(found) if asyncio.iscoroutine(found) else found


PLACED = """
import nrl
from nrl.envs import Environment, Step, extracts


@extracts(str.strip)
def where(task, trace):
    return {"there": float(nrl.process().mesh == "verifiers"), "of": float(nrl.process().size)}


def tasks(seed, index):
    return {"prompt": "Where?"}


env = Environment(lambda task: (0, task["prompt"]), lambda state, turn: Step(state, where(None, None)), tasks=tasks)
"""


# --- one


@pytest.mark.parametrize(
    ("name", "task", "right"),
    [
        ("number", {"answer": "4"}, "It is 4."),
        ("number_or_wrong", {"answer": "x"}, None),
        ("exact", {"answer": "yes"}, " yes"),
        ("choice", {"answer": "B"}, "The answer is B."),
        ("math", {"answer": "1/2"}, "0.5"),
        ("constraints", {"constraints": ["lowercase"]}, "all small"),
    ],
)
def test_verifiers_that_ship(name: str, task: Any, right: str | None) -> None:
    def reward(text: str) -> float:
        found = verdict(name, text, **task)
        return float(found.reward if isinstance(found, Score) else found)

    assert reward("NOTHING") == 0
    assert right is None or reward(right) == 1


def test_a_verifier_with_its_options(own: Path) -> None:
    assert verdict("own.py:judge", "banana") == 3
    assert verdict("own.py:judge", "banana", options={"letter": "n", "weight": 0.5}) == 1
    assert verdict("own.py:strict", "b", options={"letter": "b"}) == 1
    assert verdict("own:judge", "aa") == 2  # a module, too


@pytest.mark.parametrize("several", [False, True])
def test_what_is_named_runs_on_a_mesh_of_its_own(own: Path, several: bool) -> None:
    """A verifier and an environment, alone or mixed, on slots; without any they stay here."""
    (own / "placed.py").write_text(PLACED)
    with nrl.cluster("local") as cluster:
        slots = cluster.reserve(2)
        places: list[Any] = [(slots, 1.0), (slots.mesh(name="others"), 0.0), (slots[2:], 0.0), (None, 0.0)]
        for name in ["placed.py:where", "placed.py:env"]:
            given: Any = {name: 1, "number": 1} if several else name
            data = dict.fromkeys(("placed.where", "number"), "rows.jsonl")
            for place, there in places:
                made = nrl.environments(given, None if name.endswith("env") else data, place=place, chat=False)
                asked = {"prompt": "Where?", "source": 0, "answer": "1"}
                batch = nrl.rollout(Scripted(["here"]), made.env, [asked], n=1)
                assert batch["valid"].all()
                assert batch["reward/there"].tolist() == [there]
                assert batch["reward/of"].tolist() == [1.0 if not place else 2.0]
                if name.endswith("env"):
                    assert made.tasks().take(1)[0]["prompt"]
                elif not several:
                    assert extractor(made.graded) is extractor(nrl.environments(name).graded)  # type: ignore[arg-type]


def test_a_limit_on_each_call(own: Path) -> None:
    slow = named("number", {"timeout": 2}, ENVIRONMENTS)
    assert getattr(slow, "timeout", None) == 2
    assert slow is not number
    assert getattr(slow, "extract", None) is getattr(number, "extract", 0)  # so that samples vote
    assert nrl.environments({"number": {"timeout": None}}).env.timeout is None  # type: ignore[attr-defined]
    assert nrl.environments({"own.py:env": {"timeout": 3.5}}).env.timeout == 3.5  # type: ignore[attr-defined]
    assert nrl.environments("number").graded is number


def test_a_function_of_two_things_makes_one_where_these_are_its_options(own: Path) -> None:
    assert verdict("own.py:between", "2", options={"low": 1, "high": 3}) == 1


def test_an_environment_with_its_options_and_its_own_tasks(own: Path) -> None:
    made = nrl.environments({"own.py:make": {"turns": 3}})
    assert made.names == ("own.make",)
    tasks = made.tasks(7)
    assert (tasks.names, tasks.size) == (("own.make",), None)
    assert [task["prompt"] for task in tasks.take(2)] == ["7 0 ", "7 1 "]
    state, _ = made.env.reset({"prompt": "a"})
    for turn in range(3):
        state, reward, done, _, _ = made.env.step(state, "hello")  # type: ignore[misc,arg-type]
        assert (reward, done) == (turn, turn == 2)
    assert made.tasks(0, "rows.jsonl").size == 3  # other tasks than its own
    assert nrl.environments("own.py:env", "rows.jsonl", shuffle=False, chat=False).tasks().take(1) == [{"prompt": "x"}]


def test_a_name_that_the_command_line_has_split(own: Path) -> None:
    """``env.own.py:make.turns=3`` comes as nested mappings."""
    made = nrl.environments({"own": {"py:make": {"turns": 1}}, "number": 1})
    assert made.names == ("own.make", "number")
    state, _ = made.env.reset({"prompt": "a", "source": 0})
    assert made.env.step(state, "b").done  # type: ignore[union-attr,arg-type]


def test_python_is_a_tool_and_a_verifier_has_the_last_word() -> None:
    env = nrl.environments({"python": {"verifier": "exact", "turns": 3}}).env
    assert [tool.name for tool in env.reset({"prompt": "a"})[2]] == ["python"]
    assert env.verifier is exact  # type: ignore[attr-defined]


def test_limits_of_the_interpreter_are_options() -> None:
    env = nrl.environments({"python": {"verifier": "exact", "output": 1000}}).env
    state, _, tools = env.reset({"prompt": "a"})
    with state.state as interpreter, pytest.raises(ToolError, match="reached its limit of output"):
        tools[0].fn("print('x' * 10**5)", interpreter)


# --- several


def test_several_are_mixed_by_their_weights_and_measured_apart(own: Path) -> None:
    made = nrl.environments({"number": {"weight": 2}, "twice": {"env": "own.py:make", "turns": 2}})
    assert made.names == ("number", "twice")
    assert made.graded is made.env
    tasks = made.tasks(3)
    some = tasks.take(30)
    assert sum(task["source"] == 0 for task in some) == 20
    groups = nrl.rollouts(Scripted(["5"] * 400), made.env, made.tasks(3), n=2)
    batch = nrl.batched(groups, 30).take(1)[0]
    found = finalize(nrl.summary(batch) | nrl.per_source(batch, made.names))
    assert found["twice/reward"] == 1  # 0 for the first turn, 1 for the second
    assert found["reward"] == pytest.approx((2 * found["number/reward"] + found["twice/reward"]) / 3)


def test_each_has_data_of_its_own(own: Path) -> None:
    env, data = {"number": 1, "own.py:judge": 1}, {"own.judge": {"source": "rows.jsonl", "chat": False}}
    prompts = {task["source"]: task["prompt"] for task in nrl.environments(env, data).tasks().take(4)}
    assert prompts[0].endswith("=")
    assert prompts[1] in "xyz"


def test_data_of_one_may_be_what_reading_it_takes(own: Path) -> None:
    made = nrl.environments("own.py:judge", {"source": "rows.jsonl", "chat": False, "shuffle": False})
    assert made.tasks().take(1) == [{"prompt": "x"}]


def test_a_name_in_place_of_a_weight(own: Path) -> None:
    assert nrl.environments({"easy": "number", "hard": "exact"}).names == ("easy", "hard")


def test_a_verifier_of_groups_among_others(own: Path) -> None:
    (own / "group.py").write_text(
        "from nrl.envs import of_group\n\n\n@of_group\ndef first(task, traces):\n"
        "    return [float(place == 0) for place, _ in enumerate(traces)]\n"
    )
    made = nrl.environments(
        {"group.py:first": 1, "number": 1},
        {"group.first": {"source": "rows.jsonl", "chat": False}, "number": "arithmetic"},
    )
    batch = nrl.batched(nrl.rollouts(Scripted(["5"] * 60), made.env, made.tasks(0), n=3), 4).take(1)[0]
    assert batch["valid"].all()
    assert batch["rewards"][batch["source"] == 0].view(-1, 3).unique(dim=0).tolist() == [[1, 0, 0]]
    assert not batch["rewards"][batch["source"] == 1].any()


def test_components_of_one_are_no_metrics_of_another() -> None:
    made = nrl.environments({"constraints": 1, "number": 1})
    batch = nrl.batched(nrl.rollouts(Scripted(["apple"] * 60), made.env, made.tasks(0), n=2), 6).take(1)[0]
    found = finalize(nrl.per_source(batch, made.names))
    assert "constraints/reward/all" in found
    assert not [name for name in found if name.startswith("number/reward/all")]
    assert all(value == value for value in found.values())


def test_per_source_of_one() -> None:
    batch = nrl.rollout(Scripted(["5"]), nrl.environments("number").env, [{"prompt": "5", "answer": "5"}], n=1)
    assert nrl.per_source(batch, ("number",)) == {}


# --- what is wrong


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            "maths",
            r"env=maths: there is no such environment; did you mean 'math'\? Or give one of your own as FILE",
        ),
        ("x", "env=x: there is no such environment; there are choice, code, constraints, exact, "),
        (
            {"math": {"timeouts": 3}},
            "env=math takes no 'timeouts'; did you mean 'timeout'. It takes workers, exec",
        ),
        ({"number": {"strict": True}}, "env=number takes no 'strict'; it takes timeout, weight$"),
        ({"own.py:env": {"turns": 3}}, "env=own.py:env takes no 'turns'; it takes timeout, weight$"),
        ({"number": {"timeout": "soon"}}, "env=number: timeout is 'soon'; give seconds, or null for no limit"),
        ({"math": {"timeout": -1}}, "env=math: math_verifier: timeout is -1; it must be positive"),
        ("own.py:evn", r"env=own\.py:evn: own\.py has no 'evn'; did you mean 'env'"),
        ("own.py:x", r"own\.py has no 'x'; it has between, env, judge"),
        ("own.py:LIMIT", "env=own.py:LIMIT is an int; give an Environment, a function .task, trace. that verifies, or"),
        ("own.py:strict", "env=own.py:strict needs letter; give env.own.py:strict.letter="),
        ("own.py:wrong", "env=own.py:wrong returned an int; let it return an Environment or a verifier"),
        ("own.py:broken", "env=own.py:broken: turns are not what they were"),
        ("gone.py:env", "env=gone.py:env: there is no file gone.py in "),
        ("gone:env", "env=gone:env: gone cannot be imported: ModuleNotFoundError"),
        (":env", "env=:env: the module is not named; give one of your own"),
        ({"sliding_puzzle": {"turns": 0}}, "env=sliding_puzzle: sliding_puzzle: turns is 0; give at least 1"),
        ({"tic_tac_toe": {"oponent": "random"}}, "env=tic_tac_toe takes no 'oponent'; did you mean 'opponent'"),
        ("reward_model", "env=reward_model needs model; give env.reward_model.model="),
        *(
            ({who: {limit: 0}}, f"env={who}: Limits: {limit} is 0")
            for who in ("code", "python")
            for limit in ("seconds", "cpu_seconds", "memory", "processes", "output", "disk")
        ),
        ({"python": {"disk": "much"}}, "env=python: disk is 'much': input should be a valid integer"),
        ({"python": {"verifier": "own.py:env"}}, "env.python.verifier=own.py:env is an environment; give a verifier"),
        ({"python": {"verifier": "judge"}}, "env.python.verifier=judge needs url; give env.python.verifier.judge.url="),
        ({"search": {"k": "3.5"}}, "env=search: k is '3.5': input should be a valid integer"),
        ({"math": {"timeout": None}}, "env=math: timeout is None: input should be a valid number"),
        ({"number": "many"}, "env=many: there is no such environment"),
        ({"number": -1}, "env.number: the weight is -1; give a positive number"),
        ({"number": {"weight": True}}, "env.number: the weight is True"),
        (
            {"x": {"env": "number", "wieght": 3}},
            "env=number takes no 'wieght'; did you mean 'weight'. It takes timeout",
        ),
        (None, "env is None; give a name, or a mapping of names: choice, "),
        (["math"], r"env is \['math'\]; give a name"),
        ("own.py", "env=own.py names no environment of the file; it has between, env, judge: own.py:NAME"),
        (
            "own.py:alone",
            "needs trace; give env.own.py:alone.trace=; or, if it is a verifier, let it take a task and a",
        ),
        ("broken.py:env", r"env=broken.py:env: broken.py cannot be imported: SyntaxError: .*broken\.py, line 1"),
        ("failing.py:env", "env=failing.py:env: failing.py cannot be imported, line 2: ZeroDivisionError: division by"),
        ({}, "env is {}; give a name, or a mapping of names: choice, code"),
        (
            {"own.py:env": 1, "own:env": 1},
            r"env: there are two own\.env; name one anew, as \{other: \{env: own:env",
        ),
        ({"judge": {}}, "env=judge needs url; give env.judge.url="),
    ],
)
def test_mistakes_are_told_before_anything_runs(own: Path, env: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        nrl.environments(env)


@pytest.mark.parametrize(
    ("env", "data", "message"),
    [
        ("own.py:judge", None, "env=own.py:judge brings no tasks; say where they come from, as data=FILE"),
        ({"number": 1, "own.py:judge": 1}, {"number": "arithmetic"}, "env=own.py:judge brings no tasks"),
        ("number", {"number": {"source": "rows.jsonl", "shufle": True}}, "data: the tasks of number: .*'shufle'"),
        ("number", {"nubmer": "rows.jsonl"}, "data: there is no environment 'nubmer'; there are number"),
    ],
)
def test_mistakes_in_data(own: Path, env: Any, data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        nrl.environments(env, data).tasks()


def test_generated_tasks_take_no_format() -> None:
    with pytest.raises(DataError, match="tasks: 'task' makes its own prompts, so it takes no format; leave it out"):
        nrl.environments("number", format="gsm8k").tasks()


def test_tasks_of_an_environment_go_through_what_wraps_it() -> None:
    def tasks(seed: int, index: int) -> Any:
        return {"prompt": str(index)}

    env = Environment(lambda task: (0, task["prompt"]), lambda state, turn: Step(state), tasks=tasks)
    wrapped = [
        nrl.envs.limited(env, turns=2),
        nrl.envs.linear(env),
        nrl.envs.judged(env, exact),
        nrl.pooled(env, workers=1),
    ]
    assert all(each.tasks is tasks for each in wrapped)


# --- served ones


@pytest.fixture
def served() -> Iterator[tuple[Server, Server]]:
    """A verifier that asks for a token and brings tasks, and an environment that does neither."""

    def own(task: Any, trace: Trace) -> float:
        return len(trace.text) + 0.5

    made: Any = own
    made.tasks = lambda seed, index: {"prompt": f"{seed} {index}?"}
    with nrl.serve(own, token="of own") as first, nrl.serve(single_turn(number)) as second:
        yield first, second


@pytest.fixture
def gym(served: tuple[Server, Server], own: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The configuration of a gym that has both, and a model."""
    first, second = served
    found = {
        "own": Replicas("environment", (first.url,), first.token),
        "sums": Replicas("endpoint", (second.url,), None),
        "policy": Replicas("model", ("http://127.0.0.1:1/v1",), None),
    }
    monkeypatch.setattr(addresses, "resolve", lambda args: found if args == ["gym.yaml"] else {})
    return "gym.yaml"


def test_an_address_in_place_of_a_name(served: tuple[Server, Server]) -> None:
    first, second = served
    made = nrl.environments({first.url: {"token": "of own", "patience": 5}})
    assert made.names == (first.url.removeprefix("http://"),)
    assert [task["prompt"] for task in made.tasks(3).take(2)] == ["3 0?", "3 1?"]
    verify: Any = made.graded
    assert asyncio.run(verify({}, Trace("", ["four"]))) == 4.5
    mixed = nrl.environments({"words": {"env": first.url, "token": "of own"}, second.url: 3}, data_of(second.url))
    assert mixed.names == ("words", second.url.removeprefix("http://"))


def test_addresses_of_replicas_are_one_environment() -> None:
    def named(name: str) -> Environment:
        return Environment(lambda task: (None, name), lambda state, turn: Step(state, 1.0))

    async def both(env: Any) -> Any:
        return await asyncio.gather(env.reset({}), env.reset({}))

    with nrl.serve(named("a")) as a, nrl.serve(named("b")) as b:
        made = nrl.environments(f"{a.url},{b.url}", "rows.jsonl")
        assert made.names == (f"{a.url},{b.url}".replace("http://", ""),)
        assert {prompt for _, prompt in asyncio.run(both(made.env))} == {"a", "b"}
        far = {"far": {"env": f"{a.url},{b.url}", "patience": 5}}
        assert nrl.environments(far, "rows.jsonl").names == ("far",)
        with pytest.raises(EnvError, match="remote: '' is no address"):
            nrl.environments(f"{a.url},")


def data_of(url: str) -> dict[str, str]:
    return {url.removeprefix("http://"): "rows.jsonl"}


def test_all_environments_of_a_gym_and_one_of_them(gym: str) -> None:
    both = nrl.environments(gym, {"sums": "sums.jsonl"})
    assert both.names == ("own", "sums")
    assert {str(task["prompt"])[:3] for task in both.tasks(0).take(6)} > {"0 0", "[{'"}
    one = nrl.environments("gym.yaml:own")
    assert one.names == ("own",)
    verify: Any = one.graded
    assert asyncio.run(verify({}, Trace("", ["four"]))) == 4.5
    assert nrl.environments({"mine": {"env": "gym.yaml:own"}, "number": 2}).names == ("mine", "number")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("gym.yaml:maths", "env=gym.yaml:maths: the gym has no environment 'maths'; it has own, sums"),
        ("gym.yaml:policy", "env=gym.yaml:policy: the gym has no environment 'policy'; it has own, sums"),
        ("other.yaml", "env=other.yaml: the gym has no environments; give it some under `servers`"),
        ("other.yml:own", "env=other.yml:own: the gym has no environment 'own'; it has none"),
        ({"gym.yaml": 1, "own": {"env": "number"}}, "env: there are two own; name one anew, as {other: {env: own}}"),
        ({"gym.yaml:own": {"tokens": "x"}}, "env.gym.yaml:own: no option 'tokens'; did you mean token?"),
        ({"gym.yaml:own": {"patience": -1}}, "env.gym.yaml:own: remote: patience is -1"),
        ({"gym.yaml:own": {"pateince": 1}}, "env.gym.yaml:own: no option 'pateince'; did you mean patience?"),
        (
            {"far": {"env": "http://10.0.0.9:1", "turns": 3}},
            "env.far: no option 'turns'; an address has token, patience, connections and weight",
        ),
    ],
)
def test_mistakes_about_a_gym(gym: str, env: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        nrl.environments(env)


def test_another_package_lists_an_environment(tmp_path: Path) -> None:
    """By an entry point alone: the package is imported when the environment is used, and misspelt names are told."""
    (tmp_path / "dice.py").write_text("def verify(task, trace): return 1.0 if trace.text == '6' else 0.0\n")
    metadata = tmp_path / "dice-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: dice\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[nrl.environments]\nsix = dice:verify\n")
    program = """
import sys
from nrl.envs import Trace
from nrl.envs.builtin import ENVIRONMENTS, environments
assert "six" in ENVIRONMENTS and "openenv" in ENVIRONMENTS and "dice" not in sys.modules
print(environments("six", [{"prompt": "?"}]).graded({}, Trace("6", ["6"])))
try:
    environments("sixx")
except Exception as error:
    print(type(error).__name__, "'six'" in str(error))
"""
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)
    assert done.stdout == "1.0\nConfigError True\n", done.stderr
