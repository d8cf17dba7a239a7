"""The report of a run: ``report.html``, one page that needs only a browser and no network.

Charts are SVG: `nrl.runs.charts` computes them and ``report.html.jinja`` writes them, so they need no scripts. A short
script in the page shows numbers under the pointer. A chart library would add 4.5 MB to each page. All texts pass
through `nrl.log.redact`, and the template escapes them.
"""

import functools
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from nrl.errors import DataError
from nrl.log import duration, redact, redacted
from nrl.runs import charts, shown_rows
from nrl.runs.charts import Array, Histogram, Series, measured, number
from nrl.runtime.trace import timeline

__all__ = ["report", "report_at_end", "write_page"]

# Metrics to read first, in this order; all others follow below.
_FIRST = tuple(
    map(re.compile, (r"reward(/|$)", r"loss(/|$)", r"eval/", r"mismatch/", r"(.*[_/])?kl(/|$)", r"length", r"accuracy"))
)
_TIMES = ("time/rollout", "time/train")
# Invisible or reordering characters, except for those that emoji are made with.
_HIDDEN = re.compile(
    r"[\x00-\x1f\x7f-\xa0\xad\u061c\u180e\u2000-\u200c\u200e\u200f\u2028-\u202f\u205f-\u206f\ufeff\ud800-\udfff]"
)


def report(out: str | Path) -> Path:
    r"""Write ``report.html`` into a run's folder: one file, which loads nothing else.

    It shows, for each loop, its metrics over its steps (of ``metrics.jsonl``, and of others such as ``warmup.jsonl``),
    the times of its phases, how busy each mesh was (with a link to ``timeline.json``), the distributions of rewards and
    lengths, and samples of ``rollouts.jsonl``, turn by turn, with tokens coloured by advantage; and ``config.yaml``.
    Files that are missing are left out; lines that cannot be read are counted. A curve of more than 1,000 steps keeps
    the lowest and the highest of each few.

    Args:
        out: the folder; the run may still be running.

    Returns:
        Where the page is. It is replaced in one go.

    Raises:
        DataError: the folder is not there, or holds no run.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> lines = [json.dumps({"step": step, "loss": 1 / (step + 1)}) for step in range(3)]
    >>> _ = (folder / "metrics.jsonl").write_text("\n".join(lines))
    >>> report(folder).name
    'report.html'
    """
    folder = Path(out)
    if not folder.is_dir():
        raise DataError(f"report: out={out} is not a folder; give the folder of a run")
    files = sorted(folder.glob("[!.]*.jsonl"), key=lambda path: (path.stem not in ("metrics", "rollouts"), path.name))
    config = folder / "config.yaml"
    if not files and not config.is_file():
        raise DataError(f"report: out={out} has neither a config.yaml nor a metrics.jsonl; give the folder of a run")
    newest = max(path.stat().st_mtime for path in [*files, config] if path.exists())
    names = dict.fromkeys(map(_loop_of, files))
    calls = folder / "timeline.json"
    busy = timeline.busy(calls) if calls.is_file() else {}
    loops = [_loop(name, [path for path in files if _loop_of(path) == name], busy) for name in names]
    return write_page(folder, loops, newest, calls.name if calls.is_file() else "")


def write_page(folder: Path, loops: Sequence[Mapping[str, Any]], newest: float, calls: str = "") -> Path:
    """Write ``report.html`` in one go: ``config.yaml``, and parts as the template reads them.

    Args:
        folder: the folder.
        loops: the parts; their texts are masked.
        newest: when the newest of what they show was written.
        calls: the name of a timeline, to link to.
    """
    config = folder / "config.yaml"
    page = _template().render(
        name=redact(folder.resolve().name),
        written=f"{datetime.fromtimestamp(newest).astimezone():%Y-%m-%d %H:%M}",
        config=redact(config.read_text(encoding="utf-8", errors="replace")) if config.is_file() else "",
        timeline=calls,
        loops=loops,
        box=charts.BOX,
    )
    path, temporary = folder / "report.html", folder / f".report.{os.getpid()}.html"
    try:
        temporary.write_text(page, encoding="utf-8", errors="replace")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def report_at_end(out: Path) -> None:
    """Write the report of a run that has logged something. A failure is a warning, so it hides no error of the run."""
    try:
        if any(path.stat().st_size for path in out.glob("[!.]*.jsonl")):
            report(out)
    except Exception as error:
        warnings.warn(f"run: {out}/report.html could not be written: {type(error).__name__}: {error}", stacklevel=2)


@functools.cache
def _template() -> Any:
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"visible": _visible, "number": number}
    return environment.from_string(Path(__file__).with_name("report.html.jinja").read_text(encoding="utf-8"))


def _loop_of(path: Path) -> str:
    """``metrics`` and ``rollouts`` are of the main loop, ``warmup`` and ``warmup.rollouts`` of another."""
    return "train" if path.stem in ("metrics", "rollouts") else path.stem.removesuffix(".rollouts")


