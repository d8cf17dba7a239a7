"""Sampling from servers with an OpenAI-compatible endpoint: one made here, in the documented formats."""

import base64
import json
import math
import pickle
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import nrl
from nrl import tiny
from nrl.backends import Sampling, adamw, fsdp, hf, openai
from nrl.backends.hf.noise import keep_most_probable
from nrl.backends.models.loading import build, load_config
from nrl.backends.openai import EndpointSampler, client
from nrl.data import tasks
from nrl.envs import Environment, Step, Task, exact, single_turn
from nrl.errors import ClusterError, GenerationError, LostRequest, ModelError
from nrl.runtime.threads import run_in_loop
from tests.backends.sampling import test_samplers as contract
from tests.backends.sampling.test_samplers import PROMPTS, Made, ids, model
from tests.processes import settled

type Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]  # status, JSON or text, headers
type Responder = Callable[[str, Mapping[str, Any] | None, Mapping[str, str]], Answer]

# The sampler behind the server warns once, when it is first asked so, whichever test that is
pytestmark = pytest.mark.filterwarnings("ignore:.*truncated distribution")

LAWS = [
    contract.test_a_row_is_a_function_of_its_seed,
    contract.test_a_completion_ends_with_a_stop_token_or_is_truncated,
    contract.test_what_cannot_be_served_is_refused,
    contract.test_logprobs_are_renormalised_over_what_is_kept,
    contract.test_a_row_is_there_when_it_is_finished,
    contract.test_a_row_that_is_cancelled_is_forgotten,
    contract.test_a_request_that_is_refused_leaves_the_others_alone,
]


@contextmanager
def serving(respond: Responder) -> Iterator[str]:
    """The address of a server that answers so."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, body: Any) -> None:
            status, said, *more = respond(self.path, body, dict(self.headers))
            if status == 0:  # hang up
                self.close_connection = True
                return
            content = (said if isinstance(said, str) else json.dumps(said)).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(more[0] if more else {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    class Quiet(ThreadingHTTPServer):
        daemon_threads, request_queue_size = True, 512

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Clients may leave."""

    with Quiet(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class Served:
    """A vLLM-like server of a tiny model: tokens by the in-process sampler, log-probabilities by plain torch."""

    def __init__(self, sampler: Any, logprobs_of: str = "processed") -> None:
        self.sampler, self.of, self.asked = sampler, logprobs_of, list[Mapping[str, Any]]()
        self.module: Any = build(model()).eval()
        self.lock = threading.Lock()

    def __call__(self, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> Answer:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "tiny", "max_model_len": 512, "object": "model"}]}
        assert path == "/v1/completions"
        assert body is not None
        assert 0 <= body["temperature"] <= 2
        time.sleep(body["max_tokens"] / 1000)  # long ones take long
        with self.lock:
            self.asked.append(body)
            return 200, {"object": "text_completion", "model": "tiny", "choices": [self.choice(body)]}

    def choice(self, body: Mapping[str, Any]) -> dict[str, Any]:
        sampling = Sampling(
            body["temperature"],
            max(body["top_k"], 0),
            body["top_p"],
            body["max_tokens"],
            tuple(body["stop_token_ids"]),
            tuple(body["stop"]),
        )
        (row,) = self.sampler.generate([body["prompt"]], seeds=[body["seed"]], sampling=sampling).result()
        tokens = row.token_ids.tolist()
        table = self.table([*body["prompt"], *tokens], sampling)[len(body["prompt"]) - 1 : -1]
        found = [float(table[place, token]) for place, token in enumerate(tokens)]
        tops = [
            {f"token_id:{token}": found[place], f"token_id:{int(table[place].argmax())}": float(table[place].max())}
            for place, token in enumerate(tokens)
        ]
        return {
            "index": 0,
            "text": "not looked at",
            "finish_reason": "length" if row.truncated else "stop",
            "stop_reason": None if row.truncated or tokens[-1] == 2 else tokens[-1],
            "token_ids": tokens,
            "prompt_token_ids": body["prompt"],
            "logprobs": {
                "tokens": [f"token_id:{token}" for token in tokens],
                "token_logprobs": found,
                "top_logprobs": tops if body["logprobs"] else None,
            },
        }

    @torch.no_grad()
    def table(self, tokens: list[int], sampling: Sampling) -> torch.Tensor:
        logits: torch.Tensor = self.module(torch.tensor([tokens])).logits[0].float()
        if self.of == "logits":
            return logits
        if self.of == "raw" or not sampling.temperature:
            return logits.log_softmax(-1)
        logprobs = (logits / sampling.temperature).log_softmax(-1)
        return logprobs if self.of == "tempered" else keep_most_probable(logprobs, sampling.top_k, sampling.top_p)


