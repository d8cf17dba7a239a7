"""What a server of an environment does: it makes each call once, and ends episodes that nobody asks for any more."""

import asyncio
import contextvars
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import attrs
import msgspec

from nrl.arguments import with_article
from nrl.envs import types
from nrl.envs.inprocess.call_with_timeout import Caller, Calls
from nrl.envs.inprocess.tracebacks import Failed
from nrl.envs.policy_inputs import read_observation, read_prompt
from nrl.envs.references import TaskCheck, task_check
from nrl.envs.return_values import is_reset, read_reset, read_step, verdicts_of
from nrl.envs.types import TIMEOUT, asynchronous, declared_rewards, is_env, judges_group, settled, timeout_of
from nrl.errors import EnvError, ExecutableError
from nrl.gym.http import protocol
from nrl.gym.http.idempotency import Act, Refused, answered, failed, once, users
from nrl.gym.http.json_codec import sendable

__all__ = ["Service"]

_RECENT = 20_000  # verdicts and closed episodes that are remembered, for calls that are repeated late

_encode = msgspec.json.Encoder().encode


@attrs.define(eq=False)
class _Session:
    """An episode: its newest state, and what led to it. ``None`` is its reset, numbers are turns."""

    caller: Caller
    touched: float
    acts: dict[int | None, Act] = attrs.field(factory=dict)
    state: tuple[Any, ...] = ()  # the state, once there is one
    turns: int = 0  # that were taken, and gave another state

    @property
    def under_way(self) -> bool:
        return any(not act.answer.done() for act in self.acts.values())


