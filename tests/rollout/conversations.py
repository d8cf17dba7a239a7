"""Conversations at random, as models, environments and clients make them, under the chat templates of real models.

What a template is known to do is written here a second time, by hand, for each template: how a model writes a turn, and
after which turns the template writes history in another way.
"""

import copy
import itertools
import json
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.chat_tokenizers import tokenizer

Message = dict[str, Any]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Find it.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string", "description": "What."}}},
        },
    }
    for name in ("find", "look_up")
]
WORDS = [
    *("the", "answer", "is", "42", "7.0", "Hi", "Hmm", "user", "assistant", "ANSWER0", "ANSWER1"),
    *("né", "ne\u0301", "日本", "עברית", "👩‍👩‍👧", "\u200b", "\ufeff", "\u2028", "\xa0", "ﬁ", "\x00", "\x1b[0m"),
    *("{", "}", '"', "\\", "'", "{{ x }}", "{% if %}", "```json", "<tool_call", "</a>", "<b>", "[LIST]", "&amp;", "|>"),
]
SPELLED = ["[INST]", "[/INST]", "</s>", "<|im_end|>", "<|im_start|>", "<|eot_id|>", "[TOOL_CALLS]", "<|end|>"]
SPACES = [" ", " ", " ", "", "\n", "\n\n", "  ", "\t", "\r\n", " \n "]


class Answer(NamedTuple):
    """A turn that was sampled.

    Args:
        ids: its tokens.
        message: how it is read.
        end: the special token that ended it, or nothing.
        exact: whether the template writes the message as it was sampled. If not, it trims white space or writes a call
            in its own words, or the turn was cut, ended by another token, or has noise in it.
    """

    ids: list[int]
    message: Message
    end: str
    exact: bool


class Family(NamedTuple):
    """What a template is known to do.

    Args:
        ends: the token that ends a turn that is no call, and one that is.
        other: a token that ends a turn, too, and that the template does not write.
        write: the text of a turn, as sampled, and whether the template writes the same, of reasoning, content, calls.
        forks: whether the template writes history in another way, of it, the last answer, what is new, and tools.
        roles: of messages that an environment may send after an answer that is no call.
        calls: how many calls an answer may have.
        reasoning: the name of the field for reasoning; None: the template reads none.
    """

    ends: tuple[str, str]
    other: str
    write: Callable[[str, str, list[Message], bool], tuple[str, bool]]
    forks: Callable[[list[Message], Answer, list[Message], Any], bool]
    roles: tuple[str, ...] = ("user", "user+user", "system+user")
    calls: tuple[int, ...] = (1,)
    reasoning: str | None = None


def qwen2_5(reasoning: str, content: str, calls: list[Message], after_tool: bool) -> tuple[str, bool]:
    said = think(reasoning, "\n\n") + content
    # Without content, the generation prompt's line end is the one before the call
    return said + hermes(calls, first="\n" if said else ""), True


def qwen3(reasoning: str, content: str, calls: list[Message], after_tool: bool) -> tuple[str, bool]:
    said = think(reasoning, "\n\n") + content
    exact = reasoning == reasoning.strip("\n") and not (reasoning and content.startswith("\n"))
    return said + hermes(calls, first="\n" if content else ""), exact


def llama(reasoning: str, content: str, calls: list[Message], after_tool: bool) -> tuple[str, bool]:
    said = think(reasoning, "\n\n") + content
    if calls:
        call = calls[0]["function"]
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        return f'{{"name": "{call["name"]}", "parameters": {arguments}}}', True
    return said, said == said.strip()


def gemma(reasoning: str, content: str, calls: list[Message], after_tool: bool) -> tuple[str, bool]:
    said = think(reasoning, "\n\n") + content
    return said, said == said.strip()


def deepseek(reasoning: str, content: str, calls: list[Message], after_tool: bool) -> tuple[str, bool]:
    said = (f"{reasoning}\n</think>" if reasoning and not after_tool else "") + content
    if calls:
        call = calls[0]["function"]
        said += "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>" + call["name"]
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        said += f"\n```json\n{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    return said, True


def glm(reasoning: str, content: str, calls: list[Message], after_tool: bool) -> tuple[str, bool]:
    said = f"\n<think>{reasoning}</think>" + (f"\n{content}" if content.strip() else "")
    for call in calls:
        said += f"\n<tool_call>{call['function']['name']}\n"
        said += "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in call["function"]["arguments"].items()
        )
        said += "</tool_call>"
    return said, reasoning == reasoning.strip() and content == content.strip()


