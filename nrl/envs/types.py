"""The contract of environments and verifiers: the types that an episode is made of.

An environment is functions, `reset`, `step` and, where something has to be given back, `close`, each plain or
``async``. They keep nothing between calls except the state that they pass on. A verifier is one function of a task and
what happened, a `Trace`.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple, Protocol, TypeGuard, get_args

import attrs

from nrl.envs.replies import split_reasoning
from nrl.errors import ArgumentError
from nrl.log import error_text

__all__ = [
    "STATUSES",
    "TIMEOUT",
    "TRAINED",
    "Env",
    "Environment",
    "FailedScore",
    "Message",
    "Observation",
    "Prompt",
    "Request",
    "Score",
    "Status",
    "Step",
    "Task",
    "Trace",
    "Turn",
    "Verdict",
    "Verifier",
    "alike",
    "asynchronous",
    "declared_rewards",
    "is_env",
    "judges_group",
    "mapped",
    "settled",
    "text_of",
    "timeout_of",
]

TIMEOUT = 60.0
"""Seconds that a call of an environment or a verifier may take, unless it has a timeout of its own."""

type Message = dict[str, str]
"""One message of a chat: ``{"role": ..., "content": ...}``."""

type Request = Mapping[str, Any]
"""A whole conversation as somebody else sends it: ``"messages"``; and where it is an agent's, the JSON schemas of its
``"tools"``, whether the turn is to have the ``"ids"`` that it is made of, texts that ``"stop"`` it, and at how many
tokens at most (``"max_new_tokens"``); see `Step`."""

type Prompt = str | Sequence[Message] | Sequence[int]
"""The question to a model: text, a chat, or token ids that are used as they are."""

type Observation = str | Sequence[int] | Sequence[Message] | Request | None
"""What an environment answers to a turn; see `Step`."""

type Task = Mapping[str, Any]
"""One row of data: ``"prompt"``, a `Prompt`, and the fields that the verifier reads, such as ``"answer"``."""

type Status = Literal["ok", "parse_fail", "timeout", "infra_error", "skipped"]
"""What became of a verdict: it was found, or the answer could not be read, which is the model's doing; or it took too
long, something else broke, or it was not asked for."""

STATUSES: tuple[Status, ...] = get_args(Status.__value__)
"""In the order in which the column ``status`` numbers them."""

TRAINED: tuple[Status, ...] = ("ok", "parse_fail")
"""Those whose rows are trained on."""


class Score(NamedTuple):
    """A verdict with all that there is to say.

    Args:
        reward: a number, or several (a sequence); of a status other than ``"ok"`` and ``"parse_fail"`` it is not read.
        status: what became of it.
        components: what the reward is made of, by name, to report.

    >>> Score(0.0, "parse_fail").components
    {}
    """

    reward: Any = 0.0
    status: Status = "ok"
    components: Mapping[str, float] = {}


class FailedScore(Score):
    """The verdict on one episode of several that were judged together, where that alone failed.

    Args:
        why: the error, as text, to say.
    """

    why: str

    @classmethod
    def of(cls, error: Exception) -> "FailedScore":
        """One of an error. It holds no exception, since it may have to go to another process.

        >>> found = FailedScore.of(ValueError("no"))
        >>> found.status, found.why
        ('infra_error', 'ValueError: no')
        """
        made = cls(status="timeout" if isinstance(error, TimeoutError) else "infra_error")
        made.why = error_text(error)
        return made


type Verdict = float | Sequence[float] | Mapping[str, float] | Score
"""A reward; several; components by name, whose sum is the reward; or a `Score`."""


class Turn(str):
    """What the model wrote in one turn, as `step` is given it: a text, which knows the tokens that were sampled.

    A test may give a plain text in its place.

    Args:
        text: without special tokens.
        token_ids: what was sampled, with the token that ended it; decode them where special tokens mean something.
        stop_reason: ``"stop"``, a token or text that ends a turn; ``"length"``, a limit; ``"refused"``, there is no
            turn, since a `Request` cannot be answered, and the text says why.
        calls: of tools, in their order, where the environment has some (`nrl.envs.tools.ToolCall`).
        malformed: what began like a call and could not be read (`nrl.envs.tools.MalformedCall`).
        reasoning: what stood between its marks; where the environment has tools, it is not in the text. None: it is
            read in the text, as `nrl.envs.replies.split_reasoning` does.
        prompt_tokens: how many tokens it answers.
        prompt_ids: these; here and in what follows nothing, unless a `Request` asked for ``"ids"``.
        logprobs: of each sampled token, in nats.
        reasoning_ended: whether the reasoning ended, also where there is none; False where the prompt opened reasoning
            and no mark closes it. None: it is read in the text.
        answer: the text without its reasoning; empty where that did not end. None: it is read in the text.

    >>> turn = Turn("4", token_ids=[19, 2], stop_reason="stop")
    >>> turn == "4", int(turn), turn.token_ids
    (True, 4, (19, 2))
    >>> turn = Turn("<think>2 and 2 are 4.</think>4")
    >>> turn.answer, turn.reasoning, turn.reasoning_ended
    ('4', '2 and 2 are 4.', True)
    """

    token_ids: tuple[int, ...]
    stop_reason: Literal["stop", "length", "refused"]
    calls: tuple[Any, ...]
    malformed: tuple[Any, ...]
    reasoning: str
    prompt_tokens: int
    prompt_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reasoning_ended: bool
    answer: str

    def __new__(
        cls,
        text: str = "",
        token_ids: Sequence[int] = (),
        stop_reason: Literal["stop", "length", "refused"] = "stop",
        calls: Sequence[Any] = (),
        malformed: Sequence[Any] = (),
        reasoning: str | None = None,
        prompt_tokens: int = 0,
        prompt_ids: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        reasoning_ended: bool | None = None,
        answer: str | None = None,
    ) -> "Turn":
        """A turn of these."""
        made = super().__new__(cls, text)
        made.token_ids, made.stop_reason = tuple(token_ids), stop_reason
        made.calls, made.malformed = tuple(calls), tuple(malformed)
        read = split_reasoning(made.text, reasoning_open=reasoning_ended is False)
        made.reasoning = read.reasoning if reasoning is None else reasoning
        made.reasoning_ended = read.reasoning_ended if reasoning_ended is None else reasoning_ended
        made.answer = answer if answer is not None else read.answer if made.reasoning_ended else ""
        made.prompt_tokens, made.prompt_ids, made.logprobs = prompt_tokens, tuple(prompt_ids), tuple(logprobs)
        return made

    @property
    def text(self) -> str:
        """The text alone."""
        return str.__str__(self)

    @property
    def beyond_text(self) -> dict[str, Any]:
        """What `answer`, `reasoning` and `reasoning_ended` say beyond the text: arguments that make the same turn.

        >>> Turn("<think>Easy.</think>4").beyond_text, Turn("4", reasoning="Easy.").beyond_text
        ({}, {'reasoning': 'Easy.'})
        """
        read = Turn(self.text)
        names = ("reasoning", "reasoning_ended", "answer")
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(read, name)}


def _turns(given: Sequence[str]) -> tuple[Turn, ...]:
    return tuple(turn if isinstance(turn, Turn) else Turn(turn) for turn in given)


@attrs.frozen
class Trace:
    """What happened in an episode, as a verifier is given it.

    Args:
        prompt: what the model was asked.
        turns: what it wrote; plain texts will do.
        observations: what the environment answered to each turn; where the last one ended the episode, that may be
            left out.
        token_ids: all of it, prompt and observations too; with the token that ended each turn. Of an episode that
            forked, the rows that it has in the batch, one after the other; a later row begins with the prompt again.
        sampled: for each of these, whether the model sampled it; each sampled token is there once.
        truncated: whether a length limit ended the episode.

    >>> trace = Trace("2+2=", ["<think>2 and 2 are 4.</think>4"])
    >>> trace.answer, trace.reasoning, trace.reasoning_ended, len(trace.turns)
    ('4', '2 and 2 are 4.', True, 1)
    >>> Trace("2+2=", ["<think>Perhaps 4, but"]).answer
    ''
    """

    prompt: Prompt | Request = ""
    turns: tuple[Turn, ...] = attrs.field(default=(), converter=_turns)
    observations: tuple[Any, ...] = ()
    token_ids: tuple[int, ...] = attrs.field(default=(), repr=False)
    sampled: tuple[bool, ...] = attrs.field(default=(), repr=False)
    truncated: bool = False

    @property
    def text(self) -> str:
        """The text of the last turn; empty, if the model wrote nothing. Verifiers read `answer`."""
        return self.turns[-1].text if self.turns else ""

    @property
    def answer(self) -> str:
        """The text of the last turn without its reasoning; empty where the reasoning did not end."""
        return self.turns[-1].answer if self.turns else ""

    @property
    def reasoning(self) -> str:
        """The reasoning of the last turn, without its marks."""
        return self.turns[-1].reasoning if self.turns else ""

    @property
    def reasoning_ended(self) -> bool:
        """Whether the last turn's reasoning ended; True where it has none."""
        return self.turns[-1].reasoning_ended if self.turns else True


