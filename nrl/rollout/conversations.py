"""The messages of an episode that is a chat: what is asked, what the policy said, and what is appended for new ones."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from nrl.backends.types import Completion
from nrl.data.encoding import encode
from nrl.data.forms import Form, as_taken, form
from nrl.data.messages import REASONING
from nrl.data.templates import render_chat
from nrl.envs.policy_inputs import read_observation
from nrl.envs.replies import Reply, opening_mark, split_reasoning
from nrl.envs.tools import Tool, parse, tool_format
from nrl.envs.types import Prompt, Request, Turn
from nrl.errors import EnvError, ModelError
from nrl.rollout.bridges import Extension, Fork, Sampled, extend, in_common
from nrl.rollout.sampler_client import NO_LIMITS, Limits

__all__ = ["Conversation"]


@attrs.frozen
class _Row:
    """A row of an episode as messages.

    Args:
        messages: what it says; only of a chat.
        turns: those that it has as they were sampled.
        schemas: of the tools that the policy has.
        chat: whether the messages are all that it says.
    """

    messages: list[Any]
    turns: list[Sampled]
    schemas: list[Any] | None
    chat: bool


class Conversation:
    """An episode as messages, beside its tokens.

    Args:
        prompt: what is asked, as `nrl.envs.return_values.read_prompt` gives it.
        tools: of `nrl.envs.tools.tool`; with some, a text is a message of the user.
        tokenizer: of the policy.
        max_tokens: how many ids of a prompt or an observation are wanted; longer texts are not encoded to their end.
            None: all.
    """

    def __init__(
        self, prompt: Prompt | Request, tools: Sequence[Tool], tokenizer: Any, max_tokens: int | None = None
    ) -> None:
        self._prompt, self._tokenizer, self._max_tokens = prompt, tokenizer, max_tokens
        self.is_request = isinstance(prompt, Mapping)  # whether what was asked last is an agent's
        self.limits = NO_LIMITS
        """Of the turn that is asked for."""
        self._apart = len(tools) > 0  # whether turns are taken apart
        self._ids = False  # whether they have the ids that they are made of
        self._said: list[Mapping[str, Any]] = []  # in each turn
        self._rows: list[_Row] = []  # the last is the one that goes on
        self._opened = ""  # what the prompt has begun reasoning with, as some templates do
        if isinstance(prompt, Mapping):
            if tools:
                raise EnvError("the environment's prompt is a request, and there are tools besides; put them into it")
            self._rows = [_Row([], [], None, chat=True)]
            return
        if tools and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if tools and not chat:
            raise EnvError("the environment has tools, and its prompt is token ids; give text or messages")
        self._offer([tool.schema for tool in tools] or None)
        self._rows = [_Row(list(prompt) if chat else [], [], self._schemas, chat)]

    def _offer(self, schemas: list[Any] | None) -> None:
        """Let the policy have these tools from here on."""
        self._schemas = schemas
        self._format = _format(self._tokenizer, schemas) if schemas else None
        self._form = form(self._tokenizer, schemas) if schemas else Form()

    def _asked(self, request: Mapping[str, Any]) -> list[Any]:
        """The messages of an agent's request, whose tools are offered from here on."""
        self._offer(list(request["tools"]) or None)
        self.is_request = self._apart = True
        self._ids = bool(request.get("ids"))
        self.limits = Limits(tuple(request.get("stop", ())), request.get("max_new_tokens"))
        return [self._as_said(each) for each in request["messages"]]

    def _as_said(self, message: Any) -> Any:
        """A message; in place of the number of a turn, what was said in it."""
        if not isinstance(message, Mapping) or "turn" not in message:
            return message
        turn = message["turn"]
        if isinstance(turn, bool) or not isinstance(turn, int) or not 0 <= turn < len(self._said):
            raise EnvError(
                f"the observation has a message of turn {turn!r}, and the model took {len(self._said)}; count from 0"
            )
        return self._said[turn]

    def asked(self, render: Callable[..., list[int]]) -> list[int]:
        """The token ids of the prompt; ``render`` those of one without tools.

        Raises:
            DataError: the chat template does not take it.
        """
        if isinstance(self._prompt, Mapping):
            return self._goes_on(self._asked(self._prompt), [[]])[1].appended
        if not self._apart:
            ids = render(self._prompt, self._tokenizer, max_tokens=self._max_tokens)
            self._opened = self._opening(ids)
            return ids
        asking = as_taken(self._rows[-1].messages, self._tokenizer, self._schemas)
        chat = render_chat(asking, self._tokenizer, asking=True, tools=self._schemas)
        ids = encode(chat, self._tokenizer, self._max_tokens)
        self._opened = self._opening(ids)
        return ids

    def _opening(self, ids: Sequence[int]) -> str:
        """The mark within which the policy goes on, and the white space behind it, as some templates ask it to."""
        return opening_mark(self._tokenizer.decode(ids[-16:]))

    def said(self, completion: Completion, row: Sequence[int]) -> Turn:
        """A turn of the policy, which ends a row of tokens, taken apart if there are tools."""
        tokens = completion.token_ids.tolist()
        prompt, whole = len(row) - len(tokens), ""
        reason: Any = "length" if completion.truncated else "stop"
        ids: Any = {"prompt_ids": row[:prompt], "logprobs": completion.logprobs.tolist()} if self._ids else {}
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        if self._apart:
            whole = self._tokenizer.decode(tokens)
            found = parse(whole, self._format, reasoning_open=bool(self._opened))
            own: Any = {"calls": found.calls, "malformed": found.malformed, "prompt_tokens": prompt, **ids}
            told: Any = {"reasoning": found.reasoning, "reasoning_ended": found.reasoning_ended}
            turn = Turn(found.text, tokens, reason, **own, **told)
        else:
            apart = self._reasoning_apart(text, tokens)
            turn = Turn(text, tokens, reason, prompt_tokens=prompt, **apart)
        calling = _calling(turn, self._form, self._opened, whole) if turn.calls else None
        self._said.append(calling or {"role": "assistant", "content": text})
        if (of_row := self._rows[-1]).chat:
            of_row.turns.append(Sampled(len(of_row.messages), prompt, len(row)))
            of_row.messages.append(self._said[-1])
        return turn

    def _reasoning_apart(self, text: str, tokens: list[int]) -> dict[str, Any]:
        """Reasoning and answer of a turn, as arguments of `Turn`, as far as its text does not say them."""
        if split_reasoning(text).reasoning:
            return {}
        whole = self._tokenizer.decode(tokens)  # marks may be special tokens, which the text lacks
        found = split_reasoning(whole, reasoning_open=bool(self._opened))
        if found.reasoning_ended and not found.reasoning:
            return {}
        special = [str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        answer, reasoning = (_without(part, special) for part in found[:2])
        return Reply(answer, reasoning, found.reasoning_ended)._asdict()

    def observed(self, observation: Any, rows: Sequence[Sequence[int]]) -> tuple[int, Extension]:
        """Which row the policy sees when it goes on, and how much of it, and the ids of what the environment answers.

        The row is another than the last one where a whole conversation goes on with what an earlier one says, as where
        agents take turns. Fewer tokens than all of it are kept where the environment changes what came before, or the
        chat template writes it in another way: then the episode forks. From here on the row is the last, and behind it
        the fork.

        Args:
            observation: of the environment.
            rows: the tokens of each row of the episode; the last is the one to which the policy added.

        Raises:
            EnvError: the observation cannot be read, or not here.
            DataError: the chat template does not take it.
        """
        observation = read_observation(observation, len(self._tokenizer), self._max_tokens)
        self.is_request, self.limits = False, NO_LIMITS
        row = self._rows[-1]
        if isinstance(observation, str):
            ids = encode(observation, self._tokenizer, self._max_tokens, spelled=True, continues=True)
            return self._appended(rows, ids)
        if isinstance(observation, Mapping):
            if "tools" in observation:
                return self._goes_on(self._asked(observation), rows)
            return self._goes_on([self._as_said(each) for each in observation["messages"]], rows)
        if not any(isinstance(part, Mapping) for part in observation):
            return self._appended(rows, observation)
        if not row.chat:
            raise EnvError(
                "the observation is messages, and the episode is no chat: its prompt or an observation before is text "
                "or token ids; give messages from the beginning, or text"
            )
        return self._goes_on([*row.messages, *observation], rows, of=len(rows) - 1)

    def _appended(self, rows: Sequence[Sequence[int]], tokens: list[int]) -> tuple[int, Extension]:
        """Go on with tokens, which no message says."""
        self._rows = [*self._rows[:-1], attrs.evolve(self._rows[-1], chat=False)]
        self._opened = self._opening(tokens)
        return len(rows) - 1, Extension(len(rows[-1]), tokens, None)

    def _goes_on(self, every: list[Any], rows: Sequence[Sequence[int]], of: int | None = None) -> tuple[int, Extension]:
        """Go on with a whole conversation: with a row that has the beginning, if the same tools were offered."""
        at = self._begins(every) if of is None else of
        row = self._rows[at]
        options: Any = {"tools": self._schemas, "max_tokens": self._max_tokens}
        if row.chat and (row.schemas == self._schemas or not row.messages):
            found = extend(rows[at], row.messages, row.turns, every, self._tokenizer, **options)
        else:
            found = extend([], [], [], every, self._tokenizer, **options)
            why = "other tools were offered" if row.chat else "what came before is no chat"
            found = found._replace(fork=Fork("rewritten", 0, why))
        turns = [turn for turn in row.turns if turn.stop <= found.kept]
        others = [each for each in self._rows if each is not row]
        self._rows = [*others, *([row] if found.fork else []), _Row(every, turns, self._schemas, chat=True)]
        self._opened = self._opening(found.appended)
        return at, found

    def _begins(self, every: list[Any]) -> int:
        """The row that a conversation goes on with; else the one with which it has the most in common; the newest."""
        best, at = (False, -1), len(self._rows) - 1
        for place, row in enumerate(self._rows):
            same = in_common(row.messages, every)
            found = same == len(row.messages), same
            if row.chat and row.schemas == self._schemas and found >= best:
                best, at = found, place
        return at


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


def _without(text: str, special: Sequence[str]) -> str:
    return re.sub("|".join(map(re.escape, special)), "", text).strip() if special else text


def _calling(turn: Turn, form: Form, opened: str, whole: str) -> dict[str, Any] | None:
    """The message of a turn that calls tools, as the chat template takes it; None: as one without calls."""
    thought, content = {}, turn.text
    if form.reasoning is not None:
        thought = {REASONING[0]: turn.reasoning} if turn.reasoning else {}
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
