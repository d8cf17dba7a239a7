"""The messages of an episode that is a chat: the prompt, the turns of the policy, and the observations."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from nrl.backends.types import Completion
from nrl.data.encoding import encode
from nrl.data.forms import Form, form, to_template_form
from nrl.data.messages import REASONING
from nrl.data.templates import render_chat
from nrl.envs.policy_inputs import read_observation
from nrl.envs.replies import Reply, opening_mark, split_reasoning
from nrl.envs.tools import Tool, parse, tool_format
from nrl.envs.types import Prompt, Request, Turn
from nrl.errors import EnvError, ModelError
from nrl.rollout.bridges import Extension, Sampled, TraceFork, count_common, extend
from nrl.rollout.sampler_client import NO_LIMITS, TurnLimits

__all__ = ["Conversation"]


@attrs.frozen
class _ConversationRow:
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
        prompt: what is asked, as `nrl.envs.policy_inputs.read_prompt` gives it.
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
        self._parses_turns = len(tools) > 0  # whether turns are taken apart
        self._with_ids = False  # whether they have the ids that they are made of
        self._turn_messages: list[Mapping[str, Any]] = []  # the message of each turn
        self._rows: list[_ConversationRow] = []  # the last is the one that goes on
        self._opened = ""  # the reasoning mark that ends the prompt, as some templates write it
        if isinstance(prompt, Mapping):
            if tools:
                raise EnvError("the environment's prompt is a request, and there are tools besides; put them into it")
            self._rows = [_ConversationRow([], [], None, chat=True)]
            return
        if tools and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if tools and not chat:
            raise EnvError("the environment has tools, and its prompt is token ids; give text or messages")
        self._offer([tool.schema for tool in tools] or None)
        self._rows = [_ConversationRow(list(prompt) if chat else [], [], self._schemas, chat)]

    def _offer(self, schemas: list[Any] | None) -> None:
        """Offer these tools to the policy from here on."""
        self._schemas = schemas
        self._format = _format(self._tokenizer, schemas) if schemas else None
        self._form = form(self._tokenizer, schemas) if schemas else Form()

    def _read_request(self, request: Mapping[str, Any]) -> list[Any]:
        """Return the messages of an agent's request, and offer its tools from here on."""
        self._offer(list(request["tools"]) or None)
        self.is_request = self._parses_turns = True
        self._with_ids = bool(request.get("ids"))
        self.limits = TurnLimits(tuple(request.get("stop", ())), request.get("max_new_tokens"))
        return [self._resolve_turn(message) for message in request["messages"]]

    def _resolve_turn(self, message: Any) -> Any:
        """Return a message; the number of a turn stands for the message of that turn."""
        if not isinstance(message, Mapping) or "turn" not in message:
            return message
        turn = message["turn"]
        if isinstance(turn, bool) or not isinstance(turn, int) or not 0 <= turn < len(self._turn_messages):
            raise EnvError(
                f"the observation has a message of turn {turn!r}, and the model took {len(self._turn_messages)}; count "
                "from 0"
            )
        return self._turn_messages[turn]

    def render_prompt(self, render: Callable[..., list[int]]) -> list[int]:
        """Return the token ids of the prompt; ``render`` computes those of a prompt without tools.

        Raises:
            DataError: the chat template does not take it.
        """
        if isinstance(self._prompt, Mapping):
            return self._continue_with(self._read_request(self._prompt), [[]])[1].appended
        if not self._parses_turns:
            ids = render(self._prompt, self._tokenizer, max_tokens=self._max_tokens)
            self._opened = self._opening(ids)
            return ids
        asking = to_template_form(self._rows[-1].messages, self._tokenizer, self._schemas)
        chat = render_chat(asking, self._tokenizer, asking=True, tools=self._schemas)
        ids = encode(chat, self._tokenizer, self._max_tokens)
        self._opened = self._opening(ids)
        return ids

    def _opening(self, ids: Sequence[int]) -> str:
        """Return the reasoning mark that ends a prompt, with the white space behind it; empty: none."""
        return opening_mark(self._tokenizer.decode(ids[-16:]))

    def add_turn(self, completion: Completion, row: Sequence[int]) -> Turn:
        """Add a turn of the policy, which ends a row of tokens; it is parsed if there are tools."""
        tokens = completion.token_ids.tolist()
        prompt, full_text = len(row) - len(tokens), ""
        reason: Any = "length" if completion.truncated else "stop"
        ids: Any = {"prompt_ids": row[:prompt], "logprobs": completion.logprobs.tolist()} if self._with_ids else {}
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        if self._parses_turns:
            full_text = self._tokenizer.decode(tokens)
            reply = parse(full_text, self._format, reasoning_open=bool(self._opened))
            fields: Any = {"calls": reply.calls, "malformed": reply.malformed, "prompt_tokens": prompt, **ids}
            reasoning_fields: Any = {"reasoning": reply.reasoning, "reasoning_ended": reply.reasoning_ended}
            turn = Turn(reply.text, tokens, reason, **fields, **reasoning_fields)
        else:
            apart = self._split_reasoning(text, tokens)
            turn = Turn(text, tokens, reason, prompt_tokens=prompt, **apart)
        calling = _make_call_message(turn, self._form, self._opened, full_text) if turn.calls else None
        self._turn_messages.append(calling or {"role": "assistant", "content": text})
        if (of_row := self._rows[-1]).chat:
            of_row.turns.append(Sampled(len(of_row.messages), prompt, len(row)))
            of_row.messages.append(self._turn_messages[-1])
        return turn

    def _split_reasoning(self, text: str, tokens: list[int]) -> dict[str, Any]:
        """Return reasoning and answer of a turn, as arguments of `Turn`, unless its text has them."""
        if split_reasoning(text).reasoning:
            return {}
        full_text = self._tokenizer.decode(tokens)  # marks may be special tokens, which the text lacks
        reply = split_reasoning(full_text, reasoning_open=bool(self._opened))
        if reply.reasoning_ended and not reply.reasoning:
            return {}
        special = [str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        answer, reasoning = (_remove_special(part, special) for part in reply[:2])
        return Reply(answer, reasoning, reply.reasoning_ended)._asdict()

    def add_observation(self, observation: Any, rows: Sequence[Sequence[int]]) -> tuple[int, Extension]:
        """Add an observation, and return the row that the policy continues and the token ids to append to it.

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
            return self._append_tokens(rows, ids)
        if isinstance(observation, Mapping):
            if "tools" in observation:
                return self._continue_with(self._read_request(observation), rows)
            return self._continue_with([self._resolve_turn(message) for message in observation["messages"]], rows)
        if not any(isinstance(part, Mapping) for part in observation):
            return self._append_tokens(rows, observation)
        if not row.chat:
            raise EnvError(
                "the observation is messages, and the episode is no chat: its prompt or an observation before is text "
                "or token ids; give messages from the beginning, or text"
            )
        return self._continue_with([*row.messages, *observation], rows, index=len(rows) - 1)

    def _append_tokens(self, rows: Sequence[Sequence[int]], tokens: list[int]) -> tuple[int, Extension]:
        """Continue with tokens that are in no message."""
        self._rows = [*self._rows[:-1], attrs.evolve(self._rows[-1], chat=False)]
        self._opened = self._opening(tokens)
        return len(rows) - 1, Extension(len(rows[-1]), tokens, None)

    def _continue_with(
        self, messages: list[Any], rows: Sequence[Sequence[int]], index: int | None = None
    ) -> tuple[int, Extension]:
        """Continue with a whole conversation, from a row that has its beginning if the same tools were offered."""
        row_index = self._find_row(messages) if index is None else index
        row = self._rows[row_index]
        options: Any = {"tools": self._schemas, "max_tokens": self._max_tokens}
        if row.chat and (row.schemas == self._schemas or not row.messages):
            extension = extend(rows[row_index], row.messages, row.turns, messages, self._tokenizer, **options)
        else:
            extension = extend([], [], [], messages, self._tokenizer, **options)
            reason = "other tools were offered" if row.chat else "what came before is no chat"
            extension = extension._replace(fork=TraceFork("rewritten", 0, reason))
        turns = [turn for turn in row.turns if turn.stop <= extension.num_kept]
        other_rows = [other for other in self._rows if other is not row]
        self._rows = [
            *other_rows,
            *([row] if extension.fork else []),
            _ConversationRow(messages, turns, self._schemas, chat=True),
        ]
        self._opened = self._opening(extension.appended)
        return row_index, extension

    def _find_row(self, messages: list[Any]) -> int:
        """Return the row that a conversation continues, else the newest one with the longest common beginning."""
        best_rank, index = (False, -1), len(self._rows) - 1
        for candidate, row in enumerate(self._rows):
            same = count_common(row.messages, messages)
            rank = same == len(row.messages), same
            if row.chat and row.schemas == self._schemas and rank >= best_rank:
                best_rank, index = rank, candidate
        return index


def _format(tokenizer: Any, schemas: Any) -> str:
    try:
        return tool_format(tokenizer.get_chat_template(tools=schemas))
    except (ModelError, ValueError) as error:
        reason = str(error).partition("!")[0].partition(";")[0]
        name = f" {tokenizer.name_or_path!r}" if tokenizer.name_or_path else ""
        raise ModelError(
            f"rollout: the environment has tools, and the chat template of the model's tokenizer{name} does "
            f"not say how to call them ({reason}); take a model whose template does, set tokenizer.chat_template, or, "
            "of the tiny model, tiny.model(tokenizer=tiny.bpe([...]))"
        ) from error


def _remove_special(text: str, special: Sequence[str]) -> str:
    return re.sub("|".join(map(re.escape, special)), "", text).strip() if special else text


def _make_call_message(turn: Turn, form: Form, opened: str, full_text: str) -> dict[str, Any] | None:
    """Return the message of a turn that calls tools; None: the template cannot write the calls."""
    thought, content = {}, turn.text
    if form.reasoning is not None:
        thought = {REASONING[0]: turn.reasoning} if turn.reasoning else {}
    elif turn.reasoning or opened:  # The template writes again a mark that the prompt opened.
        begin, end = ("[THINK]", "[/THINK]") if "[/THINK]" in full_text else ("<think>", "</think>")
        begin = opened or (f"{begin}\n" if begin in full_text else "")
        content = f"{begin}{turn.reasoning}\n{end}\n\n{turn.text}".rstrip()
    lost = (content and not form.content) or (len(turn.calls) > 1 and not form.several)
    if lost and form.plain:
        return None
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        | ({} if call.id is None else {"id": call.id})
        for call in turn.calls
    ]
    return {"role": "assistant", "content": content, **thought, "tool_calls": calls}
