"""Right verdicts by kind: the table that the tests hold, and that the documentation shows.

``python -m tests.envs.verdicts`` writes it into ``docs/verifiers.md``.
"""

import re
from pathlib import Path
from typing import Any

from nrl import envs
from nrl.envs import Trace, score_of
from nrl.envs.judge_scores import read_score

PAGE = Path(__file__).parents[2] / "docs" / "verifiers.md"

# Of each kind: what the task has, what the model wrote, the reward; None: it cannot be read (parse_fail).
type Row = tuple[Any, str, float | None]

REASONING: list[Row] = [
    ("42", "<think>6 * 7 = 41? No.</think>It is 42.", 1.0),
    ("42", "6 * 7 = 41? No.</think>It is 42.", 1.0),
    ("42", "<think>6 * 7 = 42</think>It is 41.", 0.0),
    ("42", "<think>6 * 7 = 42</think>Sorry, I do not know.", None),
    ("42", r"<think>Perhaps \boxed{42}. But wait", None),
    ("42", "<think id=1>Perhaps 42.", None),
    ("42", "Sure.\n<think>6 * 7 = 42", None),
    ("42", "[THINK]6 * 7 = 41?[/THINK]42", 1.0),
    ("42", "<|channel|>analysis<|message|>41?<|end|><|start|>assistant<|channel|>final<|message|>42", 1.0),
    ("42", "<|channel|>analysis<|message|>42", None),
    ("42", "The tag `<think>` opens reasoning. 42", 1.0),
]

NUMBER: list[Row] = [
    ("1234.5", "It costs $1,234.50 in total.", 1.0),
    ("36", "So 3 dozen, i.e. 36.", 1.0),
    ("42", "The answer is 42%", 1.0),
    ("42", "42 (not 43)", 1.0),
    ("42", "It is 42 rather than 43.", 1.0),
    ("43", "It is not 43.", None),
    ("43", "42, 43", None),
    ("43", r"\boxed{42}, \boxed{43}", None),
    ("43", "42 or 43", None),
    ("16", "at least 16", None),
    ("16", "15, maybe 16", None),
    ("16", "See page 16.", None),
    ("16", "16 is wrong.", None),
    ("16", r"\boxed{16} is not the answer.", None),
    ("16", "The answer is 16. I made a mistake: it is 17.", 0.0),
    ("16", r"\boxed{16 \text{ or more}}", None),
    ("16", "16 dozen", None),
    ("16", r"The answer is not 15 but \boxed{16}.", 1.0),
    ("7", "Answer: 7\n\nLet me know if you need 2 more.", 1.0),
    ("7", "The answer is 7. Shall I explain all 3 steps?", 1.0),
    ("9", "The answer is 7. Wait, it is 9.", 1.0),
    ("7", "<answer>7</answer> (2 steps)", 1.0),
    ("7", '{"answer": 7, "steps": 2}', 1.0),
    ("1500000", "1.5 million", 1.0),
    ("1500000", r"\boxed{1.5 \text{ million}}", 1.0),
    ("5", "5 million", 0.0),
    ("1000", "1e3", 1.0),
    ("0.5", "½", 1.0),
    ("2.5", "2 1/2", 1.0),
    ("-5", "−5", 1.0),
    ("5", "5-", 1.0),
    ("1234", "12,34", None),
    ("30", "10:30", None),
    ("5", "x_2 = 5", 1.0),
    ("42", "**42**", 1.0),
    ("3", "3.0000000000000001", 0.0),
    ("0.333", "1/3", 0.0),
    ("10", "9.999999999", 0.0),
    ("42", "42°", 1.0),
]

