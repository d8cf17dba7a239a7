"""The messages of an episode that is a chat: what is asked, what the policy said, and what is appended for new ones."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from nrl.data.rendering import encode, templated
from nrl.envs.contract import Prompt, Turn
from nrl.envs.tools import Tool, parse, tool_format
from nrl.episodes.bridges import Extension, Fork, Sampled, extend
from nrl.episodes.forms import Form, as_taken, form
from nrl.errors import EnvError, ModelError

__all__ = ["Conversation", "is_prompt"]


def is_prompt(given: Any) -> bool:
    """Whether this is text, messages or token ids.

    >>> is_prompt("1+1="), is_prompt([{"role": "user", "content": "1+1="}]), is_prompt([5, 6]), is_prompt(5)
    (True, True, True, False)
    """
    if isinstance(given, str):
        return True
    if isinstance(given, Mapping) or not isinstance(given, Sequence | np.ndarray | Tensor):
        return False
    kinds = {type(each) if isinstance(each, str) else isinstance(each, Mapping) for each in given}
    return len(kinds) < 2 and str not in kinds


class Conversation:
    """An episode as messages, beside its tokens.

    Args:
        prompt: what is asked.
        tools: of `nrl.envs.tools.tool`; with some, a text is a message of the user.
        tokenizer: of the policy.
    """

    def __init__(self, prompt: Prompt, tools: Sequence[Any], tokenizer: Any) -> None:
        if isinstance(tools, Tool) or any(not isinstance(each, Tool) for each in tools):
            raise EnvError(
                "the environment's reset returned something else than a list of tools as its third value; make each of "
                "a function, by nrl.envs.tools.tool"
            )
        if tools and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        self._chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if tools and not self._chat:
            raise EnvError("the environment has tools, and its prompt is token ids; give text or messages")
        self._messages: list[Any] = list(prompt) if self._chat else []
        self._opened = ""  # what the prompt has begun reasoning with, as some templates do
        self._turns: list[Sampled] = []  # those that the row has as they were sampled
        self._prompt, self._tokenizer = prompt, tokenizer
        self._schemas = [tool.schema for tool in tools] or None
        self._format = _format(tokenizer, self._schemas) if tools else None
        self._form = form(tokenizer, self._schemas) if tools else Form()

    def asked(self, render: Callable[[Prompt, Any], list[int]]) -> list[int]:
        """The token ids of the prompt; ``render`` those of one without tools."""
        if self._schemas is None:
            return render(self._prompt, self._tokenizer)
        asking = as_taken(self._messages, self._tokenizer, self._schemas)
        ids = encode(templated(asking, self._tokenizer, asking=True, tools=self._schemas), self._tokenizer)
        self._opened = self._opening(ids)
        return ids

    def _opening(self, ids: Sequence[int]) -> str:
        """The mark within which the policy goes on, and the white space behind it, as some templates ask it to."""
        found = re.search(r"(<think>|\[THINK\])\s*\Z", self._tokenizer.decode(ids[-16:]))
        return found[0] if found else ""

    def said(self, tokens: Sequence[int], truncated: bool, end: int) -> Turn:
        """A turn of the policy, which ends a row of ``end`` tokens, taken apart if there are tools."""
        text, whole = self._tokenizer.decode(tokens, skip_special_tokens=True), ""
        reason: Any = "length" if truncated else "stop"
        turn = Turn(text, tokens, reason)
        if self._format is not None:
            whole = self._tokenizer.decode(tokens)
            found = parse(whole, self._format, reasoning_open=bool(self._opened))
            turn = Turn(found.text, tokens, reason, found.calls, found.malformed, found.reasoning)
        if self._chat:
            self._turns.append(Sampled(len(self._messages), end - len(tokens), end))
            calling = _calling(turn, self._form, self._opened, whole) if turn.calls else None
            self._messages.append(calling or {"role": "assistant", "content": text})
        return turn

    def observed(self, observation: Any, tokens: Sequence[int]) -> Extension:
        """How many tokens of the row the policy sees when it goes on, and the ids of what the environment answers.

        They are fewer where the environment changes what came before, or the chat template writes it in another way:
        then the episode forks.

        Raises:
            EnvError: the observation is nothing that can be appended.
        """
        if observation is None:
            raise EnvError(
                "the step is not done, and it has no observation; return Step(..., done=True) or an observation"
            )
        if isinstance(observation, str):
            self._chat = False  # the messages do not say it
            return Extension(len(tokens), list(self._tokenizer.encode(observation, add_special_tokens=False)), None)
        if isinstance(observation, Mapping):
            return self._goes_on(_whole(observation), tokens)
        if not is_prompt(observation):
            raise EnvError(f"the observation is {observation!r:.200}; return text, messages or token ids")
        if not any(isinstance(part, Mapping) for part in observation):
            self._chat = False
            return Extension(len(tokens), [int(token) for token in observation], None)
        if not self._chat:
            raise EnvError(
                "the observation is messages, and the episode is no chat: its prompt or an observation before is text "
                "or token ids; give messages from the beginning, or text"
            )
        return self._goes_on([*self._messages, *observation], tokens)

    def _goes_on(self, every: list[Any], tokens: Sequence[int]) -> Extension:
        """Go on with a whole conversation, of which the row may have the beginning."""
        if self._chat:
            found = extend(tokens, self._messages, self._turns, every, self._tokenizer, tools=self._schemas)
        else:
            found = extend([], [], [], every, self._tokenizer, tools=self._schemas)
            found = found._replace(fork=Fork("rewritten", 0, "what came before is no chat"))
        self._chat, self._messages = True, every
        self._turns = [turn for turn in self._turns if turn.stop <= found.kept]
        self._opened = self._opening(found.appended)
        return found


def _whole(observation: Mapping[str, Any]) -> list[Any]:
    """The conversation that an observation is the whole of."""
    if "role" in observation:
        raise EnvError("the observation is one message; return a list of messages")
    messages = observation.get("messages")
    if set(observation) != {"messages"} or not isinstance(messages, Sequence) or isinstance(messages, str):
        raise EnvError(
            f"the observation is {observation!r:.200}; return {{'messages': [...]}} with the whole conversation, "
            "a list of messages to append, text, or token ids"
        )
    return list(messages)


def _format(tokenizer: Any, schemas: Any) -> str:
    try:
        return tool_format(tokenizer.get_chat_template(tools=schemas))
    except (ModelError, ValueError) as error:
        found = str(error).partition("!")[0].partition(";")[0]
        name = f" {tokenizer.name_or_path!r}" if tokenizer.name_or_path else ""
        raise ModelError(
            f"rollout: the environment has tools, and the chat template of the model's tokenizer{name} does "
            f"not say how to call them ({found}); take a model whose template does, set tokenizer.chat_template, or, "
            "of the tiny model, tiny.model(tokenizer=tiny.bpe([...]))"
        ) from error


def _calling(turn: Turn, form: Form, opened: str, whole: str) -> dict[str, Any] | None:
    """The message of a turn that calls tools, as the chat template takes it; None: as one without calls."""
    thought, content = {}, turn.text
    if form.reasoning is not None:
        thought = {form.reasoning: turn.reasoning} if turn.reasoning else {}
    elif turn.reasoning or opened:  # what the prompt opened is the template's to write again
        begin, end = ("[THINK]", "[/THINK]") if "[/THINK]" in whole else ("<think>", "</think>")
        begin = opened or (f"{begin}\n" if begin in whole else "")
        content = f"{begin}{turn.reasoning}\n{end}\n\n{turn.text}".rstrip()
    lost = (content and not form.content) or (len(turn.calls) > 1 and not form.several)
    if lost and form.plain:
        return None
    calls = [
        {"type": "function", "function": {"name": each.name, "arguments": each.arguments}}
        | ({} if each.id is None else {"id": each.id})
        for each in turn.calls
    ]
    return {"role": "assistant", "content": content, **thought, "tool_calls": calls}
