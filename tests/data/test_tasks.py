import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from nrl import data, tiny
from nrl.data import Stream
from nrl.envs.library import arithmetic
from nrl.envs.seeds import shuffled
from nrl.envs.types import Task
from nrl.errors import DataError, ModelError, NrlError

CHARS = tiny.tokenizer()
CHATS = tiny.bpe(["user assistant system hello there"], vocab_size=280)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# read_jsonl


def test_a_file_is_read_in_order(tmp_path: Path) -> None:
    rows = [{"question": "é 東", "n": 1}, {}, {"nested": {"a": [1, None]}}]
    assert data.read_jsonl(write(tmp_path / "a.jsonl", *rows)) == rows
    assert data.read_jsonl(str(tmp_path / "a.jsonl")) == rows


def test_blank_lines_line_ends_and_a_byte_order_mark_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": "x\xe2\x80\xa8y"}')
    assert data.read_jsonl(path) == [{"a": 1}, {"a": "x\u2028y"}]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (
            b'{"a": 1}\n\n{"a": \n',
            r"a.jsonl, line 3: invalid JSON \(Expecting value.*\): {\"a\":; each line must be one",
        ),
        (b"[\n" + b"1," * 100 + b"\n]", r"a.jsonl, line 1: invalid JSON"),
        (b"[" * 100_000, r"a.jsonl, line 1: invalid JSON"),
        (b'{"a": 1}\n[1, 2]\n', r"a.jsonl, line 2: a list, not an object: \[1, 2\]; each line must be one JSON object"),
        (b'"text"', r"line 1: a str, not an object"),
        (b"null", r"line 1: nothing \(null\), not an object"),
        (b'{"a": 1}\n{"a": "\xff"}\n', r"line 2: invalid UTF-8 \(byte 0xff at position 7\); save the file as UTF-8"),
        (b"", r"a.jsonl has no rows; it must hold one JSON object a line"),
        (b"\n \n", r"a.jsonl has no rows"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=match) as caught:
        data.read_jsonl(tmp_path / "a.jsonl")
    assert str(caught.value).startswith("read_jsonl: ")
    assert len(str(caught.value)) < 400


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"read_jsonl: there is no file .*none.jsonl \(looked in "):
        data.read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"read_jsonl: .* is a folder; give a file"):
        data.read_jsonl(tmp_path)
    write(tmp_path / "file")
    with pytest.raises(DataError, match=r"read_jsonl: .* cannot be read: Not a directory"):
        data.read_jsonl(tmp_path / "file" / "inside")


# rows


@pytest.mark.parametrize("key", ["prompt", "messages", "question", "problem"])
def test_each_key_can_hold_the_prompt(key: str) -> None:
    row = {"answer": "2", key: "1+1="}
    assert data.rows([row], chat=False) == [{**row, "prompt": "1+1="}]
    assert data.rows([row]) == [{**row, "prompt": [{"role": "user", "content": "1+1="}]}]


def test_the_first_key_wins() -> None:
    row = {"problem": "d", "question": "c", "messages": [{"role": "user", "content": "b"}]}
    assert data.rows([row], chat=False)[0]["prompt"] == [{"role": "user", "content": "b"}]
    assert data.rows([{**row, "prompt": "a"}], chat=False)[0]["prompt"] == "a"


def test_chats_and_ids_stay_as_they_are() -> None:
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "hello"}]
    assert [row["prompt"] for row in data.rows([{"messages": chat}, {"prompt": [5, 6]}])] == [chat, [5, 6]]


def test_what_a_conversation_asks_is_what_comes_before_its_last_answer() -> None:
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    whole = [*asked, {"role": "assistant", "content": "d"}]
    other = [*asked, {"role": "assistant", "content": "e"}]
    assert data.rows([{"messages": whole}]) == [{"messages": whole, "prompt": asked}]
    assert data.rows([{"messages": asked}]) == [{"messages": asked, "prompt": asked}]
    pair = {"chosen": whole, "rejected": other}
    assert data.rows([pair]) == [{**pair, "prompt": asked}]


