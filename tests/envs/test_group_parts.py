"""Verifiers put together of parts, of which some judge groups: each row has the verdict that is its own."""

import asyncio
import inspect
import pickle
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

import nrl
from nrl.envs import (
    STATUSES,
    Score,
    Trace,
    Verifier,
    by_source,
    gated,
    judged,
    number,
    of_group,
    product,
    single_turn,
    weighted,
)
from nrl.envs.types import FailedScore, judges_group
from nrl.rollout import rollout
from tests.rollout.scripted import TASKS, Scripted
from tests.rollout.test_verdicts import two_turns

TRACES = [Trace("1+2=", [text]) for text in ("3", "44", "no", "333")]
TASK = {"answer": 3}


@of_group
def longest(task: Any, traces: Sequence[Trace]) -> list[float]:
    return [float(len(x.text) == max(len(y.text) for y in traces)) for x in traces]


async def later(task: Any, traces: Sequence[Trace]) -> list[float]:
    await asyncio.sleep(0)
    return longest(task, traces)  # type: ignore[arg-type,return-value]


def submits(task: Any, traces: Sequence[Trace]) -> Any:
    """A plain function whose value has to be awaited."""
    return later(task, traces)


async def size(task: Any, trace: Trace) -> float:
    await asyncio.sleep(0)
    return float(len(trace.text))


def plain_size(task: Any, trace: Trace) -> float:
    return float(len(trace.text))


def asked(verifier: Any, traces: Sequence[Trace] = TRACES, task: Mapping[str, Any] = TASK) -> Any:
    found = verifier(task, traces)
    return asyncio.run(value(found)) if inspect.isawaitable(found) else found


async def value(found: Awaitable[Any]) -> Any:
    return await found


def rewards(found: Sequence[Score]) -> list[Any]:
    return [each.reward for each in found]


GROUPS = [longest, of_group(later), of_group(submits)]


@pytest.mark.parametrize("group", GROUPS, ids=["plain", "async", "awaitable"])
@pytest.mark.parametrize("each", [plain_size, size], ids=["plain", "async"])
def test_group_parts_get_all_traces_and_others_each(group: Verifier, each: Any) -> None:
    verify = weighted(size=(10.0, each), longest=(1.0, group))
    assert judges_group(verify, TASK)
    found = asked(verify)
    assert found == [
        Score(10.0, "ok", {"size": 1.0, "longest": 0.0}),
        Score(20.0, "ok", {"size": 2.0, "longest": 0.0}),
        Score(20.0, "ok", {"size": 2.0, "longest": 0.0}),
        Score(31.0, "ok", {"size": 3.0, "longest": 1.0}),
    ]
    times = product(size=each, longest=group)
    assert judges_group(times, TASK)
    assert rewards(asked(times)) == [0.0, 0.0, 0.0, 3.0]


def test_without_a_part_that_judges_groups_nothing_does() -> None:
    for verify in (weighted(a=(1.0, number)), product(a=number), gated(number, number)):
        assert not hasattr(verify, "of_group")
        assert score(verify(TASK, TRACES[0])) == 1.0


def score(found: Any) -> Any:
    return found.reward


def test_statuses_are_each_rows_own() -> None:
    found = asked(weighted(right=(1.0, number), longest=(1.0, longest)))
    assert [each.status for each in found] == ["ok", "ok", "parse_fail", "ok"]
    assert rewards(found) == [1.0, 0.0, 0.0, 1.0]

    @of_group
    def some(task: Any, traces: Any) -> list[Any]:
        return [1.0, Score(2.0, "skipped"), {"a": 1.0, "b": 0.5}, True]

    found = asked(weighted(right=(1.0, number), some=(1.0, some)))
    assert [each.status for each in found] == ["ok", "skipped", "parse_fail", "ok"]
    assert [each.components["some"] for each in found] == [1.0, 2.0, 1.5, 1.0]


@pytest.mark.parametrize("group", GROUPS, ids=["plain", "async", "awaitable"])
def test_a_composition_is_a_part(group: Verifier) -> None:
    inner = weighted(size=(1.0, size), longest=(1.0, group))
    for outer in (weighted(inner=(2.0, inner), one=(1.0, plain_size)), weighted(inner=(2.0, product(i=inner)))):
        assert judges_group(outer, TASK)
    outer = weighted(inner=(2.0, inner), right=(0.5, gated(number, number)))
    assert rewards(asked(outer)) == [2.5, 4.0, 4.0, 8.0]


# --- gates


