"""`remote`: the verifier or the environment that a server has."""

import asyncio
import contextlib
import functools
import math
import os
import uuid
import weakref
from collections.abc import Sequence
from concurrent import futures
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec.json import Decoder

from nrl.arguments import checked
from nrl.envs.types import Environment, Step, Task, Trace, Turn, Verifier
from nrl.errors import ArgumentError, DataError, EnvError
from nrl.gym.http import protocol
from nrl.gym.http.client import Asked, Places
from nrl.gym.http.json_codec import sendable, value_of
from nrl.gym.http.serve_app import Server
from nrl.log.slow_wait import wait_until

__all__ = ["RemoteState", "remote"]

_SILENCE = 3.0  # seconds after which a program is told what it waits for
_CLOSING = 5.0  # seconds in which the end of an episode is told

_encode = msgspec.json.Encoder().encode
_begun, _stepped, _said = Decoder(protocol.Begun), Decoder(protocol.Stepped), Decoder(protocol.Said)
_task, _grouped, _extracted = Decoder(protocol.TaskFound), Decoder(protocol.Grouped), Decoder(protocol.Extracted)
_checked = Decoder(protocol.Checked)


class RemoteState(NamedTuple):
    """The state of an episode that a server has, by name.

    Args:
        url: of the server.
        session: the episode's name.
        turn: how many turns came before, from 0.

    >>> RemoteState("http://127.0.0.1:8000", "a4", 0).turn
    0
    """

    url: str
    session: str
    turn: int


@checked("remote")
def remote(
    server: str | Server | Sequence[str | Server],
    *,
    token: str | None = None,
    patience: float = 60.0,
    connections: int = 1024,
) -> Any:
    """The verifier or the environment that a server has, as if it were here.

    What is sent is what JSON has, and tuples, bytes, infinities; arrays arrive as lists. An exception arrives as the
    same type if it is one of Python's or nrl's, otherwise as an `EnvError` with its text.

    A call that is not answered, because a connection broke or a server has too much to do, is repeated with growing
    pauses; the server makes it once. Its episodes are renewed for as long as this process lives. If a server dies, its
    episodes fail, and so do their rows; others go on, new ones begin elsewhere, and it is used again once it is back.

    What is served is asked at once. So that programs may start in any order, this waits for ``patience`` seconds until
    a server is there, and after three it says for what.

    Args:
        server: its address, such as ``"http://10.0.0.5:8000"``, or what `nrl.serve` returned; or several of the same
            kind: an episode begins where there is least to do, and stays there.
        token: that each server asks for; None: that which a `nrl.serve` returned with it, or for an address alone that
            of the environment variable ``NRL_GYM_TOKEN``; empty: none. It is shown to these addresses only.
        patience: seconds for which a server is asked that does not answer at all, this call included. One that is
            there, and says that it has too much to do, is asked for ten times as long.
        connections: calls that may be under way at a time.

    Returns:
        A verifier or an `Environment`, ``async``, with the timeout None, since the server has it.

    Raises:
        EnvError: no server answers, or what answers is none, or speaks another protocol.
        ForeignState: (when called) the server does not know the episode, for example because it was started again.

    >>> import nrl
    >>> from nrl.envs import Turn, exact, single_turn
    >>> async def play(env):
    ...     state, prompt = await env.reset({"prompt": "2+2=", "answer": "4"})
    ...     taken = await env.step(state, Turn("4"))
    ...     await env.close(taken.state)
    ...     return prompt, taken.reward
    >>> with nrl.serve(single_turn(exact)) as server:
    ...     asyncio.run(play(remote(server)))
    ('2+2=', 1.0)
    """
    servers = [server] if isinstance(server, str | Server) else list(server)
    if not servers:
        raise ArgumentError("remote: there is no server; give the address of at least one")
    if not patience > 0 or connections < 1:
        raise ArgumentError(f"remote: patience is {patience} and connections {connections}; both must be positive")
    urls = tuple(_url(each) for each in servers)
    known = os.environ.get("NRL_GYM_TOKEN")
    own = (each.token if isinstance(each, Server) else known for each in servers)
    tokens = {url: (shown if token is None else token) or None for url, shown in zip(urls, own, strict=True)}
    client = _Client(tokens, patience, connections)
    return client.environment() if client.info.kind == "environment" else client.verifier()


