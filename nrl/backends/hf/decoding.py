"""Decoding: many prompts to their completions, in one batch that shrinks as rows finish."""

import functools
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nrl.backends.engine import Decoded
from nrl.backends.hf.cache import ATTENTION, Cache, Generic, Preallocated
from nrl.backends.hf.noise import draw, uniforms
from nrl.backends.hf.recording import Recording
from nrl.backends.sampling.validation import check_prompts
from nrl.errors import GenerationError

__all__ = ["Decoding", "Stops", "decode"]

_AHEAD = 64  # positions that noise is computed for at once


def decode(
    module: Any,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    max_new_tokens: int,
    stop_token_ids: Sequence[int] = (),
    stop: Sequence[str] = (),
    tokenizer: Any = None,
    context_length: int,
    recording: Recording | None = None,
) -> list[Decoded]:
    """Complete prompts with a transformers causal language model, one completion for each.

    Equal prompts are read once. A row leaves the batch when it is done. The noise of a row depends on its seed and on
    the position of the token in the whole sequence. So a token does not depend on how rows are batched, except where
    rounding (about 1e-6) crosses a boundary between two tokens. Results are equal bit for bit only for the same batch,
    build, machine and number of threads. A model that `nrl.backends.hf.cache.prepare` has switched decodes with
    preallocated memory, any other with transformers' own cache.

    Args:
        module: the model, in eval mode; it is not changed.
        prompts: token ids, of any lengths.
        seeds: one for each prompt.
        temperature: see `nrl.backends.hf.noise.draw`; 0: greedy.
        top_k: 0: off.
        top_p: 1: off.
        max_new_tokens: the most tokens to sample for a row.
        stop_token_ids: a row ends with the first of these.
        stop: a row also ends with the token that completes one of these texts.
        tokenizer: has the text of each token; needed for ``stop``.
        context_length: the most tokens that a prompt and its completion may have together.
        recording: of the module's routers; with it, each answer has ``routes``.

    Returns:
        One `Decoded` for each prompt, in order, on the CPU.

    Raises:
        GenerationError: a text, an empty prompt, one without room for a token, ids outside the vocabulary, a seed too
            many or too few, or logits that are not finite.
        ModelError: the model's forward pass cannot be decoded from.

    >>> from nrl import tiny
    >>> from nrl.backends.models.loading import build
    >>> module = build(tiny.model()).eval()
    >>> first, second = decode(module, [[1, 2, 3], [4]], [0, 1], max_new_tokens=5, context_length=64)
    >>> len(first.token_ids), second.truncated
    (5, True)
    """
    decoding = Decoding(
        module,
        prompts,
        seeds,
        sampling={"temperature": temperature, "top_k": top_k, "top_p": top_p},
        max_new_tokens=max_new_tokens,
        stops=Stops(stop_token_ids, stop, tokenizer),
        context_length=context_length,
        recording=recording,
    )
    results = decoding.run()
    assert results is not None
    return results


