"""Episodes: a policy and an environment take turns, and the trace becomes rows of a batch.

An episode is kept as token ids from first to last. What was sampled is never decoded and encoded again; a turn only
appends.
"""

import asyncio
import contextvars
import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import attrs
import numpy as np
import torch
from torch import Tensor

from nrl.backends.base import Completion, Sampling
from nrl.backends.samplers import Sampler, Streams
from nrl.batch import Batch, assign
from nrl.data import render
from nrl.envs import Env, Step, Task
from nrl.envs.contract import Prompt, limit
from nrl.episodes.requests import asker
from nrl.episodes.user_code import Calls, Failed, said, stuck
from nrl.errors import DataError, EnvError, LostRequest
from nrl.runtime.threads import Daemons
from nrl.stream import Source, Stream, whole

__all__ = ["Episode", "rollout", "rollouts", "run_episode"]

type _Generate = Callable[[list[int]], Awaitable[Completion]]
type _Call = Callable[..., Awaitable[Any]]

_LARGEST = torch.finfo(torch.float32).max


@attrs.define
class Episode:
    """One episode as tokens.

    Args:
        token_ids: all of it, prompts and observations too.
        sampled: for each token, whether the policy sampled it.
        logprobs: for each token, nats, what the sampler said; 0 where it was not sampled.
        reward: the sum over turns; several, where the environment gives several.
        truncated: stopped by a length limit.
        version: of the weights that sampled it; the oldest.
        versions: of each token that was sampled; else -1.
        again: how often the sampler was asked again, as where an engine died.
        failure: why it does not count; None: it does.
        info: numbers that the environment reported in its last step.

    >>> Episode(token_ids=[5, 6]).failure is None
    True
    """

    token_ids: list[int] = attrs.field(factory=list)
    sampled: list[bool] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    reward: float | tuple[float, ...] = 0.0
    truncated: bool = False
    version: int | None = None
    versions: list[int] = attrs.field(factory=list)
    again: int = 0
    failure: str | None = None
    info: dict[str, float] = attrs.field(factory=dict)

    def append(self, tokens: Sequence[int], completion: Completion | None = None) -> None:
        """Append a turn; with ``completion`` one of the policy, without one of the environment."""
        self.token_ids.extend(tokens)
        self.sampled.extend([completion is not None] * len(tokens))
        if completion is None:
            self.logprobs.extend([0.0] * len(tokens))
            self.versions.extend([-1] * len(tokens))
            return
        said = completion.versions
        self.logprobs.extend(completion.logprobs.tolist())
        self.versions.extend([completion.version] * len(tokens) if said is None else said.tolist())
        self.version = completion.version if self.version is None else min(completion.version, self.version)
        self.truncated = completion.truncated
        self.again += completion.times - 1


