"""What Megatron asks of CUDA is answered by the host inside of a block alone, and only where that is the device."""

import pytest
import torch

from nrl.backends.megatron.cuda_shim import _answers, host

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]  # of Megatron, when it is imported


def test_nothing_is_left_of_it_behind_the_block() -> None:
    before = [getattr(owner, name) for owner, name, _ in _answers()]
    with host(torch.device("cpu")):
        inside = [getattr(owner, name) for owner, name, _ in _answers()]
        assert torch.empty(1, device="cuda").device.type == "cpu"
    assert all(a is not b for a, b in zip(before, inside, strict=True))
    with pytest.raises(ZeroDivisionError), host(torch.device("cpu")):
        _ = 1 / 0
    assert [getattr(owner, name) for owner, name, _ in _answers()] == before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.empty(1, device="cuda")


def test_on_a_gpu_it_is_empty() -> None:
    before = [getattr(owner, name) for owner, name, _ in _answers()]
    with host(torch.device("cuda")):
        assert [getattr(owner, name) for owner, name, _ in _answers()] == before
