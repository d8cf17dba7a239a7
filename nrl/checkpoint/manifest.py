"""The manifest of a checkpoint: its contents, the size and checksum of every file, and a checksum of itself."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nrl.files import write

__all__ = ["NAME", "load", "save"]

NAME = "manifest.json"


def save(folder: Path, body: Mapping[str, Any]) -> dict[str, Any]:
    """Write it; what `load` will return.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> save(folder, {"step": 9}), load(folder)
    ({'step': 9}, {'step': 9})
    """
    manifest: dict[str, Any] = json.loads(json.dumps(body))
    write(folder / NAME, [json.dumps(manifest | {"sha256": _seal(manifest)}, indent=1).encode()])
    return manifest


def load(folder: Path) -> dict[str, Any] | None:
    """Read it. None: it cannot be read, or is not what was written.

    >>> load(Path("there/is/none"))
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / NAME).read_text())
        return manifest if manifest.pop("sha256") == _seal(manifest) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
