"""Routes as vLLM 0.32 records them, parsed from such data: no engine ran.

`RoutedExpertsCapturer` there has a row for each hidden layer, and numbers of uint8 up to 256 experts, otherwise uint16;
`AuxOutputSchedulerConnector.take_output` ends at the last token but one of prompt and completion.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nrl import tiny
from nrl.backends import Model, vllm
from nrl.backends.engine import Decoded
from nrl.backends.vllm import settings, vllm_engine
from nrl.backends.vllm.routed_experts import RoutedExperts
from nrl.errors import ConfigError, GenerationError, ModelError
from nrl.runtime import Cluster

FIELDS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_local_experts": 300,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "mlp_only_layers": [1],
}
RECORDED = np.array(  # five tokens; the second of the four layers has no router, and what is there means nothing
    [
        [[299, 0, 7], [9, 9, 9], [1, 2, 3], [256, 255, 4]],
        [[12, 40, 3], [9, 9, 9], [3, 2, 1], [0, 1, 2]],
        [[0, 1, 2], [65535, 0, 0], [297, 298, 299], [5, 6, 7]],
        [[8, 9, 10], [0, 0, 0], [11, 12, 13], [14, 15, 16]],
        [[17, 18, 19], [0, 0, 0], [20, 21, 22], [23, 24, 25]],
    ],
    dtype=np.uint16,
)


def model() -> Model:
    return tiny.model(**FIELDS)


def test_recorded_data_become_routes() -> None:
    routed = RoutedExperts.of_model(model())
    assert routed == RoutedExperts([0, 2, 3], 3, 300)
    found = routed.parse(RECORDED, 5)
    assert found.dtype == torch.int16
    assert found.tolist() == [[token[0], token[2], token[3]] for token in RECORDED.tolist()]
    small = RoutedExperts((0, 2, 3), 3, 256).parse((RECORDED % 256).astype(np.uint8), 5)
    assert small.tolist() == [[[x % 256 for x in layer] for layer in token] for token in found.tolist()]


def finished(recorded: Any) -> Any:
    """The fields of vLLM's RequestOutput that are read: a prompt of three tokens, of which three more were sampled."""
    output = SimpleNamespace(
        token_ids=[20, 21, 2],
        logprobs=SimpleNamespace(token_ids=[20, 21, 2], logprobs=[-0.5] * 3, start_indices=[0, 1, 2]),
        weight_versions=[SimpleNamespace(start=0, end=3, version="4")],
        finish_reason="stop",
        routed_experts=recorded,
    )
    return SimpleNamespace(request_id="7", prompt_token_ids=[5, 6, 7], outputs=[output])


def test_an_answer_has_routes_of_all_but_its_last_token() -> None:
    routed = RoutedExperts.of_model(model())
    answer = vllm_engine._answer(finished(RECORDED), routed)
    assert isinstance(answer, Decoded)
    assert answer.token_ids.tolist() == [20, 21, 2]
    assert answer.routes is not None
    assert torch.equal(answer.routes, routed.parse(RECORDED, 5))
    plain = vllm_engine._answer(finished(None), None)
    assert isinstance(plain, Decoded)
    assert plain.routes is None
    error = vllm_engine._answer(finished(None), routed)
    assert isinstance(error, GenerationError)
    assert "have the shape None" in str(error)


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        (
            None,
            r"have the shape None; expected are 5 tokens, more than 3 layers and 3 experts a token\. nrl reads what",
        ),
        (RECORDED[1:], r"have the shape \(4, 4, 3\); expected are 5 tokens"),
        (RECORDED[:, :3], r"have the shape \(5, 3, 3\)"),
        (RECORDED[..., :2], r"have the shape \(5, 4, 2\)"),
        (RECORDED + np.uint16(1), r"have the expert 300, and the model has those from 0 to 299; what was recorded is"),
    ],
)
def test_data_of_another_form(recorded: Any, told: str) -> None:
    with pytest.raises(GenerationError, match=f"generate: vLLM's routed_experts {told}"):
        RoutedExperts.of_model(model()).parse(recorded, 5)


def test_vllm_on_cpus_returns_none(local: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    told = (
        r"vLLM returns no routed experts on CPUs, so routes=True needs GPUs; leave it out, or sample with hf\.sampler"
    )
    with pytest.raises(ConfigError, match=told):
        vllm.sampler(local.reserve(1), model(), executable="vllm-cpu", routes=True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=told):
        settings.with_routes({}, True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert settings.with_routes({"seed": 1}, True) == {"seed": 1, "enable_return_routed_experts": True}
    assert settings.with_routes({"seed": 1}, False) == {"seed": 1}


@pytest.mark.parametrize("option", ["enable_return_routed_experts", "aux_output_config"])
def test_it_is_asked_for_by_one_name(local: Cluster, option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} are set by nrl; .* with routes=True that they return the experts"):
        vllm.sampler(local.reserve(1), model(), **{option: True})  # type: ignore[arg-type]


def test_a_model_without_experts(local: Cluster) -> None:
    with pytest.raises(ModelError, match="it has no routers that transformers records"):
        vllm.sampler(local.reserve(1), tiny.model(), routes=True)