class Service:
    """A verifier or an environment, its open episodes and the calls under way. It lives on one event loop.

    Args:
        f: the verifier or environment.
        name: as it is told.
        lease: seconds for which an episode is kept that nobody asks for.
        most: calls under way, of any kind, and open episodes, beyond which others are told to come again.
        timeout: seconds of a call instead of those of ``f``; ...: those of ``f``.
    """

    def __init__(self, f: Any, name: str, *, lease: float, most: int, timeout: Any = ...) -> None:
        self.f, self.name, self.lease, self.most = f, name, lease, most
        self.timeout = getattr(f, "timeout", TIMEOUT) if timeout is ... else timeout
        self.verifier: Any = getattr(f, "verifier", None) if is_env(f) else f
        self.under_way = self.evicted = self.replayed = 0
        self.stopping = False
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # who was asked for longest ago first
        self._closed: OrderedDict[str, Act] = OrderedDict()
        self._left: set[str] = set()  # of these, whose lease was over
        self._verdicts: OrderedDict[str, tuple[int, asyncio.Future[bytes]]] = OrderedDict()  # with digests
        self._judging: dict[str, asyncio.Task[Any]] = {}
        self._loop = asyncio.get_running_loop()
        self._calls = Calls()
        self._limits = _Limits(getattr(f, "close", None), self.timeout)
        self._ended, self._wait = 0, 1.0  # calls since the last sweep; seconds until half of those under way are over
        self._sweep()

    @property
    def sessions(self) -> int:
        """How many episodes are open."""
        return len(self._sessions)

    def has(self, session: str) -> bool:
        """Whether an episode is open."""
        return session in self._sessions

    def info(self) -> protocol.Info:
        """What it has."""
        of_group = getattr(self.verifier, "of_group", False)
        return protocol.Info(
            protocol.PROTOCOL,
            self.name,
            "environment" if is_env(self.f) else "verifier",
            self.verifier is not None,
            None if callable(of_group) else bool(of_group),
            getattr(self.f, "tasks", None) is not None,
            hasattr(self.verifier, "extract"),
            None if callable(self.timeout) else self.timeout,
            self.lease,
            declared_rewards(self.f),
            task_check(self.f) is not None,
        )

    # --- Episodes

    async def reset(self, asked: protocol.Reset) -> bytes:
        """Begin an episode."""
        self._check_env()
        session = self._sessions.get(asked.session)
        if session is None:
            if asked.session in self._closed:
                raise Refused(409, "consumed", f"reset: the session {asked.session} is closed; choose another name")
            self._check_room(len(self._sessions))
            session = _Session(self._caller(asked.task), self._loop.time())
            self._sessions[asked.session] = session
        else:
            self._touch(asked.session, session)
            self.replayed += 1
        act = once(session.acts, None, asked.task, lambda: self._reset(session, asked.task))
        if act is None:
            raise Refused(
                409, "consumed", f"reset: the session {asked.session} has another task; choose another name for it"
            )
        return await answered(act)

    async def _reset(self, session: _Session, task: Any) -> bytes:
        value = await self._made(session.caller.reset(self.f.reset, task))
        session.state = value[:1] if is_reset(value) else ()
        _, prompt, *tools = users(read_reset, value)
        sent = users(sendable, users(read_prompt, prompt), "the prompt")
        return _encode(protocol.Begun(sent, protocol.shown_tools(tools[0]) if tools else None))

    async def step(self, asked: protocol.Step) -> bytes:
        """Take a turn."""
        self._check_env()
        session = self._session("step", asked.session)
        self._touch(asked.session, session)
        await answered(session.acts[None])  # which may be under way, or have failed
        if asked.turn not in session.acts and asked.turn != session.turns:
            raise Refused(
                409,
                "consumed",
                f"step: turn {asked.turn} of the session {asked.session} cannot be taken; {session.turns} were, and "
                "the last one may have failed. Close it",
                "ConsumedState",
            )
        if asked.turn in session.acts:
            self.replayed += 1
        else:
            self._check_room()
        act = once(session.acts, asked.turn, asked.action, lambda: self._step(session, asked.action))
        if act is None:
            raise Refused(
                409,
                "consumed",
                f"step: turn {asked.turn} of the session {asked.session} was taken already, with another action. Go on "
                "from the turn after it, or reset another session",
                "ConsumedState",
            )
        return await answered(act)

    async def _step(self, session: _Session, action: str | protocol.Action) -> bytes:
        value = await self._made(session.caller(self.f.step, *session.state, protocol.turn_of(action)))
        session.state = (value.state,) if isinstance(value, types.Step) else session.state
        taken = users(read_step, value)
        verdict = users(protocol.judged, taken.reward)
        seen = taken.observation if taken.done else users(read_observation, taken.observation)
        observation = users(sendable, seen, "the observation")
        info = users(sendable, taken.info, "the step's info")
        answer = _encode(protocol.Stepped(verdict, taken.done, observation, info))
        session.turns += 1
        return answer

    async def close(self, asked: protocol.Closing) -> bytes:
        """End an episode, or a call of `verify`; what is under way is given up."""
        judging = self._judging.pop(asked.session, None)
        if judging is not None:
            judging.cancel()
            return _encode(protocol.Closed(asked.session))
        self._check_env()
        act = self._closed.get(asked.session)
        if act is None:
            session = self._session("close", asked.session)
            act = self._end(asked.session, session)
        return await answered(act)

    def _end(self, name: str, session: _Session) -> Act:
        del self._sessions[name]
        act = once(self._closed, name, None, lambda: self._close(name, session))
        assert act is not None
        self._forget()
        return act

    def _forget(self) -> None:
        """Forget the episodes that were closed longest ago."""
        while len(self._closed) > _RECENT and next(iter(self._closed.values())).answer.done():
            self._left.discard(self._closed.popitem(last=False)[0])

    async def _close(self, name: str, session: _Session) -> bytes:
        running = [act.answer for act in session.acts.values() if not act.answer.done()]
        for answer in running:
            answer.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if session.state:
            await self._made(session.caller.close(*session.state))
        return _encode(protocol.Closed(name))

    def renew(self, asked: protocol.Renewal) -> bytes:
        """Keep episodes for another lease."""
        found = [(name, self._sessions[name]) for name in dict.fromkeys(asked.sessions) if name in self._sessions]
        for name, session in found:
            self._touch(name, session)
        return _encode(protocol.Renewed(len(found)))

    def _session(self, who: str, name: str) -> _Session:
        session = self._sessions.get(name)
        if session is None:
            if name in self._closed:
                why = f", since nobody asked for it for {self.lease:g} s, its lease" if name in self._left else ""
                found = f"{who}: the session {name} is closed{why}; reset another"
                raise Refused(409, "consumed", found, "ConsumedState")
            raise Refused(
                404,
                "unknown",
                f"{who}: the session {name} is not known here. It was closed long ago, nobody asked for it for "
                f"{self.lease:g} s, or this server has started since; reset another",
                "ForeignState",
            )
        return session

    def _touch(self, name: str, session: _Session) -> None:
        session.touched = self._loop.time()
        self._sessions.move_to_end(name)

    def _sweep(self) -> None:
        """End the episodes whose lease is over."""
        self._forget()
        every, now = min(1.0, self.lease / 4), self._loop.time()
        self._wait = min(30.0, max(every, every * self.under_way / 2 / max(1, self._ended)))
        self._ended = 0
        while self._sessions:
            name, session = next(iter(self._sessions.items()))
            if session.touched + self.lease > now:
                break
            if session.under_way:
                self._touch(name, session)
            else:
                self.evicted += 1
                self._left.add(name)
                self._end(name, session)
        self._sweeping = self._loop.call_later(every, self._sweep)

    # --- Verdicts, and what else a verifier or an environment may have

    async def verify(self, asked: protocol.Verify, digest: int) -> bytes:
        """Judge an answer, or all answers to a task.

        Args:
            asked: what is judged, perhaps under a name.
            digest: of the whole request, which is another one under the same name if this differs.
        """
        if self.verifier is None:
            raise Refused(404, "unknown", f"verify: {self.name} has no verifier; its steps give the rewards")
        if (asked.trace is None) == (asked.traces is None):
            raise Refused(400, "invalid", "verify: give either a trace or traces")
        if asked.call is None:
            self._check_room()
            return await self._verify(asked)
        if asked.call in self._verdicts:
            first, known = self._verdicts[asked.call]
            if digest != first:
                found = f"verify: the call {asked.call} was made already, with another request; choose another name"
                raise Refused(409, "consumed", found, "ConsumedState")
            self.replayed += 1
            try:
                return await asyncio.shield(known)
            except asyncio.CancelledError:
                if known.cancelled():  # the first client had no more time
                    return await self.verify(asked, digest)
                raise
        self._check_room()
        known = self._loop.create_future()  # a task would cost as much as the rest
        self._verdicts[asked.call] = digest, known
        task: Any = asyncio.current_task()
        self._judging[asked.call] = task
        try:
            answer = await self._verify(asked)
        except BaseException as error:
            if isinstance(error, Refused):
                known.set_exception(error)
                known.exception()  # so that asyncio does not log it
            else:  # its client had no more time, or does not want it any more
                self._verdicts.pop(asked.call, None)
                known.cancel()
            if isinstance(error, asyncio.CancelledError) and asked.call not in self._judging:  # by `close`
                task.uncancel()
                raise Refused(409, "consumed", "the verdict was given up") from None
            raise
        finally:
            self._judging.pop(asked.call, None)
        known.set_result(answer)
        while len(self._verdicts) > _RECENT and next(iter(self._verdicts.values()))[1].done():
            self._verdicts.popitem(last=False)
        return answer

    async def _verify(self, asked: protocol.Verify) -> bytes:
        task = asked.task
        if asked.trace is not None:
            verdict = await self._made(self._caller(task)(self.verifier, task, protocol.trace_of(asked.trace)))
            return _encode(protocol.Said(users(protocol.judged, verdict)))
        assert asked.traces is not None
        traces = [protocol.trace_of(each) for each in asked.traces]
        verdicts = await self._made(self._caller(task)(self.verifier, task, traces))
        read = users(verdicts_of, verdicts, len(traces))
        return _encode(protocol.Said(verdicts=users(lambda: [protocol.judged(each) for each in read])))

    async def group(self, asked: protocol.Grouping) -> bytes:
        """Whether the answers to a task are judged together."""
        self._check_room()
        of_group = self._call(judges_group, self.verifier, asked.task)
        return _encode(protocol.Grouped(await self._made(of_group)))

    async def task(self, asked: protocol.At) -> bytes:
        """A task of an environment that brings some."""
        tasks = getattr(self.f, "tasks", None)
        if tasks is None:
            raise Refused(404, "unknown", f"task: {self.name} brings no tasks")
        self._check_room()
        found = await self._made(self._call(tasks, asked.seed, asked.index))
        if not isinstance(found, Mapping):
            raise failed(
                f"{self.name}'s tasks returned {with_article(type(found).__name__)}; return a mapping with a 'prompt'"
            )
        return _encode(protocol.TaskFound(users(lambda: sendable(dict(found), "the task"))))

    async def check(self, asked: protocol.Checking) -> bytes:
        """Why no answer to a task can be right."""
        check = task_check(self.f)
        if check is None:
            raise Refused(404, "unknown", f"check: {self.name} does not check tasks")
        self._check_room()
        reason = await self._made(self._call(_reasons(check), asked.task))
        return _encode(protocol.Checked(users(lambda: None if reason is None else sendable(str(reason), "the reason"))))

    async def extract(self, asked: protocol.Extracting) -> bytes:
        """What a verifier reads in an answer."""
        if not hasattr(self.verifier, "extract"):
            raise Refused(404, "unknown", f"extract: {self.name} does not say what it reads in an answer")
        self._check_room()
        found = await self._made(self._call(self.verifier.extract, asked.text))
        return _encode(protocol.Extracted(users(sendable, found, "what was read")))

    # --- Calls

    def _check_env(self) -> None:
        if not is_env(self.f):
            raise Refused(404, "unknown", f"{self.name} is a verifier: it has no episodes, and answers /verify")

    def _check_room(self, sessions: int = 0) -> None:
        if self.stopping:
            raise Refused(503, "stopping", f"{self.name} is stopping; ask another server", after=1.0)
        if max(self.under_way, sessions) >= self.most:
            found = f"{self.under_way} calls under way and {sessions} open sessions"
            raise Refused(429, "busy", f"{self.name} has {found}, and at most {self.most}; ask again", after=self._wait)

    def _caller(self, task: Any) -> Caller:
        limits: Any = self._limits
        return Caller(self._calls, limits, users(timeout_of, limits, task))

    def _call(self, fn: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        return self._calls.begin(fn, *args, timeout=TIMEOUT, context=contextvars.copy_context())

    async def _made(self, call: Awaitable[Any]) -> Any:
        self.under_way += 1
        try:
            return await call
        except Failed as error:
            kind, _, message = str(error).partition(": ")
            raise failed(message, kind) from None
        except (KeyboardInterrupt, ExecutableError) as error:  # the user code's own, and not meant for this server
            raise failed(str(error), type(error).__name__) from None
        finally:
            self.under_way -= 1
            self._ended += 1

    def refuse(self) -> None:
        """Begin no call from now on; from any thread."""
        self.stopping = True

    async def stop(self) -> None:
        """End all episodes, each closed, and the threads."""
        self.refuse()
        self._sweeping.cancel()
        ending = [self._end(name, session).answer for name, session in list(self._sessions.items())]
        ending += [act.answer for act in self._closed.values() if not act.answer.done()]
        await asyncio.gather(*ending, return_exceptions=True)
        self._calls.close()


def _reasons(check: TaskCheck) -> TaskCheck:
    """Return a check that returns the `EnvError` that it raises about a task."""

    async def later(task: Any) -> Any:
        try:
            return await settled(check(task))
        except EnvError as error:
            return str(error)

    def at_once(task: Any) -> Any:
        try:
            return check(task)
        except EnvError as error:
            return str(error)

    return later if asynchronous(check) else at_once


@attrs.frozen
class _Limits:
    """What a `Caller` asks an environment for."""

    close: Any
    timeout: Any
