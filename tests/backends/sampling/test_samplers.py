"""What every sampler has to do, whichever engine decodes: one suite for all of them.

Another engine is another line in `made` and `kinds`.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch

import nrl
from nrl import tiny
from nrl.algos import sft_loss
from nrl.backends import Model, Params, Sampler, Sampling, adamw, fsdp, hf, vllm
from nrl.backends.sampling.weight_delivery import Weights
from nrl.backends.types import Bucket
from nrl.batch import Batch
from nrl.errors import (
    ClosedCluster,
    ConfigError,
    GenerationError,
    ModelError,
    PlacementError,
    TransferError,
    WeightMismatch,
)
from nrl.runtime import Cluster, Mesh, P, cluster, shard_map
from nrl.runtime.mesh.rpc import from_all
from tests.meshes import end
from tests.weights import bucket_of

pytestmark = pytest.mark.timeout(600)  # an environment may have to be built

PROMPTS = [[5, 6, 7], [9] * 30, [(7 * place) % 60 + 5 for place in range(150)], [5, 6, 7]]
STREAMING = ("vllm",)  # which of them can stream, too
LONG, SHORT = Sampling(max_new_tokens=300), Sampling(max_new_tokens=2)


def model(*, tied: bool = True, seed: int = 0) -> Model:
    return tiny.model(tie_word_embeddings=tied, seed=seed, initializer_range=0.2)


@attrs.frozen
class Made:
    """A sampler, its mesh, and where trainers of the same model can be made."""

    sampler: Any
    mesh: Mesh
    trainers: Any
    tied: bool
    unfinished: Callable[[], int] = lambda: 0
    """Looks into the engine: how many requests it has; of one that nobody can look into, none."""

    def params(self, seed: int) -> Params:
        trainer = fsdp.trainer(self.trainers, model(tied=self.tied, seed=seed), adamw(lr=1e-3))
        return trainer.init().params

    def inside(self, fn: Callable[[], Any]) -> Any:
        """Run something in the process of the sampler."""
        return shard_map(fn, self.mesh, (), P())().result()


def kinds(*names: str) -> list[Any]:
    marks = {"hf": (), "vllm": (pytest.mark.vllm,)}
    return [
        pytest.param((name, tied), marks=marks[name], id=f"{name}-{'tied' if tied else 'untied'}")
        for name in names
        for tied in (True, False)
    ]


@pytest.fixture(scope="module", params=kinds("hf", "vllm"))
def it(request: Any) -> Iterator[Made]:
    kind, tied = request.param
    if kind == "hf":
        with cluster("local") as here:
            yield made(here, kind, tied)
    else:
        it = made(request.getfixturevalue("on_ray"), kind, tied)
        yield it
        end(it.mesh, it.trainers)


def made(on: Cluster, kind: str, tied: bool) -> Made:
    tp = 2 if kind == "vllm" and not tied else 1  # an engine may be one of several processes
    slots = on.reserve(1 + tp)
    mesh = slots[1:].mesh(tp=tp, executable="vllm-cpu" if kind == "vllm" else "system", name=f"{kind} {tied}")
    make: Callable[..., Sampler] = {"hf": hf.sampler, "vllm": vllm.sampler}[kind]
    trainers = slots[:1].mesh(executable="system", name=f"trainers {tied}")
    sampler: Any = make(mesh, model(tied=tied), Sampling(max_new_tokens=12))
    assert sampler.capabilities.streams is (kind in STREAMING)

    def unfinished() -> int:
        (replica,) = sampler._replicas
        left: list[int] = from_all(
            replica.mesh, "unfinished", lambda engine: engine._engine.get_num_unfinished_requests(), replica._handles
        )
        return max(left)

    return Made(sampler, mesh, trainers, tied, *([unfinished] if kind == "vllm" else []))


def by_the_trainer(params: Params, rows: list[Any], temperature: float = 1.0) -> list[torch.Tensor]:
    """What the trainer says of completions of `PROMPTS`."""
    tokens = [torch.tensor([*prompt, *row.token_ids.tolist()]) for prompt, row in zip(PROMPTS, rows, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in tokens])[:, None]
    columns = {"input_ids": ids, "attention_mask": mask, "temperature": torch.full((len(rows),), temperature)}
    found = params.trainer.logprobs(params, Batch(columns, batch_size=[len(rows)]).lock_()).result()
    return [found[row, len(prompt) : len(tokens[row])] for row, prompt in enumerate(PROMPTS)]


def ids(rows: list[Any]) -> list[list[int]]:
    return [row.token_ids.tolist() for row in rows]


def test_logprobs_are_the_trainers_after_each_publish(it: Made) -> None:
    drawn = []
    for seed in (1, 2, 3):
        params = it.params(seed)
        version = nrl.publish(params, it.sampler)
        rows = it.sampler.generate(PROMPTS, seeds=[0, 1, 2, 3]).result()
        assert {row.version for row in rows} == {version} == {it.sampler.version}
        for found, expected in zip(rows, by_the_trainer(params, rows), strict=True):
            assert found.logprobs.dtype == torch.float32
            torch.testing.assert_close(found.logprobs, expected, atol=1e-4, rtol=0)
        drawn.append(ids(rows))
    assert drawn[0] != drawn[1] != drawn[2]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_of_what_was_sampled_from(it: Made, temperature: float) -> None:
    """Under the temperature; greedy ones are at temperature 1."""
    params = it.params(4)
    nrl.publish(params, it.sampler)
    sampling = Sampling(temperature=temperature, max_new_tokens=8)
    rows = it.sampler.generate(PROMPTS, seeds=[5, 6, 7, 8], sampling=sampling).result()
    for found, expected in zip(rows, by_the_trainer(params, rows, temperature), strict=True):
        torch.testing.assert_close(found.logprobs, expected, atol=1e-4, rtol=0)
    if not temperature:
        assert ids(rows)[0] == ids(rows)[3]


@pytest.mark.filterwarnings("ignore:.*truncated distribution")
def test_logprobs_are_renormalised_over_what_is_kept(it: Made) -> None:
    found = it.sampler.generate([[5, 6, 7]] * 64, sampling=Sampling(top_k=2, max_new_tokens=1)).result()
    seen = {row.token_ids.item(): float(row.logprobs.exp()) for row in found}
    assert len(seen) == 2
    assert sum(seen.values()) == pytest.approx(1, abs=1e-4)


def test_a_row_is_a_function_of_its_seed(it: Made) -> None:
    sampler = it.sampler
    first = ids(sampler.generate(PROMPTS, seeds=[3, 1, 4, 1]).result())
    assert first == ids(sampler.generate(PROMPTS, seeds=[3, 1, 4, 1]).result())
    assert first != ids(sampler.generate(PROMPTS, seeds=[2, 7, 1, 8]).result())
    assert ids(sampler.generate(PROMPTS).result()) == ids(sampler.generate(PROMPTS, seeds=[0, 1, 2, 3]).result())
    assert len({tuple(row) for row in ids(sampler.generate([[5, 6]] * 8).result())}) > 1


def test_many_long_prompts_at_once(it: Made) -> None:
    """More than an engine reads in one step."""
    prompts = [[(place * (row + 3)) % 60 + 5 for place in range(250)] for row in range(16)]
    rows = it.sampler.generate(prompts, sampling=Sampling(max_new_tokens=2)).result()
    assert all(1 <= len(row.token_ids) <= 2 for row in rows)


def test_a_completion_ends_with_a_stop_token_or_is_truncated(it: Made) -> None:
    stop, end = 11, it.sampler.tokenizer.eos_token_id
    sampling = Sampling(max_new_tokens=20, stop_token_ids=(stop,))
    rows = it.sampler.generate([[5, 6]] * 64, sampling=sampling).result()
    assert {row.truncated for row in rows} == {True, False}
    for row in rows:
        tokens = row.token_ids.tolist()
        assert not {stop, end} & set(tokens[:-1])
        assert (tokens[-1] in (stop, end)) is not row.truncated
        assert len(tokens) == 20 if row.truncated else len(tokens) <= 20
    (full,) = it.sampler.generate([[5] * 509], sampling=Sampling(max_new_tokens=20)).result()
    assert len(full.token_ids) <= it.sampler.context_length - 509 == 3


def test_a_completion_ends_with_a_text(it: Made) -> None:
    """With the token that completes it, wherever one token ends and the next begins."""
    free = it.sampler.generate([[5, 6]] * 32, sampling=Sampling(max_new_tokens=20)).result()
    tokenizer = it.sampler.tokenizer
    longest = max(ids(free), key=len)
    stops = (tokenizer.decode(longest[4:6]), tokenizer.decode(longest[2:5]) + "?")
    rows = it.sampler.generate([[5, 6]] * 32, sampling=Sampling(max_new_tokens=20, stop=stops)).result()
    shorter = 0
    for before, row in zip(free, rows, strict=True):
        tokens = before.token_ids.tolist()
        texts = [tokenizer.decode(tokens[:end], skip_special_tokens=True) for end in range(len(tokens) + 1)]
        end = next((end for end, text in enumerate(texts) if any(stop in text for stop in stops)), None)
        assert row.token_ids.tolist() == tokens[:end]
        assert row.truncated is (before.truncated and end is None)
        shorter += end is not None and end < len(tokens)
    assert shorter
    with pytest.raises(ValueError, match="stop"):
        Sampling(stop=("",))


@pytest.mark.parametrize("it", kinds("vllm")[:1], indirect=True)
def test_a_temperature_that_vllm_would_change_is_refused(it: Made) -> None:
    with pytest.raises(GenerationError, match=r"temperature is 0\.005, and it would sample at 0\.01 without saying so"):
        it.sampler.generate([[5]], sampling=Sampling(temperature=0.005)).result()


def test_what_cannot_be_served_is_refused(it: Made) -> None:
    for prompt, why in (([], "0 tokens"), ([5] * 512, "512 tokens"), ([100_000], "outside of the model's vocabulary")):
        with pytest.raises(GenerationError, match=why):
            it.sampler.generate([prompt]).result()
    assert it.sampler.generate([]).result() == []


def test_weights_that_are_not_its_own_are_refused(it: Made) -> None:
    """It does not sample from a mixture, and takes a complete set afterwards."""
    params = it.params(5)
    whole = {name: tensor.clone() for name, tensor in params.tensors()}
    name, version = "model.norm.weight", it.sampler.version
    for bad, why in (
        ({**whole, "model.nothing": torch.zeros(1)}, "no weight 'model.nothing'; it has .* more; build both sides"),
        ({**whole, name: torch.zeros(3)}, rf"'{name}' has shape \[3\], and here it is \[128\]"),
        ({key: x for key, x in whole.items() if key != name}, f"1 weights did not arrive: {name}; send all of them"),
    ):
        with pytest.raises(ModelError, match=why):
            it.sampler.receive([bucket_of(bad)], 9)
        with pytest.raises(GenerationError, match="incomplete since the last receive"):
            it.sampler.generate([[5]]).result()
        assert it.sampler.version == version
    nrl.publish(params, it.sampler)
    rows = it.sampler.generate(PROMPTS).result()
    for found, expected in zip(rows, by_the_trainer(params, rows), strict=True):
        torch.testing.assert_close(found.logprobs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("it", kinds("vllm"), indirect=True)
def test_samples_of_a_prompt_share_its_prefill(it: Made) -> None:
    """By vLLM's own counters: all but the first find its full blocks, of 32 tokens, read already."""
    (replica,) = it.sampler._replicas

    def count(engine: Any) -> None:
        stats = importlib.import_module("vllm.v1.metrics.stats")
        manager = engine._engine.engine_core.engine_core.scheduler.kv_cache_manager
        manager.log_stats, manager.prefix_cache_stats = True, stats.PrefixCacheStats()

    def counted(engine: Any) -> tuple[int, int, int]:
        manager = engine._engine.engine_core.engine_core.scheduler.kv_cache_manager
        manager.log_stats, found = False, manager.prefix_cache_stats
        return found.requests, found.queries, found.hits

    nrl.publish(it.params(1), it.sampler)  # nothing has been read with these
    from_all(replica.mesh, "count", count, replica._handles)
    prompt = [(11 * place) % 60 + 5 for place in range(12 * 32 + 20)]
    rows = it.sampler.generate([prompt] * 8, sampling=SHORT).result()
    found = from_all(replica.mesh, "counted", counted, replica._handles)
    assert set(found) == {(8, 8 * len(prompt), 7 * 12 * 32)}
    assert len({tuple(row.token_ids.tolist()) for row in rows}) > 1


