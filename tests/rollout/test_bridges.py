"""Bridges between turns: random conversations under the templates of real models, and each case by itself."""

import copy
import json
import random
from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nrl import tiny
from nrl.data import render
from nrl.data.turn_tokens import turn_tokens
from nrl.errors import DataError, ModelError
from nrl.rollout.bridges import Extension, Sampled, TraceFork, bridge, continues, extend
from tests.chat_tokenizers import tokenizer
from tests.rollout.conversations import (
    FAMILIES,
    TOOLS,
    Answer,
    Message,
    answer,
    changed,
    echoed,
    ending,
    never,
    observation,
    started,
)

# random conversations


def written(name: str, messages: list[Message], tools: Any) -> str:
    """The template's text of a conversation that waits for an answer, straight from transformers."""
    if name == "deepseekv3":  # which joins arguments with text
        messages = copy.deepcopy(messages)
        for call in [call["function"] for message in messages for call in message.get("tool_calls") or []]:
            call["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
    today = datetime(2024, 7, 26).strftime
    text: str = tokenizer(name).apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False, strftime_now=today
    )
    return text


def refused(name: str, messages: list[Message], tools: Any) -> bool:
    try:
        written(name, messages, tools)
    except (TemplateError, TypeError):
        return True
    return False


def converse(rng: random.Random, name: str) -> Counter[str]:
    """One conversation, checked at every turn; how often it was bridged, was exact, or forked, by reason."""
    of, family = tokenizer(name), FAMILIES[name]
    tools = TOOLS if max(family.calls) and rng.random() < 0.5 else None
    count: Counter[str] = Counter()
    tokens: list[int] = []
    history: list[Message] = []
    turns: list[tuple[Sampled, Answer]] = []
    messages, change = started(rng, name), None
    for _ in range(rng.randint(2, 6)):
        if refused(name, messages, tools):
            with pytest.raises(DataError, match="the chat template refuses"):
                extend(tokens, history, [turn for turn, _ in turns], messages, of, tools=tools)
            count["refused"] += 1
            break
        extension = extend(tokens, history, [turn for turn, _ in turns], messages, of, tools=tools)
        kept, appended, fork = extension
        before, turns = turns, [each for each in turns if each[0].stop <= kept]
        assert kept == (turns[-1][0].stop if turns else 0)
        count["exact"] += check_text(name, tokens[:kept], appended, messages, turns, tools)
        if change is not None:
            assert fork is not None
            assert (fork.reason, fork.num_messages) == change
            if family.forks is never:  # it forks where the history was changed, and no earlier
                assert kept == max((turn.stop for turn, _ in before if turn.message < fork.num_messages), default=0)
        elif not history:
            assert fork is None
        elif family.forks(history, before[-1][1], messages[len(history) :], tools):
            assert fork is not None
            assert (fork.reason, fork.num_messages) == ("template", len(history) - 1)
        else:
            assert fork is None, fork
            assert kept == len(tokens)
        count[fork.reason if fork else "bridge"] += bool(history)
        tokens, history = tokens[:kept] + appended, messages
        said = answer(rng, name, history)
        turns = [*turns, (Sampled(len(history), len(tokens), len(tokens) + len(said.ids)), said)]
        tokens, history = tokens + said.ids, [*history, said.message]
        messages, change = [*echoed(rng, history), *observation(rng, name, said)], None
        luck = rng.random()
        if luck < 0.2:
            sent, at = changed(rng, name, history)
            messages, change = [*sent, *messages[len(history) :]], ("rewritten", at)
        elif luck < 0.27:
            at = rng.choice([at for at, message in enumerate(history) if message["role"] == "assistant"])
            messages, change = copy.deepcopy(history[:at]), ("retried", at)
    return count


