import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nrl
from nrl import Batch, data, tiny
from nrl.algos import reinforce_loss
from nrl.backends import fsdp, hf
from nrl.batch.metrics import finalize, merge
from nrl.envs import Environment, Step, Trace, exact, single_turn
from nrl.errors import BatchError, MissingColumn
from nrl.log import redacted
from nrl.rollout.sample_records import samples
from nrl.rollout.summaries import summary
from tests.rollout.scripted import Scripted
from tests.work import calls

TOKENIZER = tiny.tokenizer()

# --- summary


def test_summary_by_hand() -> None:
    batch = nrl.assign(
        nrl.Batch({}, batch_size=[3]),
        input_ids=torch.zeros(3, 4, dtype=torch.int64),
        loss_mask=torch.tensor([[False, True, True, True], [False, True, False, False], [False, True, True, False]]),
        rewards=torch.tensor([1.0, 0.5, math.nan]),
        valid=torch.tensor([True, True, False]),
        truncated=torch.tensor([True, False, True]),
        dropped=torch.tensor([2, 0, 0]),
        dropped_rewards=torch.tensor([2.0, 0.0, 0.0]),
    )
    assert finalize(summary(batch)) == {
        "reward": 3.5 / 4,
        "reward/max": 1.0,
        "length": 2.0,
        "length/max": 3.0,
        "truncated": 0.5,
        "invalid": 1.0,
        "dropped": 2.0,
    }
    again = nrl.assign(batch, asked_again=torch.tensor([0, 2, 1]))
    assert finalize(summary(again))["asked_again"] == 3


def test_summary_needs_rewards() -> None:
    with pytest.raises(MissingColumn, match=r"summary reads the column 'rewards'"):
        summary(nrl.Batch({"input_ids": torch.zeros(1, 1)}, batch_size=[1]))


# --- samples


def batch_of(texts: list[tuple[str, str]], tokenizer: Any = TOKENIZER, **columns: torch.Tensor) -> nrl.Batch:
    """Rows of (prompt, response), padded on the right."""
    pairs = [
        (tokenizer.encode(prompt, add_special_tokens=False), tokenizer.encode(response, add_special_tokens=False))
        for prompt, response in texts
    ]
    width = max(len(prompt) + len(response) for prompt, response in pairs)
    ids = torch.zeros(len(pairs), width, dtype=torch.int64)
    real, sampled = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, response) in enumerate(pairs):
        length = len(prompt) + len(response)
        ids[row, :length], real[row, :length] = torch.tensor(prompt + response), True
        sampled[row, len(prompt) : length] = True
    rest = {"rewards": torch.zeros(len(pairs))} | columns
    return nrl.assign(
        nrl.Batch({}, batch_size=[len(pairs)]), input_ids=ids, attention_mask=real, loss_mask=sampled, **rest
    )


def test_a_row_by_hand() -> None:
    batch = batch_of(
        [("1+1=", "2"), ("2+2=", "five")],
        rewards=torch.tensor([1.0, 0.5]),
        advantages=torch.tensor([[0.0] * 4 + [1.5] + [0.0] * 3, [0.0] * 4 + [-1.5, -1.0, math.nan, 0.1]]),
        rollout_logprobs=torch.tensor([[0.0] * 4 + [-0.25] + [0.0] * 3, [0.0] * 4 + [-1.0, -2.0, -math.inf, -4.0]]),
        group_ids=torch.tensor([7, 7]),
        version=torch.tensor([3, 4]),
        truncated=torch.tensor([False, True]),
    )
    record = samples(batch, TOKENIZER)
    best, worst = record["rows"]
    assert best == {
        "row": 0,
        "group": 7,
        "version": 3,
        "truncated": False,
        "reward": 1.0,
        "prompt": "1+1=",
        "tokens": ["2"],
        "loss_mask": [True],
        "advantages": [1.5],
        "rollout_logprobs": [-0.25],
        "parts": [
            {"role": "prompt", "tokens": [0, 4], "text": "1+1="},
            {"role": "policy", "tokens": [4, 5], "text": "2"},
        ],
    }
    assert worst["tokens"] == ["f", "i", "v", "e"]
    assert worst["advantages"] == [-1.5, -1.0, None, 0.1]  # not finite; and no more digits than float32 has
    assert worst["rollout_logprobs"] == [-1.0, -2.0, None, -4.0]
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_histograms_by_hand() -> None:
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.5, 0.04, 0.06, math.nan, 9.0])
    valid = torch.tensor([True] * 6 + [False, False])
    texts = [("", "1" * length) for length in (1, 1, 2, 3, 21, 11, 30, 31)]
    record = samples(batch_of(texts, rewards=rewards, valid=valid), TOKENIZER, n=0)
    counts = [0] * 20
    counts[0], counts[1], counts[10], counts[19] = 3, 1, 1, 1  # 0, 0, .04 | .06 | .5 | 1, in bins of .05
    assert record["rewards"] == {"low": 0.0, "high": 1.0, "counts": counts}
    counts = [0] * 20
    counts[0], counts[1], counts[2], counts[10], counts[19] = 2, 1, 1, 1, 1  # bins of one token from 1 to 21
    assert record["lengths"] == {"low": 1.0, "high": 21.0, "counts": counts}
    assert record["rows"] == []


