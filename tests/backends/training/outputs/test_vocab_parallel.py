"""Log-probabilities of a vocabulary that processes share, against those of one that has it all."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nrl.backends.training.outputs.fused_logprobs import linear_logprobs, linear_top_k
from nrl.backends.training.outputs.vocab_parallel import VocabularyShard
from nrl.errors import ConfigError
from tests.backends.processes import Processes

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    processes = Processes(2)
    yield processes
    processes.close()


def given(words: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(7, 4, generator=g), torch.randn(words, 4, generator=g) * 3
    return hidden, weight, torch.randint(0, words, (7, 3), generator=g), torch.rand(7, generator=g) + 0.5


def computed(mesh: DeviceMesh | None, words: int, chunk: int | None) -> dict[str, Tensor]:
    """Results and gradients; the hidden state's is added up over processes, the weight's is of the words here."""
    hidden, weight, targets, temperature = given(words)
    bias, shard = torch.linspace(-1, 1, words), None
    if mesh is not None:
        most, rank = -(-words // 2), mesh["dp"].get_local_rank()
        shard = VocabularyShard(rank * most, most, mesh["dp"].get_group(), words)
        weight, bias = (x[rank * most : (rank + 1) * most].clone() for x in (weight, bias))
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    logprobs, entropy = linear_logprobs(
        hidden, weight, targets, temperature=temperature, bias=bias, entropy=True, chunk=chunk, shard=shard
    )
    assert entropy is not None
    slopes = torch.linspace(-1, 2, 21).view(7, 3), torch.linspace(1, -1, 7)
    torch.autograd.backward([logprobs, entropy], list(slopes))
    ids, likely = linear_top_k(hidden, weight, 4, temperature=temperature, bias=bias, chunk=chunk, shard=shard)
    found = {"logprobs": logprobs, "entropy": entropy, "top_k_logprobs": likely, "top_k_ids": ids}
    found |= dict(zip(("hidden", "weight", "bias"), (x.grad for x in leaves if x.grad is not None), strict=True))
    if shard is not None:
        shard.all_reduce(found["hidden"])
    return {name: x.detach() for name, x in found.items()}


@pytest.mark.parametrize("words", [8, 5, 4])
@pytest.mark.parametrize("chunk", [None, 2])
def test_two_processes_have_the_numbers_of_one(two: Processes, words: int, chunk: int | None) -> None:
    expected, each = computed(None, words, chunk), two(computed, words, chunk)
    for name in ("logprobs", "entropy", "top_k_logprobs", "top_k_ids", "hidden"):
        for found in each:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    for name in ("weight", "bias"):
        torch.testing.assert_close(torch.cat([found[name] for found in each]), expected[name], rtol=1e-5, atol=1e-6)


def too_many(mesh: DeviceMesh) -> str:
    hidden, weight, *_ = given(5)
    shard = VocabularyShard(5 * mesh["dp"].get_local_rank(), 5, mesh["dp"].get_group(), 10)
    with pytest.raises(ConfigError) as caught:
        linear_top_k(hidden, weight, 11, shard=shard)
    return str(caught.value)


def test_more_than_all_have_is_an_error(two: Processes) -> None:
    assert all("at most the 10 words" in said for said in two(too_many))
