"""Rows as the world writes them, in one canonical form."""

import copy
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nrl import data
from nrl.data.messages import canonical_messages, canonical_tools
from nrl.envs.policy_inputs import read_observation, read_prompt
from nrl.errors import DataError, EnvError, ModelError
from tests.chat_tokenizers import tokenizer

ASK = {"role": "user", "content": "Hello"}
BYE = {"role": "assistant", "content": "Bye"}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "21"}
FUNCTION = {"name": "find", "arguments": {"q": "Hi"}}
CALL = {"id": "c", "type": "function", "function": FUNCTION}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
CHAT = [ASK, CALLED, RESULT, BYE]
SCHEMA = {
    "name": "find",
    "description": "Find it.",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
}
TOOL = {"type": "function", "function": SCHEMA}
ENDED = "<|im_end|>"
HERMES = '<tool_call>\n{"name": "find", "arguments": {"q": "Hi"}}\n</tool_call>' + ENDED


def taught(row: dict[str, Any], of: Any = None, source: Any = None) -> str:
    of = of or tokenizer("chatml")
    stream = data.tasks(source or [row], shuffle=False, tokenizer=of, max_tokens=4000, collate=data.supervised)
    batch = data.supervised(stream.take(1), of)
    return str(of.decode(batch["input_ids"][0][batch["loss_mask"][0]]))


def called(**fields: Any) -> dict[str, Any]:
    return {key: value for key, value in {**CALLED, **fields}.items() if value != "absent"}


@pytest.mark.parametrize(
    "message",
    [
        called(content=None),
        called(content="absent"),
        called(content=[{"type": "text", "text": ""}]),
        called(tool_calls=[{**CALL, "function": {**FUNCTION, "arguments": '{"q": "Hi"}'}}]),
        called(tool_calls=[{**CALL, "function": {**FUNCTION, "arguments": json.dumps('{"q": "Hi"}')}}]),
        called(tool_calls=[{**CALL, "function": {**FUNCTION, "arguments": [("q", "Hi")]}}]),  # a map of Arrow
        called(tool_calls=[{"id": "c", **FUNCTION}]),
        called(tool_calls=[{"id": "c", "name": "find", "parameters": {"q": "Hi"}, "arguments": None}]),
        called(tool_calls=json.dumps([CALL])),
        called(tool_calls="absent", function_call={"name": "find", "arguments": '{"q": "Hi"}'}, content=None),
        called(name=None, reasoning_content=None, function_call=None, weight=None, refusal=None),
        called(weight=1.0, id="m1", timestamp=7, metadata={"a": [None]}),
        {"from": "function_call", "value": json.dumps(FUNCTION)},
        {"from": "gpt", "value": None, "tool_calls": [CALL]},
    ],
)
def test_every_way_to_write_a_call_teaches_the_same(message: dict[str, Any]) -> None:
    row = {"messages": [ASK, message, RESULT, BYE], "tools": [TOOL]}
    before = copy.deepcopy(row)
    assert taught(row) == HERMES + "Bye" + ENDED
    assert row == before
    whole = data.supervised([{"messages": CHAT, "tools": [TOOL]}], tokenizer("chatml"))["input_ids"]
    assert data.supervised([row], tokenizer("chatml"))["input_ids"].tolist() == whole.tolist()
    (canonical,) = canonical_messages([message], "the chat")
    assert canonical_messages([canonical], "the chat") == [canonical]
    assert {**CALL, **canonical["tool_calls"][0]} == CALL


@pytest.mark.parametrize("calls", [None, []])
def test_no_calls_are_left_out(calls: Any) -> None:
    assert canonical_messages([{**BYE, "tool_calls": calls}], "the chat") == [BYE]
    assert taught({"messages": [ASK, {**BYE, "tool_calls": calls}]}, tokenizer("llama3_1")) == "Bye<|eot_id|>"


