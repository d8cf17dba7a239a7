"""Fields that say the same thing: none of them disappears unsaid."""

from typing import Any

import pytest

from nrl import data
from nrl.data.forms import to_template_form
from nrl.data.messages import ROLES, canonical_messages
from nrl.errors import DataError
from nrl.gym.endpoint import chat_completions
from nrl.gym.endpoint.fields import Unusable
from tests.chat_tokenizers import tokenizer

ASK = {"role": "user", "content": "Hello"}
BYE = {"role": "assistant", "content": "Bye"}
SYSTEM = {"role": "system", "content": "Be brief"}
TOOL = {"type": "function", "function": {"name": "find", "description": "Find.", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "other", "description": "Find.", "parameters": {"type": "object"}}}
CALL = {"name": "find", "arguments": {"q": "Hi"}}


def taught(row: dict[str, Any]) -> str:
    of = tokenizer("chatml")
    (task,) = data.rows([row])
    batch = data.supervised([dict(task)], of)
    assert data.supervised([row], of)["input_ids"].tolist() == batch["input_ids"].tolist()
    return str(of.decode(batch["input_ids"][0]))


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "Thanks", "messages": [ASK, BYE]}, "'prompt', 'Thanks', and 'messages' that do not begin with it"),
        ({"prompt": [{**ASK, "content": "Hi"}], "messages": [ASK, BYE]}, "'prompt', .* and 'messages'"),
        ({"prompt": [SYSTEM, ASK], "messages": [{**SYSTEM, "content": "Hi"}, ASK, BYE]}, "'prompt', .* and 'messages'"),
        ({"prompt": [ASK, BYE, ASK], "messages": [ASK, BYE]}, "'prompt', .* and 'messages'"),
        ({"prompt": [3, 4], "messages": [ASK, BYE]}, r"'prompt', \[3, 4\], and 'messages'"),
        ({"messages": [ASK, BYE], "response": "Hi"}, "'response', 'Hi', and 'messages' that end with another answer"),
        ({"messages": [ASK, BYE], "response": [{**BYE, "content": "Hi"}]}, "'response', .* and 'messages' that end"),
        ({"messages": [ASK, BYE], "chosen": "Hi", "rejected": "No"}, "'chosen', 'Hi', and 'messages' that end with"),
        ({"messages": [SYSTEM, ASK, BYE], "system": "Hi"}, "'system', 'Hi', and its messages begin with another"),
        ({"messages": [SYSTEM, ASK, BYE], "system_prompt": "Hi"}, "'system', 'Hi', and its messages begin with anoth"),
        ({"messages": [ASK, BYE], "system": "a", "system_prompt": "b"}, "'system', 'a', and 'system_prompt', 'b'"),
        ({"messages": [ASK, BYE], "tools": [TOOL], "functions": [OTHER]}, "'tools', .* and 'functions', .* which diff"),
        ({"prompt": "Hello", "response": "Bye", "history": [["Hi", "No"]]}, "'history', .*, which nothing reads"),
        ({"messages": [ASK, BYE], "history": [ASK, BYE]}, "'history', .*, which nothing reads"),
        ({"messages": [{**SYSTEM, "functions": [TOOL]}, ASK, BYE]}, "message 0 has 'functions', .* which no template"),
        ({"messages": [{**SYSTEM, "tools": [TOOL]}, ASK, BYE]}, "message 0 has 'tools', .* which no template writes"),
        ({"messages": [ASK, {**BYE, "content": "", "refusal": "No"}]}, "message 1 has 'refusal', 'No', which no templ"),
        ({"messages": [ASK, {**BYE, "reasoning": "a", "thinking": "b"}]}, "message 1: 'reasoning' and 'thinking' diff"),
        ({"messages": [ASK, {**BYE, "value": "Hi"}]}, "message 1 has 'content', 'Bye', and 'value', 'Hi', which diff"),
        ({"messages": [ASK, {**BYE, "from": "human"}]}, "message 1 has 'role', 'assistant', and 'from', 'human', whi"),
        (
            {"messages": [ASK, {**BYE, "tool_calls": [{"function": {**CALL, "parameters": {"q": "No"}}}]}]},
            "call 0 of 'find': 'arguments' and 'parameters' differ",
        ),
        (
            {"messages": [ASK, {**BYE, "tool_calls": [{"name": "no", "function": CALL}]}]},
            "call 0 has another 'name' beside its 'function' than in it",
        ),
        (
            {"messages": [ASK, {"role": "tool_call", "content": '{"name": "find"}', "tool_calls": [CALL]}]},
            "message 1 has a call in 'content' and others in 'tool_calls'",
        ),
    ],
)
def test_fields_that_disagree_are_refused_by_both_names(row: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError, match=named):
        data.tasks([row])
    of = tokenizer("chatml")
    read = data.preferences if "chosen" in row else data.supervised
    if "messages" in row:
        with pytest.raises(DataError, match=f"row 0.*{named}"):
            read([row | ({"prompt": "Hello"} if {"chosen", "response"} & {*row} else {})], of)


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": "Hello"},
        {"prompt": " Hello\n"},
        {"prompt": [ASK]},
        {"prompt": ""},
        {"prompt": None, "question": "Hello"},
        {"problem": "Hello", "question": "Hello "},
        {"chosen": [ASK, BYE], "rejected": [ASK, {**BYE, "content": "No"}]},
    ],
)
def test_fields_that_agree_are_read(more: dict[str, Any]) -> None:
    assert taught({"messages": [ASK, BYE], **more}) == taught({"messages": [ASK, BYE]})
    assert (
        data.rows([{"messages": [ASK, BYE], "response": "Bye", **more}])[0]["prompt"][0]["content"].strip() == "Hello"
    )


