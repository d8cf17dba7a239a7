"""Streams: endless sources that are pulled, and the transforms that turn one into another.

A stream is pulled by ``take(n)`` and produces nothing that was not asked for, so what is sampled together is a function
of how the stream is pulled alone. Its ``state()`` is the cursor after what was consumed, with what is pending, and
``restore`` continues from there.
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
