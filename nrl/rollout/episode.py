"""One episode: a policy and an environment take turns.

An episode is kept as token ids from first to last. Sampled tokens are never decoded and encoded again; a turn only
appends.
"""

import asyncio
import copy
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from nrl.backends.types import Completion
from nrl.data import render
from nrl.envs import Env, Step, Task
from nrl.envs.inprocess.call_with_timeout import Caller, calling
from nrl.envs.inprocess.tracebacks import Failed
from nrl.envs.policy_inputs import read_prompt
from nrl.envs.return_values import LARGEST_REWARD, is_reset, read_reset, read_step, score_of
from nrl.envs.types import (
    TRAINED,
    FailedScore,
    Prompt,
    Request,
    Status,
    Trace,
    Turn,
    Verdict,
    judges_group,
)
from nrl.errors import DataError, EnvError, ExecutableError, LostRequest, ModelError
from nrl.log import error_text
from nrl.rollout.bridges import TraceFork
from nrl.rollout.conversations import Conversation
from nrl.rollout.lengths import least_tokens

__all__ = ["Episode", "Generate", "earn", "play", "record_failure", "run_episode"]

type Generate = Callable[..., Awaitable[Completion]]
"""Continue token ids with the policy; an optional second argument is `nrl.rollout.sampler_client.TurnLimits`."""

_OF_A_ROW = (
    *("token_ids", "sampled", "turn_of", "logprobs", "versions", "turn_rewards"),
    *("drawn", "version", "again", "forked", "routes"),
)


