"""Masking secrets in everything that is written down."""

import functools
import json
import netrc
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from nrl.log.escapes import printable

__all__ = ["error_text", "keep_secret", "kept_secrets", "redact", "redacted", "secret_texts"]

_MASK = "***"
_LONGEST = 1000  # characters of an error's message
# Endings of the names of variables and configuration keys whose values are secrets
_ENDS = (
    "auth|authorization|bearer|cookies?|credentials?|dsn|passphrase|passwd|passwords?|pat|secrets?|webhooks?(_urls?)?"
)
# TOKENIZERS_PARALLELISM and KEYBOARD_LAYOUT are no secrets
_SECRET_NAME = re.compile(
    rf"KEY(?!BOARD|MAP)|TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|_PWD$|(^|_)({_ENDS})$", re.IGNORECASE
)
_SHORTEST = 8  # characters; a shorter value is a word, and would be masked wherever it is used
_SHORTEST_TOLD = 6  # shortest secret that a program has declared
_kept_secrets: set[str] = set()  # Secrets of this process, as its environment variables are.
_SHAPES = (
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{20,}"  # Hugging Face
    r"|sk-(?=[\w-]*\d)[\w-]{20,}"  # OpenAI, Anthropic and those who follow them
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{22,}|glpat-[\w-]{20,}"
    r"|(?:AKIA|ASIA)[0-9A-Z]{16}"  # Amazon
    r"|AIza[\w-]{35}"  # Google
    r"|(?:xox[abprs]|xapp)-[\w-]{10,}"  # Slack
    r"|eyJ[\w-]{8,}\.(?:eyJ[\w-]{4,}(?:\.[\w-]*)?|[\w-]{4,}(?:\.[\w-]{4,})+)"  # a JSON web token
    r"|(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}"  # Stripe
    r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{50,}"
    r"|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}"  # Google's OAuth
    r"|(?:gsk|xai|nvapi|pplx|tgp_v1|r8|fw)[_-](?=[\w-]*\d)[\w-]{24,}"  # other providers of models
    r"|SG\.[\w-]{16,}\.[\w-]{16,}|dapi[0-9a-f]{32}|glsa_\w{32,}"  # SendGrid, Databricks, Grafana
    r")"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----"
    r"|(?<=://)[^\s/:@]*:[^\s/?#\"'<>]+(?=@)"  # user:password in an address
    r"|(?<=hooks\.slack\.com/services/)[^\s\"'<>]+"
    r"|(?i:(?<=password=)|(?<=;pwd=)|(?<=accountkey=)|(?<=accesskey=))[^\s;&\"'<>]+"  # connection strings
    r"|(?i:(?<=bearer )|(?<=basic )|(?<=token=)|(?<=secret=)|(?<=api_key=)|(?<=apikey=)|(?<=access_key=)|(?<=&sig=))"
    r"(?=[\w.~+/=%-]*\d)[\w.~+/=%-]{16,}"  # headers and addresses
)
# Keys, in words with underscores, whose values are secrets; except for tokens of texts
_SECRET_KEY = re.compile(
    rf"(^|_)({_ENDS}|token|pwd|apikeys?"
    r"|(api|access|secret|private|auth|account|encryption|signing|ssh|service|license)_keys?)$"
)
_KEY = re.compile(r"_key$")  # a secret if it is a text, unless it is that of a column, a row or a mapping
_KEY_OF_DATA = re.compile(
    r"(^|_)(answer|audio|batch|by|cache|chosen|column|completion|config|content|context|conversation|data|dataset|dict"
    r"|document|extra|feature|field|file|foreign|group|id|ids|image|images|index|input|inputs|item|label|labels|language"
    r"|loss|mask|message|messages|metadata|metric|name|output|outputs|partition|primary|problem|prompt|public|query"
    r"|question|record|reference|rejected|response|reward|role|row|sample|score|solution|sort|source|split|state|step"
    r"|system|target|task|text|tools?|truth|turn|user|value|video|weight)_key$"
)
_TOKEN_OF_TEXT = re.compile(
    r"(^|_)(answer|assistant|audio|begin|blank|boa|boi|bos|bov|cls|delimiter|dummy|end|eoa|eoi|eom|eos|eot|eov|first"
    r"|image|last|mask|middle|new|newline|next|pad|per|placeholder|prefix|reward|sep|separator|sot|special|start|step"
    r"|stop|suffix|system|think|tool|trigger|unk|user|video|vision)_token$"
)


