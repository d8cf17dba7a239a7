"""OpenAI's Responses: requests, answers, and answers as a stream."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nrl.envs.types import Turn
from nrl.gym.endpoint.chat_request import Asked, arguments_of, call_id, chat_tools, content_of, content_text
from nrl.gym.endpoint.fields import (
    MESSAGES,
    Unusable,
    check_length,
    check_wishes,
    flag_of,
    sampling_of,
    shown,
    text_of,
)

__all__ = ["answer", "events", "messages_of", "output_of", "read"]

_UNMET = ("background", "conversation", "prompt", "reasoning", "text", "top_logprobs", "truncation")
_OWN = ("reasoning", "message", "function_call")  # what a turn of the model is made of, in this order
_BEFORE = len(_OWN)  # no turn of the model
_ROLES = ("system", "developer", "user", "assistant")


def read(body: Any, earlier: Sequence[Mapping[str, Any]] = ()) -> Asked:
    """What a request asks.

    Args:
        body: of the request.
        earlier: the messages that its ``previous_response_id`` stands for.

    Raises:
        Unusable: it cannot be answered; the message says why.

    >>> read({"input": "1+1=", "instructions": "Be brief."}).messages
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '1+1='}]
    """
    if not isinstance(body, Mapping):
        raise Unusable(f"the request is {type(body).__name__}; send an object with 'input'")
    given = body.get("input")
    if not given or not isinstance(given, str | list):
        raise Unusable("input: there is none; send a text, or a list of items", param="input")
    check_length("input", given if isinstance(given, list) else [], MESSAGES)
    check_wishes(body)
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    told = body.get("instructions")
    if told is not None and not isinstance(told, str):
        raise Unusable(f"instructions is {shown(told)}; give a text", param="instructions")
    found = [{"role": "system", "content": told}] if told else []
    found += [*map(dict, earlier), *messages_of(items)]
    if len(found) > MESSAGES:
        raise Unusable(
            f"input: with previous_response_id's own, the request has {len(found)} messages; send at most {MESSAGES}",
            param="input",
        )
    if found[-1]["role"] == "assistant":
        raise Unusable("input: the last item is the assistant's, which leaves nothing to answer", param="input")
    choice, include = body.get("tool_choice"), body.get("include") or []
    check_length("include", include, 100)
    unmet = [name for name in _UNMET if _wishes(body.get(name))]
    unmet += ["parallel_tool_calls"] if body.get("parallel_tool_calls") is False else []
    if choice not in (None, "auto", "none"):
        unmet.append("tool_choice")
    return Asked(
        messages=found,
        tools=[] if choice == "none" else chat_tools(body.get("tools")),
        stream=flag_of(body, "stream"),
        stored=flag_of(body, "store", True),
        logprobs="message.output_text.logprobs" in include,
        ids=flag_of(body, "return_token_ids"),
        model=text_of(body, "model"),
        sampling=sampling_of(body, "max_output_tokens"),
        unmet=tuple(unmet),
    )


def _wishes(value: Any) -> bool:
    """Whether a field says more than what is done anyway."""
    return value not in (None, True, 0, "disabled", {}, {"format": {"type": "text"}})


def messages_of(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Items of a conversation as messages: what the model thought, said and called in one turn is one message.

    Raises:
        Unusable: an item of another type.

    >>> call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    >>> found = messages_of([{"role": "user", "content": "1+1="}, call])
    >>> found[1]["role"], found[1]["tool_calls"]
    ('assistant', [{'id': 'c', 'name': 'add', 'arguments': {}}])
    """
    found, last = list[dict[str, Any]](), _BEFORE
    for at, item in enumerate(items):
        where = f"input[{at}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else type(item).__name__
        own = kind in _OWN and (kind != "message" or item.get("role") == "assistant")
        rank = _OWN.index(kind) if own else _BEFORE
        if own:
            if rank < last or (rank == last and kind != "function_call"):
                found.append({"role": "assistant", "content": ""})
            _add(found[-1], kind, item, where)
        elif kind == "function_call_output":
            found.append(
                {"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": _output(item, where)}
            )
        elif kind == "message" and item.get("role") in _ROLES:
            role = "system" if item["role"] == "developer" else item["role"]
            found.append({"role": role, "content": content_text(item.get("content"), where)})
        else:
            raise Unusable(
                f"{where}: an item of the type {shown(kind)} and the role {shown(item.get('role'))}; give messages, "
                "reasoning, function_call and function_call_output"
                if isinstance(item, Mapping)
                else f"{where}: it is {kind}; give objects",
                param=where,
            )
        last = rank
    return found


