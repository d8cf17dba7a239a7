"""Rollouts: a sampler and an environment turn tasks into rows of a batch.

`episode` runs one conversation, `scheduler` many at once, and `to_batch` makes rows of them. `rollout_stream` yields
groups of episodes, `schedules` says when they begin and end, and `transforms` and `prefetch` turn one stream into
another. `evaluate` and `summaries` compute metrics.
"""

from typing import TYPE_CHECKING

from nrl._lazy import on_demand

if TYPE_CHECKING:
    from nrl.rollout.episode import Episode, run_episode
    from nrl.rollout.evaluate import Graded, grade, measure
    from nrl.rollout.prefetch import ahead
    from nrl.rollout.rollout_batch import rollout
    from nrl.rollout.rollout_stream import rollouts
    from nrl.rollout.sample_records import samples
    from nrl.rollout.schedules import cut, oversample, partial, refill
    from nrl.rollout.summaries import per_source, summary
    from nrl.rollout.transforms import Versioned, batched, drop_uniform, filtered, fresh
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "Episode",
    "Graded",
    "Versioned",
    "ahead",
    "batched",
    "cut",
    "drop_uniform",
    "filtered",
    "fresh",
    "grade",
    "measure",
    "oversample",
    "partial",
    "per_source",
    "refill",
    "rollout",
    "rollouts",
    "run_episode",
    "samples",
    "summary",
]
