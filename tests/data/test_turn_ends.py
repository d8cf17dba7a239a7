"""What ends a turn, under the templates of real models; and a text is the same answer as a message with it."""

import copy
from typing import Any

import pytest

from nrl import data
from nrl.data.turn_ends import turn_ends
from nrl.errors import DataError
from tests.chat_tokenizers import tokenizer
from tests.data.test_control_tokens import KINDS, NAMES, known

ASK = {"role": "user", "content": "Hi"}
MORE = {"role": "user", "content": "Thanks"}
CALL = {"id": "abcdefgh0", "type": "function", "function": {"name": "find", "arguments": {"q": "Hi"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "find", "content": "page", "tool_call_id": "abcdefgh0"}
REASONED = "<think>\nHmm\n</think>\n\nHi."
TEXTS = ["Hi.", "is two", REASONED, " Hi", "\nHi.", "Hi.\n\n- one\n- two\n", "<b>Hi</b>", "Hi <"]


def say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def taught(row: dict[str, Any], of: Any) -> tuple[list[int], str]:
    """The ids of a row, and what of it is taught."""
    batch = data.supervised([row], of)
    ids, mask = batch["input_ids"][0], batch["loss_mask"][0]
    return ids.tolist(), of.decode(ids[mask])


@pytest.mark.parametrize("name", [*NAMES, *KINDS])
def test_a_text_is_the_same_answer_as_a_message(name: str) -> None:
    of = known(name)
    for text in TEXTS:
        ids, said = taught({"prompt": [ASK], "response": text}, of)
        message, as_message = taught({"prompt": [ASK], "response": [say(text)]}, of)
        whole = "".join(text.split()) in "".join(of.decode(message).split())
        assert (ids, said) == (message, as_message) or not whole, text
        assert "".join(text.split()) in "".join(of.decode(ids).split())
    end = turn_ends(of).answer
    assert taught({"prompt": [ASK], "response": "Hi." + end}, of) == taught({"prompt": [ASK], "response": "Hi."}, of)


R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}<｜Assistant｜>"
    "{{ m.content.split('</think>')[-1].ANSWER }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>OPENED{% endif %}"
)
OPENED = {  # what the template opens and strips, and what is taught of the answer "b" without reasoning, and with it
    ("<think>\n", "strip()"): ("\n</think>\n\nb", "Hmm\n</think>\n\nb"),
    ("<think>\n", "strip('|')"): ("\n</think>\n\nb", "Hmm\n</think>\n\nb"),
    ("<think>", "strip()"): ("</think>b", "\nHmm\n</think>\n\nb"),
}


@pytest.mark.parametrize("opened", OPENED)
def test_reasoning_that_the_prompt_opened_is_closed(opened: tuple[str, str]) -> None:
    of = copy.copy(tokenizer("deepseekv3"))
    of.chat_template = R1.replace("OPENED", opened[0]).replace("ANSWER", opened[1])
    for text, expected in zip(("b", "<think>\nHmm\n</think>\n\nb"), OPENED[opened], strict=True):
        for response in (text, [say(text)]):
            ids, said = taught({"prompt": [ASK], "response": response}, of)
            assert said == f"{expected}<｜end▁of▁sentence｜>"
            whole = of.decode(ids)
            assert whole.endswith(f"<｜User｜>Hi<｜Assistant｜>{opened[0]}{said}")
            assert whole.count("<think>") == whole.count("</think>") == 1
    with pytest.raises(DataError, match="asks for the assistant's message 1"):
        data.supervised([{"messages": [ASK, say("b"), MORE, say("b")]}], of)
    apart = {**say("b"), "reasoning_content": "Hmm"}
    _, said = taught({"prompt": [ASK], "response": [apart]}, of)
    assert "".join(said.split()) == "Hmm</think>b<｜end▁of▁sentence｜>"


def test_a_template_that_closes_what_it_opened_keeps_its_white_space() -> None:
    of = copy.copy(tokenizer("deepseekv3"))
    of.chat_template = R1.replace("OPENED", "<think>").replace(
        "{{ m.content.split('</think>')[-1].ANSWER }}", "</think>\n{{ m.content.split('</think>')[-1].strip() }}"
    )
    for response in ("b", [say("b")]):
        assert taught({"prompt": [ASK], "response": response}, of)[1] == "</think>\nb<｜end▁of▁sentence｜>"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", [REASONED, "<think>Hmm</think>Hi.", "\n<think>\nHmm\n</think>\n\nHi."])
def test_reasoning_that_the_prompt_opened_is_not_opened_again(name: str, text: str) -> None:
    of = tokenizer(name)
    ids, _ = taught({"prompt": [ASK], "response": text}, of)
    assert of.decode(ids).count("<think>") == 1


