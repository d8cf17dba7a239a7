"""Many episodes at once, and their rows as a batch."""

import asyncio
import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from nrl.backends.base import Sampling
from nrl.backends.samplers import Sampler, capabilities
from nrl.batch import Batch, assign
from nrl.batch.ragged import ragged
from nrl.data import render
from nrl.envs import Env, Task
from nrl.envs.contract import STATUSES, Prompt
from nrl.episodes.call_threads import stuck
from nrl.episodes.episode import Episode, failed, play
from nrl.episodes.requests import requests_to
from nrl.episodes.verifier_calls import Caller, calling
from nrl.errors import DataError, EnvError
from nrl.runtime.threads import Daemons

__all__ = ["rollout", "rows_and_failures"]

_PLACES = 20  # bits of an episode's number that are its place in the group


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
        first_group: the number of the first group; numbers have to be unique in the run.

    Returns:
        A batch ``[B, T]``, a row for each of ``len(tasks) * n`` episodes, and more of those that forked, since a chat
        template wrote their earlier turns in another way; ``episode_ids`` tells them. It has ``input_ids``,
        ``attention_mask``, ``loss_mask``, ``rollout_logprobs``, ``temperature``, ``rewards`` (NaN in failed rows),
        ``group_ids``, ``version``, ``valid``, ``truncated``, ``sampled`` (how many tokens were sampled for a row, those
        beyond the context too), ``status`` (its place among `nrl.envs.STATUSES`), where a reward is one number
        ``token_rewards`` (of each turn, at its last token), with ``source`` where tasks have one, and of a sampler that
        streams ``versions`` (of each token; -1 where it was not sampled) and ``asked_again``, and of one that records
        them ``routes``. ``reward/<name>`` are components of rewards. Of the environment's own numbers ``env/<name>`` is
        the last that an episode reported; ``("info", <name>)`` is ragged and has those of every step, NaN where it
        reported none.

    Raises:
        DataError: there are no tasks, or ``n`` is not positive.
        GenerationError: the sampler could not serve a request. Its other errors are passed on, too.

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
    return rows_and_failures(sampler, env, tasks, n, sampling, seed, first_group)[0]