@attrs.define
class Episode:
    """One episode as tokens.

    Args:
        token_ids: all of it, prompts and observations too.
        sampled: for each token, whether the policy sampled it.
        turn_of: for each token, the number of the policy's turn, from 0; -1 for tokens that it did not sample.
        logprobs: for each token, the sampler's log-probability in nats; 0 for tokens that it did not sample.
        reward: the sum over turns; several, if the environment gives several.
        turn_rewards: each turn's reward, and the place of the last token that the policy sampled until then.
        drawn: how many of the tokens were sampled, those beyond the context too.
        earlier: its other rows, of which nothing but tokens is up to date.
        forked: why this row began; None: it is the first.
        turn_components: what the rewards of each turn, by its number, are made of, by name, where the environment says
            so.
        status: what became of the verdict.
        cut: whether it was ended before it was over.
        truncated: whether a length limit stopped it.
        version: of the oldest weights that sampled it.
        versions: for each token, the version of the weights that sampled it; -1 for tokens that were not sampled.
        again: how often the sampler was asked again, for example because an engine died.
        failure: why the episode does not count; None: it counts.
        info: for each step of the environment, the numbers that it reported.
        prompt: what the policy was asked.
        turns: what it wrote.
        observations: what the environment answered.
        routes: ``[n, layers, k]`` int16, the experts of the first n tokens, where they were recorded: of each token
            those that the sampler chose first, with which it computed the log-probabilities.
    """

    token_ids: list[int] = attrs.field(factory=list)
    sampled: list[bool] = attrs.field(factory=list)
    turn_of: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    reward: float | tuple[float, ...] = 0.0
    turn_rewards: list[tuple[int, float | tuple[float, ...]]] = attrs.field(factory=list)
    turn_components: dict[int, dict[str, float]] = attrs.field(factory=dict)
    drawn: int = 0
    earlier: list["Episode"] = attrs.field(factory=list)
    forked: TraceFork | None = None
    status: Status = "ok"
    cut: bool = False
    truncated: bool = False
    version: int | None = None
    versions: list[int] = attrs.field(factory=list)
    again: int = 0
    failure: str | None = None
    info: list[dict[str, float]] = attrs.field(factory=list)
    prompt: Prompt | Request = ""
    turns: list[Turn] = attrs.field(factory=list)
    observations: list[Any] = attrs.field(factory=list)
    routes: Tensor | None = None

    @property
    def components(self) -> dict[str, float]:
        """What the reward is made of, by name: the sums over turns."""
        found: dict[str, float] = {}
        for named in self.turn_components.values():
            for name, value in named.items():
                found[name] = found.get(name, 0.0) + value
        return found

    @property
    def counts(self) -> bool:
        """Whether it is neither failed nor cut."""
        return self.failure is None and not self.cut

    @property
    def reasoning_ended(self) -> bool:
        """Whether the last turn's reasoning ended; True where it has none."""
        return self.turns[-1].reasoning_ended if self.turns else True

    @property
    def trace(self) -> Trace:
        """What a verifier is given."""
        rows, turns, seen = self._parts(), tuple(self.turns), tuple(self.observations)
        token_ids = tuple(token for row in rows for token in row.token_ids)
        sampled = tuple(own for row in rows for own in row.sampled)
        return Trace(self.prompt, turns, seen, token_ids, sampled, self.truncated)

    def earn(self, verdict: Verdict, whose: str = "the verifier's verdict") -> None:
        """Add a verdict, as of the last token that the policy has sampled.

        Raises:
            EnvError: no reward can be made of it, or it has another number of rewards than the turns before.
        """
        score = score_of(verdict, whose)
        if score.status not in TRAINED:
            why = score.why if isinstance(score, FailedScore) else f"Score: the verdict's status is '{score.status}'"
            self.fail(why, score.status)
            return
        self.reward = _add(self.reward, score.reward)
        row = self.last
        last = len(row.sampled) - 1 - row.sampled[::-1].index(True) if any(row.sampled) else 0
        row.turn_rewards.append((last, score.reward))
        named = self.turn_components.setdefault(len(self.turns) - 1, {})
        for name, value in score.components.items():
            named[name] = named.get(name, 0.0) + value
        self.status = score.status if self.status == "ok" else self.status

    def fail(self, why: str, status: Status = "infra_error") -> None:
        """Say that the episode does not count, and why, unless it failed already."""
        if self.failure is None:
            self.failure, self.status = why, status

    def append(self, tokens: Sequence[int], completion: Completion | None = None) -> None:
        """Append the policy's turn, with its ``completion``, or the environment's, without one."""
        self.token_ids.extend(tokens)
        self.sampled.extend([completion is not None] * len(tokens))
        self.turn_of.extend([-1 if completion is None else len(self.turns)] * len(tokens))
        if completion is None:
            self.logprobs.extend([0.0] * len(tokens))
            self.versions.extend([-1] * len(tokens))
            return
        self.drawn += len(tokens)
        versions = completion.versions
        self.logprobs.extend(completion.logprobs.tolist())
        self.versions.extend([completion.version] * len(tokens) if versions is None else versions.tolist())
        self.version = completion.version if self.version is None else min(completion.version, self.version)
        self.truncated = completion.truncated
        self.again += completion.times - 1
        if completion.routes is not None:  # a later turn reads earlier tokens again
            known = completion.routes[:0] if self.routes is None else self.routes
            self.routes = torch.cat([known, completion.routes[len(known) :]])

    def fork(self, kept: int, appended: Sequence[int], why: TraceFork) -> None:
        """Begin another row, with some of this one's tokens, which are not trained on once more."""
        self.earlier.append(attrs.evolve(self, earlier=[]))
        self.token_ids, self.routes = self.token_ids[:kept], None if self.routes is None else self.routes[:kept]
        self.sampled, self.logprobs = [False] * kept, [0.0] * kept
        self.turn_of, self.versions = [-1] * kept, [-1] * kept
        self.turn_rewards, self.drawn, self.version, self.again, self.forked = [], 0, None, 0, why
        self.append(appended)

    def resume(self, row: int) -> None:
        """Go on with the row at this place, the earlier ones and then the last; that is the last from here on."""
        if row == len(self.earlier):
            return
        found = self.earlier.pop(row)
        self.earlier.append(attrs.evolve(self, earlier=[]))
        for name in _OF_A_ROW:
            setattr(self, name, getattr(found, name))

    def rows(self) -> list["Episode"]:
        """Its rows, in the order in which they began; each says what became of the whole."""
        told = ("reward", "turn_components", "turns", "status", "cut", "truncated", "failure", "info")
        return [attrs.evolve(row, **{name: getattr(self, name) for name in told}) for row in self._parts()]

    @property
    def last(self) -> "Episode":
        """Of its rows, itself or an earlier one, that which has the last turn."""
        return max(self._parts(), key=lambda row: next((turn for turn in reversed(row.turn_of) if turn >= 0), -1))

    def _parts(self) -> list["Episode"]:
        """The parts between its forks in which something was sampled; the whole, where nothing was."""
        rows = [row for row in (*self.earlier, self) if any(row.sampled)]
        return sorted(rows, key=lambda row: row.turn_of[row.sampled.index(True)]) or [self]


