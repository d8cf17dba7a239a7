"""The engine on fake CUDA tensors: what a small step needs, whose numbers fail when a change adds to them."""

import multiprocessing
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import attrs
import pytest

from benchmarks.linear_logprobs import resident as status
from nrl.errors import ConfigError
from nrl.ops.plan import fake_cuda, simulate
from nrl.ops.plan.analytic import count_flops, count_parameters
from nrl.ops.plan.simulate import Step, simulate_step
from tests.ops.plan.test_gpus import TINY

pytestmark = pytest.mark.timeout(300)
SMALL = TINY | {"tie_word_embeddings": True}
STEP = Step(SMALL, dp=2, rows=2, width=256)


def by_file(waits: Any) -> Counter[tuple[str, str]]:
    found = Counter[tuple[str, str]]()
    for kind, line, count in waits:
        found[kind, line.split(":")[0].rpartition("/")[2]] += count
    return found


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    return simulate_step(STEP)


def test_what_a_process_holds(counted: dict[str, Any]) -> None:
    count = count_parameters(SMALL)
    assert counted["count"] == count
    assert counted["parameters"] == counted["gradients"] == 4 * count / 2  # float32, of two processes
    steps = counted["moments"] - 2 * counted["parameters"]
    assert 0 < steps < 1024  # each parameter counts its steps, in a float32


def test_products_are_those_of_the_closed_form(counted: dict[str, Any]) -> None:
    tokens = outputs = 255 + 218  # a row's last token predicts nothing
    flops = counted["flops"]
    assert flops["bfloat16"] == count_flops(SMALL, tokens, outputs)
    assert counted["recomputed"] == {}
    # 2 layers, 4 heads of size 16: 2 products forward and 5 backward, of each token with as many as the longest row has
    assert flops["attention"] == 2 * 7 * 2 * 4 * tokens * 255 * 16
    assert counted["attention"] == {"varlen": 2}  # one call a layer, whatever the rows


def test_nothing_is_float32(counted: dict[str, Any]) -> None:
    """A product of float32 matrices in a model of bfloat16 is a mistake: a GPU has 1/15 of the speed for it."""
    assert counted["float32_products"] == {}
    assert set(counted["flops"]) == {"bfloat16", "attention"}


def test_waits_and_copies(counted: dict[str, Any]) -> None:
    """Of one micro-batch and one optimizer step. Who adds one here makes each step on a GPU slower."""
    assert by_file(counted["waits"]) == {
        ("copy to the device", "h2d.py"): 1,
        ("copy to the host, blocking", "step_sums.py"): 1,
        ("copy to the host, blocking", "torch_engine.py"): 1,
    }


def test_a_micro_batch_more_is_a_copy_more_and_no_wait() -> None:
    found = Counter[str]()
    for kind, _, count in simulate_step(attrs.evolve(STEP, max_tokens=256))["waits"]:
        found[kind] += count
    assert found == {"copy to the device": 2, "copy to the host, blocking": 2}


def test_the_peak(counted: dict[str, Any]) -> None:
    assert counted["peak"] <= 6_546_000  # all that a micro-batch brings lies in one buffer
    assert "fused_logprobs.py" in counted["peak_at"]
    parts = counted["at_peak"]
    assert counted["peak"] == sum(counted[name] for name in ("parameters", "moments", "activations")) + sum(
        parts.values()
    )


def test_gradients_and_log_probabilities_are_no_activations(counted: dict[str, Any]) -> None:
    """At the peak, which is in log-probabilities, there is no gradient of the process's own part yet."""
    outputs, words, d = 255 + 218, 512, 64
    assert counted["at_peak"]["gradients"] == 0
    of_head = counted["at_peak"]["log-probabilities"]
    assert of_head == counted["logprobs"]
    # All logits are one chunk here: kept, and their gradient, in float32 and in bfloat16; the gradient of the head
    assert of_head == pytest.approx((4 + 4 + 2) * outputs * words + 4 * words * d, rel=0.1)


def test_what_collectives_carry(counted: dict[str, Any]) -> None:
    layers, rest = 2 * (36_864 + 2 * 64 + 2 * 16), 512 * 64 + 64
    sent = counted["collectives"]
    # All is gathered in bfloat16, layers twice and the rest once; gradients are reduced in float32
    assert sent["_allgather_base_"] == 2 * (2 * layers + rest)
    assert sent["_reduce_scatter_base_"] == 4 * (layers + rest)


def test_a_torch_that_was_not_tested() -> None:
    assert fake_cuda.check_torch("2.13.1") == 4
    with pytest.raises(ConfigError, match=r"found torch 2.12.0, .* tested with 2.13 alone; use closed forms"):
        fake_cuda.check_torch("2.12.0")
    with pytest.raises(ConfigError, match="found torch 2.130.0"):
        fake_cuda.check_torch("2.130.0")


def test_a_step_that_fails_says_why() -> None:
    with pytest.raises(ConfigError, match="failed on fake tensors(.|\n)*or leave out rows that long$"):
        simulate_step(attrs.evolve(STEP, max_tokens=8))