@pytest.fixture(scope="module")
def local() -> Iterator[Any]:
    """An in-process sampler of the model that is served, and slots for its trainer."""
    with nrl.cluster("local") as cluster:
        yield hf.sampler(cluster.reserve(1), model(), Sampling(max_new_tokens=12)), cluster.reserve(1)


@contextmanager
def sampling_from(respond: Responder, sampling: Sampling | None = None, **options: Any) -> Iterator[EndpointSampler]:
    with serving(respond) as url:
        yield openai.sampler(url, model(), sampling or Sampling(max_new_tokens=12), **options)


def changed(served: Served, change: Callable[[dict[str, Any]], object]) -> Responder:
    """The same server, whose completions are changed before they are sent."""

    def respond(path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> Answer:
        answer = served(path, body, headers)
        if body is not None:
            change(answer[1]["choices"][0])
        return answer

    return respond


@pytest.fixture(scope="module")
def it(local: Any) -> Iterator[Made]:
    with sampling_from(Served(local[0])) as sampler:
        yield Made(sampler, None, None, True)  # type: ignore[arg-type]  # what is asked of a server needs no mesh


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_contract(law: Callable[[Made], None], it: Made) -> None:
    law(it)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_completions_are_those_of_the_sampler_behind_the_server(it: Made, local: Any, temperature: float) -> None:
    sampling = Sampling(temperature, max_new_tokens=8)
    rows = it.sampler.generate(PROMPTS, seeds=[5, 2**63 - 1, 7, 8], sampling=sampling).result()
    expected = local[0].generate(PROMPTS, seeds=[5, 2**63 - 1, 7, 8], sampling=sampling).result()
    assert ids(rows) == ids(expected)
    assert [(row.truncated, row.version) for row in rows] == [(row.truncated, 0) for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert (row.token_ids.dtype, row.logprobs.dtype) == (torch.int64, torch.float32)
        torch.testing.assert_close(row.logprobs, other.logprobs, atol=1e-4, rtol=0)


def test_a_completion_ends_with_a_text(it: Made, local: Any) -> None:
    (free,) = it.sampler.generate([[5, 6]], sampling=Sampling(max_new_tokens=8)).result()
    stop = (it.sampler.tokenizer.decode(free.token_ids[2:4]),)
    (row,) = it.sampler.generate([[5, 6]], sampling=Sampling(max_new_tokens=8, stop=stop)).result()
    assert ids([row])[0] == ids([free])[0][: len(row.token_ids)]
    assert len(row.token_ids) < len(free.token_ids)
    assert stop[0] in it.sampler.tokenizer.decode(row.token_ids)
    assert not row.truncated


def test_nothing_is_left_to_the_servers_own_defaults(local: Any) -> None:
    served = Served(local[0])
    with sampling_from(served) as sampler:
        sampling = Sampling(0.5, max_new_tokens=3, stop_token_ids=(9,))
        sampler.generate([[5, 6], [5] * 510], seeds=[-1, 4], sampling=sampling).result()
    first, second = sorted(served.asked[-2:], key=lambda body: len(body["prompt"]))
    assert first == {
        "model": "tiny",
        "prompt": [5, 6],
        "max_tokens": 3,
        "temperature": 0.5,
        "top_k": -1,
        "top_p": 1.0,
        "seed": 2**63 - 1,
        "stop_token_ids": [2, 9],
        "stop": [],
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    assert (second["max_tokens"], second["seed"]) == (2, 4)


def test_a_rollout_from_a_server(it: Made) -> None:
    env = single_turn(exact)
    batch = nrl.rollout(it.sampler, env, [{"prompt": "1+1=", "answer": "2"}], n=4)
    assert batch["version"].tolist() == [0] * 4
    stream = nrl.rollouts(it.sampler, env, tasks("arithmetic"), n=2)
    assert stream.remote
    assert len(nrl.ahead(nrl.batched(stream, 2), 1).take(1)[0]) == 4


def test_many_requests_are_under_way_at_once_and_a_future_comes_first(local: Any) -> None:
    served, room, first = Served(local[0]), threading.Barrier(8), threading.Event()

    def respond(path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> Answer:
        if body is not None and len(served.asked) >= 5:  # after the probe
            assert first.wait(60)
            room.wait(60)  # until as many are here
        return served(path, body, headers)

    with sampling_from(respond, in_flight=8) as sampler:
        future = sampler.generate([[5, token] for token in range(4, 20)])
        first.set()
        assert len(future.result(60)) == 16


def test_a_row_takes_its_next_turn_while_others_decode(local: Any) -> None:
    """The first turn of one is answered when the second of the other has been asked."""
    served, second = Served(local[0]), threading.Event()

    def respond(path: str, body: Any, headers: Mapping[str, str]) -> Answer:
        if body is not None and body["prompt"][-2:] == [8, 9]:
            second.set()
        if body is not None and body["prompt"] == [6, 6]:
            assert second.wait(60)
        return served(path, body, headers)

    env = Environment(
        lambda task: (task["prompt"] == [6, 6], task["prompt"]),
        lambda last, text: Step(True, 1.0, done=last, observation=[8, 9]),
    )
    with sampling_from(respond, Sampling(max_new_tokens=2)) as sampler:
        assert sampler.capabilities.streams
        batch = nrl.rollout(sampler, env, [{"prompt": [6, 6]}, {"prompt": [7, 7]}])
    assert batch["rewards"].tolist() == [1.0, 2.0]
    assert torch.equal(batch["versions"], torch.where(batch["loss_mask"], 0, -1))


def test_a_row_that_the_server_fails_is_lost(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few tries, which are counted; the others are as good as ever."""
    monkeypatch.setattr(client, "_WAIT", 0.01)
    served, tries = Served(local[0]), Counter[str]()

    def respond(path: str, body: Any, headers: Mapping[str, str]) -> Answer:
        tries[which := str(body and body["prompt"])] += 1
        if which == "[6, 6]" or (which == "[7, 7]" and tries[which] < 3):
            return 503, "overloaded"
        return served(path, body, headers)

    def rolled_out() -> Any:
        tasks: list[Task] = [{"prompt": [token, token]} for token in (5, 6, 7)]
        return nrl.rollout(sampler, Environment(lambda task: (0, task["prompt"]), step), tasks)

    def step(state: int, text: str) -> Step:
        return Step(state, 1.0, done=True)

    lost = r"1 of 3 episodes failed.*LostRequest: .*/v1/completions could not be .* 6 times .status 503: overloaded."
    with sampling_from(respond, in_flight=3) as sampler:
        with pytest.warns(UserWarning, match=lost):
            batch = rolled_out()
        (row,) = sampler.stream([[6, 6]], [0])
        with pytest.raises(LostRequest, match="6 times") as it:
            row.result(60)
    assert isinstance(it.value.__cause__, ClusterError)
    assert (tries["[6, 6]"], tries["[7, 7]"]) == (12, 3)
    assert batch["valid"].tolist() == [True, False, True]
    assert batch["asked_again"].tolist() == [0, 0, 2]


@contextmanager
def several(local: Any, *responders: Responder, **options: Any) -> Iterator[EndpointSampler]:
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(each)) for each in responders]
        yield openai.sampler(urls, model(), Sampling(max_new_tokens=2), **options)


def turns_asked(served: Served) -> dict[int, int]:
    """How many turns of each episode a server was asked for, by the episode's first token."""
    return Counter(body["prompt"][0] for body in served.asked if body["prompt"][1] == 9)


def three_turns() -> Environment:
    """Episodes of three turns, whose prompts begin with a token of their own."""
    return Environment(
        lambda task: (0, task["prompt"]), lambda at, text: Step(at + 1, 1.0, done=at == 2, observation=[9] * 64)
    )


def test_several_servers_share_episodes(local: Any) -> None:
    one, two = Served(local[0]), Served(local[0])
    tasks: list[Task] = [{"prompt": [token] + [9] * 63} for token in range(10, 18)]
    with several(local, one, two) as sampler:
        batch = nrl.rollout(sampler, three_turns(), tasks)
    assert batch["rewards"].tolist() == [3.0] * 8
    asked = [turns_asked(each) for each in (one, two)]
    assert sum(asked[0].values()) + sum(asked[1].values()) == 24
    assert min(sum(each.values()) for each in asked) >= 8


def test_an_episode_goes_on_where_its_beginning_was_read(local: Any) -> None:
    """Whichever of the servers that was, if none of them is busy."""
    one, two = Served(local[0]), Served(local[0])
    with several(local, one, two) as sampler:
        for token in range(10, 16):
            prompt = [token] + [9] * 63
            (first,) = sampler.generate([prompt]).result(60)
            before = [len(each.asked) for each in (one, two)]
            asked = [each.asked[-1]["prompt"] == prompt for each in (one, two)]
            assert sum(asked) == 1
            sampler.generate([[*prompt, *first.token_ids.tolist(), *[9] * 16]]).result(60)
            more = [len(each.asked) - count for each, count in zip((one, two), before, strict=True)]
            assert more == [int(each) for each in asked]


def test_where_one_of_several_servers_fails_the_others_are_asked(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_WAIT", 0.01)
    one, two, broken = Served(local[0]), Served(local[0]), list[str]()

    def fails(path: str, body: Any, headers: Mapping[str, str]) -> Answer:
        if body is not None and len(one.asked) >= 8:  # five of the probe, and three more
            broken.append(path)
            return 503, "overloaded"
        return one(path, body, headers)

    tasks: list[Task] = [{"prompt": [token] + [9] * 63} for token in range(10, 18)]
    with several(local, fails, two) as sampler:
        batch = nrl.rollout(sampler, three_turns(), tasks)
        assert batch["valid"].all()
        assert int(batch["asked_again"].sum()) >= 1
        tried = len(broken)
        assert nrl.rollout(sampler, three_turns(), tasks)["asked_again"].sum() == 0  # it is left alone for a while
        assert len(broken) == tried


def test_where_all_servers_fail_the_row_is_lost(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_WAIT", 0.01)
    served, tries = Served(local[0]), Counter[str]()

    def fails(at: str) -> Responder:
        def respond(path: str, body: Any, headers: Mapping[str, str]) -> Answer:
            if body is not None and body["prompt"] == [6, 6]:
                tries[at] += 1
                return 503, "overloaded"
            return served(path, body, headers)

        return respond

    with several(local, fails("one"), fails("two")) as sampler:
        (row,) = sampler.stream([[6, 6]], [0])
        with pytest.raises(LostRequest, match="overloaded"):
            row.result(60)
        assert len(sampler.generate([[7, 7]]).result(60)) == 1
    assert tries == {"one": 6, "two": 6}


def test_several_servers_have_to_serve_the_same(local: Any) -> None:
    served, raw = Served(local[0]), Served(local[0], "raw")

    def named(path: str, body: Any, headers: Mapping[str, str]) -> Answer:
        return (200, {"data": [{"id": "other"}]}) if body is None else served(path, body, headers)

    with pytest.raises(GenerationError, match=r"serves 'tiny', .* serves 'other'; give servers of one model"):
        several(local, served, named).__enter__()
    with pytest.raises(GenerationError, match="log-probabilities of different distributions; start all servers"):
        several(local, served, raw).__enter__()
    with pytest.raises(ValueError, match="url is empty; give the address of a server, or several"):
        openai.sampler([], model())


def test_calls_that_are_cancelled_leave_the_server_alone(local: Any) -> None:
    """What has not been asked is not asked, and nothing is said; all calls together have so many under way."""
    served, slow = Served(local[0]), threading.Event()

    def respond(path: str, body: Any, headers: Mapping[str, str]) -> Answer:
        answer = served(path, body, headers)
        if body is not None and body["max_tokens"] == 9:
            slow.wait(60)
        return answer

    with sampling_from(respond, in_flight=2) as sampler:
        before = len(served.asked)
        calls: list[Any] = [sampler.generate([[5, 6]] * 4, sampling=Sampling(max_new_tokens=9)) for _ in range(2)]
        settled(lambda: len(served.asked) < before + 2, 60)
        assert all(call.cancel() for call in calls)
        slow.set()
        time.sleep(0.3)
        assert len(served.asked) <= before + 2
        assert sampler.generate([[5, 6]], sampling=Sampling(max_new_tokens=2)).result()


def test_the_model_that_is_served(local: Any) -> None:
    served = Served(local[0])

    def listing(*models: Any) -> Responder:
        return lambda path, body, headers: (200, {"data": models}) if body is None else served(path, body, headers)

    with serving(listing({"id": "a"}, {"id": "b", "max_model_len": 100})) as url:
        for name in (None, "c"):
            with pytest.raises(GenerationError, match=rf"serves the models 'a', 'b', and name is {name!r}; give one"):
                openai.sampler(url, model(), name=name)
        assert openai.sampler(f"{url}/v1/", model(), name="a").context_length == 512  # the config's
        found = openai.sampler(url, model(), name="b")
    assert (found.endpoint.name, found.context_length, found.version, found.capabilities.remote) == ("b", 100, 0, True)
    assert served.asked[-1]["model"] == "b"


def test_the_key_is_sent_and_shown_nowhere(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served, keys = Served(local[0]), set()

    def respond(path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> Answer:
        keys.add(headers.get("Authorization"))
        return served(path, body, headers) if len(keys) < 3 else (401, {"error": "wrong key"})

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving(respond) as url:
        openai.sampler(url, model())
        monkeypatch.setenv("OPENAI_API_KEY", "theirs")
        assert "theirs" not in repr(openai.sampler(url, model()))
        with pytest.raises(
            GenerationError, match="refuses with status 401: .*wrong key.*; give the server's key"
        ) as it:
            openai.sampler(url, model(), api_key="mine")
    assert keys == {None, "Bearer theirs", "Bearer mine"}
    assert "mine" not in str(it.value)
    assert str(pickle.loads(pickle.dumps(it.value))) == str(it.value)


def test_the_key_of_the_environment_is_for_those_to_whom_nobody_listens(
    local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name of this machine that is not loopback: what it is asked, anybody on the way could read."""
    served, keys = Served(local[0]), list[str | None]()

    def respond(path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> Answer:
        keys.append(headers.get("Authorization"))
        return served("/v1/" + path.split("/v1/")[1], body, headers)  # a proxy is given whole addresses

    monkeypatch.setenv("OPENAI_API_KEY", "of the environment")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # nobody is there: this machine is asked without it
    with serving(respond) as url:
        openai.sampler(url, model())
        assert set(keys) == {"Bearer of the environment"}
        keys.clear()
        elsewhere = url.replace("127.0.0.1", "gpu7.example")
        monkeypatch.setenv("HTTP_PROXY", url)  # so that it gets what is for gpu7.example
        with pytest.warns(UserWarning, match=r"OPENAI_API_KEY is not sent to gpu7.example, .* https .*api_key=\.\.\."):
            openai.sampler(elsewhere, model())
        assert set(keys) == {None}
        keys.clear()
        openai.sampler(elsewhere, model(), api_key="given")
        assert set(keys) == {"Bearer given"}


@pytest.mark.parametrize(
    ("url", "private"),
    [
        ("https://api.example.org/v1", True),
        ("http://localhost:8000", True),
        ("http://me:pw@localhost", True),
        ("http://127.8.0.1", True),
        ("http://[::1]:8000/v1", True),
        ("http://gpu7:8000", False),
        ("http://10.0.0.1", False),
        ("http://0.0.0.0:8000", False),
        ("http://localhost.example.org", False),
        ("http://localhost@example.org", False),
        ("http://127.0.0.1.example.org", False),
    ],
)
def test_what_is_private(url: str, private: bool) -> None:
    assert client.is_private(url) is private


def test_nothing_is_sent_on_to_where_a_server_redirects() -> None:
    asked = list[str]()

    def elsewhere(path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> Answer:
        asked.append(path)
        return 200, {"data": [{"id": "tiny"}]}

    with serving(elsewhere) as other:
        redirect = serving(lambda path, *_: (307, "", {"Location": other + path}))
        with redirect as url, pytest.raises(GenerationError, match="refuses with status 307.*; give the address that"):
            openai.sampler(url, model(), api_key="mine")
    assert asked == []


def test_a_password_in_the_address_is_sent_and_said_nowhere(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_WAIT", 0.001)
    served, logins, broken = Served(local[0]), set(), list[int]()

    def respond(path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> Answer:
        logins.add(headers.get("Authorization"))
        return (broken[0], "no") if broken else served(path, body, headers)

    with serving(respond) as plain:
        url = plain.replace("://", "://me:hunter%402@")
        sampler = openai.sampler(url, model())
        said = [repr(sampler)]
        broken.append(400)
        for call in (
            lambda: openai.sampler(url, model()),
            sampler.generate([[5]]).result,
            lambda: sampler.receive([], 1),
        ):
            with pytest.raises(GenerationError) as it:
                call()
            said.append(str(it.value))
    with pytest.raises(ClusterError) as gone:
        run_in_loop(attrs.evolve(sampler.endpoint.server, url=url).ask("/models")).result()
    with pytest.raises(ValueError, match="the url is 'localhost'") as wrong:
        openai.sampler("me:hunter@2@localhost", model())
    assert logins == {"Basic " + base64.b64encode(b"me:hunter@2").decode()}
    assert plain in said[0]
    assert not [text for text in (*said, str(gone.value), str(wrong.value)) if "hunter" in text]


def test_older_vllm_names_tokens_by_their_ids(local: Any) -> None:
    with sampling_from(changed(Served(local[0]), lambda choice: choice.pop("token_ids"))) as sampler:
        found = sampler.generate([[5, 6]], seeds=[3]).result()
    assert ids(found) == ids(local[0].generate([[5, 6]], seeds=[3]).result())


def text_alone(choice: dict[str, Any]) -> None:
    del choice["token_ids"]
    choice["logprobs"]["tokens"] = ["a"] * len(choice["logprobs"]["tokens"])


def with_token(token: object, choice: dict[str, Any]) -> None:
    choice["token_ids"] = [token, *choice["token_ids"][1:]]


def with_logprob(logprob: object, choice: dict[str, Any]) -> None:
    choice["logprobs"]["token_logprobs"][0] = logprob


def without_its_stop_token(choice: dict[str, Any]) -> None:
    if choice["stop_reason"]:
        del choice["token_ids"][-1], choice["logprobs"]["token_logprobs"][-1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (text_alone, "gives no token ids. Text is never encoded again.* It says: {'object': 'text_completion'"),
        (lambda choice: choice.update(logprobs=None), "does not give the log-probability of each token"),
        (lambda choice: choice["logprobs"]["token_logprobs"].pop(), "does not give the log-probability of each token"),
        (lambda choice: choice.update(finish_reason="abort"), "ended a completion with 'abort'; see the server's"),
        (lambda choice: choice["prompt_token_ids"].insert(0, 1), "completed another prompt than it was sent"),
        (lambda choice: choice.update(token_ids={"0": 5}), "gives no completion"),
        (lambda choice: choice["token_ids"].extend(range(20)), r"gives \d+ token ids, where at most \d+ of 0 to 99"),
        (
            lambda choice: choice.update(logprobs={"tokens": ["token_id:" + "9" * 5000]}, token_ids=None),
            "gives the token id 9999",
        ),
        *(
            (
                partial(with_token, token),
                rf"gives the token id {re.escape(str(token)[:20])}.*, where at most \d+ of 0 to 99",
            )
            for token in (-1, 100, 2**70, 5.0, 5.5, True, None, "5", [5], float("nan"))
        ),
        *(
            (partial(with_logprob, logprob), "gives something else for log-probabilities")
            for logprob in (math.nan, math.inf, -math.inf, 0.5, 2**70, -1e300, True, "-1", [-1.0])
        ),
    ],
)
def test_answers_that_cannot_be_used(local: Any, change: Callable[[dict[str, Any]], None], why: str) -> None:
    def changing(choice: dict[str, Any]) -> None:
        choice["prompt_token_ids"] = list(choice["prompt_token_ids"])
        change(choice)

    with (
        pytest.raises(GenerationError, match=rf"openai.sampler: http://\S+/v1/completions {why}"),
        sampling_from(changed(Served(local[0]), changing)),
    ):
        pass


def test_a_stop_token_that_is_left_out_is_missed(local: Any) -> None:
    with sampling_from(changed(Served(local[0]), without_its_stop_token)) as sampler:
        sampling = Sampling(max_new_tokens=20, stop_token_ids=tuple(range(4, 90)))
        with pytest.raises(GenerationError, match="leaves out the token .*, which was sampled and ended|each token"):
            sampler.generate([[5, 6]] * 4, sampling=sampling).result()


@pytest.mark.parametrize("said", ["<html>hello</html>", "[]", {"data": 3}, {"choices": []}])
def test_servers_of_something_else(said: Any) -> None:
    with serving(lambda *_: (200, said)) as url, pytest.raises(GenerationError, match="OpenAI-compatible server"):
        openai.sampler(url, model())
    models = {"data": [{"id": "tiny"}]}
    with (
        serving(lambda _, body, __: (200, said if body else models)) as url,
        pytest.raises(GenerationError, match="OpenAI-compatible server"),
    ):
        openai.sampler(url, model())


def test_raw_logprobs_serve_at_temperature_1_alone(local: Any) -> None:
    with sampling_from(Served(local[0], "raw")) as sampler:
        assert sampler.meaning == (False, False)
        for temperature in (0.0, 1.0):
            sampler.generate([[5]], sampling=Sampling(temperature, max_new_tokens=2)).result()
        sampler.generate([[5]], sampling=Sampling(0, top_k=3, top_p=0.5, max_new_tokens=2)).result()  # greedy
        sampler.generate([[5]], sampling=Sampling(top_k=10_000, max_new_tokens=2)).result()  # all of them
        for sampling in (Sampling(0.7), Sampling(top_k=3), Sampling(top_p=0.9)):
            with pytest.raises(GenerationError, match=r"before the temperature, top-k.*--logprobs-mode processed_log"):
                sampler.generate([[5]], sampling=sampling)
        with pytest.raises(GenerationError, match=r"temperature=0.7, top_k=0, top_p=1 tokens come from another one"):
            openai.sampler(sampler.endpoint.server.url, model(), Sampling(0.7))


def test_logprobs_before_top_k_serve_at_any_temperature(local: Any) -> None:
    """As those of SGLang."""
    with sampling_from(Served(local[0], "tempered")) as sampler:
        assert sampler.meaning == (True, False)
        sampler.generate([[5]], sampling=Sampling(0.7, max_new_tokens=2)).result()
        with pytest.raises(GenerationError, match=r"under the distribution before top-k and top-p. With temp"):
            sampler.generate([[5]], sampling=Sampling(0.7, top_k=3))


def test_logits_are_refused(local: Any) -> None:
    with (
        pytest.raises(GenerationError, match="gives something else for log-probabilities, such as logits"),
        sampling_from(Served(local[0], "logits")),
    ):
        pass


def test_seeds_that_are_not_honoured(local: Any) -> None:
    served, drawn = Served(local[0]), iter(range(100))
    seeded: Callable[[], int] = lambda: next(drawn)  # noqa: E731

    def respond(path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> Answer:
        return served(path, body and {**body, "seed": seeded()}, headers)

    with pytest.warns(UserWarning, match="does not honour seeds: one request gave two answers"), sampling_from(respond):
        pass
    seeded = lambda: 42  # noqa: E731
    with pytest.raises(GenerationError, match="draws the tokens .* whatever the seed"), sampling_from(respond):
        pass


@pytest.mark.parametrize(
    "failure", [(503, "loading"), (429, "slow down", {"Retry-After": "0"}), (500, "CUDA error"), (0, "")]
)
def test_a_server_that_fails_twice_is_asked_again(local: Any, monkeypatch: pytest.MonkeyPatch, failure: Answer) -> None:
    monkeypatch.setattr(client, "_WAIT", 0.01)
    served, failures = Served(local[0]), dict[str, int]()

    def respond(path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> Answer:
        which = json.dumps(body)
        failures[which] = failures.get(which, 0) + 1
        return failure if failures[which] < 3 else served(path, body, headers)

    with sampling_from(respond) as sampler:
        assert len(sampler.generate(PROMPTS).result()) == 4
    assert min(failures.values()) >= 3


def test_a_server_that_always_fails(local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_WAIT", 0.001)
    with (
        serving(lambda *_: (503, "loading")) as url,
        pytest.raises(ClusterError, match=rf"{url}/v1/models could not be .* 6 times \(status 503: loading\)"),
    ):
        openai.sampler(url, model())
    with pytest.raises(ClusterError, match=r"could not be reached, or could not answer, 6 times \(ConnectError: "):
        openai.sampler(url, model())  # it is gone


@pytest.mark.parametrize(("status", "advice"), [(404, "name of the model"), (400, "the server's own log")])
def test_refusals_are_not_repeated(local: Any, status: int, advice: str) -> None:
    served, refused = Served(local[0]), list[Any]()

    def respond(path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> Answer:
        if body is None or len(served.asked) < 5:
            return served(path, body, headers)
        refused.append(body)
        return status, {"error": {"message": "no such thing " * 100}}

    with sampling_from(respond) as sampler:
        future = sampler.generate([[5]])
        with pytest.raises(GenerationError, match=rf"/v1/completions refuses with status {status}: .*{advice}") as it:
            future.result()
    assert len(refused) == 1
    assert len(str(it.value)) < 600


@pytest.mark.parametrize(("in_flight", "lost"), [(3, 2), (1, 0)])
def test_a_server_that_never_answers(local: Any, in_flight: int, lost: int) -> None:
    """It is gone when it has failed as many in a row as may be under way at once."""
    served, end = Served(local[0]), threading.Event()

    def respond(path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]) -> Answer:
        if len(served.asked) >= 5:
            end.wait()
        return served(path, body, headers)

    with ExitStack() as stack:
        sampler = stack.enter_context(sampling_from(respond, timeout=2.0, in_flight=in_flight))
        stack.callback(end.set)
        errors = [row.exception(60) for row in sampler.stream([[5]] * in_flight, range(in_flight))]
        assert sorted(type(error).__name__ for error in errors) == ["DeadlineExceeded"] + ["LostRequest"] * lost
        for error in errors:
            assert "completions did not answer within 2 s (it has said nothing)" in str(error)


def test_weights_are_refused(it: Made, local: Any) -> None:
    trainer = fsdp.trainer(local[1], model(), adamw(lr=1e-3))
    state = trainer.init()
    with pytest.raises(GenerationError, match=r"receive: .*fixed policy.* Publish to a vllm.sampler or an hf.sampler"):
        nrl.publish(state.params, it.sampler)
    assert (it.sampler.version, state.version) == (0, 0)


def test_arguments_that_cannot_be_used() -> None:
    for options in ({"timeout": 0}, {"in_flight": 0}):
        with pytest.raises(ValueError, match="both have to be positive"):
            openai.sampler("http://localhost", model(), **options)  # type: ignore[arg-type]


def test_a_config_is_read_without_weights(tmp_path: Path) -> None:
    tiny.save(tiny.model(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for _ in range(2):
        config, generation = load_config(nrl.Model(str(tmp_path)))
        assert (config.vocab_size, generation.eos_token_id) == (100, 2)
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(ModelError, match="there is no such folder"):
        load_config(nrl.Model("./nowhere"))


def test_excerpts_and_waits() -> None:
    assert [client._seconds(each) for each in ("3", None, "Wed, 21 Oct 2026 07:28:00 GMT")] == [3.0, 0.0, 0.0]
    assert client._load_certificates() is client._load_certificates()