def test_histograms_of_one_value_and_of_none() -> None:
    record = samples(batch_of([("1", "2"), ("1", "2")], rewards=torch.tensor([0.5, 0.5])), TOKENIZER)
    assert record["rewards"] == {"low": 0.5, "high": 0.5, "counts": [2] + [0] * 19}
    record = samples(batch_of([("1", "2")], rewards=torch.tensor([math.nan]), valid=torch.tensor([False])), TOKENIZER)
    assert record["rewards"] == record["lengths"] == {"low": None, "high": None, "counts": []}
    assert record["rows"][0]["reward"] is None
    assert json.dumps(record, allow_nan=False)


def test_several_rewards_are_added_up_and_shown() -> None:
    batch = batch_of([("1", "2"), ("1", "3")], rewards=torch.tensor([[1.0, 0.25], [0.0, 0.0]]))
    record = samples(batch, TOKENIZER)
    assert (record["rewards"]["low"], record["rewards"]["high"]) == (0.0, 1.25)
    assert record["rows"][0]["reward"] == [1.0, 0.25]


@pytest.mark.parametrize(
    ("rewards", "groups", "valid", "n", "chosen"),
    [
        ([1, 1, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1], 2, [3, 2]),  # the first group has no worst
        ([0, 1, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1], 2, [1, 0]),
        ([0, 1, 0, 1], [0, 0, 1, 1], [1, 0, 1, 1], 2, [3, 2]),  # nor has one whose best is invalid
        ([1, 1, 1], [0, 0, 0], [1, 1, 1], 2, [0, 1]),
        ([0, 2, 1], [5, 5, 5], [1, 1, 1], 3, [1, 0, 2]),
        ([0, 2, 1], [5, 5, 5], [1, 1, 1], 1, [1]),
        ([0, 1], [0, 0], [1, 1], 9, [1, 0]),
    ],
)
def test_which_rows_are_shown(
    rewards: list[float], groups: list[int], valid: list[int], n: int, chosen: list[int]
) -> None:
    batch = batch_of(
        [("1", "2")] * len(rewards),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group_ids=torch.tensor(groups),
        valid=torch.tensor(valid, dtype=torch.bool),
    )
    assert [row["row"] for row in samples(batch, TOKENIZER, n)["rows"]] == chosen


def test_an_invalid_row_is_shown_although_its_mask_has_been_cleared() -> None:
    batch = batch_of(
        [("1+1=", "2")],
        turns=torch.tensor([[-1, -1, -1, -1, 0]], dtype=torch.int16),
        valid=torch.tensor([False]),
    )
    (row,) = samples(batch, TOKENIZER)["rows"]
    assert (row["prompt"], row["tokens"], row["loss_mask"]) == ("1+1=", ["2"], [False])


def test_observations_are_part_of_the_response() -> None:
    batch = batch_of([("1", "2 34")])
    batch = nrl.assign(batch, loss_mask=torch.tensor([[False, True, False, True, True]]))
    (row,) = samples(batch, TOKENIZER)["rows"]
    assert (row["prompt"], row["tokens"]) == ("1", ["2", " ", "3", "4"])
    assert row["loss_mask"] == [True, False, True, True]


