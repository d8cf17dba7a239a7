"""Formats of rows that have one question and one answer to it."""

from collections.abc import Mapping, Sequence

from nrl.data.checks import fields, kind, shown
from nrl.data.formats.base import texts_of, with_history
from nrl.data.messages import decode_json, decoded_messages, is_chat
from nrl.envs.types import Task
from nrl.errors import DataError

__all__ = ["alpaca", "gsm8k", "openmathinstruct2", "prompt_completion", "s1k", "squad", "verl"]


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
    question, solution = texts_of("gsm8k", row, "question", "answer")
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
    problem, solution, answer = texts_of("openmathinstruct2", row, *names)
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
    context, question = texts_of("squad", row, "context", "question")
    answers = row.get("answers")
    found = answers.get("text") if isinstance(answers, Mapping) else None
    if not isinstance(found, Sequence) or isinstance(found, str) or not all(isinstance(each, str) for each in found):
        raise DataError(f"squad: 'answers' is {shown(repr(answers))}; give {{'text': ['...'], 'answer_start': [0]}}")
    if not found:
        return None
    prompt = f"{context.strip()}\n\n{question.strip()}\n\nAnswer:\n"
    return {"prompt": prompt, "answer": found[0], "answers": list(found), "response": found[0]}


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
    instruction, output = texts_of("alpaca", row, "instruction", "output")
    more = row.get("input")
    if more is not None and not isinstance(more, str):
        raise DataError(f"alpaca: 'input' is {kind(more)}; give a text")
    question = f"{instruction}\n\n{more}" if more else instruction
    prompt = with_history(question, row.get("history"), "alpaca: 'history'")
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
        row: with ``prompt``, messages, and ``reward_model`` with its ``ground_truth``; both may be JSON text.

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
    if isinstance(reward, str):
        reward = decode_json(reward, "verl: 'reward_model'")
    prompt = decoded_messages(row.get("prompt"))
    if not isinstance(reward, Mapping) or reward.get("ground_truth") is None:
        raise DataError(f"verl: 'reward_model' is {shown(repr(reward))}; give {{'ground_truth': ...}}")
    if not is_chat(prompt):
        raise DataError(f"verl: 'prompt' is {kind(row.get('prompt'))}; give a list of messages")
    truth = reward["ground_truth"]
    kept = {name: row[name] for name in ("data_source", "ability", "extra_info", "system", "tools") if name in row}
    answer = str(truth) if isinstance(truth, int | float) and not isinstance(truth, bool) else truth
    if row.get("answer") not in (None, truth, answer):
        raise DataError(
            f"verl: 'reward_model' has the ground_truth {shown(repr(truth))}, and 'answer' is "
            f"{shown(repr(row['answer']))}; leave one of them out"
        )
    return {"prompt": prompt, "answer": answer, **kept}


def s1k(row: Task) -> Task:
    """Of s1K: the reasoning and the answer of a teacher.

    Args:
        row: with ``question``, ``thinking_trajectories``, a list of one text, and ``attempt``. In s1K-1.1 they are
            ``deepseek_thinking_trajectory`` and ``deepseek_attempt``, or Gemini's.

    Returns:
        Its other fields, ``prompt``, and ``response``, a message with ``reasoning_content``.

    Raises:
        DataError: a field is missing or no text.

    Source: Muennighoff et al., 2025 (2501.19393); `simplescaling/s1K` and `simplescaling/s1K-1.1` on the hub.

    >>> s1k({"question": "1+1=", "thinking_trajectories": ["Easy."], "attempt": "2"})["response"]
    [{'role': 'assistant', 'content': '2', 'reasoning_content': 'Easy.'}]
    """
    pairs = [("thinking_trajectories", "attempt")]
    pairs += [(f"{teacher}_thinking_trajectory", f"{teacher}_attempt") for teacher in ("deepseek", "gemini")]
    reasoning, attempt = next((pair for pair in pairs if row.get(pair[0]) is not None), pairs[0])
    traces = row.get(reasoning)
    single = traces[0] if isinstance(traces, list | tuple) and len(traces) == 1 else traces
    question, thought, answer = texts_of(
        "s1k", {**row, **({reasoning: single} if reasoning in row else {})}, "question", reasoning, attempt
    )
    others = {name: value for name, value in row.items() if name not in ("question", reasoning, attempt)}
    message = {"role": "assistant", "content": answer, "reasoning_content": thought}
    return {**others, "prompt": question, "response": [message]}