def check_text(
    name: str,
    kept: list[int],
    appended: list[int],
    messages: list[Message],
    turns: list[tuple[Sampled, Answer]],
    tools: Any,
) -> bool:
    """Check what was appended against the template's text of all messages; whether the tokens say all of it."""
    of, expected = tokenizer(name), written(name, messages, tools)
    if not turns:
        assert of.decode(appended) == expected
        ids, spelled = of.encode(expected, add_special_tokens=False), turn_tokens(of).pattern
        if not any(spelled.search(str(message)) for message in messages if message["role"] == "assistant"):
            assert appended == ids
        return False
    text = of.decode(appended)
    assert expected.endswith(text)
    at, last = turns[-1]
    head = expected.removesuffix(text)  # and it begins where the last turn ends
    ends = [ending(name, each.message, messages[turn.message + 1]) for turn, each in turns]
    if last.ids[-1:] == [of.convert_tokens_to_ids(ends[-1])]:
        assert head.endswith(ends[-1])
        head = head.removesuffix(ends[-1])
    whole = of.decode(kept + appended)
    if "tool_calls" not in last.message:
        assert head.rstrip().endswith(last.message["content"].rpartition("</think>")[2].strip())
    assert messages[at.message]["role"] == "assistant"
    exact = all(each.exact and each.end == end for (_, each), end in zip(turns, ends, strict=True))
    assert not exact or whole == expected
    return exact


def converse_often(name: str, n: int) -> Counter[str]:
    count: Counter[str] = Counter()
    for number in range(n):
        try:
            count += converse(random.Random(f"{name} {number}"), name)
        except BaseException as error:
            error.add_note(f"{name}, conversation {number}")
            raise
    kinds = {"bridge", "exact", "rewritten", "retried"} | (set() if FAMILIES[name].forks is never else {"template"})
    assert set(count) - {"refused"} == kinds
    return count


@pytest.mark.parametrize("name", FAMILIES)
def test_random_conversations(name: str) -> None:
    count = converse_often(name, 63)
    assert count["exact"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_ten_thousand_conversations(name: str) -> None:
    count = converse_often(name, 1250)
    assert count["exact"] > 250
    print(name, *(f"{kind} {n}" for kind, n in sorted(count.items())))


# what is appended

Q = {"role": "user", "content": "Hello"}
MORE = {"role": "user", "content": "Thanks"}
HI = {"role": "assistant", "content": "Hi."}
CALL = {"type": "function", "id": "call_0", "function": {"name": "find", "arguments": {"q": "Hi"}}}
RESULT = {"role": "tool", "content": "7", "tool_call_id": "call_0"}


def bridged(name: str, said: str, history: list[Any], new: list[Any], tools: Any = None) -> str | TraceFork:
    """What is appended, as text."""
    of = tokenizer(name)
    found = bridge(of.encode(said, add_special_tokens=False), history, new, of, tools=tools)
    return found if isinstance(found, TraceFork) else str(of.decode(found))


ASKS = "<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("said", "content", "appended"),
    [
        ("Hi.<|im_end|>", "Hi.", "\n" + ASKS),
        ("Hi.", "Hi.", "<|im_end|>\n" + ASKS),  # cut
        ("", "", "<|im_end|>\n" + ASKS),  # nothing was sampled
        ("<|im_end|>", "", "\n" + ASKS),
        ("Hi.<|endoftext|>", "Hi.", "<|im_end|>\n" + ASKS),  # ended by another token
        ("Hi.<|im_end|>\n", "Hi.", ASKS),  # sampled on, as the template goes on
        ("Hi.<|im_end|>\n<|im_start|>user", "Hi.\nuser", "\nThanks<|im_end|>\n<|im_start|>assistant\n"),
        ("Hi.<|im_end|>!", "Hi.!", "<|im_end|>\n" + ASKS),  # and as it does not
        ("Hi.<|im_start|>", "Hi.", "<|im_end|>\n" + ASKS),  # a special token that no message has
    ],
)
def test_a_turn_is_ended_once(said: str, content: str, appended: str) -> None:
    assert bridged("qwen2_5", said, [Q, {"role": "assistant", "content": content}], [MORE]) == appended


def test_the_template_completes_what_was_cut() -> None:
    """Reasoning that was read apart is closed by the template."""
    read = {"role": "assistant", "content": "", "reasoning_content": "Hmm"}
    found = bridged("glm4moe", "\n<think>Hmm", [Q, read], [RESULT])
    assert found == "</think><|observation|>\n<tool_response>\n7\n</tool_response><|assistant|>"
    raw = {"role": "assistant", "content": "\n<think>Hmm"}  # the template does not know that it is reasoning
    assert bridged("glm4moe", "\n<think>Hmm", [Q, raw], [MORE]) == "<|user|>\nThanks<|assistant|>"


def test_half_a_character_stays_half() -> None:
    of = tokenizer("qwen2_5")
    turn = of.encode("Hi 👩")[:-1]
    message = {"role": "assistant", "content": of.decode(turn)}
    assert message["content"].endswith("\ufffd")
    found = bridge(turn, [Q, message], [MORE], of)
    assert not isinstance(found, TraceFork)
    assert of.decode(found) == "<|im_end|>\n" + ASKS