# what takes on requests while it decodes others


def under_way(it: Made) -> tuple[list[Any], Any]:
    """Rows that take a while, while they are decoded; and a short one, which was asked after them and is there.

    A server on cores that its engine keeps busy answers late at times, when all are done; then they are asked again.
    An engine on a mesh has one try.
    """
    for _ in range(10 if it.mesh is None else 1):
        rows = it.sampler.stream(PROMPTS, range(4), LONG)
        (short,) = it.sampler.stream([[9, 9]], [0], SHORT)
        found = short.result(60)
        if not any(row.done() for row in rows[2:]):
            return rows, found
        for row in rows:
            row.result(120)
    pytest.fail("a short row was there only when long ones were")


@pytest.mark.parametrize("it", kinds(*STREAMING), indirect=True)
def test_a_row_is_there_when_it_is_finished(it: Made) -> None:
    """While others go on; what is asked then joins them; and all are as `generate` would have them."""
    rows, short = under_way(it)
    (again,) = it.sampler.stream([[9, 9]], [0], SHORT)
    assert ids([again.result(60)]) == ids([short])
    assert it.mesh is None or not all(row.done() for row in rows)
    found = [row.result(120) for row in rows]
    assert ids(found) == ids(it.sampler.generate(PROMPTS, sampling=LONG).result())
    assert {row.times for row in [short, *found]} == {1}
    assert max(len(row.token_ids) for row in found) > 100


