"""Logits, hidden states and functions of logits in every layout of Megatron, against transformers in float64."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nrl.algos import Loss
from nrl.backends import Model
from nrl.backends.models import lora
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.backends.training.outputs import head_chunks
from nrl.backends.training.weight_stream import iter_full_weights
from nrl.batch.metrics import finalize
from nrl.runtime import Layout
from tests.backends.megatron.test_megatron_engine import CONFIG, engine, parts
from tests.backends.processes import Processes
from tests.backends.training.test_large_outputs import (
    LARGEST,
    LOG_Z,
    SMOOTHED,
    SPEC,
    exact_norms,
    loss_of_all,
    loss_of_functions,
    reference,
    rows,
    steps_of_transformers,
)
from tests.weights import assert_close

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600), pytest.mark.usefixtures("exact_norms")]

assert exact_norms is not None  # a fixture, which pytest finds by its name
LOSSES: dict[str, Loss] = {"all": loss_of_all, "functions": loss_of_functions}
NEEDS = frozenset({"logits", "hidden_states", "logprobs", LOG_Z, LARGEST, SMOOTHED})
UNTIED, TIED = CONFIG | {"initializer_range": 0.3}, CONFIG | {"initializer_range": 0.3, "tie_word_embeddings": True}
RELATIVE = 1e-9
ADAPTER = {"r": 2, "lora_alpha": 8, "target_modules": "all-linear"}

type Steps = tuple[list[float], dict[str, Tensor], list[dict[str, Tensor]]]


def model_of(tied: bool, words: int, adapter: bool) -> Model:
    source = (TIED if tied else UNTIED) | {"vocab_size": words}
    return Model(source, dtype="float64", lora=ADAPTER if adapter else None)


def steps(
    mesh: DeviceMesh, layout: Layout, name: str, tied: bool, words: int, adapter: bool, options: dict[str, Any]
) -> Steps:
    """Two steps and the outputs before them, in one process of a mesh."""
    head_chunks.CHUNK_BYTES = 2**10
    made = engine(mesh, layout, model_of(tied, words, adapter), None, SPEC, **options)
    loss, batch, losses = LOSSES[name], rows(), []
    weights = global_weights(loss, batch, always={"logprobs"}, widths=made.widths)
    each, state = parts(batch, layout, mesh.get_rank()), made.init()
    outs = [dict(out) for out in made.forward(made.params(state), each, NEEDS)]
    for _ in range(2):
        state, metrics = made.train(state, loss, each, weights)
        losses.append(finalize(metrics)["loss"])
    params = made.adapter(made.params(state)) if adapter else made.params(state)
    return losses, dict(iter_full_weights(made.pieces(params), "test", made._groups.peers.group)), outs


@cache
def expected(name: str, tied: bool, words: int, adapter: bool) -> tuple[list[float], dict[str, Tensor]]:
    return steps_of_transformers(model_of(tied, words, adapter), LOSSES[name], SPEC, 2)


def check(
    processes: Processes,
    layout: Layout,
    name: str,
    tied: bool = False,
    words: int = 23,
    adapter: bool = False,
    **options: Any,
) -> None:
    losses, weights = expected(name, tied, words, adapter)
    model = model_of(tied, words, adapter)
    with torch.no_grad():
        outputs = reference(lora.build(model, dtype=torch.float64).eval(), rows(), NEEDS)
    for rank, (seen, tensors, outs) in enumerate(processes(steps, layout, name, tied, words, adapter, options)):
        assert seen == pytest.approx(losses, rel=RELATIVE)
        assert_close({key: x for key, x in tensors.items() if key in weights}, weights, RELATIVE)
        if layout.coordinates(rank)["pp"] < layout.pp - 1:
            assert outs == []
        elif layout.dp == 1:
            for number, out in enumerate(outs):
                assert out.keys() == NEEDS
                for key, x in out.items():
                    torch.testing.assert_close(
                        x.double(), outputs[key][2 * number : 2 * number + 2], rtol=RELATIVE, atol=RELATIVE
                    )


TWO = [Layout(tp=2), Layout(pp=2), Layout(cp=2), Layout(dp=2)]


@pytest.mark.parametrize("layout", TWO, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_two_processes_have_the_numbers_of_transformers(two: Processes, layout: Layout, name: str) -> None:
    check(two, layout, name)


@pytest.mark.parametrize(
    ("layout", "options"),
    [(Layout(tp=2), {}), (Layout(tp=2), {"sequence_parallel": False}), (Layout(pp=2), {}), (Layout(pp=2, vp=2), {})],
    ids=["tp=2", "tp=2, without sequence parallelism", "pp=2", "pp=2, vp=2"],
)
def test_a_tied_head_gets_all_of_its_gradient(two: Processes, layout: Layout, options: dict[str, Any]) -> None:
    check(two, layout, "all", tied=True, words=24, **options)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_an_adapter_has_the_numbers_of_transformers(two: Processes, layout: Layout) -> None:
    check(two, layout, "all", adapter=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(tp=2, pp=2), Layout(tp=2, cp=2), Layout(pp=2, cp=2), Layout(dp=2, tp=2), Layout(tp=4)], ids=str
)
@pytest.mark.parametrize("name", LOSSES)
def test_four_processes_have_the_numbers_of_transformers(four: Processes, layout: Layout, name: str) -> None:
    check(four, layout, name, tied=True)