CHOICES = ["7 m", "8 m", "9 m", "polygenic risk"]
CHOICE: list[Row] = [
    ("B", r"\boxed{B}", 1.0),
    ("D", r"We get \boxed{\langle H\rangle \ll \Delta E}. **Answer: D**", 1.0),
    ("E", r"\boxed{E: A polygenic risk score}", 1.0),
    ("B", r"$\boxed{\text{(B) } 8}$", 1.0),
    ("B", r"\boxed{A, B}", None),
    (("D", CHOICES), r"\boxed{D) polygenic risk}", 1.0),
    (("D", CHOICES), r"\boxed{D) 7 m}", None),
    (("B", CHOICES), r"So it is \boxed{8 \text{ m}}. Answer: B", 1.0),
    (("B", CHOICES), "8 m", None),
    ("B", "<answer> (B) </answer>", 1.0),
    ("B", "#### B", 1.0),
    ("B", '{"answer": "B"}', 1.0),
    ("B", "```\nB\n```", 1.0),
    ("B", "**B**", 1.0),
    ("B", "(B)", 1.0),
    ("B", "B.", 1.0),
    ("B", "ANSWER: b", 1.0),
    ("B", "The answer is B because A is too small.", 1.0),
    ("B", "Therefore, B is correct.", 1.0),
    ("B", "It cannot be A. So B.", 1.0),
    ("C", "The answer is not B but C.", 1.0),
    ("B", "The best choice would be (B), since it is I who knows.", 1.0),
    ("B", "Answer: B\n\nConfidence: 90%", 1.0),
    ("B", "答案：B", 1.0),
    ("B", "答案是 B。", 1.0),
    ("B", "答案：（Ｂ）", 1.0),
    ("B", "정답: B", 1.0),
    ("B", "答えはBです。", 1.0),
    ("B", "A. No wait, it is B", 1.0),
    ("B", "B, because A is too small.", 1.0),
    ("A", "The answer is A. No, A is wrong.", None),
    ("B", "La respuesta es B.", 1.0),
    ("B", "La bonne réponse est B.", 1.0),
    ("B", "Die Antwort ist B.", 1.0),
    ("B", "Answer: B or C", None),
    ("B", "Eliminating A, C and D, leaving B.", 1.0),
    ("B", "Only B remains.", 1.0),
    ("B", "The answer is most likely B.", 1.0),
    ("B", "<choice>B</choice>", 1.0),
    ("B", "Not B.", None),
    ("B", "leaving A or B", None),
    ("B", r"\boxed{A}, \boxed{B}", None),
    ("B", "A is correct. B is correct.", None),
    ("B", "I don't think the answer is B.", None),
    ("B", "If it is B, then x = 2.", None),
    ("B", "Many people choose B.", None),
    ("N", "no", None),
    ("A", "A cat sat on it.", None),
    ("C", "(A) 7 m\n(B) 8 m\n(C) 9 m", None),
]

CONSTRAINTS: list[Row] = [
    ({"words": {"least": 4, "most": 4}}, "well-known 3.14 cats 😀 sleep", 1.0),
    ({"sentences": {"least": 2, "most": 2}}, "Dr. Smith paid 3.50 dollars. He left at 5 p.m. yesterday.", 1.0),
    ({"sentences": {"least": 1, "most": 1}}, "Well... that is it.", 1.0),
    ({"sentences": {"least": 1, "most": 1}}, "J. K. Rowling wrote it.", 1.0),
    ({"sentences": {"least": 1, "most": 1}}, '"Stop!" he said.', 1.0),
    ({"sentences": {"least": 2, "most": 2}}, "We met at 5 p.m. Then we left.", 1.0),
    ({"sentences": {"least": 2, "most": 2}}, "你好。再见。", 1.0),
    ("lowercase", "123", 1.0),
    ("lowercase", "Ab", 0.0),
    ("uppercase", "", None),
    ("no_commas", "你好，世界", 0.0),
    ("no_commas", "one two", 1.0),
    ("quoted", "“hello”", 1.0),
    ("quoted", "«bonjour»", 1.0),
    ("quoted", "“hello“", 0.0),
    ({"bullets": {"least": 3, "most": 3}}, "* a\n- b\n* c", 1.0),
    ({"bullets": {"least": 3, "most": 3}}, "• a\n– b\n+ c", 1.0),
    ({"bullets": {"least": 2, "most": 2}}, "*a\n-b\n---\n**c**", 1.0),
    ({"bullets": {"least": 1}}, "1. a\n2) b", 0.0),
    ({"avoids": {"words": ["cat"]}}, "concatenate", 1.0),
    ("json", '```json\n{"a": 1}\n```', 1.0),
    ("json", '{"a": NaN}', 0.0),
]

