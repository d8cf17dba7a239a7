"""`driven`: an episode that an agent drives, which somebody else wrote, as an environment like any other."""

import asyncio
import hmac
import inspect
import os
import secrets
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import attrs
import uvloop

from nrl.envs.types import TIMEOUT, Environment, Step, Task, Turn, Verdict, Verifier, asynchronous, settled
from nrl.errors import ArgumentError, EnvError
from nrl.gym.endpoint.endpoint_app import application
from nrl.gym.endpoint.sessions import Session
from nrl.gym.http.front import allowed_hosts, is_loopback
from nrl.gym.http.serve_app import address
from nrl.gym.http.server_socket import Listener, listening
from nrl.runtime.threads import DaemonThreadPool

__all__ = ["Endpoint", "Start", "driven"]

_MODEL = "policy"
_CLOSING = 5.0  # seconds that an agent may take to end when it is cancelled
_REFUSALS = 8  # in a row, of requests that do not fit into the context
_THREADS = 1024  # of agents that are plain functions


@attrs.frozen
class Endpoint:
    """Where an agent finds the model, and as which episode it asks. Both the address and the key say that.

    Args:
        base_url: as OpenAI's clients take it.
        api_key: of this episode.
        model: the name of the model.

    >>> Endpoint("http://127.0.0.1:8000/s/4f/v1", "4f").environ["OPENAI_API_KEY"]
    '4f'
    """

    base_url: str
    api_key: str = attrs.field(repr=False)
    model: str = _MODEL

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables by which a program with one of OpenAI's clients finds the model."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key, "OPENAI_MODEL": self.model}


type Start = Callable[[Task, Endpoint], Verdict | Awaitable[Verdict | None] | None]
"""``(task, endpoint) -> verdict``, plain or ``async``: lets an agent work on a task, and waits until it has ended."""