def _loop(name: str, paths: Sequence[Path], busy: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The page's part on a loop."""
    unread: list[int] = []
    rollouts = [path for path in paths if path.stem == "rollouts" or path.stem.endswith(".rollouts")]
    metrics = _metrics((path for path in paths if path not in rollouts), unread)
    histograms, samples = _rollouts(rollouts, unread)
    steps = metrics.pop("step", (np.empty(0), np.empty(0)))[0]
    every = [*steps, *(each.step for some in histograms.values() for each in some)]
    low, high = (min(every), max(every)) if every else (0.0, 0.0)
    x = charts.Axis(low, high, charts.BOX["left"], charts.BOX["right"])
    defined = {key: series for key, series in metrics.items() if np.isfinite(series[1]).any()}
    phases = {key: defined[key] for key in _TIMES if key in defined}
    ranks = {key: _rank(key) for key in defined if key not in phases}
    if len(phases) == len(_TIMES):
        ranks.pop("time/total", None)  # the top of these
    constant = {key for key, rank in ranks.items() if rank == len(_FIRST) and _constant(defined[key][1])}
    curves = sorted(ranks.keys() - constant, key=lambda key: (ranks[key], list(defined).index(key)))
    return {
        "name": redact(name),
        "tiles": _tiles(defined, len(steps)),
        "busy": [(redact(mesh), f"{share:.0%}") for mesh, share in busy.get(name, {}).items()],
        "first": [charts.curve(redact(key), *defined[key], x) for key in curves if ranks[key] < len(_FIRST)],
        "more": [charts.curve(redact(key), *defined[key], x) for key in curves if ranks[key] == len(_FIRST)],
        "times": [charts.stack(phases, x)] if phases else [],
        "heatmaps": [charts.heatmap(redact(key), some, x) for key, some in histograms.items()],
        "samples": samples,
        "peak": max(map(shown_rows.peak, samples), default=0.0),
        "constant": [(redact(key), number(defined[key][1][0])) for key in defined if key in constant],
        "undefined": [redact(key) for key in metrics if key not in defined],
        "unread": len(unread),
    }


def _rank(key: str) -> int:
    return next((place for place, pattern in enumerate(_FIRST) if pattern.match(key)), len(_FIRST))


def _constant(values: Array) -> bool:
    return len(values) > 1 and bool((values == values[0]).all())


def _tiles(defined: Mapping[str, Series], steps: int) -> list[tuple[str, str, str]]:
    """The numbers to read before any curve: a name, its last value, and a value to compare it with."""
    tiles = [("steps", f"{steps:,}", "")] if steps else []
    for key in ("reward", "eval/reward", "eval/accuracy", "eval/loss", "accuracy", "loss"):
        if key in defined and len(tiles) < 5:
            values = defined[key][1][np.isfinite(defined[key][1])]
            tiles.append((key, number(values[-1]), f"at first {number(values[0])}" if len(values) > 1 else ""))
    if "time/total" in defined:
        seconds = float(np.nansum(defined["time/total"][1]))
        tiles.append(("time", duration(seconds), f"{number(seconds / steps, 3)} s a step"))
    return tiles


# Reading


def _records(path: Path, unread: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line's number and record; note the numbers of lines that cannot be read."""
    with path.open("rb") as file:
        for place, line in enumerate(file):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                step = measured(record.get("step"))
                yield place, record | {"step": place if math.isnan(step) else step}
            elif line.strip():
                unread.append(place)


def _metrics(paths: Iterable[Path], unread: list[int]) -> dict[str, Series]:
    """For each metric its steps and values, NaN where not finite, in the order of the steps."""
    found: dict[str, list[tuple[float, float]]] = {}
    for path in paths:
        for _, record in _records(path, unread):
            for key, value in record.items():
                if value is None or isinstance(value, int | float):
                    found.setdefault(key, []).append((record["step"], measured(value)))
    ordered = {key: np.array(sorted(pairs, key=lambda pair: pair[0])).T for key, pairs in found.items()}
    return {key: (steps, values) for key, (steps, values) in ordered.items()}


def _rollouts(paths: Iterable[Path], unread: list[int]) -> tuple[dict[str, list[Histogram]], list[dict[str, Any]]]:
    """Histograms by name, and the samples of the first, the middle and the last step that has some."""
    histograms: dict[str, list[Histogram]] = {}
    samples: list[dict[str, Any]] = []
    for path in paths:
        places = []
        for place, record in _records(path, unread):
            if isinstance(record.get("rows"), list) and record["rows"]:
                places.append(place)
            for key, value in record.items():
                if isinstance(value, dict) and isinstance(value.get("counts"), list):
                    low, high = measured(value.get("low")), measured(value.get("high"))
                    counts = np.nan_to_num([measured(count) for count in value["counts"]])
                    if low <= high and counts.sum() > 0:
                        histograms.setdefault(key, []).append(Histogram(record["step"], low, high, counts))
        wanted = {places[index] for index in (0, len(places) // 2, -1)} if places else set()
        with path.open("rb") as file:  # once more, so that no more than these are held in memory
            lines = [line for place, line in enumerate(file) if place in wanted]
        samples += [shown_rows.sample(redacted(json.loads(line))) for line in lines]
    return {key: sorted(some, key=lambda each: each.step) for key, some in histograms.items()}, samples


def _visible(text: str) -> Any:
    """Escape a text, with signs for invisible characters; a line break gets a sign and stays."""
    from markupsafe import Markup, escape

    def sign(found: re.Match[str]) -> str:
        character = found[0]
        shown = {"\n": "↵", "\t": "⇥", "\r": "␍"}.get(character, f"U+{ord(character):04X}")
        return f"<i>{shown}</i>" + (character if character in "\n\t" else "")

    return Markup(_HIDDEN.sub(sign, str(escape(text))))