async def run_episode(generate: _Generate, env: Env, task: Task, *, tokenizer: Any, context_length: int) -> Episode:
    """Run one episode to its end.

    Whatever the environment raises, `SystemExit` too, a call that takes longer than its ``timeout``, and a reward that
    is NaN or infinite in float32 make the episode a failure: it is counted and not trained on, and never passes for a
    reward of 0. So does a prompt that fills the context.

    Args:
        generate: asks the policy to continue token ids.
        env: two functions, each plain or ``async``; they are called in other threads.
        task: what ``env.reset`` gets.
        tokenizer: renders prompts and decodes what was sampled.
        context_length: the most tokens that an episode may have.

    Raises:
        Exception: whatever ``generate`` raises.

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
    with _calling(env) as calling:
        return await _episode(generate, env, task, tokenizer, context_length, render, calling(task))


@contextmanager
def _calling(env: Env) -> Iterator[Callable[[Task], _Call]]:
    """For the episode of a task, how the functions of its environment are called."""
    calls = Calls()
    try:
        yield lambda task: partial(calls.call, timeout=limit(env, task), context=contextvars.copy_context())
    finally:
        calls.close()


async def _episode(
    generate: _Generate,
    env: Env,
    task: Task,
    tokenizer: Any,
    context_length: int,
    render: Callable[[Prompt, Any], list[int]],
    call: _Call,
) -> Episode:
    episode = Episode()

    async def reset() -> Any:
        state, prompt = await call(env.reset, task)
        episode.append(render(prompt, tokenizer))
        if len(episode.token_ids) >= context_length:
            raise DataError(f"the prompt has {len(episode.token_ids)} tokens and fills the context of {context_length}")
        return state

    async def step(state: Any, tokens: Sequence[int]) -> Step:
        taken = await call(env.step, state, tokenizer.decode(tokens, skip_special_tokens=True))
        if not isinstance(taken, Step):
            raise EnvError(f"the environment's step returned {type(taken).__name__}; return a Step(state, reward, ...)")
        episode.reward = _add(episode.reward, taken.reward)
        episode.info = {str(key): float(value) for key, value in taken.info.items()}
        if not taken.done:
            episode.append(_observed(taken.observation, tokenizer))
        return taken

    # Only the environment may fail without ending the run: it is anybody's code. What the sampler raises is passed on
    state = await _guarded(reset(), episode)
    while episode.failure is None:
        try:
            completion = await generate(episode.token_ids)
        except LostRequest as error:
            episode.failure = said(error)
            break
        tokens = completion.token_ids.tolist()
        episode.append(tokens, completion)
        taken = await _guarded(step(state, tokens), episode)
        if taken is None or taken.done:
            break
        state = taken.state
        if len(episode.token_ids) >= context_length:
            episode.truncated = True
            break
    for per_token in (episode.token_ids, episode.sampled, episode.logprobs, episode.versions):
        del per_token[context_length:]
    return episode


async def _guarded[T](work: Awaitable[T], episode: Episode) -> T | None:
    try:
        return await work
    except Exception as error:
        episode.failure = str(error) if isinstance(error, Failed) else said(error)
        return None


def _add(a: float | tuple[float, ...], b: Any) -> float | tuple[float, ...]:
    total: float | tuple[float, ...]
    if isinstance(b, Sequence | np.ndarray | Tensor) and np.ndim(b) == 1:
        before = a if isinstance(a, tuple) else (0.0,) * len(b)
        total = tuple(float(x) + float(y) for x, y in zip(before, b, strict=True))
    else:
        total = cast(float, a) + float(b)
    if not all(abs(x) <= _LARGEST for x in (total if isinstance(total, tuple) else (total,))):
        raise EnvError(f"the reward is {total}; rewards are float32, whose largest number is {_LARGEST:.3g}")
    return total


def _observed(observation: Any, tokenizer: Any) -> list[int]:
    if observation is None:
        raise EnvError("the step is not done, and it has no observation; return Step(..., done=True) or an observation")
    if isinstance(observation, str):
        return cast(list[int], tokenizer.encode(observation, add_special_tokens=False))
    if any(isinstance(part, Mapping) for part in observation):
        raise EnvError(
            "the observation is chat messages, whose place within an episode no template gives; give text, "
            "which is appended as it is, or token ids"
        )
    return [int(token) for token in observation]


def rollout(
    sampler: Sampler,
    env: Env,
    tasks: Sequence[Task],
    *,
    n: int = 1,
    sampling: Sampling | None = None,
    seed: int = 0,
    first_group: int = 0,
) -> Batch:
    """Run ``n`` episodes of each task and return them as rows, group after group.

    Args:
        sampler: the policy.
        env: the environment; see `nrl.envs`.
        tasks: each is a group.
        n: episodes of each task.
        sampling: instead of the sampler's own.
        seed: of the noise; a row's noise is a function of the seed, its group and its place in the group.
        first_group: the number of the first group, which has to be unique in the run.

    Returns:
        A batch ``[len(tasks) * n, T]`` with ``input_ids``, ``attention_mask``, ``loss_mask``, ``rollout_logprobs``,
        ``temperature``, ``rewards`` (NaN in failed rows), ``group_ids``, ``version``, ``valid``, ``truncated``, with
        ``source`` where tasks have one, ``env/<name>`` for the environment's own numbers, and of a sampler that streams
        ``versions`` (of each token; -1 where it was not sampled) and ``asked_again``.

    Raises:
        DataError: there are no tasks, or ``n`` is not positive.
        GenerationError: the sampler could not serve a request; whatever else it raises is passed on, too.

    >>> import nrl
    >>> from nrl import tiny
    >>> from nrl.backends import hf
    >>> from nrl.envs import exact, single_turn
    >>> with nrl.cluster("local") as cluster:
    ...     sampler = hf.sampler(cluster.reserve(1), tiny.model(), nrl.Sampling(max_new_tokens=3))
    ...     batch = rollout(sampler, single_turn(exact), [{"prompt": "1+1=", "answer": "2"}], n=4)
    >>> batch["group_ids"].tolist()
    [0, 0, 0, 0]
    """
    return _rollout(sampler, env, tasks, n, sampling, seed, first_group)[0]


def _rollout(
    sampler: Sampler, env: Env, tasks: Sequence[Task], n: int, sampling: Sampling | None, seed: int, first_group: int
) -> tuple[Batch, list[str]]:
    """The rows, and why some of them failed."""
    if not tasks or n < 1:
        raise DataError(f"rollout: {len(tasks)} tasks with n={n}; there must be at least one of each")
    seeds = [_seed(seed, first_group + group, place) for group in range(len(tasks)) for place in range(n)]
    streams = isinstance(sampler, Streams)
    asking = asker(sampler, sampling, seeds)
    rendered: dict[str, list[int]] = {}

    def once(prompt: Prompt, tokenizer: Any) -> list[int]:
        """Rows of a group answer one prompt."""
        key = repr(prompt)
        if key not in rendered:
            rendered[key] = render(prompt, tokenizer)
        return rendered[key]

    async def one(index: int, call: _Call) -> Episode:
        generate = partial(asking.generate, index)
        task = tasks[index // n]
        episode = await _episode(generate, env, task, sampler.tokenizer, sampler.context_length, once, call)
        asking.leave()  # not where something was raised, which ends them all: nothing is to be asked any more
        return episode

    async def every() -> list[Episode]:
        with _calling(env) as calling:
            ways = [calling(tasks[index // n]) for index in range(len(seeds))]
            running = [asyncio.create_task(one(index, call)) for index, call in enumerate(ways)]
            try:
                await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
                return [episode.result() for episode in running if episode.done()]
            finally:  # an interrupt is raised by one of them, past this; it must not be said again when they are gone
                for episode in running:
                    if episode.done() and not episode.cancelled():
                        episode.exception()

    sources = _sources(tasks)
    episodes = _run(every())
    _check_rewards(episodes)
    failures = [episode.failure for episode in episodes if episode.failure]
    _warn(failures, len(episodes))
    temperature = (sampling or sampler.sampling).temperature
    batch = _rows(episodes, sampler.version, temperature)
    groups = torch.arange(first_group, first_group + len(tasks)).repeat_interleave(n)
    columns: dict[str, Tensor] = {"group_ids": groups}
    if streams:
        columns |= _streamed(episodes, batch)
    if sources is not None:
        columns["source"] = torch.tensor(sources).repeat_interleave(n)
    return assign(batch, **columns), failures


def _sources(tasks: Sequence[Task]) -> list[int] | None:
    if not any("source" in task for task in tasks):
        return None
    for number, task in enumerate(tasks):
        if not isinstance(task.get("source", 0), int):
            raise DataError(
                f"rollout: task {number} has the source {task['source']!r}; give an integer for each source"
            )
    return [task.get("source", 0) for task in tasks]


def _check_rewards(episodes: Sequence[Episode]) -> None:
    """Rows of a batch have the same number of rewards; those that differ from the first valid one are failures."""
    sizes = [np.size(episode.reward) if isinstance(episode.reward, tuple) else 0 for episode in episodes]
    first = next((size for size, episode in zip(sizes, episodes, strict=True) if episode.failure is None), 0)
    for size, episode in zip(sizes, episodes, strict=True):
        if episode.failure is None and size != first:
            episode.failure = (
                f"EnvError: the reward is {episode.reward}, and other episodes have "
                f"{f'{first} rewards' if first else 'one number'}; give every episode as many"
            )


def _seed(*parts: int) -> int:
    """63 bits that depend on all parts; a hash, so that neighbours have nothing in common."""
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _run[T](work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; in a thread of its own where a loop is running already, as in a notebook."""
    try:
        inside = asyncio.get_running_loop().is_running()
    except RuntimeError:
        inside = False
    if not inside:
        # Not `asyncio.run`, for which Ctrl-C is a wish: it would be granted when the sampler has decoded its last row
        with asyncio.Runner() as runner:
            return runner.get_loop().run_until_complete(work)
    beside: futures.Future[T] = Daemons(1).submit(_run, work)
    return beside.result()


