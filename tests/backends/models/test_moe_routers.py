"""Routers of transformers' models: which are found, which can be told what to choose, and what is wrong with others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from nrl.backends import Model
from nrl.backends.hf.recording import Recording
from nrl.backends.models.loading import build, skeleton
from nrl.backends.models.moe_routers import Routers, layer_numbers, replay_routes, routers, sizes
from nrl.errors import ModelError

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.3,
}
ALL = (0, 1, 2)
NEWER = Version(transformers.__version__) >= Version("5.23")  # in which some routers have the usual form
BEFORE = pytest.mark.skipif(NEWER, reason="its router has the usual form")
SINCE = pytest.mark.skipif(not NEWER, reason="its router does not have the usual form yet")


def of(kind: str, **fields: Any) -> Model:
    return Model({**SIZES, "model_type": kind, **fields})


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (of("qwen3_moe"), ALL),
        (of("qwen3_moe", mlp_only_layers=[1]), (0, 2)),
        (of("qwen2_moe", decoder_sparse_step=2), (1,)),
        (of("mixtral"), ALL),
        (of("olmoe"), ALL),
        (of("gpt_oss"), ALL),
        pytest.param(of("granitemoe"), ALL, marks=SINCE),
        pytest.param(of("jamba", attn_layer_period=1, attn_layer_offset=0), (1,), marks=SINCE),
        (of("deepseek_v2", n_group=None, topk_group=None, first_k_dense_replace=0), ALL),
        (of("deepseek_v3", n_group=2, topk_group=1, first_k_dense_replace=2), (2,)),
        (of("glm4_moe", n_group=4, topk_group=2, first_k_dense_replace=1), (1, 2)),
    ],
    ids=lambda x: dict(x.source)["model_type"] if isinstance(x, Model) else "",  # type: ignore[arg-type]
)
def test_routers_are_found_and_tried(model: Model, layers: tuple[int, ...]) -> None:
    module = skeleton(model)
    assert sizes(module) == Routers(len(layers), 2, 8)
    assert layer_numbers(module) == list(layers)
    assert all(x.is_meta for x in module.parameters())


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        pytest.param(
            "granitemoe",
            "GraniteMoeTopKRouter: .* because it does not return logits, weights and the experts",
            marks=BEFORE,
        ),
        ("llama4_text", "Llama4Router: .* because it does not return logits, weights and the experts that it chose"),
        ("phimoe", "PhimoeTopKRouter: .* because it calls topk over all of its 8 experts 0 times, and not once"),
        ("minimax_m2", "MiniMaxM2TopKRouter: .* because it cannot be called with hidden states alone"),
        pytest.param(
            "jamba",
            "Linear: .* because it calls topk over all of its 8 experts 0 times, and not once; leave routes=",
            marks=BEFORE,
        ),
    ],
)
def test_routers_that_choose_in_another_way_are_refused_by_name(kind: str, told: str) -> None:
    with pytest.raises(ModelError, match=told + ".*"):
        sizes(skeleton(of(kind)))


class Choice(nn.Module):
    """A router of transformers' form."""

    def __init__(self, experts: int = 4, k: int = 2, choose: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.weight, self.k, self.choose = nn.Parameter(torch.randn(experts, 3)), k, choose

    def forward(self, hidden: Tensor) -> Any:
        logits = hidden @ self.weight.T
        if self.choose is not None:
            return self.choose(logits)
        weights, chosen = logits.softmax(-1).topk(k=self.k)
        return logits, weights, chosen


class Layered(nn.Module):
    """Its routers lie in lists, as decoder layers do."""

    _can_record_outputs = {"router_logits": Choice}  # noqa: RUF012

    def __init__(self, *layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(layer) for layer in layers)

    def forward(self, hidden: Tensor) -> list[Any]:
        return [router(hidden) for router in routers(self).values()]


def without_matrix() -> Choice:
    router = Choice()
    del router.weight
    return router


def ignoring(logits: Tensor) -> Any:
    """Chooses by `topk`, and returns its own choice in spite of what that says."""
    logits.topk(2)
    return logits, logits[:, :2], logits.argsort(descending=True)[:, :2]


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (Layered(), "Layered: it has no routers that transformers records"),
        (Layered([Choice()], [Choice(k=1)]), r"layers\.0\.0 chooses 2 of 4, layers\.1\.0 chooses 1 of 4; routes are"),
        (Layered([without_matrix()]), "Choice: .* because it has no matrix of weights"),
        (Layered([Choice(choose=ignoring)]), "Choice: .* because it does not take experts that are given for those"),
        (Layered([Choice(choose=lambda x: (x, *x.topk(2, sorted=False), x.topk(2)))]), "experts 2 times, and not once"),
        (Layered([Choice(choose=lambda x: (x, *x.topk(2, largest=False)))]), "its 4 experts 0 times, and not once"),
    ],
)
def test_models_without_routes(module: nn.Module, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        sizes(module)


def test_layers_with_several_routers() -> None:
    assert layer_numbers(Layered([], [Choice()], [Choice()])) == [1, 2]
    with pytest.raises(
        ModelError, match=r"its routers are layers\.0\.0, layers\.0\.1, and not one to a numbered layer"
    ):
        layer_numbers(Layered([Choice(), Choice()]))


def test_a_forward_in_which_routers_do_not_run_once_each() -> None:
    module = Layered([Choice()], [Choice()])
    routes, hidden = torch.tensor([[[3, 1], [0, 2]]]).repeat(5, 1, 1), torch.randn(5, 3)
    own = module(hidden)
    with replay_routes(module, routes):
        found = module(hidden)
    for layer, (logits, weights, chosen) in enumerate(found):
        assert torch.equal(chosen, routes[:, layer])
        torch.testing.assert_close(weights, logits.softmax(-1).gather(1, chosen))
    for after, before in zip(module(hidden), own, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))

    def replayed(*tokens: Tensor) -> None:
        with replay_routes(module, routes):
            for each in tokens:
                module(each)

    with pytest.raises(ModelError, match=r"Layered: 'layers\.0\.0' ran 2 times in a forward, and not once, so it is"):
        replayed(hidden, hidden)
    with pytest.raises(ModelError, match=r"Layered: 'layers\.0\.0' ran 0 times"):
        replayed()
    with pytest.raises(ModelError, match=r"'layers\.0\.0' routes 4 tokens, and there are routes of 5; a model that"):
        replayed(hidden[1:])
    with replay_routes(module, routes, again=True):
        pass
    assert not any("forward" in vars(router) for router in routers(module).values())


def test_what_stood_in_the_place_of_a_forward_stands_there_again() -> None:
    module = Layered([Choice()])
    (router,) = routers(module).values()
    router.forward = stand_in = lambda hidden, own=router.forward: own(hidden)
    with replay_routes(module, torch.tensor([[[3, 1]]])):
        assert module(torch.randn(1, 3))[0][2].tolist() == [[3, 1]]
    assert router.forward is stand_in


def test_a_recording_of_a_router_that_did_not_run() -> None:
    module = Layered([Choice()], [Choice()])
    recording = Recording(module)
    with recording.on():
        own = module(torch.randn(5, 3))
        assert torch.equal(recording.take_routes(), torch.stack([each[2] for each in own], 1).short())
        module.layers[0][0](torch.randn(5, 3))  # type: ignore[index]
        with pytest.raises(ModelError, match=r"the router 'layers\.1\.0' did not run in a forward, so there is no"):
            recording.take_routes()


def test_the_probe_leaves_a_model_as_it_is() -> None:
    module = build(of("qwen3_moe"))
    before = {name: x.clone() for name, x in module.state_dict().items()}
    state = torch.random.get_rng_state()
    sizes(module)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
