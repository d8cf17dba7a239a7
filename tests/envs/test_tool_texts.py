"""Parsing what models write: round trips through real templates and writers, truncation, reasoning, malformed calls."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nrl.envs.tools import FORMATS, MalformedCall, Parsed, ToolCall, parse, tool_format
from nrl.errors import ModelError
from tests.chat_tokenizers import TEMPLATES
from tests.envs.tool_texts import BY_TEMPLATE, WRITERS, by_template, untyped, written

# Texts in arguments, with much of what a parser could stumble over; unpaired surrogates are no text.
MARKERS = [
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "</parameter>", "<|python_tag|>", "[TOOL_CALLS]"),
    *(
        "[ARGS]",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁sep｜>",
        "\n```",
        "}",
        "]",
    ),
    *('"', "\\", "\n", "'", "; ", "<think>", "</think>", "<|im_end|>", "</s>", "é", "東京", "🦆", " ", "{", "None"),
]
TEXTS = st.lists(
    st.sampled_from(MARKERS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=4
).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_-]{0,12}", fullmatch=True)
CALLS = st.builds(
    ToolCall,
    NAMES,
    st.dictionaries(NAMES, VALUES, max_size=3),
    st.none() | st.from_regex(r"[a-zA-Z0-9]{9}", fullmatch=True),
)
PROSE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[{｜"), max_size=20)


def unambiguous(call: ToolCall) -> bool:
    """Whether the format of Qwen3-Coder, which escapes nothing, says what the values of a call are."""
    values = [f"\n{value}" for value in untyped(call).arguments.values()]
    closed = ("</parameter><parameter=", "</parameter></function>", "</parameter>")
    blank = ["".join(value.split()) for value in values]
    return not any("\n<parameter=" in value for value in values) and not any(
        value.endswith(closed) or "</parameter><parameter=" in value or "</parameter></function>" in value
        for value in blank
    )


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=150)
@given(text=PROSE, calls=st.lists(CALLS.filter(unambiguous), max_size=3))
def test_what_is_written_is_read(writer: str, text: str, calls: Sequence[ToolCall]) -> None:
    made = written(writer, text, calls)
    assert parse(made.whole, WRITERS[writer][0]) == Parsed(made.text, "", tuple(made.calls), ())


@pytest.mark.parametrize("name", BY_TEMPLATE)
@settings(max_examples=80)
@given(text=PROSE, calls=st.lists(CALLS.filter(unambiguous), min_size=1, max_size=3))
def test_what_a_real_template_writes_is_read(name: str, text: str, calls: Sequence[ToolCall]) -> None:
    format = tool_format((TEMPLATES / f"{name}.jinja").read_text())
    assert format == BY_TEMPLATE[name]
    calls = [each._replace(id=None) for each in calls[: 1 if name.startswith("llama") else 3]]
    whole = by_template(name, text, calls)
    found = parse(whole, format)
    expected = [untyped(each) for each in calls] if format == "qwen3_coder" else calls
    assert found.calls == tuple(expected)
    assert found.malformed == ()
    assert found.text == ("" if name.startswith("llama") else text.strip())
    assert found.reasoning == ""


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=25)
@given(text=PROSE, calls=st.lists(CALLS.filter(unambiguous), min_size=1, max_size=2))
def test_a_call_that_is_cut_is_malformed_and_not_lost(writer: str, text: str, calls: Sequence[ToolCall]) -> None:
    if any("think>" in str(each.arguments).lower() for each in calls):
        return  # cut, it may as well be the end of reasoning
    made = written(writer, text, calls)
    whole = made.whole
    begun = [  # from which length on a call is one, and from which on it is complete
        (start + piece.opens, start + len(piece.text))
        for start, piece in zip(starts(made.pieces), made.pieces, strict=True)
        if piece.opens
    ]
    for length in range(len(whole)):
        found = parse(whole[:length], WRITERS[writer][0])
        assert found.calls == tuple(made.calls[: sum(length >= end for _, end in begun)]), whole[:length]
        assert len(found.calls) + len(found.malformed) >= sum(length >= start for start, _ in begun), whole[:length]
        assert len(found.malformed) <= 1, whole[:length]
        assert all(each.text in whole[:length] for each in found.malformed)


def starts(pieces: Sequence[Any]) -> list[int]:
    return [sum(len(before.text) for before in pieces[:place]) for place in range(len(pieces))]


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=50)
@given(
    thought=PROSE, inner=st.lists(CALLS, min_size=1, max_size=2), calls=st.lists(CALLS.filter(unambiguous), max_size=2)
)
def test_a_call_in_reasoning_is_none(
    writer: str, thought: str, inner: Sequence[ToolCall], calls: Sequence[ToolCall]
) -> None:
    format = WRITERS[writer][0]
    reasoning = (thought + written(writer, "", inner).whole).replace("think>", "")
    opens, closes = ("[THINK]", "[/THINK]") if format == "mistral" else ("<think>", "</think>")
    made = written(writer, "", calls)
    expected = Parsed("", reasoning.strip(), tuple(made.calls), ())
    assert parse(f"{opens}{reasoning}{closes}{made.whole}", format) == expected
    assert parse(f"{reasoning}{closes}{made.whole}", format, reasoning_open=True) == expected
    assert parse(f"{opens}{reasoning}", format) == Parsed("", reasoning.strip(), (), (), False)
    assert parse(reasoning, format, reasoning_open=True) == Parsed("", reasoning.strip(), (), (), False)


@settings(max_examples=300)
@given(text=st.lists(st.sampled_from(MARKERS) | TEXTS, max_size=12).map("".join))
def test_no_text_is_too_strange(text: str) -> None:
    for format in FORMATS:
        found = parse(text, format)
        assert all(isinstance(each.arguments, dict) and each.name for each in found.calls)
        assert all(each.text in text and each.reason for each in found.malformed)


OK = '{"name": "f", "arguments": {}}'
F = ToolCall("f", {})


@pytest.mark.parametrize(
    ("text", "reasoning_open", "expected"),
    [
        ("Hi.<|im_end|>\n<|endoftext|>", False, Parsed("Hi.", "", (), ())),
        ("<think>a</think>b<think>c</think>d", False, Parsed("bd", "a\n\nc", (), ())),
        ("<think>\n\n</think>\n\nb", False, Parsed("b", "", (), ())),
        ("a</think>b", False, Parsed("b", "a", (), ())),
        ("a</think>b</think>c", True, Parsed("b</think>c", "a", (), ())),
        ("a</think>\n</think>b", True, Parsed("b", "a", (), ())),
        (f"<think>I write `</think>`</think>b<tool_call>{OK}", False, Parsed("b", "I write `</think>`", (F,), ())),
        ("split('</think>')", False, Parsed("split('</think>')", "", (), ())),
        ("<THINK>a</THINK>b", False, Parsed("b", "a", (), ())),
        (f"<tool_call>{OK}</tool_call>a<tool_call>{OK}</tool_call>b", False, Parsed("ab", "", (F, F), ())),
        (f"a<tool_call>{OK}</tool_call></think>b", False, Parsed("b", f"a<tool_call>{OK}</tool_call>", (), ())),
        (f"I may <tool_call> it</think><tool_call>{OK}", False, Parsed("", "I may <tool_call> it", (F,), ())),
        (f"<tool_call>{OK}\n</tool_", False, Parsed("", "", (F,), ())),
    ],
)
def test_text_reasoning_and_calls_are_told_apart(text: str, reasoning_open: bool, expected: Parsed) -> None:
    assert parse(text, "hermes", reasoning_open=reasoning_open) == expected


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("qwen3_coder", "<function=f></function> a", Parsed("a", "", (F,), ())),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=a>1</parameter></function><tool_call><function=f></function></tool_call>",
            Parsed("", "", (ToolCall("f", {"a": "1"}), F), ()),
        ),
        ("llama3", '{"answer": {"name": 1}}', Parsed('{"answer": {"name": 1}}', "", (), ())),
        ("llama3", 'Such as {"name": "f", "parameters": {}}', None),
        (
            "llama3",
            '{"name": "f", "parameters": {}}; then <|python_tag|> {"name": "f", "parameters": {}}',
            Parsed("; then", "", (F, F), ()),
        ),
        ("llama3", "{a} {b}", Parsed("{a} {b}", "", (), ())),
        ("llama3", '{"name": "f", "parameters": {}} done<|eom_id|>', Parsed("done", "", (F,), ())),
        ("llama3", '{"name": "f", "arguments": {}}\n{"name": "f", "parameters": {}};', Parsed(";", "", (F, F), ())),
        ("mistral", f"[TOOL_CALLS]{OK}", Parsed("", "", (F,), ())),
        ("mistral", "[TOOL_CALLS]f{}", Parsed("", "", (F,), ())),
        ("mistral", "[TOOL_CALLS] f [ARGS] {} </s>", Parsed("", "", (F,), ())),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>", Parsed("", "", (F,), ())),
    ],
)
def test_other_ways_to_write_a_call(format: str, text: str, expected: Parsed | None) -> None:
    assert parse(text, format) == (expected or Parsed(text, "", (), ()))


V31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
NEED = 'write {"name": ..., "arguments": {...}}'


@pytest.mark.parametrize(
    ("format", "text", "reason"),
    [
        ("hermes", "<tool_call>", "it ends before its JSON begins"),
        (
            "hermes",
            "<tool_call>{'a': 1}</tool_call>",
            "its JSON cannot be read: Expecting property name enclosed in double quotes, at \"{'a': 1}</tool_call>\"",
        ),
        ("hermes", "<tool_call>3</tool_call>", f"found 3 in place of an object; {NEED}"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', f'the object has no "name"; {NEED}'),
        ("hermes", '<tool_call>{"name": ""}</tool_call>', f"the object's \"name\" is ''; {NEED}"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', f'the object has no "arguments"; {NEED}'),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
            f"the object's \"arguments\" is '{{}}'; {NEED}",
        ),
        (
            "hermes",
            f"<tool_call>{OK}{OK}</tool_call>",
            f"found '{OK}</tool_cal...' behind its JSON; write one object and </tool_call>",
        ),
        ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "its JSON cannot be read: maximum recursion depth"),
        ("hermes", f"<tool_call>{'1' * 5000}</tool_call>", "its JSON cannot be read: Exceeds the limit (4300 digits)"),
        ("hermes", r'<tool_call>"\ud800"</tool_call>', "its JSON cannot be read: 'utf-8' codec can't encode character"),
        ("qwen3_coder", f"<tool_call>{OK}</tool_call>", "it does not begin with <function=NAME>"),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=a>1\n<parameter=b>2</parameter></function></tool_call>",
            "</parameter> is missing behind the parameter a",
        ),
        (
            "qwen3_coder",
            "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
            "it has the parameter a twice; write each once",
        ),
        (
            "qwen3_coder",
            "<function=f>a=1</function>",
            "found 'a=1</function>'; write <parameter=NAME>, VALUE, </parameter> for each, and </function>",
        ),
        (
            "qwen3_coder",
            "<function=f>",
            "it ends before </function>; write <parameter=NAME>, VALUE, </parameter> for each, and </function>",
        ),
        (
            "qwen3_coder",  # cut within a value that has a call in it
            "<tool_call><function=f><parameter=a>\n<tool_call><function=f></function></tool_call>",
            "</parameter> is missing behind the parameter a",
        ),
        ("llama3", '<|python_tag|>run {"name": "f", "parameters": {}}', "its JSON cannot be read: Expecting value, at"),
        ("llama3", "<|python_tag|>print(1)", "its JSON cannot be read: Expecting value, at 'print(1)'"),
        (
            "llama3",
            '{"arguments": {}}',
            'the object has no "name"; write {"name": ..., "parameters": {...}}',
        ),
        ("mistral", "[TOOL_CALLS]", "it is neither NAME[ARGS]{...} nor a list of objects"),
        ("mistral", "[TOOL_CALLS] []", "its list is empty; write a call, or none"),
        ("mistral", f"[TOOL_CALLS] [{OK} {OK}]", f"found '{OK}]' behind an object; write a comma or ]"),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]", "the arguments are [1]; write an object, {...}"),
        ("deepseek", "<｜tool▁calls▁begin｜>f", "it does not begin with <｜tool▁call▁begin｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>f", "it has no name in front of <｜tool▁sep｜>"),
        (
            "deepseek",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\nx```<｜tool▁call▁end｜>",
            "found 'x```<｜tool▁call▁end｜>' behind its JSON; write one object and ```",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_told(format: str, text: str, reason: str) -> None:
    found = parse(text, format)
    assert found.calls == ()
    (malformed,) = found.malformed
    assert malformed.reason[: len(reason)] == reason
    assert malformed.text == text


@pytest.mark.parametrize(
    ("format", "text", "malformed"),
    [
        ("hermes", f"<tool_call>{{</tool_call><tool_call>{OK}</tool_call>", "<tool_call>{</tool_call>"),
        ("hermes", f"<tool_call>{{ <tool_call>{OK}</tool_call>", "<tool_call>{"),
        ("qwen3_coder", "<tool_call><function=f>x</function></tool_call><function=f></function>",
         "<tool_call><function=f>x</function></tool_call>"),
        ("llama3", '{"name": "f", "parameters": {}}; {"parameters": {}}', '{"parameters": {}}'),
        ("mistral", f"[TOOL_CALLS] [{OK}, 4]", "4"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]f[ARGS]{"),
        (
            "deepseek",
            f"{V31}1 2<｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>",
            f"{V31}1 2<｜tool▁call▁end｜>",
        ),
    ],
)  # fmt: skip
def test_a_malformed_call_takes_no_other_with_it(format: str, text: str, malformed: str) -> None:
    found = parse(text, format)
    assert found.calls == (F,)
    assert [each.text for each in found.malformed] == [malformed]
    assert found.text == ""


def test_text_behind_a_malformed_call_is_text() -> None:
    found = parse("A<tool_call>{</tool_call>B", "hermes")
    assert (found.text, [each.text for each in found.malformed]) == ("AB", ["<tool_call>{</tool_call>"])


def test_a_model_that_repeats_itself_is_read_in_time() -> None:
    for format, part in [
        ("hermes", "<tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n"),
        ("qwen3_coder", "</parameter>"),
        ("llama3", '{"name": "f", '),
        ("llama3", "<|python_tag|>"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS] [{"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
    ]:
        text = part * (50_000 // len(part))
        assert parse(text, format).calls == ()


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(
        ModelError, match="no format 'xml' of tool calls; give one of hermes, qwen3_coder, llama3, mist"
    ):
        parse("", "xml")


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ messages }}", "the chat template has no calls of tools, and none of hermes, qwen3_coder, llama3"),
        (
            "{{ tool_calls }}<|tool_call>call:f{}",
            "the chat template writes calls of tools in a way of its own, and none",
        ),
        (
            "{{ tool_calls.arguments }}<tool_call>f<arg_key>",
            "writes calls of tools in a way of its own.*give parse the",
        ),
        (None, r"the chat template is NoneType, not text; give what tokenizer.get_chat_template\(tools=...\) returns"),
    ],
)
def test_a_template_without_a_format_is_told(template: Any, told: str) -> None:
    with pytest.raises(ModelError, match=f"tool_format: .*{told}"):
        tool_format(template)


def test_the_other_formats_of_templates() -> None:
    assert tool_format("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert tool_format("<tool_call>\n{{ tool_calls[0].arguments | tojson }}") == "hermes"
    chat = Path(TEMPLATES / "llama3.jinja").read_text()
    with pytest.raises(ModelError, match="has no calls of tools"):
        tool_format(chat)


def test_a_malformed_call_is_a_value() -> None:
    assert parse("<tool_call>", "hermes").malformed == (MalformedCall("<tool_call>", "it ends before its JSON begins"),)
    assert json.dumps(parse(f"<tool_call>{OK}", "hermes")) == '["", "", [["f", {}, null]], [], true]'
