"""NeMo Gym's own servers and agents, unmodified: the same rewards through nrl as through its own agents."""

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import nrl
from benchmarks._nemo_gym import free_port
from nrl import data, tiny
from nrl.algos import advantages, grpo_loss, sft_loss
from nrl.backends import fsdp, hf
from nrl.envs import Environment
from nrl.errors import EnvError
from nrl.gym.adapters.nemo.env import nemo_gym, nemo_gym_agent
from nrl.gym.adapters.nemo.metrics import aggregated, nemo_gym_metrics
from nrl.gym.adapters.nemo.processes import NemoServer, NemoServers, nemo_gym_servers
from nrl.gym.adapters.nemo.rows import nemo_gym_rows
from tests.gym.endpoint.driving import Says, turn

SERVERS = [
    *("arc_agi", "calendar", "example_multi_step", "example_session_state_mgmt", "example_single_tool_call"),
    *("format_verification", "gpqa_diamond", "graphwalks", "mcqa", "reasoning_gym", "ruler", "structured_outputs"),
    *("swe_pivot", "workplace_assistant", "blackjack"),
]
WEATHER = "example_mcp_weather"  # whose tools its own agents do not see
QUICK = ("example_session_state_mgmt", WEATHER, "blackjack")


class Nemo(NamedTuple):
    """NeMo Gym's servers that run.

    Args:
        urls: of resources servers and of agents, by name.
        rows: the folder of the resources servers, with example rows.
        model: the port at which its agents ask a model.
    """

    urls: dict[str, str]
    rows: Path
    model: int


def app_of(name: str) -> NemoServer:
    """The resources server; of blackjack, one with the same cards in each episode."""
    return NemoServer("adapters.fixed_blackjack" if name == "blackjack" else name)


def running(names: Sequence[str], model: int) -> NemoServers:
    """Resources servers, each with its agent, whose model is asked at a port."""
    asked = {name: app_of(name) for name in names}
    for name in names:
        refs = {
            "resources_server": {"type": "resources_servers", "name": name},
            "model_server": {"type": "responses_api_models", "name": "policy"},
        }
        kind = "gymnasium_agent" if name == "blackjack" else "simple_agent"
        asked[f"{name}_agent"] = NemoServer(kind, refs, "responses_api_agents")
    asked["policy"] = NemoServer("policy", kind="responses_api_models", port=model)
    return nemo_gym_servers(asked, env={"PYTHONPATH": str(Path(__file__).parents[1])})


@pytest.fixture(scope="module", params=[pytest.param("all", marks=pytest.mark.slow), "quick"])
def nemo(request: pytest.FixtureRequest) -> Iterator[Nemo]:
    model = free_port()
    with running([*SERVERS, WEATHER] if request.param == "all" else QUICK, model) as found:
        yield Nemo(found.urls, found.folders["example_session_state_mgmt"].parent, model)


