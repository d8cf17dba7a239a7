"""The protocol of an inference engine, and the calls that a sampler makes on it in its process.

An engine that satisfies `Replica` is all that a sampler needs beside `nrl.backends.sampling.pool`; those of
`nrl.backends.hf` and `nrl.backends.vllm` are two of them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from nrl.backends.base import Bucket, Completion, Sampling
from nrl.errors import GenerationError
from nrl.runtime.mesh.current_process import rest, wake

__all__ = ["Decoded", "Held", "Replica", "Request", "about", "add", "advance", "begin", "check", "end"]


class Request(NamedTuple):
    """A prompt that is to be completed.

    Args:
        number: by which the answer is known; no other request of the sampler has it.
        prompt: token ids.
        seed: of its noise.
        sampling: how its tokens are drawn.

    >>> Request(0, [5, 6], 1, Sampling()).seed
    1
    """

    number: int
    prompt: Sequence[int]
    seed: int
    sampling: Sampling


class Decoded(NamedTuple):
    """The answer to one prompt.

    Args:
        token_ids: ``[L]`` int64, the sampled tokens, with the stop token if one was sampled.
        logprobs: ``[L]`` float32, nats, of each under the distribution that it was drawn from.
        truncated: it was ended by a length limit and not by a stop token.
        versions: ``[L]`` int64, of the weights that each was drawn with; None: of those that there are.
    """

    token_ids: Tensor
    logprobs: Tensor
    truncated: bool
    versions: Tensor | None = None


class Replica(Protocol):
    """An engine in one process. It may satisfy `nrl.runtime.mesh.current_process.Rests`, too."""

    @property
    def context_length(self) -> int:
        """The most tokens that a prompt and its completion may have together."""
        ...

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        ...

    def advance(
        self, requests: Sequence[Request], cancelled: Sequence[int]
    ) -> Sequence[tuple[int, Decoded | Exception]]:
        """Take on requests, forget others, and decode: for a moment, or until all that it has are finished.

        It is called again and again while requests are unfinished, so an engine that can take on requests while it
        decodes returns every few steps, and any other when all are finished. The noise of a row depends on its seed
        alone.

        Args:
            requests: new ones, which `nrl.backends.sampling.replica.check` has found fit.
            cancelled: numbers of earlier ones that nobody waits for any more; some may be finished already.

        Returns:
            What is finished, with its number; or why it cannot be served.
        """
        ...

    def begin(self) -> None:
        """New weights will come, all of them. What was computed with the old ones must not be used again."""
        ...

    def add(self, bucket: Bucket) -> None:
        """Some of them, by their Hugging Face names; of tied weights one name is enough.

        Raises:
            ModelError: a name that the model does not have, or a wrong shape.
        """
        ...

    def end(self, version: int) -> None:
        """They have come; unfinished requests go on with them.

        Raises:
            ModelError: some have not.
        """
        ...


class Held:
    """A replica in its process, with the version of its weights.

    >>> Held(lambda: None).version
    0
    """

    def __init__(self, make: Callable[[], Replica]) -> None:
        self.replica, self.version = make(), 0

    def rest(self) -> None:
        """Leave the device; see `nrl.runtime.mesh.current_process.Rests`."""
        rest(self.replica)

    def wake(self) -> None:
        """Go back to it."""
        wake(self.replica)


def about(held: Held) -> tuple[int, int]:
    """The context length and the size of the vocabulary."""
    return held.replica.context_length, held.replica.vocabulary


def advance(
    held: Held, requests: Sequence[Request], cancelled: Sequence[int]
) -> list[tuple[int, Completion | Exception]]:
    """See `Replica.advance`."""
    found = held.replica.advance(requests, cancelled)
    return [(number, _stamped(answer, held.version)) for number, answer in found]


def _stamped(decoded: Decoded | Exception, version: int) -> Completion | Exception:
    if isinstance(decoded, Exception):
        return decoded
    oldest = version if decoded.versions is None else int(decoded.versions.min())
    return Completion(decoded.token_ids, decoded.logprobs, decoded.truncated, oldest, decoded.versions)


def begin(held: Held) -> None:
    """See `Replica.begin`."""
    held.replica.begin()


def add(held: Held, bucket: Bucket) -> None:
    """See `Replica.add`."""
    held.replica.add(bucket)


def end(held: Held, version: int) -> None:
    """See `Replica.end`."""
    held.replica.end(version)
    held.version = version


def check(
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    stop_token_ids: Sequence[int],
    vocabulary: int,
    context_length: int,
) -> None:
    """See that prompts can be completed.

    Raises:
        GenerationError: one cannot.

    >>> check([[3, 4]], [0], [], 8, 16)
    """
    if len(seeds) != len(prompts):
        raise GenerationError(f"decode: {len(seeds)} seeds for {len(prompts)} prompts; give one for each")
    for row, prompt in enumerate([prompts] if isinstance(prompts, str) else prompts):
        if isinstance(prompt, str) or not hasattr(prompt, "__len__") or str in map(type, prompt):
            raise GenerationError(
                f"generate: row {row} of the prompts is {prompt!r:.80}; prompts are lists of token ids, such as "
                "[[5, 6, 7]]; encode texts with the sampler's tokenizer first"
            )
        if len(prompt) == 0:
            raise GenerationError(
                f"decode: the prompt of row {row} has 0 tokens; give it from 1 to {context_length - 1}, such as the "
                "tokenizer's beginning-of-sequence token"
            )
        if len(prompt) >= context_length:
            raise GenerationError(
                f"decode: the prompt of row {row} has {len(prompt)} tokens, which leaves no room in a context "
                f"of {context_length}; shorten or drop the prompt, or use a model with a longer context"
            )
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            found = next(token for token in prompt if not 0 <= token < vocabulary)
            raise GenerationError(
                f"decode: the prompt of row {row} has the token id {found}, outside of the model's vocabulary of "
                f"{vocabulary}; encode it with the model's own tokenizer"
            )
    for token in stop_token_ids:
        if not 0 <= token < vocabulary:
            raise GenerationError(
                f"decode: the stop token {token} is outside of the model's vocabulary of {vocabulary}; "
                "give ids of the model's own tokenizer"
            )
