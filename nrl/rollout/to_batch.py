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
from nrl.batch.ragged import make_ragged
from nrl.envs.types import STATUSES
from nrl.rollout.bridges import FORKS
from nrl.rollout.episode import Episode
from nrl.rollout.episode_group import EpisodeGroup
from nrl.rollout.scheduler import EpisodeSchedule

__all__ = ["rows_of"]

_PLACES = 20  # bits of an episode's number that are its place in the group


def rows_of(
    groups: Sequence[EpisodeGroup],
    sampler: Sampler,
    sampling: Sampling | None,
    schedule: EpisodeSchedule,
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
    ended = [(group, index, episode) for group in groups for index, episode in group.ended]
    num_rewards = _check_rewards([episode for *_, episode in ended], num_rewards, declared)
    numbered_rows = [(group, index, row) for group, index, episode in ended for row in episode.rows()]
    flat, numbers = [row for *_, row in numbered_rows], torch.tensor([group.number for group, *_ in numbered_rows])
    batch = _rows(flat, sampler.version, (sampling or sampler.sampling).temperature, num_rewards)
    places = torch.tensor([index for _, index, _ in numbered_rows])
    columns: dict[str, Tensor] = {"group_ids": numbers, "episode_ids": (numbers << _PLACES) + places}
    if capabilities(sampler).streams:  # Its engines may die one by one.
        columns["asked_again"] = torch.tensor([row.again for row in flat])
    if capabilities(sampler).streams or schedule.extra:  # weights may change in an episode
        columns["versions"] = _version_column(flat, batch)
    if (routes := capabilities(sampler).routes) is not None:
        columns["routes"] = _route_column(flat, batch, routes)
    if any("source" in group.task for group in groups):
        columns["source"] = torch.tensor([group.task.get("source", 0) for group, *_ in numbered_rows])
    if schedule.deadline is not None:
        columns["cut"] = torch.tensor([row.cut for row in flat])
    if schedule.keep is not None:
        columns |= _left_out_columns(groups, numbers)
    return assign(batch, **columns)


def _left_out_columns(groups: Sequence[EpisodeGroup], numbers: Tensor) -> dict[str, Tensor]:
    """Return the counts of abandoned episodes and their tokens, at the first row of their group."""
    columns = {name: torch.zeros_like(numbers) for name in ("left_out", "dropped_tokens/left_out")}
    for group in groups:
        first = int((numbers == group.number).nonzero()[0])
        columns["left_out"][first] = len(group.left_out)
        columns["dropped_tokens/left_out"][first] = sum(
            row.drawn for episode in group.left_out for row in episode.rows()
        )
    return columns


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
    (most_frequent, count), (_, next_count) = [*sizes.most_common(2), (0, 0), (0, 0)][:2]
    undecided = num_rewards is None and count > 0 and next_count == count
    expected = most_frequent if num_rewards is None else num_rewards
    for episode in episodes:
        if episode.failure is None and (undecided or _num_rewards(episode) != expected):
            other_sizes = sorted({*sizes, expected} - {_num_rewards(episode)})
            numbers = " or ".join(f"{size} rewards" if size else "one number" for size in other_sizes)
            episode.fail(
                f"EnvError: the reward is {episode.reward}, and other episodes have {numbers}; give every episode as "
                "many"
            )
    return 0 if undecided else expected


def _num_rewards(episode: Episode) -> int:
    return len(episode.reward) if isinstance(episode.reward, tuple) else 0


def _rows(episodes: Sequence[Episode], version: int, temperature: float, num_rewards: int) -> Batch:
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
    no_reward: Any = (math.nan,) * num_rewards if num_rewards else math.nan
    columns = {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(real),
        "loss_mask": torch.from_numpy(sampled),
        "rollout_logprobs": torch.from_numpy(logprobs),
        "turns": torch.from_numpy(turns),
        "temperature": torch.full((size,), temperature, dtype=torch.float32),
        "rewards": torch.tensor([no_reward if e.failure else e.reward for e in episodes], dtype=torch.float32),
        "version": torch.tensor([version if e.version is None else e.version for e in episodes]),
        "valid": valid,
        "sampled": torch.tensor([episode.drawn for episode in episodes]),
        "status": torch.tensor([STATUSES.index(episode.status) for episode in episodes]),
        "truncated": torch.tensor([episode.truncated for episode in episodes]),
        "reasoning_ended": torch.tensor([episode.reasoning_ended for episode in episodes]),
        "forked": torch.tensor([FORKS.index(e.forked.reason if e.forked else "") for e in episodes]),
    }
    if not num_rewards:
        columns["token_rewards"] = _token_rewards(episodes, width)
    return assign(Batch({}, batch_size=[size]), **columns, **_component_columns(episodes), **_info_columns(episodes))


def _token_rewards(episodes: Sequence[Episode], width: int) -> Tensor:
    """``[B, T]`` float32, each turn's reward at its last token; invalid rows have 0."""
    rewards = torch.zeros(len(episodes), width)
    for row, episode in enumerate(episodes):
        for index, reward in episode.turn_rewards if episode.failure is None else ():
            rewards[row, min(index, width - 1)] += cast(float, reward)
    return rewards


def _component_columns(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the components of rewards, in all and of each turn; NaN: a row or a turn lacks the component."""
    sums = [{} if episode.failure else episode.components for episode in episodes]
    names = sorted(
        {name for episode in episodes for values_of_turn in episode.turn_components.values() for name in values_of_turn}
    )
    components = {
        name: make_ragged(
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
    totals = {f"reward/{name}": torch.tensor([values.get(name, math.nan) for values in sums]) for name in names}
    return {**totals, "components": Batch(components, batch_size=[len(episodes)])} if names else {}


def _info_columns(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the columns of numbers that the environment reported."""
    names = sorted({name for episode in episodes for step in episode.info for name in step})
    last, steps_by_name = {}, {}
    for name in names:
        rows = [[step.get(name, math.nan) for step in episode.info] for episode in episodes]
        reported = [[x for step in episode.info if (x := step.get(name)) is not None] for episode in episodes]
        last[f"env/{name}"] = torch.tensor([(values or [math.nan])[-1] for values in reported])
        steps_by_name[name] = make_ragged([torch.tensor(steps, dtype=torch.float32) for steps in rows])
    return {**last, "info": Batch(steps_by_name, batch_size=[len(episodes)])} if names else {}


def _version_column(episodes: Sequence[Episode], batch: Batch) -> Tensor:
    """Return the version of the weights that sampled each token; -1: the token was not sampled."""
    versions = torch.full_like(batch["input_ids"], -1)
    for row, episode in enumerate(episodes):
        versions[row, : len(episode.versions)] = torch.tensor(episode.versions, dtype=torch.int64)
    return versions


def _route_column(episodes: Sequence[Episode], batch: Batch, shape: tuple[int, int]) -> Tensor:
    """Return the experts of each token; -1 for padding, and for tokens that the sampler never had as an input."""
    routes = torch.full((*batch["input_ids"].shape, *shape), -1, dtype=torch.int16)
    for row, episode in enumerate(episodes):
        if episode.routes is not None:
            length = min(len(episode.token_ids), len(episode.routes))
            routes[row, :length] = episode.routes[:length]
    return routes
