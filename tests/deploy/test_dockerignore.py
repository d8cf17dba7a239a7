"""What never gets into an image, wherever it lies; `test_image.py` builds one, which takes long."""

import re
from pathlib import Path

import pytest

IGNORED = [
    line
    for line in (Path(__file__).parents[2] / ".dockerignore").read_text().splitlines()
    if line and not line.startswith("#")
]


def matches(pattern: str, path: str) -> bool:
    """As Docker matches: from the root on, ``**/`` for any folders or none; what is in a folder goes with it."""
    pieces = {"**/": "(.*/)?", "*": "[^/]*"}
    made = re.sub(r"\*\*/|\*|[^*]+", lambda found: pieces.get(found[0], re.escape(found[0])), pattern)
    return re.fullmatch(f"{made}(/.*)?", path) is not None


@pytest.mark.parametrize("name", [".env", ".env.local", ".netrc", "key.pem"])
@pytest.mark.parametrize("folder", ["", "examples/", "nrl/command/"])
def test_secrets_stay_outside(folder: str, name: str) -> None:
    assert any(matches(each, f"{folder}{name}") for each in IGNORED)


@pytest.mark.parametrize("path", ["nrl/environment.py", "nrl/envs/gym/__init__.py", "pyproject.toml", "uv.lock"])
def test_what_an_image_needs_is_there(path: str) -> None:
    assert not any(matches(each, path) for each in IGNORED)