@pytest.mark.parametrize("group", GROUPS, ids=["plain", "async", "awaitable"])
def test_a_group_is_judged_among_those_for_which_the_gate_is_open(group: Verifier) -> None:
    verify = gated(lambda task, trace: trace.text != "333", group, otherwise=-1.0)
    assert judges_group(verify, TASK)
    assert rewards(asked(verify)) == [0.0, 1.0, 1.0, -1.0]


def test_where_all_gates_are_shut_the_group_is_not_judged() -> None:
    def never(task: Any, traces: Any) -> Any:
        raise AssertionError("asked")

    assert rewards(asked(gated(lambda task, trace: 0.0, of_group(never), otherwise=0.25))) == [0.25] * 4


@pytest.mark.parametrize("group", GROUPS, ids=["plain", "async", "awaitable"])
@pytest.mark.parametrize("each", [plain_size, size], ids=["plain", "async"])
def test_a_gate_may_judge_groups(group: Verifier, each: Any) -> None:
    assert rewards(asked(gated(group, each))) == [0.0, 0.0, 0.0, 3.0]
    assert rewards(asked(gated(group, group))) == [0.0, 0.0, 0.0, 1.0]
    found = asked(gated(number, group))
    assert [(each.reward, each.status) for each in found] == [
        (1.0, "ok"),
        (0.0, "ok"),
        (0.0, "parse_fail"),
        (0.0, "ok"),
    ]


def test_a_gate_that_has_no_verdict_has_the_last_word() -> None:
    def gate(task: Any, trace: Trace) -> Any:
        return Score(1.0, "skipped") if trace.text == "333" else 1.0 / (trace.text != "no")

    found = asked(gated(gate, longest))
    assert [each.status for each in found] == ["ok", "ok", "infra_error", "skipped"]
    assert rewards(found)[:2] == [0.0, 1.0]


# --- failures


def fails(text: str, error: Callable[[], Any]) -> tuple[Any, Any]:
    def plain(task: Any, trace: Trace) -> Any:
        return error() if trace.text == text else 1.0

    async def coroutine(task: Any, trace: Trace) -> Any:
        return plain(task, trace)

    return plain, coroutine


def raises(error: Exception) -> Callable[[], Any]:
    def fn() -> Any:
        raise error

    return fn


WRONG: list[tuple[Callable[[], Any], str, str]] = [
    (raises(OSError("gone")), "infra_error", "OSError: gone"),
    (raises(TimeoutError("late")), "timeout", "TimeoutError: late"),
    (lambda: (1.0, 2.0), "infra_error", r"EnvError: a verifier gave the rewards (1.0, 2.0)"),
    (lambda: Score(1.0, "fine"), "infra_error", "EnvError: Score: the status is 'fine'"),  # type: ignore[arg-type]
    (lambda: "no", "infra_error", "EnvError: the verdict is 'no', of which no reward can be made"),
]


@pytest.mark.parametrize("at", [0, 1], ids=["plain", "async"])
@pytest.mark.parametrize(("error", "status", "why"), WRONG, ids=["raises", "late", "several", "status", "text"])
def test_what_fails_for_one_row_fails_that_row(at: int, error: Any, status: str, why: str) -> None:
    part = fails("44", error)[at]
    for verify in (
        weighted(longest=(1.0, longest), part=(0.5, part)),
        product(a=weighted(longest=(1.0, longest), part=(0.5, part))),
    ):
        found = asked(verify)
        assert rewards(found)[::2] == [0.5, 0.5]
        assert found[3].reward == 1.5
        assert [each.status for each in found] == ["ok", status, "ok", "ok"]
        assert isinstance(found[1], FailedScore)
        assert found[1].why.startswith(why)


@pytest.mark.parametrize("group", GROUPS, ids=["plain", "async", "awaitable"])
def test_a_group_part_that_fails_fails_all_rows_that_it_was_asked_about(group: Verifier) -> None:
    bad = of_group(lambda task, traces: [1.0])
    for verify in (weighted(a=(1.0, group), b=(1.0, bad)), weighted(b=(1.0, bad), a=(1.0, group))):
        found = asked(verify)
        assert {each.status for each in found} == {"infra_error"}
        assert {each.why for each in found} == {
            "EnvError: the verifier of a group gave 1 verdicts for 4 episodes; return one for each, in order"
        }
    found = asked(gated(lambda task, trace: trace.text.isdigit(), of_group(raises_of_group)))
    assert [each.status for each in found] == ["infra_error", "infra_error", "ok", "infra_error"]


def raises_of_group(task: Any, traces: Any) -> Any:
    raise LookupError("gone")


def test_a_failure_goes_to_another_process() -> None:
    sent = FailedScore.of(OSError("gone"))
    found = pickle.loads(pickle.dumps(sent))
    assert (found, found.why) == (sent, "OSError: gone")