def _add(message: dict[str, Any], kind: str, item: Mapping[str, Any], where: str) -> None:
    """Add an item of the model's to the message of its turn."""
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary")
        message["reasoning"] = content_text(parts, where)
    elif kind == "message":
        message["content"] += content_text(item.get("content"), where)
    else:
        name = item.get("name")
        if not isinstance(name, str):
            raise Unusable(f"{where}: it is no call of a function with a name", param=where)
        call = {"id": str(item.get("call_id") or ""), "name": name, "arguments": arguments_of(item.get("arguments"))}
        message.setdefault("tool_calls", []).append(call)


def _output(item: Mapping[str, Any], where: str) -> str:
    output = item.get("output")
    return content_text(output, where) if isinstance(output, str | list) else json.dumps(output, ensure_ascii=False)


def answer(asked: Asked, turns: Sequence[Turn], first: int, name: str) -> dict[str, Any]:
    """The answer to a request, of one turn.

    Args:
        asked: the request.
        turns: one.
        first: its number.
        name: of this answer.
    """
    (turn,) = turns
    cut = turn.stop_reason == "length"
    prompt, sampled = turn.prompt_tokens, len(turn.token_ids)
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": asked.model,
        "output": output_of(asked, turn, first, name),
        "parallel_tool_calls": True,
        "temperature": asked.sampling.get("temperature"),
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in asked.tools],
        "top_p": asked.sampling.get("top_p"),
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def output_of(asked: Asked, turn: Turn, number: int, name: str) -> list[dict[str, Any]]:
    """The items of a turn; arguments as of `answer`."""
    found = list[dict[str, Any]]()
    if turn.reasoning:
        thought = [{"type": "summary_text", "text": turn.reasoning}]
        found.append({"id": f"rs_{name}", "type": "reasoning", "summary": thought, "status": "completed"})
    text = content_of(turn)
    if text or not turn.calls:
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        if asked.logprobs:
            each = zip(turn.token_ids, turn.logprobs, strict=True)
            part["logprobs"] = [
                {"token": f"token_id:{token}", "logprob": logprob, "bytes": [], "top_logprobs": []}
                for token, logprob in each
            ]
        status = "incomplete" if turn.stop_reason == "length" else "completed"
        found.append({"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [part]})
    for at, each in enumerate(turn.calls):
        own = call_id(number, at)
        arguments = json.dumps(each.arguments, ensure_ascii=False)
        found.append(
            {"id": f"fc_{name}_{at}", "type": "function_call", "call_id": own, "name": each.name}
            | {"arguments": arguments, "status": "completed"}
        )
    if asked.ids:
        found[-1] |= {
            "prompt_token_ids": list(turn.prompt_ids),
            "generation_token_ids": list(turn.token_ids),
            "generation_log_probs": list(turn.logprobs),
        }
    return found


def events(asked: Asked, turns: Sequence[Turn], first: int, name: str) -> Iterator[bytes]:
    """The answer as server-sent events."""
    whole, number = answer(asked, turns, first, name), 0

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        said = json.dumps({"type": kind, "sequence_number": number, **fields})
        number += 1
        return f"event: {kind}\ndata: {said}\n\n".encode()

    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        empty = {"message": {"content": []}, "function_call": {"arguments": ""}, "reasoning": {"summary": []}}
        yield event(
            "response.output_item.added",
            output_index=index,
            item=item | empty[item["type"]] | {"status": "in_progress"},
        )
        if item["type"] == "message":
            part = item["content"][0]
            text, at = part["text"], at | {"content_index": 0}
            logprobs = part.get("logprobs", [])
            yield event("response.content_part.added", **at, part=part | {"text": ""})
            yield event("response.output_text.delta", **at, delta=text, logprobs=logprobs)
            yield event("response.output_text.done", **at, text=text, logprobs=logprobs)
            yield event("response.content_part.done", **at, part=part)
        elif item["type"] == "function_call":
            yield event("response.function_call_arguments.delta", **at, delta=item["arguments"])
            yield event("response.function_call_arguments.done", **at, arguments=item["arguments"], name=item["name"])
        else:
            (part,) = item["summary"]
            at |= {"summary_index": 0}
            yield event("response.reasoning_summary_part.added", **at, part=part | {"text": ""})
            yield event("response.reasoning_summary_text.delta", **at, delta=part["text"])
            yield event("response.reasoning_summary_text.done", **at, text=part["text"])
            yield event("response.reasoning_summary_part.done", **at, part=part)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.incomplete" if whole["status"] == "incomplete" else "response.completed", response=whole)
