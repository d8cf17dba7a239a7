"""Each process reads and draws what it holds, with the numbers of a whole model, and holds little more meanwhile."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nrl.backends import Model, adamw
from nrl.backends.fsdp import sharding
from nrl.backends.fsdp.torch_engine import TorchEngine
from nrl.backends.models import lazy_weights, loading, lora, named_weights, weight_layout
from nrl.backends.training.weight_stream import iter_full_weights
from nrl.batch.packed_rows import Rectangles
from nrl.errors import ModelError
from tests.backends.fsdp.test_torch_engine import CONFIGS, OTHERS, QWEN3
from tests.backends.processes import Processes
from tests.weights import assert_equal

pytestmark = pytest.mark.timeout(600)

LORA = {"r": 2, "target_modules": ["q_proj"]}
DEEPSEEK = QWEN3 | {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "head_dim": 4,
    "tie_word_embeddings": False,
}
"""With a buffer that lies in files, and names there that transformers leaves out."""
EXPERTS = QWEN3 | {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SOURCES = {"tied": QWEN3, "untied": CONFIGS["qwen3 untied"], "phi": CONFIGS["phi, a head with a bias"]}
SOURCES |= {"experts": EXPERTS, "deepseek": DEEPSEEK}


def engine(mesh: DeviceMesh | None, model: Model) -> TorchEngine:
    return TorchEngine(model, adamw(lr=1e-2), Rectangles, False, False, torch.device("cpu"), mesh)


def everything(mesh: DeviceMesh | None, model: Model) -> dict[str, Tensor]:
    """All weights by the names that files have, and all buffers of the process."""
    made = engine(mesh, model)
    module = made.init().module
    found = whole(made, module)
    return found | {f"buffer {name}": buffer for name, buffer in module.named_buffers()}


def whole(made: TorchEngine, params: Any) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in iter_full_weights(made.pieces(params), "test", made._peers.group)}


def never(*args: Any, **options: Any) -> Any:
    raise AssertionError("a whole model is built")


def without_building(mesh: DeviceMesh | None, model: Model) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "build", never)
        patch.setattr(sharding, "scatter", never)
        return everything(mesh, model)


@pytest.fixture(scope="module")
def three() -> Iterator[Processes]:
    processes = Processes(3)
    yield processes
    processes.close()


def expected(model: Model, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """As transformers makes it in one piece."""
    module = lora.build(model, dtype=dtype)
    found = {piece.name: piece.tensor for piece in lora.merge_weights(module)}
    return found | {f"buffer {name}": buffer for name, buffer in module.named_buffers()}


def assert_same(found: Mapping[str, Tensor], model: Model) -> None:
    wanted = expected(model)
    buffers = {name for name in wanted if name.startswith("buffer ")}
    assert buffers == {name for name in found if name.startswith("buffer ")}
    assert all(torch.equal(found[name], wanted[name]) for name in buffers)
    module = lora.unwrap(lora.build(model, dtype=torch.float32))
    own = dict(named_weights.named_tensors(module)) | {n: x for n, x in wanted.items() if n not in buffers}
    parts = sharding.find_parts(module)
    for name, tensor in own.items():
        for part in parts[name]:
            there = weight_layout._permute_block(tensor[part.block], part)
            assert torch.equal(found[part.name], there), part.name


@pytest.mark.parametrize("kind", list(SOURCES))
def test_a_config_and_a_folder_give_the_same_numbers_in_any_number_of_processes(
    three: Processes, kind: str, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"lora": LORA} if kind in ("tied", "experts") else {}
    fields |= {"head": "value"} if kind == "untied" else {}
    drawn = Model(SOURCES[kind], seed=3, **fields)
    loading.save_model(loading.build(Model(SOURCES[kind], seed=4)), tmp_path)
    stored = Model(str(tmp_path), seed=5, **fields)
    for model in (drawn, stored):
        for found in (without_building(None, model), *three(without_building, model)):
            assert_same(found, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", list(CONFIGS | OTHERS))
def test_what_is_drawn_when_it_is_read_is_what_a_whole_model_draws(name: str, dtype: torch.dtype) -> None:
    model = Model((CONFIGS | OTHERS)[name], seed=3)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    found, module = lazy_weights.build_lazy(model, dtype=dtype), loading.build(model, dtype=dtype)
    assert found is not None
    own = named_weights.weights(found.module)
    assert any(tensor.is_meta for tensor in own.values())
    for each, tensor in named_weights.weights(module).items():
        assert torch.equal(found.load(each) if own[each].is_meta else own[each], tensor), each
    for (each, mine), (_, other) in zip(found.module.named_buffers(), module.named_buffers(), strict=True):
        assert torch.equal(mine, other), each
    assert torch.equal(torch.get_rng_state(), before)


def test_logits_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """So buffers that no file has, such as rotary frequencies, are right, too."""
    loading.save_model(loading.build(Model(QWEN3, seed=4)), tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    module, other = engine(None, Model(str(tmp_path))).load(None), loading.build(Model(str(tmp_path)))
    other.set_attn_implementation("sdpa")  # type: ignore[operator]
    module.set_attn_implementation("sdpa")  # type: ignore[operator]
    assert torch.equal(module(input_ids=ids).logits, other(input_ids=ids).logits)


# what files may have


def stored(folder: Path, change: Callable[[dict[str, Tensor]], None], config: dict[str, Any] = QWEN3) -> Model:
    loading.save_model(loading.build(Model(config, seed=4)), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Model(str(folder))


def test_numbers_that_are_not_finite_are_refused(two: Processes, tmp_path: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][-1, 0] = torch.nan

    model = stored(tmp_path, damage)
    wrong = "'model.layers.1.mlp.up_proj.weight' in model.safetensors has numbers that are not finite; the file is dam"
    with pytest.raises(ModelError, match=wrong):
        engine(None, model).load(None)
    assert all(wrong in said for said in two(refused, model))


def refused(mesh: DeviceMesh | None, model: Model) -> str:
    with pytest.raises(ModelError) as caught:
        engine(mesh, model).load(None)
    return str(caught.value)


def test_what_the_class_leaves_out_is_left_out(tmp_path: Path) -> None:
    def more(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.61.mlp.gate.weight"] = torch.zeros(1)

    assert lazy_weights.build_lazy(stored(tmp_path / "a", more, DEEPSEEK)) is not None
    assert lazy_weights.build_lazy(stored(tmp_path / "b", more)) is None  # transformers reads it, and warns


def test_tied_weights_that_differ_in_files_are_not_tied(tmp_path: Path) -> None:
    """As transformers reads them."""

    def head(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def other(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"]

    assert lazy_weights.build_lazy(stored(tmp_path / "same", head)) is not None
    model = stored(tmp_path / "other", other)
    assert lazy_weights.build_lazy(model) is None
    module: Any = engine(None, model).load(None)
    assert torch.equal(module.lm_head.weight, 2 * module.model.embed_tokens.weight)


def test_only_the_files_that_transformers_reads(tmp_path: Path) -> None:
    loading.build(Model(QWEN3, seed=4)).save_pretrained(tmp_path, max_shard_size="4KB")  # type: ignore[operator]
    save_file({"model.norm.weight": torch.zeros(16)}, tmp_path / "model-00099-of-00099.safetensors")
    found = lazy_weights.build_lazy(Model(str(tmp_path)))
    assert found is not None
    assert torch.equal(found.load("model.norm.weight"), torch.ones(16))
    (tmp_path / "adapter_config.json").write_text("{}")  # transformers would add the adapter
    assert lazy_weights.build_lazy(Model(str(tmp_path))) is None


def test_quantized_files_are_left_to_transformers(tmp_path: Path) -> None:
    def small(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)

    assert lazy_weights.build_lazy(stored(tmp_path, small)) is None


# nodes that see other files


def elsewhere(mesh: DeviceMesh | None, folders: list[str]) -> dict[str, Tensor]:
    assert mesh is not None
    rank = mesh.get_coordinate()[0]  # type: ignore[index]
    os.chdir(folders[rank])  # the same name, and another folder
    try:
        return everything(mesh, Model("./model"))
    finally:
        os.chdir("/")


@pytest.mark.parametrize("other", ["none", "another seed"])
def test_where_not_all_see_the_same_files_the_first_one_reads(two: Processes, other: str, tmp_path: Path) -> None:
    for name, seed in (("first", 4), ("second", 5)):
        (tmp_path / name).mkdir()
        if name == "first" or other == "another seed":
            loading.save_model(loading.build(Model(QWEN3, seed=seed)), tmp_path / name / "model")
    for found in two(elsewhere, [str(tmp_path / "first"), str(tmp_path / "second")]):
        assert_same(found, Model(str(tmp_path / "first" / "model")))


# checkpoints

RECORD = {"step": 2, "lora": False, "base": None}


def restored(mesh: DeviceMesh | None, folder: Path) -> dict[str, Tensor]:
    made = engine(mesh, Model(QWEN3, seed=7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "build", never)
        patch.setattr(lazy_weights, "build_lazy", never)
        state = made.restore(folder, RECORD)
        params = made.restore_params(folder, RECORD)
    found = whole(made, state.module)
    assert_equal(whole(made, params), found)
    return found


def test_restoring_neither_draws_nor_reads_other_weights(two: Processes, tmp_path: Path) -> None:
    made = engine(None, Model(QWEN3, seed=3))
    state = made.init()
    made.save(state, state.module).write(tmp_path)
    for found in (restored(None, tmp_path), *two(restored, tmp_path)):
        assert_equal(found, dict(named_weights.named_tensors(loading.build(Model(QWEN3, seed=3)))))


# memory

LARGE = {
    "model_type": "qwen3", "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1536, "tie_word_embeddings": False,
    "pad_token_id": None,
}  # fmt: skip
PEAKS = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from nrl import tiny
from nrl.backends import Model, adamw
from nrl.backends.fsdp.torch_engine import TorchEngine
from nrl.backends.models import lora
from nrl.batch.packed_rows import Rectangles

given = json.loads(sys.argv[1])
rank, count = given["rank"], given["count"]
torch.set_num_threads(1)
mesh = None
if count > 1:
    dist.init_process_group("gloo", init_method="file://" + given["meeting"], rank=rank, world_size=count)
    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("dp",))

def engine(model):
    return TorchEngine(model, adamw(lr=1e-3), Rectangles, False, False, torch.device("cpu"), mesh)

def memory(of):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(of + ":"))
    return int(line.split()[1]) * 1024

engine(Model(tiny.model().source)).load(None)  # what is imported then stays
found = {}
kept = None
for name, source in (("config", given["config"]), ("folder", given["folder"]), ("checkpoint", None)):
    made = engine(Model(source or given["config"]))
    kept = None
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    if source is None:
        kept = made.restore_params(Path(given["saved"]), {"lora": False, "base": None})
    elif given["whole"]:
        kept = lora.build(Model(source), dtype=torch.float32), made.load(None)
    else:
        kept = made.load(None)
    found[name] = memory("VmHWM") - before
print(json.dumps(found))
"""


