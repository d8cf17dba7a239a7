"""What a step took of its devices: sums over processes and parts, and FLOPs against closed forms."""

import time
from typing import Any

import pytest
import torch

import nrl
from nrl import tiny
from nrl.algos import sft_loss
from nrl.backends import Model, adamw, fsdp
from nrl.backends.models import lora
from nrl.backends.training.device_metrics import FLOPS, begin_measuring
from nrl.backends.training.flops import Cost, cost, step_flops
from nrl.backends.training.layout.microbatch_plan import plan, predicted_mask
from nrl.batch import Batch
from nrl.batch.metrics import Metrics, Sum, finalize, merge
from nrl.batch.packed_rows import Rectangles, Sequences
from nrl.ops.plan.analytic import count_flops
from nrl.runtime import Cluster
from nrl.runtime.device_specs import PEAKS, peak
from nrl.runtime.mesh.current_process import Process, enter_process, measure_idle, perform, process
from nrl.runtime.mesh.processes import Out
from nrl.runtime.mesh.rpc import from_all
from nrl.runtime.trace import measured
from tests.ops.plan.test_gpus import TINY


def module_of(**options: Any) -> Any:
    return lora.skeleton(Model(TINY, **options), dtype=torch.float32)


def test_flops_are_those_of_the_closed_form() -> None:
    found = cost(module_of())
    assert found is not None
    tied = TINY | {"tie_word_embeddings": True}
    assert cost(lora.skeleton(Model(tied), dtype=torch.float32)) == found  # a tied head multiplies as another does
    assert found.token * 100 + found.output * 30 == count_flops(TINY, tokens=100, outputs=30)
    heads, size = TINY["num_attention_heads"], TINY["head_dim"]
    assert found.scores == ((12.0 * heads * size, None),) * TINY["num_hidden_layers"]


def test_what_is_not_trained_has_no_gradient_of_its_own() -> None:
    plain = cost(module_of())
    adapted = cost(module_of(lora={"r": 2, "target_modules": ["q_proj"]}))
    assert plain is not None
    assert adapted is not None
    d, wide = TINY["hidden_size"], TINY["num_attention_heads"] * TINY["head_dim"]
    assert adapted.token == plain.token * 4 / 6 + 6 * TINY["num_hidden_layers"] * 2 * (d + wide)
    assert adapted.output == plain.output * 4 / 6


def test_of_experts_the_chosen_count() -> None:
    options: Any = {"model_type": "qwen3_moe", "num_local_experts": 4, "moe_intermediate_size": 8}
    one, other = (
        cost(lora.skeleton(tiny.model(num_experts_per_tok=k, **options), dtype=torch.float32)) for k in (1, 3)
    )
    assert one is not None
    assert other is not None
    config: Any = lora.skeleton(tiny.model(num_experts_per_tok=1, **options), dtype=torch.float32).config
    assert other.token - one.token == 2 * 6 * 3 * 8 * config.hidden_size * config.num_hidden_layers


def test_windows_and_layers_without_scores() -> None:
    module = module_of()
    module.config.layer_types = ["sliding_attention", "linear_attention"]
    module.config.sliding_window = 4
    found = cost(module)
    assert found is not None
    assert [window for _, window in found.scores] == [4]
    module = module_of()
    object.__setattr__(module.config, "num_attention_heads", None)  # as one that has no attention
    assert cost(module) is None


@pytest.mark.parametrize("packing", [Rectangles, Sequences, None])
def test_pairs_are_counted_as_a_loop_counts_them(packing: Any) -> None:
    ids = torch.randint(1, 30, (3, 9))
    ids[1, :5] = ids[0, :5]
    mask = torch.arange(9) < torch.tensor([9, 7, 0])[:, None]
    batch = Batch({"input_ids": ids, "attention_mask": mask}, batch_size=[3]).lock_()
    work = plan(batch, predicted_mask(batch), packing, words=30)
    seen = set()
    pairs = {None: 0, 3: 0}
    for row in range(3):
        length = int(mask[row].sum())
        for t in range(length if packing is None else max(0, length - 1)):  # the last one predicts nothing
            before = tuple(ids[row, : t + 1].tolist())
            if packing is None or work.saved == 0 or before not in seen:
                seen.add(before)
                for window in pairs:
                    pairs[window] += min(t + 1, window or 100)
    for window, expected in pairs.items():
        assert step_flops(Cost(0.0, 0.0, ((2.0, window),)), work) == 2 * expected
    nothing = plan(batch, torch.zeros_like(mask), packing, words=30, always=True)
    assert step_flops(Cost(1.0, 1.0, ((1.0, None),)), nothing) == 0


def test_peaks() -> None:
    names = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}
    for name, flops in (names | {"NVIDIA B200": 2250e12}).items():
        assert peak(name) == flops
    assert (peak("NVIDIA H20"), peak("NVIDIA H100 NVL"), peak("NVIDIA GeForce GTX 1080")) == (148e12, 835e12, None)
    assert all(peak(f"NVIDIA {name}") == flops for name, flops in PEAKS.items())