@pytest.mark.parametrize("name", KINDS)
def test_no_space_comes_between_a_text_and_its_answer(name: str) -> None:
    """Whatever a tokenizer puts before a text; an observation that is a text is no other."""
    of = known(name)
    ids, said = taught({"prompt": "one and", "response": " one is"}, of)
    assert (of.decode(ids).strip(), said.strip()) == ("one and one is</s>", "one is</s>")
    ids, _ = taught({"prompt": "o", "response": "ne is"}, of)
    assert of.decode(ids).strip() == "one is</s>"


ENDS = {
    "gptoss": ("<|return|>", "<|call|>"),
    "glm4moe": ("<|user|>", "<|observation|>"),
    "gemma3": ("<end_of_turn>", "<end_of_turn>"),
    "deepseekv3": ("<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "mistral": ("</s>", "</s>"),
    "llama": ("<|eot_id|>", "<|eot_id|>"),
    "qwen": ("<|im_end|>", "<|im_end|>"),
    "chatml": ("<|im_end|>", "<|im_end|>"),
}


@pytest.mark.parametrize("name", NAMES)
def test_what_ends_an_answer_and_a_call(name: str) -> None:
    ends = turn_ends(tokenizer(name))
    assert (ends.answer, ends.call) == next(ENDS[each] for each in ENDS if name.startswith(each))
    assert ends.written is (name != "glm4moe")


NO_CALLS = ("gemma3", "deepseekv3", "llama3", "qwen3")  # or what comes before one is written otherwise later


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_CALLS])
def test_a_turn_is_taught_up_to_the_token_that_the_model_samples(name: str) -> None:
    of = tokenizer(name)
    ends = turn_ends(of)
    _, said = taught({"messages": [ASK, CALLING, RESULT, say("It is 7.")]}, of)
    first, second = said.split("It is 7.")
    assert first.count(ends.call) >= 1
    assert "find" in first.partition(ends.call)[0]
    assert second == ends.answer
    _, said = taught({"prompt": [ASK], "response": [CALLING]}, of)
    assert said.endswith(ends.call)
    ids, _ = taught({"messages": [ASK, CALLING, RESULT, say("It is 7.")]}, of)
    options: Any = {"date_string": "26 Jul 2024", "tokenize": False}
    whole = of.apply_chat_template([ASK, CALLING, RESULT, say("It is 7.")], **options)
    if name not in ("gptoss", "llama3_2"):  # which write today's date
        assert of.decode(ids).startswith(whole.rstrip())


def test_glm_s_turns_end_with_the_role_that_speaks_next() -> None:
    of = tokenizer("glm4moe")
    _, said = taught({"messages": [ASK, say("Hi."), MORE, CALLING, RESULT, say("Bye.")]}, of)
    think, found = "\n<think></think>\n", "<arg_key>q</arg_key>\n<arg_value>Hi</arg_value>\n</tool_call>"
    call = f"{think}<tool_call>find\n{found}"
    assert said == f"{think}Hi.<|user|>{call}<|observation|>{think}Bye.<|user|>"
    # No model ends its turn with the beginning of a message of the system
    _, said = taught({"messages": [ASK, say("Hi."), {"role": "system", "content": "Be brief."}, MORE, say("Bye.")]}, of)
    assert said == f"{think}Hi.{think}Bye.<|user|>"
    written = call.removeprefix(think)
    for response in (written, written + "<|observation|>"):
        assert taught({"prompt": [ASK], "response": response}, of)[1].endswith("</tool_call><|observation|>")


def test_gpt_oss_ends_a_call_with_a_token_of_its_own() -> None:
    of = tokenizer("gptoss")
    quoting = {**CALL, "function": {"name": "find", "arguments": {"q": "no <|return|> here"}}}
    _, said = taught({"messages": [ASK, {**CALLING, "thinking": "Hmm", "tool_calls": [quoting]}]}, of)
    assert said.endswith('<|message|>{"q": "no <|return|> here"}<|call|>')
    assert said.startswith("<|channel|>analysis<|message|>Hmm<|end|>")
    written = "<|channel|>final<|message|>Hi."
    assert taught({"prompt": [ASK], "response": written}, of) == taught({"prompt": [ASK], "response": "Hi."}, of)
    for end in ("<|return|>", "<|call|>"):
        assert taught({"prompt": [ASK], "response": written + end}, of)[1] == written + end
    with pytest.raises(DataError, match="writes 'return.>' for the assistant's message 1 while it is the last"):
        data.supervised([{"messages": [ASK, say("Hi."), MORE, say("Bye.")]}], of)


def test_a_template_without_any_token_between_messages_is_refused() -> None:
    of = copy.copy(tokenizer("chatml"))
    of.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert turn_ends(of).answer == ""