def test_a_system_message_of_one_field_is_that_of_the_other() -> None:
    whole = taught({"messages": [SYSTEM, ASK, BYE]})
    for row in (
        {"prompt": [SYSTEM, ASK], "messages": [ASK, BYE]},
        {"prompt": "Hello", "messages": [SYSTEM, ASK, BYE]},
        {"messages": [ASK, BYE], "system_prompt": "Be brief"},
        {"messages": [SYSTEM, ASK, BYE], "system_prompt": "Be brief", "system": ""},
    ):
        assert taught(row) == whole
        assert data.rows([row])[0]["prompt"] == [SYSTEM, ASK]


def test_functions_of_a_row_are_its_tools() -> None:
    whole = taught({"messages": [ASK, BYE], "tools": [TOOL]})
    assert taught({"messages": [ASK, BYE], "functions": [TOOL["function"]]}) == whole
    assert taught({"messages": [ASK, BYE], "functions": [TOOL["function"]], "tools": [TOOL]}) == whole


def test_a_call_that_is_written_twice_is_taught_once() -> None:
    call = {"name": "find", "arguments": '{"q": "Hi"}'}
    twice = {"role": "assistant", "content": None, "tool_calls": [{"function": call}], "function_call": call}
    (message,) = canonical_messages([twice], "the chat")
    assert message["tool_calls"] == [{"type": "function", "function": CALL}]


def test_templates_decide_which_prompt_is_read() -> None:
    row = {"prompt": "Hello", "question": "Thanks", "answer": "2"}
    assert data.rows([row], template="{prompt} {question}", chat=False)[0]["prompt"] == "Hello Thanks"


@pytest.mark.parametrize(
    ("row", "read", "other"),
    [
        ({"prompt": "Hello", "question": "Thanks"}, "prompt", "question"),
        ({"prompt": [ASK], "problem": "Thanks"}, "prompt", "problem"),
        ({"question": "Hello", "problem": "Thanks"}, "question", "problem"),
        ({"messages": [ASK, BYE], "question": "Thanks"}, "messages", "question"),
        ({"prompt": "Hello", "messages": [{**ASK, "content": "Hi"}]}, "prompt", "messages"),
        ({"question": "Hello", "context": "Thanks"}, "question", "context"),
        ({"messages": [ASK, BYE], "input": "Thanks"}, "messages", "input"),
    ],
)
def test_prompts_that_nothing_reads_are_said_once(
    row: dict[str, Any], read: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for read_rows in (data.rows, lambda given: data.tasks(given, shuffle=False).take(2)):
        rows = read_rows([row, row])
        assert rows[1]["prompt"] == [ASK]
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"data: 2 of 2 rows of the source have '{other}' that is not in their '{read}', and ")