def test_a_model_may_have_more_tokens_than_its_tokenizer() -> None:
    """Embeddings are often padded to a round number, and random weights sample from all of it."""
    batch = batch_of([("1", "2 34")])
    ids = batch["input_ids"].clone()
    ids[0, 2] = len(TOKENIZER) + 5
    (row,) = samples(nrl.assign(batch, input_ids=ids), TOKENIZER)["rows"]
    assert row["tokens"] == ["2", "", "3", "4"]


def test_a_row_in_which_nothing_was_sampled_is_all_prompt() -> None:
    (row,) = samples(batch_of([("1+1=", "")]), TOKENIZER)["rows"]
    assert (row["prompt"], row["tokens"]) == ("1+1=", [])


@pytest.mark.parametrize("missing", ["input_ids", "loss_mask", "rewards"])
def test_samples_needs(missing: str) -> None:
    columns = {key: value for key, value in batch_of([("1", "2")]).items() if key != missing}
    with pytest.raises(MissingColumn, match=f"samples reads the column '{missing}'"):
        samples(nrl.Batch(columns, batch_size=[1]), TOKENIZER)


# --- tokens as text


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    batch = nrl.Batch(
        {
            "input_ids": torch.tensor([ids]),
            "loss_mask": torch.ones(1, len(ids), dtype=torch.bool),
            "rewards": torch.zeros(1),
        },
        batch_size=[1],
    )
    found: list[str] = samples(batch, tokenizer)["rows"][0]["tokens"]
    assert len(found) == len(ids)
    assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return found


def test_a_character_of_several_tokens_belongs_to_the_last_of_them() -> None:
    tokenizer = tiny.bpe(["ab ab"], vocab_size=260)  # hardly a merge: bytes
    ids = tokenizer.encode("a é 🙂!")
    assert pieces(tokenizer, ids) == ["a", " ", "", "é", " ", "", "", "", "🙂", "!"]


def test_tokens_that_end_within_a_character() -> None:
    tokenizer = tiny.bpe(["ab ab"], vocab_size=260)
    ids = tokenizer.encode("a🙂")
    assert pieces(tokenizer, ids[:-1]) == ["a", "", "", "\ufffd"]
    assert pieces(tokenizer, [ids[1], ids[0]]) == ["", "\ufffda"]


def test_special_tokens_are_shown() -> None:
    tokenizer = tiny.bpe(["the cat and the hat"])
    ids = [*tokenizer.encode("the hat"), tokenizer.eos_token_id]
    assert pieces(tokenizer, ids)[-1] == "<|im_end|>"


def made(model: Any, decoder: Any) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def test_sentencepiece() -> None:
    from tokenizers import decoders, models

    words = ["▁the", "▁c", "at", "<0xC3>", "<0xA9>", "▁", "s"]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    vocabulary = {word: place for place, word in enumerate(words)}
    tokenizer = made(models.BPE(vocabulary, [], byte_fallback=True), decoders.Sequence(steps))
    assert pieces(tokenizer, [0, 1, 2, 6, 5, 3, 4]) == ["the", " c", "at", "s", " ", "", "é"]
    assert pieces(tokenizer, [2, 0]) == ["at", " the"]


def test_a_tokenizer_of_another_kind() -> None:
    from tokenizers import decoders, models

    vocabulary = {"un": 0, "##like": 1, "##ly": 2, "it": 3, "is": 4}
    tokenizer = made(models.WordPiece(vocabulary, unk_token="un"), decoders.WordPiece())
    assert pieces(tokenizer, [3, 4, 0, 1, 2]) == ["it", " is", " un", "like", "ly"]


# --- with a real rollout, and in time


