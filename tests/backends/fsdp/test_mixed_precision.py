"""A model in bfloat16: where it rounds, how far that is from float32, and that one process rounds like several."""

import copy
import gc
import math
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nrl import tiny
from nrl.algos import sft_loss
from nrl.backends import Model
from nrl.backends.fsdp import mixed_precision
from nrl.backends.models import loading
from nrl.backends.training.loss.loss_terms import global_weights
from tests.backends.fsdp.test_sharding import engine, everything
from tests.backends.fsdp.test_torch_engine import CONFIGS, MIXED, OTHERS, batch_of
from tests.backends.processes import Processes
from tests.weights import assert_close

pytestmark = pytest.mark.timeout(300)
LOGPROBS = frozenset({"logprobs"})
WIDE = {
    "model_type": "qwen3", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(params=[False])
def module(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A model that rounds; with activation checkpointing if the parameter says so."""
    made: Any = loading.build(tiny.model(hidden_size=16, num_hidden_layers=2), dtype=torch.float32)
    mixed_precision.round_layers(made, torch.bfloat16)
    if request.param:
        enable = getattr(made, "activation_checkpointing_enable", made.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    yield made
    assert {x.dtype for x in made.parameters()} == {torch.float32}
    assert all(isinstance(x, nn.Parameter) for x in made.parameters())


def states(module: Any) -> list[torch.dtype]:
    """The dtypes in which hidden states go into layers and out of the last."""
    found: list[torch.dtype] = []
    hooks = [layer.register_forward_hook(lambda _, args, __: found.append(args[0].dtype)) for layer in layers(module)]
    with mixed_precision.cast_outside_layers(module, torch.bfloat16):
        found.append(module.base_model(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state.dtype)
    for hook in hooks:
        hook.remove()
    return found


def layers(module: Any) -> list[nn.Module]:
    return mixed_precision.layers(module)


def test_hidden_states_are_bfloat16_from_layer_to_layer(module: Any) -> None:
    assert len(layers(module)) == 2
    assert states(module) == [torch.bfloat16] * 3


def test_a_copy_does_the_same_with_its_own_weights(module: Any) -> None:
    other = copy.deepcopy(module)
    with torch.no_grad():
        for x in module.parameters():
            x.fill_(torch.nan)
    with mixed_precision.cast_outside_layers(other, torch.bfloat16):
        assert other(input_ids=torch.tensor([[1, 2]])).logits.isfinite().all()


def gradients(module: Any) -> dict[str, Tensor]:
    module.train()
    with mixed_precision.cast_outside_layers(module, torch.bfloat16):
        loss = module(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False).logits.float().square().sum()
    loss.backward()
    return {name: x.grad for name, x in module.named_parameters()}


@pytest.mark.parametrize("module", [True], indirect=True)
def test_a_copy_computes_its_own_layers_again(module: Any) -> None:
    other = copy.deepcopy(module)
    expected = gradients(module)
    with torch.no_grad():
        for x in module.parameters():
            x.fill_(torch.nan)
    found = gradients(other)
    assert all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.mark.parametrize("module", [False, True], indirect=True)
def test_gradients_reach_the_weights_in_float32(module: Any) -> None:
    """Where layers are computed again, their weights are cast again."""
    for name, gradient in gradients(module).items():
        assert gradient is not None, name
        assert gradient.dtype == torch.float32


@pytest.mark.parametrize("module", [False, True], indirect=True)
def test_a_model_is_gone_with_its_last_reference(module: Any) -> None:
    """A cycle would keep its memory until Python looks for cycles."""
    other = copy.deepcopy(module)
    gone = weakref.ref(layers(other)[0])
    gc.collect()
    gc.disable()
    try:
        gradients(other)
        del other
        assert gone() is None
    finally:
        gc.enable()


def test_after_an_error_the_weights_are_there_again(module: Any) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("in a layer")

    layers(module)[1].register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="in a layer"):
        states(module)
    assert not hasattr(layers(module)[1], "nrl_masters")


def test_after_an_interrupt_the_weights_are_there_again() -> None:
    """For which torch calls no hooks."""

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    made = engine(None, Model(CONFIGS["qwen3 tied"], dtype="bfloat16"))
    state, batch = made.init(), batch_of(MIXED)
    before = list(state.module.parameters())
    for module in (state.module, made.freeze(state.module)):
        hook = layers(module)[1].register_forward_pre_hook(interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.forward(module, [batch], LOGPROBS)
        hook.remove()
        assert all(isinstance(x, nn.Parameter) for x in module.parameters())
    assert all(a is b for a, b in zip(before, state.module.parameters(), strict=True))


def test_threads_compute_with_one_model_one_after_the_other() -> None:
    made, batch = engine(None, Model(CONFIGS["qwen3 tied"], dtype="bfloat16")), batch_of(MIXED)
    module = made.init().module
    (alone,) = made.forward(module, [batch], LOGPROBS)
    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(made.forward, module, [batch], LOGPROBS) for _ in range(16)]
        assert all(torch.equal(each.result()[0]["logprobs"], alone["logprobs"]) for each in found)
    assert {x.dtype for x in module.parameters()} == {torch.float32}


def logprobs(mesh: DeviceMesh | None, model: Model) -> Tensor:
    made = engine(mesh, model)
    found: Tensor = made.forward(made.load(None), [batch_of(MIXED)], LOGPROBS)[0]["logprobs"]
    return found


def moments(checkpointing: Any, compiled: bool = False, dtype: Any = "bfloat16") -> dict[str, Tensor]:
    """Those after a step."""
    model, batch = Model(CONFIGS["qwen3 tied"], dtype=dtype), batch_of(MIXED)
    made = engine(None, model, checkpointing=checkpointing, compile=compiled)
    state, _ = made.train(made.init(), sft_loss, [batch], global_weights(sft_loss, batch))
    return {name: x for name, x in everything(made, state).items() if name.endswith("exp_avg")}


@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_layers_that_are_computed_again_round_as_they_did(checkpointing: Any) -> None:
    expected = moments(False)
    assert len(expected) > 10
    assert all(torch.equal(x, expected[name]) for name, x in moments(checkpointing).items())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # the compiler has some about torch itself
def test_layers_that_are_compiled_round_when_they_are_computed_again() -> None:
    """Fused kernels round at other places, and as much."""
    exact = moments(False, dtype="float32")

    def distance(found: dict[str, Tensor]) -> float:
        return math.sqrt(sum(float((found[name] - x).square().sum()) for name, x in exact.items()))

    assert 0.5 < distance(moments(True, compiled=True)) / distance(moments(False)) < 1.5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # the compiler has some about torch itself
def test_layers_are_compiled_once_and_not_each_anew() -> None:
    """torch stops compiling what it has compiled eight times; what names the weights of a layer, it does for each."""
    from torch._dynamo.utils import counters

    def frames(layers: int) -> int:
        torch._dynamo.reset()
        counters.clear()
        model = Model(CONFIGS["qwen3 tied"] | {"num_hidden_layers": layers}, dtype="bfloat16")
        made = engine(None, model, compile=True)
        made.forward(made.load(None), [batch_of(MIXED)], LOGPROBS)
        return int(counters["frames"]["total"])

    assert 0 < frames(2) == frames(4)


@pytest.mark.parametrize("name", ["qwen3 untied", "qwen3 tied", "llama tied", "gemma3", "mixtral"])
def test_one_process_rounds_like_several(two: Processes, name: str) -> None:
    """To the last bit: the same weights are rounded at the same places."""
    model = Model((CONFIGS | OTHERS)[name], dtype="bfloat16")
    alone = logprobs(None, model)
    for found in two(logprobs, model):
        assert torch.equal(found, alone)


def gradient(mesh: DeviceMesh | None) -> dict[str, Tensor]:
    """The first moments after a step, which are the gradient; each process has one of two micro-batches."""
    made, batch = engine(mesh, Model(CONFIGS["qwen3 tied"], dtype="bfloat16")), batch_of(MIXED)
    halves = [batch[: len(MIXED) // 2], batch[len(MIXED) // 2 :]]
    parts = halves if mesh is None else [halves[mesh["dp"].get_local_rank()]]
    state, _ = made.train(made.init(), sft_loss, parts, global_weights(sft_loss, batch))
    return {name: x for name, x in everything(made, state).items() if name.endswith("exp_avg")}


def test_gradients_are_rounded_alike_and_added_up_in_float32(two: Processes) -> None:
    """Those of each micro-batch are bfloat16; the norm, by which they are clipped, is a sum in another order."""
    alone = gradient(None)
    assert len(alone) > 10
    assert all((x != x.bfloat16()).any() for x in alone.values())
    for found in two(gradient):
        assert_close(found, alone, 1e-6)


def test_the_distance_to_float32() -> None:
    """Of log-probabilities, on average below 1e-3 nats."""
    low, full = (logprobs(None, Model(dict(WIDE), dtype=dtype)) for dtype in ("bfloat16", "float32"))
    distance = (low - full).abs()
    assert 0 < distance.mean() < 1e-3
