import json
import os
from pathlib import Path
from typing import Any

import pytest

from nrl.log import redact, redacted

# Put together here, so that no scanner takes this file for a leak.
SHAPED = [
    "hf" + "_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ012345",
    "sk" + "-" + "proj-aBcDeFgHiJ_kLmNoPqRs-0123456789",
    "gh" + "p_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ0123456789",
    "github" + "_pat_" + "11ABCDEFG0aBcDeFgHiJkLmN_oPqRs",
    "AK" + "IA" + "IOSFODNN7EXAMPLE",
    "AI" + "za" + "SyA-1234567890abcdefghijklmnopqrstu",
    "xo" + "xb" + "-1234567890-abcdefghij",
    "gl" + "pat-" + "aBcDeFgHiJkLmNoPqRsT",
    "-----BEGIN RSA PRIV" + "ATE KEY-----\nMIIB\nabc=\n-----END RSA PRIVATE KEY-----",
]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's own secrets."""
    for name in list(os.environ):
        if any(word in name.upper() for word in ("KEY", "TOKEN", "SECRET", "PASS", "CRED", "NETRC", "_PAT")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


@pytest.mark.parametrize(
    "name",
    ["OPENAI_API_KEY", "HF_TOKEN", "MY_SECRET", "DB_PASSWORD", "PASSWD_X", "KEY_PASSPHRASE", "AWS_CREDENTIALS",
     "GITHUB_PAT", "wandb_api_key", "OPENAI_KEY", "SENTRY_DSN", "SLACK_WEBHOOK", "MY_AUTH", "BEARER",
    "MYSQL_PWD"],
)  # fmt: skip
def test_values_of_variables_with_secret_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    text = "before correct horse (battery)+ after"
    assert redact(text) == text
    monkeypatch.setenv(name, "correct horse (battery)+")
    assert redact(text) == "before *** after"


@pytest.mark.parametrize("name", ["KEYBOARD_LAYOUT", "TOKENIZERS_PARALLELISM", "PWD", "OLDPWD", "LANGUAGE", "PATH_X"])
def test_other_variables_are_not_secret(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "correct horse")
    assert redact("correct horse") == "correct horse"


def test_a_short_value_is_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "seventh")  # 7 characters
    monkeypatch.setenv("MY_TOKEN", "eighth_8")
    assert redact("seventh eighth_8") == "seventh ***"


def test_a_value_within_another_does_not_show_the_rest_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "12345678")
    monkeypatch.setenv("B_KEY", "12345678-and-more")
    assert redact("12345678-and-more 12345678") == "*** ***"


@pytest.mark.parametrize("secret", SHAPED)
def test_well_known_shapes(secret: str) -> None:
    assert redact(f"key={secret}, and so on") == "key=***, and so on"


@pytest.mark.parametrize(
    "text",
    [
        "hf_transfer", "sk-learn", "task-0123456789012345678901234567890", "the ghp_ prefix", "AKIA", "",
        "https://example.org:8080/a@b", "1 + 1 = 2", "risk-averse-and-otherwise-quite-long-hyphenation",
    ],
)  # fmt: skip
def test_what_only_looks_a_little_like_one_stays(text: str) -> None:
    assert redact(text) == text


def test_a_password_in_an_address() -> None:
    assert redact("see https://me:hunter2@example.org/x") == "see https://***@example.org/x"


def test_passwords_in_netrc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "netrc"
    path.write_text(f"machine api.wandb.ai login user password {'0123456789abcdef' * 2}01234567\n")
    key = "0123456789abcdef" * 2 + "01234567"
    assert redact(key) == key  # forty hexadecimal digits are also what git's commits look like
    monkeypatch.setenv("NETRC", str(path))
    assert redact(f"a {key} b") == "a *** b"
    path.write_text("this is no netrc {\n")
    os.utime(path, (1, 1))
    assert redact(key) == key


