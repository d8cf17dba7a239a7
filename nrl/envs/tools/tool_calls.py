"""Calls of tools: all those of a turn, at once, with state where they ask for it.

A mistake of the model is told to the model. A mistake of the program is an exception, which makes the row invalid.
"""

import asyncio
import contextvars
import inspect
import json
import reprlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from nrl.arguments import with_article
from nrl.envs.tools.formats import MalformedCall, ToolCall
from nrl.envs.tools.schemas import Tool
from nrl.envs.types import asynchronous
from nrl.errors import EnvError

__all__ = ["Called", "NewState", "ToolError", "ToolResult", "call", "count_calls"]

type _Status = Literal["ok", "malformed", "invalid", "error", "skipped"]


class ToolError(Exception):
    """Raised by a tool: the message is for the model, as the result of its call. The episode goes on.

    >>> from nrl.envs.tools import tool
    >>> def read(path: str) -> str:
    ...     '''Read a file.'''
    ...     raise ToolError(f"there is no file {path}")
    >>> asyncio.run(call([tool(read)], [ToolCall("read", {"path": "a.txt"})])).results[0].text
    'there is no file a.txt'
    """


class NewState(NamedTuple):
    """Returned by a tool that has a `State`: its result, and the state that takes the place of the one it was given.

    >>> from nrl.envs.tools import State, tool
    >>> def put(item: str, basket: State[tuple[str, ...]]) -> NewState:
    ...     '''Put an item into the basket.'''
    ...     return NewState((*basket, item), result=f"{len(basket) + 1} items")
    >>> calls = [ToolCall("put", {"item": "tea"}), ToolCall("put", {"item": "milk"})]
    >>> asyncio.run(call([tool(put)], calls, state=())).state
    ('tea', 'milk')
    """

    state: Any
    result: Any = None


class ToolResult(NamedTuple):
    """What came of a call, for the model to read.

    Args:
        name: of the tool; empty, if the call was malformed.
        text: of the result: texts as they are, other values as JSON; or what was wrong.
        id: of the call.
        status: ``"ok"``; ``"malformed"``, the call could not be read; ``"invalid"``, there is no such tool, or it does
            not take these arguments; ``"error"``, the tool raised `ToolError`; ``"skipped"``, there were too many.

    >>> ToolResult("add", "5").message
    {'role': 'tool', 'name': 'add', 'content': '5'}
    """

    name: str
    text: str
    id: str | None = None
    status: _Status = "ok"

    @property
    def message(self) -> dict[str, str]:
        """This result as a message of a chat."""
        named = {"name": self.name} if self.name else {}
        return {"role": "tool", **named, "content": self.text, **({"tool_call_id": self.id} if self.id else {})}


class Called(NamedTuple):
    """The value of `call`.

    Args:
        results: one for each call, in their order.
        state: of the environment, after them.

    >>> asyncio.run(call([], [], state=3))
    Called(results=(), state=3)
    """

    results: tuple[ToolResult, ...]
    state: Any


