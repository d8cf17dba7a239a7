"""Episodes: a sampler and an environment turn tasks into rows of a batch; summaries of them."""

from nrl.episodes.episode import Episode, run_episode
from nrl.episodes.grades import Graded, grade, measure
from nrl.episodes.rollout_batch import rollout
from nrl.episodes.rollout_stream import rollouts
from nrl.episodes.sample_records import samples
from nrl.episodes.schedules import cut, oversample, partial, refill
from nrl.episodes.summaries import per_source, summary

__all__ = [
    "Episode",
    "Graded",
    "cut",
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