def mistral(reasoning: str, content: str, calls: list[Message], after_tool: bool) -> tuple[str, bool]:
    said = think(reasoning, "\n\n") + content
    for call in calls:
        function = call["function"]
        said += f"[TOOL_CALLS]{function['name']}[ARGS]{json.dumps(function['arguments'], ensure_ascii=False)}"
    return said, True


def mistral_v11(reasoning: str, content: str, calls: list[Message], after_tool: bool) -> tuple[str, bool]:
    said = think(reasoning, "\n\n") + content
    for call in calls:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        said += f"[TOOL_CALLS]{function['name']}[CALL_ID]{call['id']}[ARGS]{arguments}"
    return said, True


def mistral_v3(reasoning: str, content: str, calls: list[Message], after_tool: bool) -> tuple[str, bool]:
    if calls:
        made = [{**call["function"], "id": call["id"]} for call in calls]
        return f"[TOOL_CALLS] {json.dumps(made, ensure_ascii=False)}", True
    return think(reasoning, "\n\n") + content, False  # the template writes a space before it


def gpt(reasoning: str, content: str, calls: list[Message], after_tool: bool) -> tuple[str, bool]:
    said = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
    if calls:
        call = calls[0]["function"]
        said += f" to=functions.{call['name']}<|channel|>commentary json<|message|>"
        return said + json.dumps(call["arguments"], ensure_ascii=False), True
    return said + f"<|channel|>final<|message|>{content}", not reasoning


def think(reasoning: str, then: str) -> str:
    return f"<think>\n{reasoning}\n</think>{then}" if reasoning else ""


def hermes(calls: list[Message], first: str) -> str:
    texts = [
        f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": '
        f"{json.dumps(call['function']['arguments'], ensure_ascii=False)}}}\n</tool_call>"
        for call in calls
    ]
    return first + "\n".join(texts) if texts else ""


def never(history: list[Message], answer: Answer, new: list[Message], tools: Any) -> bool:
    return False


def tools_move(history: list[Message], answer: Answer, new: list[Message], tools: Any) -> bool:
    """The templates of Mistral before version 13 write the tools before the last message of the user."""
    return bool(tools) and any(message["role"] == "user" for message in new)


def tools_and_system_move(history: list[Message], answer: Answer, new: list[Message], tools: Any) -> bool:
    """That of version 3 writes the words of the system there, too."""
    system = any(message["role"] == "system" and message["content"] for message in history)
    return tools_move(history, answer, new, tools or system)


def thought(message: Message) -> str:
    """The reasoning that Qwen 3's and GLM's templates find in a message."""
    content = message.get("content") or ""
    if isinstance(message.get("reasoning_content"), str):
        return str(message["reasoning_content"])
    return content.split("</think>")[0].split("<think>")[-1].strip("\n") if "</think>" in content else ""


def since_the_last_user(history: list[Message]) -> list[Message]:
    last = max((at for at, message in enumerate(history) if message["role"] == "user"), default=-1)
    return [message for message in history[last + 1 :] if message["role"] == "assistant"]


def user_ends_thinking(history: list[Message], answer: Answer, new: list[Message], tools: Any) -> bool:
    content = history[-1].get("content") or ""
    if "</think>" in content and content.split("</think>")[0].rpartition("<think>")[0].split():
        return True  # words before the reasoning are left out
    return any(message["role"] == "user" for message in new) and any(map(thought, since_the_last_user(history)))


def only_after_tools(history: list[Message], answer: Answer, new: list[Message], tools: Any) -> bool:
    """DeepSeek V3's template keeps an answer to a tool, and a first call whose reasoning is in its content."""
    systems = [message["content"] for message in [*history, *new] if message["role"] == "system"]
    if new[0]["role"] == "system" and (len(systems) > 1 or systems[0]):
        return True  # it joins the others at the beginning
    calls = [message for message in history if "tool_calls" in message]
    if history[-2]["role"] == "tool":
        return "tool_calls" in history[-1]
    return not (calls == [history[-1]] and history[-1]["content"].startswith("<think>\n"))


