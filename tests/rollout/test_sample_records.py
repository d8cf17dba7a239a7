"""Rows that are shown turn by turn: who wrote what, rewards, calls, messages, forks."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nrl
from nrl import tiny
from nrl.algos import advantages
from nrl.data import render
from nrl.data.templates import templated
from nrl.envs import Environment, Step, Trace, judged
from nrl.envs.tools import tool, tool_use
from nrl.rollout import rollout
from nrl.rollout.sample_records import samples
from nrl.rollout.transcripts import transcriber
from tests.chat_tokenizers import tokenizer as chat_tokenizer
from tests.rollout.scripted import Scripted
from tests.rollout.test_conversations import ASK, BYE, HMM, MORE, Chatty, add, called, right, two_turns

TOKENIZER = tiny.tokenizer()


def shown(batch: nrl.Batch, tokenizer: Any = TOKENIZER, n: int = 2) -> list[dict[str, Any]]:
    """The rows of a record; it is JSON without NaN, and what is true of every row is."""
    record = samples(batch, tokenizer, n)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    rows: list[dict[str, Any]] = record["rows"]
    for row in rows:
        parts, place = row["parts"], row["row"]
        end = (
            int(batch["attention_mask"][place].sum())
            if "attention_mask" in batch.keys()
            else len(batch["input_ids"][0])
        )
        assert [part["tokens"][0] for part in parts] == [0, *(part["tokens"][1] for part in parts)][: len(parts)]
        assert parts[-1]["tokens"][1] == end
        assert "".join(part["text"] for part in parts) == row["prompt"] + "".join(row["tokens"])
    return rows


def by_hand(text: str, wrote: str, **columns: Any) -> nrl.Batch:
    """One row; a letter of ``wrote`` is x where the policy wrote that of the text."""
    ids = torch.tensor([TOKENIZER.encode(text)])
    mask = torch.tensor([[letter == "x" for letter in wrote]])
    given = {"rewards": torch.zeros(1)} | {key: torch.tensor([value]) for key, value in columns.items()}
    return nrl.Batch({"input_ids": ids, "loss_mask": mask, **given}, batch_size=[1])


# --- who wrote what


def test_turns_by_hand() -> None:
    batch = by_hand("ask12how?345ok6", "   xx    xxx  x", token_rewards=[0.0] * 4 + [0.5, 0, 0.25] + [0.0] * 7 + [2.0])
    (row,) = shown(batch)
    assert row["parts"] == [
        {"role": "prompt", "tokens": [0, 3], "text": "ask"},
        {"role": "policy", "tokens": [3, 5], "text": "12", "reward": 0.75},  # until the next turn
        {"role": "environment", "tokens": [5, 9], "text": "how?"},
        {"role": "policy", "tokens": [9, 12], "text": "345", "reward": 0.0},
        {"role": "environment", "tokens": [12, 14], "text": "ok"},
        {"role": "policy", "tokens": [14, 15], "text": "6", "reward": 2.0},
    ]


@pytest.mark.parametrize(
    ("wrote", "roles"),
    [
        ("xxx", ["policy"]),
        ("   ", ["prompt"]),
        ("x x", ["policy", "environment", "policy"]),
        ("xx ", ["policy", "environment"]),
        (" x ", ["prompt", "policy", "environment"]),
    ],
)
def test_a_row_may_begin_and_end_with_anybody(wrote: str, roles: list[str]) -> None:
    (row,) = shown(by_hand("123", wrote))
    assert [part["role"] for part in row["parts"]] == roles


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 2**32))
def test_parts_are_those_of_a_slow_loop(wrote: list[bool], seed: int) -> None:
    rewards = torch.rand(len(wrote), generator=torch.Generator().manual_seed(seed)).tolist()
    (row,) = shown(by_hand("abcdefghijkl"[: len(wrote)], "".join(" x"[each] for each in wrote), token_rewards=rewards))
    expected: list[list[Any]] = []
    for place, policy in enumerate(wrote):
        if not expected or expected[-1][0] != policy:
            expected.append([policy, "", 0.0])
        expected[-1][1] += "abcdefghijkl"[place]
        turn = [each for each in expected if each[0]][-1:]  # the last that began, whoever writes now
        if turn:
            turn[0][2] += rewards[place]
    assert [(part["role"] == "policy", part["text"]) for part in row["parts"]] == [
        (each[0], each[1]) for each in expected
    ]
    for part, each in zip(row["parts"], expected, strict=True):
        assert part.get("reward") == (pytest.approx(each[2], rel=1e-5) if each[0] else None)


@pytest.mark.parametrize(
    ("columns", "texts"),
    [
        # As the mask says, where nothing else does; it is cleared where the row is invalid
        ({}, ["1234567"]),
        ({"turns": [-1, 0, 0, -1, 1, 1, -1]}, ["1", "23", "4", "56", "7"]),
        ({"turns": [-1, 0, 0, 1, 1, 2, 2]}, ["1", "23", "45", "67"]),  # with nothing between
    ],
)
def test_what_was_sampled_is_known_where_the_mask_is_cleared(columns: dict[str, Any], texts: list[str]) -> None:
    (row,) = shown(by_hand("1234567", " " * 7, valid=False, **columns))
    assert [part["text"] for part in row["parts"]] == texts
    assert row["loss_mask"] == [False] * len(row["tokens"])


def test_a_token_that_the_program_masked_is_still_the_policys() -> None:
    (row,) = shown(by_hand("12345", " x   ", turns=[-1, 0, 0, -1, 1]))
    assert [part["text"] for part in row["parts"]] == ["1", "23", "4", "5"]
    assert row["loss_mask"] == [True, False, False, False]
    (row,) = shown(by_hand("12345", " x   "))
    assert [part["text"] for part in row["parts"]] == ["1", "2", "345"]


def test_turns_that_follow_one_another_have_a_reward_each() -> None:
    (row,) = shown(by_hand("12345", " xxxx", turns=[-1, 0, 0, 1, 1], token_rewards=[0.0, 0.0, 0.5, 0.0, 2.0]))
    assert [(part["text"], part.get("reward")) for part in row["parts"]] == [("1", None), ("23", 0.5), ("45", 2.0)]


def test_the_turns_of_a_rollout() -> None:
    said = ["2", "9", "x", "5", "4"]

    def step(state: int, turn: str) -> Step:
        reward = {"digit": float(turn.isdigit()), "low": -0.5 * (turn < "5")}
        return Step(state + 1, reward, done=turn > "4" or state == 1, observation="again:", info={"tries": state})

    env = judged(Environment(lambda task: (0, task["prompt"]), step), lambda task, trace: {"end": len(trace.turns)})
    batch = advantages(rollout(Scripted(said), env, [{"prompt": "go"}, {"prompt": "now"}], n=2))
    rows = shown(batch, n=4)
    assert [row["row"] for row in rows] == [0, 1, 2, 3]  # the first group's best is the one with two turns
    best = rows[0]
    assert [(part["role"], part["text"], part.get("reward", "none")) for part in best["parts"]] == [
        ("prompt", "go", "none"),
        ("policy", "2<eos>", 0.5),
        ("environment", "again:", "none"),
        ("policy", "4<eos>", 2.5),
    ]
    assert best["reward"] == 3.0
    assert best["components"] == {"digit": 2.0, "low": -1.0, "end": 2.0}
    turns = {"digit": 1.0, "low": -0.5}, {"digit": 1.0, "low": -0.5, "end": 2.0}
    assert [part.get("components") for part in best["parts"]] == [None, turns[0], None, turns[1]]
    assert best["env"] == {"tries": 1.0}
    assert (best["status"], best["truncated"], best["episode"]) == ("ok", False, 0)
    assert "fork" not in best
    assert rows[1]["components"] == {"digit": 1.0, "low": 0.0, "end": 1.0}


@pytest.mark.parametrize(("names", "source"), [((), 1), (("sums", "words"), "words"), (("sums",), 1)])
def test_a_row_says_which_source_it_is_of(names: tuple[str, ...], source: str | int) -> None:
    batch = by_hand("go12", "  xx", source=1)
    (row,) = samples(batch, TOKENIZER, names=names)["rows"]
    assert row["source"] == source
    assert "source" not in samples(by_hand("go12", "  xx"), TOKENIZER)["rows"][0]


def test_the_rewards_of_a_failed_row_are_none() -> None:
    def step(state: int, turn: str) -> Step:
        return Step(1, 1.0 / (state == 0), False, "more")

    env = Environment(lambda task: (0, "1"), step)
    with pytest.warns(UserWarning, match="1 of 1"):
        batch = rollout(Scripted(["2", "3"]), env, [{}])
    (row,) = shown(batch)
    assert [(part["text"], part.get("reward", "none")) for part in row["parts"]] == [
        ("1", "none"),
        ("2<eos>", None),
        ("more", "none"),
        ("3<eos>", None),
    ]
    assert (row["reward"], row["status"], row["valid"]) == (None, "infra_error", False)


def test_a_row_that_was_cut_says_so() -> None:
    (row,) = shown(by_hand("123", " xx", cut=True, truncated=False))
    assert (row["cut"], row["truncated"]) == (True, False)


def test_the_components_of_a_turn_are_those_that_its_step_named() -> None:
    """A name of one turn alone; a turn without any; an episode of fewer turns, and one that failed in its second."""
    named: list[dict[str, float]] = [{"first": 0.5}, {}, {"last": 2.0, "bonus": 0.25}]

    def step(state: tuple[int, int], turn: str) -> Step:
        turns, at = state
        if at == 1 and turn == "x":
            raise ValueError
        return Step((turns, at + 1), named[at] or 0.0, done=at + 1 == turns, observation="more")

    env = Environment(lambda task: ((task["turns"], 0), "1"), step)
    with pytest.warns(UserWarning, match="1 of 3"):
        batch = rollout(Scripted(["2", "3", "x", "4", "x", "5"]), env, [{"turns": 3}, {"turns": 1}, {"turns": 2}])
    assert {str(name) for name in batch["components"].keys()} == {"bonus", "first", "last"}
    whole, short, failed = sorted(shown(batch, n=3), key=lambda row: row["row"])
    assert [part["components"] for part in whole["parts"][1::2]] == named
    assert whole["components"] == {"first": 0.5, "last": 2.0, "bonus": 0.25}
    assert [part["components"] for part in short["parts"][1::2]] == [{"first": 0.5}]
    assert [(part["components"], part["reward"]) for part in failed["parts"][1::2]] == [({}, None)] * 2
    for part in nrl.shard(batch, 3):  # a column by turns goes with its rows
        (row,) = shown(part)
        assert [each.get("components") for each in row["parts"][1::2]] in (named, [{"first": 0.5}], [{}, {}])


def test_the_components_of_turns_in_the_rows_of_a_fork() -> None:
    """A later row has the components of its own turns; the first turn is a part of its prompt."""
    sampler = Chatty("qwen3", [HMM, "Bye<|im_end|>"])

    def step(state: int, turn: str) -> Step:
        return Step(state + 1, {f"turn {state}": 1.0 + state}, done=state == 1, observation=MORE)

    rows = shown(rollout(sampler, Environment(lambda task: (0, ASK), step), [{}]), sampler.tokenizer)
    assert [row["fork"] for row in rows] == [0, 1]
    found = [[part["components"] for part in row["parts"] if part["role"] == "policy"] for row in rows]
    assert found == [[{"turn 0": 1.0}], [{"turn 1": 2.0}]]
    assert [row["components"] for row in rows] == [{"turn 0": 1.0, "turn 1": 2.0}] * 2


def test_several_rewards_have_none_by_turn() -> None:
    env = Environment(lambda task: (0, "1"), lambda state, turn: Step(1, (1.0, 2.0), state == 1, "more"))
    (row,) = shown(rollout(Scripted(["2", "3"]), env, [{}]))
    assert row["reward"] == [2.0, 4.0]
    assert all("reward" not in part for part in row["parts"])


# --- calls and messages


def test_calls_and_their_results() -> None:
    first = f"<think>\nHmm\n</think>\n\nWait.{called('add', a=2, b=3)}\n{called('add', a=[1])}\n<tool_call>no<|im_end|>"
    sampler = Chatty("qwen3", [first, "<think>\n\n</think>\n\nIt is 5.<|im_end|>"])
    batch = rollout(sampler, tool_use([tool(add)], right), [{"prompt": "2+3=", "answer": "5"}])
    (row,) = shown(batch, sampler.tokenizer)
    prompt, one, results, two = row["parts"]
    assert [message["role"] for message in prompt["messages"]] == ["system", "user"]
    assert prompt["messages"][1]["content"] == "2+3="
    assert one["text"] == first
    assert (one["content"], one["reasoning"]) == ("Wait.", "Hmm")
    assert one["calls"] == [
        {"name": "add", "arguments": {"a": 2, "b": 3}},
        {"name": "add", "arguments": {"a": [1]}},
    ]
    assert [each["text"] for each in one["malformed"]] == ["<tool_call>no"]
    assert "JSON" in one["malformed"][0]["reason"]
    assert [message["role"] for message in results["messages"]] == ["tool"] * 3
    assert results["messages"][0]["content"] == "5"
    assert "add was not called" in results["messages"][1]["content"]
    assert (two["content"], two["calls"], two["reasoning"], two["reward"]) == ("It is 5.", [], "", 1.0)
    assert row["env"]["tools/calls"] == 3.0


CALL = {"id": "call_0", "type": "function", "function": {"name": "find", "arguments": {"q": "x"}}}
TALK = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": "Hi\n\nHello?"},
    {"role": "assistant", "content": "Bye"},
    {"role": "user", "content": "And?"},
]


@pytest.mark.parametrize("name", ["chatml", "qwen2_5", "qwen3", "qwen3_5_think", "llama3"])
def test_messages_of_a_prompt(name: str) -> None:
    assert messages(name, TALK) == TALK


def test_messages_of_templates_that_write_more() -> None:
    found = messages("llama3_1", TALK)
    assert found is not None
    assert found[0]["content"].endswith("Be <b>brief</b>.")  # behind the date
    assert found[1:] == TALK[1:]
    assert messages("gemma3", TALK) == [{"role": "user", "content": "Be <b>brief</b>.\n\nHi\n\nHello?"}, *TALK[2:]]
    assert messages("deepseekv3", TALK[1:]) == TALK[1:]
    thought = {"role": "assistant", "content": "<think></think>\nBye"}
    assert messages("glm4moe", TALK) == [*TALK[:2], thought, *TALK[3:]]
    # Words that are no message's, or a template that is not known: the text is as it is
    assert messages("deepseekv3", TALK) is None
    assert messages("gptoss", TALK) is None


def messages(name: str, talk: Any) -> Any:
    """What is found in the prompt of these messages."""
    of = chat_tokenizer(name)
    ids = torch.tensor([render(talk, of)])
    (part,) = transcriber(of)({"input_ids": ids, "loss_mask": torch.zeros_like(ids, dtype=torch.bool)}, 0).parts
    return part.get("messages")


QWEN = "<|im_start|>user\n<tool_response>"
RESULTS = {
    **dict.fromkeys(("qwen2_5", "qwen3", "qwen3_5_think"), QWEN),
    "llama3_1": "<|start_header_id|>ipython",
    "glm4moe": "<|observation|>",
    "deepseekv3": "<｜tool▁outputs▁begin｜>",
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_of_tools(name: str) -> None:
    of = chat_tokenizer(name)
    call: Any = CALL if name != "deepseekv3" else {**CALL, "function": {"name": "find", "arguments": '{"q": "x"}'}}
    talk: Any = [TALK[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    result: Any = {"role": "tool", "content": "ok", "tool_call_id": "call_0"}
    whole = templated([*talk, result], of, asking=True)
    ids = torch.tensor([of.encode(whole, add_special_tokens=False)])
    first = len(of.encode(whole[: whole.rindex(RESULTS[name])], add_special_tokens=False))
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, first - 5 : first] = True
    part = transcriber(of)({"input_ids": ids, "loss_mask": mask}, 0).parts[-1]
    assert (part["role"], part["tokens"]) == ("environment", [first, ids.shape[1]])
    assert [(each["role"], each["content"].strip('"')) for each in part["messages"]] == [("tool", "ok")]


def test_plain_text_has_no_messages_and_no_calls() -> None:
    env = Environment(lambda task: (0, "1"), lambda state, turn: Step(1, 0.0, state == 1, "<tool_response>x"))
    sampler = Chatty("qwen3", ["2<|im_end|>", "3<|im_end|>"])
    (row,) = shown(rollout(sampler, env, [{}]), sampler.tokenizer)
    assert all("messages" not in part for part in row["parts"])
    (row,) = shown(by_hand("<|im_start|>user\nx12", " " * 19 + "x"))
    assert all(part.keys() == {"role", "tokens", "text"} for part in row["parts"])  # it has no chat template


def test_reasoning_that_the_prompt_opened() -> None:
    sampler = Chatty("qwen3_5_think", ["Hmm\n</think>\n\nHello<|im_end|>"])
    batch = rollout(sampler, Environment(lambda task: (0, ASK), lambda state, turn: Step(1)), [{}])
    (row,) = shown(batch, sampler.tokenizer)
    assert (row["parts"][1]["reasoning"], row["parts"][1]["content"]) == ("Hmm", "Hello")
    cut = Chatty("qwen3_5_think", ["Hmm"])
    batch = rollout(cut, Environment(lambda task: (0, ASK), lambda state, turn: Step(1)), [{}])
    (row,) = shown(batch, cut.tokenizer)
    assert (row["parts"][1]["reasoning"], row["parts"][1]["content"]) == ("Hmm", "")


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ('{"x": NaN, "y": [Infinity, 1e400, -1.5]}', {"x": None, "y": [None, None, -1.5]}),
        ('{"x": ' + "[" * 900 + "]" * 900 + "}", None),
        ('{"x": ' + '{"a":' * 300 + "1" + "}" * 300 + "}", None),
    ],
)
def test_arguments_are_json_however_odd(arguments: str, kept: Any) -> None:
    sampler = Chatty("qwen3", [f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call><|im_end|>'])
    env = Environment(lambda task: (0, ASK), lambda state, turn: Step(1))
    (row,) = shown(rollout(sampler, env, [{}]), sampler.tokenizer)
    (call,) = row["parts"][1]["calls"]
    if kept is not None:
        assert call["arguments"] == kept
    depth, value = 0, call["arguments"]
    while isinstance(value, dict | list):
        depth, value = depth + 1, next(iter(value.values() if isinstance(value, dict) else value), None)
    assert depth <= 17


# --- forks


def test_the_rows_of_an_episode_are_next_to_one_another() -> None:
    """The best of the group forked, and lies behind the one that did not."""

    def verify(task: Any, trace: Trace) -> float:
        return 1.0 + ("Hmm" in trace.turns[0].text) if "Hmm" in trace.turns[0].text else 0.5

    sampler = Chatty("qwen3", ["Hello<|im_end|>", HMM, "Hi<|im_end|>", "Bye<|im_end|>", BYE, "Bye<|im_end|>"])
    batch = rollout(sampler, judged(two_turns(), verify), [{}], n=3)
    assert batch["episode_ids"].tolist() == [0, 1, 1, 2]
    rows = shown(batch, sampler.tokenizer, n=2)
    assert [(row["row"], row["episode"], row.get("fork"), row.get("forks")) for row in rows] == [
        (1, 1, 0, 1),
        (2, 1, 1, 1),
        (0, 0, None, None),
    ]
    first, second, _ = rows
    assert first["shared"] == 0
    one, two = (batch["input_ids"][row].tolist() for row in (1, 2))
    assert second["shared"] == next(at for at, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1])
    assert second["shared"] > 10
    assert [part["role"] for part in second["parts"]] == ["prompt", "policy"]
    assert first["parts"][1]["reasoning"] == "Hmm"
    assert first["parts"][1]["reward"] == 0.0
    assert second["parts"][1]["reward"] == second["reward"] == 2.0
    assert second["parts"][0]["messages"] == [*ASK, {"role": "assistant", "content": "Hello"}, *MORE]
    assert len(shown(batch, sampler.tokenizer, n=1)) == 2
    assert len(shown(batch, sampler.tokenizer, n=9)) == 4


def test_what_a_fork_shares_is_the_most_of_all_earlier_rows() -> None:
    """Padding is not shared, nor is what rows of other episodes have."""
    texts = ["abcd", "abxyz", "abxq", "abxyzzz", "ab"]
    ids = torch.zeros(5, 7, dtype=torch.int64)
    real = torch.zeros(5, 7, dtype=torch.bool)
    for place, text in enumerate(texts):
        ids[place, : len(text)], real[place, : len(text)] = torch.tensor(TOKENIZER.encode(text)), True
    columns = {"input_ids": ids, "attention_mask": real, "loss_mask": real, "rewards": torch.zeros(5)}
    batch = nrl.Batch({**columns, "episode_ids": torch.tensor([1, 1, 1, 2, 1])}, batch_size=[5])
    rows = shown(batch, n=9)
    assert [(row["row"], row.get("fork"), row.get("shared")) for row in rows] == [
        (0, 0, 0),
        (1, 1, 2),  # ab
        (2, 2, 3),  # abx, of the second
        (4, 3, 2),
        (3, None, None),
    ]


def test_an_episode_counts_once_in_the_histograms() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False], [True, False, False]])
    columns = {
        "input_ids": mask.long() + 5,
        "loss_mask": mask,
        "rewards": torch.tensor([1.0, 1.0, 0.0, math.nan]),
        "valid": torch.tensor([True, True, True, False]),
        "episode_ids": torch.tensor([7, 7, 3, 1]),
    }
    record = samples(nrl.Batch(columns, batch_size=[4]), TOKENIZER)
    assert record["rewards"] == {"low": 0.0, "high": 1.0, "counts": [1] + [0] * 18 + [1]}
    assert record["lengths"] == {"low": 1.0, "high": 5.0, "counts": [1] + [0] * 18 + [1]}


# --- secrets


def test_a_secret_across_two_parts_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct horse")
    for wrote in ("  xxxxxxxxx     ", "  xxxxx  xxxx   ", "      xxxx      "):
        text = json.dumps(samples(by_hand("a correct horse!", wrote), TOKENIZER)["rows"][0]["parts"])
        assert "***" in text
        assert "correct" not in text
        assert "orse" not in text
