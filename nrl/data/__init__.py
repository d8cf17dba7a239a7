"""Data: rows of files become endless streams of tasks, and tokens.

A row is a mapping. Its ``"prompt"`` is chat messages, plain text or token ids. `render` turns any of the three into
token ids; `supervised`, `preferences` and `labelled` turn rows that have responses into batches.
"""

from typing import TYPE_CHECKING

from nrl._lazy import on_demand

if TYPE_CHECKING:
    from nrl.data.collating import labelled, preferences, supervised
    from nrl.data.control_tokens import parse_special
    from nrl.data.cursors import Source, Stream, counting
    from nrl.data.formats import (
        FORMATS,
        Format,
        alpaca,
        arena,
        columns,
        dialogue,
        exchanges,
        gsm8k,
        helpsteer3,
        hh,
        openmathinstruct2,
        pku_saferlhf,
        prompt_completion,
        s1k,
        sharegpt,
        squad,
        turns,
        ultrafeedback,
        ultrafeedback_completions,
        verl,
        xlam,
    )
    from nrl.data.mixtures import mixture
    from nrl.data.prompts import rows
    from nrl.data.readers import read_csv, read_jsonl, read_parquet
    from nrl.data.rendering import render
    from nrl.data.row_fields import PROMPT_KEYS
    from nrl.data.task_streams import Tasks, epoch, tasks
else:  # environments read messages with a module of this package, and do not wait for torch
    __getattr__, __dir__ = on_demand(__name__)

__all__ = [
    "FORMATS",
    "PROMPT_KEYS",
    "Format",
    "Source",
    "Stream",
    "Tasks",
    "alpaca",
    "arena",
    "columns",
    "counting",
    "dialogue",
    "epoch",
    "exchanges",
    "gsm8k",
    "helpsteer3",
    "hh",
    "labelled",
    "mixture",
    "openmathinstruct2",
    "parse_special",
    "pku_saferlhf",
    "preferences",
    "prompt_completion",
    "read_csv",
    "read_jsonl",
    "read_parquet",
    "render",
    "rows",
    "s1k",
    "sharegpt",
    "squad",
    "supervised",
    "tasks",
    "turns",
    "ultrafeedback",
    "ultrafeedback_completions",
    "verl",
    "xlam",
]
