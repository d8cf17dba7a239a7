"""A sampler over any server with an OpenAI-compatible endpoint, such as vLLM's or SGLang's.

It is a fixed policy, for evaluation or as a teacher: this interface cannot put weights into a server. Token ids go in
and come out; the text that a server sends along is ignored.
"""

from collections.abc import Iterable, Sequence
from concurrent import futures
from typing import Any, cast

import attrs

from nrl.arguments import checked
from nrl.backends.models.loading import end_tokens, load_config, load_tokenizer
from nrl.backends.models.positions import count_positions
from nrl.backends.openai.client import connect
from nrl.backends.openai.endpoint import CompletionEndpoint, Meaning, find_model, probe
from nrl.backends.openai.several import ServerGroup
from nrl.backends.sampling.base import Capabilities, Inflight
from nrl.backends.sampling.validation import check_prompts, truncates, warn_of_truncation
from nrl.backends.types import Bucket, Chunks, Completion, Model, Sampling
from nrl.errors import ArgumentError, GenerationError
from nrl.runtime.mesh.futures import Future, gather
from nrl.runtime.threads import run_in_loop

__all__ = ["EndpointSampler", "sampler"]

_WHO = "openai.sampler"


@checked("openai.sampler")
def sampler(
    url: str | Sequence[str],
    model: Model,
    sampling: Sampling | None = None,
    *,
    name: str | None = None,
    api_key: str | None = None,
    timeout: float = 600.0,
    in_flight: int = 256,
) -> "EndpointSampler":
    """Make a sampler whose tokens a server draws, through its ``/v1/completions``.

    First it asks the server for a few tokens, to find out whether the server gives token ids and takes seeds, and
    the distribution of its log-probabilities. It refuses a sampling under which the server would give
    log-probabilities of another distribution than the sampling distribution.

    Args:
        url: of the server, with or without ``/v1``; or of several servers of the same model. A request goes to the
            server that has read the beginning of its prompt, for example in a later turn, unless that server is too
            busy; and to another server after a failure.
        model: of the server; the sampler takes its tokenizer, vocabulary and stop tokens, and loads no weights.
        sampling: the default of calls; None: ``Sampling()``.
        name: of the model in the server's list; None: the only model in the list.
        api_key: sent as the bearer token to any server; None: the environment variable ``OPENAI_API_KEY``, if set and
            if ``url`` is https or on this machine. (``http://`` carries a key in clear.)
        timeout: seconds for the server to answer a request, all attempts together.
        in_flight: the most requests in flight at each server; each is for one completion.

    Returns:
        The sampler, at version 0, where it stays.

    Raises:
        GenerationError: the server refuses, gives no token ids, gives the same tokens for every seed, or
            log-probabilities that do not fit ``sampling``; or several servers serve different models.
        ClusterError: the server cannot be reached.
        DeadlineExceeded: the server does not answer in time.
        ModelError: the model's config or tokenizer cannot be loaded.
        ValueError: an argument is invalid.

    >>> from nrl import tiny
    >>> from nrl.backends import openai
    >>> openai.sampler("localhost:8000", tiny.model())
    Traceback (most recent call last):
    nrl.errors.ArgumentError: openai.sampler: the url is 'localhost:8000'; give one such as 'http://localhost:8000/v1'
    >>> policy = openai.sampler("http://localhost:8000/v1", tiny.model())  # doctest: +SKIP
    """
    servers = [connect(_WHO, value, api_key, timeout, in_flight) for value in ([url] if isinstance(url, str) else url)]
    if not servers:
        raise ArgumentError(f"{_WHO}: url is empty; give the address of a server, or several")
    tokenizer = load_tokenizer(model)
    config, generation = load_config(model)
    models = [find_model(server, name) for server in servers]
    if len({name for name, _ in models}) > 1:
        named = ", ".join(f"{server.url} serves {name!r}" for server, (name, _) in zip(servers, models, strict=True))
        raise GenerationError(
            f"{_WHO}: {named}; give servers of one model, under one name, as vLLM's --served-model-name gives it"
        )
    positions = count_positions(config)
    limits = [*(limit or positions for _, limit in models), tokenizer.model_max_length]
    first = CompletionEndpoint(
        servers[0],
        models[0][0],
        context_length=min(int(value) for value in limits if value is not None),
        vocabulary=int(config.vocab_size),
        stops=end_tokens(generation, tokenizer),
    )
    endpoints = [attrs.evolve(first, server=server) for server in servers]
    meanings = [probe(endpoint) for endpoint in endpoints]
    if len(set(meanings)) > 1:
        other = next(index for index, value in enumerate(meanings) if value != meanings[0])
        raise GenerationError(
            f"{_WHO}: {servers[0].url} and {servers[other].url} give log-probabilities of different distributions; "
            "start all servers with the same options"
        )
    endpoint_sampler = EndpointSampler(ServerGroup(endpoints), meanings[0], tokenizer, sampling or Sampling())
    endpoint_sampler.check(endpoint_sampler.sampling)
    return endpoint_sampler