def driven(
    start: Start,
    *,
    verifier: Verifier | None = None,
    timeout: float | Callable[[Task], float | None] | None = TIMEOUT,
    host: str = "127.0.0.1",
    port: int = 0,
    ids: bool = False,
    token: str | None = None,
    hosts: Sequence[str] = (),
) -> Environment:
    """The environment whose episodes are driven by an agent from outside.

    The agent is any program that asks a model over HTTP, with OpenAI's Chat Completions or Responses. It is started
    with an address of its own. Each of its requests is a turn of the policy: the messages are what the policy sees, and
    what it says is the answer. Messages that come back as they were are the same tokens as before; where an agent
    changes or leaves out something, the episode forks (`nrl.rollout`). Requests of one episode are answered one after
    the other. How tokens are drawn is the rollout's business, so ``temperature`` and the like are not looked at;
    ``stop`` and ``max_tokens`` end a turn. What an agent wishes besides, as a format of the answer, nothing meets;
    the metrics have ``env/unmet/...`` where there was such a wish.

    An agent whose request does not fit into the context is told so, as OpenAI's API does, and may ask something shorter
    or end; likewise where the chat template does not take its messages. If an episode ends before its agent does, the
    agent is cancelled, and what it asks is refused.

    Args:
        start: lets an agent work on a task, and returns its reward as a verifier does; None: that is the verifier's
            business. A coroutine is cancelled when its episode ends; a plain function runs in a thread, where it only
            finds that nobody answers any more. What it raises makes the row invalid.
        verifier: has the last word, of the whole `nrl.envs.Trace`.
        timeout: seconds in which the agent has to ask for the first time, from one answer to the next request, and from
            the last answer to its end; or a function from the task to these; None: no limit.
        host: where the endpoint listens, in the process where the environment is, and which agents are told; by
            default no other machine can reach it. Give the address of a network interface for agents on other machines.
        port: of the endpoint, for agents that are told one address before they start, and name their episode in
            ``metadata``, as ``nrl_session``; 0: any that is free.
        ids: whether all answers have ``prompt_token_ids``, ``generation_token_ids`` and ``generation_log_probs``, as
            those of NeMo Gym's model servers do; otherwise those to requests with vLLM's ``return_token_ids``.
        token: the API key that agents at one address have to give, before anything that they send is read; None: that
            of the environment variable ``NRL_ENDPOINT_TOKEN``, and if there is none, none. Agents with an address of
            their own have a key of their own.
        hosts: further names by which agents may ask, such as that of a proxy.

    Returns:
        An environment, ``async``, like any other: it may be `nrl.pooled`, on a mesh, or served.

    Raises:
        ArgumentError: ``host`` is an address at which nobody can be found; or other machines reach its ``port``, and
            there is no token.

    >>> import nrl
    >>> from nrl import tiny
    >>> from nrl.backends import hf
    >>> import json, urllib.request
    >>> def agent(task, endpoint):
    ...     body = json.dumps({"messages": [{"role": "user", "content": task["prompt"]}]}).encode()
    ...     asked = urllib.request.Request(endpoint.base_url + "/chat/completions", body)
    ...     with urllib.request.urlopen(asked) as answer:
    ...         said = json.load(answer)["choices"][0]["message"]["content"]
    ...     return float("4" in said)
    >>> with nrl.cluster("local") as cluster:
    ...     model = tiny.model(tokenizer=tiny.bpe(["user assistant 2+2= 4"]))
    ...     sampler = hf.sampler(cluster.reserve(1), model, nrl.Sampling(max_new_tokens=3))
    ...     batch = nrl.rollout(sampler, driven(agent), [{"prompt": "2+2="}], n=4)
    >>> batch["valid"].tolist(), batch["loss_mask"].any(1).tolist()
    ([True, True, True, True], [True, True, True, True])
    """
    if host in ("", "0.0.0.0", "::"):
        raise ArgumentError(
            f"driven: host is {host!r}, at which no agent finds the endpoint; give the address of a network interface"
        )
    token = token or os.environ.get("NRL_ENDPOINT_TOKEN")
    if port and token is None and not is_loopback(host):
        raise ArgumentError(
            f"driven: every machine that reaches {host} could fill port {port} with requests; set NRL_ENDPOINT_TOKEN, "
            "or token=, and give it to the agents as their API key"
        )
    place = _Place(host, port, token, tuple(hosts))

    async def reset(task: Task) -> Any:
        state = _running(place).begin(start, task, ids)
        try:
            first = await state.on_loop(state.session.next())
            if isinstance(first, asyncio.Future):
                said = first.result()
                raise EnvError(
                    f"driven: the agent ended, with {said!r:.200}, and had not asked the model; let it ask "
                    "endpoint.base_url"
                )
        except BaseException:
            await state.end()
            raise
        return state, first

    async def step(state: _Driven, turn: Turn) -> Step:
        return await state.on_loop(state.step(turn))

    async def close(state: _Driven) -> None:
        await state.end()

    return Environment(reset, step, close, verifier, timeout)