async def call(
    tools: Iterable[Tool],
    calls: Iterable[ToolCall | MalformedCall],
    state: Any = None,
    *,
    most: int | None = None,
    timeout: float | None = None,
) -> Called:
    """Make the calls of one turn: all at once, but those of tools with a `State` one after the other.

    Plain functions run in threads, coroutines on this loop. Tools with a state are called in the order of the calls,
    each with the state that the one before has left, so the outcome depends on no thread. A text that does not fit its
    parameter is read as JSON, since not every format has types.

    Args:
        tools: that there are.
        calls: what `parse` found. Malformed ones are answered with their reason.
        state: for tools that ask for it.
        most: how many of these calls are made; those behind them are answered with this limit. None: all.
        timeout: seconds that one call may take; None: no limit but the environment's.

    Returns:
        A result for each call, in their order, and the state.

    Raises:
        TimeoutError: a call took longer. A plain function cannot be stopped: it goes on, and nobody waits for it.
        EnvError: a tool broke its contract: two have one name, a result is not JSON, or a tool without a state
            returned `NewState`.
        Exception: what a tool raised, if it is no `ToolError`: then the environment failed, and not the model. The
            calls beside it are cancelled.

    >>> from nrl.envs.tools import tool
    >>> def add(a: int, b: int) -> int:
    ...     '''Add two numbers.'''
    ...     return a + b
    >>> calls = [ToolCall("add", {"a": 2, "b": 3}), ToolCall("add", {"a": 2})]
    >>> for result in asyncio.run(call([tool(add)], calls)).results:
    ...     print(result.text)
    5
    add was not called: b is missing; write add(a: int, b: int)
    """
    known: dict[str, Tool] = {}
    for each in tools:
        if each.name in known:
            raise EnvError(f"call: two tools have the name {each.name}; give one of them another, tool(..., name=...)")
        known[each.name] = each
    plan = [
        _bound(known, one) if most is None or place < most else _skipped(one, most) for place, one in enumerate(calls)
    ]
    results = {place: one for place, one in enumerate(plan) if isinstance(one, ToolResult)}
    bound = {place: one for place, one in enumerate(plan) if not isinstance(one, ToolResult)}

    async def alone(place: int, one: _Bound) -> None:
        results[place], _ = await _called(one, None, timeout)

    async def in_order() -> None:
        nonlocal state
        for place, one in bound.items():
            if one.tool.state is not None:
                results[place], state = await _called(one, state, timeout)

    await _together([*(alone(*each) for each in bound.items() if each[1].tool.state is None), in_order()])
    return Called(tuple(results[place] for place in sorted(results)), state)


def count_calls(results: Iterable[ToolResult]) -> dict[str, float]:
    """How many calls a turn made, and how many came to nothing and why; for `nrl.envs.Step.info`.

    Args:
        results: of `call`.

    Returns:
        ``tools/calls``, malformed ones included, and ``tools/`` with each status but ``"ok"``.

    >>> count_calls([ToolResult("add", "5"), ToolResult("", "...", status="malformed")])
    {'tools/calls': 2.0, 'tools/malformed': 1.0, 'tools/invalid': 0.0, 'tools/error': 0.0, 'tools/skipped': 0.0}
    """
    statuses = [each.status for each in results]
    counted = {f"tools/{each}": float(statuses.count(each)) for each in ("malformed", "invalid", "error", "skipped")}
    return {"tools/calls": float(len(statuses)), **counted}


# --- Before a call: its tool and its arguments, or what to tell the model.


class _Bound(NamedTuple):
    """A call of a tool with arguments of its types."""

    call: ToolCall
    tool: Tool
    arguments: dict[str, Any]


def _told(call: ToolCall | MalformedCall, text: str, status: _Status) -> ToolResult:
    if isinstance(call, MalformedCall):
        return ToolResult("", text, None, status)
    return ToolResult(call.name, text, call.id, status)


def _skipped(call: ToolCall | MalformedCall, most: int) -> ToolResult:
    allowed = "1 call was" if most == 1 else f"{most} calls were"
    return _told(call, f"this call was not made: {allowed} allowed; make fewer in a turn", "skipped")