async def run_episode(generate: Generate, env: Env, task: Task, *, tokenizer: Any, context_length: int) -> Episode:
    """Run one episode to its end.

    The episode fails if the environment raises anything (`SystemExit` too), if one of its calls takes longer than its
    ``timeout``, if a reward is NaN or infinite in float32, if a verdict's status says so, or if the prompt fills the
    context. A failed episode is counted and not trained on, and never passes for a reward of 0. However it ends, also
    by an interrupt, ``close`` is called once with the last state; that it fails is said, and changes nothing.

    Args:
        generate: asks the policy to continue token ids.
        env: functions, each plain or ``async``; they are called in other threads.
        task: the argument of ``env.reset``.
        tokenizer: renders prompts and decodes sampled tokens.
        context_length: the most tokens that an episode may have.

    Raises:
        ModelError: the prompt is a chat, or there are tools, and the tokenizer's chat template does not write them.
        Exception: whatever ``generate`` raises.

    >>> import asyncio
    >>> from nrl import tiny
    >>> from nrl.envs import exact, single_turn
    >>> tokenizer = tiny.tokenizer()
    >>> async def generate(tokens):
    ...     return Completion(torch.tensor(tokenizer.encode("2")), torch.tensor([-0.1]), truncated=False, version=1)
    >>> task = {"prompt": "1+1=", "answer": "2"}
    >>> episode = asyncio.run(run_episode(generate, single_turn(exact), task, tokenizer=tokenizer, context_length=64))
    >>> episode.reward, episode.sampled
    (1.0, [False, False, False, False, True])
    """
    episode = Episode()
    with calling(env) as caller_of:
        await play(episode, generate, env, task, tokenizer, context_length, render=render, call=caller_of(task))
    return episode


async def play(
    episode: Episode,
    generate: Generate,
    env: Env,
    task: Task,
    tokenizer: Any,
    context_length: int,
    *,
    render: Callable[[Prompt, Any], list[int]],
    call: Caller,
) -> None:
    """Run one episode of many, a new one: `run_episode`, with the rollout's own ``render`` and ``call``.

    If it is cancelled, the episode is as far as it got.
    """
    held = list[Any]()  # the state, while there is one
    chat: Conversation
    verifier: Any = getattr(env, "verifier", None)

    async def holding(coming: Awaitable[Any], state_of: Callable[[Any], Sequence[Any]]) -> Any:
        """Hold the state that a call gives, also if the episode is cancelled in the moment in which it comes."""
        future = asyncio.ensure_future(coming)
        try:
            return await future
        finally:
            if future.done() and not future.cancelled() and future.exception() is None:
                held[:] = state_of(future.result()) or held

    async def reset() -> bool:
        """Begin; whether the episode is over, since its only requests were refused."""
        nonlocal chat
        value = await holding(call.reset(env.reset, task), lambda value: value[:1] if is_reset(value) else ())
        _, prompt, *tools = read_reset(value)
        most = context_length + 1  # what is longer fills the context, whatever else it says
        episode.prompt = read_prompt(prompt, len(tokenizer), most)
        chat = Conversation(episode.prompt, tools[0] if tools else (), tokenizer, most)
        before = copy.copy(chat)
        if isinstance(prompt, Mapping) and (least := least_tokens(prompt, tokenizer, context_length)):
            return (await answered(await act(Turn(stop_reason="length", prompt_tokens=least)))).done
        try:
            tokens = chat.render_prompt(render)
        except DataError as error:
            if not chat.is_request:
                raise
            refused = Turn(str(error), stop_reason="refused")
            return (await answered(await act(refused))).done
        if chat.is_request and len(tokens) >= context_length:  # an agent may shorten what it asked, or end
            chat = before
            return (await answered(await act(Turn(stop_reason="length", prompt_tokens=len(tokens))))).done
        episode.append(tokens)
        if len(tokens) >= context_length:
            count = f"{len(tokens)} tokens" if len(tokens) < most else f"more than {context_length} tokens"
            episode.fail(f"DataError: the prompt has {count} and fills the context of {context_length}", "skipped")
        if not tokens:
            raise DataError("the prompt is text of which the tokenizer makes no token; give a longer one")
        return False

    async def act(turn: Turn) -> Step:
        coming = call(env.step, held[0], turn)
        taken = read_step(await holding(coming, lambda value: [value.state] if isinstance(value, Step) else ()))
        episode.earn(taken.reward, "the step's reward")
        return taken

    async def step(turn: Turn) -> Step:
        taken = await act(turn)
        episode.info.append(dict(taken.info))
        return await answered(taken)

    async def answered(taken: Step) -> Step:
        """Append what the environment answers; an agent may shorten what it asked, or ask something else, or end."""
        nonlocal chat
        while not taken.done:
            before = copy.copy(chat)
            rows = [each.token_ids for each in (*episode.earlier, episode)]
            wanted = taken.observation
            if isinstance(wanted, Mapping) and "tools" in wanted:
                least = least_tokens(wanted, tokenizer, context_length)
                if least:
                    taken = await act(Turn(stop_reason="length", prompt_tokens=least))
                    continue
            try:
                row, (kept, appended, fork) = chat.add_observation(taken.observation, rows)
            except DataError as error:
                if not chat.is_request:
                    raise
                chat = before
                taken = await act(Turn(str(error), stop_reason="refused"))
                continue
            if not chat.is_request or kept + len(appended) < context_length:
                episode.observations.append(taken.observation)
                episode.resume(row)
                if fork is None:
                    episode.append(appended)
                else:
                    episode.fork(kept, appended, fork)
                return taken
            chat = before
            taken = await act(Turn(stop_reason="length", prompt_tokens=kept + len(appended)))
        if taken.observation is not None:
            episode.observations.append(taken.observation)
        return taken

    async def judge() -> None:
        if not judges_group(verifier, task):  # which may be a function of the user's, too
            episode.earn(await call(verifier, task, episode.trace))

    # The environment is the user's code, so it may fail without ending the run. The sampler's errors are passed on
    try:
        over = await _guarded(reset(), episode)
        while episode.failure is None and not over:
            try:
                completion = await generate(episode.token_ids, *([chat.limits] if any(chat.limits) else []))
            except LostRequest as error:
                episode.fail(error_text(error))
                break
            episode.append(completion.token_ids.tolist(), completion)
            episode.turns.append(chat.add_turn(completion, episode.token_ids))
            taken = await _guarded(step(episode.turns[-1]), episode)
            if taken is None or taken.done:
                break
            if len(episode.token_ids) >= context_length:
                episode.truncated = True
                break
        if episode.failure is None and verifier is not None:
            await _guarded(judge(), episode)
    finally:
        for row in (episode, *episode.earlier):
            episode.truncated |= len(row.token_ids) > context_length  # of a sampler that looks at no context
            for per_token in (row.token_ids, row.sampled, row.turn_of, row.logprobs, row.versions):
                del per_token[context_length:]
        if held:
            await _close(call.close(held[0]))


