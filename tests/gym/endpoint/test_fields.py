"""What the fields of requests may be, and what is looked at before anything of a body is read."""

import asyncio
import json
import tracemalloc
from typing import Any

import pytest

import nrl
from nrl.errors import ArgumentError
from nrl.gym.endpoint import chat_completions, responses
from nrl.gym.endpoint.chat_request import arguments_of
from nrl.gym.endpoint.endpoint_app import application
from nrl.gym.endpoint.fields import Unusable
from nrl.gym.endpoint.sessions import KeptConversations, Session
from nrl.gym.http.front import guarded

SAY: Any = {"role": "user", "content": "Say"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", value) for value in (0, -1, 129, 1.5, True, "2", float("nan"))),
        *(("temperature", value) for value in (1e-300, -0.1, 101, float("nan"), float("inf"), True, "hot")),
        *(("top_p", value) for value in (0, 1e-300, 1.1, float("nan"))),
        *(("max_tokens", value) for value in (0, -1, 1.5, 10**30)),
        *(("seed", value) for value in (2**63, -(2**63) - 1, 1.5, 10**300)),
        *(("stop", value) for value in ("x" * 1001, ["x"] * 17, [1], 5, {"a": 1}, "x" * 3_000_000)),
        *(("logit_bias", value) for value in (5, {"5": 101}, {"5": None}, {str(each): 1 for each in range(2000)})),
        *(("top_logprobs", value) for value in (21, -1, 1.5)),
        *(("logprobs", value) for value in (5, "yes")),
        *(("frequency_penalty", value) for value in (2.1, "much")),
        *(("tools", value) for value in (5, [{"type": "function", "name": "f"}] * 1025)),
        *(("model", value) for value in (5, "m" * 257)),
        *(("messages", value) for value in ([SAY] * 10_001, [], 5)),
        ("stream", 1),
        ("metadata", 5),
    ],
)
def test_a_field_out_of_its_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(Unusable) as refused:
        chat_completions.read({"messages": [SAY], field: value})
    assert (refused.value.status, refused.value.param) == (400, field)
    assert field in str(refused.value)
    assert len(str(refused.value)) < 300
    if field not in ("n", "logprobs", "messages", "max_tokens"):  # which Responses has not, or by other names
        with pytest.raises(Unusable) as refused:
            responses.read({"input": "Say", field: value})
        assert refused.value.param == field


def test_what_is_within_the_range_is_read() -> None:
    within = {"n": 128, "temperature": 1e-3, "top_p": 1e-6, "seed": -(2**63), "stop": ["x" * 1000] * 16, "top_k": -1}
    found = chat_completions.read({"messages": [SAY] * 10_000, **within})
    assert (found.n, found.sampling["temperature"], found.sampling["top_k"]) == (128, 1e-3, 0)
    assert chat_completions.read({"messages": [SAY], "n": None, "stop": None, "stream": None}).n == 1


