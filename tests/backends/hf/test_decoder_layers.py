"""Decoding steps without modules, against the modules."""

from typing import Any

import numpy as np
import pytest
import torch

from nrl.backends.hf import cache, decoder_layers
from nrl.backends.hf.cache import Preallocated, prepare
from tests.backends.hf.test_decoding import PLAIN, PROMPTS, build, check

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, options) for kind, options in PLAIN.items()},
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, scaled positions": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral, gelu": ("mistral", {"sliding_window": None, "hidden_act": "gelu"}),
    "qwen3, one head for each key": ("qwen3", {"num_key_value_heads": 4, "attention_bias": True}),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_step_gives_the_logits_of_the_modules(name: str, dtype: torch.dtype) -> None:
    kind, options = VARIANTS[name]
    module = build(kind, **options).to(dtype)
    if kind == "qwen3_moe" and dtype == torch.float64:
        module.set_experts_implementation("eager")  # as loading does: the grouped kernel has no float64
    for parameter in module.parameters():  # norms and biases of a fresh model hide mistakes
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert prepare(module)
    assert module in cache._STACKED
    found = []
    with torch.inference_mode():
        for stacked in (True, False):
            made = Preallocated(module, len(PROMPTS), 3)
            assert made.stack is not None
            made.prefill(PROMPTS, np.arange(len(PROMPTS)))
            if not stacked:
                made.stack = None
            positions = torch.tensor([len(prompt) for prompt in PROMPTS])
            logits = [made.step(torch.arange(len(PROMPTS)) + i, positions + i) for i in range(2)]
            made.compact(np.array([0, 6, 2]))
            logits.append(made.step(torch.tensor([1, 2, 3]), positions[[0, 6, 2]] + 2))
            found.append(torch.cat(logits))
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(found[0], found[1], rtol=tolerance, atol=tolerance)


def test_a_model_that_does_more_than_its_layers_say_keeps_its_modules() -> None:
    """A hook, for one, which somebody has put on a layer."""
    modules = []
    for _ in range(2):
        module = build("llama", **PLAIN["llama"])
        module.base_model.layers[1].mlp.register_forward_hook(lambda _, __, out: 2 * out)
        modules.append(module)
    reference, module = modules
    assert prepare(module)
    assert module not in cache._STACKED
    check(reference, module)


def test_a_model_whose_layers_have_other_names_keeps_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, module = build("llama", **PLAIN["llama"]), build("llama", **PLAIN["llama"])
    with monkeypatch.context() as patch:
        patch.setattr(decoder_layers, "_linear", lambda projection: (projection.weights, projection.bias))
        with pytest.raises(AttributeError, match="weights"):
            decoder_layers.stack(module)
        assert prepare(module)
    assert module not in cache._STACKED
    check(reference, module)