@pytest.mark.parametrize("it", kinds(*STREAMING), indirect=True)
def test_a_row_that_is_cancelled_is_forgotten(it: Made) -> None:
    """At once, and without harm to the others."""
    expected = it.sampler.generate(PROMPTS[:2], sampling=LONG).result()
    rows, _ = under_way(it)
    assert sum(row.cancel() for row in rows[2:]) > 0
    (short,) = it.sampler.stream([[9, 9]], [0], SHORT)
    short.result(60)  # it was asked when the others had been cancelled
    assert it.unfinished() <= 2
    assert ids([row.result(120) for row in rows[:2]]) == ids(expected)


@pytest.mark.parametrize("it", kinds(*STREAMING), indirect=True)
def test_a_request_that_is_refused_leaves_the_others_alone(it: Made) -> None:
    rows, _ = under_way(it)
    with pytest.raises(GenerationError, match="outside of the model's vocabulary"):
        it.sampler.stream([[5, 6], [100_000]], [0, 1], SHORT)
    assert all(len(row.result(120).token_ids) for row in rows)


@pytest.mark.parametrize("it", kinds("vllm"), indirect=True)
@pytest.mark.parametrize("inflight", ["wait", "keep", "abort"])
def test_new_weights_while_rows_are_under_way(it: Made, inflight: Any) -> None:
    """Each token says by which weights it was sampled, and has the log-probability that these give it."""
    first, second = it.params(8), it.params(9)
    old = nrl.publish(first, it.sampler)
    rows, _ = under_way(it)
    new = nrl.publish(second, it.sampler, inflight)
    (after,) = it.sampler.stream([[5, 6]], [0], SHORT)
    assert set(after.result(60).versions.tolist()) == {new}
    found = [row.result(120) for row in rows]
    for row, olds, news in zip(found, by_the_trainer(first, found), by_the_trainer(second, found), strict=True):
        assert row.version == row.versions.min()
        assert row.versions.tolist() == sorted(row.versions.tolist())
        torch.testing.assert_close(row.logprobs, torch.where(row.versions == old, olds, news), atol=1e-4, rtol=0)
    seen = {(row.times, *sorted(set(row.versions.tolist()))) for row in found}
    begun = {"wait": (1, old), "keep": (1, old, new), "abort": (2, new)}[inflight]
    assert begun in seen <= {begun, (1, old)}  # some were finished before


