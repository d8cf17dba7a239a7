import itertools
import math
import random
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import nrl
from nrl import tiny
from nrl.backends import Sampling, hf
from nrl.backends.engine import GIVEN_UP, Decoded, Request
from nrl.backends.hf import cache, hf_engine
from nrl.backends.hf.cache import ATTENTION, attend, prepare
from nrl.backends.hf.decoding import Stops, decode
from nrl.backends.hf.hf_engine import HfEngine
from nrl.backends.hf.noise import draw, keep_most_probable, uniforms
from nrl.errors import GenerationError, ModelError

VOCABULARY = 19
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,  # so that the next token depends on all that came before
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
PLAIN: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen2": {},
    "llama": {"num_key_value_heads": 4},
    "mistral": {"sliding_window": None},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
}
OTHER: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 512, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 5, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
}
PROMPTS = [
    [1, 2, 3, 4, 5, 6, 7],
    [8, 9],
    [3],
    [8, 9],
    [10, 11, 12, 13],
    [1, 2, 3, 4, 5, 6, 7],
    [5, 5, 5, 5, 5, 5, 5, 5, 5],
]
SEEDS = [11, 12, 13, 14, 15, 16, 17]


def build(kind: str = "qwen3", **changes: Any) -> Any:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **changes})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def plain() -> Any:
    return build("qwen3", **PLAIN["qwen3"])


@pytest.fixture(scope="module")
def fast() -> Any:
    module = build("qwen3", **PLAIN["qwen3"])
    assert prepare(module)
    return module


def run(module: Any, prompts: Any = PROMPTS, seeds: Any = SEEDS, **options: Any) -> list[Decoded]:
    return decode(module, prompts, seeds, **{"max_new_tokens": 12, "context_length": 512, **options})


def slowly(module: Any, prompt: list[int], seed: int, *, new: int, stops: Any = (), temperature: float = 1.0) -> Any:
    """One row, a whole forward pass for each token, a Python loop over the vocabulary."""
    tokens, logprobs = list(prompt), []
    for _ in range(new):
        with torch.no_grad():
            logits = module(input_ids=torch.tensor([tokens])).logits[0, -1]
        logs = (logits / temperature).log_softmax(-1).double()
        target, mass, token = uniforms([seed], [len(tokens)], 1).item() * logs.exp().sum().item(), 0.0, 0
        for token in range(len(logs)):
            mass += math.exp(logs[token].item())
            if mass >= target:
                break
        tokens.append(token)
        logprobs.append(logs[token].item())
        if token in stops:
            break
    return tokens[len(prompt) :], logprobs


class Counted:
    """How many tokens each forward pass takes."""

    def __init__(self, module: Any) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.hook = module.get_input_embeddings().register_forward_hook(
            lambda _, args, __: self.shapes.append(tuple(args[0].shape))
        )

    def __enter__(self) -> list[tuple[int, ...]]:
        return self.shapes

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


# --- against a slow loop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.25, 0.7, 1.0, 2.0])
def test_rows_of_mixed_lengths_equal_a_slow_loop(plain: Any, fast: Any, temperature: float) -> None:
    found = run(fast, temperature=temperature, stop_token_ids=[4, 15])
    for prompt, seed, row in zip(PROMPTS, SEEDS, found, strict=True):
        tokens, logprobs = slowly(plain, prompt, seed, new=12, stops=(4, 15), temperature=temperature)
        assert row.token_ids.tolist() == tokens
        torch.testing.assert_close(row.logprobs.double(), torch.tensor(logprobs).double(), atol=1e-5, rtol=0)
        assert row.truncated == (tokens[-1] not in (4, 15))
    assert {row.truncated for row in found} == {True, False} or temperature != 1.0


@pytest.mark.parametrize("kind", PLAIN)
def test_every_plain_model_type_is_prepared_and_equals_the_slow_loop(kind: str) -> None:
    reference, module = build(kind, **PLAIN[kind]), build(kind, **PLAIN[kind])
    assert prepare(module)
    assert module.config._attn_implementation == ATTENTION
    check(reference, module)


@pytest.mark.parametrize("kind", OTHER)
def test_other_models_are_left_alone_and_equal_the_slow_loop(kind: str) -> None:
    reference, module = build(kind, **OTHER[kind]), build(kind, **OTHER[kind])
    assert not prepare(module)
    assert module.config._attn_implementation == "eager"
    check(reference, module)


