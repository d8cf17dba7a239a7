"""Nothing of a conversation disappears unsaid on its way through a chat template, and nothing doubles."""

import copy
import re
from typing import Any

import pytest

from nrl import data
from nrl.data.completeness import check_complete, losses
from nrl.errors import DataError, NrlError
from tests.chat_tokenizers import TEMPLATES, tokenizer

NAMES = ["chatml", *sorted(path.stem for path in TEMPLATES.glob("*.jinja"))]
MARK = "Zebrafish"
ASK = {"role": "user", "content": "Hello"}


def answer(text: str = "Bye", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def call(name: str = "find", /, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments or {"q": "Hi"}}
    return answer("", tool_calls=[{"id": "abcdefghi", "type": "function", "function": function}])


def tool(name: str = "find", of: str = "Find.", parameter: str = "q", what: str = "What.") -> dict[str, Any]:
    properties = {parameter: {"type": "string", "description": what}}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": of, "parameters": parameters}}


RESULT = {"role": "tool", "name": "find", "tool_call_id": "abcdefghi", "content": MARK}
TWO = answer("", tool_calls=[*call()["tool_calls"], *call(q=MARK)["tool_calls"]])
ROWS: dict[str, tuple[dict[str, Any], str]] = {  # where the mark is, and how an error names that field
    "system": ({"prompt": [{"role": "system", "content": MARK}, ASK]}, "'content' of message 0"),
    "developer": ({"prompt": [{"role": "developer", "content": MARK}, ASK]}, "'content' of message 0"),
    "user": ({"prompt": [{"role": "user", "content": MARK}]}, "'content' of message 0"),
    "earlier": ({"prompt": [ASK, answer(MARK), ASK]}, "'content' of message 1"),
    "result": ({"prompt": [ASK, call(), RESULT]}, "'content' of message 2|the name of call 0 of message 1"),
    "answer": ({"prompt": [ASK], "response": [answer(MARK)]}, "'content' of message 1"),
    "name": ({"prompt": [ASK], "response": [call(MARK)]}, "the name of call 0 of message 1"),
    "value": ({"prompt": [ASK], "response": [call(q=MARK)]}, "(argument 'q'|name) of call 0 of message 1"),
    "key": ({"prompt": [ASK], "response": [call("find", **{MARK: 1})]}, "(argument '.*'|name) of call 0 of message 1"),
    "second": ({"prompt": [ASK], "response": [TWO]}, "(argument 'q'|name) of call [01] of message 1"),
    "beside": ({"prompt": [ASK], "response": [call() | {"content": MARK}]}, "'content' of|name of call 0 of message 1"),
    "tool": ({"prompt": [ASK], "tools": [tool(MARK)]}, f"the name of the tool '{MARK}'"),
    "description": ({"prompt": [ASK], "tools": [tool(of=MARK)]}, "the name of the tool 'find'"),
    "parameter": ({"prompt": [ASK], "tools": [tool(parameter=MARK)]}, "the name of the tool 'find'"),
    "what": ({"prompt": [ASK], "tools": [tool(what=MARK)]}, "the name of the tool 'find'"),
    **{
        name: ({"prompt": [ASK], "response": [answer(**{name: MARK})]}, f"the reasoning of message 1 .*'{name}'")
        for name in ("reasoning_content", "reasoning", "thinking")
    },
}
HERMES = {"chatml", "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_training"}
MISTRAL = {"mistral_v3", "mistral_v11", "mistral_v13"}
LLAMA = {"llama3_1", "llama3_2"}
THINKING = {"qwen3", "qwen3_training", "qwen3_5_think", "gptoss", "glm4moe", "deepseekv3"}
WRITE: dict[str, set[str]] = {  # templates that write the field; all others are refused
    **{field: {*NAMES} for field in ("system", "developer", "user", "earlier", "answer")},
    "result": {*NAMES} - {"gemma3", "llama3"},
    **dict.fromkeys(("name", "value", "key"), HERMES | MISTRAL | LLAMA | {"deepseekv3", "glm4moe", "gptoss"}),
    "second": HERMES | MISTRAL | {"deepseekv3", "glm4moe"},
    "beside": HERMES | MISTRAL - {"mistral_v3"} | {"deepseekv3", "glm4moe", "gptoss"},
    **{f: {*NAMES} - {"gemma3", "llama3", "deepseekv3"} for f in ("tool", "description", "parameter", "what")},
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), THINKING),
}
REFUSALS = "the chat template (refuses the messages|asks for the assistant's message|ends the assistant's message)"


