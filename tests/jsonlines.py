"""Files of a run as tests read them back."""

import json
from pathlib import Path
from typing import Any

__all__ = ["lines", "untimed"]


def lines(path: Path) -> list[dict[str, Any]]:
    """What each line of a file says."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def untimed(out: Path) -> dict[str, list[dict[str, Any]]]:
    """What every log in a run's folder says, but for times."""
    timed = ("time/", "tokens_per_second", "device/")
    return {
        path.name: [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines(path)]
        for path in sorted(out.glob("*.jsonl"))
    }
