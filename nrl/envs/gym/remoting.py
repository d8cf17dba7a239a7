"""`remote`: the verifier or the environment that a server has."""

import asyncio
import functools
import math
import os
import uuid
import weakref
from collections.abc import Sequence
from concurrent import futures
from typing import Any, NamedTuple

import msgspec
from msgspec.json import Decoder

from nrl.envs.contract import Environment, Step, Task, Trace, Turn, Verifier
from nrl.envs.gym import records
from nrl.envs.gym.asking import Asked, Places
from nrl.envs.gym.serving import Server
from nrl.envs.gym.values import sendable
from nrl.errors import EnvError
from nrl.log.waits import wait_until

__all__ = ["RemoteState", "remote"]

_SILENCE = 3.0  # seconds after which a program is told what it waits for


@functools.cache
def _decoder[T](record: type[T]) -> "Decoder[T]":
    """Which no function holds, so that they can be sent to other processes."""
    return Decoder(record)


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
    episodes fail, and so do their rows; others go on.

    Args:
        server: its address, such as ``"http://10.0.0.5:8000"``, or what `nrl.serve` returned; or several of the same
            kind: an episode begins where there is least to do, and stays there.
        token: that the server asks for; None: that of the server, or of the environment variable ``NRL_GYM_TOKEN``.
        patience: seconds for which a server is asked that does not answer at all.
        connections: that may be open at a time.

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
        raise ValueError("remote: there is no server; give the address of at least one")
    if not patience > 0 or connections < 1:
        raise ValueError(f"remote: patience is {patience} and connections {connections}; both must be positive")
    urls = tuple(_url(each) for each in servers)
    own = [each.token for each in servers if isinstance(each, Server) and each.token]
    client = _Client(urls, token or (own[0] if own else os.environ.get("NRL_GYM_TOKEN")), patience, connections)
    return client.environment() if client.info.kind == "environment" else client.verifier()


def _url(server: str | Server) -> str:
    url = (server.url if isinstance(server, Server) else server).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise EnvError(f"remote: {url!r} is no address; give one such as http://10.0.0.5:8000")
    return url


