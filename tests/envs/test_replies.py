"""Reasoning is not an answer: how a reply is split, and that every verifier reads the answer alone."""

import asyncio
import inspect
import pickle
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nrl
from nrl import envs
from nrl.envs import Trace, Turn, score_of
from nrl.envs.library.games.moves import last_number
from nrl.envs.replies import REASONING_MARKS, Reply, opening_mark, split_reasoning
from nrl.envs.tools import parse
from nrl.gym.http.protocol import action_of, trace_of, transcript, turn_of

CHANNELS = "<|channel|>analysis<|message|>Perhaps 8.<|end|><|start|>assistant<|channel|>{}<|message|>It is 9."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is 9.", Reply("It is 9.", "", True)),
        ("", Reply("", "", True)),
        *(
            (f"{opening}\nPerhaps 8.\n{closing}\n\nIt is 9.", Reply("It is 9.", "Perhaps 8.", True))
            for opening, closing in REASONING_MARKS.items()
        ),
        *((f"{opening}\nPerhaps 8.", Reply("", "Perhaps 8.", False)) for opening in REASONING_MARKS),
        ("Perhaps 8.</think>It is 9.", Reply("It is 9.", "Perhaps 8.", True)),  # the prompt opened it
        ("<think>I write `</think>` and 42. But wait", Reply("", "I write `\n\n` and 42. But wait", False)),
        ("<think>so [/THINK] 42", Reply("", "so\n\n42", False)),  # another mark ends nothing
        ("<think>a</thinking>b</think>c", Reply("c", "a\n\nb", True)),
        ("<THINK>a</THINK>b", Reply("b", "a", True)),
        ("<think>a</think>b<think>c</think>d", Reply("d", "a\n\nb\n\nc", True)),
        ("<think>a</think>b</think>c", Reply("b</think>c", "a", True)),  # an answer that shows the mark
        ("a</think>Use split('</think>')", Reply("Use split('</think>')", "a", True)),
        ("<think>I close with `</think>`.</think>b", Reply("b", "I close with `\n\n`.", True)),
        ('<think>It is "9"</think>"9"', Reply('"9"', 'It is "9"', True)),  # two quotations, none of the mark
        ("<think>a</think>\n\n</think>\n\nb", Reply("b", "a", True)),
        ("Use `</think>`.", Reply("Use `</think>`.", "", True)),
        ("<think>a</think>b<think>c", Reply("", "a\n\nb\n\nc", False)),
        ("Sure. <think>Perhaps 8.", Reply("", "Sure.\n\nPerhaps 8.", False)),
        ("Write `<think>` first.", Reply("Write `<think>` first.", "", True)),
        ("<think></think>", Reply("", "", True)),
        ("<think id=1>Perhaps 8.</think>9", Reply("9", "Perhaps 8.", True)),  # a tag with attributes
        ('<THINKING step="2" >Perhaps 8.</thinking>9', Reply("9", "Perhaps 8.", True)),
        ("<think id=1>Perhaps 8.", Reply("", "Perhaps 8.", False)),
        ("<think>", Reply("", "", False)),
        (CHANNELS.format("final"), Reply("It is 9.", "Perhaps 8.", True)),
        (CHANNELS.format("final") + "<|return|>", Reply("It is 9.", "Perhaps 8.", True)),
        (CHANNELS.format("commentary"), Reply("", "Perhaps 8.\n\nIt is 9.", False)),
        ("<|channel|>analysis<|message|>Perhaps 8.", Reply("", "Perhaps 8.", False)),
        ("analysisPerhaps 8.assistantfinalIt is 9.", Reply("It is 9.", "Perhaps 8.", True)),
        ("analysisPerhaps 8.", Reply("", "Perhaps 8.", False)),
        ("analysis of the case: 9", Reply("analysis of the case: 9", "", True)),
    ],
)
def test_a_reply_is_split_at_the_first_mark_that_closes_reasoning(text: str, expected: Reply) -> None:
    assert split_reasoning(text) == expected


PIECES = ["<think>", "</think>", "</think>", "`</think>`", '"</think>"', "[/THINK]", "a", " ", "\n", '"', "'", "`"]


@given(st.lists(st.sampled_from(PIECES), max_size=9).map("".join), st.booleans())
@settings(max_examples=200)
def test_the_parser_of_calls_ends_reasoning_at_the_same_mark(text: str, reasoning_open: bool) -> None:
    parsed = parse(text, None, reasoning_open=reasoning_open)
    reply = split_reasoning(text, reasoning_open=reasoning_open)
    assert parsed.reasoning_ended == reply.reasoning_ended
    if parsed.reasoning_ended:  # the parser's text may have words in front of reasoning, too
        assert parsed.text.endswith(reply.answer.strip())
    if len(re.findall("<think>", text)) <= (0 if reasoning_open else 1) and text.startswith("<think>"):
        assert parsed.text == reply.answer.strip()


