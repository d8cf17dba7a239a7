"""Mixtures and length filters."""

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nrl
from nrl import batched, data, tiny
from nrl.backends import hf
from nrl.data import Source, counting
from nrl.data.mixtures import _CIRCLE, _STEP, _count_below
from nrl.envs import exact, single_turn
from nrl.errors import DataError
from tests.draws import draws

CHARS = tiny.tokenizer()
CHATS = tiny.bpe(["user assistant"], vocab_size=280)


def letters(text: str, seed: int = 0) -> data.Tasks:
    return data.tasks([{"prompt": letter} for letter in text], seed=seed, chat=False)


def mixed(weights: list[float], seed: int = 0) -> data.Tasks:
    return data.mixture({str(n): (letters(f"{n}"), weight) for n, weight in enumerate(weights)}, seed=seed)


WEIGHTS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6)


@settings(max_examples=draws(100))
@given(WEIGHTS, st.integers(0, 100), st.integers(0, 10**12), st.integers(0, 2000))
def test_any_window_has_each_stream_as_often_as_its_weight_says(
    weights: list[float], seed: int, cursor: int, n: int
) -> None:
    stream = mixed(weights, seed)
    stream.restore({"cursor": cursor})
    counts = Counter(task["source"] for task in stream.take(n))
    for number, weight in enumerate(weights):
        assert abs(counts[number] - n * weight / sum(weights)) < 6


@given(st.integers(0, 300), st.integers(0, _CIRCLE), st.integers(0, _CIRCLE - 1))
def test_what_was_given_is_counted_as_a_loop_counts_it(draws: int, end: int, offset: int) -> None:
    assert _count_below(draws, end, offset) == sum((offset + k * _STEP) % _CIRCLE < end for k in range(draws))


@pytest.mark.parametrize("exponent", [3, 6, 9, 12, 15, 18])
def test_proportions_are_exact_over_long_runs(exponent: int) -> None:
    for share in (0.5, 0.3, 0.001, 0.123456789):
        given_so_far = _count_below(10**exponent, int(Fraction(share) * _CIRCLE), 12345 << 64)
        assert abs(given_so_far - Fraction(share) * 10**exponent) < 4


@settings(max_examples=draws(100))
@given(WEIGHTS, st.integers(0, 10), st.lists(st.integers(0, 20), max_size=6))
def test_a_mixture_is_a_function_of_its_cursor(weights: list[float], seed: int, takes: list[int]) -> None:
    def made() -> data.Tasks:
        streams: Any = {str(n): (letters("abcdefg", seed=n), weight) for n, weight in enumerate(weights)}
        return data.mixture(streams, seed=seed)

    apart, whole = made(), made().take(sum(takes) + 9)
    pieces = [task for n in takes for task in apart.take(n)]
    assert pieces == whole[: sum(takes)]
    state = json.loads(json.dumps(apart.state()))
    assert state["cursor"] == sum(takes)
    again = made()
    again.take(3)
    again.restore(state)
    assert again.take(9) == apart.take(9) == whole[sum(takes) :]


def test_every_stream_keeps_its_own_order_and_epochs() -> None:
    one, two = letters("abcdefgh", seed=5), letters("xyz", seed=6)
    drawn = data.mixture({"one": (one, 2), "two": (two, 1)}, seed=3).take(300)
    for number, alone in enumerate([letters("abcdefgh", seed=5), letters("xyz", seed=6)]):
        own = [task["prompt"] for task in drawn if task["source"] == number]
        assert own == [task["prompt"] for task in alone.take(len(own))]


def test_the_seed_sets_the_order_of_the_draws() -> None:
    orders = {tuple(task["source"] for task in mixed([1, 1, 2], seed).take(40)) for seed in range(5)}
    assert len(orders) == 5


