"""Tries a verifier: right answers, answers that are worth nothing, the same ones again, and many of them."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from random import Random
from typing import Any

import attrs

from nrl.envs.inprocess.call_with_timeout import calling
from nrl.envs.types import Environment, Task, Trace, Verifier, text_of
from nrl.envs.verifiers import extractor
from nrl.gym.cli.adversarial import Hostile, hostile, huge, mutants
from nrl.gym.cli.calls import Outcome, forgetting, verdict
from nrl.gym.cli.findings import Tried, shortened
from nrl.gym.cli.leak_check import Growth, Meter, growth
from nrl.gym.cli.reference_answers import Way, accepted, normal, ways

__all__ = ["Verified", "tried"]

_LEARNING = 10  # tasks, to which all forms are tried
_MAY_BE_EQUAL = frozenset({"mutated", "other", "question", "injected"})
_LONG = ("huge", "repeated")  # of which only the ends are kept
_AGAIN = 50  # tasks whose answers are verified again

type _Ask = Callable[[Task, str, str], Awaitable[Outcome]]  # the answer, and another one for a group


@attrs.frozen
class Verified:
    """What came of it: all that was tried, which share of the right answers is read in which form, and what grew."""

    tried: list[Tried]
    forms: dict[str, tuple[int, int]]
    grown: Growth | None


async def tried(
    verifier: Verifier,
    tasks: Sequence[Task],
    *,
    gold: str | None,
    form: str | None,
    passing: float,
    seed: int,
    sessions: int,
    timeout: float | None,
    tell: Callable[[int], Any],
) -> Verified:
    """Try a verifier.

    Args:
        verifier: plain or ``async``. One of groups is asked about each answer beside the right one, and about the right
            one beside an empty one.
        tasks: the tasks.
        gold: the column of their right answers; None: there are none, and what is worth nothing is tried alone.
        form: of responses, as `nrl.gym.cli.reference_answers.form_of` takes it; None: those that are read are found.
        passing: an answer passes where its reward is at least this.
        seed: of what is chosen by chance.
        sessions: calls that are made to see what grows; 0: none.
        timeout: seconds of a call; None: no limit.
        tell: called with the number of each task that is done.

    Raises:
        DataError: a task has no right answer.
    """
    golds = [[] if gold is None else accepted(task, gold, place) for place, task in enumerate(tasks)]
    said = [ways(task, some, form) if some else [] for task, some in zip(tasks, golds, strict=True)]
    meter, extract, forget = Meter(), extractor(verifier), forgetting(verifier)
    env = Environment(lambda task: (task, ""), lambda state, turn: state, timeout=timeout)
    with ExitStack() as stack:
        caller_of = stack.enter_context(calling(env))

        async def ask(task: Task, text: str, beside: str) -> Outcome:
            trace, other = (Trace(task.get("prompt", ""), (each,)) for each in (text, beside))
            return await verdict(caller_of(task), verifier, task, trace, meter, [other])

        def enough(outcome: Outcome) -> bool:
            return outcome.reward is not None and outcome.reward >= passing

        def equal(one: str, other: str) -> bool:
            read = normal if extract is None else extract
            with suppress(Exception):  # of the user's extractor
                return read(one) == read(other) is not None
            return False

        found, chosen, forms = list[Tried](), list[Way](), dict[str, tuple[int, int]]()
        best = Counter[str]()
        for place, (task, some) in enumerate(zip(tasks, said, strict=True)):
            order = sorted(some, key=lambda way: -best[way.form])  # of equals the first stays so
            right = None
            for way in order:
                outcome = await ask(task, way.text, "")
                good, of = forms.get(way.form, (0, 0))
                forms[way.form] = good + enough(outcome), of + 1
                best[way.form] += enough(outcome)
                first = enough(outcome) and right is None
                right = way if first else right
                kind = "gold" if first else "form"
                found.append(Tried(place, kind, way.form, way.text, outcome, enough(outcome)))
                if right is not None and place >= _LEARNING:
                    break
            if right is None and order:
                last = found[-len(order)]  # in the best form
                found[-len(order)] = attrs.evolve(last, kind="gold")
            chosen.append(right or (order[0] if order else Way("bare", "", "", "")))
        for place, (task, way) in enumerate(zip(tasks, chosen, strict=True)):
            chance = Random(f"{seed} {place}")
            others = [each.core for number, each in enumerate(chosen) if number != place]
            others = chance.sample(others, min(20, len(others)))
            asked = text_of(task.get("prompt", ""))
            attacks = [*hostile(way, golds[place], others, asked, chance), *_huge(way, golds[place], others, place)]
            for attack in attacks:
                outcome = await ask(task, attack.text, way.text)
                passed = enough(outcome)
                same = passed and gold is not None and attack.kind in _MAY_BE_EQUAL and equal(attack.text, way.text)
                note = "may be equal" if same else ""
                kept = shortened(attack.text, 2000) if attack.kind in _LONG else attack.text
                one = Tried(place, attack.kind, attack.how, kept, outcome, passed, note, characters=len(attack.text))
                found.append(one)
            tell(place)
        found = await _again(found, tasks, chosen, ask, forget, seed)
        grown = None
        if sessions:
            answers = [(each.task, each.text) for each in found if each.kind not in _LONG]

            async def session(number: int) -> None:
                place, text = answers[number % len(answers)]
                await forget()  # else what was asked above would be answered from memory
                await ask(tasks[place], text, chosen[place].text)

            grown = await growth(session, sessions)
    return Verified(found, forms, grown)


def _huge(way: Way, golds: Sequence[str], others: Sequence[str], place: int) -> list[Hostile]:
    """One or none for each task, and each twice in all, so that one that is slow is seen twice."""
    right = {normal(each) for each in (way.core, *golds)}
    changed = (core for _, core in mutants(way.core, Random(place)))
    every = huge(way, next((each for each in (*others, *changed) if normal(each) not in right), ""))
    return [every[place % len(every)]] if place < 2 * len(every) else []


async def _again(
    found: list[Tried],
    tasks: Sequence[Task],
    chosen: Sequence[Way],
    ask: _Ask,
    forget: Callable[[], Awaitable[Any]],
    seed: int,
) -> list[Tried]:
    """Verify some of the answers again: twice in one order, once in another, and under other seeds.

    A call of another answer comes first, so that the first two rounds begin after the same one. No round remembers what
    an earlier one was told.
    """
    right = any(each.kind == "gold" for each in found)
    kinds = ("gold", "mutated", "other") if right else ("injected", "question")
    places = dict[tuple[int, str], int]()
    for place, each in enumerate(found):
        if each.task < _AGAIN and each.kind in kinds:
            places.setdefault((each.task, each.kind), place)
    order = list(places.values())
    if not order:
        return found

    async def rewards(order: Sequence[int], **more: Any) -> dict[int, float | None]:
        asked = {at: (found[at].task, found[at].text) for at in order}
        await forget()
        beside = {at: "" if found[at].kind == "gold" else chosen[found[at].task].text for at in order}
        return {
            at: (await ask({**tasks[place], **more}, text, beside[at])).reward for at, (place, text) in asked.items()
        }

    await rewards(order[-1:])
    first, second = await rewards(order), await rewards(order)
    shuffled = Random(seed).sample(order, len(order))
    third = await rewards(shuffled if shuffled != order else order[::-1])
    seeds = [await rewards(order[:20], seed=each) for each in (0, 1, 2**31)]
    rounds = [("varies", [second]), ("order", [third]), ("seed", seeds)]
    for name, several in rounds:  # what varies anyway says nothing about order and seeds
        different = False
        for at in order:
            other = next((each[at] for each in several if at in each and each[at] != first[at]), first[at])
            if other != first[at]:
                told = f"{first[at]} and then {other} for {shortened(found[at].text, 60)!r}"
                found[at], different = attrs.evolve(found[at], found=((name, told),)), True
        if different:
            break
    return found