def test_a_template_makes_the_text() -> None:
    row = {"question": "1+1", "level": 3}
    template = "{question} ({level:02d}) {{boxed}}"
    assert data.rows([row], template=template, chat=False)[0]["prompt"] == "1+1 (03) {boxed}"
    assert data.rows([row], template=template)[0]["prompt"] == [{"role": "user", "content": "1+1 (03) {boxed}"}]
    assert data.rows([{"x": "a"}], template="{x}", chat=False) == [{"x": "a", "prompt": "a"}]


def test_the_source_is_left_as_it_is() -> None:
    source = [{"question": "1+1="}]
    data.rows(source)
    cast(dict[str, Any], data.tasks(source).take(1)[0])["question"] = "changed"
    assert source == [{"question": "1+1="}]


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"text": "a", "id": 1}, "has none of prompt, messages, question, problem; it has text, id. Rename the field"),
        ({}, "it has no fields"),
        ({"prompt": 3}, "'prompt' is an int; give a text, a list of messages, or a list of token ids"),
        ({"question": None}, r"'question' is nothing \(null\)"),
        ({"prompt": {"role": "user"}}, "'prompt' is a dict"),
        ({"prompt": b"ab"}, "'prompt' is a bytes"),
        ({"prompt": ""}, "'prompt' is empty; give a text, at least one message, or at least one token id"),
        ({"messages": []}, "'messages' is empty"),
        ({"prompt": ["a", "b"]}, "'prompt': entry 0 is 'a'; give a list of messages, or of token ids from 0"),
        ({"prompt": [1, -2]}, "entry 1 is -2"),
        ({"prompt": [1, True]}, "entry 1 is True"),
        ({"prompt": [1, 2.0]}, "entry 1 is 2.0"),
        ({"messages": [{"role": "user", "content": "a"}, "b"]}, "'messages': message 1 is a str; give {'role'"),
        ({"messages": [{"role": "user", "text": "a"}]}, "message 0 has no 'content'; it has role, text"),
        ({"messages": [{"content": "a"}]}, "message 0 has no 'role'; it has content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "message 0: 'content' is a list; give a text"),
        (
            {"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "'prompt' ends with the assistant's message, which leaves nothing to answer; .* conversation as 'messages'",
        ),
        ({"messages": [{"role": "assistant", "content": "b"}]}, "'messages' ends with the assistant's message"),
        (
            {"chosen": [{"role": "user", "content": "a"}], "rejected": [{"role": "user", "content": "a"}]},
            "what 'chosen' and 'rejected' share is empty",
        ),
        ({"chosen": [{"role": "user"}], "rejected": []}, "'chosen': message 0 has no 'content'; it has role"),
        ("text", "is a str; give a mapping"),
    ],
)
def test_a_row_that_cannot_be_used(tmp_path: Path, row: Any, match: str) -> None:
    with pytest.raises(DataError, match="tasks: row 1(:)? .*" + match):
        data.tasks([{"prompt": "good"}, row])
    try:
        path = write(tmp_path / "a.jsonl", {"prompt": "good"}, row)
    except TypeError:
        return
    with pytest.raises(DataError, match=r"a.jsonl, line 2"):
        data.tasks(path)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        (
            "{question}",
            "the template reads {question}, which the row does not have; it has prompt. A brace that stands",
        ),
        (
            r"\boxed{}",
            r"the template '.*boxed\{\}' does not fit the row: .*A brace that stands for itself is doubled: {{ and }}",
        ),
        ("{prompt", ".*does not fit the row: expected '}'"),
        ("{prompt.x}", ".*does not fit the row: 'str' object has no attribute 'x'"),
        ("{prompt:d}", ".*does not fit the row: Unknown format code 'd'"),
    ],
)
def test_a_template_that_does_not_fit(template: str, match: str) -> None:
    with pytest.raises(DataError, match="tasks: row 0: " + match):
        data.tasks([{"prompt": "a"}], template=template)


# tasks


def letters(n: int) -> list[dict[str, str]]:
    return [{"prompt": chr(97 + index)} for index in range(n)]


def drawn(stream: Any, n: int) -> str:
    return "".join(task["prompt"] for task in stream.take(n))