def keep_secret(texts: Iterable[str]) -> None:
    """Mask these texts, of at least 6 characters, from now on, in `redact` and `redacted`.

    >>> keep_secret(["open sesame"])
    >>> redact("he said open sesame, and it did")
    'he said ***, and it did'
    """
    for text in map(str.strip, texts):
        forms = {text, json.dumps(text)[1:-1], *map(str.strip, text.splitlines())}  # forms of the text in other files
        _kept_secrets.update(form for form in forms if len(form) >= _SHORTEST_TOLD)


def kept_secrets() -> list[str]:
    """Return all texts given to `keep_secret`, for another process to mask them.

    >>> keep_secret(["open sesame"])
    >>> "open sesame" in kept_secrets()
    True
    """
    return sorted(_kept_secrets)


def secret_texts(value: Any) -> set[str]:
    """Return the texts in a JSON-like value under keys of secrets.

    >>> secret_texts({"judge": {"api_key": "hunter2", "url": "http://10.0.0.5"}})
    {'hunter2'}
    """
    if isinstance(value, Mapping):
        texts = [_all_texts(item) if _is_secret(key, item) else secret_texts(item) for key, item in value.items()]
        return set[str]().union(*texts)
    return set[str]().union(*map(secret_texts, value)) if isinstance(value, list | tuple) else set()


def _all_texts(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value} if value else set()
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return set[str]().union(*map(_all_texts, items))


def redact(text: str) -> str:
    """Mask secrets in a text with ``***``.

    Secrets are: values, of at least 8 characters, of environment variables whose names look secret (``*KEY*``,
    ``*TOKEN*``, ``*SECRET*``, ``*PASSW*``, ``*_DSN`` ...); passwords in ``~/.netrc`` or ``$NETRC``, such as the key of
    Weights & Biases; what `keep_secret` was told; and texts in the form of a well-known token (``hf_...``, ``sk-...``,
    ``ghp_...``, ``AKIA...``, a JSON web token), a private key, a webhook, what follows ``Bearer`` or ``token=``, or a
    password in an address or a connection string.

    Args:
        text: any.

    Returns:
        The text, masked.

    >>> redact("login with hf_abcdefghijklmnopqrstuvwxyz012345, please")
    'login with ***, please'
    >>> redact("postgres://me:hunter2@host/db")
    'postgres://***@host/db'
    """
    return _pattern().sub(_MASK, text)


def redacted(value: Any) -> Any:
    """Apply `redact` to every text in a JSON-like value, keys too, and mask the whole value of a secret key.

    Secret keys end in ``password``, ``secret``, ``api_key``, ``token``, ``credentials``, ``Authorization``, ``dsn``,
    ``webhook`` and the like, at any depth. Mappings and lists under them are masked, too; None, true, false and
    fractions, such as metrics, stay. Under any other ``..._key`` a text is a secret, too, and ``keys: {openai: ...}``
    counts as ``openai_key: ...``. No secrets are a ``key`` alone, ``question_key`` and other names of columns,
    ``max_tokens``, ``pad_token`` and other tokens of texts.

    A list of texts is read as one text, so a secret that is cut into several tokens is found, too.

    Args:
        value: mappings, lists and tuples of texts, numbers, None.

    Returns:
        The same, masked.

    >>> key = "AKIA" + "ABCDEFGHIJKLMNOP"
    >>> redacted({"key": key, "tokens": ["it is ", key[:9], key[9:], "!"]})
    {'key': '***', 'tokens': ['it is ', '***', '', '!']}
    >>> redacted({"engine": {"api_key": "hunter2", "max_tokens": 16}})
    {'engine': {'api_key': '***', 'max_tokens': 16}}
    """
    return _redact_value(value, _pattern())


