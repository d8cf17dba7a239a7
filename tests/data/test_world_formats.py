"""Formats of rows that many datasets share."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nrl import data
from nrl.errors import DataError
from tests.chat_tokenizers import tokenizer

ASK = {"role": "user", "content": "Hello"}
BYE = {"role": "assistant", "content": "Bye"}


def one(format: str, row: dict[str, Any], **options: Any) -> dict[str, Any]:
    (found,) = data.rows([row], format=format, **options)
    return dict(found)


def taught(row: dict[str, Any]) -> str:
    of = tokenizer("chatml")
    batch = data.supervised([row], of)
    return str(of.decode(batch["input_ids"][0][batch["loss_mask"][0]]))


SCHEMA = {"name": "find", "description": "Find it.", "parameters": {"type": "object", "properties": {}}}
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "Hello"},
        {"from": "function_call", "value": '{"name": "find", "arguments": {"q": "Hi"}}'},
        {"from": "observation", "value": "21"},
        {"from": "gpt", "value": "Bye"},
    ],
    "system": "Be brief",
    "tools": json.dumps([SCHEMA]),
    "id": 7,
}


def test_sharegpt() -> None:
    row = one("sharegpt", SHAREGPT)
    assert taught(row) == '<tool_call>\n{"name": "find", "arguments": {"q": "Hi"}}\n</tool_call><|im_end|>Bye<|im_end|>'
    assert [message["role"] for message in row["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in row["prompt"]] == ["system", "user", "assistant", "tool"]
    assert (row["id"], row["tools"]) == (7, [{"type": "function", "function": SCHEMA}])
    chat = [
        {"from": "system", "value": "Be brief"},
        {"from": "human", "value": "Hello"},
        {"from": "gpt", "value": "Bye"},
    ]
    for key, value in (("conversations", chat), ("conversation", chat), ("conversations", json.dumps(chat))):
        assert taught(one("sharegpt", {key: value})) == "Bye<|im_end|>"


def test_formats_follow_each_other() -> None:
    rows = data.rows([SHAREGPT], format="sharegpt+turns")
    assert [taught(dict(row)).count("<|im_end|>") for row in rows] == [1, 1]
    assert all(row["prompt"][0]["content"] == "Be brief" for row in rows)
    with pytest.raises(DataError, match="tasks: there is no format 'turn'; there are gsm8k, "):
        data.tasks([SHAREGPT], format="sharegpt+turn")
    with pytest.raises(DataError, match="tasks: row 0: turns: the row has no 'messages'; it has conversations"):
        data.tasks([SHAREGPT], format="turns")


def test_alpaca() -> None:
    row = {"instruction": "Add.", "input": "1 and 1", "output": "2"}
    assert one("alpaca", row, chat=False) == {"prompt": "Add.\n\n1 and 1", "response": "2"}
    for nothing in (None, ""):
        assert one("alpaca", row | {"input": nothing, "system": nothing}, chat=False)["prompt"] == "Add."
    told = one("alpaca", row | {"system": "Be brief", "history": [["Hello", "Bye"]]})["prompt"]
    expected = [{"role": "system", "content": "Be brief"}, ASK, BYE, {"role": "user", "content": "Add.\n\n1 and 1"}]
    assert told == expected
    assert taught(one("alpaca", row)) == "2<|im_end|>"


def test_prompt_completion() -> None:
    for prompt, completion in (("Hello", "Bye"), ([ASK], [BYE]), ([ASK], "Bye")):
        row = one("prompt_completion", {"prompt": prompt, "completion": completion, "id": 7})
        assert (row["prompt"], row["response"], row["id"]) == ([ASK], completion, 7)
        assert taught(row) == "Bye<|im_end|>"


HH = "\n\nHuman: Hello\n\nAssistant: Hi: what?\n\nHuman: Thanks\n\nHuman notes\n\nAssistant:"


def test_hh() -> None:
    row = one("hh", {"chosen": HH + " Bye", "rejected": HH})
    asked = [ASK, {"role": "assistant", "content": "Hi: what?"}, {"role": "user", "content": "Thanks\n\nHuman notes"}]
    assert row == {"prompt": asked, "chosen": [BYE], "rejected": [{"role": "assistant", "content": ""}]}
    other = "\n\nHuman: Hello\n\nAssistant: Hi: what?\n\nHuman: No\n\nAssistant: Bye"
    row = one("hh", {"chosen": HH + " Bye", "rejected": other})  # they part where the human speaks
    assert (row["prompt"], len(row["chosen"]), len(row["rejected"])) == ([ASK], 3, 3)
    of = tokenizer("chatml")
    batch = data.preferences([one("hh", {"chosen": HH + " Bye", "rejected": HH + "No"})], of)
    texts = [of.decode(ids[mask]) for ids, mask in zip(batch["input_ids"][0], batch["loss_mask"][0], strict=True)]
    assert texts == ["Bye<|im_end|>", "No<|im_end|>"]


def test_verl(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "sums",
            "prompt": [ASK],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": index, "split": None},
        }
        for index, truth in enumerate(["2", "3"])
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    found = data.rows(tmp_path / "train.parquet", format="verl")
    kept = {"data_source": "sums", "ability": "math", "extra_info": {"index": 1, "split": None}}
    assert found[1] == {"prompt": [ASK], "answer": "3", **kept}
    assert one("verl", {"prompt": [ASK], "reward_model": {"ground_truth": 2.5}}) == {"prompt": [ASK], "answer": "2.5"}


@pytest.mark.parametrize(
    ("format", "row", "match"),
    [
        ("sharegpt", {"messages": [ASK]}, "sharegpt: the row has no 'conversations'; it has messages"),
        ("sharegpt", {"conversations": "a"}, "sharegpt: 'conversations' is a str; give a list of messages"),
        (
            "sharegpt",
            {"conversations": [{"value": "a"}]},
            "sharegpt: 'conversations': message 0 has no 'role'; it has v",
        ),
        ("alpaca", {"instruction": "a"}, "alpaca: the row has no 'output'; it has instruction"),
        ("alpaca", {"instruction": "a", "output": "b", "input": 3}, "alpaca: 'input' is an int; give a text"),
        (
            "alpaca",
            {"instruction": "a", "output": "b", "history": [["c"]]},
            r"alpaca: 'history' is \[\['c'\]\]; give pa",
        ),
        ("prompt_completion", {"prompt": "a"}, "prompt_completion: the row has no 'completion'; it has prompt"),
        ("hh", {"chosen": "a", "rejected": HH}, r"hh: 'chosen' does not begin with '\\n\\nHuman:': 'a'"),
        ("hh", {"chosen": HH, "rejected": "\n\nHuman: a"}, "hh: 'rejected' does not end with what the assistant says"),
        (
            "hh",
            {"chosen": HH, "rejected": "\n\nHuman: a\n\nAssistant: b"},
            "hh: 'chosen' and 'rejected' do not begin with the same message",
        ),
        ("verl", {"prompt": [ASK]}, r"verl: 'reward_model' is None; give {'ground_truth': ...}"),
        (
            "verl",
            {"prompt": "a", "reward_model": {"ground_truth": "2"}},
            "verl: 'prompt' is a str; give a list of mess",
        ),
    ],
)
def test_rows_that_a_format_cannot_use(format: str, row: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match="tasks: row 0: " + match):
        data.tasks([row], format=format)