class Decoding:
    """The decoding of one batch, which can be interrupted and continued; see `decode` for the arguments.

    Args:
        module: see `decode`.
        prompts: likewise.
        seeds: likewise.
        sampling: ``temperature``, ``top_k`` and ``top_p``.
        max_new_tokens: see `decode`.
        stops: what ends a row.
        context_length: see `decode`.
        recording: likewise.
    """

    def __init__(
        self,
        module: Any,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        sampling: dict[str, Any],
        max_new_tokens: int,
        stops: "Stops",
        context_length: int,
        recording: Recording | None = None,
    ) -> None:
        vocabulary = module.get_input_embeddings().num_embeddings
        check_prompts(prompts, seeds, stops.token_ids, vocabulary, context_length)
        self._count, self._recording = len(prompts), recording
        self._given_up = np.zeros(len(prompts), dtype=bool)
        noise = np.asarray([int(seed) & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64)
        arguments = module, prompts, noise, sampling, max_new_tokens, stops, context_length, recording, self._given_up
        self._begin = functools.partial(_loop, *arguments)
        self.restart()

    def restart(self) -> None:
        """Decode everything anew, as when the weights have changed."""
        self._steps = self._begin()

    def give_up(self, row: int) -> None:
        """Sample no more tokens of a row."""
        self._given_up[row] = True

    def run(self, until: float = math.inf) -> list[Decoded] | None:
        """Decode until all rows are done, or until ``time.monotonic()`` says so.

        Args:
            until: seconds.

        Returns:
            The answer for each row; None: the time is over, and decoding can be continued.
        """
        if not self._count:
            return []
        recording = self._recording
        with torch.inference_mode(), nullcontext() if recording is None else recording.on():
            while True:
                try:
                    next(self._steps)
                except StopIteration as end:
                    rows, tokens, logprobs, ended, routes = end.value
                    break
                if time.monotonic() >= until:
                    return None
        # A stable sort by row puts each row's tokens together, in the order of steps. It happens outside of inference
        # mode, whose tensors autograd would refuse
        order = torch.from_numpy(np.argsort(rows, kind="stable"))
        lengths = np.bincount(rows, minlength=self._count).tolist()
        logprobs = logprobs.cpu()[order].float()
        if not logprobs.isfinite().all():
            raise GenerationError(
                "decode: the model's logits are not finite, so nothing can be sampled from them; look for a NaN in "
                "the weights that were loaded or published last, or use a wider dtype"
            )
        row_routes = [None] * self._count if routes is None else routes.of_rows()
        parts = zip(
            tokens.cpu()[order].split(lengths), logprobs.split(lengths), ended.tolist(), row_routes, strict=True
        )
        return [Decoded(ids, values, not stopped, routes=route) for ids, values, stopped, route in parts]


class _Routes(NamedTuple):
    """The routes of all tokens that were inputs.

    Args:
        prompts: of each row, ``[len(prompt), layers, k]``; rows of one prompt have the same.
        rows: ``[N]``, of each sampled token that was an input, in the order of time.
        sampled: ``[N, layers, k]``, of these tokens.
    """

    prompts: list[Tensor]
    rows: np.ndarray
    sampled: Tensor

    def of_rows(self) -> list[Tensor]:
        """Return ``[n, layers, k]`` on the CPU for each row, of its prompt and of all sampled tokens but the last."""
        order = torch.from_numpy(np.argsort(self.rows, kind="stable"))
        lengths = np.bincount(self.rows, minlength=len(self.prompts)).tolist()
        parts = zip(self.prompts, self.sampled.cpu()[order].split(lengths), strict=True)
        return [torch.cat([prompt.cpu(), sampled]) for prompt, sampled in parts]


def _loop(
    module: Any,
    prompts: Sequence[Sequence[int]],
    seeds: np.ndarray,
    sampling: dict[str, Any],
    max_new_tokens: int,
    stops: "Stops",
    context_length: int,
    recording: Recording | None,
    given_up: np.ndarray,
) -> Generator[None, None, tuple[np.ndarray, Tensor, Tensor, np.ndarray, _Routes | None]]:
    """Decode; it yields after each step, and before each reads which rows ``[B]`` are given up.

    It returns all sampled tokens in time order: rows, ids and log-probs ``[N]``; which rows a stop token ended ``[B]``;
    and routes, None where they are not recorded.
    """
    unique: dict[tuple[int, ...], int] = {}
    origin = np.array([unique.setdefault(tuple(prompt), len(unique)) for prompt in prompts])
    lengths = np.array([len(prompt) for prompt in prompts])
    budget = np.minimum(max_new_tokens, context_length - lengths)
    cache: Cache = Generic(module, recording)
    if module.config._attn_implementation == ATTENTION:
        cache = Preallocated(module, len(prompts), int(budget.max()), recording)
    logits = cache.prefill(list(unique), origin)
    routed: list[tuple[np.ndarray, Tensor]] = []
    device = logits.device
    stops.begin(len(prompts), logits.shape[-1], device)
    positions = torch.from_numpy(lengths).to(device)
    rows, steps = np.arange(len(prompts)), []
    ended = np.zeros(len(prompts), dtype=bool)
    for k in range(int(budget.max())):
        if k % _AHEAD == 0:
            noise = uniforms(seeds[rows], lengths[rows] + k, min(_AHEAD, int(budget.max()) - k)).to(device)
        tokens, logprobs = draw(logits, noise[k % _AHEAD], **sampling)
        steps.append((rows, tokens, logprobs))
        stopped = stops.find_ended(tokens)
        leaves = stopped | (budget[rows] == k + 1) | given_up[rows]
        if leaves.any():
            ended[rows[stopped]] = True
            stay = np.flatnonzero(~leaves)
            if len(stay) == 0:
                break
            # The last live rows move into the gaps; all others keep their place
            live = np.arange(len(stay))
            live[leaves[: len(stay)]] = stay[stay >= len(stay)]
            cache.compact(live)
            index = torch.from_numpy(live).to(device)
            rows, tokens, positions, noise = rows[live], tokens[index], positions[index], noise[:, index]
            stops.keep(live)
        logits = cache.step(tokens, positions)
        if recording is not None:
            routed.append((rows, recording.take_routes()))
        positions = positions + 1
        yield
    step_rows, tokens_of, logprobs_of = zip(*steps, strict=True)
    routes = None
    if recording is not None:
        nothing = np.zeros(0, dtype=np.int64), next(iter(cache.routes.values()))[:0]
        of, chosen = zip(nothing, *routed, strict=True)
        routes = _Routes([cache.routes[j] for j in origin], np.concatenate(of), torch.cat(chosen))
    return np.concatenate(step_rows), torch.cat(tokens_of), torch.cat(logprobs_of), ended, routes


class Stops:
    """Finds the rows that end with the token just sampled: by a stop token, or by the end of a stop text.

    A text is looked for in bytes, since a token may end within a character, and only where it would end within the
    token: its length costs nothing until as much has been sampled.
    """

    def __init__(self, token_ids: Sequence[int], texts: Sequence[str], tokenizer: Any) -> None:
        self.token_ids, self._tokenizer = list(token_ids), tokenizer
        self._texts: dict[int, list[bytes]] = {}  # texts by their last byte
        for text in dict.fromkeys(texts):
            encoded = text.encode("utf-8", "surrogatepass")
            self._texts.setdefault(encoded[-1], []).append(encoded)
        self._longest = max((len(text) for alike in self._texts.values() for text in alike), default=0)
        self._bytes = functools.cache(_token_bytes(tokenizer)) if texts else None

    def begin(self, rows: int, vocabulary: int, device: torch.device) -> None:
        """Start with ``rows`` unfinished rows."""
        self._stops = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._stops[torch.tensor(self.token_ids, dtype=torch.long, device=device)] = True
        self._tails = [b""] * rows  # the last bytes of each row, in which a stop text may begin

    def find_ended(self, tokens: Tensor) -> np.ndarray:
        """Return ``[rows]`` bool: whether the tokens ``[rows]`` that were sampled now end their rows."""
        ended: np.ndarray = self._stops[tokens].cpu().numpy()  # the one place where a step waits for the device
        if self._bytes is not None:
            for row, token in enumerate(tokens.tolist()):
                text = self._tails[row] + self._bytes(token)
                ends = range(len(self._tails[row]) + 1, len(text) + 1)
                candidates = ((stop, end) for end in ends for stop in self._texts.get(text[end - 1], ()))
                ended[row] |= any(text.endswith(stop, 0, end) for stop, end in candidates)
                self._tails[row] = text[-self._longest :]
        return ended

    def keep(self, rows: np.ndarray) -> None:
        """Keep these rows and forget all others."""
        self._tails = [self._tails[row] for row in rows.tolist()]


def _token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """Return a function from a token to the bytes that it adds to a text, special tokens included.

    Args:
        tokenizer: of transformers.
    """
    from transformers import StopStringCriteria

    mode = StopStringCriteria._get_stop_string_matching_mode(tokenizer)
    table = StopStringCriteria._byte_level_decoder() if mode == "byte_level" else None
    # Some tokenizers drop a space at the beginning of a text, so that a token is converted behind another text
    before = tokenizer.convert_ids_to_tokens(tokenizer("abcdef", add_special_tokens=False)["input_ids"])

    def convert(token: int) -> bytes:
        name = tokenizer.convert_ids_to_tokens(token)
        if name is None:  # the vocabulary of the model is larger
            return b""
        content: bytes | None = StopStringCriteria._token_to_bytes(name, mode, table)
        if content is None:
            text: str = tokenizer.convert_tokens_to_string([*before, name])
            content = text.partition("abcdef")[2].encode("utf-8", "surrogatepass")
        return content

    return convert
