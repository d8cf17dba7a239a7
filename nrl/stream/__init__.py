"""Streams: endless sources that are pulled, and the transforms that turn one into another.

A stream is pulled by ``take(n)`` and produces nothing that was not asked for. So the pulls alone decide which items are
sampled together. Its ``state()`` is the cursor after the consumed items, with pending ones, and ``restore`` continues
from there.
"""

from nrl.stream.cursors import Source, Stream, counting, whole
from nrl.stream.prefetch import ahead
from nrl.stream.transforms import Versioned, batched, drop_uniform, filtered, fresh

__all__ = [
    "Source",
    "Stream",
    "Versioned",
    "ahead",
    "batched",
    "counting",
    "drop_uniform",
    "filtered",
    "fresh",
    "whole",
]