def _url(server: str | Server) -> str:
    url = (server.url if isinstance(server, Server) else server).rstrip("/")
    try:
        found = urlsplit(url)
        if found.scheme in ("http", "https") and found.hostname and found.port != 0:
            return url
    except ValueError:  # a port that is none
        pass
    raise EnvError(f"remote: {url!r} is no address; give one such as http://10.0.0.5:8000")


class _Client:
    """Asks servers. In another process it is made anew, with connections of its own."""

    def __init__(self, tokens: dict[str, str | None], patience: float, connections: int) -> None:
        urls, self._given = tuple(tokens), (tokens, patience, connections)
        self.places = Places(tokens, patience, connections)
        weakref.finalize(self, self.places.close)
        try:
            coming = self.places.ask("/info", None)
            wait_until(lambda seconds: bool(futures.wait([coming], seconds).done), math.inf, self._told, _SILENCE)
            _, found = coming.result()
            self.info = self.places.info = msgspec.json.decode(found, type=protocol.Info)
        except Asked as error:
            raise error.raised() from None
        except msgspec.DecodeError:
            raise EnvError(
                f"remote: {urls[0]} is no server of nrl; give the address of one that `serve` made"
            ) from None
        if self.info.protocol != protocol.PROTOCOL:
            raise EnvError(
                f"remote: {urls[0]} speaks version {self.info.protocol} of the protocol, and this is "
                f"{protocol.PROTOCOL}; install the same version of nrl on both sides"
            )

    def __reduce__(self) -> Any:
        return _Client, self._given

    def _told(self, seconds: float) -> str:
        urls, patience, _ = self._given
        return (
            f"remote: waiting for {' or '.join(urls)} to answer, {seconds:.0f} s of {patience:g} so far "
            f"({self.places.trouble or 'it is connected'})"
        )

    async def ask[T](self, path: str, asked: Any, decoder: "Decoder[T]", **how: Any) -> tuple[str, T]:
        """Ask, from any event loop."""
        url, found = await self._answer(asyncio.wrap_future(self.places.ask(path, _encode(asked), **how)))
        return self._read(url, found, decoder)

    async def _answer(self, coming: Any) -> Any:
        try:
            return await coming
        except Asked as error:
            raise error.raised() from None

    def ask_now[T](self, path: str, asked: Sequence[Any], decoder: "Decoder[T]") -> list[T]:
        """Ask several things at a time, and wait for all answers."""
        try:
            coming = [self.places.ask(path, _encode(each)) for each in asked]
            return [self._read(*each.result(), decoder)[1] for each in coming]
        except Asked as error:
            raise error.raised() from None

    def _read[T](self, url: str, found: bytes, decoder: "Decoder[T]") -> tuple[str, T]:
        try:
            return url, protocol.read(found, decoder)
        except ValueError as error:
            raise EnvError(f"remote: the answer of {url} cannot be read: {error}") from None

    def verifier(self) -> Any:
        """What verifies there."""
        made: Any = functools.partial(self._verify)  # which has attributes, and can be sent to other processes
        made.timeout, made.__name__, made.num_rewards = None, self.info.name, self.info.num_rewards
        if self.info.of_group is not False:
            made.of_group = self.info.of_group or self._of_group
        if self.info.extracts:
            made.extract = self._extract
        if self.info.tasks:
            made.tasks = self._own_tasks()
        if self.info.checks:
            made.check_task = self._check
        return made

    async def _verify(self, task: Task, trace: Any) -> Any:
        one, tried = isinstance(trace, Trace), set[str]()
        traces = [protocol.transcript(each) for each in ([trace] if one else trace)]
        call, sent = uuid.uuid4().hex, sendable(dict(task), "the task")
        asked = protocol.Verify(sent, traces[0] if one else None, None if one else traces, call)
        try:
            _, said = await self.ask("/verify", asked, _said, tried=tried)
        except asyncio.CancelledError:
            self.places.run(self.places.give_up(call, tried))
            raise
        if not one:
            return [protocol.verdict_of(each) for each in said.verdicts or ()]
        if said.verdict is None:
            raise EnvError(f"remote: {self.info.name} has given no verdict")
        return protocol.verdict_of(said.verdict)

    async def _check(self, task: Task) -> str | None:
        try:
            _, checked = await self.ask("/check", protocol.Checking(sendable(dict(task), "the task")), _checked)
        except EnvError as error:  # of the server or the way to it, and not of the task
            raise DataError(f"remote: {self.info.name} has not checked a task: {error}") from error
        return None if checked.reason is None else str(value_of(checked.reason))

    def _of_group(self, task: Task) -> bool:
        return self.ask_now("/group", [protocol.Grouping(sendable(dict(task), "the task"))], _grouped)[0].of_group

    def _extract(self, text: str) -> Any:
        return self.ask_now("/extract", [protocol.Extracting(sendable(text, "the text"))], _extracted)[0].found

    def _own_tasks(self) -> Any:
        """What makes tasks there, with ``many`` for `nrl.data.tasks`, which asks for those of several indices."""
        made: Any = functools.partial(self._task)
        made.many, made.__name__ = self._tasks, self.info.name
        return made

    def _task(self, seed: int, index: int) -> Task:
        return self._tasks(seed, [index])[0]

    def _tasks(self, seed: int, indices: Sequence[int]) -> list[Task]:
        return [each.task for each in self.ask_now("/task", [protocol.At(seed, index) for index in indices], _task)]

    def environment(self) -> Environment:
        """The environment that is there."""
        verifier: Verifier | None = self.verifier() if self.info.verifies else None
        tasks = self._own_tasks() if self.info.tasks else None
        check = self._check if self.info.checks else None
        return Environment(self._reset, self._step, self._close, verifier, None, tasks, check, self.info.num_rewards)

    async def _reset(self, task: Task) -> Any:
        places, session, tried = self.places, uuid.uuid4().hex, set[str]()
        asked = _encode(protocol.Reset(session, sendable(dict(task), "the task")))
        try:
            url, found = await self._answer(asyncio.wrap_future(places.run(_begin(places, session, asked, tried))))
        except (asyncio.CancelledError, Exception):  # there may be a state, such as where the prompt was refused
            places.run(places.give_up(session, tried))
            raise
        _, begun = self._read(url, found, _begun)
        tools = () if begun.tools is None else (protocol.tools_of(begun.tools),)
        return RemoteState(url, session, 0), begun.prompt, *tools

    async def _step(self, state: RemoteState, turn: Turn) -> Step:
        asked = protocol.Step(state.session, state.turn, protocol.action_of(turn))
        _, taken = await self.ask("/step", asked, _stepped, at=state.url)
        verdict, then = protocol.verdict_of(taken.verdict), state._replace(turn=state.turn + 1)
        return Step(then, verdict, taken.done, taken.observation, taken.info)

    async def _close(self, state: RemoteState) -> None:
        closing = asyncio.wrap_future(self.places.run(_end(self.places, state)))
        try:
            await asyncio.shield(closing)  # it is made all the same
        except Asked as error:
            if error.status != 404:  # else there is nothing to give back
                raise error.raised() from None


async def _begin(places: Places, session: str, asked: bytes, tried: set[str]) -> tuple[str, bytes]:
    """Begin an episode, and renew it from then on."""
    found = await places.ask_here("/reset", asked, tried=tried)
    places.hold(found[0], session)
    return found


async def _end(places: Places, state: RemoteState) -> None:
    """End an episode. One of a server that does not answer has ended with it, or does so with its lease."""
    places.release(state.url, state.session)
    with contextlib.suppress(EnvError):
        await places.ask_here("/close", _encode(protocol.Closing(state.session)), at=state.url, patience=_CLOSING)