class BreaksOff(Weights):
    """Weights that can be had by value alone; on a better way the first ones come, and no more."""

    def to(self, meshes: Any) -> Iterator[Bucket]:
        yield bucket_of(dict([next(self.params.tensors())]))
        raise TransferError("cast: another engine died")


@pytest.mark.parametrize("it", kinds("vllm")[:1], indirect=True)
def test_rows_go_on_where_weights_broke_off(it: Made) -> None:
    """The engine has to be made anew for them, and rows that were under way are asked again there."""
    params = it.params(8)
    rows, _ = under_way(it)
    with pytest.warns(UserWarning, match="the weights go by value now, which is slower: cast: another engine died"):
        it.sampler.receive(BreaksOff(params, it.sampler), 99, inflight="keep")
    found = [row.result(120) for row in rows]
    late = [place for place, row in enumerate(found) if row.version == 99]
    assert late
    for place, expected in enumerate(by_the_trainer(params, found)):
        if place in late:
            torch.testing.assert_close(found[place].logprobs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("it", kinds("vllm")[:1], indirect=True)
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("qwen2", False),
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("qwen2", True, marks=pytest.mark.slow),
        pytest.param("llama", False, marks=pytest.mark.slow),
    ],
)
def test_other_families_are_published_to(it: Made, family: str, tied: bool) -> None:
    def of(seed: int) -> Model:
        return tiny.model(model_type=family, tie_word_embeddings=tied, seed=seed, initializer_range=0.2)

    sampler = vllm.sampler(attrs.evolve(it.mesh, name=family), of(0), Sampling(max_new_tokens=8))
    for seed in (1, 2):
        params = fsdp.trainer(it.trainers, of(seed), adamw(lr=1e-3)).init().params
        nrl.publish(params, sampler)
        rows = sampler.generate(PROMPTS).result()
        for found, expected in zip(rows, by_the_trainer(params, rows), strict=True):
            torch.testing.assert_close(found.logprobs, expected, atol=1e-4, rtol=0)