def test_all_texts_of_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "correct horse")
    value = {"a": ["x correct horse"], "correct horse": {"b": ("correct horse", 1, None, 2.5, True)}}
    assert redacted(value) == {"a": ["x ***"], "***": {"b": ["***", 1, None, 2.5, True]}}
    assert value["a"] == ["x correct horse"]  # the argument stays as it was


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["correct horse"], ["***"]),
        (["a correct", " horse b"], ["a ***", " b"]),
        (list("a correct horse b"), ["a", " ", "***", *[""] * 12, " ", "b"]),
        (["correct ", "", "horsecorrect", " horse", "!"], ["***", "", "***", "", "!"]),
        (["correct horse and correct horse"], ["*** and ***"]),
        (["correct", "horse"], ["correct", "horse"]),
        (["corr", 1, "ect horse"], ["corr", 1, "ect horse"]),
        ([], []),
    ],
)
def test_a_secret_that_is_spread_over_tokens(
    monkeypatch: pytest.MonkeyPatch, tokens: list[str], expected: list[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "correct horse")
    assert redacted({"tokens": tokens})["tokens"] == expected
    if all(isinstance(token, str) for token in tokens):
        assert "".join(expected) == redact("".join(tokens))


def test_json_of_what_is_masked_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", 'a"b\\c\nd\u00e9efgh')
    assert json.loads(json.dumps(redacted({"x": 'a"b\\c\nd\u00e9efgh'}))) == {"x": "***"}


NAMES_OF_SECRETS = [
    "api_key", "apiKey", "API_KEY", "apikey", "x-api-key", "OPENAI_API_KEY", "wandb.api_key",
    "engine.api_key", "api_keys", "ApiKey", "api_key_2", "token", "hf_token", "HF_TOKEN", "hfToken",
    "HFToken", "access_token", "auth-token", "github_token", "some_service_token", "token2", "password",
    "db_password", "DB_PASSWORD", "dbPassword", "passwords", "passwd", "passphrase", "MYSQL_PWD", "secret",
    "client_secret", "secrets", "aws_secret_access_key", "secret_key", "private_key", "ssh_key",
    "credentials", "Authorization", "Cookie", "wandb_key", "hf_key", "OPENAI_KEY", "wandbKey", "github_pat", "pat",
    "auth", "basic_auth", "bearer", "dsn", "SENTRY_DSN", "webhook", "slackWebhook", "webhook_url",
]  # fmt: skip
NAMES_OF_OTHERS = [
    "max_tokens", "min_tokens", "tokens", "n_tokens", "tokens_per_second", "tokenizer", "tokenizers",
    "token_mean", "token_ids", "eos_token_id", "pad_token", "eos_token", "bos_token", "mask_token",
    "image_token", "next_token", "per_token", "padToken", "PAD_TOKEN", "token_type_ids", "return_token_ids",
    "key", "keys", "sort_key", "group_by_key", "primary_key", "keyboard", "monkey", "hotkey", "keep",
    "key_value_heads", "secretary", "secretly", "passwordless", "password_policy", "path", "pwdx", "seed",
    "source", "out", "question_key", "answer_key", "prompt_key", "input_key", "chosen_key", "rejectedKey", "label_key",
    "text_key", "messages_key", "reward_key", "image_key", "public_key", "auth_type", "author", "authority", "pattern",
    "pathology", "bearers", "webhook_timeout", "special_tokens",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES_OF_SECRETS)
def test_what_a_key_calls_a_secret_is_masked_however_short(name: str) -> None:
    assert redacted({name: "x"}) == {name: "***"}
    assert redacted({"a": [{"b": {name: "x", "c": "x"}}]}) == {"a": [{"b": {name: "***", "c": "x"}}]}


@pytest.mark.parametrize("name", NAMES_OF_OTHERS)
def test_what_only_sounds_a_little_like_a_secret_stays(name: str) -> None:
    for value in ("x", 5, ["x", 5], {"a": 5}):
        assert redacted({name: value}) == {name: value}


@pytest.mark.parametrize(
    ("value", "masked"),
    [
        ({"keys": {"openai": "o1", "n": 3, "e": ""}}, {"keys": {"openai": "***", "n": 3, "e": ""}}),
        ({"keys": {"prompt": "question"}}, {"keys": {"prompt": "question"}}),
        ({"tokens": {"hf": "t", "eos": "</s>"}}, {"tokens": {"hf": "***", "eos": "</s>"}}),
        ({"tokens": {"total": 5, "a": ["x"]}}, {"tokens": {"total": 5, "a": ["x"]}}),
        ({"secrets": {"a": "x"}}, {"secrets": {"a": "***"}}),
        ({"lookup_key": 5, "stat_key": ["a"]}, {"lookup_key": 5, "stat_key": ["a"]}),
    ],
)
def test_a_mapping_of_keys_is_as_many_keys(value: Any, masked: Any) -> None:
    assert redacted(value) == masked


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Server=a;Password=hunter2;Database=b", "Server=a;Password=***;Database=b"),
        ("host=a user=me password=hunter2 port=1", "host=a user=me password=*** port=1"),
        ("Server=a;UID=me;PWD=hunter2", "Server=a;UID=me;PWD=***"),
        ("AccountName=a;AccountKey=abc+/=;E=c", "AccountName=a;AccountKey=***;E=c"),
        ("at https://hooks.slack.com/services/T0/B0/xyz now", "at https://hooks.slack.com/services/*** now"),
        ("PWD=/srv/work password: none", "PWD=/srv/work password: none"),
        ("see https://hooks.slack.com/services", "see https://hooks.slack.com/services"),
    ],
)
def test_secrets_in_connection_strings_and_webhooks(text: str, masked: str) -> None:
    assert redact(text) == masked


def test_all_that_is_under_a_secret_key_is_masked() -> None:
    value = {"credentials": {"user": "me", "keys": ["a", 12345, ("b",)], "none": None, "": True, "share": 0.5, "e": ""}}
    masked = {"user": "***", "keys": ["***", "***", ["***"]], "none": None, "": True, "share": 0.5, "e": ""}
    assert redacted(value) == {"credentials": masked}
    assert redacted({"reward/token": 0.25, "env/secret": 1.0}) == {"reward/token": 0.25, "env/secret": 1.0}
    assert redacted({3: "y"}) == {3: "y"}


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://me:p@ss@example.org/x", "https://***@example.org/x"),
        ("redis://:secret@localhost:6379", "redis://***@localhost:6379"),
        ("a http://h:1 and http://me:pw@h:2/a b@c", "a http://h:1 and http://***@h:2/a b@c"),
        ("http://h:1?x=@y", "http://h:1?x=@y"),
        ("http://h:8000/v1#@", "http://h:8000/v1#@"),
    ],
)
def test_passwords_in_addresses(text: str, masked: str) -> None:
    assert redact(text) == masked
