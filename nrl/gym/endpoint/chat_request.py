"""What a client asks of a model, in one form for all of OpenAI's APIs, and the messages that it is made of."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from nrl.data.messages import read_arguments
from nrl.envs.types import Turn
from nrl.gym.endpoint.fields import Unusable, check_length, shown
from nrl.gym.http.json_limits import check_json

__all__ = [
    "DEPTH",
    "VALUES",
    "Asked",
    "arguments_of",
    "as_request",
    "call_id",
    "chat_tools",
    "content_of",
    "content_text",
    "cut",
    "said_by",
    "wrong_type",
]

DEPTH = 128
"""Levels of a request, and of the arguments of a call."""
VALUES = 100_000
"""Values of a request, and of such arguments."""
_TOOLS = 1024  # OpenAI allows 128
_LONGEST = 2**20  # characters of the arguments of a call; longer ones stay a text


def wrong_type(error: Exception) -> Unusable:
    """What to say where a field of a request is of another type than it has to be."""
    return Unusable(f"a field of the request is of the wrong type: {error}")


@attrs.frozen
class Asked:
    """A request.

    Args:
        messages: of the whole conversation: ``role`` and ``content`` (a text), and where there are some ``reasoning``,
            ``tool_calls`` (each with ``id``, ``name`` and ``arguments``, which is an object if it can be read) and
            ``tool_call_id``.
        tools: JSON schemas, in the form of Chat Completions.
        n: how many answers.
        stream: whether the answer comes as server-sent events.
        stream_usage: whether the last of these counts tokens.
        stored: whether a later request may go on with the answer.
        logprobs: whether each token's log-probability is asked for.
        ids: whether the tokens themselves are.
        model: the name that the client gave.
        sampling: how to sample, as far as it says: ``temperature``, ``top_p``, ``top_k``, ``max_new_tokens``, ``stop``,
            ``seed``.
        unmet: the names of other wishes, which no sampler meets, such as a format of the answer.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = attrs.field(factory=list)
    n: int = 1
    stream: bool = False
    stream_usage: bool = False
    stored: bool = True
    logprobs: bool = False
    ids: bool = False
    model: str = ""
    sampling: dict[str, Any] = attrs.field(factory=dict)
    unmet: tuple[str, ...] = ()