def test_arguments_that_would_fill_the_memory_stay_a_text() -> None:
    for text in ("[" * 100_000, '{"a":[' + "{}," * 60_000 + "1]}"):
        assert arguments_of(text) is text


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x" * 20_000},
        {"role": "assistant", "content": "", "reasoning": "x" * 20_000},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "name": "f", "arguments": "x" * 20_000}]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "name": "f", "arguments": {"x" * 20_000: 1}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "name": "f", "arguments": {"a": [1] * 200}}]},
    ],
)
def test_kept_conversations_are_bounded_by_all_that_they_say(message: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl.gym.endpoint.sessions._KEPT_TEXT", 50_000)
    kept = KeptConversations()
    for number in range(5):
        kept.add(str(number), [message])
    assert [number for number in range(5) if kept.get(str(number))] == [3, 4]


def test_kept_conversations_are_bounded_by_their_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nrl.gym.endpoint.sessions._KEPT_TEXT", 50_000)
    kept = KeptConversations()
    for number in range(5):
        kept.add(str(number), [{"role": "user", "content": ""}] * 40)
    assert [number for number in range(5) if kept.get(str(number))] == [3, 4]


def test_messages_are_counted_with_the_earlier_ones() -> None:
    assert len(responses.read({"input": [SAY] * 10}, [SAY] * 9_990).messages) == 10_000
    with pytest.raises(Unusable, match="the request has 10001 messages; send at most 10000") as refused:
        responses.read({"input": [SAY] * 11}, [SAY] * 9_990)
    assert (refused.value.status, refused.value.param) == (400, "input")


def called(path: str, body: Any = None, method: str = "POST", **headers: str) -> tuple[int, dict[bytes, bytes], Any]:
    """The status, the headers and the answer of an endpoint with the session "s"; a body of None must not be read."""
    sent, session = list[Any](), Session("s", ids=False)

    async def receive() -> Any:
        assert body is not None
        return {"type": "http.request", "body": body if isinstance(body, bytes) else json.dumps(body).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    app = application(lambda name: session if name == "s" else None, "policy", by_metadata=lambda key: key == "shared")
    shown = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": path, "method": method, "headers": shown}
    asyncio.run(guarded(app, {"localhost"})(scope, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"]), json.loads(sent[1]["body"])


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/chat/completions", {}, 401),
        ("/v1/chat/completions", {"authorization": "Bearer wrong"}, 401),
        ("/s/wrong/v1/chat/completions", {"content_length": "60000000"}, 401),
        ("/v1/nothing", {}, 404),
        ("/s/s/v1/models", {}, 405),
        ("/s/s/v1/responses", {"host": "evil.example"}, 403),
        ("/s/s/v1/responses", {"host": "localhost", "origin": "http://evil.example"}, 403),
        ("/s/s/v1/responses", {"content_encoding": "gzip"}, 415),
        ("/s/s/v1/responses", {"content_length": "60000000"}, 413),
    ],
)
def test_what_is_refused_before_the_body_is_read(path: str, headers: dict[str, str], status: int) -> None:
    found, shown, reply = called(path, **headers)
    assert found == status
    assert reply["error"]["message"]
    assert reply["error"]["type"] == "invalid_request_error"
    assert (b"allow" in shown) == (status == 405)
    assert (b"www-authenticate" in shown) == (status == 401)


def test_a_shared_address_is_asked_with_its_token_alone() -> None:
    named = {"messages": [SAY], "model": "other", "metadata": {"nrl_session": "s"}}
    assert called("/v1/chat/completions", named, authorization="Bearer shared")[0] == 404  # the model
    named["metadata"] = {"nrl_session": "unknown"}
    assert called("/v1/chat/completions", named, authorization="Bearer shared")[0] == 401


@pytest.mark.parametrize("body", [b"[" * 100_000, b"[" + b"{}," * 60_000 + b"{}]", b'{"messages": NaN}', b"\xff", b""])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    status, _, reply = called("/s/s/v1/chat/completions", body)
    assert status == 400
    assert reply["error"]["param"] in (None, "messages")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_of_a_request_that_waits_only_what_is_answered_is_in_memory(path: str) -> None:
    """The rest of its body, such as what it stands for elsewhere, is as large as a client likes."""
    held = list[int]()

    class Waiting(Session):
        async def ask(self, asked: Any, left: Any) -> Any:
            held.append(tracemalloc.get_traced_memory()[0])
            raise Unusable("no answer")

    body: Any = {"messages": [SAY], "input": "Say", "metadata": {str(each): "x" * 100 for each in range(20_000)}}
    sent = json.dumps(body).encode()
    app = application(lambda name: Waiting("s", ids=False), "policy")

    async def main() -> None:
        parts = [sent]

        async def receive() -> Any:
            return {"type": "http.request", "body": parts.pop()}

        async def send(message: Any) -> None:
            pass

        scope = {"type": "http", "path": path, "method": "POST", "headers": []}
        await app(scope, receive, send)

    tracemalloc.start()
    try:
        asyncio.run(main())
    finally:
        tracemalloc.stop()
    assert len(held) == 1
    assert held[0] < 1_000_000


def test_an_unknown_model_is_told_as_openai_does() -> None:
    status, _, reply = called("/s/s/v1/chat/completions", {"messages": [SAY], "model": "gpt-9"})
    assert (status, reply["error"]["code"], reply["error"]["param"]) == (404, "model_not_found", "model")


def test_a_port_that_other_machines_reach_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NRL_ENDPOINT_TOKEN", raising=False)
    with pytest.raises(ArgumentError, match="NRL_ENDPOINT_TOKEN"):
        nrl.driven(lambda task, endpoint: 1.0, host="10.0.0.1", port=9000)
    monkeypatch.setenv("NRL_ENDPOINT_TOKEN", "a key")
    assert nrl.driven(lambda task, endpoint: 1.0, host="10.0.0.1", port=9000)
