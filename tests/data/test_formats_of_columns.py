"""Formats by the names of columns, and of layouts that many data sets of the hub have."""

import json
from typing import Any

import pytest

from nrl import data
from nrl.errors import DataError
from tests.chat_tokenizers import tokenizer

ASK = {"role": "user", "content": "Hello"}
BYE = {"role": "assistant", "content": "Bye"}
HI = {"role": "assistant", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief"}
THOUGHT = [{"role": "assistant", "content": "Bye", "reasoning_content": "Hmm"}]


def one(format: Any, row: dict[str, Any]) -> dict[str, Any]:
    (task,) = data.rows([row], format=format)
    return dict(task)


@pytest.mark.parametrize(
    "format",
    [
        {"prompt": "query", "response": "reply", "system": "rules"},
        "prompt=query,response=reply,system=rules",
        " prompt = query , response = reply , system = rules",
        data.columns(prompt="query", response="reply", system="rules"),
    ],
)
def test_columns_have_the_names_of_fields(format: Any) -> None:
    row = {"query": "Hello", "reply": "Bye", "rules": "Be brief", "id": 7}
    assert one(format, row) == {"id": 7, "system": "Be brief", "response": "Bye", "prompt": [SYSTEM, ASK]}
    assert one(format, row | {"rules": None})["prompt"] == [ASK]
    with pytest.raises(DataError, match="row 0: columns: the row has no 'query'; it has reply"):
        one(format, {"reply": "Bye"})


def test_columns_may_lead_into_objects_and_join_texts() -> None:
    row = {"info": {"truth": "2", "a.b": 1}, "task": "Add.", "given": "1 and 1", "x.y": "Bye"}
    joined = one("prompt=task,prompt=given,answer=info.truth,response=x.y", row)
    assert joined["prompt"] == [{"role": "user", "content": "Add.\n\n1 and 1"}]
    assert (joined["answer"], joined["response"]) == ("2", "Bye")
    assert one({"prompt": ["task", "given"]}, row | {"given": ""})["prompt"] == [{"role": "user", "content": "Add."}]
    assert one({"prompt": ["task", "given"]}, {"task": "Add."})["prompt"] == [{"role": "user", "content": "Add."}]


def test_a_history_of_a_column_comes_before_the_prompt() -> None:
    row = {"prompt": "Thanks", "history": [["Hello", "Bye"]], "response": "Hi"}
    thanks = {"role": "user", "content": "Thanks"}
    assert one("prompt=prompt,history=history,response=response", row)["prompt"] == [ASK, BYE, thanks]
    assert one("prompt=prompt,history=history,response=response", row | {"history": []})["prompt"] == [thanks]
    with pytest.raises(DataError, match=r"columns: 'history' is \[3\]; give pairs of a question and its answer"):
        one("prompt=prompt,history=history,response=response", row | {"history": [3]})


def test_reasoning_of_a_column_is_that_of_the_answer() -> None:
    row = {"q": "Hello", "thoughts": ["Hmm"], "a": "Bye"}
    assert one("prompt=q,reasoning=thoughts,response=a", row)["response"] == THOUGHT
    assert one("prompt=q,reasoning=thoughts,response=a", row | {"thoughts": None})["response"] == "Bye"
    with pytest.raises(DataError, match="columns: 'reasoning' is an int; give it and the response as texts"):
        one("prompt=q,reasoning=thoughts,response=a", row | {"thoughts": 3})


@pytest.mark.parametrize(
    ("format", "match"),
    [
        ({"question": "q"}, "columns: no field 'question'; give columns of prompt, response, answer, "),
        ({}, "columns: no field; give columns of prompt"),
        ({"response": ["a", "b"]}, "columns: 'response' has several columns; only prompt and system may have them"),
        ({"prompt": "a", "reasoning": "b"}, "columns: 'reasoning' stands before a response; give 'response', too"),
        ("history=a", "columns: 'history' stands before a prompt; give 'prompt', too"),
        ("prompt=", "columns: 'prompt=' names no column; write prompt=question,response=solution"),
        ("prompt=a,b", "columns: 'b' names no column"),
        ("sharegpt+nothing", "there is no format 'nothing'; .*, or give columns, such as 'prompt=question,"),
    ],
)
def test_columns_that_no_field_has(format: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        data.tasks([{"prompt": "a"}], format=format)


PAIR = {"chosen": "Bye", "rejected": "No"}
SIDES = {"conversation_a": [ASK, BYE], "conversation_b": [ASK, HI]}
COMPLETIONS = [{"response": text, "overall_score": score} for text, score in (("No", 2.0), ("Bye", 8.5), ("Hi", 5))]
WEATHER = {"name": "find", "description": "Find.", "parameters": {"q": {"type": "str", "description": "What."}}}
CALL = {"name": "find", "arguments": {"q": "Hi"}}


@pytest.mark.parametrize(
    ("format", "row", "expected"),
    [
        ("capybara", {"conversation": [{"input": "Hello", "output": "Bye"}]}, {"messages": [ASK, BYE]}),
        ("exchanges", {"conversations": ["Hello", "Bye"]}, {"messages": [ASK, BYE]}),
        ("exchanges", {"messages": json.dumps([{"human": "Hello", "assistant": "Bye"}])}, {"messages": [ASK, BYE]}),
        ("guanaco", {"text": "### Human: Hello### Assistant: Bye"}, {"messages": [ASK, BYE]}),
        (
            "glaive",
            {"system": "SYSTEM: Be brief", "chat": "USER: Hello\n\n\nASSISTANT: Bye <|endoftext|>\n\n\n"},
            {"prompt": [SYSTEM, ASK], "messages": [ASK, BYE]},
        ),
        ("dolly", {"instruction": "Hello", "context": "", "response": "Bye"}, {"prompt": [ASK], "response": "Bye"}),
        ("metamath", {"query": "Hello", "response": "Bye"}, {"prompt": [ASK], "response": "Bye"}),
        ("numina", {"problem": "Hello", "solution": "Bye"}, {"prompt": [ASK], "response": "Bye"}),
        ("medical_o1", {"Question": "Hello", "Complex_CoT": "Hmm", "Response": "Bye"}, {"response": THOUGHT}),
        ("nemotron", {"input": [ASK], "output": "Bye", "system_prompt": "Be brief"}, {"prompt": [SYSTEM, ASK]}),
        ("openorca", {"system_prompt": "Be brief", "question": "Hello", "response": "Bye"}, {"prompt": [SYSTEM, ASK]}),
        ("orca_dpo_pairs", {"system": "", "question": "Hello", **PAIR}, {"prompt": [ASK], **PAIR}),
        (
            "s1k",
            {"question": "Hello", "thinking_trajectories": ["Hmm"], "attempt": "Bye", "solution": "2"},
            {"prompt": [ASK], "response": THOUGHT, "solution": "2"},
        ),
        (
            "s1k",
            {"question": "Hello", "deepseek_thinking_trajectory": "Hmm", "deepseek_attempt": "Bye"},
            {"response": THOUGHT},
        ),
        (
            "ultrafeedback_completions",
            {"instruction": "Hello", "completions": COMPLETIONS, "source": "x"},
            {"prompt": [ASK], **PAIR, "source": "x"},
        ),
        (
            "pku_saferlhf",
            {"prompt": "Hello", "response_0": "No", "response_1": "Bye", "better_response_id": 1},
            {"prompt": [ASK], **PAIR},
        ),
        ("arena", {**SIDES, "winner": "model_a"}, {"prompt": [ASK], "chosen": [BYE], "rejected": [HI]}),
        ("arena", {**SIDES, "winner": "model_b"}, {"prompt": [ASK], "chosen": [HI], "rejected": [BYE]}),
        (
            "verl",
            {"prompt": json.dumps([ASK]), "reward_model": json.dumps({"style": "rule", "ground_truth": "2"})},
            {"prompt": [ASK], "answer": "2"},
        ),
        (
            "xlam",
            {"query": "Hello", "answers": json.dumps([CALL]), "tools": json.dumps([WEATHER]), "id": 7},
            {"prompt": [ASK], "id": 7},
        ),
    ],
)
def test_layouts_of_the_hub(format: str, row: dict[str, Any], expected: dict[str, Any]) -> None:
    task = one(format, row)
    assert {name: task.get(name) for name in expected} == expected
    of = tokenizer("qwen3")
    if "chosen" in task:
        data.preferences([task], of)
    elif "answer" not in task:
        assert data.supervised([task], of)["loss_mask"].any()


def test_rows_without_a_winner_are_left_out() -> None:
    equal = [{"response": text, "overall_score": 3.0} for text in ("a", "b")]
    rows = [{"instruction": "Hello", "completions": completions} for completions in (equal, COMPLETIONS)]
    stream = data.tasks(rows, format="ultrafeedback_completions")
    assert (stream.size, stream.dropped) == (1, {"format": 1})
    ties = [{**SIDES, "winner": winner} for winner in ("tie", "tie (bothbad)", "model_a")]
    assert data.tasks(ties, format="arena").size == 1


def test_parameters_of_xlam_become_a_schema() -> None:
    parameters = {
        "q": {"type": "str", "description": "What."},
        "many": {"type": "List[int], optional", "description": "All.", "default": "[]"},
        "near": {"type": "Coordinates"},
    }
    row = {"query": "Hello", "answers": [CALL], "tools": [{**WEATHER, "parameters": parameters}]}
    task = one("xlam", row)
    assert task["tools"][0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "q": {"type": "string", "description": "What."},
            "many": {"type": "array", "items": {"type": "integer"}, "description": "All.", "default": "[]"},
            "near": {"type": "Coordinates"},
        },
        "required": ["q", "near"],
    }
    schema = {"type": "object", "properties": {"q": {"type": "string"}}}
    whole = one("xlam", {**row, "tools": [{**WEATHER, "parameters": schema}]})
    assert whole["tools"][0]["function"]["parameters"] == schema
    of = tokenizer("gptoss")
    assert "many" in of.decode(data.supervised([task], of)["input_ids"][0])


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"conversations": [{"from": "human", "value": "a"}]}, "sharegpt"),
        ({"conversation": [ASK, BYE]}, "sharegpt"),
        ({"conversation": [{"input": "a", "output": "b"}]}, "exchanges"),
        ({"conversations": ["a", "b"]}, "exchanges"),
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca"),
        ({"instruction": "a", "context": "", "response": "b"}, "dolly"),
        ({"instruction": "a", "completions": []}, "ultrafeedback_completions"),
        ({"query": "a", "answers": "[]", "tools": "[]"}, "xlam"),
        ({"query": "a", "response": "b", "type": "x"}, "prompt=query,response=response"),
        ({"text": "### Human: a### Assistant: b"}, "guanaco"),
        ({"system": "a", "chat": "USER: a"}, "glaive"),
        ({"Question": "a", "Complex_CoT": "b", "Response": "c"}, "prompt=Question,reasoning=Complex_CoT,response=R"),
    ],
)
def test_an_error_names_the_format_that_reads_the_row(row: dict[str, Any], format: str) -> None:
    with pytest.raises(DataError, match=f"row 0 has none of prompt, .*Read such rows with format='{format}"):
        data.tasks([row])
    with pytest.raises(
        DataError, match=f"row 0: gsm8k: the row has no 'question'; .*read such rows with format='{format}"
    ):
        data.tasks([row], format="gsm8k")


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"question": "a", "answer": "b\n#### 2"}, "gsm8k"),
        ({"question": "a", "answer": "b"}, "prompt=question,response=answer"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"problem": "a", "solution": "b"}, "prompt=problem,response=solution"),
        ({"problem": "a", "generated_solution": "b", "expected_answer": "2"}, "openmathinstruct2"),
    ],
)
def test_an_error_of_a_missing_response_names_the_format(row: dict[str, Any], format: str) -> None:
    (task,) = data.rows([row])
    with pytest.raises(DataError, match=f"row 0 has no 'response'; .* Read such rows with format='{format}'"):
        data.supervised([task], tokenizer("chatml"))
    (read,) = data.rows([row], format=format)
    assert data.supervised([read], tokenizer("chatml"))["loss_mask"].any()
    with pytest.raises(DataError, match="row 0 has no 'chosen'; .* Read such rows with format='pku_saferlhf'"):
        data.preferences([{"prompt": "a", "response_0": "b", "response_1": "c"}], tokenizer("chatml"))