def check(reference: Any, module: Any) -> None:
    found = run(module, stop_token_ids=[4, 15])
    for prompt, seed, row in zip(PROMPTS, SEEDS, found, strict=True):
        tokens, logprobs = slowly(reference, prompt, seed, new=12, stops=(4, 15))
        assert row.token_ids.tolist() == tokens
        torch.testing.assert_close(row.logprobs.double(), torch.tensor(logprobs).double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("prepared", [True, False])
def test_greedy_equals_transformers_generate(plain: Any, fast: Any, prepared: bool) -> None:
    found = run(fast if prepared else plain, temperature=0.0, max_new_tokens=10)
    for prompt, row in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        expected = plain.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10
        )
        assert row.token_ids.tolist() == expected[0, len(prompt) :].tolist()
        logits = plain(input_ids=expected).logits[0, len(prompt) - 1 : -1]  # log-probabilities are at temperature 1
        logprobs = logits.log_softmax(-1).gather(1, row.token_ids[:, None])[:, 0]
        torch.testing.assert_close(row.logprobs, logprobs, atol=1e-5, rtol=0)


def test_long_prompts_and_room_that_grows_equal_the_slow_loop(
    plain: Any, fast: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_GROWTH", 4)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (150, 5, 133, 40)]
    found = run(fast, prompts, [1, 2, 3, 4], max_new_tokens=70, stop_token_ids=[0])
    for prompt, seed, row in zip(prompts, [1, 2, 3, 4], found, strict=True):
        tokens, logprobs = slowly(plain, prompt, seed, new=70, stops=(0,))
        assert row.token_ids.tolist() == tokens
        torch.testing.assert_close(row.logprobs.double(), torch.tensor(logprobs).double(), atol=1e-5, rtol=0)
    assert len({len(row.token_ids) for row in found}) > 1


def test_prompts_that_are_read_in_several_blocks_give_the_same(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    together = run(fast)
    monkeypatch.setattr(cache, "_PREFILL", 8)
    with Counted(fast) as shapes:
        apart = run(fast)
    assert shapes[:4] == [(2, 2), (1, 4), (1, 7), (1, 9)]  # lengths 1 and 2 share a block of 4
    assert [row.token_ids.tolist() for row in apart] == [row.token_ids.tolist() for row in together]


def test_unused_memory_that_holds_nan_does_not_matter(fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(fast)
    monkeypatch.setattr(cache, "_PREFILL", 8)
    monkeypatch.setattr(cache, "_GROWTH", 4)
    torch.use_deterministic_algorithms(True)  # torch then fills new memory with NaN
    try:
        assert torch.empty(1).isnan()
        found = run(fast)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [row.token_ids.tolist() for row in found] == [row.token_ids.tolist() for row in expected]


def test_bfloat16_logprobs_are_those_of_its_logits() -> None:
    module = build().bfloat16()
    assert prepare(module)
    (row,) = run(module, [[1, 2, 3]], [0], max_new_tokens=1)
    logits = module.get_output_embeddings()(
        module.base_model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False).last_hidden_state[:, -1]
    )
    assert row.logprobs.dtype == torch.float32
    assert row.logprobs.item() == pytest.approx(
        logits.float().log_softmax(-1)[0, row.token_ids.item()].item(), abs=1e-6
    )


# --- batching ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prepared", [True, False])
def test_a_row_does_not_depend_on_its_batch(plain: Any, fast: Any, prepared: bool) -> None:
    module = fast if prepared else plain
    whole = run(module, stop_token_ids=[4])
    order = [4, 0, 6, 2, 5, 1, 3]
    shuffled = run(module, [PROMPTS[i] for i in order], [SEEDS[i] for i in order], stop_token_ids=[4])
    for i, row in enumerate(whole):
        (alone,) = run(module, [PROMPTS[i]], [SEEDS[i]], stop_token_ids=[4])
        for other in (alone, shuffled[order.index(i)]):
            assert other.token_ids.tolist() == row.token_ids.tolist()
            assert other.truncated == row.truncated
            torch.testing.assert_close(other.logprobs, row.logprobs, atol=1e-5, rtol=0)


def test_the_same_batch_gives_the_same_bits(fast: Any) -> None:
    for a, b in zip(run(fast), run(fast), strict=True):
        assert torch.equal(a.token_ids, b.token_ids)
        assert torch.equal(a.logprobs, b.logprobs)


def test_a_later_turn_continues_the_noise_of_its_seed(fast: Any) -> None:
    (whole,) = run(fast, [[1, 2]], [5], max_new_tokens=8)
    (first,) = run(fast, [[1, 2]], [5], max_new_tokens=3)
    (second,) = run(fast, [[1, 2, *first.token_ids.tolist()]], [5], max_new_tokens=5)
    assert [*first.token_ids.tolist(), *second.token_ids.tolist()] == whole.token_ids.tolist()


@pytest.mark.parametrize("prepared", [True, False])
def test_a_group_reads_its_prompt_once(plain: Any, fast: Any, prepared: bool) -> None:
    module = fast if prepared else plain
    with Counted(module) as shapes:
        rows = run(module, [[1, 2, 3]] * 8 + [[4, 5]] * 8, range(16), max_new_tokens=4)
    assert shapes == [(2, 3), (16, 1), (16, 1), (16, 1)]
    assert len({tuple(row.token_ids.tolist()) for row in rows}) > 8  # the seeds differ


@pytest.mark.parametrize("prepared", [True, False])
def test_finished_rows_leave_the_batch(plain: Any, fast: Any, prepared: bool) -> None:
    module = fast if prepared else plain
    with Counted(module) as shapes:
        rows = run(module, [[1, 2]] * 30, range(30), max_new_tokens=40, stop_token_ids=[3, 4, 5])
    lengths = [len(row.token_ids) for row in rows]
    assert len(set(lengths)) > 5
    # the last token of a row is never read, and the prompt was read once
    assert sum(rows * tokens for rows, tokens in shapes) == 2 + sum(length - 1 for length in lengths)


def test_other_modules_are_not_disturbed() -> None:
    other, module = build(), build()
    ids = torch.tensor([[1, 2, 3, 4]])
    before = other(input_ids=ids).logits
    prepare(module)
    run(module)
    assert other.config._attn_implementation == "eager"
    assert torch.equal(other(input_ids=ids).logits, before)


def test_results_can_be_used_under_autograd(fast: Any) -> None:
    (row,) = run(fast, [[1]], [0])
    assert not row.token_ids.is_inference()
    assert not row.logprobs.is_inference()
    assert row.token_ids.dtype == torch.int64


def test_attend_shares_keys_between_heads_and_hides_columns() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    bias = torch.zeros(2, 1, 1, 5)
    bias[1, ..., 2:4] = -torch.inf
    out, weights = attend(None, query, key, value, bias, scaling=0.3)
    assert weights is None
    for b in range(2):
        columns = [0, 1, 2, 3, 4] if b == 0 else [0, 1, 4]
        for head in range(4):
            scores = torch.stack([0.3 * query[b, head, 0] @ key[b, head // 2, s] for s in columns]).softmax(-1)
            expected = sum(scores[i] * value[b, head // 2, s] for i, s in enumerate(columns))
            torch.testing.assert_close(out[b, 0, head], expected, atol=1e-6, rtol=1e-5)


# --- where it ends ----------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_a_row_and_is_included(fast: Any) -> None:
    (free,) = run(fast, [[1, 2]], [0])
    stop = free.token_ids[4].item()
    first = free.token_ids.tolist().index(stop)
    (row,) = run(fast, [[1, 2]], [0], stop_token_ids=[stop, 0] if stop != 0 else [stop])
    assert row.token_ids.tolist() == free.token_ids[: first + 1].tolist() or 0 in row.token_ids.tolist()
    assert row.token_ids[-1].item() in (stop, 0)
    assert not row.truncated


def test_a_stop_token_as_the_last_allowed_one_is_no_truncation(fast: Any) -> None:
    (free,) = run(fast, [[1, 2]], [0], max_new_tokens=1)
    assert free.truncated
    (row,) = run(fast, [[1, 2]], [0], max_new_tokens=1, stop_token_ids=[int(free.token_ids[0])])
    assert not row.truncated


def test_stop_texts_end_where_transformers_would_end_them() -> None:
    """Also within a character of several tokens, and where a token has more than the end of a text."""
    from transformers import StopStringCriteria

    tokenizer = tiny.bpe(["user assistant 2+2= 4 hello END Observation: é € 🙂"])
    draws, compared = random.Random(0), 0
    for _ in range(40):
        ids = [draws.randrange(len(tokenizer)) for _ in range(24)]
        text = tokenizer.decode(ids)
        starts = [draws.randrange(len(text)) for _ in range(3)]
        texts = [part for start in starts if "\ufffd" not in (part := text[start : start + draws.randint(1, 6)])]
        if not texts:
            continue
        known, own = StopStringCriteria(tokenizer, texts), Stops([], texts, tokenizer)
        own.begin(1, len(tokenizer), torch.device("cpu"))
        last = torch.full((1, known.maximum_token_len), torch.iinfo(torch.int64).max)
        for token in ids:
            last = torch.cat([last[:, 1:], torch.tensor([[token]])], 1)
            assert own.find_ended(torch.tensor([token])).tolist() == known(last, None).tolist()
            compared += 1
    assert compared > 500


def test_the_length_and_the_number_of_stop_texts_cost_next_to_nothing() -> None:
    tokenizer = tiny.bpe(["user assistant"])
    began = time.process_time()
    for texts in (["x" * 3_000_000], [f"{number} stop" for number in range(20_000)]):
        stops = Stops([], texts, tokenizer)
        stops.begin(8, len(tokenizer), torch.device("cpu"))
        for _ in range(50):
            assert not stops.find_ended(torch.arange(8)).any()
    assert time.process_time() - began < 5


def engine_requests(count: int, first: int = 0, **fields: Any) -> list[Request]:
    sampling = Sampling(max_new_tokens=12)
    return [Request(first + row, PROMPTS[row], row, sampling, **fields) for row in range(count)]


def test_a_batch_that_is_left_and_continued_has_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HfEngine(tiny.model())
    whole = dict(engine.advance(engine_requests(3), []))
    monkeypatch.setattr(hf_engine, "_SECONDS", 0.0)
    calls, found = 0, dict[int, Decoded]()
    new: list[Request] = engine_requests(3, cancellable=True)
    while len(found) < 3:
        found |= dict(engine.advance(new, []))
        new, calls = [], calls + 1
    assert calls == max(len(row.token_ids) for row in whole.values())
    assert [found[row].token_ids.tolist() for row in range(3)] == [whole[row].token_ids.tolist() for row in range(3)]


def test_a_row_that_is_cancelled_stops_and_others_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = HfEngine(tiny.model())
    whole = dict(engine.advance(engine_requests(3), []))
    monkeypatch.setattr(hf_engine, "_SECONDS", 0.0)
    found = dict(engine.advance(engine_requests(3, cancellable=True), []))
    assert not found
    found |= dict(engine.advance(engine_requests(2, first=3, cancellable=True), [1, 4]))
    while engine._batches:
        found |= dict(engine.advance([], []))
    assert {number: len(found[number].token_ids) for number in (1, 4)} == {1: 2, 4: 1}
    for number, known in ((0, 0), (2, 2), (3, 0)):
        assert found[number].token_ids.tolist() == whole[known].token_ids.tolist()


def test_new_weights_decode_what_is_under_way_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, other = HfEngine(tiny.model()), HfEngine(tiny.model(seed=1))
    new = dict(other.advance(engine_requests(3), []))
    monkeypatch.setattr(hf_engine, "_SECONDS", 0.0)
    found = dict(engine.advance(engine_requests(3, cancellable=True), []))
    assert not found
    engine.begin()
    engine.module.load_state_dict(other.module.state_dict())
    while engine._batches:
        found |= dict(engine.advance([], []))
    assert [found[row].token_ids.tolist() for row in range(3)] == [new[row].token_ids.tolist() for row in range(3)]


def test_a_sampler_forgets_what_its_caller_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_engine, "_SECONDS", 0.0)
    steps = itertools.count()
    with nrl.cluster("local") as here:
        sampler = hf.sampler(here.reserve(1), tiny.model(), Sampling(max_new_tokens=12))
        whole = sampler.generate(PROMPTS, seeds=SEEDS).result()
        token = GIVEN_UP.set(lambda: [next(steps) >= 3 * len(PROMPTS) and row % 2 == 1 for row in range(len(PROMPTS))])
        try:
            rows = sampler.generate(PROMPTS, seeds=SEEDS).result()
        finally:
            GIVEN_UP.reset(token)
        assert sampler.generate(PROMPTS, seeds=SEEDS).result()[1].token_ids.tolist() == whole[1].token_ids.tolist()
    assert [len(row.token_ids) for row in rows[1::2]] == [0] * len(rows[1::2])
    for row, known in zip(rows[::2], whole[::2], strict=True):
        assert row.token_ids.tolist() == known.token_ids.tolist()


def test_max_new_tokens_and_the_context_length_truncate(fast: Any) -> None:
    rows = run(fast, [[1], [1, 2, 3], [1, 2, 3, 4, 5]], [0, 1, 2], max_new_tokens=4, context_length=6)
    assert [len(row.token_ids) for row in rows] == [4, 3, 1]
    assert all(row.truncated for row in rows)


def test_no_prompts_give_no_rows(fast: Any) -> None:
    assert run(fast, [], []) == []


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "seeds", "options", "message"),
    [
        ([[1], []], [0, 1], {}, r"prompt of row 1 has 0 tokens; give it from 1 to 511"),
        ([[1], [2] * 8], [0, 1], {"context_length": 8}, r"row 1 has 8 tokens, which .* context of 8; shorten"),
        ([[1], [2, VOCABULARY]], [0, 1], {}, r"row 1 has the token id 19, outside .* vocabulary of 19; encode it"),
        ([[-1]], [0], {}, r"row 0 has the token id -1"),
        ([[1]], [0, 1], {}, r"2 seeds for 1 prompts; give one for each"),
        (["hello"], [0], {}, r"row 0 of the prompts is 'hello'; prompts are lists of token ids, such as \[\[5"),
        ("hello", range(5), {}, r"row 0 of the prompts is 'hello'; prompts are lists of token ids"),
        ([5, 6, 7], range(3), {}, r"row 0 of the prompts is 5; prompts are lists of token ids"),
        ([[1], ["a", "b"]], [0, 1], {}, r"row 1 of the prompts is \['a', 'b'\]; .*; encode texts with the sampler's"),
        ([[1]], [0], {"stop_token_ids": [99]}, r"stop token 99 is outside .* vocabulary of 19"),
    ],
)
def test_errors_say_which_row_and_what_to_do(
    fast: Any, prompts: Any, seeds: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(GenerationError, match=message):
        run(fast, prompts, seeds, **options)


@pytest.mark.parametrize("prepared", [True, False])
def test_weights_that_are_not_finite_are_an_error(prepared: bool) -> None:
    module = build()
    if prepared:
        prepare(module)
    with torch.no_grad():
        module.model.norm.weight[0] = torch.nan
    with pytest.raises(GenerationError, match="logits are not finite.*NaN in the weights"):
        run(module)


def test_a_model_without_a_cache_of_keys_is_an_error() -> None:
    import transformers

    config = transformers.AutoConfig.for_model("mamba", vocab_size=9, hidden_size=8, num_hidden_layers=1, state_size=4)
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert not prepare(module)
    with pytest.raises(
        ModelError, match="MambaForCausalLM takes no past_key_values.*causal language model with attention"
    ):
        run(module, [[1]], [0])


# --- noise and distributions ------------------------------------------------------------------------------------------


def test_noise_is_the_formula() -> None:
    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    def expected(seed: int, position: int) -> float:
        key = mix((seed + 0x9E3779B97F4A7C15) % 2**64)
        bits = mix((mix((key + position * 0x9E3779B97F4A7C15) % 2**64) + key) % 2**64)
        return ((bits >> 12) + 0.5) / 2**52

    found = uniforms([0, 5, -1, 2**64 + 5, 2**63], [0, 7, 3, 7, 100_000], 3)
    for i, (seed, start) in enumerate([(0, 0), (5, 7), (2**64 - 1, 3), (5, 7), (2**63, 100_000)]):
        assert found[:, i].tolist() == [expected(seed, start + k) for k in range(3)]


def test_noise_is_uniform_and_independent_of_the_batch() -> None:
    noise = uniforms(range(400), [10] * 400, 250)
    assert noise.dtype == torch.float64
    assert noise.min() > 0
    assert noise.max() < 1
    assert len(noise.unique()) == 100_000
    counts = torch.histc(noise, 100, 0, 1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 160  # 99 degrees of freedom: 1 in 10,000
    for a, b in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1])):  # neighbours in position and in seed
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.012
    assert torch.equal(uniforms([17, 399], [10, 10], 250), noise[:, [17, 399]])
    assert torch.equal(uniforms([17], [60], 200)[:, 0], noise[50:, 17])


def kept_slowly(probs: list[float], top_k: int, top_p: float) -> list[float]:
    order = sorted(range(len(probs)), key=lambda v: -probs[v])
    if top_k:
        order = order[:top_k]
    total, mass, kept = sum(probs[v] for v in order), 0.0, []
    for v in order:
        if mass >= top_p * total:
            break
        kept.append(v)
        mass += probs[v]
    return [probs[v] / mass if v in kept else 0.0 for v in range(len(probs))]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (2.0, 5, 1.0), (1.5, 0, 0.8), (1.5, 7, 0.8), (1.0, 1, 1.0)],
)
def test_frequencies_and_logprobs_are_those_of_the_kept_distribution(
    plain: Any, fast: Any, temperature: float, top_k: int, top_p: float
) -> None:
    n, prompt = 4000, [1, 2, 3]
    logits = plain(input_ids=torch.tensor([prompt])).logits[0, -1]
    expected = kept_slowly((logits.double() / temperature).softmax(-1).tolist(), top_k, top_p)
    rows = run(fast, [prompt] * n, range(n), max_new_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p)
    counts = Counter(int(row.token_ids[0]) for row in rows)
    assert all(expected[token] > 0 for token in counts)
    assert sum(expected[token] > 0 for token in range(VOCABULARY)) == (
        VOCABULARY if not top_k and top_p == 1 else len(counts)
    )
    statistic = sum((counts[v] - n * p) ** 2 / (n * p) for v, p in enumerate(expected) if p > 0)
    assert statistic < 48  # at most 18 degrees of freedom: 1 in 10,000 is 47
    for row in rows[:50]:
        assert row.logprobs.item() == pytest.approx(math.log(expected[int(row.token_ids[0])]), abs=1e-5)


def probabilities(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64).log()


def test_top_p_keeps_the_token_that_reaches_the_mass_and_always_one() -> None:
    logprobs = probabilities(0.125, 0.5, 0.25, 0.125)
    assert keep_most_probable(logprobs, 0, 0.5).exp().tolist() == [[0, 1, 0, 0]]
    assert keep_most_probable(logprobs, 0, 0.51).exp().tolist() == [[0, pytest.approx(2 / 3), pytest.approx(1 / 3), 0]]
    assert keep_most_probable(logprobs, 0, 1e-9).exp().tolist() == [[0, 1, 0, 0]]


def test_top_k_keeps_ties_and_comes_before_top_p() -> None:
    logprobs = probabilities(0.2, 0.3, 0.2, 0.2, 0.1)
    assert (keep_most_probable(logprobs, 2) > -torch.inf).tolist() == [[True, True, True, True, False]]
    # top-k leaves 0.5 and 0.3, as 0.625 and 0.375: of those the first has the mass; of all it would not have
    assert keep_most_probable(probabilities(0.5, 0.3, 0.2), 2, 0.6).exp().tolist() == [[1, 0, 0]]
    assert (keep_most_probable(probabilities(0.5, 0.3, 0.2), 0, 0.6) > -torch.inf).tolist() == [[True, True, False]]


def test_top_k_of_the_whole_vocabulary_or_more_changes_nothing() -> None:
    logprobs = probabilities(0.5, 0.3, 0.2)
    assert torch.equal(keep_most_probable(logprobs, 3), logprobs)
    assert torch.equal(keep_most_probable(logprobs, 99), logprobs)


def test_without_truncation_logprobs_are_exactly_log_softmax() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    noise = uniforms(range(6), [0] * 6, 1)[0]
    for temperature in (0.25, 0.7, 1.0, 2.0):
        tokens, logprobs = draw(logits, noise, temperature=temperature)
        assert torch.equal(logprobs, (logits / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0])


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for noise in (1e-16, 0.5, 0.5 + 1e-12, 1 - 2.0**-53):
        assert draw(logits, torch.tensor([noise]).double())[0].item() in (1, 3)


def test_a_large_vocabulary_reaches_its_last_tokens() -> None:
    size = 200_000
    tokens, _ = draw(torch.zeros(3, size), torch.tensor([0.5 / size, 0.5, 1 - 0.5 / size]).double())
    assert tokens.tolist()[0] == 0
    assert tokens.tolist()[2] == size - 1
    assert abs(tokens.tolist()[1] - size // 2) <= 1