def only_before_tools(history: list[Message], answer: Answer, new: list[Message], tools: Any) -> bool:
    """gpt-oss' template keeps the reasoning before a call until there is an answer, and ends an answer in two ways."""
    if "tool_calls" in history[-1]:
        return False
    earlier = [message for message in history[:-1] if message["role"] == "assistant"]
    for message in reversed(earlier):
        if "tool_calls" not in message:
            break
        if message.get("thinking") or message.get("content"):
            return True
    return answer.end == "<|return|>" or bool(history[-1].get("thinking"))


IM_END = ("<|im_end|>", "<|im_end|>")
EOS = ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
EOT = ("<|eot_id|>", "<|eot_id|>")
TURN = ("<end_of_turn>", "<end_of_turn>")
ROLES = ("user", "user+user")
FAMILIES = {
    "chatml": Family(IM_END, "<|endoftext|>", qwen2_5, never, calls=(0,)),
    "qwen2_5": Family(IM_END, "<|endoftext|>", qwen2_5, never, calls=(1, 1, 2)),
    "qwen3": Family(IM_END, "<|endoftext|>", qwen3, user_ends_thinking, calls=(1, 1, 2), reasoning="reasoning_content"),
    "llama3_1": Family(EOT, "<|start_header_id|>", llama, never),
    "deepseekv3": Family(EOS, "<｜tool▁sep｜>", deepseek, only_after_tools),
    "mistral_v3": Family(("</s>", "</s>"), "<s>", mistral_v3, tools_and_system_move, roles=ROLES, calls=(1, 1, 2)),
    "mistral_v11": Family(("</s>", "</s>"), "<s>", mistral_v11, tools_move, roles=ROLES, calls=(1, 1, 2)),
    "mistral_v13": Family(("</s>", "</s>"), "<s>", mistral, never, roles=ROLES, calls=(1, 1, 2)),
    "gemma3": Family(TURN, "<eos>", gemma, never, roles=("user",), calls=(0,)),
    "glm4moe": Family(
        *(("<|user|>", "<|observation|>"), "<|endoftext|>", glm, user_ends_thinking),
        calls=(1, 1, 2),
        reasoning="reasoning_content",
    ),
    "gptoss": Family(
        ("<|return|>", "<|call|>"), "<|endoftext|>", gpt, only_before_tools, roles=ROLES, reasoning="thinking"
    ),
}


def ending(name: str, answer: Message, after: Message) -> str:
    """The token with which the template ends an answer that another message follows."""
    if name == "glm4moe":
        return {"user": "<|user|>", "tool": "<|observation|>", "system": "<|system|>"}[after["role"]]
    if name == "gptoss":
        return "<|call|>" if "tool_calls" in answer else "<|end|>"
    return FAMILIES[name].ends[0]


def text(rng: random.Random, most: int = 6) -> str:
    words = "".join(rng.choice(SPACES) + rng.choice(WORDS) for _ in range(rng.randint(0, most)))
    return words + rng.choice(SPACES) if rng.random() < 0.3 else words.lstrip(" ")


def encoded(rng: random.Random, said: str, name: str) -> list[int]:
    """Tokens of a text as a model may sample them: mostly not those into which a tokenizer would cut it."""
    of = tokenizer(name)
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, of.get_added_vocab())) + ")", said):
        cuts = sorted({0, len(part), *(rng.randrange(len(part) + 1) for _ in range(rng.choice([0, 0, 1, 3])))})
        if part in of.get_added_vocab():
            cuts = [0, len(part)]
        for start, stop in itertools.pairwise(cuts):
            ids += of.encode(part[start:stop], add_special_tokens=False)
    return ids


