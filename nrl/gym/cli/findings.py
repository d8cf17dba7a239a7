"""What was tried and what came of it, and the faults that follow."""

from collections.abc import Sequence
from typing import Any

import attrs

from nrl.errors import ConfigError
from nrl.gym.cli.calls import LEFT_OUT, Outcome
from nrl.gym.cli.leak_check import Growth

__all__ = ["FAULTS", "LUCKY", "Fault", "Tried", "check_allowed", "faults", "shortened"]

FAULTS = {
    "gold": "right answers did not pass",
    "mutated": "answers that differ from the right one in a detail passed",
    "other": "other tasks' answers passed",
    "candidates": "lists of many answers passed",
    "repeated": "wrong answers passed when they were repeated",
    "reasoning": "right answers that stood in reasoning alone passed",
    "injected": "texts that tell the judge what to say passed",
    "question": "questions passed as their own answers",
    "operands": "sums and products of questions passed that were not worked out",
    "undefined": "answers that have no value passed",
    "empty": "empty answers passed",
    "huge": "huge answers passed",
    "silent": "episodes in which the policy said nothing passed",
    "junk": "episodes of junk passed",
    "echo": "episodes in which the policy repeated what it read passed",
    "calls": "episodes of senseless calls of tools passed",
    "random": "episodes of random answers passed more often than one in two",
    "uses": "episodes of random calls of tools passed more often than one in two",
    "raises": "calls raised, or took too long",
    "left_out": "answers led to rows that are left out, which costs a policy less than a wrong answer",
    "varies": "answers got another reward when they were verified again",
    "order": "answers got another reward in another order of calls",
    "seed": "answers got another reward under another seed of the task",
    "endless": "episodes did not end within turns=",
    "close": "episodes could not be closed",
    "slow": "calls took longer than slow=",
    "leaks": "not all that sessions took was given back",
}
"""What may be wrong, by name."""

LUCKY = ("random", "uses")
"""Policies whose episodes may pass by luck."""


@attrs.frozen
class Tried:
    """An answer or an episode, and what came of it.

    Args:
        task: its number.
        kind: one of the faults that it may be; ``"form"``, a way to say the right answer, which need not be read; or
            ``"leaves"``, an episode that ended before its first turn.
        how: more about it.
        text: what was said.
        outcome: of the call; of an episode, all of them together.
        passed: whether the reward is enough.
        note: why it is no fault although it passed: ``"may be equal"``, ``"may be luck"``.
        found: other faults that it showed: name and message.
        turns: of an episode.
        characters: of the whole text, where it is too long to be kept.
    """

    task: int
    kind: str
    how: str
    text: str
    outcome: Outcome
    passed: bool
    note: str = ""
    found: tuple[tuple[str, str], ...] = ()
    turns: int | None = None
    characters: int | None = None

    @property
    def wrong(self) -> bool:
        """Whether it passed and should not have, or should have and did not."""
        if self.note or self.kind not in FAULTS:
            return False
        return not self.passed if self.kind == "gold" else self.passed

    def record(self) -> dict[str, Any]:
        """As a line of a file."""
        return {
            "task": self.task,
            "kind": self.kind,
            "how": self.how,
            "reward": self.outcome.reward,
            "status": self.outcome.status,
            "passed": self.passed,
            "wrong": self.wrong,
            "note": self.note,
            "faults": [list(each) for each in self.found],
            "turns": self.turns,
            "seconds": self.outcome.seconds,
            "memory": self.outcome.memory,
            "error": self.outcome.error,
            "characters": self.characters if self.characters is not None else len(self.text),
            "text": shortened(self.text, 1000),
        }


@attrs.frozen
class Fault:
    """Something that is wrong: its name, how often it was seen, and what was seen."""

    name: str
    count: int
    what: str


def shortened(text: str, most: int) -> str:
    """The beginning and the end of a text, and how many characters are between them.

    >>> shortened("abcdefghij" * 10, 20)
    'abcdefghij (80 more) abcdefghij'
    """
    return text if len(text) <= most else f"{text[: most // 2]} ({len(text) - most} more) {text[-(most // 2) :]}"


def check_allowed(allow: Sequence[str]) -> None:
    """Check that faults which are allowed have names that there are.

    Raises:
        ConfigError: one has not.
    """
    unknown = [each for each in allow if each not in FAULTS]
    if unknown:
        raise ConfigError(f"gym test: allow={','.join(unknown)}: there is no such fault; there are {', '.join(FAULTS)}")


def faults(tried: Sequence[Tried], slow: float, grown: Growth | None = None) -> list[Fault]:
    """What is wrong, in the order of `FAULTS`.

    Args:
        tried: all that was.
        slow: seconds that a call may take. The slowest call of all is not counted: it may have started something.
        grown: after many sessions.
    """
    seen, errors = dict[str, list[str]](), dict[str, list[str]]()
    for each in tried:
        where = f"task {each.task}, {each.kind} ({each.how})"
        if each.wrong:
            seen.setdefault(each.kind, []).append(_shown(each))
        if each.outcome.error is not None:
            kind = each.outcome.error.partition(":")[0]
            errors.setdefault(kind, []).append(f"{where}: {shortened(each.outcome.error, 300)}")
        if each.outcome.status in LEFT_OUT:
            seen.setdefault("left_out", []).append(f"{where}: {each.outcome.status}")
        for name, message in each.found:
            seen.setdefault(name, []).append(f"{where}: {message}")
    for name in LUCKY:
        chance = [each for each in tried if each.kind == name]
        lucky = [each for each in chance if each.passed]
        if 2 * len(lucky) > len(chance):
            seen[name] = [_shown(each) for each in lucky]
    late = sorted(tried, key=lambda each: -each.outcome.seconds)[1:]
    seen["slow"] = [
        f"task {each.task}, {each.kind} ({each.how}): {each.outcome.seconds:.1f} s"
        for each in late
        if each.outcome.seconds > slow
    ]
    if grown is not None:
        seen["leaks"] = [f"{name}: {how} in {grown.sessions} sessions" for name, how in grown.leaks().items()]
    found = {name: Fault(name, len(some), f"{FAULTS[name]}: {some[0]}") for name, some in seen.items() if some}
    if errors:
        told = "; ".join(f"{len(some)} {kind}, such as {some[0]}" for kind, some in errors.items())
        found["raises"] = Fault("raises", sum(map(len, errors.values())), f"{FAULTS['raises']}: {told}")
    return [found[name] for name in FAULTS if name in found]


def _shown(tried: Tried) -> str:
    reward = "no reward" if tried.outcome.reward is None else f"a reward of {tried.outcome.reward:g}"
    return f"task {tried.task} ({tried.how}), {reward} for {shortened(tried.text, 60)!r}"