class Gpu:
    """What this process asks torch about a device that is not there."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.reset = 0
        gib = 2**30
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "get_device_name", lambda: name)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", self.forget)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * gib * (1 + process().rank))
        patch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 * gib)

    def forget(self) -> None:
        self.reset += 1


def on_rank(rank: int, seconds: float, clock: list[float]) -> Metrics:
    found: Metrics = {"tokens": Sum(torch.tensor(600)), FLOPS: Sum(torch.tensor(989e12)), "loss": Sum(torch.ones(()))}
    with enter_process(Process(rank, 2, None, f"mesh {rank}")):
        ended = begin_measuring()
        clock[0] += seconds
        return ended(found)


def test_processes_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, gpu = [0.0], Gpu(monkeypatch, "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    one, other = (on_rank(rank, seconds, clock) for rank, seconds in ((0, 2.0), (1, 4.0)))
    assert gpu.reset == 2
    assert not {"tokens", "loss", FLOPS} & other.keys()
    assert FLOPS not in one
    found = finalize(merge(one, other))
    assert found["device/tokens_per_second"] == 100.0  # 600 tokens in 6 seconds of devices
    assert found["device/tflops"] == pytest.approx(989 / 6)
    assert found["device/mfu"] == pytest.approx(1 / 6)
    assert (found["device/max_memory_allocated"], found["device/max_memory_reserved"]) == (6.0, 5.0)  # the largest
    twice = finalize(merge(merge(one, other), merge(one, other)))  # two parts of a batch
    assert twice["device/mfu"] == found["device/mfu"]


def test_a_device_whose_peak_is_not_known_has_no_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch, "NVIDIA Quadro")
    assert {name for name in on_rank(0, 0.0, [0.0]) if name.startswith("device/")} == {
        *("device/tokens_per_second", "device/tflops", "device/idle"),
        *("device/max_memory_allocated", "device/max_memory_reserved"),
    }


def test_a_process_is_idle_between_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def takes(seconds: float, asks: bool = False) -> Any:
        begun = clock[0]
        clock[0] += seconds
        return measure_idle(begun, clock[0]) if asks else None

    with enter_process(Process(mesh="of this test")):
        perform("init", takes, [1.0], Out.first)  # the first call: from here on
        clock[0] += 2.0
        assert perform("step", takes, [3.0, True], Out.first) == [(2.0, 6.0)]
        clock[0] += 5.0
        perform("forward", takes, [4.0], Out.first)
        with pytest.raises(TypeError):
            perform("forward", takes, ["not a number"], Out.first)
        clock[0] += 1.0
        assert perform("step", takes, [2.0, True], Out.first) == [(6.0, 12.0)]
        assert perform("step", takes, [2.0, True], Out.first) == [(0.0, 2.0)]


def test_a_step_tells_it() -> None:
    with nrl.cluster("local") as here:
        trainer = fsdp.trainer(here.reserve(1), tiny.model(), adamw(lr=1e-3))
        step, state = trainer.train_step(sft_loss), trainer.init()
        state, _ = step(state, tiny.sums(8).take(1)[0])
        measured.take()
        time.sleep(0.3)
        state, metrics = step(state, tiny.sums(8).take(1)[0])
    tokens_of = metrics.result()["tokens"][0]
    assert not any(name.startswith("device/") for name in metrics.result())  # they are the same each time
    found = measured.take()
    assert {name for name in found if name.startswith("device/")} == {
        "device/tokens_per_second", "device/tflops", "device/idle"
    }  # fmt: skip
    waited, since = tuple(found["device/idle"])
    assert 0.3 <= float(waited) < float(since)
    tokens, seconds = tuple(found["device/tokens_per_second"])
    assert tokens == tokens_of
    assert float(seconds) == pytest.approx(float(since - waited), abs=0.02)


@pytest.mark.ray
def test_two_processes_tell_it_and_are_deterministic(on_ray: Cluster) -> None:
    slots = on_ray.reserve(2)
    trainer = fsdp.trainer(slots, tiny.model(), adamw(lr=1e-3), deterministic=True)
    assert from_all(trainer.mesh, "test", torch.are_deterministic_algorithms_enabled) == [True, True]
    assert not torch.are_deterministic_algorithms_enabled()  # in the program
    step, state = trainer.train_step(sft_loss), trainer.init()
    state, first = step(state, tiny.sums(8).take(1)[0])
    first.result()
    measured.take()
    state, metrics = step(state, tiny.sums(8).take(1)[0])
    numbers, found = metrics.result(), measured.take()
    tokens, seconds = tuple(found["device/tokens_per_second"])
    assert tokens == numbers["tokens"][0]  # of both, once
    waited, since = tuple(found["device/idle"])
    assert float(since - waited) >= float(seconds)  # of both
    assert finalize(numbers)["loss"] < finalize(first.result())["loss"]