def _warn(failures: Sequence[str], total: int) -> None:
    if not failures:
        return
    kinds = Counter(failure.partition(":")[0] for failure in failures)
    counted = f" ({', '.join(f'{count} {kind}' for kind, count in kinds.items())})" if len(kinds) > 1 else ""
    left = stuck()
    hung = f"; {left} {'thread is' if left == 1 else 'threads are'} still in calls that did not return" if left else ""
    warnings.warn(
        f"rollout: {len(failures)} of {total} episodes failed{counted} and are not trained on; the first: "
        f"{failures[0]}{hung}",
        skip_file_prefixes=(str(Path(__file__).parents[1]),),  # it is of the line that asked for rows
    )


def _rows(episodes: Sequence[Episode], version: int, temperature: float) -> Batch:
    size, width = len(episodes), max(1, *(len(episode.token_ids) for episode in episodes))
    ids = np.zeros((size, width), dtype=np.int64)
    real, sampled = np.zeros((size, width), dtype=bool), np.zeros((size, width), dtype=bool)
    logprobs = np.zeros((size, width), dtype=np.float32)
    for row, episode in enumerate(episodes):
        length = len(episode.token_ids)
        ids[row, :length], real[row, :length] = episode.token_ids, True
        sampled[row, :length], logprobs[row, :length] = episode.sampled, episode.logprobs
    valid = torch.tensor([episode.failure is None for episode in episodes])
    several = max((len(e.reward) for e in episodes if isinstance(e.reward, tuple) and not e.failure), default=0)
    nothing: Any = (math.nan,) * several if several else math.nan
    columns = {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(real),
        "loss_mask": torch.from_numpy(sampled),
        "rollout_logprobs": torch.from_numpy(logprobs),
        "temperature": torch.full((size,), temperature, dtype=torch.float32),
        "rewards": torch.tensor([nothing if e.failure else e.reward for e in episodes], dtype=torch.float32),
        "version": torch.tensor([version if e.version is None else e.version for e in episodes]),
        "valid": valid,
        "truncated": torch.tensor([episode.truncated for episode in episodes]),
    }
    for key in sorted({key for episode in episodes for key in episode.info}):
        columns[f"env/{key}"] = torch.tensor([float(e.info.get(key, math.nan)) for e in episodes])
    return assign(Batch({}, batch_size=[size]), **columns)