def test_a_tokenizer_that_composes_characters() -> None:
    of = copy.deepcopy(tokenizer("qwen2_5"))
    turn = of.encode("ne\u0301<|im_end|>")  # as a model may sample it
    of.backend_tokenizer.normalizer = normalizers.NFC()
    assert "ne\u0301" in of.decode(turn)
    assert "n\xe9" in of.decode(of.encode("ne\u0301"))
    found = bridge(turn, [Q, {"role": "assistant", "content": "ne\u0301"}], [MORE], of)
    assert found == of.encode("\n" + ASKS)


def test_a_template_that_tells_of_tools_in_each_turn() -> None:
    of = copy.copy(tokenizer("qwen2_5"))
    of.chat_template = (
        "{% set tell = '(' ~ tools|length ~ ' tools)' if tools else '' %}"
        "{% for m in messages %}[{{ m.role }}]{{ tell if m.role == 'assistant' }}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{{ tell }}{% endif %}"
    )
    before, turn = of.encode("[user]Hello<|im_end|>[assistant](2 tools)"), of.encode("Hi.<|im_end|>")
    turns = [Sampled(1, len(before), len(before + turn))]
    kept, appended, fork = extend(before + turn, [Q, HI], turns, [Q, HI, MORE], of, tools=TOOLS)
    assert (kept, fork) == (len(before + turn), None)
    assert of.decode(appended) == "[user]Thanks<|im_end|>[assistant](2 tools)"


@pytest.mark.parametrize(
    ("name", "token"), [("qwen3", "<|im_end|>"), ("mistral_v13", "</s>"), ("llama3_1", "<|eot_id|>")]
)
def test_a_special_token_that_is_spelled_is_text(name: str, token: str) -> None:
    """It ends no turn, and the template writes it as it was said: there is nothing to fork for."""
    of = tokenizer(name)
    turn = [part for letter in f"It is {token} there." for part in of.encode(letter, add_special_tokens=False)]
    end = of.convert_tokens_to_ids(token)
    assert end not in turn
    appended = bridge([*turn, end], [Q, {"role": "assistant", "content": f"It is {token} there."}], [MORE], of)
    assert not isinstance(appended, TraceFork)
    assert end not in appended[:1]
    assert "Thanks" in of.decode(appended)


def test_white_space_that_a_template_trims_stays_sampled() -> None:
    found = bridged("llama3_1", "\n Hi. \n<|eot_id|>", [Q, {"role": "assistant", "content": "\n Hi. \n"}], [MORE])
    user, model = (f"<|start_header_id|>{role}<|end_header_id|>\n\n" for role in ("user", "assistant"))
    assert found == f"{user}Thanks<|eot_id|>{model}"


def test_calls_are_not_compared_word_for_word() -> None:
    said = '<tool_call>{"arguments":{"q":"\\u0048i"},"name":"find"}</tool_call><|im_end|>'
    found = bridged("qwen2_5", said, [Q, {"role": "assistant", "content": "", "tool_calls": [CALL]}], [RESULT])
    asks = "<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert found == "\n<|im_start|>user\n" + asks


@pytest.mark.parametrize("arguments", [{"q": "né"}, '{"q": "né"}'])
def test_arguments_are_given_as_the_template_takes_them(arguments: Any) -> None:
    """DeepSeek's template joins them as text."""
    call = {"type": "function", "function": {"name": "find", "arguments": arguments}}
    history: list[Any] = [Q, {"role": "assistant", "content": "<think>\nHmm</think>", "tool_calls": [call]}]
    before = copy.deepcopy(history)
    of = tokenizer("deepseekv3")
    found = extend([], [], [], [*history, RESULT], of, tools=TOOLS).appended
    assert '\n```json\n{"q": "né"}\n```' in of.decode(found)
    assert history == before
    said = 'Hmm</think><｜tool▁calls▁begin｜>find {"q": "né"}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
    result = "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>7<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    assert bridged("deepseekv3", said, history, [RESULT], TOOLS) == result


