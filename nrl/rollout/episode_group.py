"""The episodes of one task: they begin together, end by a schedule, and may be judged together."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import attrs

from nrl.data import render
from nrl.envs import Task
from nrl.envs.inprocess.call_with_timeout import Caller
from nrl.envs.return_values import verdicts_of
from nrl.envs.types import Prompt
from nrl.rollout.episode import Episode, earn, record_failure

__all__ = ["EpisodeGroup"]


@attrs.define(eq=False)
class EpisodeGroup:
    """The episodes of a task.

    Args:
        number: of the group.
        task: with its seed.
        episodes: in the order of their places.
        ended: places and episodes that count, when the group has ended.
        left_out: those that were not waited for.
    """

    number: int
    task: Task
    episodes: list[Episode]
    ended: list[tuple[int, Episode]] = attrs.field(factory=list)
    left_out: list[Episode] = attrs.field(factory=list)
    run_task: "asyncio.Task[None]" = attrs.field(init=False)  # ends when all has been played and judged
    _playing: "list[asyncio.Task[None]]" = attrs.field(factory=list)
    _is_late: bool = False
    _is_judging: bool = False
    _rendered: dict[Any, list[int]] = attrs.field(factory=dict)

    def render(self, prompt: Prompt, tokenizer: Any, *, max_tokens: int | None = None) -> list[int]:
        """Render a prompt once: the episodes share it. It is as `nrl.envs.policy_inputs.read_prompt` gives it."""
        chat = not isinstance(prompt, str) and any(isinstance(part, Mapping) for part in prompt)
        key: Any = prompt if isinstance(prompt, str) else repr(prompt) if chat else tuple(prompt)
        if key not in self._rendered:
            self._rendered[key] = render(prompt, tokenizer, max_tokens=max_tokens)
        return self._rendered[key]

    def cut_off(self) -> None:
        """End what is not over; a verdict over the whole group, too."""
        self._is_late = True
        if self._is_judging:
            self.run_task.cancel()
        else:
            self._cut_episodes()

    def _cut_episodes(self) -> None:
        for episode, playing in zip(self.episodes, self._playing, strict=True):
            if not playing.done():
                episode.cut = True
                playing.cancel()

    def start(self, play_episode: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Let all episodes begin."""
        self._playing = [asyncio.create_task(play_episode(index)) for index in range(len(self.episodes))]

    async def play(self, keep: int) -> None:
        """Play ``keep`` episodes to a valid end, as far as there are so many; the others are left out."""
        pending, good = set(self._playing), list[int]()
        return_when = asyncio.FIRST_EXCEPTION if keep == len(self.episodes) else asyncio.FIRST_COMPLETED
        try:
            while pending and len(good) < keep:
                over, pending = await asyncio.wait(pending, return_when=return_when)
                for playing in over:
                    playing.result()
                ended = [index for index, playing in enumerate(self._playing) if playing.done()]
                good = [index for index in ended if self.episodes[index].counts]
        except BaseException:
            for playing in self._playing:
                playing.cancel()
            raise
        else:
            self._cut_episodes()
        finally:
            await asyncio.gather(*self._playing, return_exceptions=True)
        bad = [index for index in ended if index not in good]
        chosen = sorted([*good, *bad][:keep])
        self.ended = [(index, self.episodes[index]) for index in chosen]
        self.left_out = [playing for index, playing in enumerate(self.episodes) if index not in chosen]

    async def judge(self, verifier: Any, call: Caller) -> None:
        """Ask a verifier of whole groups, unless it is too late."""
        live, self._is_judging = [episode for _, episode in self.ended if episode.counts], True
        if self._is_late:
            for episode in live:
                episode.cut = True
        if self._is_late or not live:
            return
        try:
            verdicts = verdicts_of(await call(verifier, self.task, [episode.trace for episode in live]), len(live))
        except asyncio.CancelledError:
            if not self._is_late:
                raise
            for episode in live:
                episode.cut = True
        except Exception as error:
            for episode in live:
                record_failure(error, episode)
        else:
            for episode, verdict in zip(live, verdicts, strict=True):
                earn(episode, verdict)