def test_sources_are_made_where_only_a_weight_is_given(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "b"}\n')
    stream = data.mixture({str(path): 1, "arithmetic": 3}, seed=2)
    assert stream.names == (str(path), "arithmetic")
    tasks = stream.take(8)
    sums = [task for task in tasks if task["source"] == 1]
    expected = [{**task, "source": 1} for task in data.tasks("arithmetic", seed=2).take(len(sums))]
    assert sums == expected
    assert Counter(task["source"] for task in tasks) == {0: 2, 1: 6}


def test_the_source_becomes_a_column() -> None:
    sums = data.tasks([{"prompt": "1+1=", "answer": "2"}], chat=False)
    stream = data.mixture({"one": (sums, 1), "arithmetic": 1})
    with nrl.cluster("local") as cluster:
        sampler = hf.sampler(cluster.reserve(1), tiny.model(), nrl.Sampling(max_new_tokens=2))
        groups = nrl.rollouts(sampler, single_turn(exact), stream, n=2)
        batch = batched(groups, 4).take(1)[0]
        state = groups.state()
    sources = [task["source"] for task in data.mixture({"one": (sums, 1), "arithmetic": 1}).take(4)]
    assert batch["source"].tolist() == [each for each in sources for _ in range(2)]
    assert state["tasks"] == {"cursor": 4, "data": [sums.state()["data"], None]}


def test_what_was_dropped_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "a" * n} for n in range(1, 9)]
    streams = [data.tasks(rows, chat=False, tokenizer=CHARS, max_tokens=most) for most in (4, 6)]
    assert data.mixture({"a": (streams[0], 1), "b": (streams[1], 1)}).dropped == {"max_tokens": 6}
    capsys.readouterr()


