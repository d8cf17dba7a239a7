"""What never gets into an image, wherever it lies; `test_image.py` builds one, which takes long."""

import re
from pathlib import Path

import pytest

LINES = [
    line
    for line in (Path(__file__).parents[3] / ".dockerignore").read_text().splitlines()
    if line and not line.startswith("#")
]


def matches(pattern: str, path: str) -> bool:
    """As Docker matches: from the root on, ``**/`` for any folders or none; what is in a folder goes with it."""
    pieces = {"**/": "(.*/)?", "*": "[^/]*"}
    made = re.sub(r"\*\*/|\*|[^*]+", lambda found: pieces.get(found[0], re.escape(found[0])), pattern)
    return re.fullmatch(f"{made}(/.*)?", path) is not None


def ignored(path: str) -> bool:
    """What the last line that matches says; ``!`` takes a file back in."""
    found = [line for line in LINES if matches(line.removeprefix("!"), path)]
    return bool(found) and not found[-1].startswith("!")


@pytest.mark.parametrize("name", [".env", ".env.local", ".netrc", ".git-credentials", "key.pem", "tls.key", ".aws/x"])
@pytest.mark.parametrize("folder", ["", "examples/", "nrl/cli/"])
def test_secrets_stay_outside(folder: str, name: str) -> None:
    assert ignored(f"{folder}{name}")


@pytest.mark.parametrize(
    "path", ["id_rsa", "uv.toml", "wandb/run/x", "grpo.sbatch", "runs/grpo/config.yaml", "tests/x"]
)
def test_what_lies_beside_the_sources_stays_outside(path: str) -> None:
    assert ignored(path)


@pytest.mark.parametrize(
    "path", ["nrl/environment.py", "nrl/gym/http/__init__.py", "pyproject.toml", "uv.lock", "deploy/environments"]
)
def test_what_an_image_needs_is_there(path: str) -> None:
    assert not ignored(path)


def test_all_that_the_dockerfile_names_is_there() -> None:
    text = (Path(__file__).parents[3] / "deploy" / "Dockerfile").read_text()
    named = [word for line in re.findall(r"^COPY (?!--from).*", text, re.MULTILINE) for word in line.split()[1:-1]]
    sources = [word for word in named if not word.startswith("--") and word != "."]
    assert len(sources) > 5
    assert not [each for each in sources if ignored(each.replace("*", "x"))]
