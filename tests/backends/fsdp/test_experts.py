"""Models whose weights transformers joins: their pieces are those of files, an expert each, on any number of processes.

The functions whose first argument is a mesh run in every process of a pool, and with None in this one.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import nrl
from nrl import tiny
from nrl.algos import sft_loss
from nrl.backends import Model, Sampling, adamw, fsdp, hf
from nrl.backends.models import loading, lora, weight_layout
from nrl.backends.models.named_weights import named_tensors
from nrl.backends.models.shards import full_shard as whole_piece
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.batch import Batch
from nrl.errors import ModelError
from nrl.runtime import Slots
from tests.backends.fsdp.test_sharding import engine, filled, mine, whole
from tests.backends.fsdp.test_torch_engine import MIXED, SIZES, batch_of
from tests.backends.processes import Processes
from tests.weights import assert_close, assert_equal, weights

pytestmark = pytest.mark.timeout(600)

EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": SIZES
    | {
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "moe_intermediate_size": 8,
        "num_experts": 3,
        "num_experts_per_tok": 2,
    },
    "mixtral": SIZES | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}
LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "o_proj"]}
ONE = {  # of one expert in the first layer, in files
    "qwen3_moe": "model.layers.0.mlp.experts.1.gate_proj.weight",
    "mixtral": "model.layers.0.block_sparse_moe.experts.1.w1.weight",
}
each_kind = pytest.mark.parametrize("kind", list(EXPERTS))


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    processes = Processes(3)
    yield processes
    processes.close()


def in_folder(folder: Path) -> dict[str, Tensor]:
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


@each_kind
def test_pieces_are_what_transformers_writes(kind: str, tmp_path: Path) -> None:
    made = engine(None, Model(EXPERTS[kind]))
    state = made.init()
    state.module.save_pretrained(tmp_path)  # type: ignore[operator]
    expected = in_folder(tmp_path)
    pieces = list(made.pieces(state.module))
    assert [piece.name for piece in pieces] == [*dict.fromkeys(piece.name for piece in pieces)]
    assert_equal({piece.name: piece.tensor for piece in pieces}, expected)
    assert all(piece.shape == expected[piece.name].shape for piece in pieces)
    experts = {x.untyped_storage()._cdata for x in state.module.state_dict().values()}
    assert all(piece.tensor.untyped_storage()._cdata in experts for piece in pieces)  # nothing is copied
    assert ONE[kind] in expected


def in_and_out(
    mesh: DeviceMesh | None, config: dict[str, Any], folder: Path
) -> tuple[dict[str, dict[str, Tensor]], Any]:
    """A step; the weights then, in a fresh state, from an exported folder, of a frozen copy; and what it holds."""
    made, batch = engine(mesh, Model(config)), batch_of(MIXED)
    state = made.init()
    fresh = whole(made, state.module)
    state, _ = made.train(state, sft_loss, mine(mesh, batch), global_weights(sft_loss, batch))
    trained = whole(made, state.module)
    made.export(state.module, folder)
    found = {"copy": filled(made, trained).module, "read": made.load(str(folder)), "frozen": made.freeze(state.module)}
    held = [(piece.name, piece.index, piece.tensor.numel()) for piece in made.pieces(state.module)]
    return {"fresh": fresh, "trained": trained} | {name: whole(made, x) for name, x in found.items()}, held


@each_kind
@pytest.mark.parametrize("count", ["two", "three"])
def test_weights_go_in_and_out_of_several_processes(
    kind: str, count: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Which have uneven parts: three experts in two processes, four in three."""
    (tmp_path / "one").mkdir()
    (tmp_path / "more").mkdir()
    expected, _ = in_and_out(None, EXPERTS[kind], tmp_path / "one")
    answers = request.getfixturevalue(count)(in_and_out, EXPERTS[kind], tmp_path / "more")
    written = in_folder(tmp_path / "more")
    for found, _ in answers:
        assert_equal(found["fresh"], expected["fresh"])
        assert_close(found["trained"], expected["trained"], 1e-4)
        for name in ("copy", "read", "frozen"):
            assert_equal(found[name], found["trained"])
        assert_equal(written, found["trained"])
    sizes = [[size for name, _, size in held if name == ONE[kind]] for _, held in answers]
    assert sorted(size for each in sizes for size in each) == [0] * (len(answers) - 1) + [
        expected["fresh"][ONE[kind]].numel()
    ]
    module = loading.build(Model(str(tmp_path / "more")))  # transformers reads it
    own = dict(named_tensors(module))
    assert own.keys() != written.keys()
    cut = weight_layout.split_for_files(
        (whole_piece(name, x) for name, x in own.items()), weight_layout.find_parts(module)
    )
    assert_equal({piece.name: piece.tensor for piece in cut}, written)