@attrs.frozen(eq=False)
class EndpointSampler:
    """A `nrl.backends.Sampler` whose tokens servers draw; `sampler` makes one.

    Args:
        servers: of the model.
        meaning: of its log-probabilities.
        tokenizer: the transformers tokenizer of the model.
        sampling: for calls that do not say.
        version: 0, as it never receives weights.
        capabilities: it streams, and decodes elsewhere.
    """

    servers: ServerGroup = attrs.field(repr=lambda servers: repr(servers.endpoints))
    meaning: Meaning
    tokenizer: Any = attrs.field(repr=False)
    sampling: Sampling
    version: int = 0
    capabilities: Capabilities = Capabilities(streams=True, remote=True)

    @property
    def endpoint(self) -> CompletionEndpoint:
        """The model at the first of them."""
        return self.servers.endpoints[0]

    @property
    def context_length(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        return self.endpoint.context_length

    def generate(
        self,
        prompts: Sequence[Chunks],
        *,
        seeds: Sequence[int] | None = None,
        sampling: Sampling | None = None,
    ) -> Future[list[Completion]]:
        """Complete each prompt once; see `nrl.backends.Sampler`. Each prompt is a request of its own, many at a time.

        The future raises the error of the first row that fails; see `stream`.

        Raises:
            GenerationError: a prompt that cannot be completed, or a sampling for which the server gives
                log-probabilities of another distribution.
        """
        return gather(self.stream(prompts, list(range(len(prompts))) if seeds is None else seeds, sampling))

    def stream(
        self, prompts: Sequence[Chunks], seeds: Sequence[int], sampling: Sampling | None = None
    ) -> "list[futures.Future[Completion]]":
        """Complete each prompt, with a future for each row; cancelling one hangs up on the server. See `generate`.

        A future raises `LostRequest` where the server fails in all attempts; `ClusterError` or `DeadlineExceeded` where
        it has also failed as many requests in a row as may be under way at once; and `GenerationError` where it refuses
        the request or its answer is unusable.
        """
        chosen = sampling or self.sampling
        check_prompts(prompts, seeds, chosen.stop_token_ids, self.endpoint.vocabulary, self.context_length)
        self.check(chosen)
        warn_of_truncation(_WHO, chosen, self.endpoint.vocabulary)
        tokens = cast(Sequence[Sequence[int]], prompts)
        bodies = [self.endpoint.request(*args, chosen) for args in zip(tokens, seeds, strict=True)]
        places = self.servers.choose(tokens)
        return [run_in_loop(self.servers.complete(*args)) for args in zip(bodies, places, strict=True)]

    def receive(self, buckets: Iterable[Bucket | Future[Bucket]], version: int, *, inflight: Inflight = "wait") -> None:
        """Refuse weights: the interface has no way to put them into the server.

        Raises:
            GenerationError: always.
        """
        raise GenerationError(
            f"receive: {_WHO} cannot put weights into the server at {self.endpoint.server.url}; what it serves is a "
            "fixed policy, for evaluation or as a teacher. Publish to a vllm.sampler or an hf.sampler"
        )

    def check(self, sampling: Sampling) -> None:
        """Check that the server's log-probabilities are those of the distribution that it samples from.

        Raises:
            GenerationError: they are not.
        """
        truncated = sampling.temperature > 0 and truncates(sampling, self.endpoint.vocabulary)
        if (sampling.temperature in (0, 1) or self.meaning.tempered) and (not truncated or self.meaning.truncated):
            return
        missing = "top-k and top-p" if self.meaning.tempered else "the temperature, top-k and top-p"
        raise GenerationError(
            f"{_WHO}: {self.endpoint.server.url} gives log-probabilities under the distribution before {missing}. With "
            f"temperature={sampling.temperature:g}, top_k={sampling.top_k}, top_p={sampling.top_p:g} tokens come from "
            "another one, and what is trained on them would be wrong. Start vLLM with --logprobs-mode "
            "processed_logprobs (SGLang: without SGLANG_RETURN_ORIGINAL_LOGPROB; it has none after top-k and top-p), "
            "or sample with temperature=1, top_k=0, top_p=1"
        )