def test_a_tool_answers_a_call_that_the_template_names() -> None:
    """gpt-oss' template refuses results without a call, and ends a call with a token of its own."""
    said = '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"q":"Hi"}<|call|>'
    result = '<|start|>functions.find to=assistant<|channel|>commentary<|message|>"7"<|end|><|start|>assistant'
    history = [Q, {"role": "assistant", "tool_calls": [CALL]}]
    assert bridged("gptoss", said, history, [RESULT], TOOLS) == result
    assert bridged("gptoss", said.removesuffix("<|call|>"), history, [RESULT], TOOLS) == "<|call|>" + result


def test_new_messages_may_have_answers_that_nobody_sampled() -> None:
    shown = [MORE, {"role": "assistant", "content": "Bye."}, {"role": "user", "content": "Be brief."}]
    found = bridged("qwen2_5", "Hi.<|im_end|>", [Q, HI], shown)
    user, model = "<|im_start|>user\n", "<|im_start|>assistant\n"
    assert found == f"\n{user}Thanks<|im_end|>\n{model}Bye.<|im_end|>\n{user}Be brief.<|im_end|>\n{model}"


@pytest.mark.parametrize("said", ["Hi.<|im_end|>", "Hi.\n<|im_end|>"])
def test_a_template_that_writes_a_line_end_before_the_end_of_a_turn(said: str) -> None:
    of = copy.copy(tokenizer("chatml"))
    of.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    found = bridge(of.encode(said), [Q, HI], [MORE], of)
    assert of.decode(found) == "[user]Thanks\n<|im_end|>[assistant]"


def test_a_template_without_special_tokens() -> None:
    """The tokenizer begins each text with a space, which is not in the middle of one."""
    characters = [" ", *map(chr, range(33, 127)), "\n", "▁"]
    made = Tokenizer(models.Unigram([("<unk>", -9.0), *((each, -1.0) for each in characters)], 0, False))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    of = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<unk>")
    of.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert of.convert_ids_to_tokens(of.encode("user", add_special_tokens=False))[0] == "▁"
    before, turn = render([Q], of), of.encode("Hi.", add_special_tokens=False)[1:]
    found = bridge(turn, [Q, HI], [MORE], of)
    assert before + turn + (found if isinstance(found, list) else []) == render([Q, HI, MORE], of)


# forks that a template makes


def forks(found: Any, at: int, *words: str) -> bool:
    assert isinstance(found, TraceFork)
    assert all(word in found.details for word in words), found.details
    return found.reason == "template" and found.num_messages == at


THOUGHT = {"role": "assistant", "content": "Hi.", "reasoning_content": "Hmm"}
CALLED = {"role": "assistant", "content": "", "reasoning_content": "Hmm", "tool_calls": [CALL]}


def test_qwen3_keeps_reasoning_until_the_user_speaks() -> None:
    answered, asked = (f"<think>\nHmm\n</think>\n\n{said}<|im_end|>" for said in ("Hi.", "<tool_call>{}</tool_call>"))
    assert forks(bridged("qwen3", answered, [Q, THOUGHT], [MORE]), 1, "'Hi.'", "leaves out", "<think>")
    result = "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
    assert bridged("qwen3", asked, [Q, CALLED], [RESULT]) == f"{result}<|im_start|>assistant\n"
    # Reasoning of an earlier turn, too, though the last has none
    later = [Q, CALLED, RESULT, HI]
    assert forks(bridged("qwen3", "Hi.<|im_end|>", later, [MORE]), 3, r"\n<think>\nHmm", r"\n<tool_call>\n")
    # What has none is as it was
    assert bridged("qwen3", "Hi.<|im_end|>", [Q, HI], [MORE]) == "\n" + ASKS


def test_deepseek_drops_what_its_generation_prompt_opened() -> None:
    history = [Q, {"role": "assistant", "content": "Hmm</think>Hi."}]
    found = bridged("deepseekv3", "Hmm</think>Hi.<｜end▁of▁sentence｜>", history, [MORE])
    assert forks(found, 1, r"><think>\n'", ">Hi.")


def test_gpt_oss_ends_an_answer_in_two_ways() -> None:
    said = "<|channel|>final<|message|>Hi."
    assert forks(bridged("gptoss", said + "<|return|>", [Q, HI], [MORE]), 1, "<|return|>", "end of message 1")
    assert bridged("gptoss", said, [Q, HI], [MORE]) == "<|end|><|start|>user<|message|>Thanks<|end|><|start|>assistant"


