"""The samples that a report shows: some within the page, and more in files beside it.

A page has all samples where they are few. Where they are many, it has an even selection, so that it is of use when it
is sent around alone, and all of them are in ``report_samples/`` beside it: an index to filter by, and chunks that the
page loads when they are looked at. These are scripts, because a page that is opened as a file may read nothing else.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

__all__ = [
    "FOLDER",
    "READ",
    "Sample",
    "SampleWriter",
    "page_data",
    "remove_stale_files",
    "stride_of",
    "token_of",
]

FOLDER = "report_samples"
READ = 256_000_000
"""Bytes of samples in a run's files of which a report shows all; of more it shows an even selection."""

_WITHIN = 2_000_000  # bytes of samples within a page, at most
_CHUNK = 500_000  # bytes of a file beside it, from which the next one begins


@attrs.frozen
class Sample:
    """An episode of a run, or an answer of an evaluation.

    Args:
        step: of the run; of an evaluation, the number of the task.
        group: which samples belong together within a step, as text.
        source: of the task; empty: there is one.
        reward: None: unknown.
        flags: what else to filter by, such as ``truncated``.
        rows: as `nrl.run.report_rows` makes them.
        left_out: how many rows of it are not shown.
        head: of the step and the group, to be shown above their samples; None: the page says which they are.
    """

    step: float
    group: str
    source: str
    reward: float | None
    flags: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    left_out: int = 0
    head: Mapping[str, Any] | None = None


def stride_of(size: int) -> int:
    """Return k where a report shows each k-th sample of files of this size.

    >>> stride_of(1000), stride_of(3 * READ)
    (1, 3)
    """
    return max(1, math.ceil(size / READ))


def token_of(paths: Iterable[Path]) -> str:
    """Return a name for what files hold now, so that a page never loads samples of another time."""
    stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.blake2b(json.dumps(stamps).encode(), digest_size=6).hexdigest()


def remove_stale_files(folder: Path, tokens: Iterable[str]) -> None:
    """Remove the files beside a page whose names begin with none of the tokens, and the folder if it is empty."""
    beside, prefixes = folder / FOLDER, tuple(tokens)
    for path in beside.glob("*.js"):
        if not path.name.startswith(prefixes or ("/",)):
            path.unlink(missing_ok=True)
    if beside.is_dir() and not any(beside.iterdir()):
        beside.rmdir()


class SampleWriter:
    """Collects the samples of a part of a page, and writes files beside it as soon as they do not fit into it.

    Args:
        folder: of the page.
        name: of the files, after `token_of`; unique in the folder.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._beside, self._name = folder / FOLDER, name
        self._within: list[tuple[str, str]] = []  # texts of heads and samples
        self._stride, self._size = 1, 0
        self._chunk: list[tuple[str, str]] = []
        self._chunk_size, self._total_size = 0, 0
        self._texts: list[str] = []  # texts of chunks, while all samples fit into the page
        self._counts: list[int] = []
        self._labels: dict[str, int] = {}
        self._sources: dict[str, int] = {}
        self._index: dict[str, list[Any]] = {key: [] for key in ("step", "group", "source", "reward", "flags")}

    def add(self, sample: Sample) -> None:
        """Add a sample; steps and groups come in order."""
        index = len(self._index["step"])
        facts: dict[str, Any] = {"step": sample.step if math.isfinite(sample.step) else None, "group": sample.group}
        facts["source"] = self._sources.setdefault(sample.source, len(self._sources))
        facts["reward"] = None if sample.reward is None else float(f"{sample.reward:.6g}")
        facts["flags"] = [self._labels.setdefault(flag, len(self._labels)) for flag in sample.flags]
        for key, value in facts.items():
            self._index[key].append(value)
        text = _json(facts | {"rows": sample.rows, "left_out": sample.left_out})
        pair = "null" if sample.head is None else _json(sample.head), text
        self._keep_within(index, pair)
        self._chunk.append(pair)
        self._chunk_size += len(text)
        if self._chunk_size >= _CHUNK:
            self._end_chunk()

    def finish(self) -> dict[str, Any]:
        """Write what is left, and return what the page's script is to know."""
        if self._total_size + self._chunk_size <= _WITHIN:
            beside = None
        else:
            self._end_chunk()
            texts = {"labels": list(self._labels), "sources": list(self._sources), "counts": self._counts}
            self._write("index", _json(texts | self._index))
            beside = {"folder": FOLDER, "name": self._name}
        return {
            "total": len(self._index["step"]),
            "labels": list(self._labels),
            "sources": list(self._sources),
            "beside": beside,
            "within": _Raw(_join_samples(self._within)),
        }

    def _keep_within(self, index: int, pair: tuple[str, str]) -> None:
        if index % self._stride:
            return
        self._within.append(pair)
        self._size += sum(map(len, pair))
        while self._size > _WITHIN and len(self._within) > 1:
            self._within, self._stride = self._within[::2], 2 * self._stride
            self._size = sum(len(text) for pair in self._within for text in pair)

    def _end_chunk(self) -> None:
        if not self._chunk:
            return
        self._texts.append(_join_samples(self._chunk))
        self._counts.append(len(self._chunk))
        self._total_size += self._chunk_size
        self._chunk, self._chunk_size = [], 0
        if self._total_size > _WITHIN:
            for number, text in enumerate(self._texts, len(self._counts) - len(self._texts)):
                self._write(str(number), text)
            self._texts.clear()

    def _write(self, part: str, text: str) -> None:
        self._beside.mkdir(exist_ok=True)
        script = f'nrlSamples("{self._name}","{part}",{text})\n'
        (self._beside / f"{self._name}-{part}.js").write_text(script, encoding="ascii")


@attrs.frozen
class _Raw:
    """A text that is JSON already."""

    text: str


def page_data(values: Mapping[str, Any]) -> str:
    """Return values as JSON for a script element: no text within it can end the element.

    >>> page_data({"a": "</script>", "b": _Raw("[1]")})
    '{"a":"\\\\u003c/script>","b":[1]}'
    """
    parts = [f"{_json(key)}:{value.text if isinstance(value, _Raw) else _json(value)}" for key, value in values.items()]
    return "{" + ",".join(parts).replace("<", "\\u003c") + "}"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII survives every encoding of a page.


def _join_samples(pairs: Sequence[tuple[str, str]]) -> str:
    """Return samples as JSON; each has the index of its head."""
    heads = list(dict.fromkeys(head for head, _ in pairs))
    places = {head: index for index, head in enumerate(heads)}
    samples = ",".join(f'{{"head":{places[head]},{text[1:]}' for head, text in pairs)
    return f'{{"heads":[{",".join(heads)}],"samples":[{samples}]}}'
