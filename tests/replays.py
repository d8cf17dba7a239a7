"""Episodes of an example, and the same episodes played again by a script that says what was sampled."""

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

import nrl
from nrl.backends import Completion, Sampling
from nrl.envs import Env, Score, Task, Trace, score_of
from tests.jsonlines import lines

__all__ = ["Seen", "assert_replayed", "balances", "played", "recording", "taught"]

LESSONS = {"guess": 30, "tools": 160}  # supervised steps, after which episodes have several turns
ONE_TURN = {"guess": 2, "tools": 48}  # tokens


class Seen(NamedTuple):
    """What a verifier is shown of an episode."""

    task: Task
    token_ids: tuple[int, ...]
    sampled: tuple[bool, ...]

    @property
    def turns(self) -> list[tuple[bool, list[int]]]:
        """The tokens in pieces, and whether a piece was sampled."""
        pairs = zip(self.sampled, self.token_ids, strict=True)
        return [(own, [token for _, token in some]) for own, some in itertools.groupby(pairs, lambda pair: pair[0])]


@contextmanager
def recording(module: Any) -> Iterator[list[Seen]]:
    """The episodes that an example's environment ends meanwhile, in any order."""
    seen, env = list[Seen](), module.env

    def verifier(task: Task, trace: Trace) -> Score:
        seen.append(Seen(dict(task), trace.token_ids, trace.sampled))
        return score_of(env.verifier(task, trace) if env.verifier else 0.0)

    module.env = env._replace(verifier=verifier)
    try:
        yield seen
    finally:
        module.env = env


def taught(module: ModuleType, name: str, out: Path) -> Path:
    """The folder of a tiny model that an example has taught by its lessons and one step."""
    module.main(module.Config(out=str(out), steps=1, warmup=LESSONS[name], prompts=2))
    return out / "model"


def played(
    module: ModuleType, name: str, model: Path, out: Path, **options: Any
) -> tuple[list[dict[str, Any]], list[Seen]]:
    """The metrics and the episodes of a run of an example with this model."""
    small = {"steps": 3, "prompts": 4, "evaluate_every": 1000, "sampling": Sampling(max_new_tokens=ONE_TURN[name])}
    plain = {"chat": False} if name == "guess" else {}
    with recording(module) as seen:
        module.main(module.Config(model=str(model), out=str(out), **small, **plain, **options))
    return lines(out / "metrics.jsonl"), sorted(seen, key=lambda each: each.token_ids)


def assert_replayed(env: Env, seen: Seen, tokenizer: Any, context_length: int = 512) -> None:
    """All that was not sampled is what the environment and the bridges give here for the same sampled tokens."""
    said = iter([tokens for own, tokens in seen.turns if own])

    async def generate(so_far: list[int]) -> Completion:
        tokens = next(said)
        assert tuple(so_far) == seen.token_ids[: len(so_far)]
        return Completion(torch.tensor(tokens), torch.zeros(len(tokens)), truncated=False, version=1)

    again = asyncio.run(nrl.run_episode(generate, env, seen.task, tokenizer=tokenizer, context_length=context_length))
    assert again.failure is None
    assert tuple(again.token_ids) == seen.token_ids
    assert tuple(again.sampled) == seen.sampled
    assert next(said, None) is None


def balances(line: Mapping[str, Any]) -> bool:
    """Whether every token that was sampled is accounted for, in a line of ``metrics.jsonl``."""
    return bool(
        line["tokens/sampled"]
        == sum(line[f"tokens/{name}"] for name in ("trained", "masked", "beyond", "invalid", "dropped"))
        > 0
    )