def adapted(mesh: DeviceMesh | None, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    made, batch = engine(mesh, Model(str(folder), lora=LORA)), batch_of(MIXED)
    state = made.init()
    state, _ = made.train(state, sft_loss, mine(mesh, batch), global_weights(sft_loss, batch))
    return whole(made, state.module), whole(made, made.adapter(state.module))


@each_kind
def test_an_adapter_is_added_to_pieces(kind: str, two: Processes, tmp_path: Path) -> None:
    loading.save_model(loading.build(Model(EXPERTS[kind], seed=3)), tmp_path)
    base = in_folder(tmp_path)
    alone = adapted(None, tmp_path)
    for merged, adapter in (alone, *two(adapted, tmp_path)):
        assert merged.keys() == base.keys()
        changed = {name for name, x in merged.items() if not torch.equal(x, base[name])}
        assert changed == {name for name in base if name.split(".")[-2] in LORA["target_modules"]}
        assert all(".lora_" in name for name in adapter)
        assert_close(merged, alone[0], 1e-4)
        assert_close(adapter, alone[1], 1e-4)


@each_kind
def test_a_published_model_says_what_the_trainers_says(kind: str, slots: Slots) -> None:
    config = dict(tiny.model(num_hidden_layers=2).source) | EXPERTS[kind]  # type: ignore[arg-type]
    config |= {name: tiny.model().source[name] for name in ("vocab_size", "max_position_embeddings")}  # type: ignore[index]
    model = Model(config, tokenizer=tiny.tokenizer())
    trainer = fsdp.trainer(slots[:2], model, adamw(lr=1e-2))
    sampler = hf.sampler(slots[2:3], model)
    state, _ = trainer.train_step(sft_loss)(trainer.init(), tiny.sums(8).take(1)[0])
    nrl.publish(state.params, sampler)
    (row,) = sampler.generate([[5, 6, 7]], sampling=Sampling(temperature=0, max_new_tokens=6)).result()
    ids = torch.tensor([[5, 6, 7, *row.token_ids.tolist()]])
    batch = Batch({"input_ids": ids, "attention_mask": ids > -1}, batch_size=[1]).lock_()
    torch.testing.assert_close(row.logprobs, trainer.logprobs(state.params, batch).result()[0, 3:], atol=1e-5, rtol=0)
    assert_equal(weights(trainer.init(state.params)), weights(state))


def test_an_expert_that_does_not_come_is_missed() -> None:
    made = engine(None, Model(EXPERTS["mixtral"]))
    tensors = whole(made, made.init().module)
    name = ONE["mixtral"]
    with pytest.raises(ModelError, match=f"trainer.init: 1 weights did not arrive: {name}"):
        filled(made, {each: x for each, x in tensors.items() if each != name})
    with pytest.raises(ModelError, match=rf"trainer.init: '{name}' has shape \[1\], and here it is \[24, 16\]"):
        filled(made, tensors | {name: torch.zeros(1)})
    with pytest.raises(
        ModelError, match="trainer.init: the model has no weight 'model.layers.0.mlp.experts.down_proj'"
    ):
        filled(made, tensors | {"model.layers.0.mlp.experts.down_proj": torch.zeros(1)})
    assert lora.layers(made.init().module) == {}