@contextmanager
def without(it: Made, name: str) -> Iterator[None]:
    """Leave out a step of a transfer, in the processes of the sampler."""

    def leave_out() -> None:
        module = importlib.import_module("nrl.backends.vllm.weight_loading")
        vars(module)[f"kept {name}"] = getattr(module, name)
        setattr(module, name, lambda _: None)

    def put_back() -> None:
        module = importlib.import_module("nrl.backends.vllm.weight_loading")
        setattr(module, name, vars(module)[f"kept {name}"])

    it.inside(leave_out)
    try:
        yield
    finally:
        it.inside(put_back)


@pytest.mark.parametrize("it", kinds("vllm"), indirect=True)
@pytest.mark.parametrize(
    ("left_out", "check", "stale"),
    [
        ("repack", "check_head", "vLLM computes it from older ones: the layout of its weights is stale"),
        (
            "reset_cache",
            "check_cache_reset",
            r"\d+ blocks of keys and values that were computed with older weights are stale",
        ),
    ],
)
def test_what_vllm_would_pass_over_in_silence_is_found(it: Made, left_out: str, check: str, stale: str) -> None:
    """Without either step vLLM goes on with old weights, or old keys and values, and raises nothing.

    However small a step of the optimizer is; and where nobody looks at the engine, by what it computes.
    """
    trainer = fsdp.trainer(it.trainers, model(tied=it.tied, seed=6), adamw(lr=1e-6))
    state = trainer.init()
    nrl.publish(state.params, it.sampler)
    ids = torch.arange(64).view(4, 16) + 5
    columns = {"input_ids": ids, "attention_mask": ids > 0, "loss_mask": ids > 0}
    state, _ = trainer.train_step(sft_loss)(state, Batch(columns, batch_size=[4]).lock_())
    with without(it, left_out):
        if left_out == "repack" and not it.tied:  # nothing is packed again
            nrl.publish(state.params, it.sampler)
        else:
            with pytest.raises(WeightMismatch, match=stale):
                nrl.publish(state.params, it.sampler)
            with without(it, check), pytest.raises(WeightMismatch, match=r"nats apart, and 0\.001 may be rounding"):
                nrl.publish(it.params(7), it.sampler)
    nrl.publish(it.params(7), it.sampler)


