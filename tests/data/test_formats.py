"""Formats, on rows with the columns of the datasets that they are for."""

from pathlib import Path
from typing import Any

import pytest

from nrl import data
from nrl.envs import Trace, number
from nrl.errors import DataError
from tests.chat_tokenizers import strings, tokenizer

SAMPLES = Path(__file__).parents[1] / "data"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def sample(name: str) -> list[dict[str, Any]]:
    return [dict(row) for row in data.rows(SAMPLES / f"{name}_sample.jsonl", format=name)]


def test_gsm8k() -> None:
    rows = sample("gsm8k")
    assert len(rows) == 40
    assert rows[0]["answer"] == "72"
    assert rows[0]["response"].endswith("#### 72")
    assert rows[0]["prompt"][0]["content"].startswith("Natalia sold clips to 48 of her friends")
    assert set(rows[0]) == {"prompt", "answer", "response"}
    assert all(number(row, Trace("", [row["response"]])).reward == 1.0 for row in rows)
    assert any("," in row["response"].rpartition("####")[2] for row in rows)  # such as 1,200
    assert not any("," in row["answer"] for row in rows)


def test_openmathinstruct2() -> None:
    assert sample("openmathinstruct2")[1] == {
        "prompt": user("Ana reads 14 pages a day. How many does she read in a week?"),
        "answer": "98",
        "response": r"In 7 days she reads $14 \cdot 7 = \boxed{98}$ pages.",
    }


def test_squad() -> None:
    passage = (
        "The lighthouse on Gull Point was built in 1871 by Ida Marsh. It is 31 metres tall, and its lamp burned whale "
        "oil until 1902."
    )
    rows = sample("squad")
    assert len(rows) == 2  # the third has no answer
    assert rows[1] == {
        "prompt": user(f"{passage}\n\nHow tall is it?\n\nAnswer:\n"),
        "answer": "31 metres",
        "answers": ["31 metres", "31 metres tall"],
        "response": "31 metres",
    }


def test_helpsteer3() -> None:
    rows = sample("helpsteer3")
    one, two = "The Amazon rises there, and so does the Ucayali.", "Rivers are nice."
    assert [(row["chosen"], row["rejected"]) for row in rows] == [(one, two), (two, one), (two, one)]
    assert [len(row["prompt"]) for row in rows] == [1, 3, 1]


def test_ties_are_dropped_and_counted() -> None:
    stream = data.tasks(SAMPLES / "helpsteer3_sample.jsonl", format="helpsteer3")
    assert (stream.size, stream.dropped) == (3, {"format": 2})
    assert len({task["prompt"][-1]["content"] for task in stream.take(3)}) == 2


def test_ultrafeedback() -> None:
    answer = {"role": "assistant", "content": "Jupiter."}
    assert sample("ultrafeedback")[0] == {
        "prompt": user("Which planet is the largest?"),
        "chosen": [answer],
        "rejected": [{"role": "assistant", "content": "The Sun."}],
    }


@pytest.mark.parametrize("name", ["helpsteer3", "ultrafeedback"])
@pytest.mark.parametrize("family", ["qwen3", "llama3_2"])
def test_preference_rows_become_pairs(name: str, family: str) -> None:
    of = tokenizer(family)
    rows = sample(name)
    batch = data.preferences(rows, of)
    for row, ids, mask in zip(rows, batch["input_ids"], batch["loss_mask"], strict=True):
        for side, own, text in zip(ids, mask, (row["chosen"], row["rejected"]), strict=True):
            wrote = of.decode(side[own])
            assert wrote.endswith((text if isinstance(text, str) else text[0]["content"]) + of.eos_token)
            assert side[: int(own.int().argmax())].tolist() == data.render(row["prompt"], of)


@pytest.mark.parametrize("name", ["gsm8k", "openmathinstruct2", "squad"])
def test_rows_with_responses_are_taught(name: str) -> None:
    of = tokenizer("chatml")
    rows = sample(name)
    batch = data.supervised(rows, of)
    for row, ids, mask in zip(rows, batch["input_ids"], batch["loss_mask"], strict=True):
        assert of.decode(ids[mask]) == row["response"] + "<|im_end|>"


@pytest.mark.parametrize("family", ["llama3_2", "qwen3"])
def test_a_base_model_reads_squad_as_a_text_whose_answer_stands_apart(family: str) -> None:
    """The tokens are those of the whole text, in which prompt and answer meet at the end of a line."""
    of = tokenizer(family)
    rows = data.rows(SAMPLES / "squad_sample.jsonl", format="squad", chat=False)
    batch = data.supervised(rows, of)
    for row, ids, mask, real in zip(rows, batch["input_ids"], batch["loss_mask"], batch["attention_mask"], strict=True):
        assert "".join(strings(ids[real & ~mask], of)).endswith("?\n\nAnswer:\n")
        assert of.decode(ids[mask]) == row["response"] + of.eos_token
        assert ids[real].tolist() == of.encode(row["prompt"] + row["response"] + of.eos_token)