type Verifier = Callable[[Task, Trace], Verdict | Awaitable[Verdict]]
"""``(task, trace) -> verdict``, plain or ``async``. A failure is an exception, never a 0."""


class Step(NamedTuple):
    """The value of `step`.

    Args:
        state: for the next `step`.
        reward: of this turn, as a verifier gives it; an episode's is the sum over its turns. Several rewards have the
            same number every turn. In the column ``token_rewards`` it lies at the turn's last token.
        done: whether the episode ends here.
        observation: if not, the model's next input, else for the verifier alone: text or token ids, which are appended
            as they are; messages, which are appended as the chat template writes them, to an episode whose prompt is a
            chat; or ``{"messages": [...]}``, the whole conversation from here on, as where an environment leaves out
            or shortens what came before. Where it does not begin with what was said, the episode forks. In it
            ``{"role": "assistant", "turn": n}`` stands for what the model said in its n-th turn, from 0. With
            ``"tools"`` (JSON schemas; there may be none) it is an agent's request: the turn is taken apart; and where
            the request does not fit into the context, or the chat template does not take it, `step` is given a turn
            without tokens, with the stop reason "length" or "refused".
        info: numbers to report, by name. Those of every step are kept.

    >>> Step(state=None, reward=1.0)
    Step(state=None, reward=1.0, done=True, observation=None, info={})
    """

    state: Any
    reward: Verdict = 0.0
    done: bool = True
    observation: Observation = None
    info: Mapping[str, float] = {}


