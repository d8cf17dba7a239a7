"""Tools of functions: their schemas, what they accept, and their calls."""

import asyncio
import contextvars
import dataclasses
import functools
import inspect
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, TypedDict

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field
from transformers.utils.chat_template_utils import get_json_schema

from nrl.envs.tools import (
    Called,
    MalformedCall,
    NewState,
    State,
    Tool,
    ToolCall,
    ToolError,
    ToolResult,
    call,
    count_calls,
    parse,
    tool,
)
from nrl.errors import EnvError
from tests.envs.tool_texts import written


def made(tools: Sequence[Tool], calls: Sequence[ToolCall | MalformedCall], state: Any = None, **kwargs: Any) -> Called:
    return asyncio.run(call(tools, calls, state, **kwargs))


def answer(fn: Callable[..., Any], **arguments: Any) -> ToolResult:
    """What comes of one call."""
    (result,) = made([tool(fn)], [ToolCall(fn.__name__, arguments)]).results
    return result


# --- Schemas.


def search(
    query: str,
    pages: list[int],
    weights: dict[str, float],
    kind: Literal["web", "news"],
    pair: tuple[int, str],
    anything: Any,
    safe: bool = True,
    most: int | float = 5,
) -> list[str]:
    """Search the web.

    It finds pages.

    Args:
        query: what to look for: words,
            or a sentence.

            Not too long.
        pages: numbers of pages.
        weights: of words.
        kind: of page.
        pair: a number and a text.
        anything: at all.
        safe: whether it is safe.
        most: at most so many.

    Returns:
        Their addresses.

    Raises:
        ToolError: not: here.
    """
    return [query] * len(pages)


def test_a_schema_is_the_one_that_transformers_gives_templates() -> None:
    """Of types that transformers knows; it adds what is returned, which no template shows."""
    expected = get_json_schema(search)
    del expected["function"]["return"]
    properties = expected["function"]["parameters"]["properties"]
    found: Any = tool(search).schema
    own = found["function"]["parameters"]["properties"]
    assert own.pop("most") == {"anyOf": [{"type": "integer"}, {"type": "number"}], "description": "at most so many."}
    assert properties.pop("most") == {"type": ["integer", "number"], "description": "at most so many."}
    assert (own["pair"].pop("minItems"), own["pair"].pop("maxItems")) == (2, 2)
    assert found == expected
    assert list(own) == list(properties)


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Edit:
    line_number: int
    text: str | None = None


class Where(TypedDict):
    path: str


def edit(where: Where, edits: list[Edit], color: Color = Color.RED, most: Annotated[int, Field(ge=1)] = 1) -> str:
    """Edit a file."""
    return f"{where['path']} {edits} {color} {most}"


def plain_edit(where: Where, edits: list[Edit], color: Color = Color.RED, most: int = 1) -> str:
    """Its bounds are told, and no part of the signature that a model is shown."""
    return edit(where, edits, color, most)


