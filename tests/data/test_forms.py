"""In which form chat templates take calls, reasoning and content beside calls."""

import copy
from typing import Any

import pytest

from nrl import tiny
from nrl.data.forms import Form, form, to_template_form
from tests.chat_tokenizers import tokenizer
from tests.rollout.conversations import TOOLS

FORMS = {  # written by hand, from the templates
    "chatml": Form(plain=True),
    "qwen2_5": Form(plain=True),
    "qwen3": Form(reasoning="reasoning_content", plain=True, thought="reasoning_content"),
    "qwen3_training": Form(reasoning="reasoning_content", plain=True, thought="reasoning_content"),
    "qwen3_5_think": Form(reasoning="reasoning_content", plain=True, thought="reasoning_content"),
    "glm4moe": Form(reasoning="reasoning_content", plain=True, thought="reasoning_content"),
    "llama3_1": Form(content=False, several=False, plain=True),
    "llama3_2": Form(content=False, several=False, plain=True),
    "deepseekv3": Form(text=True, plain=True),
    "mistral_v3": Form(content=False, plain=True, ids=True),
    "mistral_v11": Form(plain=True, ids=True),
    "mistral_v13": Form(plain=True),
    "gptoss": Form(reasoning="thinking", several=False, thought="thinking"),
    "gemma3": Form(content=False, several=False),  # it refuses results
}


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", FORMS)
def test_forms_of_real_templates(name: str, tools: Any) -> None:
    assert form(tokenizer(name), tools) == FORMS[name]


CALLS = "{% for call in m.tool_calls or [] %}{% set given = call.function.arguments %}%s{% endfor %}"


@pytest.mark.parametrize(
    ("writes", "text"),
    [
        ("{{ given | tojson }}", False),
        ("{{ given if given is string else given | tojson }}", False),
        ("{% for key, value in given.items() %}{{ key }}={{ value }}{% endfor %}", False),
        ("{{ '' + given }}", True),
        ("{{ given }}", True),  # Python's own text of an object is no JSON
        ("{% if given is string %}{{ given }}{% endif %}", True),
        ("", False),  # it writes neither
    ],
)
def test_arguments_are_text_where_objects_are_not_written(writes: str, text: bool) -> None:
    of = tiny.bpe(["user assistant"])
    of.chat_template = "{% for m in messages %}{{ m.content }}" + CALLS.replace("%s", writes) + "{% endfor %}"
    assert form(of).text == text
    call = {"id": "a", "type": "function", "function": {"name": "find", "arguments": {"q": "né"}}}
    said: list[Any] = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    before = copy.deepcopy(said)
    given: Any = to_template_form(said, of)
    assert said == before
    wanted = '{"q": "né"}' if text else {"q": "né"}
    expected = {**call, "function": {"name": "find", "arguments": wanted}}
    assert given == [said[0], {**said[1], "tool_calls": [expected]}]


def test_each_template_of_a_tokenizer_is_asked() -> None:
    of = copy.copy(tokenizer("chatml"))
    assert not form(of).text
    of.chat_template = tokenizer("deepseekv3").chat_template
    assert form(of).text