def peaks(count: int, folder: Path, *, whole: bool = False) -> list[dict[str, int]]:
    """For each process, the bytes that loading takes at most, by what is loaded."""
    given = {"count": count, "config": LARGE, "folder": str(folder / "model"), "saved": str(folder / "saved")}
    given |= {"meeting": str(folder / f"meeting {count} {whole}"), "whole": whole}
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**16), "OMP_NUM_THREADS": "1"}  # what is freed is given back
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PEAKS, json.dumps(given | {"rank": rank})],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    done = [process.communicate(timeout=300) for process in started]
    assert not any(process.returncode for process in started), done
    return [json.loads(said.splitlines()[-1]) for said, _ in done]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 120 MB in float32, as a folder and as a checkpoint."""
    folder = tmp_path_factory.mktemp("large")
    made = engine(None, Model(LARGE))
    params = made.load(None)
    loading.save_model(params, folder / "model")
    (folder / "saved").mkdir()
    made.save_params(params).write(folder / "saved")
    return folder


SLACK = 16e6
"""Of processes: code that is read, headers, the miniature."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads resident memory from /proc")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_process_holds_its_part_and_one_weight(count: int, large: Path) -> None:
    module = loading.skeleton(Model(LARGE))
    sizes = [parameter.numel() * 4 for parameter in module.parameters()]
    total = sum(sizes)
    assert total > 100e6
    found = peaks(count, large)
    print(count, total, max(sizes), found)
    for each in found:
        for what, peak in each.items():
            mapped = total / count if what == "checkpoint" else 0  # its files stay mapped, which the system may drop
            assert peak < total / count + mapped + 2 * max(sizes) + SLACK, (what, found)
    if count == 1:  # and the measure sees another whole one
        built = peaks(count, large, whole=True)
        # One that is read may lie in pages of its file that nobody has touched
        assert all(each["config"] > total / count + 2 * max(sizes) + SLACK for each in built), built