# --- Roles


@pytest.mark.parametrize(
    ("speakers", "role"),
    [
        ("human Human HUMAN user prompter", "user"),
        ("gpt GPT chatgpt ChatGPT bing assistant Assistant model", "assistant"),
        ("system System", "system"),
        ("tool observation tool_response function_response Function", "tool"),
    ],
)
def test_roles_in_any_case(speakers: str, role: str) -> None:
    for speaker in speakers.split():
        for message in ({"from": speaker, "value": "a"}, {"role": speaker, "content": "a"}):
            assert canonical_messages([message], "x") == [{"role": role, "content": "a"}]


@pytest.mark.parametrize("speaker", ["function_call", "tool_call", "Tool_Call"])
def test_calls_of_sharegpt(speaker: str) -> None:
    (message,) = canonical_messages([{"from": speaker, "value": '{"name": "find", "arguments": {"q": "Hi"}}'}], "x")
    assert message == {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}


def test_an_unknown_role_is_named_with_those_that_are_read() -> None:
    listed = ", ".join(ROLES)
    with pytest.raises(DataError, match=f"message 0: 'from' is 'narrator'; the roles that are read are {listed}"):
        data.rows([{"conversations": [{"from": "narrator", "value": "a"}]}], format="sharegpt")
    with pytest.raises(DataError, match=f"has the role 'assitant', which the chat template .* are read are {listed}"):
        data.render([{**BYE, "role": "assitant"}, ASK], tokenizer("chatml"))
    named = tokenizer("llama3_1")  # whose template writes this role
    assert to_template_form([ASK, {"role": "ipython", "content": "a"}], named)[1]["role"] == "ipython"


def test_two_conversations_of_a_row() -> None:
    first, second = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Bye"}], [ASK, BYE]
    assert len(data.rows([{"conversations": first, "messages": second}], format="sharegpt")) == 1
    for row in (
        {"conversations": first, "messages": [ASK, {**BYE, "content": "Hi"}]},
        {"conversations": first, "conversation": first[:1]},
    ):
        with pytest.raises(DataError, match="sharegpt: 'conversations' and '(messages|conversation)' differ"):
            data.rows([row], format="sharegpt")
    with pytest.raises(DataError, match="prompt_completion: 'completion' and 'response' differ"):
        data.rows([{"prompt": "a", "completion": "b", "response": "c"}], format="prompt_completion")
    with pytest.raises(DataError, match="verl: 'reward_model' has the ground_truth '2', and 'answer' is '3'"):
        data.rows([{"prompt": [ASK], "reward_model": {"ground_truth": "2"}, "answer": "3"}], format="verl")


# --- The endpoint


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (
            {"reasoning": "a", "reasoning_content": "b"},
            "'reasoning_content' and 'reasoning' differ; give its reasoning",
        ),
        ({"thinking": "a", "reasoning": "b"}, "'reasoning' and 'thinking' differ"),
        ({"reasoning": ["a"]}, "'reasoning' is a list; give a text"),
        ({"content": "<think>a</think>Bye", "reasoning": "b"}, "'reasoning' and the reasoning in 'content' differ"),
        ({"function_call": CALL}, "'function_call' is not read; give the call in 'tool_calls'"),
    ],
)
def test_the_endpoint_refuses_fields_that_differ(message: dict[str, Any], named: str) -> None:
    with pytest.raises(Unusable, match=rf"messages\[1\]: {named}") as caught:
        chat_completions.read({"messages": [ASK, {**BYE, **message}, ASK]})
    assert caught.value.param == "messages[1]"


