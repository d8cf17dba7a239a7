"""Checkpoints: named values in a folder that is either whole or not there."""

from nrl.checkpoint.keeping import Checkpoint, Checkpoints, best, checkpoints, finite, score
from nrl.checkpoint.places import ELSEWHERE, place, root, settle
from nrl.checkpoint.saving import begin_storing, load, newest, save, store, verify
from nrl.checkpoint.values import check, random_state, seed_generators, set_random_state, trainers

__all__ = [
    "ELSEWHERE",
    "Checkpoint",
    "Checkpoints",
    "begin_storing",
    "best",
    "check",
    "checkpoints",
    "finite",
    "load",
    "newest",
    "place",
    "random_state",
    "root",
    "save",
    "score",
    "seed_generators",
    "set_random_state",
    "settle",
    "store",
    "trainers",
    "verify",
]
