"""Formats: from the rows of well-known datasets to rows with a prompt and an answer to it.

A format is a function of one row. It returns a row, a list of rows, or None to leave the row out. The rows that it
returns have ``prompt`` or ``messages``; and ``answer`` for verifiers, ``response`` for `supervised`, or ``chosen`` and
``rejected`` for `preferences`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nrl.data.checks import fields, kind, shown
from nrl.data.collating import shared
from nrl.data.messages import (
    TRAINED,
    before_answers,
    canonical_messages,
    decoded_messages,
    is_chat,
    separate_results,
)
from nrl.data.row_fields import check_fields_agree
from nrl.envs.contract import Task
from nrl.errors import DataError

__all__ = [
    "FORMATS",
    "Format",
    "alpaca",
    "format_of",
    "gsm8k",
    "helpsteer3",
    "hh",
    "openmathinstruct2",
    "prompt_completion",
    "sharegpt",
    "squad",
    "turns",
    "ultrafeedback",
    "verl",
]

type Format = Callable[[Task], Task | Sequence[Task] | None]
"""From one row to a row, several, or none."""


def gsm8k(row: Task) -> Task:
    """Of GSM8K: the answer is the number behind ``####``, without separators; the response is the whole solution.

    Args:
        row: with ``question`` and ``answer``.

    Raises:
        DataError: a field is missing or no text, or ``answer`` has no ``####``.

    Source: Cobbe et al., 2021 (2110.14168); `openai/gsm8k` on the hub.

    >>> gsm8k({"question": "1000+1=", "answer": "Add. 1000+1 = <<1000+1=1001>>1001\\n#### 1,001"})["answer"]
    '1001'
    """
    question, solution = _texts("gsm8k", row, "question", "answer")
    _, mark, number = solution.rpartition("####")
    if not mark or not number.strip():
        raise DataError(f"gsm8k: 'answer' has no number behind '####': {shown(repr(solution[-50:]))}")
    return {"prompt": question, "answer": number.strip().replace(",", ""), "response": solution}


def openmathinstruct2(row: Task) -> Task:
    """Of OpenMathInstruct-2: the expected answer, and the solution that was generated.

    Args:
        row: with ``problem``, ``generated_solution`` and ``expected_answer``.

    Raises:
        DataError: a field is missing or no text.

    Source: Toshniwal et al., 2024 (2410.01560); `nvidia/OpenMathInstruct-2` on the hub.

    >>> row = {"problem": "1+1=", "generated_solution": "It is \\\\boxed{2}.", "expected_answer": "2"}
    >>> openmathinstruct2(row)["answer"]
    '2'
    """
    names = ("problem", "generated_solution", "expected_answer")
    problem, solution, answer = _texts("openmathinstruct2", row, *names)
    return {"prompt": problem, "answer": answer, "response": solution}


def squad(row: Task) -> Task | None:
    """Of SQuAD: the passage and the question; ``answer`` is the first of ``answers``, all that annotators accept.

    The prompt ends with a line ``Answer:``, so that a base model, whose prompt stays a text, sees where that begins.

    Args:
        row: with ``context``, ``question`` and ``answers``, whose ``text`` lists them.

    Returns:
        None where there is no answer, as in SQuAD 2.0.

    Raises:
        DataError: a field is missing or of another type.

    Source: Rajpurkar et al., 2016 (1606.05250); `rajpurkar/squad` on the hub.

    >>> answers = {"text": ["Ada", "Ada Lovelace"], "answer_start": [0, 0]}
    >>> squad({"context": "Ada Lovelace wrote it.", "question": "Who wrote it?", "answers": answers})["answer"]
    'Ada'
    """
    context, question = _texts("squad", row, "context", "question")
    answers = row.get("answers")
    found = answers.get("text") if isinstance(answers, Mapping) else None
    if not isinstance(found, Sequence) or isinstance(found, str) or not all(isinstance(each, str) for each in found):
        raise DataError(f"squad: 'answers' is {shown(repr(answers))}; give {{'text': ['...'], 'answer_start': [0]}}")
    if not found:
        return None
    prompt = f"{context.strip()}\n\n{question.strip()}\n\nAnswer:\n"
    return {"prompt": prompt, "answer": found[0], "answers": list(found), "response": found[0]}


def helpsteer3(row: Task) -> Task | None:
    """Of HelpSteer3's preferences: the response that annotators preferred overall is the chosen one.

    Args:
        row: with ``context``, the messages so far, ``response1``, ``response2``, and ``overall_preference`` from -3
            (the first is much better) to 3 (the second is).

    Returns:
        None where the preference is 0.

    Raises:
        DataError: a field is missing or of another type.

    Source: Wang et al., 2025 (2505.11475); `nvidia/HelpSteer3`, configuration ``preference``, on the hub.

    >>> row = {"context": [{"role": "user", "content": "Hi"}], "response1": "Hello!", "response2": "No."}
    >>> helpsteer3(row | {"overall_preference": -2})["chosen"]
    'Hello!'
    """
    first, second = _texts("helpsteer3", row, "response1", "response2")
    context = canonical_messages(row.get("context"), "helpsteer3: 'context'")
    preference = row.get("overall_preference")
    if isinstance(preference, bool) or not isinstance(preference, int) or not -3 <= preference <= 3:
        raise DataError(f"helpsteer3: 'overall_preference' is {shown(repr(preference))}; it must be from -3 to 3")
    if preference == 0:
        return None
    chosen, rejected = (first, second) if preference < 0 else (second, first)
    return {"prompt": context, "chosen": chosen, "rejected": rejected}


def ultrafeedback(row: Task) -> Task:
    """Of UltraFeedback, binarized: the prompt is the common beginning of the two conversations, the sides are the rest.

    Args:
        row: with ``chosen`` and ``rejected``, conversations.

    Raises:
        DataError: a side is missing or no conversation, or they share no message.

    Source: Cui et al., 2023 (2310.01377); `HuggingFaceH4/ultrafeedback_binarized` on the hub.

    >>> asked = {"role": "user", "content": "1+1="}
    >>> sides = [[asked, {"role": "assistant", "content": answer}] for answer in ("2", "11")]
    >>> ultrafeedback({"chosen": sides[0], "rejected": sides[1]})["rejected"]
    [{'role': 'assistant', 'content': '11'}]
    """
    return _pair("ultrafeedback", *(row.get(side) for side in ("chosen", "rejected")))


def hh(row: Task) -> Task:
    """Of Anthropic's HH: two dialogues as texts become messages; the prompt is their common beginning.

    Args:
        row: with ``chosen`` and ``rejected``, each ``"\\n\\nHuman: ...\\n\\nAssistant: ..."``, in any number of turns.

    Raises:
        DataError: a side is missing, is no such dialogue, or does not end with the assistant; or they share no message.

    Source: Bai et al., 2022 (2204.05862); `Anthropic/hh-rlhf` on the hub.

    >>> sides = [f"\\n\\nHuman: 1+1=\\n\\nAssistant: {answer}" for answer in ("2", "11")]
    >>> hh({"chosen": sides[0], "rejected": sides[1]})["rejected"]
    [{'role': 'assistant', 'content': '11'}]
    """
    names, sides = ("chosen", "rejected"), list[list[dict[str, str]]]()
    for name, text in zip(names, _texts("hh", row, *names), strict=True):
        begin, *parts = re.split(r"(?:\A|\n\n)(Human|Assistant):", text)
        if begin.strip() or not parts:
            raise DataError(f"hh: '{name}' does not begin with '\\n\\nHuman:': {shown(repr(text))}")
        if parts[-2] != "Assistant":
            raise DataError(f"hh: '{name}' does not end with what the assistant says: {shown(repr(text[-50:]))}")
        roles = {"Human": "user", "Assistant": "assistant"}
        sides.append(
            [
                {"role": roles[speaker], "content": said.strip()}
                for speaker, said in zip(parts[::2], parts[1::2], strict=True)
            ]
        )
    return _pair("hh", *sides)


def _pair(format: str, chosen: Any, rejected: Any) -> Task:
    """Two conversations as their common beginning, up to an answer that may differ, and the rest of each."""
    good, bad = (
        canonical_messages(side, f"{format}: '{name}'") for name, side in (("chosen", chosen), ("rejected", rejected))
    )
    prompt = before_answers(good[: shared(good, bad)])
    if not prompt:
        raise DataError(f"{format}: 'chosen' and 'rejected' do not begin with the same message")
    return {"prompt": prompt, "chosen": good[len(prompt) :], "rejected": bad[len(prompt) :]}


def sharegpt(row: Task) -> Task:
    """Of ShareGPT and its descendants: ``conversations`` become ``messages``.

    The roles are human, gpt, system, function_call or tool_call (whose value is the JSON text of a call, or of
    several), observation, tool, tool_response and their like, in small or capital letters. The fields ``tools``, a list
    or its JSON text, and ``system`` are read as in any row.

    Args:
        row: with ``conversations``, each with ``from`` and ``value``; or with ``role`` and ``content``.

    Returns:
        Its other fields, and ``messages``.

    Raises:
        DataError: no ``conversations``, a message that is none or has an unknown role, or another conversation in
            ``conversation`` or ``messages``.

    Source: the format of `lmsys/FastChat`'s and LLaMA-Factory's data.

    >>> said = [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]
    >>> sharegpt({"conversations": said, "id": 7})
    {'id': 7, 'messages': [{'from': 'human', 'value': '1+1='}, {'from': 'gpt', 'value': '2'}]}
    """
    keys = [key for key in ("conversations", "conversation", "messages") if row.get(key) is not None]
    key = next(iter(keys), "conversations")
    if key not in row or key == "messages":
        raise DataError(f"sharegpt: the row has no 'conversations'; it has {fields(row)}")
    messages = decoded_messages(row[key])
    canonical = canonical_messages(messages, f"sharegpt: '{key}'")
    for other in keys[1:]:
        if len(row[other]) and canonical_messages(decoded_messages(row[other]), f"sharegpt: '{other}'") != canonical:
            raise DataError(f"sharegpt: '{key}' and '{other}' differ, and only '{key}' would be read; leave one out")
    return {**{name: value for name, value in row.items() if name != key}, "messages": messages}


def alpaca(row: Task) -> Task:
    """Of Alpaca: the instruction, with the input behind it, is the prompt; the output is the response.

    Args:
        row: with ``instruction``, ``output``, and where there is one ``input``. With ``history``, pairs of a question
            and its answer, the prompt is a chat that begins with them; ``system`` is read as in any row.

    Raises:
        DataError: a field is missing or no text.

    Source: Taori et al., 2023; `tatsu-lab/alpaca` on the hub.

    >>> alpaca({"instruction": "Add.", "input": "1 and 1", "output": "2"})
    {'prompt': 'Add.\\n\\n1 and 1', 'response': '2'}
    """
    instruction, output = _texts("alpaca", row, "instruction", "output")
    more = row.get("input")
    if more is not None and not isinstance(more, str):
        raise DataError(f"alpaca: 'input' is {kind(more)}; give a text")
    prompt: Any = f"{instruction}\n\n{more}" if more else instruction
    history = row.get("history") or []
    if not isinstance(history, list | tuple) or any(
        not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair)
        for pair in history
    ):
        raise DataError(f"alpaca: 'history' is {shown(repr(history))}; give pairs of a question and its answer")
    if history:
        said = [text for pair in history for text in pair]
        roles = ["user", "assistant"] * len(history)
        earlier = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
        prompt = [*earlier, {"role": "user", "content": prompt}]
    return {**({"system": row["system"]} if row.get("system") else {}), "prompt": prompt, "response": output}


def prompt_completion(row: Task) -> Task:
    """Of rows with a prompt and a completion, texts or messages: the completion is the response.

    Args:
        row: with ``prompt`` and ``completion``.

    Returns:
        Its other fields, and ``response``.

    Raises:
        DataError: a field is missing, or ``response`` is another one.

    >>> prompt_completion({"prompt": "1+1=", "completion": "2"})
    {'prompt': '1+1=', 'response': '2'}
    """
    for name in ("prompt", "completion"):
        if row.get(name) is None:
            raise DataError(f"prompt_completion: the row has no '{name}'; it has {fields(row)}")
    if row.get("response") is not None and row["response"] != row["completion"]:
        raise DataError("prompt_completion: 'completion' and 'response' differ, and only one is read; leave one out")
    others = {name: value for name, value in row.items() if name != "completion"}
    return {**others, "response": row["completion"]}


def verl(row: Task) -> Task:
    """Of verl's rows for reinforcement learning: the answer is ``reward_model.ground_truth``.

    Args:
        row: with ``prompt``, messages, and ``reward_model`` with its ``ground_truth``.

    Returns:
        ``prompt``, ``answer`` (a number becomes a text), and where they are there ``data_source``, ``ability``,
        ``extra_info``, ``system`` and ``tools``.

    Raises:
        DataError: a field is missing or of another type.

    Source: verl's "Prepare data for post-training".

    >>> asked = [{"role": "user", "content": "1+1="}]
    >>> verl({"prompt": asked, "reward_model": {"style": "rule", "ground_truth": "2"}, "data_source": "sums"})["answer"]
    '2'
    """
    reward = row.get("reward_model")
    if not isinstance(reward, Mapping) or reward.get("ground_truth") is None:
        raise DataError(f"verl: 'reward_model' is {shown(repr(reward))}; give {{'ground_truth': ...}}")
    if not is_chat(row.get("prompt")):
        raise DataError(f"verl: 'prompt' is {kind(row.get('prompt'))}; give a list of messages")
    truth = reward["ground_truth"]
    kept = {name: row[name] for name in ("data_source", "ability", "extra_info", "system", "tools") if name in row}
    answer = str(truth) if isinstance(truth, int | float) and not isinstance(truth, bool) else truth
    if row.get("answer") not in (None, truth, answer):
        raise DataError(
            f"verl: 'reward_model' has the ground_truth {shown(repr(truth))}, and 'answer' is "
            f"{shown(repr(row['answer']))}; leave one of them out"
        )
    return {"prompt": row["prompt"], "answer": answer, **kept}


def turns(row: Task) -> list[Task]:
    """A row for each message of the assistant in a conversation, which teaches that one alone.

    For chat templates that write earlier turns differently from the last, such as Qwen3's, which drops their thinking:
    then each row has the tokens that the model reads and writes in that turn.

    Args:
        row: with ``messages``.

    Returns:
        Its other fields, ``prompt``, the messages so far, and ``response``, a list of one message. Where messages of
        the assistant stand right before it, they come in the response, too, and are not trained there. A message with
        ``weight`` 0 makes no row.

    Raises:
        DataError: no ``messages``, or none of the assistant among them that answers anything.

    >>> chat = [{"role": role, "content": text} for role, text in [("user", "a"), ("assistant", "b"), ("user", "c")]]
    >>> turns({"messages": [*chat, {"role": "assistant", "content": "d"}]})[1]["response"]
    [{'role': 'assistant', 'content': 'd'}]
    """
    if "messages" not in row:
        raise DataError(f"turns: the row has no 'messages'; it has {fields(row)}")
    check_fields_agree(row, "turns: the row")
    given = decoded_messages(row["messages"])
    messages = canonical_messages(given, "turns: 'messages'")
    # As they came, since only the reader of the source knows which nulls are filler
    given = [single for message in given for single in separate_results(message)]
    others = {name: value for name, value in row.items() if name != "messages"}
    found = list[Task]()
    for at, message in enumerate(messages):
        prompt = before_answers(messages[:at])
        if message["role"] != "assistant" or "weight" in message or not prompt:
            continue
        earlier = [
            {**{key: value for key, value in each.items() if key not in TRAINED}, "weight": 0}
            for each in given[len(prompt) : at]
        ]
        found.append({**others, "prompt": given[: len(prompt)], "response": [*earlier, given[at]]})
    if not found:
        raise DataError("turns: 'messages' has no message of the assistant after another, so there is nothing to teach")
    return found


FORMATS: Mapping[str, Format] = {
    "gsm8k": gsm8k,
    "helpsteer3": helpsteer3,
    "openmathinstruct2": openmathinstruct2,
    "squad": squad,
    "turns": turns,
    "ultrafeedback": ultrafeedback,
    "alpaca": alpaca,
    "hh": hh,
    "prompt_completion": prompt_completion,
    "sharegpt": sharegpt,
    "verl": verl,
}
"""The formats that a configuration can name."""


def format_of(name: str) -> Format:
    """Return the format of a name in `FORMATS`; of several with ``+`` between, one after the other.

    Args:
        name: such as ``"sharegpt+turns"``.

    Raises:
        DataError: there is no format of this name.

    >>> said = [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]
    >>> format_of("sharegpt+turns")({"conversations": said})[0]["prompt"]
    [{'from': 'human', 'value': '1+1='}]
    """
    names = name.split("+")
    for each in names:
        if each not in FORMATS:
            raise DataError(f"tasks: there is no format '{each}'; there are {', '.join(FORMATS)}, or give a function")
    if len(names) == 1:
        return FORMATS[name]

    def chained(row: Task) -> list[Task]:
        found = [row]
        for each in names:
            made = [FORMATS[each](task) for task in found]
            found = [task for one in made for task in ([one] if isinstance(one, Mapping) else one or ())]
        return found

    chained.__name__ = name
    return chained


def _texts(format: str, row: Task, *names: str) -> list[str]:
    for name in names:
        if name not in row:
            raise DataError(f"{format}: the row has no '{name}'; it has {fields(row)}")
        if not isinstance(row[name], str):
            raise DataError(f"{format}: '{name}' is {kind(row[name])}; give a text")
    return [row[name] for name in names]
