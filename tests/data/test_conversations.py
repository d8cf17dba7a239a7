"""Conversations token by token, under the chat templates of real model families."""

import copy
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from nrl import data, tiny
from nrl.errors import DataError, ModelError
from tests.chat_tokenizers import strings, tokenizer

CHARS = tiny.tokenizer()

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello"}
HI = {"role": "assistant", "content": "Hi."}
THANKS = {"role": "user", "content": "Thanks"}
BYE = {"role": "assistant", "content": "Bye."}
CHAT = [HELLO, HI, THANKS, BYE]

# What each template writes, token by token; what the assistant writes is marked with a star.
CHATML_CHAT = r"""<|im_start|> user \n Hello <|im_end|> \n <|im_start|> assistant \n *Hi *. *<|im_end|> \n
<|im_start|> user \n Thanks <|im_end|> \n <|im_start|> assistant \n *Bye *. *<|im_end|>"""
CHATML_SYSTEM = r"<|im_start|> system \n Be _brief . <|im_end|> \n"
QWEN_SYSTEM = r"""<|im_start|> system \n You _are _Qwen , _created _by _Alibaba _Cloud . _You _are _a _helpful
_assistant . <|im_end|> \n"""
LLAMA_CHAT = r"""<|start_header_id|> user <|end_header_id|> \n\n Hello <|eot_id|>
<|start_header_id|> assistant <|end_header_id|> \n\n *Hi *. *<|eot_id|>
<|start_header_id|> user <|end_header_id|> \n\n Thanks <|eot_id|>
<|start_header_id|> assistant <|end_header_id|> \n\n *Bye *. *<|eot_id|>"""
LLAMA_SYSTEM = r"<|start_header_id|> system <|end_header_id|> \n\n Be _brief . <|eot_id|>"
LLAMA_DATE = r"""<|start_header_id|> system <|end_header_id|> \n\n Cutting _Knowledge _Date : _December _ 2 0 2 3 \n
Today _Date : _ 2 6 _Jul _ 2 0 2 4 \n\n"""
QWEN3_TRAINING = r"""<|im_start|> user \n Hello <|im_end|> \n
<|im_start|> assistant \n *<think> *\n\n *</think> *\n\n *Hi *. *<|im_end|> \n
<|im_start|> user \n Thanks <|im_end|> \n
<|im_start|> assistant \n *<think> *\n\n *</think> *\n\n *Bye *. *<|im_end|>"""


def expected(*parts: str) -> list[str]:
    """The tokens of the texts above, where an underscore is the space that a token begins with."""
    tokens = [token for part in parts for token in part.split()]
    return [each if "|" in each else each.replace(r"\n", "\n").replace("_", " ") for each in tokens]


def written(ids: torch.Tensor, mask: torch.Tensor, of: Any) -> list[str]:
    return [("*" if own else "") + token for token, own in zip(strings(ids, of), mask.tolist(), strict=True)]


def taught(row: dict[str, Any], of: Any) -> list[str]:
    batch = data.supervised([row], of)
    assert batch["attention_mask"].all()
    return written(batch["input_ids"][0], batch["loss_mask"][0], of)


# the date