def test_samples_of_a_rollout() -> None:
    tasks = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(4)]
    with nrl.cluster("local") as cluster:
        sampler = hf.sampler(cluster.reserve(1), tiny.model(), nrl.Sampling(max_new_tokens=5))
        batch = nrl.rollout(sampler, single_turn(exact), tasks, n=4)
    record = samples(batch, sampler.tokenizer, n=16)
    assert sum(record["rewards"]["counts"]) == sum(record["lengths"]["counts"]) == 16
    assert len(record["rows"]) == 16
    for row in record["rows"]:
        assert row["prompt"] == tasks[row["group"]]["prompt"]
        assert len(row["tokens"]) == len(row["loss_mask"]) == len(row["rollout_logprobs"]) >= 1
        assert all(logprob < 0 for logprob in row["rollout_logprobs"])


def test_samples_take_a_fraction_of_decoding_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows are decoded, once as a text and once as tokens; and little else is done for each of the others."""
    size = 256
    generator = torch.Generator().manual_seed(0)
    tokenizer = tiny.bpe(["the cat and the hat"])
    batch = nrl.assign(
        nrl.Batch({}, batch_size=[size]),
        input_ids=torch.randint(3, len(tokenizer), (size, size), generator=generator),
        loss_mask=torch.ones(size, size, dtype=torch.bool),
        rewards=torch.rand(size, generator=generator),
        group_ids=torch.arange(size) // 8,
        advantages=torch.randn(size, size, generator=generator),
        rollout_logprobs=-torch.rand(size, size, generator=generator),
    )
    tokens = list[int]()

    def counted(name: str, of: Callable[..., Any]) -> Callable[..., Any]:
        def call(ids: Any, *args: Any, **options: Any) -> Any:
            tokens.append(sum(len(row) if isinstance(row, Sequence) else 1 for row in ids))
            return of(ids, *args, **options)

        return call

    for name in ("decode", "batch_decode", "convert_ids_to_tokens"):
        monkeypatch.setattr(tokenizer, name, counted(name, getattr(tokenizer, name)))
    samples(batch, tokenizer)
    assert sum(tokens) == 2 * 2 * size
    group: Any = batch[:8]  # the one that is shown
    others = calls(lambda: samples(batch, tokenizer)) - calls(lambda: samples(group, tokenizer))
    assert others < size * (size - 8) / 4


def test_a_secret_in_a_rollout_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct horse")
    written = json.dumps(redacted(samples(batch_of([("the correct horse", "say correct horse!")]), TOKENIZER)))
    assert "correct horse" not in written
    assert "correct horse" not in "".join(json.loads(written)["rows"][0]["tokens"])
    assert json.loads(written)["rows"][0]["prompt"] == "the ***"


def test_a_summary_of_no_rows_measures_nothing() -> None:
    mask = torch.zeros(0, 3, dtype=torch.bool)
    columns = {"rewards": torch.zeros(0), "loss_mask": mask, "env/turns": torch.zeros(0)}
    metrics = summary(Batch(columns, batch_size=[0]))
    found = finalize(metrics)
    assert {key for key, value in found.items() if math.isnan(value)} == {"reward", "length", "truncated", "env/turns"}
    assert (found["reward/max"], found["length/max"], found["invalid"], found["dropped"]) == (
        -math.inf,
        -math.inf,
        0,
        0,
    )
    some = {"rewards": torch.tensor([-2.0]), "loss_mask": torch.ones(1, 3, dtype=torch.bool)}
    rest = summary(Batch(some, batch_size=[1]))
    assert finalize(merge(metrics, rest))["reward/max"] == finalize(rest)["reward/max"] == -2.0


# --- what becomes of tokens


def tokens(batch: Batch) -> dict[str, float]:
    found = finalize(summary(batch))
    return {name.removeprefix("tokens/"): count for name, count in found.items() if name.startswith("tokens/")}


NOTHING = dict.fromkeys(("masked", "beyond", "invalid", "dropped"), 0)


def test_every_sampled_token_is_accounted_for(tmp_path: Path) -> None:
    """Trained, masked by the program, or in a group that was dropped; each answer has a token that ends it."""
    rows = [{"prompt": "1", "answer": "x"}, {"prompt": "2", "answer": "y"}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    scripted = Scripted(["3", "44", "5", "666"])

    def verify(task: Any, trace: Trace) -> float:
        return 1.0 if task["answer"] == "x" else float(len(trace.text))

    tasks = data.tasks(str(tmp_path / "tasks.jsonl"), shuffle=False, chat=False)
    batch = nrl.drop_uniform(nrl.rollouts(scripted, single_turn(verify), tasks, n=2)).take(1)[0]
    assert batch["sampled"].tolist() == [2, 4]
    batch = nrl.assign(batch, loss_mask=batch["loss_mask"] & (batch["input_ids"] != scripted.tokenizer.eos_token_id))
    assert tokens(batch) == NOTHING | {
        "sampled": 6 + 5,
        "trained": 1 + 3,
        "masked": 2,
        "dropped": 5,
        "dropped/uniform": 5,
    }


def test_tokens_of_failed_rows_are_accounted_for() -> None:
    def step(state: Any, turn: str) -> Step:
        return Step(state, reward=1.0 / (turn != "3"))

    with pytest.warns(UserWarning, match="1 of 2"):
        batch = nrl.rollout(Scripted(["3", "8888"]), Environment(lambda task: (0, "1"), step), [{}], n=2)
    assert tokens(batch) == NOTHING | {"sampled": 7, "trained": 5, "invalid": 2}
    assert finalize(summary(batch))["status/infra_error"] == 1


def test_a_row_cannot_be_trained_on_more_than_was_sampled() -> None:
    batch = nrl.rollout(Scripted(["3"]), single_turn(exact), [{"prompt": "1+2=", "answer": "3"}])
    batch = nrl.assign(batch, loss_mask=batch["attention_mask"])
    with pytest.raises(BatchError, match="row 0 is trained on its token 0, which the policy did not sample"):
        nrl.summary(batch)
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), tiny.model(), nrl.adamw(lr=1e-3))
        batch = nrl.assign(batch, advantages=torch.ones(batch["input_ids"].shape))
        with pytest.raises(BatchError, match=r"^train_step\(reinforce_loss\): row 0 is trained on its token 0, which"):
            trainer.train_step(reinforce_loss)(trainer.init(), batch)
    batch = nrl.Batch({name: value for name, value in batch.items() if name != "turns"}, batch_size=[1])
    with pytest.raises(MissingColumn, match="turns"):
        summary(batch)


@pytest.mark.parametrize("sampled", [1, 3])
def test_a_row_has_what_was_sampled_for_it(sampled: int) -> None:
    """One token and its end; a row may have fewer of them where a limit cut it off, and nowhere else."""
    batch = nrl.rollout(Scripted(["3"]), single_turn(exact), [{"prompt": "1+2=", "answer": "3"}])
    other = nrl.assign(batch, sampled=torch.tensor([sampled]))
    with pytest.raises(BatchError, match=f"row 0 has 2 tokens of the policy, and {sampled} were sampled for it; take"):
        summary(other)
    invalid = nrl.assign(other, valid=torch.tensor([False]))
    assert tokens(invalid) == NOTHING | {"sampled": sampled, "trained": 0, "invalid": sampled}


TASK = {"prompt": "1+2=", "answer": "3"}


def test_padding_has_no_tokens_of_the_policy() -> None:
    """The shorter of two batches is padded when they become one."""
    batches = [nrl.rollout(Scripted([text]), single_turn(exact), [TASK]) for text in ("3", "33333")]
    whole = nrl.batch.concatenate(batches)
    assert whole["sampled"].tolist() == [2, 6]
    assert tokens(whole) == NOTHING | {"sampled": 8, "trained": 8}


def test_tokens_beyond_the_context_are_accounted_for() -> None:
    """Of a sampler that looks at no context: its row was cut off, which is said."""
    scripted = Scripted(["33333"])
    scripted.context_length = 6
    batch = nrl.rollout(scripted, single_turn(exact), [{"prompt": "1+2=", "answer": "3"}])
    assert batch["truncated"].tolist() == [True]
    assert tokens(batch) == NOTHING | {"sampled": 6, "trained": 2, "beyond": 4}


@pytest.mark.parametrize(
    ("reason", "dropping"),
    [
        ("filtered", lambda stream: nrl.filtered(stream, lambda group: bool(group["rewards"][0]))),
        ("stale", lambda stream: nrl.fresh(stream, 0, SimpleNamespace(version=3))),
        ("uniform", lambda stream: nrl.drop_uniform(stream)),
    ],
)
def test_dropped_tokens_have_a_reason(reason: str, dropping: Any) -> None:
    def group(index: int) -> nrl.Batch:
        mask = torch.ones(2, 4, dtype=torch.bool)
        columns = {
            "rewards": torch.tensor([float(index), 0.0]),
            "version": torch.tensor([2 + index] * 2),
            "sampled": torch.tensor([4, 4]),
            "turns": mask.long() - 1,
            "loss_mask": mask,
        }
        return nrl.Batch(columns, batch_size=[2])

    [kept] = dropping(nrl.data.counting(group)).take(1)
    assert kept[f"dropped_tokens/{reason}"].tolist() == [8, 0]
    assert tokens(kept) == NOTHING | {"sampled": 16, "trained": 8, "dropped": 8, f"dropped/{reason}": 8}


def test_an_episode_that_forked_and_was_cut_counts_once() -> None:
    """Two groups; the second episode of the first has two rows, with 5 and 3 tokens, and was cut."""
    batch = nrl.Batch(
        {
            "rewards": torch.tensor([1.0, math.nan, math.nan, 0.0, 1.0]),
            "loss_mask": torch.zeros(5, 1, dtype=torch.bool),
            "turns": torch.zeros(5, 2, dtype=torch.int16),
            "valid": torch.tensor([True, False, False, True, True]),
            "cut": torch.tensor([False, True, True, False, False]),
            "sampled": torch.tensor([2, 5, 3, 2, 2]),
            "group_ids": torch.tensor([0, 0, 0, 1, 1]),
            "episode_ids": torch.tensor([0, 1, 1, 2, 3]),
        },
        batch_size=[5],
    )
    found = finalize(nrl.summary(batch))
    assert (found["cut"], found["cut/length"], found["cut/groups"], found["cut/share"]) == (1, 8, 0.5, 0.5)
    assert (found["tokens/cut"], found["tokens/invalid"], found["forks"]) == (8, 0, 1)


def test_tokens_of_rows_that_failed_and_were_dropped_are_counted() -> None:
    def group(index: int) -> nrl.Batch:
        columns = {
            "rewards": torch.tensor([1.0, math.nan if index == 0 else 0.0]),
            "valid": torch.tensor([True, index != 0]),
            "sampled": torch.tensor([4, 3]),
            "loss_mask": torch.zeros(2, 1, dtype=torch.bool),
            "turns": torch.tensor([[0, 0, 0, 0], [0, 0, 0, -1]]),
        }
        return nrl.Batch(columns, batch_size=[2])

    [kept] = nrl.drop_uniform(nrl.data.counting(group)).take(1)
    assert finalize(nrl.summary(kept))["tokens/dropped"] == 7


def test_numbers_of_several_dropped_groups_add_up() -> None:
    """Three are dropped, one of them by the transform within; each has one cut row, one left out, two asked again."""

    def group(index: int) -> nrl.Batch:
        columns = {
            "rewards": torch.tensor([1.0, math.nan if index < 3 else 0.0]),
            "valid": torch.tensor([True, index > 2]),
            "cut": torch.tensor([False, index < 3]),
            "left_out": torch.tensor([1, 0]),
            "asked_again": torch.tensor([1, 1]),
            "sampled": torch.tensor([4, 3]),
            "group_ids": torch.tensor([index, index]),
            "loss_mask": torch.zeros(2, 1, dtype=torch.bool),
            "turns": torch.tensor([[0, 0, 0, 0], [0, 0, 0, -1]]),
        }
        return nrl.Batch(columns, batch_size=[2])

    within = nrl.filtered(nrl.data.counting(group), lambda each: int(each["group_ids"][0]) != 0)
    [kept] = nrl.drop_uniform(within).take(1)
    found = finalize(nrl.summary(kept))
    assert (found["cut"], found["left_out"], found["asked_again"]) == (3, 4, 8)
    assert (found["dropped"], found["invalid"], found["tokens/dropped"]) == (3, 3, 21)