@pytest.mark.parametrize(
    ("streams", "match"),
    [
        ({}, "mixture: there are no streams; give at least one"),
        ({"a": 0}, "mixture: the weight of 'a' is 0; it must be a positive number"),
        ({"a": (letters("a"), -1.0)}, "mixture: the weight of 'a' is -1.0"),
        ({"a": (letters("a"), float("nan"))}, "mixture: the weight of 'a' is nan"),
        ({"a": (letters("a"), float("inf"))}, "mixture: the weight of 'a' is inf"),
        ({"a": "3"}, "mixture: the weight of 'a' is '3'"),
        ({"a": True}, "mixture: the weight of 'a' is True"),
        ({"a": letters("a")}, "mixture: the weight of 'a' is Tasks"),
        ({"no.jsonl": 1}, "tasks: 'no.jsonl' is neither a file"),
        (
            {"a": (Source(lambda n: [], lambda: {"source": {}, "pending": []}, lambda state: None), 1)},
            r"mixture: the state of the stream 'a' is more than a cursor \(source, pending\)",
        ),
    ],
)
def test_mixtures_that_cannot_be_made(streams: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        data.mixture(streams)


def test_a_mixture_checks_what_it_is_given() -> None:
    with pytest.raises(DataError, match="mixture: seed is -1; it must be an integer"):
        data.mixture({"a": (letters("a"), 1)}, seed=-1)
    with pytest.raises(DataError, match=r"mixture: take\(-1\); the number of items cannot be negative"):
        mixed([1]).take(-1)
    for state in ({}, {"cursor": -1}, {"cursor": True}, {"cursor": 1.0}, None):
        with pytest.raises(DataError, match=r"mixture: restore\(.*\); give what state\(\) returned"):
            mixed([1]).restore(state)  # type: ignore[arg-type]
    assert data.mixture({"a": (counting(lambda n: {"n": n}), 1)}).take(2) == [
        {"n": 0, "source": 0},
        {"n": 1, "source": 0},
    ]


# length filters


def test_long_prompts_are_left_out_and_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a" * n}) + "\n" for n in range(1, 11)))
    stream = data.tasks(path, chat=False, tokenizer=CHARS, max_tokens=7)
    assert capsys.readouterr().out == f"data: 3 of 10 rows of {path} have more than 7 tokens and are left out\n"
    assert (stream.size, stream.dropped) == (7, {"max_tokens": 3})
    assert sorted(len(task["prompt"]) for task in stream.take(14)) == [n for n in range(1, 8) for _ in range(2)]
    assert capsys.readouterr().out == ""


def test_nothing_is_said_where_all_rows_fit(capsys: pytest.CaptureFixture[str]) -> None:
    stream = data.tasks([{"prompt": "ab"}], chat=False, tokenizer=CHARS, max_tokens=2)
    assert (stream.dropped, capsys.readouterr().out) == ({"max_tokens": 0}, "")


@pytest.mark.parametrize(
    ("row", "collate", "tokens"),
    [
        ({"prompt": "abc", "response": "de"}, None, 3),
        ({"prompt": "abc", "response": "de"}, data.supervised, 6),  # with the end of sequence
        ({"prompt": "abc", "chosen": "d", "rejected": "efgh"}, data.preferences, 8),
        ({"prompt": "abc", "chosen": "defg", "rejected": "h"}, data.preferences, 8),
    ],
)
def test_what_becomes_of_a_row_is_what_counts(row: Any, collate: Any, tokens: int) -> None:
    options: Any = {"chat": False, "tokenizer": CHARS, "collate": collate}
    assert data.tasks([row], max_tokens=tokens, **options).size == 1
    with pytest.raises(
        DataError, match=f"tasks: 1 of 1 rows of the source have more than {tokens - 1} tokens, so none is left; raise"
    ):
        data.tasks([row], max_tokens=tokens - 1, **options)


def test_chats_are_counted_as_they_are_rendered() -> None:
    row = {"messages": [{"role": "user", "content": "user"}, {"role": "assistant", "content": "assistant"}]}
    prompt = len(data.render(row["messages"][:1], CHATS))
    assert data.tasks([row], tokenizer=CHATS, max_tokens=prompt).size == 1
    with pytest.raises(DataError, match="so none is left"):
        data.tasks([row], tokenizer=CHATS, max_tokens=prompt, collate=data.supervised)
    whole = prompt + len(CHATS.encode("assistant")) + 1
    assert data.tasks([row], tokenizer=CHATS, max_tokens=whole, collate=data.supervised).size == 1


def test_filters_need_both_and_name_the_row() -> None:
    with pytest.raises(DataError, match="tasks: to leave long rows out, give both .*; tokenizer is missing"):
        data.tasks([{"prompt": "a"}], max_tokens=3)
    with pytest.raises(DataError, match="tasks: to leave long rows out, give both .*; max_tokens is missing"):
        data.tasks([{"prompt": "a"}], tokenizer=CHARS)
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a"}]
    with pytest.raises(DataError, match="tasks: row 1: supervised: row 0 has no 'response'; it has prompt"):
        data.tasks(rows, chat=False, tokenizer=CHARS, max_tokens=9, collate=data.supervised)


# --- an epoch, for an evaluation


@settings(max_examples=draws(100))
@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 10.0)), min_size=1, max_size=4), st.integers(1, 60))
def test_an_epoch_of_a_mixture_has_no_row_twice(parts: list[tuple[int, float]], most: int) -> None:
    streams = {
        str(number): (letters("abcdefghi"[:size], seed=number), weight) for number, (size, weight) in enumerate(parts)
    }
    taken = data.epoch(data.mixture(streams), most)
    names = [(task["source"], task["prompt"]) for task in taken]
    assert len(set(names)) == len(names) == min(most, sum(size for size, _ in parts))


def test_an_epoch_of_a_mixture_ends_where_all_its_sources_do() -> None:
    finite = data.mixture({"a": (letters("abc"), 100), "b": (letters("de"), 1)})
    assert sorted(task["prompt"] for task in data.epoch(finite)) == list("abcde")
    endless = data.mixture({"a": (letters("abc"), 1), "arithmetic": 1})
    assert Counter(task["source"] for task in data.epoch(endless, 40)) == {0: 3, 1: 37}
    with pytest.raises(DataError, match="epoch: arithmetic has no end; say how many tasks, as most="):
        data.epoch(endless)