def test_every_epoch_has_every_row_in_an_order_of_its_own() -> None:
    epochs = [drawn(data.tasks(letters(20), seed=1, chat=False), 60)[start : start + 20] for start in (0, 20, 40)]
    assert [sorted(epoch) for epoch in epochs] == [[chr(97 + index) for index in range(20)]] * 3
    assert len(set(epochs)) == 3


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    epoch = [np.random.default_rng([7, number]).permutation(5) for number in range(2)]
    expected = "".join(chr(97 + index) for order in epoch for index in order)
    assert drawn(data.tasks(letters(5), seed=7, chat=False), 10) == expected
    assert drawn(data.tasks(letters(20), seed=8, chat=False), 20) != drawn(
        data.tasks(letters(20), seed=7, chat=False), 20
    )


def test_without_shuffling_the_order_is_that_of_the_source() -> None:
    assert drawn(data.tasks(letters(3), chat=False, shuffle=False), 7) == "abcabca"


def test_what_is_taken_does_not_depend_on_how() -> None:
    apart = data.tasks(letters(5), seed=3, chat=False)
    pieces = [drawn(apart, n) for n in (1, 0, 6, 4, 13)]
    assert "".join(pieces) == drawn(data.tasks(letters(5), seed=3, chat=False), 24)


@pytest.mark.parametrize("cursor", [0, 1, 4, 5, 6, 23])
def test_restoring_continues(cursor: int) -> None:
    stream = data.tasks(letters(5), seed=3)
    stream.take(cursor)
    state = json.loads(json.dumps(stream.state()))
    assert state["cursor"] == cursor
    again = data.tasks(letters(5), seed=3)
    again.take(2)
    again.restore(state)
    assert again.take(12) == stream.take(12)
    assert again.state() == stream.state()


def test_a_file_and_its_rows_give_the_same_stream(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *letters(6))
    assert data.tasks(path, seed=2).take(9) == data.tasks(letters(6), seed=2).take(9)
    assert data.tasks(str(path), seed=2).take(9) == data.tasks(letters(6), seed=2).take(9)


def test_arithmetic_is_generated_and_stays_text() -> None:
    stream = data.tasks("arithmetic", seed=4)
    assert stream.take(5) == [arithmetic.task(4, index) for index in range(5)]
    assert stream.state() == {"cursor": 5}


def test_tasks_are_a_stream() -> None:
    def first(stream: Stream[Task]) -> Any:
        return stream.take(1)[0]["prompt"]

    assert first(data.tasks([{"prompt": [1]}])) == [1]
    assert first(data.tasks("arithmetic")) == "17+12="


def test_sources_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tasks: 'gsm8k' is neither a file \(looked in .*\) nor .*: arithmetic"):
        data.tasks("gsm8k")
    with pytest.raises(DataError, match=r"read_jsonl: there is no file "):
        data.tasks(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="tasks: the source has no rows; give at least one"):
        data.tasks([])
    with pytest.raises(DataError, match="tasks: 'arithmetic' makes its own prompts, so it takes no template"):
        data.tasks("arithmetic", template="{prompt}")
    for seed in (-1, 1.5, True):
        with pytest.raises(NrlError, match=f"tasks: seed is {seed!r}; (it must be an integer|give a whole number)"):
            data.tasks(letters(2), seed=seed)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"data.tasks: restore\({'cursor': -3}\); give what state\(\) returned"):
        data.tasks(letters(2)).restore({"cursor": -3})


# render


def adding(template: str) -> Any:
    """A tokenizer that puts special tokens around a text, as those of Llama and T5 do."""
    made = tiny.tokenizer()
    made.backend_tokenizer.post_processor = TemplateProcessing(template, special_tokens=[("<bos>", 1), ("<eos>", 2)])
    return made


def test_text_is_encoded_with_the_special_tokens_that_belong_before_it_once() -> None:
    a = CHARS.encode("a")[0]
    before = adding("<bos> $A")
    assert before.encode("<bos>a") == [1, 1, a]
    assert data.render("a", before) == [1, a]
    assert data.render("<bos>a", before) == [1, a]
    assert data.render("<bos>", before) == [1]
    assert data.render("a", CHARS) == [a]
    assert data.render("<bos>a", CHARS) == [1, a]