@pytest.mark.parametrize("tools", [TOOL, SCHEMA, {**SCHEMA, "parameters": json.dumps(SCHEMA["parameters"])}])
@pytest.mark.parametrize("text", ["whole", "each", "no"])
def test_every_way_to_write_tools_shows_the_same(tools: Any, text: str) -> None:
    given = {"whole": json.dumps([tools]), "each": [json.dumps(tools)], "no": [tools]}[text]
    assert canonical_tools(given, "the tools") == [TOOL]
    rows = [{"messages": CHAT, "tools": tools} for tools in (given, [TOOL])]
    ids = [data.supervised([row], tokenizer("qwen2_5"))["input_ids"].tolist() for row in rows]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("tools", [None, "", " ", [], "[]", "null"])
def test_no_tools_are_none(tools: Any) -> None:
    assert taught({"messages": [ASK, BYE], "tools": tools}) == "Bye" + ENDED


# --- Nulls that Arrow fills in

NULLABLE = {"type": ["string", "null"]}


def two_tools() -> list[dict[str, Any]]:
    """Rows whose tools have other parameters, nested ones too; their union has fields that neither row has."""
    rows = []
    for name, arguments, needed in (
        ("find", {"q": {"near": "Hi", "within": [{"km": 2}]}}, ["q"]),
        ("add", {"a": 1, "b": None, "q": {"exact": True}}, ["a", "b"]),
        ("stop", {"all": None}, []),
    ):
        function = {"name": name, "arguments": arguments}
        properties = dict.fromkeys(arguments, NULLABLE)
        schema = {"name": name, "parameters": {"type": "object", "properties": properties, "required": needed}}
        said = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
        rows.append({"messages": [ASK, said], "tools": [{"type": "function", "function": schema}]})
    return rows


@pytest.mark.parametrize("kind", ["parquet", "saved", "dataset", "jsonl in a folder"])
def test_what_arrow_fills_in_is_not_taught(tmp_path: Path, kind: str) -> None:
    rows = two_tools()
    match kind:
        case "parquet":
            source: Any = tmp_path / "rows.parquet"
            pq.write_table(pa.Table.from_pylist(rows), source)
        case "saved":
            source = tmp_path / "saved"
            datasets.Dataset.from_list(rows).save_to_disk(source)
        case "dataset":
            source = datasets.Dataset.from_list(rows)
        case _:
            (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            source = tmp_path
    for format in (None, "turns"):
        stream = data.tasks(source, shuffle=False, format=format)
        written = [task["messages"][1] if format is None else task["response"][0] for task in stream.take(3)]
        calls = [message["tool_calls"][0]["function"]["arguments"] for message in written]
        # A required argument may be null. Of another it is not known whether the row had it
        assert calls == [{"q": {"near": "Hi", "within": [{"km": 2}]}}, {"a": 1, "b": None, "q": {"exact": True}}, {}]
        tools = [task["tools"] for task in stream.take(3)]
        assert tools == [row["tools"] for row in rows]


def test_a_null_that_was_written_stays(tmp_path: Path) -> None:
    row = {"messages": [ASK, called(tool_calls=[{"function": {"name": "find", "arguments": {"q": None}}}])]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    assert '"arguments": {"q": null}' in taught({}, source=str(tmp_path / "a.jsonl"))
    assert '"arguments": {"q": null}' in taught(row)
    text = {"messages": [ASK, called(tool_calls=[{"function": {"name": "find", "arguments": '{"q": null}'}}])]}
    pq.write_table(pa.Table.from_pylist([text]), tmp_path / "a.parquet")
    assert '"arguments": {"q": null}' in taught({}, source=str(tmp_path / "a.parquet"))
    assert '"arguments": {"q": null}' in str(
        data.tasks(tmp_path / "a.parquet", format="turns", shuffle=False).take(1)
    ).replace("'", '"').replace("None", "null")


# --- Roles, the system's message, prompts


def test_roles_have_one_name() -> None:
    names = {"human": "user", "gpt": "assistant", "observation": "tool", "function": "tool", "ipython": "ipython"}
    for given, role in names.items():
        assert canonical_messages([{"from": given, "value": "a"}], "x") == [{"role": role, "content": "a"}]
        assert canonical_messages([{"role": given, "content": "a"}], "x") == [{"role": role, "content": "a"}]


def test_a_developer_is_the_system_unless_the_template_names_it() -> None:
    told = [{"role": "developer", "content": "Be brief"}, ASK]
    for name in ("chatml", "qwen2_5", "llama3"):
        of = tokenizer(name)
        assert data.render(told, of) == data.render([{**told[0], "role": "system"}, ASK], of)
    of = copy.copy(tokenizer("chatml"))
    of.chat_template = of.chat_template.replace("message['role']", "('developer' if false else message['role'])", 1)
    assert "<|im_start|>developer\nBe brief" in of.decode(data.render(told, of))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASK, BYE]},
        {"prompt": [ASK], "response": "Bye"},
        {"prompt": "Hello", "response": "Bye"},
        {"prompt": "Hello", "response": [BYE]},
        {"messages": [{"role": "system", "content": "Be brief"}, ASK, BYE]},
        {"messages": json.dumps([ASK, BYE])},
    ],
)
def test_a_system_column_begins_the_chat(row: dict[str, Any]) -> None:
    of = tokenizer("chatml")
    expected = data.supervised([{"messages": [{"role": "system", "content": "Be brief"}, ASK, BYE]}], of)["input_ids"]
    for each in data.rows([row | {"system": "Be brief"}]):
        assert data.supervised([each], of)["input_ids"].tolist() == expected.tolist()
        assert each["prompt"][0] == {"role": "system", "content": "Be brief"}
    for nothing in (None, "", 7):
        assert taught(row | {"system": nothing}) == "Bye" + ENDED


