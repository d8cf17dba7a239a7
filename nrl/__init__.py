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
from nrl._lazy import on_demand

if TYPE_CHECKING:
    from nrl.backends import Model, Sampling, adamw, evaluate, publish
    from nrl.batch import Batch, assign, concatenate, lengths, microbatches, minibatches, pad, require, shard
    from nrl.batch.columns import COLUMNS, declare
    from nrl.batch.metrics import Ess, Max, Mean, Metrics, Min, Sum, finalize, merge, prefixed, without
    from nrl.batch.packed_rows import Rectangles, Sequences
    from nrl.batch.packing import pack, packed, unpack
    from nrl.envs.builtin import environments
    from nrl.envs.library.mathematics.verifying import math_verifier
    from nrl.envs.library.reasoning.tasks import reasoning_gym
    from nrl.envs.llm_judge import judge
    from nrl.envs.pool.pool import on, pooled
    from nrl.envs.reward_model import reward_model, scored_by
    from nrl.gym.endpoint.agent_env import driven
    from nrl.gym.http.remote_env import remote
    from nrl.gym.http.serve_app import serve
    from nrl.rollout.episode import run_episode
    from nrl.rollout.evaluate import Graded, grade, measure
    from nrl.rollout.prefetch import ahead
    from nrl.rollout.rollout_batch import rollout
    from nrl.rollout.rollout_stream import rollouts
    from nrl.rollout.sample_records import samples
    from nrl.rollout.schedules import cut, oversample, partial, refill
    from nrl.rollout.summaries import per_source, summary
    from nrl.rollout.transforms import batched, drop_uniform, filtered, fresh
    from nrl.run.checkpoint import Checkpoints
    from nrl.run.exit_codes import launch
    from nrl.run.retries import retrying
    from nrl.run.run import run
    from nrl.run.training_loop import fit, minibatched
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
else:
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "COLUMNS",
    "Batch",
    "Checkpoints",
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