def test_checkpointing_computes_layers_again(counted: dict[str, Any]) -> None:
    found, some = (simulate_step(attrs.evolve(STEP, checkpointing=each)) for each in (True, "selective"))
    # A forward more, without each layer's last product, of which backward needs nothing
    assert found["flops"]["bfloat16"] == counted["flops"]["bfloat16"] + 2 * 2 * (36_864 - 64 * 128) * 473
    assert found["attention"] == {"varlen": 4}
    assert found["peak"] < some["peak"] < counted["peak"]
    # Of each layer the two products into the MLP are computed again
    assert some["flops"]["bfloat16"] == counted["flops"]["bfloat16"] + 2 * 2 * (2 * 64 * 128) * 473
    assert some["attention"] == {"varlen": 2}
    for each in (found, some):
        assert each["recomputed"]["layers"] == each["flops"]["bfloat16"] - counted["flops"]["bfloat16"]
    assert found["recomputed"]["attention"] == found["flops"]["attention"] - counted["flops"]["attention"]
    assert set(some["recomputed"]) == {"layers"}


def test_the_whole_of_a_life(counted: dict[str, Any]) -> None:
    """What is done around a step has a peak, waits and copies of its own."""
    stages = counted["stages"]
    held = stages["train"]["held"]
    assert held - 64 == counted["parameters"] + counted["moments"]  # and 8 frequencies of positions, twice
    assert list(stages) == ["forward", "train", "publish", "save", "rest", "wake"]
    for name in ("peak", "peak_at", "waits", "collectives"):
        assert stages["train"][name] == counted[name]
    assert all(each["held"] == held for name, each in stages.items() if name != "rest")

    forward = stages["forward"]
    assert forward["collectives"] == {"_allgather_base_": counted["count"] * 2}  # once, in bfloat16
    assert forward["peak"] <= 2_867_000
    assert by_file(forward["waits"]) == {
        ("copy to the device", "h2d.py"): 1,
        ("copy to the host", "torch_engine.py"): 1,
        ("Event.synchronize", "torch_engine.py"): 1,
    }

    publish = stages["publish"]
    assert publish["collectives"] == {"broadcast_": 2 * counted["count"] + 768}  # in bfloat16, each at 16 bytes
    # All of this model is one bucket: the parts of both, and what they make
    assert 2 * 2 * counted["count"] <= publish["peak"] - held <= 602_000
    assert by_file(publish["waits"]) == {("aten._local_scalar_dense.default", "transfer.py"): 1}  # a checksum
    assert publish["copied"] == {}

    assert held <= stages["save"]["peak"] <= held + 256  # one piece after the other, and whether each is finite
    assert stages["save"]["copied"] == {"to the host": held - 64}  # frequencies are not saved

    for name, way in (("rest", "to the host"), ("wake", "to the device")):
        assert stages[name]["copied"] == {way: held - 96}  # numbers of steps stay
        assert stages[name]["peak"] <= held
        assert not [each for each in stages[name]["waits"] if "blocking" in each[0]]
    assert stages["rest"]["held"] == 96
    assert by_file(stages["save"]["waits"])["copy to the host", "save_plan.py"] == 96  # into pinned memory


def test_another_rank_than_the_first(counted: dict[str, Any]) -> None:
    """It trains alike, and does not speak for what all have; of an uneven model it may have less, or nothing."""
    found = simulate_step(attrs.evolve(STEP, rank=1))
    for name in ("parameters", "moments", "peak", "collectives", "flops"):
        assert found[name] == counted[name]
    stages = found["stages"]
    assert stages["publish"]["waits"] == []  # the first one computes checksums
    assert stages["publish"]["collectives"] == counted["stages"]["publish"]["collectives"]
    # Numbers of steps, which all have, are saved by the first
    assert stages["save"]["copied"]["to the host"] == counted["stages"]["save"]["copied"]["to the host"] - 96


@pytest.mark.slow
def test_a_rank_that_has_less() -> None:
    """Of 512 words and 64 or 128 rows, 7 processes have parts of ceil(size / 7); the last one has what is left."""
    first, last = (simulate_step(attrs.evolve(STEP, dp=7, rank=rank, width=64)) for rank in (0, 6))
    words, d, layers = 512, 64, 2
    shapes = [(words, d)] + layers * [(64, d), (32, d), (32, d), (d, 64), (128, d), (128, d), (d, 128), (d, 1), (d, 1)]
    shapes += layers * 2 * [(16, 1)] + [(d, 1)]
    has = [[max(min(-(-rows // 7), rows - at * -(-rows // 7)), 0) * width for rows, width in shapes] for at in (0, 6)]
    for found, own in zip((first, last), has, strict=True):
        assert found["parameters"] == 4 * sum(own)
        padding = found["stages"]["publish"]["collectives"]["broadcast_"] - 2 * first["count"]
        assert 0 <= padding < 16 * 7 * len(shapes)  # each piece begins at a multiple of 16 bytes
    assert last["parameters"] < first["parameters"]
    assert sum(1 for size in has[1] if not size) > 0  # of some it has nothing


def resident(step: Step) -> tuple[int, int]:
    """Bytes that the step's process has for weights and moments, and the most bytes that the drive's own one had."""
    found = simulate._simulate_here(step)
    return found["parameters"] + found["moments"], status("VmHWM")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says how much memory a process had")
def test_a_plan_needs_no_memory_for_what_is_saved_or_at_rest() -> None:
    """Else that of 8B for one process would need 98 GB of the host."""
    step = Step(SMALL | {"vocab_size": 152_064, "hidden_size": 2048}, width=64, max_tokens=128)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        held, resident_bytes = alone.submit(resident, step).result()
    assert held > 3.5 * 2**30
    assert resident_bytes < 1.5 * 2**30
