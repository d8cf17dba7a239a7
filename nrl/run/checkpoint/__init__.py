"""Checkpoints: named values in a folder that is either whole or not there."""

from nrl.run.checkpoint.retention import Checkpoint, Checkpoints, best, checkpoints, finite, score
from nrl.run.checkpoint.saving import begin_storing, load, newest, save, store, verify
from nrl.run.checkpoint.state import check, random_state, seed_generators, set_random_state, trainers
from nrl.run.checkpoint.storage import REMOTE, root, settle, step_dir

__all__ = [
    "REMOTE",
    "Checkpoint",
    "Checkpoints",
    "begin_storing",
    "best",
    "check",
    "checkpoints",
    "finite",
    "load",
    "newest",
    "random_state",
    "root",
    "save",
    "score",
    "seed_generators",
    "set_random_state",
    "settle",
    "step_dir",
    "store",
    "trainers",
    "verify",
]