def test_rows_wait_side_by_side() -> None:
    """All of them are inside at once; one after the other they would wait for ever."""
    inside = list[str]()

    async def together(task: Any, trace: Trace) -> float:
        inside.append(trace.text)
        while len(inside) < 8:
            await asyncio.sleep(0)
        return 1.0

    verify = weighted(a=(1.0, together), b=(1.0, together), longest=(1.0, longest))
    assert rewards(asked(verify)) == [2.0, 2.0, 2.0, 3.0]


# --- in a rollout


TEXTS = ["3", "44", "19", "2"]


@pytest.mark.parametrize("group", GROUPS, ids=["plain", "async", "awaitable"])
def test_in_a_rollout(group: Verifier) -> None:
    verify = weighted(right=(2.0, number), longest=(1.0, group))
    batch = rollout(Scripted(TEXTS), single_turn(verify), TASKS, n=2)
    assert batch["rewards"].tolist() == [2.0, 1.0, 3.0, 0.0]
    assert batch["reward/right"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert batch["reward/longest"].tolist() == [0.0, 1.0, 1.0, 0.0]
    batch = rollout(Scripted(["3", "44", "19", "2"] * 2), judged(two_turns((0.0, 0.5)), verify), TASKS, n=2)
    assert batch["valid"].all()
    batch = rollout(Scripted(TEXTS), single_turn(gated(number, group)), TASKS, n=2)
    assert batch["rewards"].tolist() == [1.0, 0.0, 1.0, 0.0]


def test_in_a_rollout_a_row_fails_alone() -> None:
    part, _ = fails("44", raises(TimeoutError("the judge is away")))
    verify = weighted(part=(1.0, part), longest=(1.0, longest))
    with pytest.warns(UserWarning, match="1 of 4 episodes failed.*TimeoutError: the judge is away"):
        batch = rollout(Scripted(TEXTS), single_turn(verify), TASKS, n=2)
    assert batch["valid"].tolist() == [True, False, True, True]
    assert [STATUSES[each] for each in batch["status"]] == ["ok", "timeout", "ok", "ok"]
    assert batch["rewards"][[0, 2, 3]].tolist() == [1.0, 2.0, 1.0]


def test_a_secret_in_a_failure_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "correct-horse-battery")
    part, _ = fails("44", raises(OSError("correct-horse-battery")))
    with pytest.warns(UserWarning, match=r"OSError: \*\*\*") as said:
        rollout(Scripted(TEXTS), single_turn(weighted(p=(1.0, part), l=(1.0, longest))), TASKS, n=2)
    assert not any("horse" in str(each.message) for each in said)


def test_what_takes_too_long_fails_its_group() -> None:
    async def slow(task: Any, trace: Trace) -> float:
        await asyncio.sleep(60 if trace.text == "44" else 0)
        return 1.0

    verify, began = weighted(slow=(1.0, slow), longest=(1.0, longest)), time.monotonic()
    with pytest.warns(UserWarning, match="2 of 4 episodes failed"):
        batch = rollout(Scripted(TEXTS), single_turn(verify, timeout=0.5), TASKS, n=2)
    assert batch["valid"].tolist() == [False, False, True, True]
    assert time.monotonic() - began < 30


def test_where_it_depends_on_the_task_so_does_the_composition() -> None:
    either = by_source(single_turn(longest), judged(two_turns(), plain_size)).verifier
    assert either is not None
    verify = weighted(either=(1.0, either), size=(10.0, size))
    assert judges_group(verify, {"source": 0})
    assert not judges_group(verify, {"source": 1})
    assert rewards(asked(verify, task={"source": 0})) == [10.0, 20.0, 20.0, 31.0]
    assert asked(verify, TRACES[3], {"source": 1}).reward == 33.0  # type: ignore[arg-type]
    tasks = [{**task, "source": at} for at, task in enumerate(TASKS)]
    batch = rollout(Scripted(TEXTS), single_turn(verify), tasks, n=2)
    assert batch["rewards"].tolist() == [10.0, 21.0, 22.0, 11.0]


def test_in_a_pool() -> None:
    part, _ = fails("44", raises(OSError("gone")))
    verify = nrl.pooled(weighted(part=(10.0, part), longest=(1.0, longest)), workers=1)
    with pytest.warns(UserWarning, match="1 of 4 episodes failed.*OSError: gone"):
        batch = rollout(Scripted(TEXTS), single_turn(verify), TASKS, n=2)
    assert batch["valid"].tolist() == [True, False, True, True]
    assert batch["rewards"][[0, 2, 3]].tolist() == [10.0, 11.0, 10.0]
