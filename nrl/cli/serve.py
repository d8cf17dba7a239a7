"""The command ``nrl serve``: a model behind OpenAI's Chat Completions and Responses, for inference."""

import asyncio
import hmac
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import attrs
import uvloop

from nrl.arguments import checked
from nrl.backends import Model, Sampling
from nrl.cli.evaluation import find_model, make_sampler
from nrl.errors import ConfigError
from nrl.gym.endpoint.answering import SamplerAnswers
from nrl.gym.endpoint.endpoint_app import LARGEST, application
from nrl.gym.http.front import allowed_hosts
from nrl.gym.http.serve_app import address, check_reach
from nrl.gym.http.server_socket import Listener, listening
from nrl.log.redaction import keep_secret

__all__ = ["Serving", "main"]

_GRACE = 10.0  # seconds for what is under way when it stops
_positive = attrs.validators.ge(1)


@checked("serve")
@attrs.frozen
class Serving:
    """Serve a model over HTTP, as OpenAI's Chat Completions and Responses, until Ctrl-C."""

    model: str  # a folder, a hub name, or the folder of a run
    name: str | None = None  # by which clients ask for it; none: as it is given here
    host: str = "127.0.0.1"  # the address to listen at; by default no other machine can reach it
    port: int = attrs.field(default=8000, validator=attrs.validators.ge(0))  # 0: any that is free
    hosts: list[str] = attrs.field(factory=list)  # further names by which clients may ask, such as that of a proxy
    token_file: str | None = None  # has the API key that clients have to give; none: NRL_SERVE_TOKEN, if it is set
    auth: Literal["token", "none"] = (
        "token"  # "none": other machines may ask without a key, on a network that one trusts
    )
    ids: bool = False  # true: all answers have prompt_token_ids, generation_token_ids and generation_log_probs
    temperature: float = 1.0  # this and what follows: where a request does not say
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    max_new_tokens: int = attrs.field(default=512, validator=_positive)  # of an answer
    largest: int = attrs.field(default=LARGEST, validator=_positive)  # bytes of a request
    sampler: Literal["hf", "vllm", "vllm-cpu", "openai"] = "hf"  # openai: servers that run already, such as vllm serve
    url: str | None = None  # of servers, for sampler=openai: URL or URL,URL
    engine: dict[str, Any] = attrs.field(factory=dict)  # more arguments of the sampler: engine.max_model_len=2048
    dtype: Literal["float32", "bfloat16"] = "float32"
    trust_remote_code: bool = False  # let Python files that lie with the model run
    cluster: str = "local"  # "local": this process; "ray", or the address of a Ray cluster: actors
    samplers: int = attrs.field(default=1, validator=_positive)  # processes that sample

    @property
    def token(self) -> str | None:
        """The API key that clients have to give; None: none is asked for.

        Raises:
            ConfigError: the file cannot be read, or is empty.
        """
        if self.token_file is None:
            return os.environ.get("NRL_SERVE_TOKEN") or None
        try:
            token = Path(self.token_file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"serve: token_file={self.token_file}: cannot be read: {error}") from None
        if not token:
            raise ConfigError(f"serve: token_file={self.token_file} is empty; write the API key into it")
        return token

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.max_new_tokens)


def main(cfg: Serving, ready: Callable[[str], Any] = print) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        cfg: the configuration.
        ready: is told, once clients can ask, what they need.

    Raises:
        ConfigError: an argument of the sampler is unknown; or other machines reach the server, and no token is set.
        ModelError: the model does not exist.
        OSError: the port is taken.
    """
    token = cfg.token
    keep_secret([token] if token else [])
    try:
        check_reach("serve", cfg.host, token, cfg.auth)
    except ValueError as error:
        raise ConfigError(f"{error} (a token is given as token_file=FILE or NRL_SERVE_TOKEN)") from None
    with ExitStack() as stack:
        socket = stack.enter_context(listening(cfg.host, cfg.port, "serve"))
        model = Model(find_model(cfg.model), dtype=cfg.dtype, trust_remote_code=cfg.trust_remote_code)
        answers = SamplerAnswers(make_sampler("serve", cfg, model, cfg.sampling, stack), ids=cfg.ids)
        name, url = cfg.name or cfg.model, address(cfg.host, socket.getsockname()[1])
        if token is None and cfg.auth == "none":
            warnings.warn(f"serve: {url} takes requests from every machine that reaches it", stacklevel=2)

        def authenticate(key: str) -> SamplerAnswers | None:
            return answers if token is None or hmac.compare_digest(key.encode(), token.encode()) else None

        def stop(listener: Listener) -> None:
            listener.stop()
            asyncio.get_running_loop().call_later(_GRACE / 2, answers.close)  # Waiting clients get an error.

        async def serve() -> None:
            hosts = allowed_hosts(cfg.host, cfg.hosts, secured=token is not None)
            aliases = [] if cfg.name else [Path(cfg.model).name]  # A folder also answers to its own name.
            listener = Listener(application(authenticate, name, aliases=aliases, largest=cfg.largest), _GRACE, hosts)
            for number in (signal.SIGINT, signal.SIGTERM):
                with suppress(ValueError, NotImplementedError, RuntimeError):  # Signal handlers need the main thread.
                    asyncio.get_running_loop().add_signal_handler(number, stop, listener)
            key = "any" if token is None else "..."
            message = f"serve: {name} is ready: OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key} OPENAI_MODEL={name}"
            await listener.answer(socket, lambda: ready(message))

        uvloop.run(serve())
        if answers.busy:  # a thread that decodes cannot be ended, and torch aborts a process that ends around it
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