def _redact_value(value: Any, secret: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return secret.sub(_MASK, value)
    if isinstance(value, Mapping):
        return {
            _redact_value(key, secret): _mask_all(item)
            if _is_secret(key, item)
            else _redact_value(_mask_named_items(key, item), secret)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        if value and all(isinstance(item, str) for item in value):
            return _pieces(value, secret)
        return [_redact_value(item, secret) for item in value]
    return value


def _mask_all(value: Any) -> Any:
    """Put a mask in place of every value that may be a secret, or a part of one."""
    if isinstance(value, Mapping):
        return {key: _mask_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask_all(item) for item in value]
    return value if value is None or value == "" or isinstance(value, bool | float) else _MASK


@functools.lru_cache(maxsize=4096)
def _words(name: str) -> str:
    """``hfToken``, ``HF_TOKEN`` and ``hf-token2`` are all ``hf_token``."""
    return "_".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)).lower()


def _is_secret(key: Any, value: Any) -> bool:
    name = _words(key) if isinstance(key, str) else ""
    if _SECRET_KEY.search(name):
        return not _TOKEN_OF_TEXT.search(name)
    return isinstance(value, str) and bool(_KEY.search(name)) and not _KEY_OF_DATA.search(name)


def _mask_named_items(key: Any, value: Any) -> Any:
    """Mask texts in a mapping ``keys`` or ``tokens`` as if they had names such as ``openai_key``."""
    if key not in ("keys", "tokens") or not isinstance(value, Mapping):
        return value
    singular = key.removesuffix("s")
    return {
        name: _MASK if item and isinstance(item, str) and _is_secret(f"{name}_{singular}", item) else item
        for name, item in value.items()
    }


def _pieces(pieces: Sequence[str], secret: re.Pattern[str]) -> list[str]:
    text = "".join(pieces)
    masked = [match.span() for match in secret.finditer(text)]
    if not masked:
        return list(pieces)
    ends = list(accumulate(map(len, pieces)))
    return ["".join(_iter_masked(text, end - len(piece), end, masked)) for piece, end in zip(pieces, ends, strict=True)]


def _iter_masked(text: str, start: int, end: int, masked: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Yield the text from start to end, with masks at the beginnings of secrets."""
    for first, last in masked:
        if last <= start or first >= end:
            continue
        yield text[start:first]
        yield _MASK if start <= first else ""
        start = last
    yield text[start:end]


def _pattern() -> re.Pattern[str]:
    named = {value for name, value in os.environ.items() if _SECRET_NAME.search(name)}
    secrets = frozenset(value.strip() for value in named | _netrc_passwords() if len(value.strip()) >= _SHORTEST)
    return _compile_pattern(secrets | _kept_secrets)


def _netrc_passwords() -> frozenset[str]:
    """Return the passwords of the netrc file, which may be missing, as the home folder may be, or not readable."""
    try:
        path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
        return _passwords(path, path.stat().st_mtime_ns)
    except (OSError, RuntimeError):
        return frozenset()


@functools.lru_cache(maxsize=4)
def _compile_pattern(secrets: frozenset[str]) -> re.Pattern[str]:
    longest_first = sorted(secrets, key=lambda value: (-len(value), value))
    return re.compile("|".join([*map(re.escape, longest_first), _SHAPES]))


@functools.lru_cache(maxsize=4)
def _passwords(path: Path, changed: int) -> frozenset[str]:
    try:
        hosts = netrc.netrc(path).hosts.values()
    except (OSError, netrc.NetrcParseError):  # not ours to complain about
        return frozenset()
    return frozenset(password for _, _, password in hosts if password)


def error_text(error: BaseException) -> str:
    """The type and message of an exception, masked and `printable`, even if its ``__str__`` raises.

    >>> error_text(ValueError("no"))
    'ValueError: no'
    """
    try:
        text = str(error)
    except BaseException as other:
        text = f"(its message cannot be shown: its __str__ raised {type(other).__name__})"
    return f"{type(error).__name__}: {printable(redact(text[: 5 * _LONGEST])[:_LONGEST])}"