def test_a_format_may_make_several_rows() -> None:
    chat = [*user("a"), {"role": "assistant", "content": "b"}, *user("c"), {"role": "assistant", "content": "d"}]
    stream = data.tasks([{"messages": chat}, {"messages": chat[:2]}], format="turns", shuffle=False)
    assert stream.size == 3
    assert [task["response"][0]["content"] for task in stream.take(4)] == ["b", "d", "b", "b"]


def test_a_format_may_be_any_function() -> None:
    rows = [{"q": "a"}, {"q": ""}, {"q": "b"}]
    stream = data.tasks(rows, format=lambda row: {"prompt": row["q"]} if row["q"] else None, chat=False, shuffle=False)
    assert [task["prompt"] for task in stream.take(3)] == ["a", "b", "a"]
    assert stream.dropped == {"format": 1}
    assert data.rows(rows[:1], format=lambda row: {"x": row["q"]}, template="Q: {x}", chat=False) == [
        {"x": "a", "prompt": "Q: a"}
    ]


@pytest.mark.parametrize(
    ("format", "row", "match"),
    [
        ("gsm8k", {"question": "a"}, "gsm8k: the row has no 'answer'; it has question"),
        ("gsm8k", {"question": "a", "answer": 2}, "gsm8k: 'answer' is an int; give a text"),
        ("gsm8k", {"question": "a", "answer": "It is 2."}, "gsm8k: 'answer' has no number behind '####': 'It is 2.'"),
        ("gsm8k", {"question": "a", "answer": "2 #### "}, "gsm8k: 'answer' has no number behind '####'"),
        (
            "openmathinstruct2",
            {"problem": "a", "generated_solution": "b"},
            "openmathinstruct2: the row has no 'expected",
        ),
        ("squad", {"context": "a", "question": "b"}, "squad: 'answers' is None; give {'text'"),
        (
            "squad",
            {"context": "a", "question": "b", "answers": {"text": "c"}},
            "squad: 'answers' is {'text': 'c'}; give",
        ),
        ("helpsteer3", {"response1": "a"}, "helpsteer3: the row has no 'response2'; it has response1"),
        ("helpsteer3", {"response1": "a", "response2": "b"}, r"helpsteer3: 'context' is nothing \(null\); give a list"),
        (
            "helpsteer3",
            {
                "response1": "a",
                "response2": "b",
                "context": [{"role": "user", "content": "c"}],
                "overall_preference": 4,
            },
            "helpsteer3: 'overall_preference' is 4; it must be from -3 to 3",
        ),
        ("ultrafeedback", {"chosen": "a"}, "ultrafeedback: 'chosen' is a str; give a list of messages"),
        (
            "ultrafeedback",
            {"chosen": [{"role": "user", "content": "a"}] * 2, "rejected": [{"role": "user", "content": "b"}] * 2},
            "ultrafeedback: 'chosen' and 'rejected' do not begin with the same message",
        ),
        ("turns", {"prompt": "a"}, "turns: the row has no 'messages'; it has prompt"),
        (lambda row: row["text"], {"a": 1}, "the format <lambda> raised KeyError: 'text'"),
        (lambda row: 3, {"a": 1}, "the format <lambda> returned an int; return a mapping, a list of mappings, or None"),
        (lambda row: ["a"], {"a": 1}, "the format <lambda> returned a list; return a mapping"),
        (lambda row: {"x": 1}, {"a": 1}, "has none of prompt, messages, question, problem; it has x"),
    ],
)
def test_rows_that_a_format_cannot_use(format: Any, row: Any, match: str) -> None:
    with pytest.raises(DataError, match="tasks: row 0:? " + match):
        data.tasks([row], format=format)


def test_formats_are_named() -> None:
    with pytest.raises(
        DataError, match="tasks: there is no format 'gsm'; there are gsm8k, helpsteer3, .* or give a fu"
    ):
        data.rows([{"prompt": "a"}], format="gsm")
    with pytest.raises(DataError, match="tasks: the source has no rows that the format keeps; give at least one"):
        data.tasks([{"prompt": "a"}], format=lambda row: None)
    with pytest.raises(DataError, match="tasks: 'arithmetic' makes its own prompts, so it takes no format"):
        data.tasks("arithmetic", format="gsm8k")