def test_reasoning_that_the_prompt_opened_has_to_be_closed() -> None:
    assert split_reasoning("Perhaps 8.", reasoning_open=True) == Reply("", "Perhaps 8.", False)
    assert split_reasoning("a</think>9", reasoning_open=True) == Reply("9", "a", True)
    assert opening_mark("user\nHi\nassistant\n<think>\n") == "<think>\n"
    assert opening_mark("assistant\n<think>\n\n</think>\n\n") == ""


@pytest.mark.parametrize(
    "text", ["<think>" * 100_000, "</think>" * 100_000, "<|channel|>" * 100_000, "`<think>`" * 9999]
)
def test_hostile_marks_take_linear_time(text: str) -> None:
    split_reasoning(text)


@pytest.mark.parametrize(
    "turn",
    [
        Turn("<think>Easy.</think>4"),
        Turn("Perhaps 4", reasoning_ended=False),
        Turn("4", reasoning="Easy."),
        Turn("4", reasoning="Easy, but", reasoning_ended=False),
        Turn("Easy. 4", reasoning="Easy.", answer="4"),
    ],
)
def test_a_turn_is_the_same_elsewhere(turn: Turn) -> None:
    others = [
        pickle.loads(pickle.dumps(turn)),
        turn_of(action_of(turn)),
        trace_of(transcript(Trace("", [turn]))).turns[0],
        Turn(turn.text, **turn.beyond_text),
    ]
    for other in others:
        assert (other.text, other.answer, other.reasoning, other.reasoning_ended) == (
            turn.text,
            turn.answer,
            turn.reasoning,
            turn.reasoning_ended,
        )


def test_a_trace_has_the_answer_of_its_last_turn() -> None:
    trace = Trace("", ["<think>a</think>b", "<think>c</think>d"])
    assert (trace.answer, trace.reasoning, trace.reasoning_ended) == ("d", "c", True)
    assert (Trace("").answer, Trace("").reasoning_ended) == ("", True)
    assert trace.text == "<think>c</think>d"


TASKS: dict[str, tuple[Any, dict[str, Any], str, str]] = {  # a verifier, a task, a right answer, a wrong one
    "exact": (envs.exact, {"answer": "Paris"}, "Paris", "Rome"),
    "exact, empty": (envs.exact, {"answer": ""}, "", "Rome"),
    "number": (envs.number, {"answer": "42"}, r"\boxed{42}", r"\boxed{43}"),
    "number_or_wrong": (envs.number_or_wrong, {"answer": "42"}, "#### 42", "#### 43"),
    "choice": (envs.choice, {"answer": "B"}, r"\boxed{B}", r"\boxed{C}"),
    "short_answer": (envs.short_answer, {"answer": "Paris"}, "<answer>Paris</answer>", "<answer>Rome</answer>"),
    "constraints": (envs.constraints, {"constraints": ["lowercase"]}, "so it is.", "NO."),
    "math": (nrl.math_verifier(workers=1), {"answer": "42", "prompt": ""}, r"\boxed{42}", r"\boxed{43}"),
}


def reward(verifier: Any, task: dict[str, Any], reply: str | Turn) -> float:
    async def ask() -> Any:
        found = verifier(task, Trace("", [reply]))
        return await found if inspect.isawaitable(found) else found

    value: Any = score_of(asyncio.run(ask())).reward
    return float(value)


@pytest.mark.parametrize("name", TASKS)
def test_verifiers_read_the_answer_alone(name: str) -> None:
    verifier, task, right, wrong = TASKS[name]
    assert reward(verifier, task, right) == 1.0
    assert reward(verifier, task, f"<think>\nPerhaps {wrong}, or NOT\n</think>\n\n{right}") == 1.0
    assert reward(verifier, task, f"Perhaps {wrong}, or NOT\n</think>\n\n{right}") == 1.0
    assert reward(verifier, task, f"<think>\n{right}\n</think>\n\n{wrong}") == 0.0
    assert reward(verifier, task, f"<think>\n{right}") == 0.0
    assert reward(verifier, task, Turn(right, reasoning_ended=False)) == 0.0
    assert reward(verifier, task, Turn("", reasoning=right)) == float(right == "")


def test_moves_of_games_are_read_in_the_answer() -> None:
    assert last_number("<think>4 or 7?</think>I play 4. <not 7>") == 7
    assert last_number("<think>4 or 7?</think>I play 4.") == 4
    assert last_number("<think>4 or 7?") is None