def called(row: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """A call of the first tool that a row offers, with arguments of the right types."""
    some = {"integer": 1, "number": 1.0, "string": "Paris", "boolean": True, "array": [], "object": {}}
    for tool in row["responses_create_params"].get("tools") or ():
        known = tool["parameters"].get("properties", {})
        return [(tool["name"], {key: some.get(str(value.get("type")), "Paris") for key, value in known.items()})]
    return []


def scripts(name: str, row: dict[str, Any]) -> list[list[str]]:
    """What the model says in each turn: nothing useful, and what might be right."""
    answer = str(row.get("expected_answer") or row.get("answer") or (row.get("outputs") or ["A"])[0])
    if name == "blackjack":
        hit, stand = (turn("qwen3", f"<action>{each}</action>") for each in ("hit", "stand"))
        return [[*[hit] * hits, stand] for hits in range(4)]
    if name == "example_session_state_mgmt":
        counted = [turn("qwen3", "", ("increment_counter", {"count": each})) for each in (1, 2)]
        return [[turn("qwen3", "3")], [*counted, turn("qwen3", "", ("get_counter_value", {})), turn("qwen3", "6")]]
    if "ground_truth" in row:  # what has to be called
        calls = [(each["name"], json.loads(each["arguments"])) for each in row["ground_truth"]]
        return [[turn("qwen3", "I do not know.")], [turn("qwen3", "", *calls), turn("qwen3", "Done.")]]
    calls = called(row)
    first = [turn("qwen3", "", *calls)] if calls else []
    said = f"{answer} \\boxed{{{answer}}} <answer>{answer}</answer>\nFinal Answer: {answer.replace(chr(34), '')}"
    return [[turn("qwen3", "I do not know.")], [*first, turn("qwen3", said)]]


def asked(row: dict[str, Any]) -> str:
    """What a row asks last."""
    given = row["responses_create_params"]["input"]
    return given if isinstance(given, str) else str(given[-1]["content"])


def stored(folder: Path) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Example rows with the turns of a model that was better than this one, where they lie beside them."""
    rows = {asked(row): row for row in nemo_gym_rows(folder / "data" / "example.jsonl")}
    for line in (folder / "data" / "example_rollouts.jsonl").read_text().splitlines():
        given = json.loads(line)
        texts, calls = list[str](), list[tuple[str, dict[str, Any]]]()
        for item in [*given["response"]["output"], {"type": "end"}]:
            if item["type"] == "function_call":
                calls.append((item["name"], json.loads(item["arguments"])))
                continue
            texts += [turn("qwen3", "", *calls)] if calls else []
            calls = []
            if item["type"] == "message" and item.get("role") == "assistant":
                texts.append(turn("qwen3", "".join(part["text"] for part in item["content"])))
        if texts and asked(given) in rows:
            yield rows[asked(given)], texts


def reward(env: Environment, row: dict[str, Any], texts: list[str]) -> float:
    policy = Says("qwen3", texts, context_length=10**6)
    batch = nrl.rollout(policy, env, [row])
    assert batch["valid"].all()
    return float(batch["rewards"][0])


def test_rewards_are_those_of_its_own_agents(nemo: Nemo) -> None:
    seen = dict[str, set[float]]()
    for name in nemo.urls.keys() & set(SERVERS):
        own = nemo_gym(nemo.urls[name])
        theirs = nemo_gym_agent(nemo.urls[f"{name}_agent"], port=nemo.model)
        tried = [] if name == "blackjack" else list(stored(nemo.rows / name))[:5]
        for row in nemo_gym_rows(nemo.rows / name / "data" / "example.jsonl")[:3]:
            tried += [(row, texts) for texts in scripts(name, row)]
        for row, texts in tried:
            here, there = reward(own, row, texts), reward(theirs, row, texts)
            assert here == there, (name, texts)
            seen.setdefault(name, set()).add(here)
    print({name: sorted(rewards) for name, rewards in seen.items()})
    several = [name for name, rewards in seen.items() if len(rewards) > 1]  # what is right, and what is wrong
    assert "example_session_state_mgmt" in several
    assert len(several) >= (13 if len(seen) == len(SERVERS) else 1)


TOKYO = turn("qwen3", "The weather in Tokyo is sunny and 72 F.")


def weather_in_tokyo(city: str, last: str) -> list[str]:
    return [turn("qwen3", "", ("get_weather", {"city": city})), last]


def test_tools_that_a_server_offers_over_mcp_are_the_models(nemo: Nemo, tmp_path: Path) -> None:
    """They are offered, called in the episode's own session, and what came of them is judged there."""
    noted, row = tmp_path / "answers.jsonl", nemo_gym_rows(nemo.rows / WEATHER / "data" / "example.jsonl")[1]
    assert row["verifier_metadata"] == {"expected_city": "Tokyo"}
    env = nemo_gym(nemo.urls[WEATHER], answers=str(noted))
    seen = []
    for texts in (weather_in_tokyo("Tokyo", TOKYO), weather_in_tokyo("Rome", TOKYO), [TOKYO]):
        policy = Says("qwen3", texts, context_length=10**6)
        batch = nrl.rollout(policy, env, [row])
        seen.append([float(batch[key][0]) for key in ("rewards", "env/tool_call_seen")])
        shown = policy.tokenizer.decode(policy.asked[-1])
        assert '"description": "Get a deterministic weather report for a city."' in shown
        assert "session_id" not in shown
        assert ("The weather in Rome is sunny" in shown) == ("Rome" in texts[0])
    assert seen == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]

    found = nemo_gym_metrics(nemo.urls[WEATHER], noted)
    wanted = {"mean/reward": 1 / 3, "mean/tool_call_seen": 1 / 3, "mean/final_response_mentions_weather": 1.0}
    assert {key: found["key_metrics"][key] for key in wanted} == pytest.approx(wanted)
    (group,) = found["group_level_metrics"]
    assert [each["_ng_rollout_index"] for each in group["rollout_infos"]] == [0, 1, 2]
    ours = aggregated([json.loads(line) for line in noted.read_text().splitlines()])
    assert ours["agent_metrics"] == pytest.approx(found["agent_metrics"])
    assert ours["key_metrics"] == pytest.approx(found["key_metrics"])
    assert ours["group_level_metrics"] == [{key: pytest.approx(group[key]) for key in ours["group_level_metrics"][0]}]