class _Driven:
    """An episode: its session, and its agent."""

    def __init__(self, running: "_Running", session: Session, agent: "_Agent") -> None:
        self.session, self._agent, self._running, self._refused = session, agent, running, 0

    async def on_loop[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the endpoint's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._running.loop))

    async def step(self, turn: Turn) -> Step:
        """Answer the agent, and wait for what it does next."""
        refused = turn.stop_reason == "refused" or (turn.stop_reason == "length" and not turn.token_ids)
        self._refused = self._refused + 1 if refused else 0
        if self._refused > _REFUSALS:
            raise EnvError(
                f"driven: the agent asked {self._refused} times in a row for "
                + (
                    f"what cannot be answered ({turn.text}); let it end when it reads that"
                    if turn.stop_reason == "refused"
                    else "more than fits into the context; let it shorten its messages, or end, when it reads "
                    "context_length_exceeded"
                )
            )
        unmet = {f"unmet/{name}": 1.0 for name in self.session.unmet}
        found = self.session.take(turn)
        if found is None:
            found = await self.session.next()
        if not isinstance(found, asyncio.Future):
            return Step(self, done=False, observation=found, info=unmet)
        verdict = found.result()
        return Step(self, 0.0 if verdict is None else verdict, info=unmet)

    async def end(self) -> None:
        """Refuse what the agent asks from now on, and cancel it, if it has not ended."""
        self._running.sessions.pop(self.session.name, None)
        self._running.loop.call_soon_threadsafe(self.session.close, "this episode is over; nobody answers any more")
        if self._agent.cancel():
            ended = asyncio.wrap_future(self._agent.outcome)
            ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody asks for it
            await asyncio.wait([ended], timeout=_CLOSING)


class _Agent:
    """An agent that works: a coroutine on a loop, or a plain function in a thread, which nothing can cancel."""

    def __init__(self, start: Start, task: Task, endpoint: Endpoint, running: "_Running") -> None:
        self._loop, self._coroutine = running.agents, asynchronous(start)
        self._work: asyncio.Task[Any] | None = None
        if self._coroutine:
            self.outcome: Future[Any] = Future()
            coming: Any = start(task, endpoint)
            self._loop.call_soon_threadsafe(self._begin, coming)
        else:
            self.outcome = running.threads.submit(_called, start, task, endpoint)

    def _begin(self, coming: Coroutine[Any, Any, Any]) -> None:
        if not self.outcome.set_running_or_notify_cancel():
            coming.close()
            return
        self._work = self._loop.create_task(coming)
        self._work.add_done_callback(self._ended)

    def _ended(self, work: "asyncio.Task[Any]") -> None:
        if work.cancelled():
            self.outcome.set_exception(EnvError("driven: the agent was cancelled"))
        elif error := work.exception():
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(work.result())

    def cancel(self) -> bool:
        """Cancel it; whether it will end soon."""
        if self.outcome.done() or self.outcome.cancel():
            return False
        self._loop.call_soon_threadsafe(lambda: self._work and self._work.cancel())
        return self._coroutine


def _called(start: Start, task: Task, endpoint: Endpoint) -> Any:
    """Call a plain function, and await what it gives, if it has to be."""
    found: Any = start(task, endpoint)
    return asyncio.run(settled(found)) if inspect.isawaitable(found) else found


class _Place(NamedTuple):
    """Where an endpoint listens, and whom it hears: what `driven` is given."""

    host: str
    port: int
    token: str | None
    hosts: tuple[str, ...]


class _Running:
    """The endpoint of this process at one place: a thread that answers HTTP, and one for agents that are coroutines."""

    def __init__(self, place: _Place) -> None:
        self.sessions: dict[str, Session] = {}
        self._place = place
        self._on = listening(place.host, place.port, "driven")
        self._url = address(place.host, self._on.getsockname()[1])
        self.loop, self.agents = uvloop.new_event_loop(), asyncio.new_event_loop()
        self.threads = DaemonThreadPool(_THREADS, "agent")
        for name, run in (("endpoint", self._serve), ("agents", self.agents.run_forever)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def _serve(self) -> None:
        place = self._place
        hosts = allowed_hosts(place.host, place.hosts, secured=True)  # by the key of an episode, or the token
        app = application(self.sessions.get, _MODEL, by_metadata=self._shares_address)
        listener = Listener(app, 1.0, hosts)
        self.loop.run_until_complete(listener.answer(self._on, lambda: None))

    def _shares_address(self, key: str) -> bool:
        """Whether who has this key may name its episode in a request, as agents do that are told one address."""
        token = self._place.token
        return self._place.port > 0 and (token is None or hmac.compare_digest(key.encode(), token.encode()))

    def begin(self, start: Start, task: Task, ids: bool) -> _Driven:
        """Start an agent."""
        name = secrets.token_hex(16)
        session = self.sessions[name] = Session(name, ids)
        agent = _Agent(start, task, Endpoint(f"{self._url}/s/{name}/v1", name), self)
        agent.outcome.add_done_callback(lambda found: self.loop.call_soon_threadsafe(self._ended, session, found))
        return _Driven(self, session, agent)

    def _ended(self, session: Session, found: "Future[Any]") -> None:
        outcome = self.loop.create_future()
        if found.cancelled() or (error := found.exception()) is None:
            outcome.set_result(None if found.cancelled() else found.result())
        else:
            outcome.set_exception(error)
            outcome.exception()  # so that nobody has to look at it
        session.ended(outcome)


_RUNNING: dict[tuple[int, _Place], _Running] = {}
_GUARD = threading.Lock()


def _running(place: _Place) -> _Running:
    """The endpoint of this process, which a fork does not inherit."""
    key = os.getpid(), place
    with _GUARD:
        if key not in _RUNNING:
            _RUNNING[key] = _Running(place)
        return _RUNNING[key]