@pytest.mark.parametrize("name", NAMES)
def test_every_field_is_written_once_or_refused_by_name(name: str) -> None:
    of = tokenizer(name)
    for field, (row, named) in ROWS.items():
        found = written(row, of)
        if isinstance(found, str):
            assert found.count(MARK) == 1, field
            assert name in WRITE[field], field
        else:
            assert name not in WRITE[field], (field, str(found))
            assert re.search(f"leaves out .*({named})|{REFUSALS}", str(found)), (field, str(found))


OTHER = {**call(q=MARK)["tool_calls"][0], "id": "abcdefghj"}
EQUAL: dict[str, list[dict[str, Any]]] = {  # the mark is in two places
    "a content and an argument": [ASK, call(q=MARK) | {"content": MARK}],
    "a content beside a call and its result": [ASK, call() | {"content": MARK}, RESULT, answer()],
    "a content within another": [ASK, call() | {"content": MARK}, RESULT | {"content": f"Of {MARK}."}, answer()],
    "two arguments": [ASK, answer("", tool_calls=[*call(q=MARK)["tool_calls"], OTHER])],
    "an argument and a result": [ASK, TWO, RESULT, RESULT | {"tool_call_id": "abcdefghj", "content": "b"}, answer()],
    "a reasoning and a content": [ASK, answer(f"It is {MARK}.", reasoning=MARK)],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_stands_twice_is_written_twice_or_refused(name: str) -> None:
    tools, kept = [tool()], list[str]()
    for where, messages in EQUAL.items():
        row = {"messages": messages, **({"tools": tools} if "reasoning" not in where else {})}
        try:
            found = tokenizer(name).decode(data.supervised([row], tokenizer(name))["input_ids"][0])
        except DataError:
            continue
        assert found.count(MARK) == 2, where
        kept.append(where)
    assert kept or name in ("deepseekv3", "gemma3", "llama3", "llama3_1", "llama3_2", "qwen3"), (
        "all of them are refused"
    )


def test_a_result_is_given_to_its_call_in_any_order() -> None:
    of, calls = tokenizer("mistral_v11"), [call(q="Rome")["tool_calls"][0], call(q="Oslo")["tool_calls"][0]]
    calls = [{**each, "id": f"call_{place}"} for place, each in enumerate(calls)]
    results = [
        {**RESULT, "tool_call_id": f"call_{place}", "content": text} for place, text in ((1, "cold"), (0, "hot"))
    ]
    row = {"messages": [ASK, answer("", tool_calls=calls), *results, answer()], "tools": [tool()]}
    found = of.decode(data.supervised([row], of)["input_ids"][0])
    first, second = re.findall(r"\[CALL_ID\](\w+)\[ARGS\]", found)
    assert re.findall(r"\[TOOL_RESULTS\](\w+)\[TOOL_CONTENT\](\w+)", found) == [(second, "cold"), (first, "hot")]


def written(row: dict[str, Any], of: Any) -> str | NrlError:
    try:
        if "response" in row:
            return str(of.decode(data.supervised([row], of)["input_ids"][0]))
        return str(of.decode(data.render(row["prompt"], of, tools=row.get("tools"))))
    except NrlError as error:
        return error


LINE = "It was a bright cold day in April."
LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("loop", "row", "match"),
    [
        (
            LOOP.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"),
            [{"role": "user", "content": LINE}, answer()],
            "writes 'content' of message 0 2 times, 'It was a bright cold day in April.', where the row has it 1 times",
        ),
        (
            LOOP.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.reasoning_content }}{{ m.content }}"),
            [ASK, answer(reasoning_content=LINE)],
            "writes the reasoning of message 1 .* 2 times",
        ),
        (LOOP.replace("{{ m.content }}", "{{ m.content[:9] }}"), [{"role": "user", "content": LINE}, answer()], None),
        (LOOP.replace("{{ m.content }}", "{{ m.content | upper }}"), [ASK, answer()], None),
        (LOOP + "{{ '' if loop is defined }}", [{"role": "user", "content": LINE}, answer()], ""),
        ("{{ '" + LINE + "' }}" + LOOP, [{"role": "user", "content": LINE}, answer()], ""),  # the template's own
        (LOOP, [{"role": "user", "content": LINE}, answer(LINE), ASK, answer(f"{LINE} {LINE}")], ""),
    ],
)
def test_templates_that_double_or_cut(loop: str, row: list[Any], match: str | None) -> None:
    of = copy.copy(tokenizer("chatml"))
    of.chat_template = loop + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    if match == "":
        text = of.decode(data.supervised([{"messages": row}], of)["input_ids"][0])
        assert all(message["content"] in text for message in row)
        return
    with pytest.raises(DataError, match=match or "leaves out 'content' of message [01]"):
        data.supervised([{"messages": row}], of)


