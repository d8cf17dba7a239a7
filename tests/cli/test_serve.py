"""The command `nrl serve`: a model behind OpenAI's APIs, as their own client sees it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch

import nrl
from nrl import tiny
from nrl.backends import hf
from nrl.cli.cli import main
from nrl.cli.serve import Serving
from nrl.data import render
from nrl.envs.tools import tool
from nrl.errors import ConfigError

ASK: Any = [{"role": "user", "content": "2+2="}]


class Running(NamedTuple):
    url: str
    process: "subprocess.Popen[str]"
    folder: Path


def started(*settings: str, **variables: str) -> "tuple[str, subprocess.Popen[str]]":
    command = [sys.executable, "-m", "nrl", "serve", *settings, "port=0"]
    process = subprocess.Popen(command, stdout=-1, text=True, env=os.environ | variables)
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"OPENAI_BASE_URL=(\S+)", line):
            return found[1], process
    raise AssertionError(process.wait())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("models") / "small"
    tiny.save(tiny.model(tokenizer=tiny.bpe(["user assistant 2+2= 4", tiny.CHATML])), folder)
    url, process = started(str(folder), "max_new_tokens=6", "name=small", "ids=true")
    yield Running(url, process, folder)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    process.stdout.close()  # type: ignore[union-attr]


@pytest.fixture
def client(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url, api_key="any", max_retries=0) as made:
        yield made


def test_it_says_what_the_sampler_says(served: Running, client: openai.OpenAI) -> None:
    with nrl.cluster("local") as cluster:
        model = nrl.Model(str(served.folder))
        greedy = nrl.Sampling(temperature=0, max_new_tokens=5)
        sampler = hf.sampler(cluster.reserve(1), model, greedy)
        prompt = render(ASK, sampler.tokenizer)
        (own,) = sampler.generate([prompt]).result()
    answer: Any = client.chat.completions.create(model="small", messages=ASK, temperature=0, max_tokens=5)
    message = answer.choices[0].message
    assert message.prompt_token_ids == prompt
    assert message.generation_token_ids == own.token_ids.tolist()
    torch.testing.assert_close(torch.tensor(message.generation_log_probs), own.logprobs)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5
    response: Any = client.responses.create(model="small", input="2+2=", temperature=0, max_output_tokens=5)
    assert response.output[-1].generation_token_ids == own.token_ids.tolist()
    assert response.status == "incomplete"


def test_a_seed_is_the_noise_and_n_are_several(client: openai.OpenAI) -> None:
    def texts(**how: Any) -> list[Any]:
        return [
            each.message.content for each in client.chat.completions.create(model="small", messages=ASK, **how).choices
        ]

    assert texts(seed=3, n=4) == texts(seed=3, n=4)
    assert len(set(texts(seed=3, n=4))) > 1
    assert texts(seed=3) != texts(seed=4)
    assert len(texts(n=2)) == 2


def test_tools_are_shown_and_streams_end(client: openai.OpenAI) -> None:
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    tools: Any = [tool(add).schema]
    shown: Any = client.chat.completions.create(model="small", messages=ASK, tools=tools)
    plain: Any = client.chat.completions.create(model="small", messages=ASK)
    assert len(shown.choices[0].message.prompt_token_ids) > len(plain.choices[0].message.prompt_token_ids)
    with client.responses.stream(model="small", input="2+2=", temperature=0, max_output_tokens=5) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.incomplete"


def test_models_and_tokens(served: Running, client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["small"]
    found: Any = client.post("/tokenize", cast_to=object, body={"model": "small", "messages": ASK})
    answer: Any = client.chat.completions.create(model="small", messages=ASK)
    prompt = answer.choices[0].message.prompt_token_ids
    assert found["tokens"] == prompt
    assert found["count"] == len(prompt)
    plain: Any = client.post("/tokenize", cast_to=object, body={"prompt": "2+2="})
    assert plain["count"] < found["count"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"temperature": -1}, "temperature is -1; give a number from 0 to 100"),
        ({"temperature": "hot"}, "temperature is 'hot'; give a number"),
        ({"temperature": 2**65}, "give a number from 0 to 100"),
        ({"max_tokens": 2**63}, "max_tokens is 9223372036854775808; give a whole number from 1 to 2147483647"),
        ({"max_tokens": 1e308}, "give a whole number from 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens is 0; give a whole number from 1"),
        ({"extra_body": {"top_k": 1.5}}, "top_k is 1.5; give a whole number from -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"stop": [1]}, "stop is [1]; give texts"),
        ({"messages": [{"role": "user", "content": "2+2= " * 2000}]}, "ask something shorter"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "this model reads text alone"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused(how: dict[str, Any], said: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(said)):
        client.chat.completions.create(**{"model": "small", "messages": ASK, **how})


def test_a_key_is_asked_for(served: Running) -> None:
    url, process = started(str(served.folder), "max_new_tokens=2", NRL_SERVE_TOKEN="secret")
    try:
        with openai.OpenAI(base_url=url, api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with openai.OpenAI(base_url=url, api_key="secret") as client:
            assert client.chat.completions.create(model="small", messages=ASK).choices
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()  # type: ignore[union-attr]


def test_a_key_in_an_argument_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "nowhere", "token=secret"]) == 2
    assert "give token_file=FILE, or set NRL_SERVE_TOKEN" in capsys.readouterr().err


def test_a_key_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    for text in (None, ""):
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigError, match="token_file="):
            _ = Serving("small", token_file=str(file)).token
    file.write_text("a secret\n")
    assert Serving("small", token_file=str(file)).token == "a secret"


def test_other_machines_need_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "nowhere", "host=0.0.0.0"]) == 2
    assert "every machine that reaches 0.0.0.0 could use this server; give a token" in capsys.readouterr().err


def test_what_is_missing_or_unknown_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    assert "model" in capsys.readouterr().err
    assert main(["serve", "small", "prot=1"]) == 2
    assert "did you mean 'port'" in capsys.readouterr().err


def test_a_server_that_is_ended_while_it_decodes_says_so(tmp_path: Path) -> None:
    """Its client reads why, and it ends as it does when nobody waits."""
    long = tmp_path / "long"
    tiny.save(
        tiny.model(tokenizer=tiny.bpe(["user assistant 2+2= 4"]), max_position_embeddings=4096, num_hidden_layers=32),
        long,
    )
    url, process = started(str(long), "max_new_tokens=4000")
    try:
        said = list[Any]()

        def ask() -> None:
            with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
                try:
                    client.chat.completions.create(model="long", messages=ASK, n=128)
                except openai.APIStatusError as error:
                    said.append((error.status_code, error.body))

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(2.0)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        asking.join(10)
        assert said[0][0] == 503
        assert "the server ends" in said[0][1]["message"]
    finally:
        process.kill()
        process.stdout.close()  # type: ignore[union-attr]