class Env(Protocol):
    """Anything with `reset` and `step`: an `Environment`, a module, an object. Each may be plain or ``async``.

    It may have more of what an `Environment` has: ``close``, a ``verifier``, and a ``timeout``, the seconds that one
    call may take, None, or a function from the task to these. Without one it is a minute.

    >>> def play(env: Env, task: Task) -> Step:
    ...     state, prompt = env.reset(task)
    ...     return env.step(state, Turn(prompt.upper()))
    >>> from nrl.envs import single_turn
    >>> play(single_turn(lambda task, trace: float(trace.text == "A")), {"prompt": "a"}).reward
    1.0
    """

    def reset(self, task: Task, /) -> Any:
        """The first state of an episode, the prompt and, if there are any, tools."""
        ...

    def step(self, state: Any, turn: Turn, /) -> Step | Awaitable[Step]:
        """Answer one turn of the model."""
        ...


class Environment(NamedTuple):
    """The functions of an environment, as a value; it is an `Env`.

    Args:
        reset: ``task -> (state, prompt)``, or ``(state, prompt, tools)`` with `nrl.envs.tools.tool`; then the prompt is
            text or a chat, and each `Turn` has its calls. A prompt may be an agent's `Request`, too. The task has a
            ``"seed"``, an integer that is the same for all episodes of its group, and for every run with the same seed.
        step: ``(state, turn) -> Step``, of a `Turn`.
        close: called once with the last state of an episode, however it ended, and never with one that a `reset` which
            failed did not give; its value is not read. None: there is nothing to give back.
        verifier: called at the end with the task and the `Trace`, also where a limit ended the episode; its reward is
            added to those of the steps. None: there is none.
        timeout: seconds that one call of any may take, or a function from the task to these; None: no limit. A
            call that takes longer makes its row invalid, as an error does.
        tasks: ``(seed, index) -> Task``, of an environment that brings tasks, for `nrl.data.tasks`; a pure function.
            None: they come from elsewhere.
        check_task: ``task -> why no answer to it can be right``, or None where one can; plain or ``async``. It is asked
            before a run (`nrl.envs.references`). None: the verifier's own, if that has one.
        num_rewards: how many rewards an episode has, which is how many columns they are; 0 where the reward is one
            number. An episode with another number of rewards is invalid, but 0 stands for as many zeros. None: the
            verifier's own, if that has one; else the number that most episodes of the first batch have.

    Guess a number; the state is the number and how many turns are left.

    >>> def reset(task):
    ...     return (task["number"], 3), "Guess a number."
    >>> def step(state, turn):
    ...     number, left = state
    ...     if int(turn) == number or left == 1:
    ...         return Step(state, reward=float(int(turn) == number))
    ...     return Step((number, left - 1), done=False, observation="less" if number < int(turn) else "more")
    >>> guess = Environment(reset, step)
    >>> state, prompt = guess.reset({"number": 7})
    >>> state, reward, done, observation, info = guess.step(state, "9")
    >>> done, observation, guess.step(state, "7").reward
    (False, 'less', 1.0)
    """

    reset: Callable[[Task], Any]
    step: Callable[[Any, Any], Step | Awaitable[Step]]
    close: Callable[[Any], Any] | None = None
    verifier: Verifier | None = None
    timeout: float | Callable[[Task], float | None] | None = TIMEOUT
    tasks: Callable[[int, int], Task] | None = None
    check_task: Callable[[Task], str | Awaitable[str | None] | None] | None = None
    num_rewards: int | None = None


