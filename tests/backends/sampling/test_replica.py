"""The states of a replica, and what follows from each."""

import math
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nrl.backends import Sampling
from nrl.backends.engine import Request
from nrl.backends.sampling.replica import EngineReplica, PendingRequest
from nrl.runtime import cluster

BECOMES = {
    ("starting", "serve"): "serving",
    ("starting", "lack"): "empty",
    ("starting", "lose"): "lost",
    ("serving", "receive"): "receiving",
    ("serving", "die"): "starting",
    ("receiving", "serve"): "serving",
    ("receiving", "lack"): "empty",
    ("receiving", "die"): "starting",
    ("empty", "receive"): "receiving",
    ("empty", "die"): "starting",
}
TAKES = {"die": (MemoryError("no"),), "lose": (MemoryError("no"),)}
WAY = {
    "starting": ["die"],
    "serving": [],
    "receiving": ["receive"],
    "empty": ["receive", "lack"],
    "lost": ["die", "lose"],
}


def make_replica(state: str = "serving", *, finish: bool = False) -> EngineReplica:
    """One that has come to a state by the shortest way."""
    with cluster("local") as here:
        found: Any = EngineReplica(here.reserve(1).mesh(), "test", lambda: None, threading.Condition())  # type: ignore[arg-type,return-value]
    for verb in WAY[state]:
        getattr(found, verb)(*TAKES.get(verb, ()), **({"finish": finish} if verb == "receive" else {}))
    return found  # type: ignore[no-any-return]


@given(st.lists(st.sampled_from(["serve", "receive", "lack", "die", "lose"]), max_size=12))
def test_only_what_the_picture_shows_can_happen(verbs: list[str]) -> None:
    """Anything else is an error, which changes nothing; and it says why it does not serve."""
    it, state = make_replica(), "serving"
    for verb in verbs:
        if (state, verb) in BECOMES:
            getattr(it, verb)(*TAKES.get(verb, ()))
            state = BECOMES[state, verb]
        else:
            with pytest.raises(RuntimeError, match=f"EngineReplica: '{state}' cannot become '.*'; only .* can"):
                getattr(it, verb)(*TAKES.get(verb, ()))
        assert it.state == state
        assert (it.error is not None) is (state in ("starting", "lost"))


@pytest.mark.parametrize(
    ("state", "finish", "loads", "free", "wanted"),
    [
        # of one that has nothing to do; to which a request waits; which has been asked one
        ("starting", False, [math.inf] * 3, [True, True, True], [True, True, True]),
        ("serving", False, [0, 1, 1], [True, True, True], [False, True, True]),
        ("receiving", False, [0, 1, 1], [False, False, False], [False, True, True]),
        ("receiving", True, [0, 1, 1], [False, False, True], [False, True, True]),
        ("empty", False, [math.inf] * 3, [True, False, False], [False, True, True]),
        ("lost", False, [math.inf] * 3, [True, True, True], [False, True, True]),
    ],
)
def test_what_follows_from_a_state(
    state: str, finish: bool, loads: list[float], free: list[bool], wanted: list[bool]
) -> None:
    """How busy it is for those who choose, whether who looks after it may go on, and whether somebody has to."""
    nothing, waits, asked = (make_replica(state, finish=finish) for _ in range(3))
    request = PendingRequest(Request(0, [5], 0, Sampling()))
    waits.waiting[0].append(request)
    asked.requests[0][0] = request
    found = nothing, waits, asked
    assert [each.load for each in found] == [[load] for load in loads]
    assert [each.is_ready for each in found] == free
    assert [each.has_work for each in found] == wanted
    (new, _) = waits.take_steps()[0]
    assert [each.number for each in new] == ([0] if state == "serving" else [])


def test_who_waits_no_more_is_not_asked_for() -> None:
    it, gone = make_replica(), PendingRequest(Request(0, [5], 0, Sampling()))
    it.waiting[0].append(gone)
    gone.answer.cancel()
    assert (it.take_steps(), it.has_work, gone.times) == ([([], [])], False, 0)