def test_answers_of_a_game_are_noted_with_all_of_its_reward(nemo: Nemo, tmp_path: Path) -> None:
    noted, row = tmp_path / "answers.jsonl", nemo_gym_rows(nemo.rows / "blackjack" / "data" / "example.jsonl")[0]
    env = nemo_gym(nemo.urls["blackjack"], answers=str(noted))
    rewards = [reward(env, row, texts) for texts in scripts("blackjack", row)]
    assert len(set(rewards)) > 1
    assert [json.loads(line)["reward"] for line in noted.read_text().splitlines()] == rewards
    agent = nemo.urls["blackjack_agent"]  # which passes it on
    found = nemo_gym_metrics(agent, noted)["key_metrics"]["mean/reward"]
    assert found == pytest.approx(sum(rewards) / len(rewards))


@pytest.mark.slow
def test_a_server_of_the_package_is_started_with_its_requirements_and_brings_tasks() -> None:
    env = nemo_gym(server="reasoning_gym", turns=1)
    assert env.tasks is not None
    row = env.tasks(0, 0)
    right, wrong = (turn("qwen3", f"<answer>{each}</answer>") for each in (row["answer"], "what?"))
    assert reward(env, dict(row), [right]) == 1.0
    assert reward(env, dict(row), [wrong]) < 0.1


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "give either the url of a server that runs, or the name of a server"),
        ({"url": "http://127.0.0.1:1", "server": "mcqa"}, "give either the url"),
        ({"url": "http://127.0.0.1:1", "options": {"a": 1}}, "give either the url"),
    ],
)
def test_what_is_started_is_said_once(given: dict[str, Any], why: str) -> None:
    with pytest.raises(EnvError, match=why):
        nemo_gym(**given)


def test_servers_that_do_not_start_say_why(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"mcqa: ended with 1; the last words: (.|\n)*No module named"):
        nemo_gym_servers({"mcqa": NemoServer("mcqa")}, python=sys.executable)
    with pytest.raises(EnvError, match="nowhere: No such file"):
        nemo_gym_servers({"mcqa": NemoServer("mcqa")}, python="nowhere")
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\necho busy\nsleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(EnvError, match=r"mcqa: not ready in 0.5 s; the last words: busy"):
        nemo_gym_servers({"mcqa": NemoServer("mcqa")}, python=slow, timeout=0.5)
    with pytest.raises(EnvError, match=r"nemo-gym==0.4.0 cannot be installed: (.|\n)*nemo-gym"):
        nemo_gym_servers({"mcqa": NemoServer("mcqa")}, requirements=["nemo-gym==0.1"])


def test_answers_that_cannot_be_read_are_named(tmp_path: Path, broken: Any) -> None:
    url, answers = broken
    with pytest.raises(EnvError, match=r"nemo_gym_metrics: .*none.jsonl cannot be read: .*No such file"):
        nemo_gym_metrics(url, tmp_path / "none.jsonl")
    (tmp_path / "answers.jsonl").write_text('{"reward": 1}\n')
    answers["/aggregate_metrics"] = Broken(500, "oh")
    with pytest.raises(EnvError, match="/aggregate_metrics answers with 500: oh"):
        nemo_gym_metrics(url, tmp_path / "answers.jsonl")


