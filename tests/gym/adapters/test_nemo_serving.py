"""Environments of nrl as resources servers of NeMo Gym, which its agents lead, unmodified."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

import nrl
from benchmarks._nemo_gym import free_port
from nrl.envs import Environment, Score, Step, Trace, exact, of_group, single_turn
from nrl.envs.tools import NewState, State, tool, tool_use
from nrl.errors import EnvError
from nrl.gym.adapters.nemo.env import nemo_gym, nemo_gym_agent
from nrl.gym.adapters.nemo.processes import NemoServer, nemo_gym_servers
from nrl.gym.adapters.nemo.rows import nemo_gym_row
from nrl.gym.adapters.nemo.server import nemo_gym_protocol
from tests.gym.endpoint.driving import Says, turn

AGENTS = {"counter": "simple_agent", "letters": "simple_agent", "guess": "gymnasium_agent", "failing": "simple_agent"}


def put(item: str, basket: State[tuple[str, ...]]) -> NewState:
    """Put an item into the basket."""
    return NewState((*basket, item), result=f"{len(basket) + 1} items")


def filled(task: Any, trace: Trace) -> dict[str, float]:
    """Half of it for the answer, the rest for each call and for what the tools have said."""
    said = [message["content"] for seen in trace.observations for message in seen]
    calls = [call.arguments["item"] for each in trace.turns for call in each.calls]
    right = float(task["answer"] in trace.text)
    return {"right": right / 2, "called": len(calls) / 8, "told": float("2 items" in said) / 16}


basket = tool_use([tool(put)], filled, state=lambda task: ())


def _guess_reset(task: Any) -> Any:
    return (task["number"], 3), [{"role": "user", "content": "Guess a number."}]


def _guess_step(state: Any, said: Any) -> Step:
    number, left = state
    if int(said) == number or left == 1:
        return Step(state, reward=float(int(said) == number))
    hint = "less" if number < int(said) else "more"
    return Step((number, left - 1), reward=-0.125, done=False, observation=[{"role": "user", "content": hint}])


def seen(task: Any, trace: Trace) -> dict[str, float]:
    """What the trace says of turns."""
    unread = sum(len(each.malformed) for each in trace.turns)
    return {
        "unread": float(unread),
        "cut": float(trace.truncated and trace.turns[-1].stop_reason == "length"),
        "reasoned": float(trace.turns[-1].reasoning == "Hm."),
    }


def failing(task: Any, trace: Trace) -> Score:
    """A verifier whose own part is broken."""
    return Score(1.0, "infra_error")


def together(task: Any, traces: Any) -> list[float]:
    """A verifier of groups."""
    return [0.0 for _ in traces]


short = tool_use([tool(put)], filled, state=lambda task: (), turns=2)
seen_by = tool_use([tool(put)], seen, state=lambda task: ())
guess = Environment(_guess_reset, _guess_step, None, lambda task, trace: {"turns": len(trace.turns) / 64})
ENVS: dict[str, Any] = {"counter": basket, "letters": exact, "guess": guess, "short": short, "seen": seen_by}
ENVS |= {"failing": failing, "infinite": lambda task, trace: float("inf"), "grouped": of_group(together)}


class Served(NamedTuple):
    agents: dict[str, str]
    model: int


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """Environments of this process, by name."""
    with ExitStack() as stack:
        made = {name: stack.enter_context(nrl.serve(f, protocol=nemo_gym_protocol)) for name, f in ENVS.items()}
        yield {name: each.url for name, each in made.items()}


@pytest.fixture(scope="module")
def served(urls: dict[str, str]) -> Iterator[Served]:
    """Agents of NeMo Gym, which are told where these are."""
    model = free_port()
    asked = {"policy": NemoServer("policy", kind="responses_api_models", port=model)}
    for name, agent in AGENTS.items():
        asked[name] = NemoServer(name, port=int(urls[name].rpartition(":")[2]))
        refs = {
            "resources_server": {"type": "resources_servers", "name": name},
            "model_server": {"type": "responses_api_models", "name": "policy"},
        }
        asked[f"{name}_agent"] = NemoServer(agent, refs, "responses_api_agents")
    with nemo_gym_servers(asked) as found:
        yield Served({name: found.urls[f"{name}_agent"] for name in AGENTS}, model)


def reward(env: Any, task: dict[str, Any], texts: list[str]) -> float:
    policy = Says("qwen3", texts, context_length=10**6)
    batch = nrl.rollout(policy, env, [task])
    assert batch["valid"].all()
    assert not policy.texts
    return float(batch["rewards"][0])


SHOP = {"prompt": "Buy tea and milk.", "answer": "done"}
TEA, MILK = ("put", {"item": "tea"}), ("put", {"item": "milk"})
PLAYS: list[tuple[str, dict[str, Any], list[str], float]] = [
    ("counter", SHOP, [turn("qwen3", "I do not know.")], 0.0),
    ("counter", SHOP, [turn("qwen3", "", TEA), turn("qwen3", "", MILK), turn("qwen3", "done")], 0.8125),
    ("counter", SHOP, [turn("qwen3", "", TEA, MILK), turn("qwen3", "done")], 0.8125),
    ("counter", SHOP, [turn("qwen3", "", TEA), turn("qwen3", "no")], 0.125),
    ("letters", {"prompt": "2+2=", "answer": "4"}, [turn("qwen3", "4")], 1.0),
    ("letters", {"prompt": "2+2=", "answer": "4"}, [turn("qwen3", "5")], 0.0),
    ("guess", {"number": 7}, [turn("qwen3", each) for each in ("9", "7")], -0.125 + 1 + 2 / 64),
    ("guess", {"number": 7}, [turn("qwen3", each) for each in ("1", "2", "3")], -0.25 + 3 / 64),
]


@pytest.mark.parametrize(("name", "task", "texts", "wanted"), PLAYS)
def test_its_agents_are_given_the_rewards_of_a_rollout(
    served: Served, name: str, task: dict[str, Any], texts: list[str], wanted: float
) -> None:
    theirs = nemo_gym_agent(served.agents[name], port=served.model)
    row = nemo_gym_row(task, ENVS[name])
    assert reward(theirs, row, texts) == wanted
    own = single_turn(exact) if name == "letters" else ENVS[name]
    assert reward(own, task, texts) == wanted


def test_a_failure_is_no_reward(served: Served) -> None:
    theirs = nemo_gym_agent(served.agents["failing"], port=served.model)
    with pytest.warns(UserWarning, match="/run answers with 500"):
        batch = nrl.rollout(Says("qwen3", [turn("qwen3", "4")]), theirs, [nemo_gym_row({"prompt": "2+2="}, failing)])
    assert batch["valid"].tolist() == [False]


def test_our_own_client_speaks_it_too(urls: dict[str, str]) -> None:
    for name, task, texts, wanted in PLAYS[:6]:
        assert reward(nemo_gym(urls[name]), nemo_gym_row(task, ENVS[name]), texts) == wanted


class Said(NamedTuple):
    status: int
    body: Any
    cookie: str


def post(url: str, body: Any, cookie: str = "", method: str = "POST") -> Said:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(url, data if method == "POST" else None, {"cookie": cookie}, method=method)
    try:
        with urllib.request.urlopen(asked) as answer:
            text, status, told = answer.read().decode(), answer.status, answer.headers.get("set-cookie", "")
    except urllib.error.HTTPError as error:
        text, status, told = error.read().decode(), error.code, error.headers.get("set-cookie", "")
        error.close()
    try:
        return Said(status, json.loads(text), told.split(";")[0])
    except ValueError:
        return Said(status, text, told.split(";")[0])


def said_text(text: str, **more: Any) -> dict[str, Any]:
    parts = [{"type": "output_text", "text": text, "annotations": []}]
    return {"output": [{"type": "message", "role": "assistant", "content": parts}], **more}


def calling(name: str, arguments: str, own: str, result: str = "1 items") -> list[dict[str, Any]]:
    return [
        {"type": "function_call", "call_id": own, "name": name, "arguments": arguments},
        {"type": "function_call_output", "call_id": own, "output": result},
    ]


def test_an_answer_has_all_that_was_sent_and_a_repeated_one_is_the_same(urls: dict[str, str]) -> None:
    row = {**nemo_gym_row(SHOP, basket), "_ng_task_index": 3, "_ng_rollout_index": 1}
    begun = post(urls["counter"] + "/seed_session", row)
    assert (begun.status, begun.body) == (200, {})
    put_one = post(urls["counter"] + "/put", {"item": "tea"}, begun.cookie)
    assert put_one == Said(200, "1 items", begun.cookie)  # again, since its agents keep the last ones alone
    response = {"output": [*calling("put", '{"item": "tea"}', "a"), *said_text("done")["output"]]}
    found = post(urls["counter"] + "/verify", {**row, "response": response}, begun.cookie)
    told = {"right": 0.5, "called": 0.125, "told": 0.0, "reward": 0.625}
    assert found.body == {**row, "response": response, **told}
    assert post(urls["counter"] + "/verify", {**row, "response": response}, begun.cookie) == found
    assert post(urls["counter"] + "/put", {"item": "tea"}, begun.cookie).status == 404
    metrics = post(urls["counter"] + "/aggregate_metrics", {"verify_responses": [found.body]}).body
    assert metrics["key_metrics"] == {f"mean/{key}": value for key, value in told.items()}
    assert metrics["group_level_metrics"][0]["_ng_task_index"] == 3


def test_a_session_outlives_what_is_refused(urls: dict[str, str], served: Served) -> None:
    """An agent keeps the cookies of the last answer alone, so a refusal has them, too."""
    row = nemo_gym_row({"prompt": "2+2=", "answer": "4"}, exact)
    begun = post(urls["letters"] + "/seed_session", row)
    refused = post(urls["letters"] + "/put", {"item": "tea"}, begun.cookie)
    assert (refused.status, refused.cookie) == (404, begun.cookie)
    theirs = nemo_gym_agent(served.agents["letters"], port=served.model)
    known = {"type": "function", "name": "put", "parameters": {"type": "object"}, "strict": False}
    offered = {**row, "responses_create_params": {**row["responses_create_params"], "tools": [known]}}
    assert reward(theirs, offered, [turn("qwen3", "", TEA), turn("qwen3", "4")]) == 1.0


def test_a_model_cannot_choose_its_task(urls: dict[str, str]) -> None:
    """What it calls is a path, and a path that is no tool may be called, too."""
    row = nemo_gym_row({"prompt": "2+2=", "answer": "4"}, exact)
    begun = post(urls["letters"] + "/seed_session", row)
    forged = {**row, "answer": "lol"}
    for path in ("/seed_session", "/reset"):
        again = post(urls["letters"] + path, forged, begun.cookie)
        assert (again.status, again.cookie) == (409, begun.cookie)
        assert "this session has an episode; end it first" in again.body["error"]["message"]
    judged = post(urls["letters"] + "/verify", {**forged, "response": said_text("lol")}, begun.cookie)
    assert judged.status == 400
    assert "the row is not the one that the episode was begun with" in judged.body["error"]["message"]
    assert post(urls["letters"] + "/verify", {**row, "response": said_text("lol")}, begun.cookie).body["reward"] == 0.0


def test_a_verdict_that_failed_may_be_asked_for_again() -> None:
    """The last turn is taken once; and two who ask at a time are told the same."""
    broken = [True]

    def once(task: Any, trace: Trace) -> float:
        if broken:
            broken.clear()
            raise ValueError("the judge is busy")
        return float("done" in trace.text)

    env = tool_use([tool(put)], once, state=lambda task: ())
    row, response = nemo_gym_row(SHOP, env), said_text("done")
    with nrl.serve(env, protocol=nemo_gym_protocol) as server:
        begun = post(server.url + "/seed_session", row)
        assert post(server.url + "/verify", {**row, "response": response}, begun.cookie).status == 422
        with ThreadPoolExecutor(4) as pool:
            again: Any = (post, server.url + "/verify", {**row, "response": response}, begun.cookie)
            asked = [pool.submit(*again) for _ in range(4)]
            found = [each.result() for each in asked]
    assert [(each.status, each.body["reward"]) for each in found] == [(200, 1.0)] * 4


def test_what_is_written_after_the_end_does_not_count(urls: dict[str, str]) -> None:
    """The environment is over with its second turn; in a rollout the model is asked nothing after it."""
    row = nemo_gym_row(SHOP, short)
    begun = post(urls["short"] + "/seed_session", row)
    for each in ("tea", "milk"):
        assert post(urls["short"] + "/put", {"item": each}, begun.cookie).status == 200
    late = post(urls["short"] + "/put", {"item": "rice"}, begun.cookie)
    assert (late.status, late.body["error"]["message"]) == (
        409,
        "the episode is over: no tool can be called any more",
    )
    results = {"tea": "1 items", "milk": "2 items", "rice": "..."}
    output = [each for own in results for each in calling("put", json.dumps({"item": own}), own, results[own])]
    response = {"output": [*output, *said_text("done")["output"]]}
    found = post(urls["short"] + "/verify", {**row, "response": response}, begun.cookie).body
    texts = [turn("qwen3", "", TEA), turn("qwen3", "", MILK)]
    assert found["reward"] == reward(short, SHOP, texts) == 2 / 8 + 1 / 16


def test_turns_that_were_cut_and_calls_that_cannot_be_read_are_the_models_doing(urls: dict[str, str]) -> None:
    row = nemo_gym_row(SHOP, seen_by)
    begun = post(urls["seen"] + "/seed_session", row)
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    output = [*calling("put", "{tea", "a"), thought, *said_text("do")["output"]]
    response = {"output": output, "incomplete_details": {"reason": "max_output_tokens"}}
    found = post(urls["seen"] + "/verify", {**row, "response": response}, begun.cookie).body
    assert (found["unread"], found["cut"], found["reasoned"], found["reward"]) == (1.0, 1.0, 1.0, 3.0)


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("counter/seed_session", b"{", 400, "/seed_session: Input data was truncated"),
        ("counter/seed_session", [], 400, "/seed_session: it is list; send an object"),
        ("counter/seed_session", {"prompt": "Hi"}, 400, "the row has no 'responses_create_params'"),
        ("letters/seed_session", {"responses_create_params": {"input": [3]}}, 400, "/seed_session: input"),
        ("counter/put", {"item": "tea"}, 404, "/put: there is no such episode; send the cookie of /seed_session"),
        ("counter/step", {}, 404, "/step: there is no such episode; send the cookie of /reset"),
        ("letters/reset", {"responses_create_params": {}}, 404, "reset: exact is a verifier: it has no episodes"),
    ],
)
def test_what_is_wrong_with_a_request_is_named(
    urls: dict[str, str], path: str, body: Any, status: int, why: str
) -> None:
    name, _, rest = path.partition("/")
    found = post(f"{urls[name]}/{rest}", body)
    assert found.status == status
    assert why in found.body["error"]["message"]


@pytest.mark.parametrize(
    ("name", "task", "path", "body", "why"),
    [
        ("letters", {"prompt": "a", "answer": "a"}, "/put", {}, "there is no tool put"),
        ("letters", {"prompt": "a", "answer": "a"}, "/verify", {}, "there is no 'response' with an 'output'"),
        ("letters", {"prompt": "a", "answer": "a"}, "/step", {"response": {"output": []}}, "the response has 0 turns"),
        ("failing", {"prompt": "a"}, "/verify", {"response": said_text("a")}, "status is 'infra_error'"),
        (
            "infinite",
            {"prompt": "a"},
            "/verify",
            {"response": said_text("a")},
            "the reward is inf; rewards are float32",
        ),
        ("grouped", {"prompt": "a"}, "/verify", {"response": said_text("a")}, "judges all answers to a task together"),
    ],
)
def test_what_an_environment_does_not_do_is_named(
    urls: dict[str, str], name: str, task: Any, path: str, body: Any, why: str
) -> None:
    row = nemo_gym_row(task, ENVS[name])
    begun = post(urls[name] + "/seed_session", row)
    found = post(urls[name] + path, {**row, **body}, begun.cookie)
    assert found.status >= 400
    assert why in found.body["error"]["message"]


def test_liveness_and_numbers_are_by_get(urls: dict[str, str]) -> None:
    assert post(urls["letters"] + "/", None, method="GET").body == {"status": "ok"}
    assert post(urls["letters"] + "/health", None, method="GET").status == 200
    assert "/verify" in post(urls["letters"] + "/metrics", None, method="GET").body
    assert post(urls["letters"] + "/info", None, method="GET").body["lease"] == 3600.0


def test_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="NeMo Gym's agents send no token; leave it out"):
        nrl.serve(exact, token="a", protocol=nemo_gym_protocol)


@pytest.mark.parametrize(
    ("task", "f", "why"),
    [
        ({"answer": "4"}, exact, "the task has no 'prompt'"),
        ({"prompt": [1, 2]}, exact, "the prompt is list of something else than messages"),
    ],
)
def test_tasks_that_are_no_rows_are_named(task: Any, f: Any, why: str) -> None:
    with pytest.raises(EnvError, match=why):
        nemo_gym_row(task, f)


def test_a_row_has_the_tools_and_closes_its_episode() -> None:
    closed = list[Any]()
    env = tool_use([tool(put)], filled, state=lambda task: (), close=closed.append)
    row = nemo_gym_row({**SHOP, "limits": (1, 2)}, env)
    assert closed == [()]
    (offered,) = row["responses_create_params"]["tools"]
    assert (offered["type"], offered["name"], offered["description"]) == (
        "function",
        "put",
        "Put an item into the basket.",
    )
    assert list(offered["parameters"]["properties"]) == ["item"]
    assert json.loads(json.dumps(row)) == row  # a tuple, too, which the server makes of it again