def test_types_that_have_parts() -> None:
    parameters = tool(edit).schema["function"]["parameters"]
    assert parameters["properties"] == {
        "where": {"$ref": "#/$defs/Where"},
        "edits": {"type": "array", "items": {"$ref": "#/$defs/Edit"}},
        "color": {"$ref": "#/$defs/Color"},
        "most": {"type": "integer", "minimum": 1},
    }
    assert parameters["required"] == ["where", "edits"]
    assert parameters["$defs"]["Edit"] == {
        "type": "object",
        "title": "Edit",
        "properties": {
            "line_number": {"type": "integer"},
            "text": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["line_number"],
    }
    found = answer(edit, where={"path": "a"}, edits=[{"line_number": 3}], color="blue", most=2)
    assert found.text == "a [Edit(line_number=3, text=None)] Color.BLUE 2"
    found = answer(edit, where={}, edits=[{"line_number": 1}, {"line_number": "x"}], color="green", most=0)
    assert found.status == "invalid"
    assert found.text == (
        "edit was not called: where['path']: field required; edits[1]['line_number']: input should be a valid integer, "
        "unable to parse string as an integer, found 'x'; color: input should be 'red' or 'blue', found 'green'; most: "
        "input should be greater than or equal to 1, found 0; write "
        f"edit{str(inspect.signature(plain_edit)).removesuffix(' -> str')}"
    )


class Counter:
    """A thing with methods."""

    def count(self, by: int) -> int:
        """Count."""
        return by + 1

    async def __call__(self, by: int) -> int:
        """Count later."""
        return by + 2


def test_methods_and_objects_that_are_called() -> None:
    assert answer(Counter().count, by=1) == ToolResult("count", "2")
    later = tool(Counter(), name="later")
    assert later.schema["function"]["description"] == "A thing with methods."
    assert made([later], [ToolCall("later", {"by": 1})]).results == (ToolResult("later", "3"),)


def test_a_description_may_name_the_type_and_may_be_missing() -> None:
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a (int): the first.
        """
        return a + b

    properties = tool(add).schema["function"]["parameters"]["properties"]
    assert properties == {"a": {"type": "integer", "description": "the first."}, "b": {"type": "integer"}}


def test_a_tool_without_parameters() -> None:
    def now() -> str:
        """Tell the time."""
        return "noon"

    assert tool(now).schema["function"]["parameters"] == {"type": "object", "properties": {}}
    assert answer(now) == ToolResult("now", "noon")
    assert answer(now, zone="CET").text == "now was not called: there is no parameter 'zone'; write now()"


def test_a_parameter_of_the_state_is_in_no_schema_and_one_called_state_is() -> None:
    def weather(state: str, world: State[dict[str, str]], bare: int = 0) -> str:
        """Tell the weather in a state."""
        return world[state]

    found = tool(weather)
    assert found.state == "world"
    assert list(found.schema["function"]["parameters"]["properties"]) == ["state", "bare"]
    calls = [ToolCall("weather", {"state": "Iowa"}), ToolCall("weather", {"state": "Iowa", "world": {}})]
    good, bad = made([found], calls, {"Iowa": "rain"}).results
    assert good.text == "rain"
    assert bad.text == "weather was not called: there is no parameter 'world'; write weather(state: str, bare: int = 0)"

    def bare(it: State) -> Any:  # type: ignore[type-arg]
        """Show it."""
        return it

    assert made([tool(bare)], [ToolCall("bare", {})], {"a": 1}).results[0].text == '{"a": 1}'


def two(a: State[int], b: State[int]) -> None:
    """Two."""


def rest(*words: str) -> None:
    """Words."""


def untyped(a) -> None:  # type: ignore[no-untyped-def]
    """Untyped."""


def silent(a: int) -> None:
    pass


def described(a: int) -> None:
    """Do it.

    Args:
        b: it.
    """


def strange(a: Counter) -> None:
    """Strange."""


def function(a: Callable[[], int]) -> None:
    """Function."""


def unknown(a: "Missing") -> None:  # type: ignore[name-defined]  # noqa: F821
    """Unknown."""


@dataclasses.dataclass
class Half:
    a: "Missing"  # type: ignore[name-defined]  # noqa: F821


def half(a: Half) -> None:
    """Half."""


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (lambda: 0, r"'<lambda>' can be no tool's name; give name=, of 1 to 64 letters, digits, _ and -"),
        (
            functools.partial(search, "a"),
            r"functools.partial\(.* has no types; write a function with type hints and a doc",
        ),
        (silent, "silent has no docstring; write in one what it does, for the model to read"),
        (two, "two has several parameters for the state, a, b; leave one of them"),
        (rest, r"the parameter \*words: str of rest cannot be given by name; write it as name: type"),
        (untyped, "the parameter a of untyped has no type; annotate it, a state with State"),
        (described, "the docstring of described describes b, and there is no such parameter; rename it"),
        (
            strange,
            "made of the parameter a: <class .*Counter'> of strange .*; take what JSON has, a dataclass or a Typed",
        ),
        (
            function,
            "no JSON schema can be made of the parameter a: .* of function .*State is for what no model fills in",
        ),
        (unknown, "a type of unknown is not known: name 'Missing' is not defined; define or import it in its module"),
        (half, "no JSON schema can be made of the parameter a: .*Half'> of half"),
    ],
)
def test_a_function_of_which_no_tool_can_be_made_is_told(fn: Any, told: str) -> None:
    with pytest.raises(EnvError, match=f"^tool: .*({told})"):
        tool(fn)


def test_a_tool_travels() -> None:
    def add(a: int, b: int = 2) -> int:  # without classes: a copy of one in this process would change its original
        """Add."""
        return a + b

    sent = cloudpickle.loads(cloudpickle.dumps(tool(add)))
    assert made([sent], [ToolCall("add", {"a": 3})]).results[0].text == "5"


# --- Arguments.


def types(i: int = 0, f: float = 0.0, b: bool = False, s: str = "", l: list[int] = [], n: int | None = 0) -> str:  # noqa: B006
    """Show what it is given."""
    return repr((i, f, b, s, l, n))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"i": 3.0, "f": 2, "n": None}, "(3, 2.0, False, '', [], None)"),
        ({"i": "3", "f": "2.5", "b": "true", "l": "[1, 2]", "n": "null"}, "(3, 2.5, True, '', [1, 2], None)"),
        ({"b": "False", "n": "None", "l": " [1] "}, "(0, 0.0, False, '', [1], None)"),
        ({"s": "5"}, "(0, 0.0, False, '5', [], 0)"),
        ({"s": "null"}, "(0, 0.0, False, 'null', [], 0)"),
    ],
)
def test_arguments_get_their_types(arguments: dict[str, Any], shown: str) -> None:
    assert answer(types, **arguments) == ToolResult("types", shown)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"i": 1.5}, "i: input should be a valid integer, got a number with a fractional part, found 1.5"),
        ({"i": "one"}, "i: input should be a valid integer, unable to parse string as an integer, found 'one'"),
        ({"i": None}, "i: input should be a valid integer, found None"),
        ({"i": [1]}, "i: input should be a valid integer, found [1]"),
        ({"s": 5}, "s: input should be a valid string, found 5"),
        ({"b": 2}, "b: input should be a valid boolean, unable to interpret input, found 2"),
        ({"l": "1, 2"}, "l: input should be a valid list, found '1, 2'"),
        ({"l": "[1, [2]]"}, "l[1]: input should be a valid integer, found [2]"),
        ({"l": "[" * 100_000}, "l: input should be a valid list, found '[[[[[[[[[[[[...[[[[[[[[[[[[['"),
        ({"x" * 1000: 5}, "there is no parameter 'xxxxxxxxxxxx...xxxxxxxxxxxxx'"),
    ],
)
def test_arguments_that_do_not_fit_are_told_to_the_model(arguments: dict[str, Any], told: str) -> None:
    found = answer(types, **arguments)
    assert found.status == "invalid"
    wanted = "types(i: int = 0, f: float = 0.0, b: bool = False, s: str = '', l: list[int] = [], n: int | None = 0)"
    assert found.text == f"types was not called: {told}; write {wanted}"


PLAIN = {
    "i": st.integers(),
    "f": st.floats(allow_nan=False, allow_infinity=False),
    "b": st.booleans(),
    "s": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<")),
    "l": st.lists(st.integers(), max_size=3),
    "n": st.none() | st.integers(),
}


@settings(max_examples=60)
@given(arguments=st.fixed_dictionaries({}, optional=PLAIN))
def test_a_format_without_types_gives_a_tool_what_one_with_types_does(arguments: dict[str, Any]) -> None:
    results = []
    for writer, format in (("qwen3_coder", "qwen3_coder"), ("hermes", "hermes")):
        parsed = parse(written(writer, "", [ToolCall("types", arguments)]).whole, format)
        results.append(made([tool(types)], parsed.calls).results)
    expected = tuple(
        arguments.get(name, default) for name, default in zip("ifbsln", (0, 0.0, False, "", [], 0), strict=True)
    )
    assert results[0] == results[1] == (ToolResult("types", repr(expected)),)


# --- Calls.


def test_calls_run_at_once_and_keep_their_order() -> None:
    both, later = threading.Barrier(2), threading.Event()

    def wait(name: str) -> str:
        """Wait for the other."""
        both.wait(60)  # raises, if the calls come one after the other
        if name == "first":
            later.wait(60)
        else:
            later.set()
        return name

    async def sleep(name: str) -> str:
        """Sleep, and let others run."""
        await asyncio.to_thread(later.wait, 60)
        return name

    calls = [
        ToolCall("wait", {"name": "first"}, "a"),
        ToolCall("sleep", {"name": "s"}),
        ToolCall("wait", {"name": "last"}),
    ]
    results = made([tool(wait), tool(sleep)], calls).results
    assert [(each.text, each.id) for each in results] == [("first", "a"), ("s", None), ("last", None)]


def push(what: str, stack: State[tuple[str, ...]]) -> NewState:
    """Push."""
    time.sleep(0.05 / (1 + len(stack)))  # the later, the faster
    return NewState((*stack, what), f"{len(stack) + 1} deep")


async def peek(stack: State[tuple[str, ...]]) -> Any:
    """Peek."""
    if not stack:
        raise ToolError("there is nothing")
    return stack[-1]


def test_calls_with_state_come_one_after_the_other() -> None:
    calls = [ToolCall("peek", {}), *(ToolCall("push", {"what": each}) for each in "abc"), ToolCall("peek", {})]
    found = made([tool(push), tool(peek)], calls, ())
    assert found.state == ("a", "b", "c")
    assert [each.text for each in found.results] == ["there is nothing", "1 deep", "2 deep", "3 deep", "c"]
    assert found.results[0].status == "error"


def test_what_a_model_does_wrong_is_told_and_counted() -> None:
    def fail() -> None:
        """Fail."""
        raise ToolError("not now")

    malformed = parse("<tool_call>", "hermes").malformed
    calls: list[ToolCall | MalformedCall] = [
        ToolCall("fail", {}, "x"),
        ToolCall("fial", {}),
        ToolCall("fail", {"a": 1}),
        *malformed,
        ToolCall("fail", {}),
    ]
    results = made([tool(fail)], calls, most=4).results
    assert [each.text for each in results] == [
        "not now",
        "there is no tool 'fial'; the tools are fail",
        "fail was not called: there is no parameter 'a'; write fail()",
        "this call was not made: it ends before its JSON begins",
        "this call was not made: 4 calls were allowed; make fewer in a turn",
    ]
    assert [each.status for each in results] == ["error", "invalid", "invalid", "malformed", "skipped"]
    one = made([tool(fail)], calls, most=1).results
    assert one[1].text == "this call was not made: 1 call was allowed; make fewer in a turn"
    assert [each.message for each in results[2:4]] == [
        {"role": "tool", "name": "fail", "content": results[2].text},
        {"role": "tool", "content": results[3].text},
    ]
    assert results[0].message == {"role": "tool", "name": "fail", "content": "not now", "tool_call_id": "x"}
    counted = {"calls": 5, "malformed": 1, "invalid": 2, "error": 1, "skipped": 1}
    assert count_calls(results) == {f"tools/{key}": value for key, value in counted.items()}
    assert made([], [ToolCall("f", {})]).results[0].text == "there is no tool 'f'; there are none"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("é\n", "é\n"),
        (None, "null"),
        ({"é": [1, 2.5, True]}, '{"é": [1, 2.5, true]}'),
        ([Edit(1)], '[{"line_number": 1, "text": null}]'),
        (Color.RED, '"red"'),
    ],
)
def test_a_result_is_text_or_json(value: Any, text: str) -> None:
    def give() -> Any:
        """Give it."""
        return value

    assert answer(give) == ToolResult("give", text)


def test_an_error_of_a_tool_is_no_observation() -> None:
    cancelled: list[str] = []

    async def wait() -> None:
        """Wait."""
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append("wait")
            raise

    def fail() -> None:
        """Fail."""
        raise KeyError("a bug")

    def stop() -> None:
        """Stop."""
        raise StopIteration

    def leave() -> None:
        """Leave."""
        raise SystemExit(3)

    tools = [tool(each) for each in (wait, fail, stop, leave)]
    with pytest.raises(KeyError, match="a bug"):
        made(tools, [ToolCall("wait", {}), ToolCall("fail", {})])
    assert cancelled == ["wait"]
    with pytest.raises(RuntimeError, match="StopIteration"):
        made(tools, [ToolCall("stop", {})])
    with pytest.raises(
        EnvError, match=r"call: leave ends the process: SystemExit\(3\); let it return, or raise ToolError"
    ):
        made(tools, [ToolCall("leave", {})])


def test_a_call_that_takes_too_long_fails() -> None:
    async def sleep() -> None:
        """Sleep."""
        await asyncio.sleep(3600)

    ended = threading.Event()

    def hang() -> None:
        """Hang."""
        ended.wait()

    async def own() -> None:
        """Fail."""
        raise TimeoutError("of a server")

    told = "call: sleep did not return within 0.05 s; give it more, or let it end by itself and raise ToolError"
    with pytest.raises(TimeoutError, match=told):
        made([tool(sleep)], [ToolCall("sleep", {})], timeout=0.05)
    with pytest.raises(TimeoutError, match="call: hang did not return within 0.05 s"):
        made([tool(hang)], [ToolCall("hang", {})], timeout=0.05)  # also the end of its loop waits for no thread
    ended.set()
    with pytest.raises(TimeoutError, match="^of a server$"):
        made([tool(own)], [ToolCall("own", {})], timeout=60)


def test_a_tool_that_breaks_its_contract_is_told() -> None:
    def change() -> NewState:
        """Change what it has not."""
        return NewState(1)

    def odd() -> Any:
        """Give what JSON has not."""
        return [threading.Lock()]

    with pytest.raises(
        EnvError, match="call: change returned NewState, and has no state; annotate a parameter with State"
    ):
        answer(change)
    with pytest.raises(
        EnvError, match=r"call: odd returned \[<unlocked .*\], of which no JSON can be made .*return text"
    ):
        answer(odd)
    again = tool(edit, name="odd")
    with pytest.raises(
        EnvError, match=r"call: two tools have the name odd; give one of them another, tool\(\.\.\., name"
    ):
        made([again, tool(odd)], [])


def test_a_plain_tool_sees_the_callers_context() -> None:
    who = contextvars.ContextVar("who", default="nobody")

    def ask() -> str:
        """Ask."""
        return who.get()

    async def main() -> Called:
        who.set("me")
        return await call([tool(ask)], [ToolCall("ask", {})])

    assert asyncio.run(main()).results[0].text == "me"
