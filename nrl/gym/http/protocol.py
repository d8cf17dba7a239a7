"""What a server of an environment and its clients say to each other: records, as JSON."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from nrl.envs.return_values import check_status
from nrl.envs.tools import MalformedCall, Tool, ToolCall
from nrl.envs.types import Score, Trace, Turn, Verdict
from nrl.gym.http.json_codec import sendable, value_of

__all__ = [
    "PROTOCOL",
    "Action",
    "At",
    "Begun",
    "Called",
    "Checked",
    "Checking",
    "Closed",
    "Closing",
    "Error",
    "Extracted",
    "Extracting",
    "Failure",
    "Grouped",
    "Grouping",
    "Info",
    "Judged",
    "Name",
    "Natural",
    "Renewal",
    "Renewed",
    "Reset",
    "Said",
    "Step",
    "Stepped",
    "TaskFound",
    "Text",
    "ToolShown",
    "Transcript",
    "Unread",
    "Verify",
    "action_of",
    "judged",
    "read",
    "shown_tools",
    "tools_of",
    "trace_of",
    "transcript",
    "turn_of",
    "verdict_of",
]

PROTOCOL = 1
"""Of these records. A client refuses a server that speaks another one."""

type Name = Annotated[str, Meta(min_length=1, max_length=64, pattern="^[A-Za-z0-9_-]+$")]
type Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
type Text = str | dict[str, Any]
"""A text; or, where it has lone surrogates, an object with the key ``"$nrl"``."""


class Called(Struct, omit_defaults=True):
    """A call of a tool."""

    name: Text
    arguments: dict[str, Any] = {}
    id: Text | None = None


class Unread(Struct):
    """What began like a call of a tool and could not be read."""

    text: Text
    reason: Text


class Action(Struct, omit_defaults=True):
    """What the model wrote in one turn."""

    text: Text = ""
    token_ids: list[int] = []
    stop_reason: Literal["stop", "length", "refused"] = "stop"
    calls: list[Called] = []
    malformed: list[Unread] = []
    reasoning: Text | None = None
    prompt_tokens: int = 0
    prompt_ids: list[int] = []
    logprobs: list[float] = []
    reasoning_ended: bool | None = None
    answer: Text | None = None


class Transcript(Struct, omit_defaults=True):
    """What happened in an episode: the prompt, the turns, and what the environment answered to each."""

    prompt: Any = ""
    turns: list[str | Action] = []
    observations: list[Any] = []
    token_ids: list[int] = []
    sampled: list[bool] = []
    truncated: bool = False


class Reset(Struct):
    """Begin an episode, under a name that the client chooses. A name that is repeated begins nothing."""

    session: Name
    task: dict[str, Any]


class ToolShown(Struct):
    """A tool that a model may call; it is called where the environment is."""

    name: str
    description: dict[str, Any]
    required: list[str] = []


class Begun(Struct, omit_defaults=True):
    """An episode has begun."""

    prompt: Any
    tools: list[ToolShown] | None = None


class Step(Struct):
    """Take a turn. The same turn with the same action is answered again; another action is an error."""

    session: Name
    turn: Natural
    action: str | Action


class Judged(Struct, omit_defaults=True):
    """A verdict: a number, several, or components by name; a status and components, where the verdict was a score."""

    reward: Any
    status: Literal["ok", "parse_fail", "timeout", "infra_error", "skipped"] | None = None
    components: dict[str, Any] = {}


class Stepped(Struct):
    """What the environment answered."""

    verdict: Judged
    done: bool
    observation: Any
    info: dict[str, Any]


class Closing(Struct):
    """End an episode. One that is closed is not closed again."""

    session: Name


class Closed(Struct):
    """The episode is closed."""

    session: str


class Renewal(Struct):
    """Keep episodes for another lease."""

    sessions: Annotated[list[Name], Meta(max_length=100_000)]


class Renewed(Struct):
    """How many of them are open."""

    sessions: int


class Verify(Struct, omit_defaults=True):
    """Judge an answer, or all answers to a task. A call that is repeated under its name is made once."""

    task: dict[str, Any]
    trace: Transcript | None = None
    traces: list[Transcript] | None = None
    call: Name | None = None


class Said(Struct):
    """A verdict; several, where all answers to a task were judged together."""

    verdict: Judged | None = None
    verdicts: list[Judged] | None = None


class Grouping(Struct):
    """Ask whether all answers to a task are judged together."""

    task: dict[str, Any]


class Grouped(Struct):
    """Whether they are."""

    of_group: bool


class At(Struct):
    """Ask for a task of an environment that brings tasks."""

    seed: int
    index: Natural


class TaskFound(Struct):
    """That task."""

    task: dict[str, Any]


class Checking(Struct):
    """Ask why no answer to a task can be right."""

    task: dict[str, Any]


class Checked(Struct):
    """Why no answer can be right; null: one can."""

    reason: Text | None


class Extracting(Struct):
    """Ask what a verifier reads in an answer."""

    text: Text


class Extracted(Struct):
    """What it reads; null: nothing."""

    found: Any


class Info(Struct, omit_defaults=True):
    """What a server has.

    Args:
        protocol: of these records.
        name: of the environment.
        kind: whether it may be reset, or judges alone.
        verifies: whether `Verify` is answered.
        of_group: whether all answers to a task are judged together; null: it depends on the task.
        tasks: whether it brings tasks.
        extracts: whether it says what it reads in an answer.
        timeout: seconds that a call may take; null: no limit, or it depends on the task.
        lease: seconds for which an episode is kept that nobody asks for.
        num_rewards: how many rewards an episode has, 0 for one number; left out where that is not declared.
        checks: whether `Checking` is answered; older servers do not say, and do not answer it.
    """

    protocol: int
    name: str
    kind: Literal["environment", "verifier"]
    verifies: bool
    of_group: bool | None
    tasks: bool
    extracts: bool
    timeout: float | None
    lease: float
    num_rewards: Natural | None = None
    checks: bool = False


class Failure(Struct):
    """Why there is no answer.

    Args:
        code: ``"failed"``, the environment raised; all others are about the request.
        kind: the type of the exception.
        message: what was found, and what to do.
    """

    code: str
    kind: str
    message: str


class Error(Struct):
    """An answer that is none."""

    error: Failure


def read[T](body: bytes | bytearray, decoder: "msgspec.json.Decoder[T]") -> T:
    """A record, with all its values as they were.

    Raises:
        ValueError: it is no JSON, or not of this record; the message says what is wrong, and where.

    >>> read(b'{"session": "a", "task": {"x": {"$nrl": "tuple", "value": [1]}}}', msgspec.json.Decoder(Reset)).task
    {'x': (1,)}
    """
    try:
        # The key has to be written as it is. One byte is found twenty times as fast as several
        if b"$" not in body or b'"$nrl"' not in body:
            return decoder.decode(body)
        made: T = msgspec.convert(value_of(msgspec.json.decode(body)), decoder.type)
        return made
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


# --- Turns, traces, verdicts, tools


def action_of(turn: str) -> Action:
    """A turn as it is sent.

    >>> action_of("4").text, turn_of(action_of(Turn("4", [3, 2], "length"))).token_ids
    ('4', (3, 2))
    """
    if not isinstance(turn, Turn):
        return Action(sendable(turn, "the turn"))
    sampled: dict[str, Any] = {
        "prompt_tokens": turn.prompt_tokens,
        "prompt_ids": list(turn.prompt_ids),
        "logprobs": list(turn.logprobs),
    }
    beyond_text = turn.beyond_text
    if not (turn.calls or turn.malformed or beyond_text):
        return Action(sendable(turn.text, "the turn"), list(turn.token_ids), turn.stop_reason, **sampled)
    found = sendable([turn.text, list(map(list, turn.calls)), list(map(list, turn.malformed))], "a turn")
    text, calls, malformed = found
    return Action(
        text,
        list(turn.token_ids),
        turn.stop_reason,
        [Called(*each) for each in calls],
        [Unread(*each) for each in malformed],
        **{name: sendable(value, "a turn") for name, value in beyond_text.items()},
        **sampled,
    )


def turn_of(action: str | Action) -> Turn:
    """The turn of an action."""
    if isinstance(action, str):
        return Turn(action)
    sampled: dict[str, Any] = {
        "prompt_tokens": action.prompt_tokens,
        "prompt_ids": action.prompt_ids,
        "logprobs": action.logprobs,
    }
    beyond_text: dict[str, Any] = {
        "reasoning": None if action.reasoning is None else str(action.reasoning),
        "reasoning_ended": action.reasoning_ended,
        "answer": None if action.answer is None else str(action.answer),
    }
    calls = [
        ToolCall(str(each.name), each.arguments, None if each.id is None else str(each.id)) for each in action.calls
    ]
    malformed = [MalformedCall(str(each.text), str(each.reason)) for each in action.malformed]
    return Turn(str(action.text), action.token_ids, action.stop_reason, calls, malformed, **beyond_text, **sampled)


def transcript(trace: Trace) -> Transcript:
    """A trace as it is sent.

    >>> transcript(Trace("2+2=", ["4"])).turns[0].text
    '4'
    """
    return Transcript(
        sendable(trace.prompt, "the trace's prompt"),
        [action_of(each) for each in trace.turns],
        sendable(list(trace.observations), "the trace's observations"),
        list(trace.token_ids),
        list(trace.sampled),
        trace.truncated,
    )


def trace_of(given: Transcript) -> Trace:
    """The trace of a transcript.

    >>> trace_of(transcript(Trace("2+2=", ["4"]))).text
    '4'
    """
    turns, observations = [turn_of(each) for each in given.turns], tuple(given.observations)
    return Trace(given.prompt, turns, observations, tuple(given.token_ids), tuple(given.sampled), given.truncated)


def judged(verdict: Verdict) -> Judged:
    """A verdict as it is sent.

    Raises:
        EnvError: it has something that cannot be sent.

    >>> verdict_of(judged(Score(1.0, "parse_fail"))), verdict_of(judged({"a": 1.0}))
    (Score(reward=1.0, status='parse_fail', components={}), {'a': 1.0})
    """
    if not isinstance(verdict, Score):
        return Judged(sendable(_floats(verdict), "the verdict"))
    check_status(verdict)
    components = sendable(dict(_floats(verdict.components)), "the score's components")
    return Judged(sendable(_floats(verdict.reward), "the score's reward"), verdict.status, components)


def _floats(verdict: Any) -> Any:
    """A verdict whose fractions and decimals, which JSON does not have, are floats."""
    if isinstance(verdict, Fraction | Decimal):
        return float(verdict)
    if isinstance(verdict, Mapping):
        return {name: _floats(value) for name, value in verdict.items()}
    if type(verdict) in (list, tuple):
        return type(verdict)(map(_floats, verdict))
    return verdict


def verdict_of(given: Judged) -> Verdict:
    """The verdict."""
    if given.status is None:
        return given.reward  # type: ignore[no-any-return]
    return Score(given.reward, given.status, given.components)


def shown_tools(tools: Sequence[Tool]) -> list[ToolShown]:
    """What a model is told of tools."""
    return [ToolShown(each.name, dict(each.schema), list(each.required)) for each in tools]


def tools_of(shown: Sequence[ToolShown]) -> list[Tool]:
    """Tools that are called elsewhere; only a model reads them."""
    nothing: Any = None
    return [Tool(each.name, nothing, each.description, {}, tuple(each.required)) for each in shown]
