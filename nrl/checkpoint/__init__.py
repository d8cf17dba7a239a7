"""Checkpoints: named values in a folder that is either whole or not there."""

from nrl.checkpoint.keeping import Checkpoint, Checkpoints, best, checkpoints, score
from nrl.checkpoint.saving import (
    check,
    load,
    newest,
    random_state,
    save,
    set_random_state,
    store,
    trainers,
    verify,
)

__all__ = [
    "Checkpoint",
    "Checkpoints",
    "best",
    "check",
    "checkpoints",
    "load",
    "newest",
    "random_state",
    "save",
    "score",
    "set_random_state",
    "store",
    "trainers",
    "verify",
]