class _Client:
    """Asks servers. In another process it is made anew, with connections of its own."""

    def __init__(self, urls: tuple[str, ...], token: str | None, patience: float, connections: int) -> None:
        self._given = urls, token, patience, connections
        self.places = Places(urls, token, patience, connections)
        weakref.finalize(self, lambda places: places.run(places.close()), self.places)
        try:
            coming = self.places.ask("/info", None)
            told = f"remote: waiting for {', '.join(urls)} to answer ({{:.0f}} s)".format
            wait_until(lambda seconds: bool(futures.wait([coming], seconds).done), math.inf, told, _SILENCE)
            _, found = coming.result()
            self.info = self.places.info = msgspec.json.decode(found, type=records.Info)
        except Asked as error:
            raise error.raised() from None
        except msgspec.DecodeError:
            raise EnvError(
                f"remote: {urls[0]} is no server of nrl; give the address of one that `serve` made"
            ) from None
        if self.info.protocol != records.PROTOCOL:
            raise EnvError(
                f"remote: {urls[0]} speaks version {self.info.protocol} of the protocol, and this is "
                f"{records.PROTOCOL}; install the same version of nrl on both sides"
            )

    def __reduce__(self) -> Any:
        return _Client, self._given

    async def ask[T](self, path: str, asked: Any, record: type[T], at: str | None = None) -> tuple[str, T]:
        """Ask, from any event loop."""
        url, found = await self._answer(asyncio.wrap_future(self.places.ask(path, msgspec.json.encode(asked), at=at)))
        return self._read(url, found, record)

    async def _answer(self, coming: Any) -> Any:
        try:
            return await coming
        except Asked as error:
            raise error.raised() from None

    def ask_now[T](self, path: str, asked: Any, record: type[T]) -> T:
        """Ask, and wait."""
        try:
            url, found = self.places.ask(path, msgspec.json.encode(asked)).result()
            return self._read(url, found, record)[1]
        except Asked as error:
            raise error.raised() from None

    def _read[T](self, url: str, found: bytes, record: type[T]) -> tuple[str, T]:
        try:
            return url, records.read(found, _decoder(record))
        except ValueError as error:
            raise EnvError(f"remote: the answer of {url} cannot be read: {error}") from None

    def verifier(self) -> Any:
        """What verifies there."""

        async def verify(task: Task, trace: Any) -> Any:
            one = isinstance(trace, Trace)
            traces = [records.transcript(each) for each in ([trace] if one else trace)]
            asked = records.Verify(
                sendable(dict(task), "the task"), traces[0] if one else None, None if one else traces, uuid.uuid4().hex
            )
            try:
                _, said = await self.ask("/verify", asked, records.Said)
            except asyncio.CancelledError:
                self.places.run(self.places.give_up(str(asked.call)))
                raise
            if not one:
                return [records.verdict_of(each) for each in said.verdicts or ()]
            if said.verdict is None:
                raise EnvError(f"remote: {self.info.name} has given no verdict")
            return records.verdict_of(said.verdict)

        made: Any = verify
        made.timeout, made.__name__ = None, self.info.name
        if self.info.of_group is not False:
            made.of_group = self.info.of_group or self._of_group
        if self.info.extracts:
            made.extract = lambda text: (
                self.ask_now("/extract", records.Extracting(sendable(text, "the text")), records.Extracted).found
            )
        if self.info.tasks:
            made.tasks = self._task
        return made

    def _of_group(self, task: Task) -> bool:
        return self.ask_now("/group", records.Grouping(sendable(dict(task), "the task")), records.Grouped).of_group

    def _task(self, seed: int, index: int) -> Task:
        return self.ask_now("/task", records.At(seed, index), records.TaskFound).task

    def environment(self) -> Environment:
        """The environment that is there."""

        async def reset(task: Task) -> Any:
            session = uuid.uuid4().hex
            asked = msgspec.json.encode(records.Reset(session, sendable(dict(task), "the task")))
            try:
                url, found = await self._answer(
                    asyncio.wrap_future(self.places.run(_begin(self.places, session, asked)))
                )
            except asyncio.CancelledError:
                self.places.run(self.places.give_up(session))
                raise
            _, begun = self._read(url, found, records.Begun)
            tools = () if begun.tools is None else (records.tools_of(begun.tools),)
            return RemoteState(url, session, 0), begun.prompt, *tools

        async def step(state: RemoteState, turn: Turn) -> Step:
            asked = records.Step(state.session, state.turn, records.action_of(turn))
            _, taken = await self.ask("/step", asked, records.Stepped, state.url)
            verdict, then = records.verdict_of(taken.verdict), state._replace(turn=state.turn + 1)
            return Step(then, verdict, taken.done, taken.observation, taken.info)

        async def close(state: RemoteState) -> None:
            asked = msgspec.json.encode(records.Closing(state.session))
            closing = asyncio.wrap_future(self.places.run(_end(self.places, state, asked)))
            try:
                await asyncio.shield(closing)  # it is made all the same
            except Asked as error:
                if error.status != 404:  # else there is nothing to give back
                    raise error.raised() from None
            except EnvError:  # nobody answers: if the server lives, the lease ends the episode
                return

        verifier: Verifier | None = self.verifier() if self.info.verifies else None
        return Environment(reset, step, close, verifier, None, self._task if self.info.tasks else None)


async def _begin(places: Places, session: str, asked: bytes) -> tuple[str, bytes]:
    """Begin an episode, and renew it from then on."""
    found = await places.ask_here("/reset", asked)
    places.hold(found[0], session)
    return found


async def _end(places: Places, state: RemoteState, asked: bytes) -> None:
    places.release(state.url, state.session)
    await places.ask_here("/close", asked, state.url)