def rows_and_failures(
    sampler: Sampler, env: Env, tasks: Sequence[Task], n: int, sampling: Sampling | None, seed: int, first_group: int
) -> tuple[Batch, list[str]]:
    """Do the work of `rollout`, and also return why rows failed, a text for each failed row."""
    if not tasks or n < 1:
        raise DataError(f"rollout: {len(tasks)} tasks with n={n}; there must be at least one of each")
    seeds = [_seed(seed, first_group + group, place) for group in range(len(tasks)) for place in range(n)]
    tasks = [{"seed": _seed(seed, first_group + group), **task} for group, task in enumerate(tasks)]
    streams, routes = capabilities(sampler).streams, capabilities(sampler).routes
    requests = requests_to(sampler, sampling, seeds)
    rendered: dict[str, list[int]] = {}

    def once(prompt: Prompt, tokenizer: Any) -> list[int]:
        """Render a prompt once: the rows of a group share it."""
        key = repr(prompt)
        if key not in rendered:
            rendered[key] = render(prompt, tokenizer)
        return rendered[key]

    async def one(index: int, call: Caller) -> Episode:
        generate = partial(requests.generate, index)
        task = tasks[index // n]
        episode = await play(generate, env, task, sampler.tokenizer, sampler.context_length, render=once, call=call)
        requests.leave()  # not after an error, which ends all episodes: nothing more is to be asked
        return episode

    async def every() -> list[Episode]:
        with calling(env) as caller_of:
            calls = [caller_of(tasks[index // n]) for index in range(len(seeds))]
            running = [asyncio.create_task(one(index, call)) for index, call in enumerate(calls)]
            try:
                await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
                found = [episode.result() for episode in running if episode.done()]
                await _judged(env, tasks, [found[at : at + n] for at in range(0, len(found), n)], calls[::n])
                return found
            finally:  # states are closed; errors are seen, so that asyncio does not log them
                for episode in running:
                    episode.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    sources = _sources(tasks)
    episodes = _run(every())
    _check_rewards(episodes)
    failures = [episode.failure for episode in episodes if episode.failure]
    _warn(failures, len(episodes))
    temperature = (sampling or sampler.sampling).temperature
    rows = [(index, row) for index, episode in enumerate(episodes) for row in episode.rows()]
    flat, of = [row for _, row in rows], torch.tensor([index for index, _ in rows])
    batch = _rows(flat, sampler.version, temperature)
    groups = first_group + of // n
    columns: dict[str, Tensor] = {"group_ids": groups, "episode_ids": (groups << _PLACES) + of % n}
    if streams:
        columns |= _streamed(flat, batch)
    if routes is not None:
        columns["routes"] = _routed(flat, batch, routes)
    if sources is not None:
        columns["source"] = torch.tensor(sources)[of // n]
    return assign(batch, **columns), failures


async def _judged(
    env: Env, tasks: Sequence[Task], groups: Sequence[Sequence[Episode]], calls: Sequence[Caller]
) -> None:
    """Ask a verifier of whole groups, if the environment has one."""
    verifier: Any = getattr(env, "verifier", None)
    if not getattr(verifier, "of_group", False):
        return

    async def judge(task: Task, group: Sequence[Episode], call: Caller) -> None:
        live = [episode for episode in group if episode.failure is None]
        if not live:
            return
        try:
            verdicts = list(await call(verifier, task, [episode.trace for episode in live]))
            if len(verdicts) != len(live):
                raise EnvError(f"the verifier of a group gave {len(verdicts)} verdicts for {len(live)} episodes")
            for episode, verdict in zip(live, verdicts, strict=True):
                episode.earn(verdict)
        except Exception as error:
            for episode in live:
                failed(error, episode)

    await asyncio.gather(*map(judge, tasks, groups, calls))


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
    """Fail the episodes that have another number of rewards than the first valid one, since rows must agree in it."""
    sizes = [np.size(episode.reward) if isinstance(episode.reward, tuple) else 0 for episode in episodes]
    first = next((size for size, episode in zip(sizes, episodes, strict=True) if episode.failure is None), 0)
    for size, episode in zip(sizes, episodes, strict=True):
        if episode.failure is None and size != first:
            episode.fail(
                f"EnvError: the reward is {episode.reward}, and other episodes have "
                f"{f'{first} rewards' if first else 'one number'}; give every episode as many"
            )


def _seed(*parts: int) -> int:
    """63 bits that depend on all parts: a hash, so that neighbours have nothing in common."""
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _run[T](work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; in another thread if a loop is running already, as in a notebook."""
    try:
        inside = asyncio.get_running_loop().is_running()
    except RuntimeError:
        inside = False
    if not inside:
        # Not `asyncio.run`, which would delay Ctrl-C until the sampler has decoded its last row
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
        skip_file_prefixes=(str(Path(__file__).parents[1]),),  # the warning names the caller's line
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
        "sampled": torch.tensor([episode.drawn for episode in episodes]),
        "status": torch.tensor([STATUSES.index(episode.status) for episode in episodes]),
        "truncated": torch.tensor([episode.truncated for episode in episodes]),
    }
    if not several:
        columns["token_rewards"] = _at_turns(episodes, width)
    return assign(Batch({}, batch_size=[size]), **columns, **_components(episodes), **_reported(episodes))


def _at_turns(episodes: Sequence[Episode], width: int) -> Tensor:
    """``[B, T]`` float32, each turn's reward at its last token; invalid rows have 0."""
    found = torch.zeros(len(episodes), width)
    for row, episode in enumerate(episodes):
        for at, reward in episode.turn_rewards if episode.failure is None else ():
            found[row, min(at, width - 1)] += cast(float, reward)
    return found


def _components(episodes: Sequence[Episode]) -> dict[str, Tensor]:
    """What rewards are made of; NaN where a row has no such component."""
    names = sorted({name for episode in episodes for name in episode.components})
    return {
        f"reward/{name}": torch.tensor(
            [e.components.get(name, math.nan) if not e.failure else math.nan for e in episodes]
        )
        for name in names
    }


def _reported(episodes: Sequence[Episode]) -> dict[str, Any]:
    """The environment's own numbers."""
    names = sorted({name for episode in episodes for step in episode.info for name in step})
    last, every = {}, {}
    for name in names:
        each = [[step.get(name, math.nan) for step in episode.info] for episode in episodes]
        reported = [[x for step in episode.info if (x := step.get(name)) is not None] for episode in episodes]
        last[f"env/{name}"] = torch.tensor([(found or [math.nan])[-1] for found in reported])
        every[name] = ragged([torch.tensor(steps, dtype=torch.float32) for steps in each])
    return {**last, "info": Batch(every, batch_size=[len(episodes)])} if names else {}


def _streamed(episodes: Sequence[Episode], batch: Batch) -> dict[str, Tensor]:
    """The columns of samplers whose engines get weights while they decode, and may die one by one."""
    versions = torch.full_like(batch["input_ids"], -1)
    for row, episode in enumerate(episodes):
        versions[row, : len(episode.versions)] = torch.tensor(episode.versions, dtype=torch.int64)
    return {"versions": versions, "asked_again": torch.tensor([episode.again for episode in episodes])}


def _routed(episodes: Sequence[Episode], batch: Batch, shape: tuple[int, int]) -> Tensor:
    """The experts of each token; -1 for padding, and for tokens that the sampler never had as an input."""
    routes = torch.full((*batch["input_ids"].shape, *shape), -1, dtype=torch.int16)
    for row, episode in enumerate(episodes):
        if episode.routes is not None:
            length = min(len(episode.token_ids), len(episode.routes))
            routes[row, :length] = episode.routes[:length]
    return routes