def _bound(known: Mapping[str, Tool], call: ToolCall | MalformedCall) -> _Bound | ToolResult:
    if isinstance(call, MalformedCall):
        return _told(call, f"this call was not made: {call.reason}", "malformed")
    tool = known.get(call.name)
    if tool is None:
        there = f"the tools are {', '.join(known)}" if known else "there are none"
        return _told(call, f"there is no tool {reprlib.repr(call.name)}; {there}", "invalid")
    wrong = [f"{name} is missing" for name in tool.required if name not in call.arguments]
    arguments: dict[str, Any] = {}
    for name, value in call.arguments.items():
        if name in tool.parameters:
            arguments[name], problems = _converted(value, tool.parameters[name])
            wrong += [f"{name}{problem}" for problem in problems]
        else:
            wrong.append(f"there is no parameter {reprlib.repr(name)}")
    if not wrong:
        return _Bound(call, tool, arguments)
    own = inspect.signature(tool.fn).parameters
    wanted = inspect.Signature([_plain(own[name]) for name in tool.parameters])
    return _told(call, f"{tool.name} was not called: {'; '.join(wrong)}; write {tool.name}{wanted}", "invalid")


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter as a model may write it: its bounds, which are no text, were told with what was wrong."""
    kind = parameter.annotation
    return parameter.replace(annotation=get_args(kind)[0]) if get_origin(kind) is Annotated else parameter


def _converted(value: Any, kind: Any) -> tuple[Any, list[str]]:
    """A value of the type; or what is wrong with it."""
    from pydantic import ValidationError

    problems: list[str] = []
    for given in [value, *_as_json(value)]:
        try:
            return kind.validate_python(given), []
        except ValidationError as error:
            problems = []
            for each in error.errors(include_url=False, include_context=False):
                place = "".join(f"[{key!r}]" for key in each["loc"])
                found = "" if each["type"] == "missing" else f", found {reprlib.repr(each['input'])}"
                problems.append(f"{place}: {each['msg'][:1].lower()}{each['msg'][1:]}{found}")
    return None, problems


def _as_json(value: Any) -> list[Any]:
    """The value that a text writes in JSON, or in Python, as chat templates print what has no types; none, if none."""
    names = {"True": True, "False": False, "None": None}
    if not isinstance(value, str):
        return []
    try:
        return [names[value.strip()] if value.strip() in names else json.loads(value)]
    except (ValueError, RecursionError):
        return []


# --- The call.


async def _called(bound: _Bound, state: Any, timeout: float | None) -> tuple[ToolResult, Any]:
    """The result of a call, and the state that it leaves."""
    call, tool, arguments = bound
    if tool.state is not None:
        arguments = {**arguments, tool.state: state}
    try:
        async with asyncio.timeout(timeout) as limit:
            value = await _value(tool.fn, arguments)
    except ToolError as error:
        return _told(call, str(error), "error"), state
    except TimeoutError:
        if not limit.expired():  # it is the tool's own
            raise
        raise TimeoutError(
            f"call: {tool.name} did not return within {timeout:g} s; give it more, or let it end by itself and raise "
            "ToolError"
        ) from None
    except SystemExit as error:  # which would end the loop
        raise EnvError(f"call: {tool.name} ends the process: {error!r}; let it return, or raise ToolError") from error
    if isinstance(value, NewState):
        if tool.state is None:
            raise EnvError(f"call: {tool.name} returned NewState, and has no state; annotate a parameter with State")
        state, value = value
    return ToolResult(tool.name, _text(tool.name, value), call.id), state


async def _value(fn: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if asynchronous(fn):
        return await fn(**arguments)
    value = await _in_thread(partial(contextvars.copy_context().run, fn, **arguments))
    return await value if inspect.isawaitable(value) else value


async def _in_thread(fn: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own, so that one that never returns takes no place that another needs."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def tell(value: Any, error: BaseException | None) -> None:
        if not answer.done():  # it may be cancelled
            answer.set_result((value, error))  # a future takes no StopIteration for an exception

    def run() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = fn(), None
        except BaseException as error:
            outcome = None, error
        with suppress(RuntimeError):  # the loop is closed: nobody wants to know
            loop.call_soon_threadsafe(tell, *outcome)

    threading.Thread(target=run, name="tool", daemon=True).start()
    value, error = await answer
    if error is not None:
        raise error
    return value


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    from pydantic_core import to_jsonable_python

    def jsonable(part: Any) -> Any:
        if isinstance(part, bytes | bytearray | memoryview) or inspect.isgenerator(part) or inspect.isawaitable(part):
            raise TypeError(f"it has {with_article(type(part).__name__)}")
        return to_jsonable_python(part)

    try:
        return json.dumps(value, ensure_ascii=False, default=jsonable, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvError(
            f"call: {name} returned {reprlib.repr(value)}, of which no JSON can be made ({error}); return text, or "
            "what JSON has"
        ) from error


async def _together(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Await them at once; the first failure cancels the others, and is raised."""
    tasks = [asyncio.create_task(each) for each in calls]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for each in tasks:
            if each in done:
                each.result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