@pytest.mark.parametrize("name", ["llama3_2", "marked"])
def test_every_day_has_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers gives a template its clock; a template may ask it for today in any format."""
    of = copy.copy(tokenizer("llama3_2" if name == "llama3_2" else "qwen3_training"))
    if name == "marked":  # with {% generation %}, another way into transformers
        of.chat_template = "{{ strftime_now('%A, %Y-%m-%d') }}" + of.chat_template
    found = []
    for day in (datetime(2026, 1, 1), datetime(2031, 12, 24)):
        monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda day=day: day))
        assert of.apply_chat_template([HELLO], tokenize=False).count(str(day.year)) == 1
        found.append((data.render([HELLO], of), taught({"messages": CHAT}, of)))
    assert found[0] == found[1]
    assert "2024" in of.decode(found[0][0])


# several turns


@pytest.mark.parametrize(
    ("name", "alone", "with_system"),
    [
        ("chatml", [CHATML_CHAT], [CHATML_SYSTEM, CHATML_CHAT]),
        ("qwen2_5", [QWEN_SYSTEM, CHATML_CHAT], [CHATML_SYSTEM, CHATML_CHAT]),
        ("qwen3_training", [QWEN3_TRAINING], [CHATML_SYSTEM, QWEN3_TRAINING]),
        ("llama3", ["<|begin_of_text|>", LLAMA_CHAT], ["<|begin_of_text|>", LLAMA_SYSTEM, LLAMA_CHAT]),
        *(
            (
                name,
                ["<|begin_of_text|>", LLAMA_DATE, "<|eot_id|>", LLAMA_CHAT],
                ["<|begin_of_text|>", LLAMA_DATE, "Be _brief . <|eot_id|>", LLAMA_CHAT],
            )
            for name in ("llama3_1", "llama3_2")
        ),
    ],
)
def test_every_message_of_the_assistant_is_taught(name: str, alone: list[str], with_system: list[str]) -> None:
    of = tokenizer(name)
    assert taught({"messages": CHAT}, of) == expected(*alone)
    assert taught({"messages": [SYSTEM, *CHAT]}, of) == expected(*with_system)
    # whatever comes behind the last answer teaches nothing and is left out
    assert taught({"messages": [*CHAT, HELLO]}, of) == expected(*alone)


NAMES = ["chatml", "qwen2_5", "qwen3", "qwen3_training", "llama3", "llama3_1", "llama3_2"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("asked", [[HELLO], [SYSTEM, HELLO], [HELLO, HI, THANKS], [SYSTEM, HELLO, HI, THANKS]])
def test_what_comes_before_an_answer_is_what_the_sampler_meets(name: str, asked: list[Any]) -> None:
    of = tokenizer(name)
    rows: list[dict[str, Any]] = [
        {"prompt": asked, "response": "Bye."},
        {"prompt": asked, "response": "\nBye."},
        {"prompt": asked, "response": [BYE]},
        {"prompt": asked, "response": [{**BYE, "content": "\n\nBye."}]},
    ]
    batch = data.supervised(rows, of)
    for ids, mask in zip(batch["input_ids"], batch["loss_mask"], strict=True):
        first = int(mask.int().argmax())
        assert ids[:first].tolist() == data.render(asked, of)
        assert of.decode(ids[mask]).endswith("Bye." + of.eos_token)
    pairs = data.preferences([{"prompt": asked, "chosen": "Bye.", "rejected": "Hi."}], of)
    for ids, mask in zip(pairs["input_ids"][0], pairs["loss_mask"][0], strict=True):
        assert ids[: int(mask.int().argmax())].tolist() == data.render(asked, of)


@pytest.mark.parametrize("name", ["chatml", "qwen2_5", "qwen3_training", "llama3", "llama3_1", "llama3_2"])
def test_the_ids_are_those_of_the_template(name: str) -> None:
    of = tokenizer(name)
    of_day = {"date_string": "26 Jul 2024"}  # which of these templates only Llama 3.1's and 3.2's look at
    whole = of.apply_chat_template([SYSTEM, *CHAT], tokenize=True, return_dict=False, **of_day)
    ids = data.supervised([{"messages": [SYSTEM, *CHAT]}], of)["input_ids"][0].tolist()
    assert whole[: len(ids)] == ids
    assert of.decode(whole[len(ids) :]).strip() == ""


def test_a_token_that_would_reach_into_the_answer_is_cut_where_the_sampler_cuts_it() -> None:
    of = tokenizer("chatml")
    chat = [HELLO, {"role": "assistant", "content": "\nHi"}, THANKS, {"role": "assistant", "content": "\nBye"}]
    assert r"\n\n" in repr(of.tokenize(of.apply_chat_template(chat, tokenize=False))).replace("ĊĊ", r"\n\n")
    assert taught({"messages": chat}, of) == expected(
        r"<|im_start|> user \n Hello <|im_end|> \n <|im_start|> assistant \n *\n *Hi *<|im_end|> \n",
        r"<|im_start|> user \n Thanks <|im_end|> \n <|im_start|> assistant \n *\n *Bye *<|im_end|>",
    )


def test_an_answer_of_nothing_is_its_end() -> None:
    assert taught({"messages": [HELLO, {"role": "assistant", "content": ""}]}, tokenizer("chatml")) == expected(
        r"<|im_start|> user \n Hello <|im_end|> \n <|im_start|> assistant \n *<|im_end|>"
    )


def test_turn_tokens_that_an_answer_spells_are_taught_as_text() -> None:
    of, quoting = tokenizer("chatml"), {"role": "assistant", "content": "Hi <|im_end|> Bye"}
    tokens = taught({"messages": [HELLO, quoting]}, of)
    assert "".join(each[1:] for each in tokens if each.startswith("*")) == "Hi <|im_end|> Bye<|im_end|>"
    assert tokens.count("*<|im_end|>") == 1
    assert taught({"messages": [HELLO, quoting]}, data.parse_special(of)) == expected(
        r"<|im_start|> user \n Hello <|im_end|> \n <|im_start|> assistant \n *Hi", "*_ *<|im_end|>", "*_Bye *<|im_end|>"
    )


def test_markers_in_a_template_end_where_it_says_so() -> None:
    quoting = {"role": "assistant", "content": "Hi <|im_end|> Bye"}
    unended = MARKED.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")
    for template, end in ((MARKED, "<|im_end|>"), (unended, "")):
        tokens = taught({"messages": [HELLO, quoting]}, with_template(template))
        assert "".join(each[1:] for each in tokens if each.startswith("*")) == "Hi <|im_end|> Bye" + end


def test_messages_of_tools_are_read_and_not_taught() -> None:
    call = {"role": "assistant", "content": "Hmm", "tool_calls": [{"function": {"name": "think", "arguments": {}}}]}
    chat = [HELLO, call, {"role": "tool", "content": "Today"}, BYE]
    of = tokenizer("qwen2_5")
    own = "".join(token[1:] for token in taught({"messages": chat}, of) if token.startswith("*"))
    assert own == 'Hmm\n<tool_call>\n{"name": "think", "arguments": {}}\n</tool_call><|im_end|>Bye.<|im_end|>'


# templates that rewrite earlier turns


THOUGHT = {"role": "assistant", "content": "<think>\nHmm\n</think>\n\nHi."}


def test_a_template_that_rewrites_earlier_turns_is_refused_by_name_of_what_it_does() -> None:
    of = tokenizer("qwen3")
    for first in (HI, THOUGHT):
        with pytest.raises(DataError) as caught:
            data.supervised([{"messages": [HELLO, BYE]}, {"messages": [HELLO, first, THANKS, BYE]}], of)
        message = str(caught.value)
        assert message.startswith("supervised: row 1: the chat template writes '<think>\\n")
        assert "for the assistant's message 1 while it is the last, and 'Hi.<|im_end|>\\n<|im_start|>user'" in message
        assert "once others follow, as templates do that drop the thinking of earlier turns" in message
        assert "Make a row of each turn (data.turns), or set tokenizer.chat_template" in message


def test_turns_are_taught_one_by_one_as_the_model_meets_them() -> None:
    of = tokenizer("qwen3")
    rows = data.turns({"messages": [HELLO, THOUGHT, THANKS, BYE], "id": 7})
    assert rows == [
        {"id": 7, "prompt": [HELLO], "response": [THOUGHT]},
        {"id": 7, "prompt": [HELLO, THOUGHT, THANKS], "response": [BYE]},
    ]
    assert taught(dict(rows[0]), of) == expected(
        r"<|im_start|> user \n Hello <|im_end|> \n <|im_start|> assistant \n",
        r"*<think> *\n *Hmm *\n *</think> *\n\n *Hi *. *<|im_end|>",
    )
    assert taught(dict(rows[1]), of) == expected(
        r"<|im_start|> user \n Hello <|im_end|> \n <|im_start|> assistant \n Hi . <|im_end|> \n",
        r"<|im_start|> user \n Thanks <|im_end|> \n <|im_start|> assistant \n",
        r"*<think> *\n\n *</think> *\n\n *Bye *. *<|im_end|>",
    )


def test_turns_needs_something_to_teach() -> None:
    with pytest.raises(DataError, match="turns: the row has no 'messages'; it has text"):
        data.turns({"text": "a"})
    with pytest.raises(DataError, match="turns: 'messages' has no message of the assistant after another"):
        data.turns({"messages": [HI, HELLO]})


def with_template(template: str, **special: str) -> Any:
    made = tokenizer("chatml")
    return PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer,
        chat_template=template,
        clean_up_tokenization_spaces=False,
        **({"eos_token": "<|im_end|>"} | special),
    )


LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def test_the_end_of_a_turn_is_the_template_s_and_not_the_end_of_sequence() -> None:
    of = with_template(LOOP + ASK, eos_token="<|endoftext|>")
    assert taught({"messages": CHAT}, of) == expected(CHATML_CHAT)
    assert taught({"prompt": CHAT[:-1], "response": "Bye."}, of)[-3:] == ["*Bye", "*.", "*<|im_end|>"]
    assert taught({"prompt": "Hello", "response": "Bye."}, of) == ["Hello", "*Bye", "*.", "*<|endoftext|>"]


def test_what_a_template_writes_behind_a_whole_conversation_is_no_part_of_a_turn() -> None:
    ended = "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"  # as Phi-3's does
    assert taught({"messages": CHAT}, with_template(LOOP + ASK + ended, eos_token="<|endoftext|>")) == expected(
        CHATML_CHAT
    )


def test_a_template_without_a_generation_prompt_leaves_the_header_to_the_model() -> None:
    of = with_template(LOOP)
    assert taught({"messages": [HELLO, HI]}, of) == expected(
        r"<|im_start|> user \n Hello <|im_end|> \n *<|im_start|> *assistant *\n *Hi *. *<|im_end|>"
    )
    assert strings(data.render([HELLO], of), of) == expected(r"<|im_start|> user \n Hello <|im_end|> \n")


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + ASK
)


def test_markers_in_a_template_say_what_is_taught() -> None:
    assert taught({"messages": CHAT}, with_template(MARKED)) == expected(CHATML_CHAT)
    last = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    one = CHATML_CHAT.replace("*Hi *. *<|im_end|>", "Hi . <|im_end|>")
    assert taught({"messages": CHAT}, with_template(last)) == expected(one)
    assert taught({"prompt": CHAT[:3], "response": [BYE]}, with_template(MARKED)) == expected(one)
    with pytest.raises(DataError, match="supervised: row 0: the chat template marks nothing of the conversation"):
        data.supervised([{"messages": [HELLO, HI, THANKS]}], with_template(last))


@pytest.mark.parametrize(
    ("template", "error", "match"),
    [
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
            ModelError,
            "row 0: the chat template ends the assistant's messages with no token, .*put {{ eos_token }} behind",
        ),
        (
            LOOP + "{% if add_generation_prompt %}<|im_start|>assistant\n<plan>\n{% endif %}",
            DataError,
            "row 0: the chat template asks for the assistant's message 1 with '<plan>.n' and then writes 'Hi.<|im",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% if m.content == 'ANSWER' %}<|im_end|>{% endif %}{% endfor %}",
            DataError,
            "row 0: the chat template ends the assistant's message 1 with 'Hi.', without '<|im_end|>'",
        ),
        ("{{ messages[9].content + 1 }}", DataError, "row 0: render: the chat template refuses .* user, assistant: "),
    ],
)
def test_templates_that_cannot_be_followed(template: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match="supervised: " + match.replace("|", r"\|")):
        data.supervised([{"messages": [HELLO, HI]}], with_template(template))


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"messages": "Hello"}, "'messages' is a str; give a list of messages"),
        ({"messages": []}, "'messages' is empty; give at least one message"),
        ({"messages": [HELLO, {"role": "assistant"}]}, "'messages': message 1 has no 'content'; it has role"),
        ({"messages": [HELLO]}, "the conversation has no message of the assistant, so there is nothing to train on"),
        ({"messages": [HI, HELLO]}, "the conversation begins with the assistant's message; begin with what it answers"),
        ({"prompt": [HELLO], "response": 3}, "'response' is an int; give a text, or a list of messages"),
        ({"prompt": [5, 6], "response": [HI]}, "the prompt is token ids and the answer messages; give the prompt as"),
    ],
)
def test_conversations_that_cannot_be_taught(row: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match="supervised: row 0: " + match):
        data.supervised([row], tokenizer("chatml"))


def test_a_tokenizer_that_marks_the_beginning_of_a_text_does_not_mark_the_pieces() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<unk>", "</s>", "▁Q:", "▁Hi", "▁A:", "▁Bye", "▁Thanks", "▁", "Hi", "Bye"]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace()
    user, other = "{% if m.role == 'user' %}Q: {{ m.content }} A:", "{% else %} {{ m.content }}</s> {% endif %}"
    template = "{% for m in messages %}" + user + other + "{% endfor %}"
    of = PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, eos_token="</s>", unk_token="<unk>")
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Bye"}]
    chat += [{"role": "user", "content": "Thanks"}, {"role": "assistant", "content": "Bye"}]
    batch = data.supervised([{"messages": chat}], of)
    assert of.convert_ids_to_tokens(batch["input_ids"][0].tolist()) == (
        ["▁Q:", "▁Hi", "▁A:", "▁Bye", "</s>", "▁Q:", "▁Thanks", "▁A:", "▁Bye", "</s>"]
    )
    assert batch["loss_mask"][0].int().tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1]


# preferences


def test_pairs_have_the_chosen_side_first() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "11"},
        {"prompt": [7], "chosen": "", "rejected": "3"},
    ]
    batch = data.preferences(rows, CHARS)
    one, two, three = CHARS.encode("123")
    end = CHARS.eos_token_id
    asked = CHARS.encode("1+1=")
    assert batch.is_locked
    assert batch.batch_size == torch.Size([2, 2])
    assert batch["input_ids"].tolist() == [
        [[*asked, two, end, 0], [*asked, one, one, end]],
        [[7, end, 0, 0, 0, 0, 0], [7, three, end, 0, 0, 0, 0]],
    ]
    assert batch["attention_mask"].int().tolist() == [
        [[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]],
        [[1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]],
    ]
    assert batch["loss_mask"].int().tolist() == [
        [[0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1]],
        [[0, 1, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0, 0]],
    ]


PAIR = [
    r"<|im_start|> user \n Hello <|im_end|> \n <|im_start|> assistant \n *Hi *. *<|im_end|>",
    r"<|im_start|> user \n Hello <|im_end|> \n <|im_start|> assistant \n *Bye *. *<|im_end|>",
]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [HELLO], "chosen": "Hi.", "rejected": "Bye."},
        {"prompt": [HELLO], "chosen": [HI], "rejected": [BYE]},
        {"prompt": "Hello", "chosen": [HI], "rejected": [BYE]},
        {"prompt": [HELLO], "chosen": [HELLO, HI], "rejected": [HELLO, BYE]},
        {"prompt": "Hello", "chosen": [HELLO, HI], "rejected": [HELLO, BYE]},  # as UltraFeedback has it
        {"chosen": [HELLO, HI], "rejected": [HELLO, BYE]},
    ],
)
def test_every_form_of_a_pair_gives_the_same_batch(row: dict[str, Any]) -> None:
    of = tokenizer("chatml")
    for each in (row, data.rows([row])[0]):
        batch = data.preferences([each], of)
        for side in range(2):
            keep = batch["attention_mask"][0, side]
            ids, mask = batch["input_ids"][0, side][keep], batch["loss_mask"][0, side][keep]
            assert written(ids, mask, of) == expected(PAIR[side])


def test_what_two_conversations_share_is_not_taught() -> None:
    of = tokenizer("llama3")
    batch = data.preferences([{"chosen": [*CHAT[:3], BYE], "rejected": [*CHAT[:3], HI]}], of)
    shared = LLAMA_CHAT.replace("*Hi *. *<|eot_id|>", "Hi . <|eot_id|>")
    for side, text in enumerate([shared, shared.replace("*Bye", "*Hi")]):
        ids, mask = batch["input_ids"][0, side], batch["loss_mask"][0, side]
        assert written(ids, mask, of) == expected("<|begin_of_text|>", text)


def test_equal_sides_share_all_but_the_answer() -> None:
    batch = data.preferences([{"chosen": [HELLO, HI], "rejected": [HELLO, HI]}], tokenizer("chatml"))
    assert batch["loss_mask"].sum(-1).tolist() == [[3, 3]]


def test_max_tokens_counts_either_side() -> None:
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "11"}
    assert data.preferences([row], CHARS, max_tokens=7)["input_ids"].shape == (1, 2, 7)
    with pytest.raises(
        DataError,
        match=r"preferences: row 0: rejected has 7 tokens \(4 of them the prompt's\), more than max_tokens=6",
    ):
        data.preferences([row], CHARS, max_tokens=6)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"prompt": "a", "rejected": "b"}, "row 1 has no 'chosen'; it has prompt, rejected"),
        ({"chosen": "a", "rejected": "b"}, "row 1 has no 'prompt', which texts answer; it has chosen, rejected"),
        ({"prompt": "a", "chosen": 1, "rejected": "b"}, "row 1: 'chosen' is an int; give a text, or a list of"),
        ({"prompt": "a", "chosen": "b", "rejected": [HI]}, "row 1: 'chosen' is a str and 'rejected' a list; give two"),
        ({"prompt": "a", "chosen": [HI], "rejected": [{}]}, "row 1: 'rejected': message 0 has no 'role'"),
        (
            {"chosen": [HELLO, HI], "rejected": [THANKS, BYE]},
            "row 1 has no 'prompt', and 'chosen' and 'rejected' do no",
        ),
        (
            {"prompt": "Bye", "chosen": [HELLO, HI], "rejected": [HELLO, BYE]},
            "row 1: 'chosen' begins with neither the prompt nor an answer of the assistant to it",
        ),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, "row 1: chosen: render: the prompt is empty"),
    ],
)
def test_a_pair_that_cannot_be_used(row: Any, match: str) -> None:
    with pytest.raises(DataError, match="preferences: " + match):
        data.preferences([{"prompt": "a", "chosen": "b", "rejected": "c"}, row], CHARS)


def test_preferences_needs_rows() -> None:
    with pytest.raises(DataError, match="preferences: there are no rows; give at least one"):
        data.preferences([], CHARS)


def test_labelled_rows() -> None:
    rows = [
        {"prompt": "1+1=", "response": "2", "label": True},
        {"prompt": "1+1=", "response": "11", "label": False},
        {"prompt": "2+2=", "response": "22", "label": False},
    ]
    batch = data.labelled(rows, CHARS)
    expected = data.supervised(rows, CHARS)
    assert batch["desirable"].tolist() == [True, False, False]
    for name in expected.keys():
        assert torch.equal(batch[name], expected[name])


def test_pairs_as_labelled_rows() -> None:
    """The chosen ones, and then the rejected ones; texts or conversations."""
    texts = [{"prompt": "a", "chosen": "b", "rejected": "cc"}, {"prompt": "dd", "chosen": "eee", "rejected": "f"}]
    batch = data.labelled(texts, CHARS)
    pairs = data.preferences(texts, CHARS)
    assert batch.batch_size == torch.Size([4])
    assert batch["desirable"].tolist() == [True, True, False, False]
    for name in pairs.keys():
        assert torch.equal(batch[name], torch.cat([pairs[name][:, 0], pairs[name][:, 1]]))
    template = tokenizer("chatml")
    talks = [{"chosen": [HELLO, HI], "rejected": [HELLO, BYE]}]
    assert torch.equal(data.labelled(talks, template)["input_ids"], data.preferences(talks, template)["input_ids"][0])


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"prompt": "a", "response": "b"}, "labelled: row 1 has no 'label'; it has prompt, response"),
        ({"prompt": "a", "response": "b", "label": 1}, "labelled: row 1 has the label 1; it is true of a good"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "labelled: row 1 has no 'label'; it has prompt, chosen"),
        ({"prompt": "a", "label": True}, "supervised: row 1 has no 'response'"),
    ],
)
def test_a_labelled_row_that_cannot_be_used(row: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        data.labelled([{"prompt": "a", "response": "b", "label": False}, row], CHARS)


def test_labelled_needs_rows() -> None:
    with pytest.raises(DataError, match="there are no rows; give at least one"):
        data.labelled([], CHARS)


# --- Tools

SCHEMA = {"type": "function", "function": {"name": "find", "description": "Find it.", "parameters": {"type": "object"}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find", "arguments": {"of": "Hi"}}}]}
FOUND = {"role": "tool", "name": "find", "content": "Thanks"}
CALLED = '<tool_call>\n{"name": "find", "arguments": {"of": "Hi"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("name", ["chatml", "qwen2_5", "qwen3_training"])
def test_tools_of_a_row_are_in_its_prompt_and_calls_are_taught(name: str) -> None:
    of = tokenizer(name)
    batch = data.supervised([{"messages": [HELLO, CALL, FOUND, BYE], "tools": [SCHEMA]}], of)
    ids, mask = batch["input_ids"][0], batch["loss_mask"][0]
    whole = of.apply_chat_template([HELLO, CALL, FOUND, BYE], tools=[SCHEMA], tokenize=False)
    assert of.decode(ids) == whole.rstrip()
    own = of.decode(ids[mask]).replace("<think>\n\n</think>\n\n", "")
    assert own == f"{CALLED}Bye.<|im_end|>"
    asked = of.apply_chat_template([HELLO], tools=[SCHEMA], tokenize=False, add_generation_prompt=True)
    assert of.decode(ids[: int(mask.int().argmax())]) == asked
    assert "Find it." in asked


def test_tools_go_with_every_kind_of_chat() -> None:
    of = tokenizer("chatml")
    whole = data.supervised([{"messages": [HELLO, BYE], "tools": [SCHEMA]}], of)["input_ids"]
    without = data.supervised([{"messages": [HELLO, BYE]}], of)["input_ids"]
    assert whole.shape[1] > without.shape[1]
    for row in ({"prompt": [HELLO], "response": "Bye."}, {"prompt": "Hello", "response": [BYE]}):
        assert torch.equal(data.supervised([row | {"tools": [SCHEMA]}], of)["input_ids"], whole)
    none = data.supervised([{"messages": [HELLO, BYE], "tools": None}], of)["input_ids"]
    assert torch.equal(none, without)
    pair = {"prompt": [HELLO], "chosen": "Bye.", "rejected": "Hi.", "tools": [SCHEMA]}
    assert torch.equal(data.preferences([pair], of)["input_ids"][0, 0], whole[0])


def test_markers_in_a_template_see_tools() -> None:
    of = with_template("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + MARKED)
    made = taught({"messages": [HELLO, HI], "tools": [SCHEMA]}, of)
    assert "".join(made).startswith("find<|im_start|>user")
    assert [each for each in made if each.startswith("*")] == ["*Hi", "*.", "*<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"messages": [HELLO, HI], "tools": "find"}, "row 0: 'tools' is a str; give a list of JSON schemas of funct"),
        ({"messages": [HELLO, HI], "tools": ["find"]}, "row 0: 'tools' is a list of a str; give a list of JSON schema"),
        ({"prompt": "Hello", "response": "Hi.", "tools": [SCHEMA]}, "row 0 has 'tools', and its prompt is no chat, so"),
        ({"prompt": [3], "response": "Hi.", "tools": [SCHEMA]}, "row 0 has 'tools', and its prompt is no chat, so no"),
    ],
)
def test_tools_that_nothing_shows(row: dict[str, Any], match: str) -> None:
    with pytest.raises(DataError, match=f"supervised: {match}"):
        data.supervised([row], tokenizer("chatml"))