def counting_rows(example: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows that want a counter at a number, and lessons that call the right tool with any number."""
    tools = [{"type": "function", "function": tool} for tool in example["responses_create_params"]["tools"]]
    known = [{"type": "function", "function": {k: each["function"][k] for k in FIELDS}} for each in tools]
    rows, lessons = [], list[dict[str, Any]]()
    for asks in ("add two", "two more"):
        asked = {**example["responses_create_params"], "input": asks}
        rows.append({"responses_create_params": asked, "initial_count": 0, "expected_count": 2})
        for count in range(1, 5):
            call = {"function": {"name": "increment_counter", "arguments": {"count": count}}}
            said = [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": '{"success":true}'},
                {"role": "assistant", "content": "done"},
            ]
            lessons.append({"prompt": [{"role": "user", "content": asks}], "response": said, "tools": known})
    return rows, lessons


FIELDS = ("name", "description", "parameters")


def playing_rows(example: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The game, whose cards are the same each time, and lessons that hit or stand."""
    seen = "Your hand: [2, 3] = 5\nDealer shows: 9\nRespond with <action>hit</action> or <action>stand</action>."
    prompt = [*example["responses_create_params"]["input"], {"role": "user", "content": seen}]
    return [example], [{"prompt": prompt, "response": f"<action>{each}</action>"} for each in ("hit", "stand")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "made", "turns"), [("example_session_state_mgmt", counting_rows, 2), ("blackjack", playing_rows, 1)]
)
def test_its_agents_train_a_model(of: str, made: Any, turns: int, tmp_path: Path) -> None:
    """Twenty steps, by which it is rewarded more; the agents are NeMo Gym's own, and no token is lost."""
    port = free_port()
    with running(QUICK, port) as found, nrl.cluster("local") as cluster:
        folder = found.folders["example_session_state_mgmt"].parent / of / "data"
        rows, lessons = made(nemo_gym_rows(folder / "example.jsonl")[0])
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        env = nemo_gym_agent(found.urls[f"{of}_agent"], port=port, tasks=str(tmp_path / "rows.jsonl"))
        words = tiny.bpe([tiny.CHATML, json.dumps(lessons), (folder / "example.jsonl").read_text()])
        model, slots = tiny.model(tokenizer=words, max_position_embeddings=2048), cluster.reserve(1)
        warm = fsdp.trainer(slots, model, nrl.adamw(lr=3e-3))
        state, step = warm.init(), warm.train_step(sft_loss)
        taught = nrl.batched(data.tasks(lessons), 16, collate=partial(data.supervised, tokenizer=words))
        for batch in taught.take(120):
            state, _ = step(state, batch)
        trainer = fsdp.trainer(slots, model, nrl.adamw(lr=2e-3))
        sampler = hf.sampler(slots, model, nrl.Sampling(max_new_tokens=48))
        policy, step = trainer.init(state.params), trainer.train_step(grpo_loss)
        nrl.publish(policy.params, sampler)
        assert env.tasks is not None
        stream, rewards = nrl.batched(nrl.rollouts(sampler, env, data.tasks(env.tasks), n=16), len(rows)), list[float]()
        for _ in range(20):
            (batch,) = stream.take(1)
            batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
            assert batch["valid"].all()
            assert batch["sampled"].sum() == batch["loss_mask"].sum()
            rewards.append(float(batch["rewards"].mean()))
            policy, _ = step(policy, batch)
            nrl.publish(policy.params, sampler)
        print(of, rewards, int(batch["turns"].max()) + 1)
        assert policy.step == 20
        assert int(batch["turns"].max()) + 1 >= turns
    assert sum(rewards[-4:]) / 4 > rewards[0] + 0.3


class Broken(NamedTuple):
    """What a server says that is none of NeMo Gym's."""

    status: int
    body: str


@pytest.fixture
def broken() -> Iterator[Any]:
    """A server that answers each path as it is told."""
    answers = dict[str, Broken]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path, Broken(200, '{"paths": {}}'))
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(found.status)
            self.send_header("content-length", str(len(found.body)))
            self.end_headers()
            self.wfile.write(found.body.encode())

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    server.server_close()


ROW = {"responses_create_params": {"input": "Hi"}}


