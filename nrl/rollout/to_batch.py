"""Episodes that have ended, as the rows of a batch."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from nrl.backends.sampling.base import Sampler, capabilities
from nrl.backends.types import Sampling
from nrl.batch import Batch, assign
from nrl.batch.ragged import ragged
from nrl.envs.types import STATUSES
from nrl.rollout.bridges import FORKS
from nrl.rollout.episode import Episode
from nrl.rollout.groups import Group
from nrl.rollout.scheduler import Schedule

__all__ = ["rows_of"]

_PLACES = 20  # bits of an episode's number that are its place in the group


def rows_of(
    groups: Sequence[Group],
    sampler: Sampler,
    sampling: Sampling | None,
    schedule: Schedule,
    num_rewards: int | None = None,
    declared: int | None = None,
) -> Batch:
    """The rows of groups, group after group, with the columns that `nrl.rollout` names.

    Args:
        groups: that have ended.
        sampler: of their episodes.
        sampling: instead of the sampler's own.
        schedule: by which they ended.
        num_rewards: of an episode, 0 where that is one number; the others fail. None: as many as most episodes have.
        declared: the same as the environment declares it, which comes first.
    """
    ended = [(group, place, episode) for group in groups for place, episode in group.ended]
    num_rewards = _check_rewards([episode for *_, episode in ended], num_rewards, declared)
    every = [(group, place, row) for group, place, episode in ended for row in episode.rows()]
    flat, numbers = [row for *_, row in every], torch.tensor([group.number for group, *_ in every])
    batch = _rows(flat, sampler.version, (sampling or sampler.sampling).temperature, num_rewards)
    places = torch.tensor([place for _, place, _ in every])
    columns: dict[str, Tensor] = {"group_ids": numbers, "episode_ids": (numbers << _PLACES) + places}
    if capabilities(sampler).streams:  # whose engines may die one by one
        columns["asked_again"] = torch.tensor([row.again for row in flat])
    if capabilities(sampler).streams or schedule.extra:  # weights may change in an episode
        columns["versions"] = _versions(flat, batch)
    if (routes := capabilities(sampler).routes) is not None:
        columns["routes"] = _routed(flat, batch, routes)
    if any("source" in group.task for group in groups):
        columns["source"] = torch.tensor([group.task.get("source", 0) for group, *_ in every])
    if schedule.deadline is not None:
        columns["cut"] = torch.tensor([row.cut for row in flat])
    if schedule.keep is not None:
        columns |= _left_out(groups, numbers)
    return assign(batch, **columns)


def _left_out(groups: Sequence[Group], numbers: Tensor) -> dict[str, Tensor]:
    """How many episodes were not waited for, and how many tokens they had, at the first row of their group."""
    found = {name: torch.zeros_like(numbers) for name in ("left_out", "dropped_tokens/left_out")}
    for group in groups:
        first = int((numbers == group.number).nonzero()[0])
        found["left_out"][first] = len(group.left_out)
        found["dropped_tokens/left_out"][first] = sum(row.drawn for episode in group.left_out for row in episode.rows())
    return found


def _check_rewards(episodes: Sequence[Episode], num_rewards: int | None, declared: int | None) -> int:
    """Fail the episodes that have another number of rewards than the others, since rows must agree in it.

    Where none is the most frequent one, nothing says which is right, so all of them fail. The order of the episodes
    changes nothing. Where several are declared, an episode without any reward has as many zeros.
    """
    if declared is not None:
        for episode in episodes:
            if episode.failure is None and declared and episode.reward == 0:
                episode.reward = (0.0,) * declared
            elif episode.failure is None and _num_rewards(episode) != declared:
                episode.fail(
                    f"EnvError: the reward is {episode.reward}, and the environment declares num_rewards={declared}; "
                    f"return {f'{declared} rewards' if declared else 'one number'}, or change num_rewards"
                )
        return declared
    sizes = Counter(_num_rewards(episode) for episode in episodes if episode.failure is None)
    (most, count), (_, next_count) = [*sizes.most_common(2), (0, 0), (0, 0)][:2]
    undecided = num_rewards is None and count > 0 and next_count == count
    wanted = most if num_rewards is None else num_rewards
    for episode in episodes:
        if episode.failure is None and (undecided or _num_rewards(episode) != wanted):
            others = sorted({*sizes, wanted} - {_num_rewards(episode)})
            numbers = " or ".join(f"{size} rewards" if size else "one number" for size in others)
            episode.fail(
                f"EnvError: the reward is {episode.reward}, and other episodes have {numbers}; give every episode as "
                "many"
            )
    return 0 if undecided else wanted


def _num_rewards(episode: Episode) -> int:
    return len(episode.reward) if isinstance(episode.reward, tuple) else 0


def _rows(episodes: Sequence[Episode], version: int, temperature: float, several: int) -> Batch:
    size, width = len(episodes), max(1, *(len(episode.token_ids) for episode in episodes))
    ids = np.zeros((size, width), dtype=np.int64)
    real, sampled = np.zeros((size, width), dtype=bool), np.zeros((size, width), dtype=bool)
    logprobs, turns = np.zeros((size, width), dtype=np.float32), np.full((size, width), -1, dtype=np.int16)
    for row, episode in enumerate(episodes):
        length = len(episode.token_ids)
        ids[row, :length], real[row, :length] = episode.token_ids, True
        sampled[row, :length], logprobs[row, :length] = episode.sampled, episode.logprobs
        turns[row, :length] = episode.turn_of
    valid = torch.tensor([episode.failure is None for episode in episodes])
    nothing: Any = (math.nan,) * several if several else math.nan
    columns = {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(real),
        "loss_mask": torch.from_numpy(sampled),
        "rollout_logprobs": torch.from_numpy(logprobs),
        "turns": torch.from_numpy(turns),
        "temperature": torch.full((size,), temperature, dtype=torch.float32),
        "rewards": torch.tensor([nothing if e.failure else e.reward for e in episodes], dtype=torch.float32),
        "version": torch.tensor([version if e.version is None else e.version for e in episodes]),
        "valid": valid,
        "sampled": torch.tensor([episode.drawn for episode in episodes]),
        "status": torch.tensor([STATUSES.index(episode.status) for episode in episodes]),
        "truncated": torch.tensor([episode.truncated for episode in episodes]),
        "reasoning_ended": torch.tensor([episode.reasoning_ended for episode in episodes]),
        "forked": torch.tensor([FORKS.index(e.forked.reason if e.forked else "") for e in episodes]),
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


def _components(episodes: Sequence[Episode]) -> dict[str, Any]:
    """What rewards are made of, in all and in each turn; NaN where a row or a turn has no such component."""
    sums = [{} if episode.failure else episode.components for episode in episodes]
    names = sorted({name for episode in episodes for named in episode.turn_components.values() for name in named})
    every = {
        name: ragged(
            [
                torch.tensor(
                    [
                        math.nan if e.failure else e.turn_components.get(turn, {}).get(name, math.nan)
                        for turn in range(len(e.turns))
                    ]
                )
                for e in episodes
            ]
        )
        for name in names
    }
    totals = {f"reward/{name}": torch.tensor([found.get(name, math.nan) for found in sums]) for name in names}
    return {**totals, "components": Batch(every, batch_size=[len(episodes)])} if names else {}


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


def _versions(episodes: Sequence[Episode], batch: Batch) -> Tensor:
    """The version of the weights that sampled each token; -1 for what was not sampled."""
    found = torch.full_like(batch["input_ids"], -1)
    for row, episode in enumerate(episodes):
        found[row, : len(episode.versions)] = torch.tensor(episode.versions, dtype=torch.int64)
    return found


def _routed(episodes: Sequence[Episode], batch: Batch, shape: tuple[int, int]) -> Tensor:
    """The experts of each token; -1 for padding, and for tokens that the sampler never had as an input."""
    routes = torch.full((*batch["input_ids"].shape, *shape), -1, dtype=torch.int16)
    for row, episode in enumerate(episodes):
        if episode.routes is not None:
            length = min(len(episode.token_ids), len(episode.routes))
            routes[row, :length] = episode.routes[:length]
    return routes