def test_a_prompt_is_not_ended() -> None:
    a = CHARS.encode("a")[0]
    assert adding("<bos> $A <eos>").encode("a") == [1, a, 2]
    assert data.render("a", adding("<bos> $A <eos>")) == [1, a]
    with pytest.warns(UserWarning, match="spells the control token '<eos>', which is read as text"):
        assert data.render("a<eos>", adding("$A <eos>")) == CHARS.encode("a<") + CHARS.encode("eos>")
    assert data.render("a<eos>", data.parse_special(adding("$A <eos>"))) == [a, 2]


def test_a_chat_goes_through_the_template() -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    ids = data.render(chat, CHATS)
    assert all(type(token) is int for token in ids)
    assert CHATS.decode(ids) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_ids_are_kept() -> None:
    assert data.render([5, 0, 99], CHARS) == [5, 0, 99]
    assert data.render((5, 6), CHARS) == [5, 6]
    assert data.render(torch.tensor([5, 6]), CHARS) == [5, 6]  # type: ignore[arg-type]


def test_a_chat_without_a_template_says_what_to_do() -> None:
    with pytest.raises(
        ModelError, match=r"render: the prompt is a chat, .* no chat template.*Give prompts as plain text .chat=False"
    ):
        data.render([{"role": "user", "content": "hello"}], CHARS)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ("", "render: the prompt is empty; give a text, at least one message, or at least one token id"),
        ([], "render: the prompt is empty"),
        ([5, 100], "render: the prompt has the token id 100; the tokenizer's last is 99"),
        ([5, -1], "render: the prompt: entry 1 is -1"),
        (None, r"render: the prompt is nothing \(null\); give a text"),
        ([{"role": "user"}], "render: the prompt: message 0 has no 'content'"),
        ([{"role": "assistant", "content": "a"}], "render: the prompt ends with the assistant's message"),
    ],
)
def test_a_prompt_that_cannot_be_rendered(prompt: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        data.render(prompt, CHARS)


def test_what_a_template_refuses_is_said() -> None:
    strict = tiny.bpe(["hello"], vocab_size=264)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(
        DataError, match=r"render: the chat template refuses .* the roles user, user: roles must alternate"
    ):
        data.render(chat, strict)


# supervised


def test_the_loss_is_on_the_response_and_what_ends_it() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "1+1=", "response": "2"},
        {"prompt": "9+8=", "response": "17"},
        {"prompt": [7], "response": ""},
    ]
    batch = data.supervised(rows, CHARS)
    one, two, seven = CHARS.encode("127")
    end = CHARS.eos_token_id
    assert batch.is_locked
    assert batch.batch_size == torch.Size([3])
    assert batch["input_ids"].tolist() == [
        [*CHARS.encode("1+1="), two, end, 0],
        [*CHARS.encode("9+8="), one, seven, end],
        [7, end, 0, 0, 0, 0, 0],
    ]
    assert batch["attention_mask"].int().tolist() == [[1, 1, 1, 1, 1, 1, 0], [1] * 7, [1, 1, 0, 0, 0, 0, 0]]
    assert batch["loss_mask"].int().tolist() == [
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1],
        [0, 1, 0, 0, 0, 0, 0],
    ]


def test_prompt_and_response_are_encoded_apart() -> None:
    merging = tiny.bpe(["abab abab abab abab"], vocab_size=264)
    batch = data.supervised([{"prompt": "a", "response": "bab"}], merging)
    assert batch["input_ids"].tolist() == [[*merging.encode("a"), *merging.encode("bab"), merging.eos_token_id]]
    assert merging.encode("abab") != batch["input_ids"][0, :-1].tolist()


def test_chats_are_trained_on_from_where_the_sampler_begins() -> None:
    chat = [{"role": "user", "content": "hello"}]
    batch = data.supervised([{"prompt": chat, "response": "there"}], CHATS)
    ids, mask = batch["input_ids"][0], batch["loss_mask"][0]
    assert ids[~mask].tolist() == data.render(chat, CHATS)
    assert CHATS.decode(ids[mask]) == "there<|im_end|>"


def test_a_response_that_ends_itself_is_not_ended_twice() -> None:
    batch = data.supervised([{"prompt": "a", "response": "b<eos>"}], CHARS)
    assert batch["input_ids"][0].tolist() == [*CHARS.encode("ab"), 2]


