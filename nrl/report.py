"""One page that shows a run."""

from pathlib import Path

from nrl.errors import DataError

__all__ = ["report"]


def report(out: str | Path) -> Path:
    """Write ``report.html`` into a run's folder.

    >>> import tempfile
    >>> report(tempfile.mkdtemp()).name
    'report.html'
    """
    if not Path(out).is_dir():
        raise DataError(f"report: {out} is no folder; give the folder of a run")
    path = Path(out) / "report.html"
    path.write_text("<!doctype html><title>report</title>", encoding="utf-8")
    return path
