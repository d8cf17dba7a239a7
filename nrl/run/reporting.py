"""The report of a run: ``report.html``, one page that needs only a browser and no network.

Charts are SVG: `nrl.run.charts` computes them and ``report.html.jinja`` writes them, so they need no scripts.
``report.js`` shows numbers under the pointer, and samples (`nrl.run.sample_pages`). A chart library would add 4.5 MB
to each page. All texts pass through `nrl.log.redact`; the template escapes them, and the script writes them as text.
"""

import base64
import functools
import hashlib
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
from nrl.log import duration, format_seconds, redact
from nrl.run import charts, report_rows, sample_pages
from nrl.run.charts import Histogram, Series, number, to_float
from nrl.run.metric_choice import is_flat, key_metrics, order_metrics, time_phases
from nrl.run.sample_pages import Sample, SampleWriter
from nrl.runtime.trace import timeline

__all__ = ["report", "report_at_end", "write_page"]

_TIMES = ("time/rollout", "time/train", "time/publish", "time/total")  # shown in one chart
_SAMPLED = frozenset({"reward", "lag", "tokens/sampled"})  # metrics of loops whose batches come from rollouts
# Invisible or reordering characters, except for those that emoji are made with; also for JavaScript, with its flag u.
_HIDDEN = (
    r"[\x00-\x1f\x7f-\xa0\xad\u061c\u180e\u2000-\u200c\u200e\u200f\u2028-\u202f"
    r"\u205f-\u206f\ufeff\ud800-\udfff]"
)


def report(out: str | Path) -> Path:
    r"""Write ``report.html`` into a run's folder: one file, which loads nothing else.

    It shows, for each loop, its metrics over its steps (of ``metrics.jsonl``, and of others such as ``warmup.jsonl``),
    the times of its phases, how busy each mesh was (with a link to ``timeline.json``), the distributions of rewards and
    lengths, and the samples of ``rollouts.jsonl``, turn by turn, with tokens coloured by advantage; and
    ``config.yaml``. Metrics that do not change are folded away. Files that are missing are left out; lines that cannot
    be read are counted. A curve of more than 1,000 steps keeps the lowest and the highest of each few. Where there are
    many samples, a part of them is within the page, and all are in ``report_samples/`` beside it.

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
    busy = timeline.busy_shares(calls) if calls.is_file() else {}
    saves = timeline.seconds_in_steps(calls, "save") if calls.is_file() else {}
    token = sample_pages.token_of(files)
    loops = []
    for index, name in enumerate(names):
        writer = SampleWriter(folder, f"{token}-{index}")
        loop_files = [path for path in files if _loop_of(path) == name]
        loops.append(_loop(name, loop_files, busy.get(name, {}), saves.get(name, {}), writer))
    return write_page(folder, loops, newest, calls.name if calls.is_file() else "", token)


def write_page(
    folder: Path, loops: Sequence[Mapping[str, Any]], newest: float, calls: str = "", token: str = ""
) -> Path:
    """Write ``report.html`` in one go: ``config.yaml``, and parts as the template reads them.

    Files beside it that belong to an earlier page are removed.

    Args:
        folder: the folder.
        loops: the parts; their texts are masked.
        newest: when the newest of what they show was written.
        calls: the name of a timeline, to link to.
        token: with which the names of files with samples begin; see `nrl.run.sample_pages`.
    """
    config = folder / "config.yaml"
    script = _beside_this("report.js")
    page = _template().render(
        name=redact(folder.resolve().name),
        written=f"{datetime.fromtimestamp(newest).astimezone():%Y-%m-%d %H:%M}",
        config=redact(config.read_text(encoding="utf-8", errors="replace")) if config.is_file() else "",
        timeline=calls,
        loops=loops,
        colors=charts.phase_colors(label for part in loops for chart in part["times"] for label in chart["legend"]),
        box=charts.BOX,
        narrow=charts.NARROW,
        hidden=_HIDDEN,
        style=_beside_this("report.css"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        loads=any(part["samples"]["beside"] for part in loops if part.get("samples")),
    )
    path, temporary = folder / "report.html", folder / f".report.{os.getpid()}.html"
    try:
        temporary.write_text(page, encoding="utf-8", errors="replace")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sample_pages.remove_stale_files(folder, [token] if token else [])
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
    environment.filters |= {"visible": _visible, "number": number, "page_data": sample_pages.page_data}
    return environment.from_string(_beside_this("report.html.jinja"))


def _beside_this(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _loop_of(path: Path) -> str:
    """``metrics`` and ``rollouts`` are of the main loop, ``warmup`` and ``warmup.rollouts`` of another."""
    return "train" if path.stem in ("metrics", "rollouts") else path.stem.removesuffix(".rollouts")


def _loop(
    name: str, paths: Sequence[Path], busy: Mapping[str, float], saves: Mapping[int, float], writer: SampleWriter
) -> dict[str, Any]:
    """The page's part on a loop."""
    unread: list[int] = []
    rollouts = [path for path in paths if path.stem == "rollouts" or path.stem.endswith(".rollouts")]
    metrics = _metrics((path for path in paths if path not in rollouts), unread)
    histograms, samples = _rollouts(rollouts, unread, writer)
    steps = metrics.pop("step", (np.empty(0), np.empty(0)))[0]
    all_steps = [*steps, *(histogram.step for series in histograms.values() for histogram in series)]
    low, high = (min(all_steps), max(all_steps)) if all_steps else (0.0, 0.0)
    x = charts.Axis(low, high, charts.BOX["left"], charts.BOX["right"])
    defined = {key: series for key, series in metrics.items() if np.isfinite(series[1]).any()}
    phases = time_phases(
        defined, bool(rollouts) or not _SAMPLED.isdisjoint(defined), {float(step): saves[step] for step in saves}
    )
    curves = {key: series for key, series in defined.items() if key not in (_TIMES if phases else ())}
    flat = [key for key, (_, values) in curves.items() if is_flat(key, values)]
    curves = {key: series for key, series in curves.items() if key not in flat}
    first = key_metrics(curves)
    narrow = charts.Axis(low, high, charts.BOX["left"], charts.NARROW) if len(first) + bool(phases) > 3 else x
    return {
        "name": redact(name),
        "tiles": _tiles(defined, len(steps)),
        "busy": [(redact(mesh), f"{share:.0%}") for mesh, share in busy.items()],
        "first": [charts.curve(redact(key), *curves[key], narrow) for key in first],
        "times": [charts.stack(phases, narrow)] if phases else [],
        "heatmaps": [charts.heatmap(redact(key), series, x) for key, series in histograms.items()],
        "more": [charts.curve(redact(key), *curves[key], x) for key in order_metrics(curves) if key not in first],
        "flat": [(redact(key), number(float(np.median(defined[key][1])), key)) for key in flat],
        "samples": samples,
        "undefined": [redact(key) for key in metrics if key not in defined],
        "unread": len(unread),
    }