JUDGE: list[Row] = [  # the score of the judge's reply, from 0 to 10
    ("", "Right, but long.\nSCORE: 8", 8.0),
    ("", "**Score:** 8/10", 8.0),
    ("", "I would give it 8 out of 10.", 8.0),
    ("", "Rating: [[8]]", 8.0),
    ("", '{"reason": "long", "score": 8}', 8.0),
    ("", '```json\n{"score": "8/10"}\n```', 8.0),
    ("", "```\nSCORE: 8\n```", 8.0),
    ("", '{"result": {"score": 8}}', 8.0),
    ("", "Score: 8 (good)", 8.0),
    ("", "SCORE:\n8", 8.0),
    ("", "评分：8", 8.0),
    ("", "<think>SCORE: 2?</think>SCORE: 8", 8.0),
    ("", "Score (0-10): 8", 8.0),
    ("", "| Score | 8 |", 8.0),
    ("", "{'score': 8}", 8.0),
    ("", "<score>8</score>", 8.0),
    ("", "Correctness: 3\nScore: 8", 8.0),
    ("", "Score: 5\nFinal score: 8", 8.0),
    ("", "It is not complete, so I would give it 8 out of 10.", 8.0),
    ("", "8", 8.0),
    ("", "It has 3 parts.\n8", None),
    ("", "9/100", None),
    ("", "SCORE: 11", None),
    ("", "7/10 or 8/10", None),
    ("", "<think>SCORE: 8", None),
    ("", "Score: 8\nScore: 7", None),
    ("", "Correctness: 8/10", None),
    ("", "I would not give it 8 out of 10.", None),
    ("", "It would be 8/10 if it were shorter.", None),
    ("", "It asks for a score of 8.", None),
    ("", "Score (0-100): 8", None),
]

F = "def f(x): return x"
CODE: list[Row] = [
    ({"stdout": "0.333333333333"}, "print(f'{1/3:.6f}')", 1.0),
    ({"stdout": "1"}, "print(1.0)", 1.0),
    ({"stdout": "1000000"}, "print(1000001)", 0.0),
    ({"stdin": "a\r\n", "stdout": "a!"}, "print(input() + '!')", 1.0),
    ({"input": [1, 2], "output": 3}, "print(int(input()) + int(input()))", 1.0),
    ({"stdout": "5"}, "print(5)", 1.0),
    ("assert f(10**6000) == 10**6000 + 1", "def f(x): return x + 1", 1.0),
    ("assert f() == [0.3]", "def f(): return [0.1 + 0.2]", 1.0),
    ("assert f() == [1, 2]", "def f(): return (1, 2)", 1.0),
    ("assert f() == (1, 2)", "def f(): return [1, 2]", 0.0),
    ("assert f(3) == [0, 1, 2]", "def f(n): yield from range(n)", 0.0),
    ("assert list(f(3)) == [0, 1, 2]", "def f(n): yield from range(n)", 1.0),
    ("assert f(1).left == 1", "from collections import namedtuple as n\nf = n('Pair', 'left')", 1.0),
    ("try: f()\nexcept E: pass\nelse: assert False", "class E(Exception): pass\ndef f(): raise E", 1.0),
    ("import asyncio\nassert asyncio.run(f(1)) == 2", "async def f(x): return x + 1", 1.0),
    ("assert f(TreeNode(1)) == 1", "class Solution:\n    def f(self, root: Optional[TreeNode]): return root.val", 1.0),
    ("assert Solution().f(1) == 1", "class Solution:\n    def f(self, x): return x", 1.0),
    ("assert f(1) == 1", "class Solution:\n    def f(self, x: int): return x", 1.0),
    ("assert f([1]) == 1", "def f(a: List[int]) -> int: return a[0]", 1.0),
    ("assert f(abs, -1) == 1", "def f(g, x): return g(x)", 1.0),
    ("assert f(1).x == 1", "class P: x = 1\ndef f(x): return P()", 1.0),
    ("assert f(1) == 1", "class P:\n    def __eq__(self, o): return True\ndef f(x): return P()", 0.0),
    (
        "assert P(1) == P(1)",
        "class P:\n  def __init__(s, n): s.n = n\n  def __eq__(s, o): return o.n == s.n",
        1.0,
    ),
    (
        "assert P(1) == P(1)",
        "class P:\n  def __init__(s, n): s.n = n\n  def __eq__(self, o): return True",
        0.0,
    ),
    ("assert f() == float('nan')", "def f(): return float('nan')", 1.0),
]