def nudge() -> None:
    """Let a weight be another after each publish, by as much as a small step."""

    def nudged(model: Any) -> None:
        model.model.norm.weight.data[0] *= 1.01

    importlib.import_module("nrl.backends.vllm.weight_loading").repack = nudged  # type: ignore[attr-defined]


@pytest.mark.parametrize("it", kinds("vllm")[:1], indirect=True)
def test_bfloat16_is_checked_by_the_bit(it: Made) -> None:
    """Where log-probabilities are too coarse to tell the weights of two steps apart."""

    def of(seed: int) -> Model:
        return attrs.evolve(model(tied=it.tied, seed=seed), dtype="bfloat16")

    sampler = vllm.sampler(attrs.evolve(it.mesh, name="bfloat16"), of(0), Sampling(max_new_tokens=8))
    params = fsdp.trainer(it.trainers, of(1), adamw(lr=1e-3)).init().params
    nrl.publish(params, sampler)
    rows = sampler.generate(PROMPTS).result()
    for found, expected in zip(rows, by_the_trainer(params, rows), strict=True):
        torch.testing.assert_close(found.logprobs, expected, atol=0.1, rtol=0)
    (mesh,) = (replica.mesh for replica in sampler._replicas)
    shard_map(nudge, mesh, (), P())().result()
    with pytest.raises(WeightMismatch, match=r"vLLM holds another 'model\.norm\.weight' than the one that came"):
        nrl.publish(params, sampler)


@pytest.mark.parametrize("it", kinds("vllm")[:1], indirect=True)
def test_a_process_has_one_engine(it: Made) -> None:
    with pytest.raises(ModelError, match="this process has a vLLM engine already"):
        vllm.sampler(it.mesh, model())


@pytest.mark.parametrize("it", kinds("vllm")[:1], indirect=True)
def test_arguments_of_vllm_are_passed_on_or_refused(it: Made) -> None:
    mesh = attrs.evolve(it.mesh, name="arguments")
    with pytest.raises(ConfigError, match="vllm.sampler: .*max_seqs"):
        vllm.sampler(mesh, model(), max_seqs=3)
    with pytest.raises(ConfigError, match="vllm.sampler: .*it was given max_num_seqs='many' of vLLM's EngineArgs"):
        vllm.sampler(mesh, model(), max_num_seqs="many")
    with pytest.raises(ModelError, match="give a smaller max_model_len, or more memory with kv_cache_memory_bytes or"):
        vllm.sampler(mesh, model(), kv_cache_memory_bytes=2**12)


@pytest.mark.parametrize("it", kinds("vllm")[:1], indirect=True)
def test_a_vllm_for_gpus_where_there_are_none(it: Made) -> None:
    """As one that finds no platform."""

    def prepare() -> None:
        platforms = importlib.import_module("vllm.platforms")
        settings = importlib.import_module("nrl.backends.vllm.settings")
        there = platforms.current_platform
        vars(platforms)["current_platform"] = importlib.import_module("vllm.platforms.interface").UnspecifiedPlatform()
        try:
            settings.prepare()
        finally:
            vars(platforms)["current_platform"] = there

    with pytest.raises(PlacementError, match="there is no GPU on this node; give executable='vllm-cpu'"):
        it.inside(prepare)


def test_a_cluster_that_has_been_left() -> None:
    with cluster("local") as here:
        sampler = hf.sampler(here.reserve(1), model())
    with pytest.raises(ClosedCluster, match="generate"):
        sampler.generate([[5]])