def test_pairs_have_a_system_column_and_calls_of_their_own() -> None:
    of = tokenizer("chatml")
    told = {"role": "system", "content": "Be brief"}
    pair = {"chosen": [ASK, BYE], "rejected": [ASK, {**BYE, "content": "Hi"}], "system": "Be brief"}
    whole = {"chosen": [told, ASK, BYE], "rejected": [told, ASK, {**BYE, "content": "Hi"}]}
    texts = {"prompt": "Hello", "chosen": "Bye", "rejected": "Hi", "system": "Be brief"}
    empty = {**whole, "prompt": None}
    for row in (pair, {**pair, "prompt": "Hello"}, {**pair, "prompt": ""}, texts, empty):
        for each in [data.rows([row])[0]] if row is texts else [row, data.rows([row])[0]]:
            assert data.preferences([each], of)["input_ids"].tolist() == (
                data.preferences([whole], of)["input_ids"].tolist()
            )
    other = called(tool_calls=[{**CALL, "function": {"name": "find", "arguments": {"q": "No"}}}])
    sides = data.preferences([{"chosen": CHAT, "rejected": [ASK, other, RESULT, BYE]}], of)
    texts_of = [of.decode(ids[mask]) for ids, mask in zip(sides["input_ids"][0], sides["loss_mask"][0], strict=True)]
    assert texts_of == [HERMES + "Bye" + ENDED, HERMES.replace("Hi", "No") + "Bye" + ENDED]


@pytest.mark.parametrize("prompt", [None, "", []])
def test_an_empty_prompt_beside_whole_messages_is_none(prompt: Any) -> None:
    row = {"prompt": prompt, "messages": [ASK, BYE], "response": None}
    assert data.rows([row])[0]["prompt"] == [ASK]
    assert taught(row) == "Bye" + ENDED


# --- Which turns are taught


def test_two_answers_at_the_end_or_at_the_beginning_are_taught() -> None:
    hi = {"role": "assistant", "content": "Hi"}
    assert taught({"messages": [ASK, BYE, hi]}) == f"Bye{ENDED}Hi{ENDED}"
    assert data.rows([{"messages": [ASK, BYE, hi]}])[0]["prompt"] == [ASK]
    assert taught({"messages": [BYE, hi, ASK, BYE]}) == f"Bye{ENDED}Hi{ENDED}Bye{ENDED}"
    # A template that asks for no answer to nothing shows the first one alone
    assert taught({"messages": [hi, ASK, BYE]}, tokenizer("qwen2_5")) == "Bye" + ENDED
    turns = data.turns({"messages": [hi, ASK, BYE, hi]})
    assert [taught(dict(row)) for row in turns] == ["Bye" + ENDED, "Hi" + ENDED]
    assert [row["prompt"] for row in turns] == [[hi, ASK]] * 2


