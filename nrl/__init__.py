"""nrl: a composable functional library for LLM post-training.

Write algorithms from pure functions over immutable batches; the runtime maps them onto meshes.

>>> import nrl, torch
>>> with nrl.cluster("local") as cluster:
...     mesh = cluster.reserve(3).mesh()
...     double = nrl.shard_map(lambda x: 2 * x, mesh, nrl.P("dp"), nrl.P("dp"))
...     double(torch.arange(4)).result().tolist()
[0, 2, 4, 6]
"""

from typing import TYPE_CHECKING

import nrl.imports  # noqa: F401  # what it does has to be done before tensordict is imported
from nrl.lazy import on_demand

if TYPE_CHECKING:
    from nrl.backends import Model, Sampling, adamw, evaluate, publish
    from nrl.batch import Batch, assign, concatenate, lengths, microbatches, minibatches, pad, require, shard
    from nrl.batch.columns import COLUMNS, declare
    from nrl.batch.packed_rows import Rectangles, Sequences
    from nrl.batch.packing import pack, packed, unpack
    from nrl.envs.endpoint.driven import driven
    from nrl.envs.gym.remoting import remote
    from nrl.envs.gym.serving import serve
    from nrl.envs.judging import judge
    from nrl.envs.mathematics.verifying import math_verifier
    from nrl.envs.pools.pool import on, pooled
    from nrl.envs.reasoning.tasks import reasoning_gym
    from nrl.envs.scoring import reward_model, scored_by
    from nrl.envs.shipped import environments
    from nrl.episodes import rollout, rollouts, run_episode
    from nrl.episodes.grades import Graded, grade, measure
    from nrl.episodes.sample_records import samples
    from nrl.episodes.schedules import cut, oversample, partial, refill
    from nrl.episodes.summaries import per_source, summary
    from nrl.reduce import Ess, Max, Mean, Metrics, Min, Sum, finalize, merge, prefixed, without
    from nrl.runs import run
    from nrl.runs.exits import launch
    from nrl.runs.retries import retrying
    from nrl.runs.training_loop import fit, minibatched
    from nrl.runtime import (
        Executable,
        Layout,
        P,
        cluster,
        donated,
        merged,
        microbatched,
        process,
        register,
        resident,
        shard_map,
    )
    from nrl.stream import ahead, batched, drop_uniform, filtered, fresh
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "COLUMNS",
    "Batch",
    "Ess",
    "Executable",
    "Graded",
    "Layout",
    "Max",
    "Mean",
    "Metrics",
    "Min",
    "Model",
    "P",
    "Rectangles",
    "Sampling",
    "Sequences",
    "Sum",
    "adamw",
    "ahead",
    "assign",
    "batched",
    "cluster",
    "concatenate",
    "cut",
    "declare",
    "donated",
    "driven",
    "drop_uniform",
    "environments",
    "evaluate",
    "filtered",
    "finalize",
    "fit",
    "fresh",
    "grade",
    "judge",
    "launch",
    "lengths",
    "math_verifier",
    "measure",
    "merge",
    "merged",
    "microbatched",
    "microbatches",
    "minibatched",
    "minibatches",
    "on",
    "oversample",
    "pack",
    "packed",
    "pad",
    "partial",
    "per_source",
    "pooled",
    "prefixed",
    "process",
    "publish",
    "reasoning_gym",
    "refill",
    "register",
    "remote",
    "require",
    "resident",
    "retrying",
    "reward_model",
    "rollout",
    "rollouts",
    "run",
    "run_episode",
    "samples",
    "scored_by",
    "serve",
    "shard",
    "shard_map",
    "summary",
    "unpack",
    "without",
]
