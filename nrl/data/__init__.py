"""Data: rows of files become endless streams of tasks, and tokens.

A row is a mapping. Its ``"prompt"`` is chat messages, plain text or token ids. `render` turns any of the three into
token ids; `supervised`, `preferences` and `labelled` turn rows that have responses into batches.
"""

from nrl.data.collating import labelled, preferences, supervised
from nrl.data.control_tokens import parse_special
from nrl.data.formats import FORMATS, Format, gsm8k, helpsteer3, openmathinstruct2, squad, turns, ultrafeedback
from nrl.data.mixtures import mixture
from nrl.data.prompts import PROMPT_KEYS, rows
from nrl.data.readers import read_csv, read_jsonl, read_parquet
from nrl.data.rendering import render
from nrl.data.task_streams import Tasks, epoch, tasks

__all__ = [
    "FORMATS",
    "PROMPT_KEYS",
    "Format",
    "Tasks",
    "epoch",
    "gsm8k",
    "helpsteer3",
    "labelled",
    "mixture",
    "openmathinstruct2",
    "parse_special",
    "preferences",
    "read_csv",
    "read_jsonl",
    "read_parquet",
    "render",
    "rows",
    "squad",
    "supervised",
    "tasks",
    "turns",
    "ultrafeedback",
]
