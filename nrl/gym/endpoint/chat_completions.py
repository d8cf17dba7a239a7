"""OpenAI's Chat Completions: requests, answers, and answers as a stream."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nrl.data.messages import REASONING, canonical_messages
from nrl.envs.types import Turn
from nrl.errors import DataError
from nrl.gym.endpoint.chat_request import Asked, arguments_of, call_id, chat_tools, content_of, content_text
from nrl.gym.endpoint.fields import (
    MESSAGES,
    Unusable,
    check_length,
    check_number,
    check_wishes,
    flag_of,
    sampling_of,
    shown,
    text_of,
)

__all__ = ["answer", "events", "read"]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_UNMET = (
    *("frequency_penalty", "function_call", "functions", "logit_bias", "presence_penalty", "response_format"),
    *("top_logprobs", "min_p", "repetition_penalty", "guided_json", "structured_outputs", "chat_template_kwargs"),
    "reasoning_effort",
)


def read(body: Any) -> Asked:
    """What a request asks.

    Raises:
        Unusable: it cannot be answered; the message says why.

    >>> read({"model": "policy", "messages": [{"role": "user", "content": "1+1="}]}).messages
    [{'role': 'user', 'content': '1+1='}]
    """
    if not isinstance(body, Mapping):
        raise Unusable(f"the request is {type(body).__name__}; send an object with 'messages'")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Unusable("messages: there are none; send a list of at least one", param="messages")
    check_length("messages", messages, MESSAGES)
    found = [_message(each, f"messages[{at}]") for at, each in enumerate(messages)]
    if found[-1]["role"] == "assistant":
        raise Unusable("messages: the last is the assistant's, which leaves nothing to answer", param="messages")
    n = 1 if body.get("n") is None else body["n"]
    check_number("n", n)
    check_wishes(body)
    choice = body.get("tool_choice")
    unmet = [name for name in _UNMET if body.get(name) not in (None, 0, "", [], {}, {"type": "text"})]
    unmet += ["parallel_tool_calls"] if body.get("parallel_tool_calls") is False else []
    if choice not in (None, "auto", "none"):
        unmet.append("tool_choice")
    return Asked(
        messages=found,
        tools=[] if choice == "none" else chat_tools(body.get("tools")),
        n=n,
        stream=flag_of(body, "stream"),
        stream_usage=flag_of(body.get("stream_options") or {}, "include_usage"),
        logprobs=flag_of(body, "logprobs"),
        ids=flag_of(body, "return_token_ids"),
        model=text_of(body, "model"),
        sampling=sampling_of(body, "max_completion_tokens", "max_tokens"),
        unmet=tuple(unmet),
    )


def _message(message: Any, where: str) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in _ROLES:
        raise Unusable(f"{where}: its role is {shown(role)}; give one of {', '.join(_ROLES)}", param=where)
    found = {"role": "system" if role == "developer" else role, "content": content_text(message.get("content"), where)}
    if role == "tool":
        return found | {"tool_call_id": str(message.get("tool_call_id") or "")}
    if role != "assistant":
        return found
    if message.get("function_call"):
        raise Unusable(f"{where}: 'function_call' is not read; give the call in 'tool_calls'", param=where)
    given = {name: message[name] for name in REASONING if message.get(name)}
    try:
        (read,) = canonical_messages([{**found, **given}], where)
    except DataError as error:
        raise Unusable(str(error).replace(": message 0", "", 1), param=where) from None
    if REASONING[0] in read:
        found["reasoning"] = read[REASONING[0]]
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(each, f"{where}.tool_calls[{at}]") for at, each in enumerate(calls)]
    return found


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Unusable(f"{where}: it is no call of a function with a name", param=where)
    arguments = arguments_of(function.get("arguments"))
    return {"id": str(call.get("id") or ""), "name": function["name"], "arguments": arguments}


def answer(asked: Asked, turns: Sequence[Turn], first: int, name: str) -> dict[str, Any]:
    """The answer to a request.

    Args:
        asked: the request.
        turns: as many as were asked for.
        first: the number of the first of them.
        name: of this answer.
    """
    choices = []
    for index, turn in enumerate(turns):
        choice: dict[str, Any] = {
            "index": index,
            "message": _answered(turn, first + index),
            "finish_reason": _finish(turn),
        }
        choice["logprobs"] = _logprobs(turn) if asked.logprobs else None
        if asked.ids:
            choice["token_ids"] = list(turn.token_ids)
            choice["message"] |= {
                "prompt_token_ids": list(turn.prompt_ids),
                "generation_token_ids": list(turn.token_ids),
                "generation_log_probs": list(turn.logprobs),
            }
        choices.append(choice)
    found = {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": asked.model,
        "choices": choices,
        "usage": _usage(turns),
    }
    return found | ({"prompt_token_ids": list(turns[0].prompt_ids)} if asked.ids else {})


def events(asked: Asked, turns: Sequence[Turn], first: int, name: str) -> Iterator[bytes]:
    """The answer as server-sent events."""
    whole = answer(asked, turns, first, name)
    head = {key: whole[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}

    def chunk(choices: list[Any], **more: Any) -> bytes:
        return b"data: " + json.dumps(head | {"choices": choices} | more).encode() + b"\n\n"

    for choice in whole["choices"]:
        index, message = choice["index"], choice["message"]
        calls = [{"index": at, **each} for at, each in enumerate(message.get("tool_calls", ()))]
        parts: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        parts += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
        parts += [{"tool_calls": [each]} for each in calls]
        for at, delta in enumerate(parts):
            last = at == len(parts) - 1
            own = {"token_ids": choice["token_ids"]} if asked.ids and last else {}
            prompt = {"prompt_token_ids": whole["prompt_token_ids"]} if asked.ids and at == 0 else {}
            logprobs = choice["logprobs"] if last else None
            yield chunk(
                [{"index": index, "delta": delta, "finish_reason": None, "logprobs": logprobs, **own}], **prompt
            )
        yield chunk([{"index": index, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}])
    if asked.stream_usage:
        yield chunk([], usage=whole["usage"])
    yield b"data: [DONE]\n\n"


def _answered(turn: Turn, number: int) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": content_of(turn) or (None if turn.calls else "")}
    if turn.reasoning:
        found["reasoning_content"] = turn.reasoning
    if turn.calls:
        found["tool_calls"] = [
            {
                "id": call_id(number, at),
                "type": "function",
                "function": {"name": each.name, "arguments": json.dumps(each.arguments, ensure_ascii=False)},
            }
            for at, each in enumerate(turn.calls)
        ]
    return found


def _finish(turn: Turn) -> str:
    return "length" if turn.stop_reason == "length" else "tool_calls" if turn.calls else "stop"


def _logprobs(turn: Turn) -> dict[str, Any]:
    """Tokens are named by their ids, as vLLM does on request: a text may not say which token it was."""
    each = zip(turn.token_ids, turn.logprobs, strict=True)
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in each
        ],
        "refusal": None,
    }


def _usage(turns: Sequence[Turn]) -> dict[str, int]:
    prompt, sampled = turns[0].prompt_tokens, sum(len(turn.token_ids) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