async def _guarded[T](work: Awaitable[T], episode: Episode) -> T | None:
    try:
        return await work
    except Exception as error:
        record_failure(error, episode)
        return None


def record_failure(error: Exception, episode: Episode) -> None:
    """Note what a call of an environment's function raised; what no row is to blame for is raised again.

    A ModelError is nrl's own, as of a chat template that has no place for tools; one of user code is `Failed` by now.
    """
    if isinstance(error, ExecutableError | ModelError):
        raise error
    text = str(error) if isinstance(error, Failed) else error_text(error)
    episode.fail(text, "timeout" if text.startswith("TimeoutError") else "infra_error")


def earn(episode: Episode, verdict: Any) -> None:
    """Add one of several verdicts; one of which no reward can be made fails its own episode alone."""
    try:
        episode.earn(verdict)
    except EnvError as error:
        record_failure(error, episode)


async def _close(work: Awaitable[Any]) -> None:
    try:
        await work
    except Failed as error:
        warnings.warn(f"rollout: an environment's close failed, and its row stays as it is: {error}", stacklevel=2)


def _add(a: float | tuple[float, ...], b: float | tuple[float, ...]) -> float | tuple[float, ...]:
    """The sum of two rewards. The number 0, which a turn without a reward has, adds nothing to several."""
    total: float | tuple[float, ...]
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        total = tuple(x + y for x, y in zip(a, b, strict=True))
    elif isinstance(a, float) and isinstance(b, float):
        total = a + b
    elif 0.0 in (a, b):
        total = b if a == 0.0 else a
    else:
        raise EnvError(f"the turns of an episode have the rewards {a} and {b}; give every turn as many")
    if not all(abs(x) <= LARGEST_REWARD for x in (total if isinstance(total, tuple) else (total,))):
        raise EnvError(f"the reward is {total}; rewards are float32, whose largest number is {LARGEST_REWARD:.3g}")
    return total