def text_of(prompt: Any) -> str:
    """What a prompt or an observation says, as text; empty where it is made of tokens.

    >>> text_of([{"role": "user", "content": "1+1="}]), text_of("1+1="), text_of([1, 2])
    ('1+1=', '1+1=', '')
    """
    if isinstance(prompt, str):
        return prompt
    whole = prompt.get("messages") if isinstance(prompt, Mapping) else prompt
    parts = whole if isinstance(whole, Sequence) else ()
    return "\n".join(str(each.get("content", "")) for each in parts if isinstance(each, Mapping))


def is_env(given: Any) -> TypeGuard[Env]:
    """Whether something is an environment, and no verifier: it has `reset` and `step`.

    >>> is_env(Environment(lambda task: (0, ""), lambda state, turn: Step(state))), is_env(len)
    (True, False)
    """
    return not isinstance(given, type) and all(callable(getattr(given, name, None)) for name in ("reset", "step"))


def judges_group(verifier: Any, task: Task) -> bool:
    """Whether a verifier is asked once for all episodes of a task: its ``of_group``, which may depend on the task.

    >>> judges_group(len, {})
    False
    """
    found = getattr(verifier, "of_group", False)
    return bool(found(task)) if callable(found) else bool(found)


def timeout_of(env: Env, task: Task) -> float | None:
    """Seconds that a call of an environment may take for a task; None: no limit.

    Raises:
        ValueError: they are no positive number.
    """
    timeout = getattr(env, "timeout", TIMEOUT)
    seconds: float | None = timeout(task) if callable(timeout) else timeout
    if seconds is not None and not (isinstance(seconds, Real) and not isinstance(seconds, bool) and seconds > 0):
        raise ArgumentError(f"rollout: the environment's timeout is {seconds}; give seconds, or None for no limit")
    return seconds


def declared_rewards(part: Any) -> int | None:
    """Return the ``num_rewards`` of a verifier or an environment; of an environment without one, its verifier's.

    Returns:
        How many rewards an episode has; 0: the reward is one number; None: nothing is declared.

    Raises:
        ArgumentError: it is no such integer.

    >>> def judge(task, trace):
    ...     return [1.0, 0.5]
    >>> judge.num_rewards = 2
    >>> declared_rewards(judge), declared_rewards(len)
    (2, None)
    """
    declared = getattr(part, "num_rewards", None)
    if declared is None:
        verifier = getattr(part, "verifier", None)
        return None if verifier is None else declared_rewards(verifier)
    if not isinstance(declared, int) or isinstance(declared, bool) or declared < 0:
        raise ArgumentError(
            f"num_rewards is {declared!r:.80}; give how many rewards an episode has, 0 for a reward that is one "
            "number, or None",
            "num_rewards",
        )
    return declared


def asynchronous(fn: Any) -> bool:
    """Whether a call only makes a coroutine."""
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(type(fn), "__call__", None))  # noqa: B004


def alike(fn: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that wraps another one under its name, and is of its kind: ``async`` if that is.

    Args:
        fn: plain or ``async``.
        call: has the same arguments; its value may have to be awaited.

    >>> async def double(x):
    ...     return 2 * x
    >>> asynchronous(alike(double, lambda x: double(x + 1)))
    True
    """
    if not asynchronous(fn):
        return functools.wraps(fn)(lambda *args: call(*args))

    @functools.wraps(fn)
    async def later(*args: Any) -> Any:
        return await settled(call(*args))

    return later


async def settled(found: Any) -> Any:
    """A value, which may have to be awaited."""
    return await found if inspect.isawaitable(found) else found


def mapped(found: Any, change: Callable[[Any], Any]) -> Any:
    """A changed value; of one that has to be awaited, an awaitable of the changed one, which may have to be, too.

    >>> mapped(2, lambda x: x + 1)
    3
    """

    async def later() -> Any:
        return await settled(change(await found))

    return later() if inspect.isawaitable(found) else change(found)