KINDS: dict[str, list[Row]] = {
    "reasoning": REASONING,
    "number": NUMBER,
    "choice": CHOICE,
    "constraints": CONSTRAINTS,
    "judge": JUDGE,
    "code": CODE,
}


def verdict(kind: str, task: Any, text: str) -> float | None:
    """The reward of a row; None: what the model wrote cannot be read."""
    if kind == "judge":
        return read_score(text, 0, 10)
    fields: dict[str, Any] = {"answer": task}
    if kind == "constraints":
        fields = {"constraints": [task]}
    if kind == "choice" and isinstance(task, tuple):
        fields = {"answer": task[0], "choices": task[1]}
    verifiers: dict[str, Any] = {"reasoning": envs.number, "number": envs.number, "choice": envs.choice}
    if kind == "code":
        fields, text = {"tests": [task]}, f"```python\n{text}\n```"
        verifiers["code"] = envs.code(limits=envs.Limits(seconds=60))
    score = score_of(verifiers.get(kind, envs.constraints)(fields, Trace("", [text])))
    assert not isinstance(score.reward, tuple)
    return None if score.status == "parse_fail" else score.reward


def rendered(kind: str) -> str:
    """The rows of a kind as a table in Markdown."""
    has_task = kind != "judge"
    head = "score" if kind == "judge" else "reward"
    left = {"code": "the test", "constraints": "the constraint"}.get(kind, "the answer")
    right = {"code": "the program", "judge": "the judge's reply"}.get(kind, "the response")
    lines = [
        f"| {left} | {right} | {head} |" if has_task else f"| {right} | {head} |",
        "|---|---|---|"[: 13 if has_task else 9],
    ]
    for task, text, reward in KINDS[kind]:
        nothing = "none" if kind == "judge" else "`parse_fail`"
        shown = nothing if reward is None else f"{reward:g}"
        cells = ([_cell(_told(task))] if has_task else []) + [_cell(text), shown]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _told(task: Any) -> str:
    return (
        f"{task[0]} of {', '.join(task[1])}"
        if isinstance(task, tuple)
        else task
        if isinstance(task, str)
        else str(task)
    )


def _cell(text: str) -> str:
    """A text as code in a cell; a line's end is an arrow."""
    text = text.replace("\n", "⏎").replace("\r", "␍").replace("|", "\\|")
    ticks = "``" if "`" in text else "`"
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{pad}{text}{pad}{ticks}" if text else "(nothing)"


def page(text: str) -> str:
    """The page with the tables between its marks."""
    for kind in KINDS:
        text = re.sub(
            rf"(<!-- verdicts: {kind} -->\n).*?(<!-- end of verdicts -->)",
            lambda found, kind=kind: f"{found[1]}\n{rendered(kind)}\n\n{found[2]}",  # type: ignore[misc]
            text,
            flags=re.DOTALL,
        )
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