def test_arguments_that_are_no_object_are_written_as_they_are_or_refused() -> None:
    row = {"messages": [ASK, call() | {"tool_calls": [{"function": {"name": "find", "arguments": 'q="Hi'}}]}]}
    written = data.supervised([row], tokenizer("qwen3"))
    assert 'q="Hi' in tokenizer("qwen3").decode(written["input_ids"][0])
    with pytest.raises(
        DataError, match="render: the arguments of call 0 of message 1 are .*q=.*, which is no JSON obje"
    ):
        data.supervised([row], tokenizer("qwen2_5"))


def test_what_a_template_leaves_out_by_design_is_counted_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    of = tokenizer("qwen3")
    earlier = answer("Hi", reasoning_content="Hmm")
    rows = [
        {"messages": [ASK, earlier, ASK, answer("Bye")]},
        {"messages": [{"role": "user", "content": " Hello"}, earlier, ASK, answer("Bye")]},
        {"messages": [ASK, answer("Bye", reasoning_content="Hmm")]},
    ]
    stream = data.tasks(rows, format="turns", tokenizer=of, max_tokens=200, collate=data.supervised)
    assert stream.size == 5
    assert capsys.readouterr().out.splitlines() == [
        "data: the chat template leaves out the reasoning of earlier turns in 2 of 5 rows of the source",
    ]
    data.supervised(stream.take(5), of)
    assert capsys.readouterr().out == ""
    trims = tokenizer("llama3_1")
    spaced = [{"messages": [ASK, answer(text)]} for text in ("Hi", " Hi", "Hi\n")]
    data.tasks(spaced, tokenizer=trims, max_tokens=200, collate=data.supervised)
    assert capsys.readouterr().out.splitlines() == [
        "data: the chat template leaves out the white space around content in 2 of 3 rows of the source"
    ]


def test_reasoning_in_the_content_of_a_trained_turn_is_kept() -> None:
    with losses() as found:
        check_complete("<think>\nHmm\n</think>\n\nBye", [answer("<think>Hmm</think>Bye")], [0])
        check_complete("Bye", [answer("<think>Hmm</think>Bye")], [])
    assert found == {"reasoning of earlier turns": 1}
    with pytest.raises(DataError, match="leaves out 'reasoning in content' of message 0, 'Hmm'"):
        check_complete("Bye", [answer("<think>Hmm</think>Bye")], [0])


def test_tools_may_be_written_without_descriptions_but_not_cut() -> None:
    with losses() as found:
        check_complete("find q", [], [], [tool()])
        check_complete("find", [], [], [tool()])
    assert found == {"descriptions of tools": 2, "parameters of tools": 1, "types of tools": 2}
    with pytest.raises(DataError, match="leaves out the description of the parameter 'q' of the tool 'find', 'What.'"):
        check_complete("find q Find.", [], [], [tool()])