@pytest.mark.parametrize("words", ["Hmm", "Hi"])
def test_reasoning_is_missed_where_its_words_are_elsewhere(words: str) -> None:
    call = {**CALL, "function": {"name": "find", "arguments": {"q": words}}}
    message = {"role": "assistant", "content": "", "reasoning_content": words, "tool_calls": [call]}
    found = bridged("glm4moe", f"\n<think>{words}</think>", [Q, message], [RESULT, MORE])
    assert forks(found, 1, "leaves out")


def test_a_template_that_leaves_out_calls() -> None:
    history: list[Any] = [Q, {"role": "assistant", "content": "Hi.", "tool_calls": [CALL]}]
    of = copy.copy(tokenizer("chatml"))
    of.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert forks(bridge(of.encode('Hi. {"name": "find"}<|im_end|>'), history, [MORE], of), 1, "leaves out")


def test_a_message_that_leaves_out_what_was_sampled() -> None:
    assert forks(bridged("qwen2_5", "Hmm Hi.<|im_end|>", [Q, HI], [MORE]), 1, "'Hi.'", "'Hmm Hi.'")


def test_a_template_that_ends_answers_now_so_now_otherwise() -> None:
    of = copy.copy(tokenizer("chatml"))
    of.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% if m.role == 'assistant' %}({{ m.content|length }}{{ ' last' if loop.last }}){% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert forks(bridge(of.encode("Hi."), [Q, HI], [MORE], of), 1, "the end of message 1")


# messages


@pytest.mark.parametrize(
    ("history", "messages", "expected"),
    [
        ([], [Q], 0),
        ([Q, HI], [Q, HI, MORE], 2),
        ([Q, HI], [{**Q, "refusal": None, "tool_calls": []}, HI], 2),
        ([Q, THOUGHT], [Q, HI, MORE], ("rewritten", 1, "reasoning_content")),
        ([Q, HI], [Q, {**HI, "content": "Hi. "}, MORE], ("rewritten", 1, "content")),
        ([Q, HI], [{**Q, "role": "system"}, HI], ("rewritten", 0, "role")),
        ([Q, CALLED], [Q, {**CALLED, "tool_calls": []}], ("rewritten", 1, "tool_calls")),
        ([Q, HI, MORE, HI], [MORE, HI], ("rewritten", 0, "content")),
        ([Q, HI, MORE, HI], [Q, HI, MORE], ("retried", 3, "first 3 of the history's 4")),
        ([Q, HI], [], ("retried", 0, "first 0 of the history's 2")),
    ],
)
def test_messages_continue_a_history_word_for_word(history: list[Any], messages: list[Any], expected: Any) -> None:
    found = continues(history, messages)
    if isinstance(expected, int):
        assert found == expected
    else:
        assert isinstance(found, TraceFork)
        assert found[:2] == expected[:2]
        assert expected[2] in found.details


# traces


def trace(name: str) -> tuple[list[int], list[Any], list[Sampled]]:
    """Two turns, of tokens that the tokenizer would not have cut."""
    of = tokenizer(name)
    tokens = list(of.encode(written(name, [Q], None), add_special_tokens=False))
    history, turns = [Q], []
    for at in (1, 3):
        turn = [*of.encode("H"), *of.encode("i."), of.convert_tokens_to_ids("<|im_end|>")]
        turns.append(Sampled(at, len(tokens), len(tokens) + len(turn)))
        tokens += turn
        history.append(HI)
        if at == 1:
            tokens += of.encode("\n" + ASKS)
            history.append(MORE)
    return tokens, history, turns


def test_a_trace_begins_with_all_messages() -> None:
    of = tokenizer("qwen2_5")
    assert extend([], [], [], [Q], of) == Extension(0, render([Q], of), None)
    text = written("qwen2_5", [Q], TOOLS)
    assert "look_up" in text
    assert extend([], [], [], [Q], of, tools=TOOLS).appended == of.encode(text)


def test_a_trace_goes_on_with_all_that_it_has() -> None:
    of, (tokens, history, turns) = tokenizer("qwen2_5"), trace("qwen2_5")
    messages = [*history, MORE]
    before = copy.deepcopy((tokens, history, turns, messages))
    assert extend(tokens, history, turns, messages, of) == (len(tokens), of.encode("\n" + ASKS), None)
    assert (tokens, history, turns, messages) == before


def test_a_fork_keeps_the_turns_before_the_change() -> None:
    of, (tokens, history, turns) = tokenizer("qwen2_5"), trace("qwen2_5")
    other = {"role": "user", "content": "Bye"}
    kept, appended, fork = extend(tokens, history, turns, [*history[:2], other, *history[3:], MORE], of)
    assert fork is not None
    assert (fork.reason, fork.num_messages, kept) == ("rewritten", 2, turns[0].stop)
    user, model = "<|im_start|>user\n", "<|im_start|>assistant\n"
    text = f"\n{user}Bye<|im_end|>\n{model}Hi.<|im_end|>\n{user}Thanks<|im_end|>\n{model}"
    assert of.decode(appended) == text
    # Asked again, it is asked with the same tokens
    kept, appended, fork = extend(tokens, history, turns, history[:3], of)
    assert fork is not None
    assert (fork.reason, tokens[:kept] + appended) == ("retried", tokens[: turns[1].start])
    # The first message is another: nothing is kept
    messages = [other, *history[1:], MORE]
    kept, appended, fork = extend(tokens, history, turns, messages, of)
    assert fork is not None
    assert (fork.reason, kept, appended) == ("rewritten", 0, render(messages, of))


def test_a_fork_of_the_template_keeps_what_it_can() -> None:
    of = tokenizer("qwen3")
    history: list[Any] = [Q, HI, MORE, THOUGHT]
    first = of.encode(written("qwen3", [Q], None))
    one, two = of.encode("Hi.<|im_end|>"), of.encode("<think>\nHmm\n</think>\n\nHi.<|im_end|>")
    asks = of.encode("\n" + ASKS)
    turns = [Sampled(1, len(first), len(first + one))]
    turns.append(Sampled(3, len(first + one + asks), len(first + one + asks + two)))
    kept, appended, fork = extend(first + one + asks + two, history, turns, [*history, MORE], of)
    assert fork is not None
    assert (fork.reason, fork.num_messages, kept) == ("template", 3, turns[0].stop)
    assert of.decode(appended) == f"\n{ASKS}Hi.<|im_end|>\n{ASKS}"


# errors


@pytest.mark.parametrize(
    ("history", "new", "message"),
    [
        ([], [MORE], "bridge: history is empty; give at least one message"),
        ([Q], [MORE], "bridge: history ends with a message of the role 'user'; give it up to and including the assist"),
        ([HI], [MORE], "bridge: history begins with the assistant's message; give what it answers, too"),
        ([Q, HI], [], "bridge: new is empty; give at least one message"),
        ([Q, HI], [MORE, HI], "bridge: new ends with the assistant's message, which leaves nothing to answer; end wi"),
        ([Q, HI], ["more"], "bridge: new: message 0 is a str; give {'role': ..., 'content': ...}"),
        ([Q, HI], [{"content": "more"}], "bridge: new: message 0 has no text as its 'role'; it has content"),
        ([{"role": 1}, HI], [MORE], "bridge: history: message 0 has no text as its 'role'; it has role"),
    ],
)
def test_messages_that_are_no_conversation(history: list[Any], new: list[Any], message: str) -> None:
    with pytest.raises(DataError) as error:
        bridge([1], history, new, tokenizer("qwen2_5"))
    assert str(error.value).startswith(message)


def test_errors_of_templates() -> None:
    with pytest.raises(DataError, match="the chat template refuses the messages of the roles user, assistant, tool"):
        bridged("gemma3", "Hi.<end_of_turn>", [Q, HI], [RESULT])
    with pytest.raises(ModelError, match="no chat template"):
        bridge([1], [Q, HI], [MORE], tiny.tokenizer())
    with pytest.raises(DataError, match="messages ends with the assistant's message"):
        extend([], [], [], [Q, HI], tokenizer("qwen2_5"))
    with pytest.raises(DataError, match="messages is empty"):
        extend([], [], [], [], tokenizer("qwen2_5"))


@pytest.mark.parametrize("wrong", ["no turns", "a turn too few", "a token too many", "a message too many"])
def test_a_trace_ends_with_its_last_turn(wrong: str) -> None:
    tokens, history, turns = trace("qwen2_5")
    turns = {"no turns": [], "a turn too few": turns[:1]}.get(wrong, turns)
    tokens = tokens + [0] * (wrong == "a token too many")
    history = [*history, MORE] if wrong == "a message too many" else history
    with pytest.raises(DataError, match="extend: the last turn ends . messages and .* give the trace as it was when"):
        extend(tokens, history, turns, [*history, MORE], tokenizer("qwen2_5"))
