"""Contents in parts, flags of trained turns, other fields of reasoning, and arguments of chat templates."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nrl import data
from nrl.data.messages import canonical_messages, canonical_tools
from nrl.errors import DataError
from tests.chat_tokenizers import TEMPLATES, tokenizer

NAMES = ["chatml", *sorted(path.stem for path in TEMPLATES.glob("*.jinja"))]
ASK = {"role": "user", "content": "Hello"}
BYE = {"role": "assistant", "content": "Bye"}
ARGUMENTS = {"q": "Hi"}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "find", "arguments": ARGUMENTS}}
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "find", "description": "Find.", "parameters": SCHEMA}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


USE = {"type": "tool_use", "id": "abcdefghi", "name": "find", "input": ARGUMENTS}
RESULT = {"type": "tool_result", "tool_use_id": "abcdefghi", "content": "21"}


def taught(row: dict[str, Any], name: str) -> str:
    of = tokenizer(name)
    batch = data.supervised([row], of)
    return str(of.decode(batch["input_ids"][0][batch["loss_mask"][0]]))


def test_the_parts_of_anthropic_s_messages_are_openai_s_messages() -> None:
    thought = {"type": "thinking", "thinking": "Hmm", "signature": "x"}
    parts = [
        {"role": "user", "content": [text("Hel"), text("lo")]},
        {"role": "assistant", "content": [thought, text("Hi"), USE]},
        {"role": "user", "content": [{**RESULT, "content": [text("2"), text("1")]}, text("Thanks")]},
        {"role": "assistant", "content": [text("Bye")]},
    ]
    expected: list[dict[str, Any]] = [
        ASK,
        {"role": "assistant", "content": "Hi", "reasoning_content": "Hmm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "21"},
        {"role": "user", "content": "Thanks"},
        BYE,
    ]
    assert canonical_messages(parts, "the chat") == expected
    assert data.turns({"messages": parts})[1] == {
        "prompt": [
            parts[0],
            parts[1],
            {**expected[2], "content": [text("2"), text("1")]},
            {**ASK, "content": [text("Thanks")]},
        ],
        "response": [parts[3]],
    }
    plain = [ASK, {**expected[1], "reasoning_content": None}, *expected[2:]]
    without = [parts[0], {**parts[1], "content": [text("Hi"), USE]}, *parts[2:]]
    for name in ("chatml", "glm4moe", "qwen2_5", "qwen3_training"):
        assert taught({"messages": without}, name) == taught({"messages": plain}, name)
    functions: list[dict[str, Any]] = [
        {"name": "find", "description": "Find.", "input_schema": SCHEMA},
        {**TOOL["function"], "inputSchema": SCHEMA, "parameters": None},
    ]
    for tool in functions:
        assert canonical_tools([tool], "the tools", filled=True) == [TOOL]


def test_parts_that_arrow_filled_are_read(tmp_path: Path) -> None:
    rows = [
        {
            "messages": [{"role": "user", "content": [text("Hello")]}, {"role": "assistant", "content": [USE]}],
            "tools": [TOOL],
        },
        {"messages": [{"role": "user", "content": [RESULT]}, {"role": "assistant", "content": [text("Bye")]}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = data.rows(tmp_path / "rows.parquet")
    assert found[0]["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert found[1]["messages"] == [{"role": "tool", "tool_call_id": "abcdefghi", "content": "21"}, BYE]


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text("Bye")]},
            "'redacted_thinking'.*leave it out",
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            "'refusal'.*a part of the type 'text'",
        ),
        ({"role": "assistant", "content": [RESULT]}, "'tool_result'.*a message of the user"),
        ({"role": "user", "content": [USE]}, "'tool_use'.*in a message of the assistant"),
        (
            {"role": "user", "content": [{"type": "thinking", "thinking": "Hmm"}]},
            "'thinking'.*message of the assistant",
        ),
        (
            {"role": "user", "content": [text("Hello"), {"type": "image_url", "image_url": {"url": "a"}}]},
            "part 1 .*'image_url'",
        ),
        ({"role": "user", "content": [{"audio": "x"}]}, "part 0 has none"),
        (
            {"role": "assistant", "content": [USE, text("Bye")]},
            "has reasoning or text behind what templates write later",
        ),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": 3}]},
            "part 0 of 'content', of reasoning, has an int",
        ),
        ({"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}, "the call in 'content' has no 'name'"),
        ({"role": "user", "content": "What is this?", "images": ["cat.png"]}, "message 0 has 'images'.*see text alone"),
    ],
)
def test_parts_that_no_template_writes_are_refused_by_type(message: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match=match):
        canonical_messages([message], "the chat")


def test_a_content_of_no_parts_is_empty() -> None:
    assert canonical_messages([{"role": "assistant", "content": [], "tool_calls": [CALL]}], "x")[0]["content"] == ""
    assert canonical_messages([{"role": "user", "content": []}], "x") == [{"role": "user", "content": ""}]


# --- Trained turns


@pytest.mark.parametrize("field", ["weight", "train", "trainable", "training", "loss", "loss_mask"])
@pytest.mark.parametrize("value", [False, 0, 0.0])
def test_every_flag_of_an_untrained_turn_is_weight_0(field: str, value: Any) -> None:
    row = {"messages": [{**ASK, field: False}, {**BYE, field: value}, ASK, {**BYE, "content": "Hi", field: True}]}
    assert taught(row, "chatml") == "Hi<|im_end|>"
    assert [taught(dict(turn), "chatml") for turn in data.turns(row)] == ["Hi<|im_end|>"]
    assert canonical_messages([row["messages"][1]], "x") == [{**BYE, "weight": 0}]
    answers = [{**BYE, field: True}, {**BYE, "content": "Hi"}]
    assert [taught(dict(turn), "chatml") for turn in data.turns({"messages": [ASK, *answers]})][1] == "Hi<|im_end|>"


def test_flags_that_differ_or_are_none_are_refused() -> None:
    with pytest.raises(
        DataError, match="message 0 has 'weight', 1, and 'train', False, which differ; leave all but one"
    ):
        canonical_messages([{**BYE, "weight": 1, "train": False}], "x")
    with pytest.raises(DataError, match="message 0: 'trainable' is 'no'; give 1, or 0 for a turn that is not trained"):
        canonical_messages([{**BYE, "trainable": "no"}], "x")
    with pytest.raises(DataError, match="message 0 has 'train_detail'.*nrl trains whole turns"):
        canonical_messages([{**BYE, "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}], "x")


# --- Reasoning

MARK = "Zebrafish"
DETAILS = [
    {"type": "reasoning.text", "text": "Zebra", "signature": None},
    {"type": "reasoning.summary", "summary": "fish"},
]
FIELDS: dict[str, Any] = {
    **dict.fromkeys(("thought", "thoughts", "thinking_content", "chain_of_thought", "cot"), MARK),
    "reasoning_details": DETAILS,
    "content": [{"type": "thinking", "thinking": [text(MARK)]}, text("Bye")],
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("name", NAMES)
def test_other_fields_of_reasoning_are_written_or_refused(field: str, name: str) -> None:
    row = {"messages": [ASK, {**BYE, field: FIELDS[field]}]}
    try:
        assert taught(row, name).count(MARK) == 1
    except DataError as error:
        assert re.search(f"leaves out the reasoning of message 1 .*'{MARK}'", str(error))  # noqa: PT017
    assert canonical_messages(row["messages"], "x")[1] == {**BYE, "reasoning_content": MARK}


def test_reasoning_that_stands_twice_is_read_once() -> None:
    both = {**BYE, "reasoning": "Zebra fish", "reasoning_details": [{"type": "reasoning.text", "text": "Zebra fish\n"}]}
    assert canonical_messages([both], "x") == [{**BYE, "reasoning_content": "Zebra fish"}]
    sealed = [{"type": "reasoning.encrypted", "data": "x"}]
    assert canonical_messages([{**both, "reasoning_details": sealed}], "x")[0]["reasoning_content"] == "Zebra fish"
    with pytest.raises(
        DataError, match="message 0: 'reasoning_details' has no text that a model can learn.*leave it out"
    ):
        canonical_messages([{**BYE, "reasoning_details": sealed}], "x")
    with pytest.raises(DataError, match="message 0: 'reasoning' and 'thought' differ; give its reasoning once"):
        canonical_messages([{**BYE, "reasoning": "a", "thought": "b"}], "x")
    assert canonical_messages([{**ASK, "thought": "metadata"}], "x") == [{**ASK, "thought": "metadata"}]


# --- Arguments of templates


@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "qwen3_training"])
def test_a_row_s_arguments_are_those_of_its_template(name: str) -> None:
    of, chat = tokenizer(name), [ASK, BYE]
    for arguments in ({"enable_thinking": False, "other": None}, '{"enable_thinking": false}'):
        row = {"messages": chat, "chat_template_kwargs": arguments}
        batch = data.supervised([row], of)
        asked = of.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True, enable_thinking=False)
        ids, mask = batch["input_ids"][0], batch["loss_mask"][0]
        assert of.decode(ids[~mask]) == asked
        assert "think" not in of.decode(ids[mask])
        pair = {"prompt": [ASK], "chosen": [BYE], "rejected": [BYE], "chat_template_kwargs": arguments}
        assert data.preferences([pair], of)["input_ids"][0, 0].tolist() == ids.tolist()
    none = data.supervised([{"messages": chat, "chat_template_kwargs": {"enable_thinking": None}}], of)
    assert none["input_ids"].tolist() == data.supervised([{"messages": chat}], of)["input_ids"].tolist()


def test_values_of_arguments_are_the_template_s(capsys: pytest.CaptureFixture[str]) -> None:
    of = copy.copy(tokenizer("chatml"))
    of.chat_template = "{{ who | default(0) | tojson }}" + of.chat_template
    value = {"a": [1, None, True, 'x"\n{% é %}🙂'], "b": 2.5}
    row = {"messages": [ASK, BYE], "chat_template_kwargs": {"who": value, "unread": "Hi"}}
    stream = data.tasks([row, row], tokenizer=of, max_tokens=200, collate=data.supervised)
    written = of.decode(data.supervised(stream.take(1), of)["input_ids"][0])
    assert json.loads(written[: written.index("<|im_start|>")]) == value
    assert capsys.readouterr().out.splitlines() == [
        "data: the chat template leaves out the 'unread' of 'chat_template_kwargs' in 2 of 2 rows of the source"
    ]
    data.tasks([row, row], tokenizer=of, max_tokens=200)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("data: 2 of 2 rows of the source have 'chat_template_kwargs', which prompts of rollouts do")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("think", "row 0: 'chat_template_kwargs' is 'think', which is no JSON"),
        ([1], r"row 0: 'chat_template_kwargs' is a list; give an object, such as {'enable_thinking': false}"),
        ({"tools": [TOOL]}, "row 0: 'chat_template_kwargs' has 'tools', .*; give them as 'tools'"),
        ({"add_generation_prompt": True}, "has 'add_generation_prompt', True; leave it out: nrl sets it"),
        ({"a b": 1}, "has 'a b', which is no name of a variable; rename it"),
    ],
)
def test_arguments_that_no_template_takes(arguments: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        data.supervised([{"messages": [ASK, BYE], "chat_template_kwargs": arguments}], tokenizer("chatml"))
    with pytest.raises(DataError, match="row 0 has 'chat_template_kwargs', and its prompt is no chat, so no template"):
        data.supervised([{"prompt": "a", "response": "b", "chat_template_kwargs": {"a": 1}}], tokenizer("chatml"))