@pytest.mark.parametrize(
    ("format", "row", "match"),
    [
        (
            "exchanges",
            {"conversation": [{"input": "a"}]},
            "exchanges: exchange 0 is {'input': 'a'}; give 'input'",
        ),
        (
            "exchanges",
            {"conversation": [{"input": 1, "output": "b"}]},
            "exchanges: 'conversation' has an int where ",
        ),
        ("exchanges", {"conversation": "[]"}, "exchanges: 'conversation' has no exchanges; leave the row out"),
        ("exchanges", {"a": 1}, "exchanges: the row has no 'conversation'; it has a"),
        ("guanaco", {"text": "Hello"}, "dialogue: 'text' does not begin with a speaker, as in '### Human:': 'Hello'"),
        ("guanaco", {"a": 1}, "dialogue: the row has neither 'chat' nor 'text'; it has a"),
        ("arena", {**SIDES, "winner": "a"}, "arena: 'winner' is 'a'; it must be 'model_a', 'model_b' or a tie"),
        (
            "pku_saferlhf",
            {"prompt": "a", "response_0": "b", "response_1": "c", "better_response_id": 2},
            "pku_saferlhf: 'better_response_id' is 2; it must be 0 or 1",
        ),
        ("s1k", {"question": "a", "attempt": "b"}, "s1k: the row has no 'thinking_trajectories'; it has question, att"),
        ("xlam", {"query": "a", "answers": "x", "tools": []}, "xlam: 'answers' is 'x', which is no JSON; give JSON te"),
        ("xlam", {"query": "a", "answers": [], "tools": 3}, "xlam: 'tools' is an int; give a list, or its JSON text"),
        (
            "ultrafeedback_completions",
            {"instruction": "a", "completions": [{"response": "b", "overall_score": "x"}]},
            "ultrafeedback_completions: completion 0 has the 'overall_score' 'x'; give a number",
        ),
        ("verl", {"prompt": [ASK], "reward_model": "x"}, "verl: 'reward_model' is 'x', which is no JSON"),
    ],
)
def test_rows_that_a_format_cannot_use(format: str, row: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match="tasks: row 0: " + match):
        data.tasks([row], format=format)
