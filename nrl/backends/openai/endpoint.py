"""Making requests to an OpenAI-compatible endpoint, and checking and reading its answers."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch

from nrl.backends.openai.client import CompletionServer, excerpt
from nrl.backends.types import Completion, Sampling
from nrl.errors import ClusterError, GenerationError, LostRequest
from nrl.runtime.mesh.futures import gather
from nrl.runtime.threads import run_in_loop

__all__ = ["CompletionEndpoint", "Meaning", "find_model", "probe"]

_ID = "token_id:"  # how vLLM writes a token that it was asked to name by its id
_LOWEST = torch.finfo(torch.float32).min  # nats


@attrs.frozen
class CompletionEndpoint:
    """A model at a server.

    Args:
        server: of the model.
        name: of the model, as the server lists it.
        context_length: the most tokens that a prompt and its completion may have together.
        vocabulary: how many tokens the model knows.
        stops: the model's own tokens that end a completion.
    """

    server: CompletionServer
    name: str
    context_length: int
    vocabulary: int
    stops: tuple[int, ...]

    def request(self, prompt: Sequence[int], seed: int, sampling: Sampling) -> dict[str, Any]:
        """Return the body of a request for one completion."""
        greedy = sampling.temperature == 0
        return {
            "model": self.name,
            "prompt": [int(token) for token in prompt],
            "max_tokens": min(sampling.max_new_tokens, self.context_length - len(prompt)),
            "temperature": sampling.temperature,
            "top_k": -1 if greedy or not sampling.top_k else sampling.top_k,  # -1: all, for vLLM and SGLang
            "top_p": 1.0 if greedy else sampling.top_p,
            "seed": int(seed) & (2**63 - 1),  # servers take a signed number
            "stop_token_ids": [*self.stops, *sampling.stop_token_ids],
            "stop": list(sampling.stop),
            # Without these, servers take values from the model's generation_config.json
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logprobs": 0,  # log-probability of the sampled token alone
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # all that older releases of vLLM have
        }

    async def complete(self, body: Mapping[str, Any]) -> Completion:
        """Send a request, and return its completion.

        Raises:
            LostRequest: the server failed in all attempts, or its answer is unusable.
            ClusterError: it has failed as many requests in a row as may be under way at once: it is gone.
            GenerationError: the server refuses.
        """
        try:
            answer = await self.server.ask("/completions", body)
        except ClusterError as error:
            if self.server.failed >= self.server.in_flight:
                raise
            raise LostRequest(str(error)) from error
        try:
            return self.completion(body, answer.content)._replace(times=answer.times)
        except GenerationError as error:  # Other answers may be usable, since those of `probe` were.
            raise LostRequest(str(error)) from error

    def completion(self, body: Mapping[str, Any], answer: Any) -> Completion:
        """Read the completion in the answer to a request.

        Raises:
            GenerationError: the answer has no completion, or one that cannot be trained on.
        """
        try:
            (choice,) = answer["choices"]
            details = choice.get("logprobs") or {}
            ids, logprobs, tokens = choice.get("token_ids"), details.get("token_logprobs"), details.get("tokens")
            if not all(isinstance(value, list | None) for value in (ids, logprobs, tokens)):
                raise TypeError
        except (TypeError, KeyError, ValueError, AttributeError):
            raise self._make_error(
                answer, "gives no completion; look whether that is an OpenAI-compatible server"
            ) from None
        if ids is None and tokens and all(str(token).startswith(_ID) for token in tokens):
            ids = [_number(token.removeprefix(_ID)) for token in tokens]
        if ids is None:
            raise self._make_error(
                answer,
                "gives no token ids. Text is never encoded again, since other tokens may come of it than were sampled; "
                "use vLLM, or an SGLang that knows return_token_ids",
            )
        unknown = [value for value in ids if type(value) is not int or not 0 <= value < self.vocabulary]
        if unknown or len(ids) > body["max_tokens"]:
            problem = f"the token id {excerpt(unknown[0], 40)}" if unknown else f"{len(ids)} token ids"
            raise self._make_error(
                answer,
                f"gives {problem}, where at most {body['max_tokens']} of 0 to {self.vocabulary - 1} were asked for; "
                "look whether it serves the model that model= names",
            )
        if not logprobs or len(logprobs) != len(ids) or None in logprobs:
            raise self._make_error(
                answer, "does not give the log-probability of each token; let the server give logprobs"
            )
        if not all(type(value) in (int, float) and _LOWEST < value < 0.01 for value in logprobs):  # rounding aside
            raise self._make_error(
                answer,
                "gives something else for log-probabilities, such as logits; start vLLM with --logprobs-mode "
                "processed_logprobs",
            )
        reason, end = choice.get("finish_reason"), choice.get("stop_reason", choice.get("matched_stop"))
        if reason not in ("stop", "length"):
            raise self._make_error(answer, f"ended a completion with {reason!r}; see the server's own log")
        if reason == "stop" and isinstance(end, int) and end != ids[-1]:
            raise self._make_error(answer, f"leaves out the token {end}, which was sampled and ended the completion")
        if choice.get("prompt_token_ids") not in (None, body["prompt"]):
            raise self._make_error(
                answer, "completed another prompt than it was sent; let the server leave prompts alone"
            )
        return Completion(torch.tensor(ids), torch.tensor(logprobs, dtype=torch.float32), reason == "length", 0)

    def _make_error(self, answer: Any, problem: str) -> GenerationError:
        return GenerationError(
            f"{self.server.caller}: {self.server.url}/completions {problem}. It says: {excerpt(answer)}"
        )


class Meaning(NamedTuple):
    """The distribution that a server's log-probabilities are of.

    Args:
        tempered: whether it is the one after the temperature.
        truncated: whether it is the one over the tokens that top-k and top-p keep.
    """

    tempered: bool
    truncated: bool


def find_model(server: CompletionServer, name: str | None) -> tuple[str, int | None]:
    """Return the name of the model at a server, and its context length if the server gives one.

    Args:
        server: to ask.
        name: of the model; None: the only one that the server lists.

    Raises:
        GenerationError: the server does not list it.
    """
    answer = run_in_loop(server.ask("/models")).result().content
    try:
        listed = {str(entry["id"]): entry.get("max_model_len") for entry in answer["data"]}
    except (TypeError, KeyError, AttributeError):
        raise GenerationError(
            f"{server.caller}: {server.url}/models lists no models; look whether that is an OpenAI-compatible server. "
            f"It says: {excerpt(answer)}"
        ) from None
    chosen = next(iter(listed)) if name is None and len(listed) == 1 else name
    if chosen is None or chosen not in listed:
        names = ", ".join(map(repr, listed)) or "(none)"
        raise GenerationError(
            f"{server.caller}: {server.url} serves the models {names}, and name is {name!r}; give one of them as name="
        )
    limit = listed[chosen]
    return chosen, limit if type(limit) is int and limit > 0 else None


def probe(endpoint: CompletionEndpoint) -> Meaning:
    """Ask for a few tokens, and find out how the server treats the temperature, top-k and seeds.

    Raises:
        GenerationError: seeds change nothing, or an answer is unusable.
    """
    prompt = [(31 * index + 7) % endpoint.vocabulary for index in range(min(8, endpoint.context_length - 1))]
    # vLLM takes no temperature above 2
    sharp, flat = Sampling(temperature=0.25, max_new_tokens=1), Sampling(temperature=2.0, max_new_tokens=16)
    rows = [(0, sharp), (0, flat), (0, flat), (1, flat), (0, attrs.evolve(flat, top_k=1))]
    # One log-probability more is that of the most probable token.
    bodies = [endpoint.request(prompt, *row) | {"logprobs": 1} for row in rows]
    replies = gather([run_in_loop(endpoint.server.ask("/completions", body)) for body in bodies]).result()
    answers = [item.content for item in replies]
    completions = [endpoint.completion(*item) for item in zip(bodies, answers, strict=True)]
    first, again, other = (item.token_ids.tolist() for item in completions[1:4])
    if first != again:
        warnings.warn(
            f"{endpoint.server.caller}: {endpoint.server.url} does not honour seeds: one request gave two answers, so "
            "no rollout can be repeated. Start SGLang with --enable-deterministic-inference",
            UserWarning,
            stacklevel=3,
        )
    elif first == other and float(completions[1].logprobs.sum()) < -5:  # Equal tokens this improbable are no chance.
        raise GenerationError(
            f"{endpoint.server.caller}: {endpoint.server.url} draws the tokens {first} whatever the seed, so all "
            "completions of a prompt would be the same; let the server pass seeds on"
        )
    # Before the temperature, the most probable first token has one log-probability at every temperature. After top_k=1
    # it is the only token, with log-probability 0
    high, low = _highest(answers[0]), _highest(answers[1])
    tempered = abs(high - low) > 0.1
    return Meaning(tempered, truncated=tempered and low < -1e-3 < float(completions[4].logprobs[0]))


def _highest(answer: Any) -> float:
    """Return the log-probability of the most probable first token, in nats; NaN: the server does not give it."""
    try:
        return float(max(answer["choices"][0]["logprobs"]["top_logprobs"][0].values()))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return math.nan


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() and len(text) < 20 else text
