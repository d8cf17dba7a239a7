"""An environment as a resources server of NeMo Gym, for the agents that it has: a protocol of `nrl.serve`."""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import attrs
import msgspec
from msgspec.json import Decoder

from nrl.envs.return_values import score_of
from nrl.envs.types import TRAINED, is_env, judges_group
from nrl.errors import ArgumentError, EnvError
from nrl.gym.adapters.nemo.metrics import aggregated
from nrl.gym.adapters.nemo.rows import ROW
from nrl.gym.endpoint import responses
from nrl.gym.endpoint.fields import Unusable
from nrl.gym.http import protocol
from nrl.gym.http.application import CONTAINERS, FINE, Bodies, routed, routes
from nrl.gym.http.front import Application, Headers, Receive, Send
from nrl.gym.http.idempotency import Refused, failed
from nrl.gym.http.json_codec import value_of
from nrl.gym.http.json_limits import check_json
from nrl.gym.http.prometheus import Numbers
from nrl.gym.http.service import Service

__all__ = ["nemo_gym_protocol"]

_COOKIE = "nrl_gym_session"
_SILENCE = 3600.0  # seconds; its agents ask for nothing while a model thinks
_RECENT = 20_000  # verdicts that are remembered, for a request that is repeated
_OF_NEMO = (ROW, "response", "agent_ref")  # fields of a row that are no part of the task

_begun, _stepped, _said = Decoder(protocol.Begun), Decoder(protocol.Stepped), Decoder(protocol.Said)