def _tiles(defined: Mapping[str, Series], steps: int) -> list[tuple[str, str, str]]:
    """The numbers to read before any curve: a name, its last value, and a value to compare it with."""
    tiles = [("steps", f"{steps:,}", "")] if steps else []
    for key in ("reward", "eval/reward", "eval/accuracy", "eval/loss", "accuracy", "loss"):
        if key in defined and len(tiles) < 5:
            values = defined[key][1][np.isfinite(defined[key][1])]
            tiles.append(
                (key, number(values[-1], key), f"at first {number(values[0], key)}" if len(values) > 1 else "")
            )
    if "time/total" in defined:
        seconds = float(np.nansum(defined["time/total"][1]))
        tiles.append(("time", duration(seconds), f"{format_seconds(seconds / steps)} a step"))
    return tiles


# Reading


def _records(path: Path, unread: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line's number and record; note the numbers of lines that cannot be read."""
    with path.open("rb") as file:
        for index, line in enumerate(file):
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                step = to_float(record.get("step"))
                yield index, record | {"step": index if math.isnan(step) else step}
            elif line.strip():
                unread.append(index)


def _metrics(paths: Iterable[Path], unread: list[int]) -> dict[str, Series]:
    """Return steps and values of each metric, sorted by step; values that are not finite are NaN."""
    pairs_by_name: dict[str, list[tuple[float, float]]] = {}
    for path in paths:
        for _, record in _records(path, unread):
            for key, value in record.items():
                if value is None or isinstance(value, int | float):
                    pairs_by_name.setdefault(key, []).append((record["step"], to_float(value)))
    ordered = {key: np.array(sorted(pairs, key=lambda pair: pair[0])).T for key, pairs in pairs_by_name.items()}
    return {key: (steps, values) for key, (steps, values) in ordered.items()}


def _rollouts(
    paths: Sequence[Path], unread: list[int], writer: SampleWriter
) -> tuple[dict[str, list[Histogram]], dict[str, Any] | None]:
    """Histograms by name, sorted by step, and the page's data of samples; None: no samples.

    The writer gets all episodes, or an even selection where the files are large.
    """
    histograms: dict[str, list[Histogram]] = {}
    stride = sample_pages.stride_of(sum(path.stat().st_size for path in paths))
    count, peak = 0, 0.0
    for path in paths:
        for _, record in _records(path, unread):
            for key, value in record.items():
                if isinstance(value, dict) and isinstance(value.get("counts"), list):
                    low, high = to_float(value.get("low")), to_float(value.get("high"))
                    counts = np.nan_to_num([to_float(count) for count in value["counts"]])
                    if low <= high and counts.sum() > 0:
                        histograms.setdefault(key, []).append(Histogram(record["step"], low, high, counts))
            episodes = report_rows.episodes(record.get("rows"))
            for rows in report_rows.mask_secrets(episodes[-count % stride :: stride]):
                episode = report_rows.episode(rows)
                peak = max(peak, report_rows.peak(episode["rows"]))
                writer.add(Sample(step=record["step"], **episode))
            count += len(episodes)
    ordered = {key: sorted(series, key=lambda each: each.step) for key, series in histograms.items()}
    if not count:
        return ordered, None
    return ordered, {"unit": "step", "file": paths[0].name, "peak": peak, "stride": stride} | writer.finish()


def _visible(text: str) -> Any:
    """Escape a text, with signs for invisible characters; a line break gets a sign and stays."""
    from markupsafe import Markup, escape

    def sign(match: re.Match[str]) -> str:
        character = match[0]
        shown = {"\n": "↵", "\t": "⇥", "\r": "␍"}.get(character, f"U+{ord(character):04X}")
        return f"<i>{shown}</i>" + (character if character in "\n\t" else "")

    return Markup(re.sub(_HIDDEN, sign, str(escape(text))))