def test_a_turn_of_weight_0_is_read_and_not_taught() -> None:
    hi = {"role": "assistant", "content": "Hi", "weight": 0}
    row = {"messages": [ASK, hi, ASK, {**BYE, "weight": 1}]}
    for name, end in (("chatml", ENDED), ("llama3", "<|eot_id|>")):
        of = tokenizer(name)
        assert taught(row, of) == "Bye" + end
        whole = data.supervised([{"messages": [ASK, {**hi, "weight": True}, ASK, BYE]}], of)["input_ids"].tolist()
        assert data.supervised([row], of)["input_ids"].tolist() == whole
    assert len(data.turns(row)) == 1
    of = copy.copy(tokenizer("chatml"))
    of.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert taught(row, of) == "Bye" + ENDED
    with pytest.raises(DataError, match="the conversation has only messages of the assistant with 'weight': 0, so"):
        data.supervised([{"messages": [ASK, hi]}], of)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_the_name_that_the_template_reads(field: str) -> None:
    row = {"messages": [ASK, {**BYE, field: "Hmm", "reasoning_content" if field != "reasoning_content" else "x": None}]}
    assert taught(row, tokenizer("qwen3")) == f"<think>\nHmm\n</think>\n\nBye{ENDED}"
    assert "analysis<|message|>Hmm<|end|>" in taught(row, tokenizer("gptoss"))
    of = copy.copy(tokenizer("chatml"))
    of.chat_template = of.chat_template.replace(
        "message['content'] }}", "(message.reasoning or '') + message.content }}"
    )
    assert taught(row, of) == "HmmBye" + ENDED


def test_templates_by_name() -> None:
    of = copy.copy(tokenizer("chatml"))
    named = of.chat_template
    of.chat_template = {"tool_use": named}
    assert taught({"prompt": "Hello", "response": "Bye"}, of) == "Bye" + ENDED
    of.chat_template = {"tool_use": named, "rag": named}
    assert taught({"messages": CHAT, "tools": [TOOL]}, of) == HERMES + "Bye" + ENDED
    with pytest.raises(ModelError, match="has the chat templates 'tool_use', 'rag', and none for a conversation with"):
        data.supervised([{"messages": [ASK, BYE]}], of)


def test_a_template_may_want_null_beside_calls() -> None:
    of = copy.copy(tokenizer("chatml"))
    of.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is not none %}{{ m.content }}{% else %}"
        "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert taught({"messages": CHAT}, of) == 'find{"q": "Hi"}' + ENDED + "Bye" + ENDED


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ({**BYE, "weight": 0.5}, "message 1: 'weight' is 0.5; give 1, or 0 for a turn that is not trained"),
        ({**BYE, "weight": "0"}, "message 1: 'weight' is '0'; give 1, or 0 for a turn that is not trained"),
        ({**BYE, "tool_calls": 3}, "message 1: 'tool_calls' is an int; give a list of calls, or leave it out"),
        ({**BYE, "tool_calls": "find"}, "message 1: 'tool_calls' is 'find', which is no JSON; give JSON text"),
        ({**BYE, "tool_calls": ["find"]}, "message 1: call 0 is a str; give {'function': {'name': ..., 'arguments'"),
        ({**BYE, "tool_calls": [{"id": "a"}]}, "message 1: call 0 has no 'name' of a function; it has no fields"),
        (called(tool_calls=[{"name": "f", "arguments": 3}]), "message 1: call 0 of 'f': 'arguments' is an int; give"),
        ({"from": "function_call", "value": "find"}, "message 1: the call in 'content' is 'find', which is no JSON"),
        ({**BYE, "reasoning": 3}, "message 1: 'reasoning' is an int; give a text"),
        (
            {**BYE, "reasoning": "a", "thinking": "b"},
            "message 1: 'reasoning' and 'thinking' differ; give its reason",
        ),
        ({**BYE, "content": None}, r"message 1: 'content' is nothing \(null\); give a text"),
        ({**BYE, "content": [{"type": "image"}]}, "message 1: 'content' is a list; give a text"),
        ({"role": None, "content": "a"}, r"message 1: 'role' is nothing \(null\); give a text"),
    ],
)
def test_messages_that_cannot_be_read(message: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match=f"tasks: row 0: 'messages': {match}"):
        data.tasks([{"messages": [ASK, message]}])


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (
            {"messages": [{"role": "system", "content": "a"}, ASK, BYE], "system": "b"},
            "row 0 has 'system', 'b', and its messages begin with another system message, 'a'; leave one of them out",
        ),
        (
            {"prompt": [5], "response": "a", "system": "b"},
            "row 0 has 'system', 'b', and its prompt is no chat, so nothing shows it; leave chat=False out, or write",
        ),
        ({"messages": CHAT, "tools": "{"}, "row 0: 'tools' is a str; give a list of JSON schemas of functions, or its"),
        (
            {"messages": CHAT, "tools": [{**SCHEMA, "parameters": "{"}]},
            "'parameters' of 'find' is '{', which is no JS",
        ),
    ],
)
def test_rows_that_cannot_be_read(row: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match="supervised: row 0.*" + match.removeprefix("row 0")):
        data.supervised([row], tokenizer("chatml"))