def _streamed(episodes: Sequence[Episode], batch: Batch) -> dict[str, Tensor]:
    """What else there is to say where engines are given weights while they decode, and may die one by one."""
    versions = torch.full_like(batch["input_ids"], -1)
    for row, episode in enumerate(episodes):
        versions[row, : len(episode.versions)] = torch.tensor(episode.versions, dtype=torch.int64)
    return {"versions": versions, "asked_again": torch.tensor([episode.again for episode in episodes])}


def rollouts(
    sampler: Sampler,
    env: Env,
    tasks: Stream[Task],
    *,
    n: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    patience: int = 3,
) -> Source[Batch]:
    """The stream of groups: ``n`` episodes of each task of a stream; the groups of one ``take`` are decoded together.

    Args:
        sampler: the policy.
        env: the environment.
        tasks: a stream of tasks, such as `nrl.data.tasks`.
        n: episodes of each task.
        sampling: instead of the sampler's own.
        seed: of the noise.
        patience: rollouts in a row that may fail whole (as many rows as so many of the largest have), where there is
            nothing to train on.

    Raises:
        DataError: ``n`` or ``patience`` is not positive.
        EnvError: (when taken from) the patience is at its end.
        LostRequest: the same, where it was the sampler that failed.

    >>> import nrl
    >>> from nrl import data, tiny
    >>> from nrl.backends import hf
    >>> from nrl.envs import exact, single_turn
    >>> with nrl.cluster("local") as cluster:
    ...     sampler = hf.sampler(cluster.reserve(1), tiny.model(), nrl.Sampling(max_new_tokens=3))
    ...     groups = rollouts(sampler, single_turn(exact), data.tasks("arithmetic"), n=4)
    ...     [group["group_ids"].tolist() for group in groups.take(2)]
    [[0, 0, 0, 0], [1, 1, 1, 1]]
    """
    if n < 1:
        raise DataError(f"rollouts: n is {n}; a group needs at least one episode")
    if patience < 1:
        raise DataError(f"rollouts: patience is {patience}; it must be at least 1")
    drawn = largest = failed = in_a_row = 0

    def take(count: int) -> list[Batch]:
        nonlocal drawn
        first, drawn = drawn, drawn + count
        batch, failures = _rollout(sampler, env, tasks.take(count), n, sampling, seed, first)
        check(len(batch), failures)
        return [cast(Batch, batch[start : start + n].lock_()) for start in range(0, len(batch), n)]

    def check(rows: int, failures: Sequence[str]) -> None:
        nonlocal largest, failed, in_a_row
        largest = max(largest, rows)
        failed, in_a_row = (failed + rows, in_a_row + 1) if len(failures) == rows else (0, 0)
        if failed >= patience * largest:
            lost = failures[0].startswith(LostRequest.__name__)
            raise (LostRequest if lost else EnvError)(
                f"rollouts: all rows of {in_a_row} rollouts in a row failed, {failed} of them, so there is nothing to "
                f"learn from; {'look at the sampler' if lost else 'mend the environment or its verifier'}. The first "
                f"of the last: {failures[0]}"
            )

    def restore(state: Mapping[str, Any]) -> None:
        nonlocal drawn
        tasks.restore(state["tasks"])
        drawn = int(state["groups"])

    def mark() -> Callable[[], None]:
        before = {"tasks": tasks.state(), "groups": drawn}
        return lambda: restore(before)

    remote = bool(getattr(sampler, "remote", False))
    return whole(Source(take, lambda: {"tasks": tasks.state(), "groups": drawn}, restore, remote, mark, sampler))
