"""Logging: metrics and samples to JSONL files, the terminal, Weights & Biases, TensorBoard and MLflow."""

from nrl.log.escapes import printable
from nrl.log.jsonlines import JsonLines
from nrl.log.number_text import NOISE, format_number, format_seconds, noise_limit
from nrl.log.redaction import error_text, redact, redacted
from nrl.log.sinks import Sink, open_sinks
from nrl.log.slow_wait import wait_for, wait_until, waiting
from nrl.log.terminal import Progress, duration

__all__ = [
    "NOISE",
    "JsonLines",
    "Progress",
    "Sink",
    "duration",
    "error_text",
    "format_number",
    "format_seconds",
    "noise_limit",
    "open_sinks",
    "printable",
    "redact",
    "redacted",
    "wait_for",
    "wait_until",
    "waiting",
]
