"""Batches: values with named columns; splitting, joining and packing them."""

from nrl.batch.columns import COLUMNS, declare
from nrl.batch.parts import Parts, concatenate, deal, microbatches, minibatches, pad, restore, shard
from nrl.batch.values import Batch, assign, forbid_writes, lengths, require

__all__ = [
    "COLUMNS",
    "Batch",
    "Parts",
    "assign",
    "concatenate",
    "deal",
    "declare",
    "forbid_writes",
    "lengths",
    "microbatches",
    "minibatches",
    "pad",
    "require",
    "restore",
    "shard",
]