# --- Environments


def test_environments_write_messages_in_any_way() -> None:
    said = called(content=None, tool_calls=[{**CALL, "function": {**FUNCTION, "arguments": '{"q": "Hi"}'}}])
    turn = {"role": "assistant", "turn": 0}
    given = [{"from": "human", "value": "Hello"}, said, RESULT, {**BYE, "thinking": "Hmm"}, turn]
    expected = [ASK, CALLED, RESULT, {**BYE, "reasoning_content": "Hmm"}, turn]
    assert read_observation(given) == read_prompt(given) == expected
    request = {"messages": given, "tools": [SCHEMA]}
    assert read_observation(request) == {"messages": expected, "tools": [TOOL]}
    parts = [{"role": "user", "content": [{"type": "image", "url": "a"}]}]
    assert read_observation(parts) == parts
    assert read_observation([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]) == [ASK]
    with pytest.raises(EnvError, match="the observation: message 0: call 0 has no 'name' of a function; it has id"):
        read_observation([called(tool_calls=[{"function": {"id": 3}}])])


def test_reasoning_that_stands_in_two_places_is_taught_once() -> None:
    asked, of = {"role": "user", "content": "Hi"}, tokenizer("qwen3")
    both = {"role": "assistant", "content": "<think>\nHmm\n</think>\n\nBye", "reasoning": "Hmm"}
    assert taught({"messages": [asked, both]}, of) == "<think>\nHmm\n</think>\n\nBye<|im_end|>"
    with pytest.raises(DataError, match="'reasoning' and the reasoning in 'content' differ; give its reasoning once"):
        taught({"messages": [asked, {**both, "reasoning": "Ah"}]}, of)


@pytest.mark.parametrize(
    ("name", "end"), [("chatml", "<|im_end|>"), ("qwen3", "<|im_end|>"), ("llama3_1", "<|eot_id|>")]
)
def test_a_content_that_ends_its_turn_ends_it_once(name: str, end: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"Bye{end}"}]
    plain = [messages[0], {"role": "assistant", "content": "Bye"}]
    assert taught({"messages": messages}, tokenizer(name)) == taught({"messages": plain}, tokenizer(name))


def test_arguments_that_are_no_object_are_not_taught_in_quotation_marks() -> None:
    call = {"function": {"name": "find", "arguments": "[1, 2]"}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(
        DataError, match=r"the arguments of call 0 of message 1 are '\[1, 2\]', which is no JSON object"
    ):
        taught({"messages": messages}, tokenizer("qwen2_5"))


def test_a_null_within_json_text_is_not_filled_in_by_arrow(tmp_path: Path) -> None:
    call = json.dumps({"name": "find", "arguments": {"city": "Oslo", "unit": None}})
    said = [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": call}]
    pq.write_table(pa.Table.from_pylist([{"conversations": said}]), tmp_path / "rows.parquet")
    tasks = data.tasks(tmp_path / "rows.parquet", format="sharegpt", shuffle=False)
    batch = data.supervised(tasks.take(1), tokenizer("qwen2_5"))
    assert '"unit": null' in tokenizer("qwen2_5").decode(batch["input_ids"][0])


def test_a_tool_whose_function_is_no_schema_stays_as_it_is() -> None:
    assert canonical_tools([{"function": "x"}], "the tools") == [{"function": "x"}]
