"""Data: rows of files as endless streams of tasks, and their rendering into tokens.

A row is a mapping. What its ``"prompt"`` is, is decided here, once: chat messages, plain text or token ids. `render`
turns any of the three into token ids; `supervised` and `preferences` turn rows that have responses into batches.
"""

from nrl.data.collating import preferences, supervised, turns
from nrl.data.prompts import PROMPT_KEYS, rows
from nrl.data.readers import read_jsonl
from nrl.data.rendering import render
from nrl.data.streams import tasks

__all__ = ["PROMPT_KEYS", "preferences", "read_jsonl", "render", "rows", "supervised", "tasks", "turns"]
