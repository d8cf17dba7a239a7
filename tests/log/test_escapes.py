"""What others wrote is shown on a terminal without moving its cursor, hiding text, or telling secrets."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nrl.envs.inprocess.tracebacks import traceback_text
from nrl.errors import EnvError
from nrl.log import JsonLines, error_text, printable, redact, redacted

SEQUENCES = [
    "\x1b[2J\x1b[H",  # clears the screen
    "\x1b]0;title\x07",  # sets the title
    "\x1b]52;c;cm0gLXJm\x1b\\",  # writes the clipboard
    "\x1b]8;;https://example.com\x1b\\link\x1b]8;;\x1b\\",
    "\x9b31m",  # the same in one byte
    "ok\rno",  # writes over the line
    "a\x08b",
    "\x00",
    "\x7f",
    "\u202egnirts",  # shows text from right to left
]


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_no_control_character_is_left(sequence: str) -> None:
    text = printable(f"before {sequence} after\n\tend")
    assert text.replace("\n", "").replace("\t", "").isprintable()
    assert text.startswith("before ")
    assert text.endswith(" after\n\tend")


def test_other_text_stays() -> None:
    text = "a line\n\tindented, Grüße, 数学, 👩‍🔬, ∀x"
    assert printable(text) == text
    assert printable("a\r\nb") == "a\nb"
    assert printable("\x1b[1m") == r"\x1b[1m"


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_errors_of_environments(sequence: str) -> None:
    assert error_text(ValueError(sequence)).isprintable()

    def verify() -> None:
        raise ValueError(f"the model wrote {sequence}")

    try:
        verify()
    except ValueError as error:
        shown = traceback_text(error)
    assert shown.replace("\n", "").isprintable()


def test_a_program_that_ends_with_such_an_error() -> None:
    program = (
        "import attrs, nrl, warnings\n"
        "from nrl.errors import EnvError\n"
        "@attrs.frozen\nclass Config:\n    x: int = 0\n"
        "def main(cfg):\n    raise EnvError('it said \\x1b[2J\\rgone')\n"
        "nrl.launch(main, Config, [])\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert r"it said \x1b[2J" in found.stderr
    assert "\x1b" not in found.stderr


def test_files_have_none_either(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "rollouts.jsonl") as lines:
        lines.write({"text": "".join(SEQUENCES)})
    content = (tmp_path / "rollouts.jsonl").read_text()
    assert content.rstrip("\n").isprintable()
    assert json.loads(content) == {"text": "".join(SEQUENCES)}


HEADER, PAYLOAD, SIGNATURE = "eyJhbGciOiJIUzI1NiJ9", "eyJzdWIiOiIxMjM0In0", "dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"
TOKENS = [
    f"{HEADER}.{PAYLOAD}.{SIGNATURE}",
    f"{HEADER}.{PAYLOAD}.",  # without a signature
    f"{HEADER}.{SIGNATURE}.{SIGNATURE[:12]}.{PAYLOAD}.{SIGNATURE[:16]}",  # encrypted
    "sk_" + "live_" + "a1" * 12,
    "npm_" + "a1" * 18,
    "ya29." + "a1" * 15,
    "gsk_" + "a1" * 15,
    "nvapi-" + "a1" * 20,
    "SG." + "a1" * 10 + "." + "b2" * 15,
    "dapi" + "0f" * 16,
    "xapp-" + "1-A0-" + "9" * 12,
]


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("around", ["{}", "the token is {}, keep it", '{{"a": "{}"}}', "https://example.com/?x={}&y=1"])
def test_tokens_in_any_value(token: str, around: str) -> None:
    text = around.format(token)
    assert token not in redact(text)
    assert redact(text) == around.format("***")
    value: Any = {"config": {"url": text, "list": [text, 1]}}
    assert token not in json.dumps(redacted(value))
    assert token not in error_text(EnvError(text))


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Authorization: Bearer abcdefgh12345678", "Authorization: Bearer ***"),
        ("authorization: basic dXNlcjpwYXNzd29yZDE=", "authorization: basic ***"),
        ("GET /?access_token=abcdefgh12345678&n=1", "GET /?access_token=***&n=1"),
        ("aws_secret_access_key=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEX", "aws_secret_access_key=***"),
        (
            "https://a.blob.core.windows.net/b?sv=1&sig=abcdefgh12345678",
            "https://a.blob.core.windows.net/b?sv=1&sig=***",
        ),
        ("https://me:hunter2@host/db", "https://***@host/db"),
    ],
)
def test_secrets_of_headers_and_addresses(text: str, masked: str) -> None:
    assert redact(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "eyJ is how a token begins",
        "eyJhbGciOiJIUzI1NiJ9",
        "a bearer of extraordinarily good news",
        "basic understanding of arithmetic",
        "eos_token=<|endoftext|>",
        "max_tokens=1024 token=5",
        "the file is called eyJ.json.gz",
        "SG.small",
    ],
)
def test_what_only_looks_like_one_stays(text: str) -> None:
    assert redact(text) == text