DEEP: dict[str, tuple[dict[str, Any], str]] = {  # schemas of a parameter with the mark at some level
    "inner description": (
        {"type": "object", "properties": {"city": {"type": "string", "description": MARK}}},
        "the description of the parameter 'q.city' of the tool 'find'",
    ),
    "description of items": (
        {"type": "array", "items": {"type": "string", "description": MARK}},
        r"the description of the parameter 'q\[\]' of the tool 'find'",
    ),
    "enum of items": (
        {"type": "array", "items": {"type": "string", "enum": [MARK, "Hi"]}},
        r"a value of 'enum' of the parameter 'q\[\]' of the tool 'find'",
    ),
    "const": ({"anyOf": [{"const": MARK}, {"type": "null"}]}, "a value of 'const' of the parameter 'q' of the tool"),
    "inner name": (
        {"type": "array", "items": {"type": "object", "properties": {MARK: {"type": "string"}, "b" * 60: {}}}},
        rf"the parameter 'q\[\].{MARK}' of the tool 'find'",
    ),
    "definition": (
        {"$ref": "#/$defs/City", "$defs": {"City": {"type": "object", "properties": {MARK: {"type": "string"}}}}},
        f"the parameter 'q.City.{MARK}' of the tool 'find'",
    ),
    "deepest": (
        {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"description": MARK}}}}},
        "the description of the parameter 'q.a.b' of the tool 'find'",
    ),
}
WRITE_TOOLS = WRITE["tool"] - {"gptoss"}


def deep_tool(schema: dict[str, Any]) -> dict[str, Any]:
    made = tool()
    made["function"]["parameters"]["properties"]["q"] = {"description": "What.", **schema}
    return made


@pytest.mark.parametrize("name", [*sorted(WRITE_TOOLS), "gptoss"])
def test_every_level_of_a_tool_s_schema_is_written_or_refused_by_name(name: str) -> None:
    of = tokenizer(name)
    for field, (schema, named) in DEEP.items():
        found = written({"prompt": [ASK], "tools": [deep_tool(schema)]}, of)
        if isinstance(found, str):
            assert found.count(MARK) == 1, field
        else:
            assert name == "gptoss", (field, str(found))
            assert re.search(f"leaves out {named}.*, '{MARK}'", str(found)), (field, str(found))


def test_the_same_text_at_two_levels_is_looked_for_twice() -> None:
    inner = {"type": "object", "properties": {"city": {"type": "string", "description": "What."}}}
    with pytest.raises(DataError, match="leaves out the description of the parameter 'q' of the tool 'find', 'What.'"):
        check_complete("find q object city string Find. What.", [], [], [deep_tool(inner)])


def test_types_and_limits_that_a_template_leaves_out_are_counted() -> None:
    limited = {"type": "integer", "minimum": 1, "default": None}
    with losses() as found:
        data.render([ASK], tokenizer("gptoss"), tools=[deep_tool(limited)])
        data.render([ASK], tokenizer("qwen3"), tools=[deep_tool(limited)])
        data.render([ASK], tokenizer("gptoss"), tools=[deep_tool({"type": "string", "enum": ["a", "b"]})])
    assert found == {"limits and defaults of tools": 1, "types of tools": 1}


UNENDED = {
    "whole": answer("<think>Hmm"),
    "line": answer("<think>\nHmm"),
    "beside": answer("<think>Bye", reasoning_content="Hmm"),
}


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_that_does_not_end_is_opened_once(name: str) -> None:
    of = tokenizer(name)
    for field, message in UNENDED.items():
        found = written({"prompt": [ASK], "response": [message]}, of)
        if isinstance(found, str):
            # gpt-oss's reasoning has a channel of its own
            assert found.count("<think>") == 1, field
        else:
            refusals = f"writes reasoning of its own in front of 'content' of message 1.*'<think>'|{REFUSALS}"
            assert re.search(f"{refusals}|leaves out the reasoning of message 1", str(found)), (field, str(found))
    text = written({"prompt": [ASK], "response": "<think>Hmm"}, of)  # what the model writes, literally
    assert isinstance(text, str)
    assert text.count("<think>") == 1
    shown = of.decode(data.render([ASK, UNENDED["whole"], ASK], of))  # of an earlier turn nothing is learned
    assert "Hmm" in shown
