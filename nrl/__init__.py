"""nrl: a composable functional library for LLM post-training.

Algorithms are written from pure functions over immutable batches; a runtime maps them onto meshes.

>>> import nrl, torch
>>> with nrl.cluster("local") as cluster:
...     mesh = cluster.reserve(3).mesh()
...     double = nrl.shard_map(lambda x: 2 * x, mesh, nrl.P("dp"), nrl.P("dp"))
...     double(torch.arange(4)).result().tolist()
[0, 2, 4, 6]
"""

import nrl.imports  # isort: skip  # noqa: F401  # before any other module imports tensordict
from nrl.backends import Model, Sampling, adamw, evaluate, publish
from nrl.batch import Batch, assign, concatenate, lengths, microbatches, minibatches, pad, require, shard
from nrl.columns import COLUMNS
from nrl.episodes import rollout, rollouts, run_episode
from nrl.fitting import fit, minibatched
from nrl.grades import Graded, grade, measure
from nrl.judges import scored_by
from nrl.launching import launch
from nrl.pack import pack, packed, unpack
from nrl.reduce import Ess, Max, Mean, Metrics, Min, Sum, finalize, merge, prefixed, without
from nrl.retries import retrying
from nrl.runs import run
from nrl.runtime import (
    Executable,
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
from nrl.summaries import per_source, samples, summary

__all__ = [
    "COLUMNS",
    "Batch",
    "Ess",
    "Executable",
    "Graded",
    "Max",
    "Mean",
    "Metrics",
    "Min",
    "Model",
    "P",
    "Sampling",
    "Sum",
    "adamw",
    "ahead",
    "assign",
    "batched",
    "cluster",
    "concatenate",
    "donated",
    "drop_uniform",
    "evaluate",
    "filtered",
    "finalize",
    "fit",
    "fresh",
    "grade",
    "launch",
    "lengths",
    "measure",
    "merge",
    "merged",
    "microbatched",
    "microbatches",
    "minibatched",
    "minibatches",
    "pack",
    "packed",
    "pad",
    "per_source",
    "prefixed",
    "process",
    "publish",
    "register",
    "require",
    "resident",
    "retrying",
    "rollout",
    "rollouts",
    "run",
    "run_episode",
    "samples",
    "scored_by",
    "shard",
    "shard_map",
    "summary",
    "unpack",
    "without",
]