def test_the_endpoint_reads_fields_that_agree() -> None:
    for fields in ({"reasoning": "a", "reasoning_content": "a"}, {"thinking": "a"}, {"reasoning": "a", "thinking": ""}):
        read = chat_completions.read({"messages": [ASK, {**BYE, **fields}, ASK], "max_tokens": 3})
        assert read.messages[1]["reasoning"] == "a"
    with pytest.raises(Unusable, match="max_completion_tokens is 4 and max_tokens 3, which differ; send one of them"):
        chat_completions.read({"messages": [ASK], "max_tokens": 3, "max_completion_tokens": 4})


# --- Prompts that are a part of the messages


@pytest.mark.parametrize("prompt", ["Be brief", "Be brief\n\nHello", [SYSTEM], "Hello"])
def test_a_prompt_that_the_first_messages_hold_is_all_of_them(prompt: Any) -> None:
    row = {"prompt": prompt, "prompt_id": "x", "messages": [SYSTEM, ASK, BYE], "category": "Chat"}
    assert taught(row) == taught({"messages": [SYSTEM, ASK, BYE]})
    assert data.rows([row])[0]["prompt"] == [SYSTEM, ASK]
    more = {**row, "messages": [SYSTEM, ASK, BYE, {**ASK, "content": "Thanks"}, {**BYE, "content": "Hi"}]}
    assert data.rows([more])[0]["prompt"] == [SYSTEM, ASK]
    assert taught({**more, "messages": [*more["messages"][:2], {**BYE, "weight": 0}, *more["messages"][3:]]}) == taught(
        {"prompt": more["messages"][:4], "response": "Hi"}
    )


def test_a_response_answers_all_of_the_messages_before_it() -> None:
    messages = [ASK, BYE, {**ASK, "content": "Thanks"}, {**BYE, "content": "Hi"}]
    of = tokenizer("chatml")
    expected = data.supervised([{"prompt": messages[:3], "response": "Hi"}], of)["input_ids"].tolist()
    for prompt in ("Hello", [ASK]):
        row = {"prompt": prompt, "messages": messages, "response": "Hi"}
        for each in (row, data.rows([row])[0]):
            assert data.supervised([each], of)["input_ids"].tolist() == expected
        pair = {"prompt": prompt, "messages": messages, "chosen": "Hi", "rejected": "No"}
        assert data.preferences([pair], of)["input_ids"][0, 0].tolist()[: len(expected[0])] == expected[0]


def test_a_system_prompt_may_be_parts_or_have_another_name() -> None:
    whole = taught({"messages": [{**SYSTEM, "content": "Be\n\nbrief"}, ASK, BYE]})
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}}]
    assert taught({"messages": [ASK, BYE], "system": parts}) == whole
    assert taught({"messages": [ASK, BYE], "system_message": "Be\n\nbrief"}) == whole
    with pytest.raises(DataError, match="row 0: 'system': message 0: 'content' is a list; .* of the type 'image'"):
        data.supervised([{"messages": [ASK, BYE], "system": [{"type": "image"}]}], tokenizer("chatml"))


def test_reasoning_beside_a_response_is_refused() -> None:
    of, row = tokenizer("qwen3"), {"question": "Hello", "reasoning": "Hmm, well", "response": "Bye"}
    with pytest.raises(DataError, match="row 0 has 'reasoning', 'Hmm, well', beside 'response', which alone"):
        data.supervised(data.rows([row]), of)
    (task,) = data.rows([row], format="prompt=question,reasoning=reasoning,response=response")
    assert of.decode(data.supervised([task], of)["input_ids"][0]).count("<think>\nHmm, well\n</think>") == 1
    for agreeing in ({"reasoning": "on"}, {"response": "<think>Hmm, well</think>Bye"}):
        assert data.supervised(data.rows([row | agreeing]), of)["loss_mask"].any()