def content_text(content: Any, where: str) -> str:
    """The text of a content: a text, or a list of parts that are text.

    Raises:
        Unusable: it has something else, such as a picture.

    >>> content_text([{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}], "message 0")
    '1+1='
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise Unusable(
            f"{where}: its content is {type(content).__name__}; give a text, or a list of parts", param=where
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise Unusable(
                f"{where}: its content has a part of the type {shown(kind)}; this model reads text alone", param=where
            )
        texts.append(text)
    return "".join(texts)


def chat_tools(tools: Any) -> list[dict[str, Any]]:
    """Tools in the form of Chat Completions, from that or from the form of Responses.

    Raises:
        Unusable: one is no function.

    >>> chat_tools([{"type": "function", "name": "add", "parameters": {"type": "object"}}])
    [{'type': 'function', 'function': {'name': 'add', 'parameters': {'type': 'object'}}}]
    """
    found = []
    tools = [] if tools is None else list(tools) if isinstance(tools, tuple) else tools
    check_length("tools", tools, _TOOLS)
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
        function = tool.get("function", tool) if kind == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Unusable(
                f"tools: there is one of the type {shown(kind)}; this model is told of functions with a name alone",
                param="tools",
            )
        known = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
        found.append({"type": "function", "function": known})
    return found


def arguments_of(text: Any) -> Any:
    """The arguments of a call as `nrl.data.messages.read_arguments` reads them; a text beyond the limits stays one.

    >>> arguments_of('{"a": 2}'), arguments_of("a=2")
    ({'a': 2}, 'a=2')
    """
    if not isinstance(text, str):
        return read_arguments(text)
    if len(text) > _LONGEST:
        return text
    try:
        check_json(text.encode(errors="surrogatepass"), containers=VALUES, depth=DEPTH, values=VALUES)
    except ValueError:
        return text
    return read_arguments(text)


def call_id(turn: int, place: int) -> str:
    """The id of a call that the model gave none.

    >>> call_id(3, 0)
    'call_3_0'
    """
    return f"call_{turn}_{place}"


def cut(turn: Turn, stop: Sequence[str]) -> Turn:
    """A turn as who asked for an end before some texts is told it: without the first of them, and what follows.

    >>> cut(Turn("Add 2. Observation: 4", token_ids=[3, 4, 5]), [" Observation:"])
    'Add 2.'
    """
    at = min((place for each in stop if (place := turn.text.find(each)) >= 0), default=None)
    if at is None:
        return turn
    own = (turn.calls, turn.malformed, turn.reasoning, turn.prompt_tokens, turn.prompt_ids, turn.logprobs)
    return Turn(turn.text[:at], turn.token_ids, turn.stop_reason, *own, reasoning_ended=turn.reasoning_ended)


def content_of(turn: Turn) -> str:
    """The text of a turn, and behind it what began like a call and could not be read."""
    return "\n".join(filter(None, [turn.text, *(each.text for each in turn.malformed)]))


def said_by(turn: Turn, number: int) -> dict[str, Any]:
    """The message of a turn.

    >>> said_by(Turn("4", reasoning="Easy."), 0)
    {'role': 'assistant', 'content': '4', 'reasoning': 'Easy.'}
    """
    found: dict[str, Any] = {"role": "assistant", "content": content_of(turn)}
    if turn.reasoning:
        found["reasoning"] = turn.reasoning
    if turn.calls:
        found["tool_calls"] = [
            {"id": call_id(number, at), "name": each.name, "arguments": each.arguments}
            for at, each in enumerate(turn.calls)
        ]
    return found


def _meaning(message: Mapping[str, Any]) -> Any:
    """What two messages of the assistant have in common if they say the same."""
    calls = [[each["name"], each["arguments"]] for each in message.get("tool_calls", ())]
    return [message["content"], message.get("reasoning", ""), calls]


def as_request(asked: Asked, said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A `nrl.envs.types.Request` of what is asked, with how long an answer may be.

    Args:
        asked: by a client.
        said: the message of each turn of the model so far. Where the client sends one back as it was, its turn stands
            in its place, so that its tokens are used again.

    >>> asked = Asked([{"role": "user", "content": "1+1="}, said_by(Turn("2"), 0), {"role": "user", "content": "And?"}])
    >>> as_request(asked, [said_by(Turn("2"), 0)])["messages"][1]
    {'role': 'assistant', 'turn': 0}
    """
    found = list[dict[str, Any]]()
    known = [_meaning(each) for each in said]
    order, names = dict[str, int](), dict[str, str]()
    own, at, run = set[str](), 0, list[dict[str, Any]]()  # results of one message's calls, which come in any order

    def end_run() -> None:
        ordered = sorted(run, key=lambda each: order.get(each["tool_call_id"], len(order)))
        found.extend(_result(each, names, own) for each in ordered)
        run.clear()

    for message in asked.messages:
        if message["role"] == "tool":
            run.append(message)
            continue
        end_run()
        if message["role"] != "assistant":
            found.append(message)
            continue
        calls = message.get("tool_calls", [])
        order |= {each["id"]: place for place, each in enumerate(calls, len(order))}
        names |= {each["id"]: each["name"] for each in calls}
        same = _meaning(message)
        places = [place for place, each in enumerate(known) if each == same]
        if places:
            turn = min(places, key=lambda place: (place < at, place))  # the next, if the same was said several times
            own |= {call_id(turn, place) for place in range(len(calls))}
            found.append({"role": "assistant", "turn": turn})
            at = turn + 1
        else:
            found.append(_foreign(message))
    end_run()
    return {
        "messages": found,
        "tools": asked.tools,
        "ids": asked.ids or asked.logprobs,
        **{name: asked.sampling[name] for name in ("stop", "max_new_tokens") if asked.sampling.get(name)},
    }


def _foreign(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of the assistant that the policy did not say, as chat templates take it."""
    found = {"role": "assistant", "content": message["content"]}
    if "reasoning" in message:
        found["reasoning_content"] = message["reasoning"]
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [
            {"type": "function", "id": each["id"], "function": {"name": each["name"], "arguments": each["arguments"]}}
            for each in calls
        ]
    return found


def _result(message: Mapping[str, Any], names: Mapping[str, str], own: Iterable[str]) -> dict[str, Any]:
    """A result, with the name of its tool; without an id that the model has never seen."""
    of = message["tool_call_id"]
    found = {"role": "tool", "content": message["content"]}
    found |= {"name": names[of]} if of in names else {}
    return found if of in own else found | {"tool_call_id": of}
