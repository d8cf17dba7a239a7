r"""Right answers, and the ways in which a response may say them."""

import re
from collections.abc import Mapping, Sequence

import attrs

from nrl.envs.final_numbers import boxes
from nrl.envs.library.code_blocks import last_block
from nrl.envs.library.mathematics.words.tidying import plain_number
from nrl.envs.types import Task
from nrl.errors import ConfigError, DataError

__all__ = ["FORMS", "Way", "accepted", "form_of", "normal", "ways"]

FORMS: Mapping[str, str] = {
    "bare": "{}",
    "said": "The answer is {}.",
    "boxed": r"\boxed{{}}",
    "marked": "#### {}",
    "tagged": "<answer>{}</answer>",
    "fenced": "```python\n{}\n```",
}
"""Ways to say an answer, by name; it stands in place of ``{}``."""

_CODE = re.compile(r"\n|\w\(|=|\bimport\b")


@attrs.frozen
class Way:
    """A response: the name of its form, what stands before the answer, the answer, and what stands behind it.

    >>> Way("boxed", r"\\boxed{", "42", "}").text
    '\\\\boxed{42}'
    """

    form: str
    before: str
    core: str
    after: str

    @property
    def text(self) -> str:
        """The whole response."""
        return self.saying(self.core)

    def saying(self, answer: str) -> str:
        """The same response with another answer."""
        return f"{self.before}{answer}{self.after}"

    @property
    def is_program(self) -> bool:
        """Whether the answer is code, of which two make a program too."""
        return "```" in self.text and _CODE.search(self.core) is not None


def form_of(given: str) -> tuple[str, str]:
    """What stands before and behind the answer in a form: the name of one of `FORMS`, or a text with ``{}``.

    Raises:
        ConfigError: it is neither.

    >>> form_of("Answer: {}!"), form_of("marked")
    (('Answer: ', '!'), ('#### ', ''))
    """
    before, found, after = FORMS.get(given, given).partition("{}")
    if not found:
        raise ConfigError(
            f"gym test: form={given} does not say where the answer stands; give a text with {{}} there, such as "
            f"form='The answer is {{}}.', or one of {', '.join(FORMS)}"
        )
    return before, after


def accepted(task: Task, column: str, place: int) -> list[str]:
    """The right answers of a task as texts; several where the column has a list. They mean the same; one is enough.

    Args:
        task: the task.
        column: where they are.
        place: the task's number, for errors.

    Raises:
        DataError: there is no such column, or nothing that can be said is in it.

    >>> accepted({"answer": 42}, "answer", 0), accepted({"names": ["Ada", "Ada Lovelace"]}, "names", 0)
    (['42'], ['Ada', 'Ada Lovelace'])
    """
    if column not in task:
        raise DataError(
            f"gym test: task {place} has no {column!r}, only {', '.join(map(repr, task)) or 'nothing'}; name the "
            "column of the right answers, as gold=COLUMN"
        )
    given = task[column]
    several = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not several or any(isinstance(each, bool) or each is None or isinstance(each, Mapping) for each in several):
        raise DataError(
            f"gym test: task {place}: {column!r} is {given!r:.200}; a right answer is a text or a number, or a list of "
            "these"
        )
    return [str(each) for each in several]


def ways(task: Task, golds: Sequence[str], form: str | None = None) -> list[Way]:
    r"""All ways to say the right answer of a task, those first that are the most common.

    Args:
        task: its ``"choices"`` make an option of the answer: ``B``.
        golds: from `accepted`.
        form: the only one, as `form_of` takes it; None: all of `FORMS`.

    >>> [way.text for way in ways({}, ["Add.\n#### 42"])][:2]
    ['Add.\n#### 42', 'The answer is 42.']
    """
    gold = golds[0]
    start, end = _core(gold)
    core, letter = gold[start:end], _letter(task, gold)
    if form is not None:
        before, after = form_of(form)
        return [Way(form, before, letter or core, after)]
    options = [Way("option", "", letter, "")] if letter else []
    bare = Way("bare", gold[:start], core, gold[end:])
    return [*options, bare, *(Way(name, *_around(name, core)) for name in FORMS if name != "bare")]


def _around(form: str, core: str) -> tuple[str, str, str]:
    before, after = form_of(form)
    return before, core, after


def _core(text: str) -> tuple[int, int]:
    """Where the answer stands in the text of a solution: a program, what a mark or a box holds, or all of it."""
    block = last_block(text)
    if block is not None and block.strip():
        start = text.rfind(block)
        return start, start + len(block.rstrip())
    mark = text.rfind("####")
    if mark >= 0 and (line := text[mark + 4 :].split("\n")[0]).strip():
        start = mark + 4 + len(line) - len(line.lstrip())
        return start, start + len(line.strip())
    box = next(boxes(text), None)
    if box is not None and box[2].strip():
        return box[1] - 1 - len(box[2]), box[1] - 1
    if letter := re.fullmatch(r"\s*\(([A-Za-z])\)\s*", text):  # an option
        return letter.span(1)
    return len(text) - len(text.lstrip()), len(text.rstrip()) or len(text)


def _letter(task: Task, gold: str) -> str | None:
    """The option that the answer is among the task's choices."""
    choices = task.get("choices")
    if not isinstance(choices, Sequence) or isinstance(choices, str):
        return None
    texts = [str(each) for each in choices]
    if gold in texts:
        return chr(ord("A") + texts.index(gold))
    return chr(ord("A") + int(gold)) if gold.isdigit() and int(gold) < len(texts) else None


def normal(answer: str) -> str:
    """An answer for comparison: a number in lowest terms; of a text, no case and no space that does not matter.

    >>> normal("0.50") == normal("1/2"), normal(" Paris.") == normal("paris"), normal("x+1") == normal("x-1")
    (True, True, False)
    """
    value = plain_number(answer)
    return str(value) if value is not None else " ".join(answer.casefold().split()).strip(" .$\"'")
