"""Formats: from the rows of well-known datasets to rows with a prompt and an answer to it.

A format is a function of one row. It returns a row, a list of rows, or None to leave the row out. The rows that it
returns have ``prompt`` or ``messages``; and ``answer`` for verifiers, ``response`` for `supervised`, or ``chosen`` and
``rejected`` for `preferences`.
"""

from collections.abc import Callable, Mapping, Sequence

from nrl.data.checks import check_messages, fields, kind, shown
from nrl.data.collating import shared
from nrl.envs.contract import Task
from nrl.errors import DataError

__all__ = [
    "FORMATS",
    "Format",
    "gsm8k",
    "helpsteer3",
    "openmathinstruct2",
    "squad",
    "turns",
    "ultrafeedback",
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
    check_messages(row.get("context"), "helpsteer3: 'context'")
    preference = row.get("overall_preference")
    if isinstance(preference, bool) or not isinstance(preference, int) or not -3 <= preference <= 3:
        raise DataError(f"helpsteer3: 'overall_preference' is {shown(repr(preference))}; it must be from -3 to 3")
    if preference == 0:
        return None
    chosen, rejected = (first, second) if preference < 0 else (second, first)
    return {"prompt": row["context"], "chosen": chosen, "rejected": rejected}


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
    for side in ("chosen", "rejected"):
        check_messages(row.get(side), f"ultrafeedback: '{side}'")
    count = shared(row["chosen"], row["rejected"])
    if not count:
        raise DataError("ultrafeedback: 'chosen' and 'rejected' do not begin with the same message")
    prompt, chosen, rejected = row["chosen"][:count], row["chosen"][count:], row["rejected"][count:]
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def turns(row: Task) -> list[Task]:
    """A row for each message of the assistant in a conversation, which teaches that one alone.

    For chat templates that write earlier turns differently from the last, such as Qwen3's, which drops their thinking:
    then each row has the tokens that the model reads and writes in that turn.

    Args:
        row: with ``messages``.

    Returns:
        Its other fields, ``prompt``, the messages so far, and ``response``, a list of one message.

    Raises:
        DataError: no ``messages``, or none of the assistant among them that answers anything.

    >>> chat = [{"role": role, "content": text} for role, text in [("user", "a"), ("assistant", "b"), ("user", "c")]]
    >>> turns({"messages": [*chat, {"role": "assistant", "content": "d"}]})[1]["response"]
    [{'role': 'assistant', 'content': 'd'}]
    """
    if "messages" not in row:
        raise DataError(f"turns: the row has no 'messages'; it has {fields(row)}")
    messages = row["messages"]
    check_messages(messages, "turns: 'messages'")
    others = {name: value for name, value in row.items() if name != "messages"}
    found: list[Task] = [
        {**others, "prompt": list(messages[:index]), "response": [messages[index]]}
        for index in range(1, len(messages))
        if messages[index]["role"] == "assistant"
    ]
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
}
"""The formats that a configuration can name."""


def _texts(format: str, row: Task, *names: str) -> list[str]:
    for name in names:
        if name not in row:
            raise DataError(f"{format}: the row has no '{name}'; it has {fields(row)}")
        if not isinstance(row[name], str):
            raise DataError(f"{format}: '{name}' is {kind(row[name])}; give a text")
    return [row[name] for name in names]