def answer(rng: random.Random, name: str, history: list[Message]) -> Answer:
    """A turn: answer or calls, with reasoning or without, whole, cut, ended by another token, or with noise in it."""
    of, family = tokenizer(name), FAMILIES[name]
    special = [token for token, added in of.added_tokens_decoder.items() if added.special]
    plain = [token for token in range(len(of)) if token not in of.added_tokens_decoder]
    after_tool = history[-1]["role"] == "tool"
    reasoning = (text(rng) + "Hmm" + text(rng, 1)) if rng.random() < 0.5 else ""
    calls = [call(rng, name, at) for at in range(rng.choice(family.calls))] if rng.random() < 0.5 else []
    content = "" if calls and name in ("llama3_1", "gptoss", "mistral_v3") else text(rng)
    said, exact = family.write(reasoning, content, calls, after_tool)
    ids = encoded(rng, said, name)
    how = rng.choices(["whole", "cut", "otherwise", "noise"], [12, 3, 1, 2])[0]
    if how == "cut":
        ids = ids[: rng.randrange(len(ids) + 1)]
    if how == "noise":
        for _ in range(rng.randint(1, 4)):
            at, token = rng.randrange(len(ids) + 1), rng.choice(SPELLED)
            spelled = [part for letter in token for part in of.encode(letter, add_special_tokens=False)]
            ids[at:at] = rng.choice([[rng.choice(special)], [rng.choice(plain)], spelled])
    read: Message = {"role": "assistant", "content": of.decode(ids, skip_special_tokens=True)}
    if how in ("whole", "otherwise") and (calls or (family.reasoning and rng.random() < 0.7)):
        read = {"role": "assistant", "content": content}
        if family.reasoning and reasoning:
            read[family.reasoning] = reasoning
        if name in ("qwen2_5", "mistral_v11", "mistral_v13"):
            read["content"] = think(reasoning, "\n\n") + content
        if name == "deepseekv3" and reasoning and not after_tool and rng.random() < 0.8:
            read["content"] = f"<think>\n{reasoning}\n</think>{content}"
        if calls:
            read["tool_calls"] = calls
    elif name == "gptoss":
        exact = False  # the channel's name is in the text, and the template adds another
    end = {"cut": "", "otherwise": family.other}.get(how, family.ends[bool(calls)])
    return Answer(ids + ([of.convert_tokens_to_ids(end)] if end else []), read, end, exact and how == "whole")


def call(rng: random.Random, name: str, at: int) -> Message:
    arguments: Any = {"q": text(rng)}
    if name != "glm4moe":
        arguments["n"] = rng.choice([1, 2.5, True, None, ["a", {}]])
    function = {"name": rng.choice(TOOLS)["function"]["name"], "arguments": arguments}
    return {"id": f"call{at:05}", "type": "function", "function": function}


def observation(rng: random.Random, name: str, last: Answer) -> list[Message]:
    """What an environment sends: results of calls, and a question after them; or questions."""
    message = last.message
    if "tool_calls" in message:
        results = [{"role": "tool", "content": text(rng), "tool_call_id": call["id"]} for call in message["tool_calls"]]
        return [*results, {"role": "user", "content": text(rng)}] if rng.random() < 0.2 else results
    roles = rng.choices(FAMILIES[name].roles, [6, 1, 1][: len(FAMILIES[name].roles)])[0]
    return [{"role": role, "content": text(rng)} for role in roles.split("+")]


def echoed(rng: random.Random, history: list[Message]) -> list[Message]:
    """The history as a client sends it back: the same words, sometimes with fields that say nothing."""
    sent = copy.deepcopy(history)
    for message in sent:
        if rng.random() < 0.2:
            message["refusal"] = None
    return sent


def changed(rng: random.Random, name: str, history: list[Message]) -> tuple[list[Message], int]:
    """The history with something changed, and the first message that is another."""
    sent = copy.deepcopy(history)
    at = rng.randrange(len(sent))
    kind = rng.choice(["edited", "space", "thought", "compacted", "arguments"])
    reasoned = [place for place, message in enumerate(sent) if message.get(FAMILIES[name].reasoning or "")]
    called = [place for place, message in enumerate(sent) if message.get("tool_calls")]
    if kind == "thought" and reasoned:
        at = rng.choice(reasoned)
        del sent[at][str(FAMILIES[name].reasoning)]
    elif kind == "arguments" and called:
        at = rng.choice(called)
        call = sent[at]["tool_calls"][-1]["function"]
        other = {"q": f"other {rng.random()}"}
        call["arguments"] = other
    elif kind == "compacted" and len(sent) > 4 and not called:
        at = 1 if sent[0]["role"] == "system" else 0
        sent[at : at + 3] = [{"role": "user", "content": f"In short {rng.random()}: " + text(rng)}]
    else:
        content = sent[at].get("content") or ""
        sent[at]["content"] = content + "\n" if kind == "space" else "changed " + content
    return sent, at


def started(rng: random.Random, name: str) -> list[Message]:
    system = [{"role": "system", "content": text(rng)}] if rng.random() < 0.4 else []
    return [*system, {"role": "user", "content": text(rng)}]