def test_the_response_may_have_another_name() -> None:
    row = {"prompt": "1+1=", "answer": "2"}
    assert data.supervised([row], CHARS, response="answer")["loss_mask"].sum() == 2


def test_max_tokens_counts_the_whole_row() -> None:
    row = {"prompt": "1+1=", "response": "2"}
    assert data.supervised([row], CHARS, max_tokens=6)["input_ids"].shape == (1, 6)
    with pytest.raises(
        DataError,
        match=r"supervised: row 1 has 6 tokens \(4 of them the prompt's\), more than max_tokens=5; leave it out",
    ):
        data.supervised([{"prompt": "1", "response": "2"}, row], CHARS, max_tokens=5)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"prompt": "a"}, "supervised: row 1 has no 'response'; it has prompt"),
        ({"question": "a", "response": "b"}, "supervised: row 1 has no 'prompt'; it has question, response"),
        ({"prompt": "a", "response": 2}, "supervised: row 1: 'response' is an int; give a text"),
        ({"prompt": "", "response": "b"}, "supervised: row 1: render: the prompt is empty"),
    ],
)
def test_a_row_that_cannot_be_trained_on(row: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        data.supervised([{"prompt": "a", "response": "b"}, row], CHARS)


def test_supervised_needs_rows_and_an_end() -> None:
    with pytest.raises(DataError, match="supervised: there are no rows; give at least one"):
        data.supervised([], CHARS)
    endless = tiny.tokenizer()
    endless.eos_token = None
    with pytest.raises(
        ModelError, match=r"supervised: row 0: the tokenizer has no end-of-sequence token.*set tokenizer.eos_tok"
    ):
        data.supervised([{"prompt": "a", "response": "b"}], endless)


def test_real_rows_become_chats_and_are_trained_on() -> None:
    path = Path(__file__).parents[1] / "data" / "gsm8k_sample.jsonl"
    rows = data.tasks(path, seed=0, template="{question}\nEnd with #### and the number.").take(8)
    assert all(row["prompt"][0]["content"] == f"{row['question']}\nEnd with #### and the number." for row in rows)
    batch = data.supervised(rows, CHATS, response="answer")
    for row, ids, mask in zip(rows, batch["input_ids"], batch["loss_mask"], strict=True):
        assert CHATS.decode(ids[mask]) == row["answer"] + "<|im_end|>"


# --- an epoch, for an evaluation


def test_an_epoch_has_every_task_once() -> None:
    rows = [{"prompt": str(number)} for number in range(5)]
    in_order = [task["prompt"] for task in data.epoch(data.tasks(rows, shuffle=False, chat=False))]
    assert in_order == ["0", "1", "2", "3", "4"]
    assert [task["prompt"] for task in data.epoch(data.tasks(rows, shuffle=False, chat=False), 3)] == in_order[:3]
    shuffled = [task["prompt"] for task in data.epoch(data.tasks(rows, seed=1, chat=False), 100)]
    assert shuffled != in_order
    assert sorted(shuffled) == in_order


def test_an_epoch_of_a_source_without_an_end_needs_a_bound() -> None:
    assert len(data.epoch(data.tasks("arithmetic"), 7)) == 7
    with pytest.raises(DataError, match="epoch: arithmetic has no end; say how many tasks, as most="):
        data.epoch(data.tasks("arithmetic"))
    with pytest.raises(DataError, match="epoch: most is 0; give at least 1"):
        data.epoch(data.tasks("arithmetic"), 0)


def test_an_evaluation_says_that_a_source_has_fewer_rows_than_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    rows = data.tasks([{"prompt": str(number)} for number in range(7)], chat=False)
    assert len(data.epoch(rows, 7)) == 7
    assert capsys.readouterr().out == ""
    assert len(data.epoch(rows, 256)) == 7
    said = capsys.readouterr().out
    assert "the source has 7 rows, fewer than the 256 wanted for an evaluation; each is taken once" in said


def test_an_epoch_of_rows_that_come_with_an_environment_has_every_row_once() -> None:
    stream = data.tasks(shuffled(lambda: [{"prompt": letter} for letter in "abc"]), seed=4)
    assert stream.size == 3
    assert sorted(task["prompt"] for task in data.epoch(stream, 64)) == ["a", "b", "c"]