@pytest.mark.parametrize(
    ("path", "answer", "row", "why"),
    [
        ("/seed_session", Broken(500, "oh"), ROW, "/seed_session answers with 500: oh"),
        ("/seed_session", Broken(200, "[]"), ROW, r"/seed_session answers with 200: \[\]"),
        ("/mcp", Broken(200, '{"error": {"code": 1}}'), ROW, '/mcp refuses tools/list: {"code": 1}'),
        ("/verify", Broken(200, '{"reward": null}'), ROW, 'gives no reward; it says {"reward": null}'),
        ("/none", Broken(200, "{}"), {"prompt": "Hi"}, "the task has no 'responses_create_params'"),
        ("/none", Broken(200, "{}"), {"responses_create_params": {"input": 3}}, "input: there is none"),
    ],
)
def test_what_a_server_or_a_row_lacks_is_named(broken: Any, path: str, answer: Broken, row: Any, why: str) -> None:
    url, answers = broken
    offered = '{"mcp": {"url_path": "mcp"}}' if path == "/mcp" else "{}"
    answers |= {"/seed_session": Broken(200, offered), "/verify": Broken(200, '{"reward": 1}'), path: answer}
    with pytest.warns(UserWarning, match=why):
        batch = nrl.rollout(Says("qwen3", [turn("qwen3", "Hi")]), nemo_gym(url), [row])
    assert batch["valid"].tolist() == [False]


def test_a_server_that_is_busy_is_asked_again_what_it_is(broken: Any) -> None:
    url, answers = broken
    answers |= {"/seed_session": Broken(200, "{}"), "/verify": Broken(200, '{"reward": 1}')}
    answers["/openapi.json"] = Broken(503, "busy")
    with pytest.warns(UserWarning, match="/openapi.json answers 503: busy"):
        nrl.rollout(Says("qwen3", []), nemo_gym(url), [ROW])
    del answers["/openapi.json"]
    assert reward(nemo_gym(url), ROW, [turn("qwen3", "Hi")]) == 1.0


def test_a_row_that_the_template_does_not_take_has_no_reward(broken: Any) -> None:
    url, answers = broken
    answers["/seed_session"] = Broken(200, "{}")
    said = [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Say"}]
    with pytest.warns(UserWarning, match="what a row asks cannot be said to the model: .*roles"):
        batch = nrl.rollout(Says("mistral_v13", []), nemo_gym(url), [{"responses_create_params": {"input": said}}])
    assert batch["valid"].tolist() == [False]


def test_a_row_s_agent_is_asked(broken: Any) -> None:
    """Where several are there; this one asks no model."""
    url, answers = broken
    answers["/one/run"] = Broken(200, '{"reward": 1}')
    agents = {"one": f"{url}/one/", "two": "http://127.0.0.1:1"}
    env = nemo_gym_agent(agents, port=free_port())
    for named, why in (("one", "had not asked the model"), ("three", "names 'three', and url has 'one', 'two'; give")):
        with pytest.warns(UserWarning, match=why):
            nrl.rollout(Says("qwen3", []), env, [{**ROW, "agent_ref": {"name": named}}])


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.warns(UserWarning, match="/openapi.json does not answer: .*"):
        batch = nrl.rollout(Says("qwen3", []), nemo_gym(f"http://127.0.0.1:{free_port()}"), [ROW])
    assert batch["valid"].tolist() == [False]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no rows"),
        ("{", "line 1: Expecting property name"),
        ('{"responses_create_params": {"input": "Hi"}}\n{}', "line 2: nemo_gym: the task has no"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(EnvError, match=why):
        nemo_gym("http://127.0.0.1:1", tasks=str(tmp_path / "rows.jsonl"))


def test_tasks_come_in_another_order_each_epoch(tmp_path: Path) -> None:
    rows = [{"responses_create_params": {"input": str(at)}} for at in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks: Any = nemo_gym("http://127.0.0.1:1", tasks=str(tmp_path / "rows.jsonl")).tasks
    first, second = ([asked(dict(tasks(7, at))) for at in range(begin, begin + 8)] for begin in (0, 8))
    assert sorted(first) == sorted(second) == [str(at) for at in range(8)]
    assert first != second
    assert first == [asked(dict(tasks(7, at))) for at in range(8)]