def nemo_gym_protocol(service: Service, *, token: str | None, largest: int) -> Application:
    """A protocol of `nrl.serve`: what a resources server of NeMo Gym answers to its agents.

    For its ``simple_agent``: ``POST /seed_session`` begins an episode, whose name is a cookie; ``POST /TOOL`` is a turn
    with one call; ``POST /verify`` is the last turn, and then the verifier; the rewards of all of these are added. For
    its ``gymnasium_agent``: ``POST /reset``, and ``POST /step`` for each turn as it is, the verifier with the last.
    ``POST /aggregate_metrics`` describes the numbers of all answers. What is asked by GET is as in nrl's own protocol.

    The task is the row without ``responses_create_params`` and ``agent_ref``. Where an environment or a verifier fails,
    the answer is no reward but a status other than 200, and the agent's run fails.

    Args:
        service: what it serves.
        token: None; NeMo Gym's agents send none.
        largest: bytes that a request may have.

    Raises:
        ValueError: there is a token.

    Source: NeMo Gym 0.4.0, ``nemo_gym/base_resources_server.py``, ``resources_servers/gymnasium/base.py``.

    >>> import nrl
    >>> from nrl.envs import exact
    >>> with nrl.serve(exact, protocol=nemo_gym_protocol) as server:
    ...     server.url.startswith("http://127.0.0.1:")
    True
    """
    if token is not None:
        raise ArgumentError(
            "serve: NeMo Gym's agents send no token; leave it out, with auth='none' where the network is one you trust"
        )
    service.lease = max(service.lease, _SILENCE)
    numbers, bodies, episodes = Numbers(service), Bodies(largest), _Episodes(service)
    shown = {path: route for path, route in routes(service, numbers).items() if route.method == "GET"}
    others = routed(service.name, shown, token=None, largest=largest, note=numbers.note)

    async def answered(scope: Any, receive: Receive, given: str) -> tuple[bytes, str | None]:
        held = 0
        try:
            body, held = await bodies.read(receive, scope.get("nrl.headers") or Headers(scope["headers"]))
            try:
                check_json(body, containers=CONTAINERS)
                asked = msgspec.json.decode(body)
            except (ValueError, RecursionError) as error:
                raise Refused(400, "invalid", f"{scope['path']:.80}: {error}") from None
            return await episodes.answer(scope["path"], asked, given)
        except Unusable as error:
            raise Refused(400, "invalid", f"{scope['path']:.80}: {error}") from None
        finally:
            bodies.held -= held

    async def serve(scope: Any, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            if scope["path"] != "/":
                return await others(scope, receive, send)
            return await _send(send, 200, FINE, None)
        close = False
        began, status, given = time.perf_counter(), 200, _session(dict(scope["headers"]).get(b"cookie", b""))
        session: str | None = (
            given or None
        )  # told with a refusal, too: agents keep the cookies of the last answer alone
        try:
            body, session = await answered(scope, receive, given)
        except Refused as error:
            status, body, close = error.status, error.body, error.unread
        numbers.note(scope["path"] if scope["path"] in _PATHS else "", status, time.perf_counter() - began)
        return await _send(send, status, body, session, close=close)

    return serve


@attrs.define(eq=False)
class _Episode:
    """An episode that an agent leads.

    Args:
        name: of its session.
        task: the row, without what is NeMo Gym's.
        prompt: that the environment gave.
        turns: that the environment was given.
        calls: of them, of tools.
        over: whether the environment said so.
        verdicts: on its turns.
        one: at a time.
    """

    name: str
    task: dict[str, Any]
    prompt: Any
    has_tools: bool = False
    turns: int = 0
    calls: int = 0
    over: bool = False
    verdicts: list[protocol.Judged] = attrs.field(factory=list)
    one: asyncio.Lock = attrs.field(factory=asyncio.Lock)
    said: list[protocol.Action] = attrs.field(factory=list)  # where each turn is given as it is
    seen: list[Any] = attrs.field(factory=list)
    told: tuple[list[protocol.Action], list[Any]] | None = None  # what is judged, once the last turn has been taken


class _Episodes:
    """The episodes of a service, by the name of their session."""

    def __init__(self, service: Service) -> None:
        self.service, self.plays = service, is_env(service.f)
        self._open: dict[str, _Episode] = {}
        self._judged: OrderedDict[str, dict[str, Any]] = OrderedDict()

    async def answer(self, path: str, asked: Any, session: str) -> tuple[bytes, str | None]:
        """The body of an answer, and the session that it is in."""
        if not isinstance(asked, dict):
            raise Refused(400, "invalid", f"{path:.80}: it is {type(asked).__name__}; send an object")
        if path == "/aggregate_metrics":
            return msgspec.json.encode(aggregated(asked.get("verify_responses"))), None
        if path in ("/seed_session", "/reset") and session in self._open:  # as where a model calls a tool of this name
            raise Refused(409, "consumed", f"{path}: this session has an episode; end it first")
        if path == "/seed_session":
            return b"{}", (await self.begin(asked)).name
        if path == "/reset":
            return await self.reset(asked)
        if path == "/verify" and session in self._judged:
            return msgspec.json.encode(asked | self._judged[session]), session
        episode = self._open.get(session)
        if episode is None:
            begin = "/reset" if path == "/step" else "/seed_session"
            raise Refused(404, "unknown", f"{path:.80}: there is no such episode; send the cookie of {begin}")
        async with episode.one:
            if path == "/verify" and session in self._judged:  # meanwhile
                return msgspec.json.encode(asked | self._judged[session]), session
            if path == "/verify":
                return await self.verify(episode, asked), session
            if path == "/step":
                return await self.step(episode, asked), session
            return await self.call(episode, path[1:], asked), session

    async def begin(self, row: Mapping[str, Any]) -> _Episode:
        """An episode of a row."""
        asked = row.get(ROW)
        if not isinstance(asked, Mapping):
            raise Refused(400, "invalid", f"the row has no '{ROW}'; send rows of NeMo Gym's data")
        self._forget()
        task, name = _task_of(row), uuid4().hex
        if self.plays:
            begun = protocol.read(await self.service.reset(protocol.Reset(name, task)), _begun)
            episode = _Episode(name, task, begun.prompt, bool(begun.tools))
        else:
            given = asked.get("input") or []
            said = [{"role": "user", "content": given}] if isinstance(given, str) else responses.messages_of(given)
            episode = _Episode(name, task, task.get("prompt", said))
        self._open[name] = episode
        return episode

    def _forget(self) -> None:
        """Forget episodes whose agents are gone: the service has closed them, or there are too many."""
        if len(self._open) > 2 * self.service.sessions + self.service.most:
            for name in list(self._open)[: -self.service.most]:
                if not self.service.has(name):
                    del self._open[name]

    async def call(self, episode: _Episode, tool: str, arguments: dict[str, Any]) -> bytes:
        """A turn with one call; its result, as the model reads it."""
        if not episode.has_tools:
            raise Refused(404, "unknown", f"there is no tool {tool:.80}")
        if episode.over:
            raise Refused(409, "consumed", "the episode is over: no tool can be called any more")
        episode.calls += 1
        seen = await self._take(episode, protocol.Action(calls=[protocol.Called(tool, arguments)]))
        return _text(seen).encode()

    async def verify(self, episode: _Episode, asked: dict[str, Any]) -> bytes:
        """The last turn, the verdict, and the end. If the verdict fails, it may be asked for again."""
        if _task_of(asked) != episode.task:  # as where a model calls a tool of this name
            raise Refused(400, "invalid", "/verify: the row is not the one that the episode was begun with")
        if episode.told is None:
            turns, seen, left = _said_in(asked)
            if self.plays and left and not episode.over:
                final = await self._take(episode, msgspec.structs.replace(turns[-1], calls=[]))
                seen += [] if final is None else [final]
            elif episode.over:  # what the model wrote after it does not count
                made = 0
                for at, turn in enumerate(turns, 1):
                    made += len(turn.calls)
                    if made >= episode.calls:
                        turns, seen = turns[:at], seen[:at]
                        break
            episode.told = turns, seen
        found = await self._judge(episode, *episode.told)
        return msgspec.json.encode(asked | found)

    async def reset(self, row: dict[str, Any]) -> tuple[bytes, str]:
        """An episode in which each turn is given as it is."""
        if not self.plays:
            raise Refused(404, "unknown", f"reset: {self.service.name} is a verifier: it has no episodes")
        episode = await self.begin(row)
        has = row[ROW].get("input")
        return msgspec.json.encode({"observation": None if has else _text(episode.prompt), "info": {}}), episode.name

    async def step(self, episode: _Episode, asked: dict[str, Any]) -> bytes:
        """A turn as it is; after the last, the verdict."""
        turns, _, _ = _said_in(asked)
        if len(turns) != 1:
            raise Refused(400, "invalid", f"/step: the response has {len(turns)} turns; send one")
        if episode.over:
            raise Refused(409, "consumed", "/step: the episode is over; reset another")
        before = len(episode.verdicts)
        seen = await self._take(episode, turns[0])
        episode.said.append(turns[0])
        episode.seen += [] if seen is None else [seen]
        if episode.over:
            found = await self._judge(episode, episode.said, episode.seen, before)
            info = {key: value for key, value in found.items() if key != "reward"}
            told = {"observation": _text(seen) or None, "reward": found["reward"], "terminated": True, "info": info}
            return msgspec.json.encode({**told, "truncated": False})
        reward, _ = _sum(episode.verdicts[before:])
        ids = [item["call_id"] for item in asked["response"]["output"] if item.get("type") == "function_call"]
        messages = seen if isinstance(seen, list) and all(isinstance(each, Mapping) for each in seen) else []
        results = [each for each in messages if each.get("role") == "tool"]
        outputs = [{"call_id": own, "output": str(each["content"])} for own, each in zip(ids, results, strict=False)]
        rest = [each for each in messages if each not in results[: len(outputs)]] if messages else seen
        told = {"observation": _text(rest) or None, "reward": reward, "terminated": False, "truncated": False}
        return msgspec.json.encode({**told, "info": {"tool_outputs": outputs}})

    async def _take(self, episode: _Episode, action: protocol.Action) -> Any:
        """Give the environment a turn; what it answers."""
        asked = protocol.Step(episode.name, episode.turns, action)
        taken = protocol.read(await self.service.step(asked), _stepped)
        episode.turns += 1
        episode.verdicts.append(taken.verdict)
        episode.over = taken.done
        return taken.observation

    async def _judge(
        self, episode: _Episode, turns: list[protocol.Action], seen: list[Any], first: int = 0
    ) -> dict[str, Any]:
        """The reward and its components, from the verdicts since the first that is meant; the episode ends."""
        verdicts, verifier = episode.verdicts, self.service.verifier
        if verifier is not None:
            if judges_group(verifier, episode.task):
                raise failed(f"{self.service.name} judges all answers to a task together, which NeMo Gym does not")
            cut = bool(turns) and turns[-1].stop_reason == "length"
            trace = protocol.Transcript(episode.prompt, list(turns), seen, truncated=cut)
            said = protocol.read(await self.service.verify(protocol.Verify(episode.task, trace), 0), _said)
            assert said.verdict is not None
            verdicts = [*verdicts, said.verdict]
        reward, components = _sum(verdicts[first:])
        found = {**components, "reward": reward}
        if self.plays:
            await self.service.close(protocol.Closing(episode.name))
        del self._open[episode.name]
        self._judged[episode.name] = found
        while len(self._judged) > _RECENT:
            self._judged.popitem(last=False)
        return found


def _task_of(row: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value_of({k: row[k] for k in row if k not in _OF_NEMO and not k.startswith("_ng_")})
    return found


_PATHS = ("/seed_session", "/verify", "/aggregate_metrics", "/reset", "/step")


def _said_in(asked: Mapping[str, Any]) -> tuple[list[protocol.Action], list[Any], bool]:
    """The turns of a response, what was answered to each, and whether the last of them was answered nothing."""
    response = asked.get("response")
    if not isinstance(response, Mapping) or not isinstance(response.get("output"), list):
        raise Refused(400, "invalid", "there is no 'response' with an 'output'; send what the model answered")
    turns, seen, names, last = list[protocol.Action](), list[Any](), dict[str, str](), ""
    for message in responses.messages_of(response["output"]):
        if message["role"] == "assistant":
            names |= {each["id"]: each["name"] for each in message.get("tool_calls", ())}
            turns.append(_turn(message))
        else:
            known = {"name": names.get(message.pop("tool_call_id", ""), "")} if message["role"] == "tool" else {}
            if last in ("", "assistant"):
                seen.append([])
            seen[-1].append({"role": message["role"], **known, "content": message["content"]})
        last = message["role"]
    if turns and response.get("incomplete_details"):
        ended = None if turns[-1].text or not turns[-1].reasoning else False  # cut before the answer began
        turns[-1] = msgspec.structs.replace(turns[-1], stop_reason="length", reasoning_ended=ended)
    return turns, seen, last == "assistant"


def _turn(message: Mapping[str, Any]) -> protocol.Action:
    read, unread = list[protocol.Called](), list[protocol.Unread]()
    for each in message.get("tool_calls", ()):
        if isinstance(each["arguments"], dict):
            read.append(protocol.Called(each["name"], each["arguments"]))
        else:
            unread.append(protocol.Unread(str(each["arguments"]), "its arguments are no JSON object"))
    return protocol.Action(message["content"], calls=read, malformed=unread, reasoning=message.get("reasoning") or None)


def _sum(verdicts: Sequence[protocol.Judged]) -> tuple[float, dict[str, float]]:
    """The reward of several verdicts, and its components by name."""
    reward, components = 0.0, dict[str, float]()
    for each in verdicts:
        try:
            score = score_of(protocol.verdict_of(each))
        except EnvError as error:
            raise failed(str(error)) from None
        if score.status not in TRAINED:
            raise failed(f"the verdict's status is '{score.status}', which is no reward")
        reward += sum(score.reward) if isinstance(score.reward, tuple) else score.reward
        for name, value in score.components.items():
            components[name] = components.get(name, 0.0) + value
    if not math.isfinite(reward):
        raise failed(f"the reward is {reward}; give a finite number")
    return reward, components


def _text(seen: Any) -> str:
    """What an environment says, as text."""
    if isinstance(seen, list | tuple) and all(isinstance(each, Mapping) for each in seen):
        return "\n".join(str(each.get("content", "")) for each in seen)
    if seen is None or isinstance(seen, str):
        return seen or ""
    raise failed("the environment answers with token ids or a request of its own, which NeMo Gym's agents cannot send")


def _session(cookies: bytes) -> str:
    for each in cookies.split(b";"):
        name, _, value = each.strip().partition(b"=")
        if name == _COOKIE.encode():
            return value.strip(b'"').decode("latin-1")
    return ""


async def _send(send: Send, status: int, body: bytes, session: str | None, *, close: bool = False) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(b"connection", b"close")] if close else []
    if session is not None:  # each time: its agents keep the cookies of the last answer alone
        headers.append((b"set-cookie", f"{_COOKIE}={session}; Path=/; HttpOnly".encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
