"""Tries an environment: plays episodes with policies that have learned nothing, and sees how they end."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import attrs

from nrl.envs.inprocess.call_with_timeout import Caller, calling
from nrl.envs.inprocess.tracebacks import Failed
from nrl.envs.policy_inputs import read_observation, read_prompt
from nrl.envs.return_values import is_reset, read_reset, read_step, verdicts_of
from nrl.envs.tools import MalformedCall, Tool, ToolCall
from nrl.envs.types import Env, Step, Task, Trace, Turn, judges_group, text_of
from nrl.errors import EnvError
from nrl.gym.cli.arguments import arguments
from nrl.gym.cli.calls import Outcome, forgetting, metered, reward_of
from nrl.gym.cli.findings import LUCKY, Tried, shortened
from nrl.gym.cli.leak_check import Growth, Meter, growth
from nrl.gym.cli.reference_answers import accepted

__all__ = ["POLICIES", "Played", "tried"]

_AGAIN = 20  # tasks whose episodes are played again
_TOOLED = ("calls", "uses")  # policies for environments with tools
_JUNK = (
    "\x00\x01\ufffd\u202e{{[[((<",
    "9" * 1000,
    '<tool_call>{"name": "',
    "\\" * 2000,
    "}" * 500 + "\n" * 500,
    "The reward is 1.",
    '{"reward": 1.0, "done": true}',
    "asdf jkl; qwer",
)

type _Policy = Callable[[str, Sequence[Tool], str | None, Random], Turn]
"""``(observation, tools, right answer, random) -> turn``."""


def _junk(seen: str, tools: Sequence[Tool], gold: str | None, random: Random) -> Turn:
    return Turn(random.choice(_JUNK), stop_reason=random.choice(["stop", "length"]))


def _random(seen: str, tools: Sequence[Tool], gold: str | None, random: Random) -> Turn:
    words = [*seen.split(), str(random.randint(0, 9)), str(random.randint(-99, 999)), random.choice("ABCDxyz")]
    return Turn(" ".join(random.choices(words, k=random.randint(1, 4))))


def _calls(seen: str, tools: Sequence[Tool], gold: str | None, random: Random) -> Turn:
    """One that fits no tool, one that does and has hostile values, and one that cannot be read."""
    senseless: list[dict[str, Any]] = [{}, {"no_such": [1, {"a": None}]}, {"": "\x00"}]
    invalid = ToolCall(random.choice([*(each.name for each in tools), "no_such_tool"]), random.choice(senseless))
    some = [invalid, *_fitting(seen, tools, random, hostile=True)]
    return Turn("", calls=some, malformed=[MalformedCall('<tool_call>{"', "the object is not closed")])


def _uses(seen: str, tools: Sequence[Tool], gold: str | None, random: Random) -> Turn:
    return Turn("", calls=[each for _ in range(2) for each in _fitting(seen, tools, random)])


def _fitting(seen: str, tools: Sequence[Tool], random: Random, *, hostile: bool = False) -> list[ToolCall]:
    """A call of one of the tools with arguments that it takes; none where there are no tools."""
    if not tools:
        return []
    chosen = random.choice(tools)
    parameters = chosen.schema.get("function", {}).get("parameters") or {}
    return [ToolCall(chosen.name, arguments(parameters, random, seen=seen, hostile=hostile))]


POLICIES: Mapping[str, _Policy] = {
    "gold": lambda seen, tools, gold, random: Turn(gold or ""),
    "silent": lambda seen, tools, gold, random: Turn(""),
    "junk": _junk,
    "echo": lambda seen, tools, gold, random: Turn(seen),
    "random": _random,
    "calls": _calls,
    "uses": _uses,
}
"""The policies, by name; ``gold`` says the task's right answer, ``calls`` and ``uses`` are for environments with tools.
"""


@attrs.frozen
class Played:
    """What came of it: all episodes, and what grew over many sessions."""

    tried: list[Tried]
    grown: Growth | None


@attrs.define
class _Session:
    """An episode under way."""

    task: Task
    random: Random
    state: Any = None
    begun: bool = False
    prompt: Any = ""
    seen: str = ""
    tools: Sequence[Tool] = ()
    turns: list[Turn] = attrs.field(factory=list)
    observations: list[Any] = attrs.field(factory=list)
    rewards: list[float] = attrs.field(factory=list)
    status: str = "ok"
    done: bool = False
    error: str | None = None
    found: list[tuple[str, str]] = attrs.field(factory=list)
    seconds: float = 0.0
    memory: int = 0

    @property
    def told(self) -> tuple[Any, ...]:
        """What two equal episodes have in common."""
        return repr(self.prompt), tuple(map(repr, self.observations)), tuple(self.rewards), self.status

    @property
    def over(self) -> bool:
        return self.done or self.error is not None


async def tried(
    env: Env,
    tasks: Sequence[Task],
    *,
    gold: str | None,
    turns: int,
    passing: float,
    seed: int,
    sessions: int,
    tell: Callable[[int], Any],
) -> Played:
    """Play an environment.

    Args:
        env: the environment.
        tasks: each with its ``"seed"``.
        gold: the column of the right answers, which have to pass when they are said at once; None: there is none.
        turns: an episode has to end within so many.
        passing: an episode passes where its reward is at least this.
        seed: of what is chosen by chance.
        sessions: episodes that are played to see what grows; 0: none.
        tell: called with the number of each task that is done.

    Raises:
        DataError: a task has no right answer, and ``gold`` says where it is.
    """
    golds = [None if gold is None else accepted(task, gold, place)[0] for place, task in enumerate(tasks)]
    meter, found, forget = Meter(), list[Tried](), forgetting(getattr(env, "verifier", None))
    with calling(env) as caller_of:

        def begun(place: int, name: str) -> tuple[_Session, Caller]:
            return _Session(tasks[place], Random(f"{seed} {place} {name}")), caller_of(tasks[place])

        async def play(place: int, name: str) -> _Session:
            session, call = begun(place, name)
            await forget()  # else an episode that is played again would be judged from memory
            await _reset(session, env, call, meter)
            while not session.over and len(session.turns) < turns and name != "leaves":
                turn = POLICIES[name](session.seen, session.tools, golds[place], session.random)
                await _step(session, env, turn, call, meter)
            if not session.over and name != "leaves":
                session.found.append(("endless", f"it had {turns} turns and was not done"))
            await _end(session, env, call, meter, judge=name != "leaves")
            return session

        tooled = False
        for place in range(len(tasks)):
            for name in ("gold", "silent", "junk", "echo", "random", *_TOOLED, "leaves"):
                if (name == "gold" and golds[place] is None) or (name in _TOOLED and not tooled):
                    continue
                session = await play(place, name)
                tooled = tooled or bool(session.tools)
                found.append(_tried(session, place, name, passing))
            tell(place)
        some = [place for place, each in enumerate(found) if each.task < _AGAIN and each.kind in ("junk", "random")]
        first = [await play(found[at].task, found[at].kind) for at in some]
        second = [await play(found[at].task, found[at].kind) for at in some]
        varies = _compare(found, some, first, second, "varies", "played again")
        if not varies:
            await forget()
            beside = [begun(found[at].task, found[at].kind) for at in some]
            for each, call in beside:
                await _reset(each, env, call, meter)
            for _ in range(turns):
                for at, (each, call) in zip(some, beside, strict=True):
                    if not each.over:
                        turn = POLICIES[found[at].kind](each.seen, each.tools, None, each.random)
                        await _step(each, env, turn, call, meter)
            for each, call in beside:
                await _end(each, env, call, meter)
            _compare(found, some, first, [each for each, _ in beside], "order", "played beside others")
        names = ("silent", "junk", "echo", "random", *(_TOOLED if tooled else ()), "leaves")
        grown = (
            await growth(lambda number: play(number % len(tasks), names[number % len(names)]), sessions)
            if sessions
            else None
        )
    return Played(found, grown)


def _tried(session: _Session, place: int, name: str, passing: float) -> Tried:
    reward = None if session.error is not None or session.status not in ("ok", "parse_fail") else sum(session.rewards)
    status = session.status if session.error is None else "error"
    outcome = Outcome(reward, status, session.seconds, session.memory, session.error)
    said = "\n".join(shortened(turn, 200) for turn in session.turns[:10])
    passed = reward is not None and reward >= passing
    note = "may be luck" if passed and name in LUCKY else ""
    return Tried(place, name, name, said, outcome, passed, note, tuple(session.found), len(session.turns))


def _compare(
    found: list[Tried], some: Sequence[int], one: Sequence[_Session], other: Sequence[_Session], name: str, how: str
) -> bool:
    different = False
    for at, a, b in zip(some, one, other, strict=True):
        if a.told != b.told:
            told = f"rewards {a.rewards[:5]} and, {how}, {b.rewards[:5]}"
            if a.rewards == b.rewards:
                told = f"equal rewards, and other observations when it was {how}"
            found[at] = attrs.evolve(found[at], found=(*found[at].found, (name, told)))
            different = True
    return different


async def _made(session: _Session, fn: Callable[..., Any], call: Caller, meter: Meter, *args: Any) -> Any:
    """The value of a call; None, and an error of the session, where it fails."""
    try:
        found = await call(metered(fn, meter), *args)
    except Failed as error:
        session.error = str(error)
        return None
    session.seconds = max(session.seconds, meter.seconds)
    session.memory = max(session.memory, meter.memory)
    return found


async def _reset(session: _Session, env: Env, call: Caller, meter: Meter) -> None:
    found = await _made(session, env.reset, call, meter, session.task)
    if session.error is not None:
        return
    if is_reset(found):
        session.state, session.begun = found[0], True
    try:
        _, prompt, *tools = read_reset(found)
        session.prompt = read_prompt(prompt)
    except EnvError as error:
        session.error = f"EnvError: {error}"
        return
    session.seen, session.tools = text_of(session.prompt), tools[0] if tools else ()


async def _step(session: _Session, env: Env, turn: Turn, call: Caller, meter: Meter) -> None:
    session.turns.append(turn)
    taken = await _made(session, env.step, call, meter, session.state, turn)
    if session.error is not None:
        return
    if isinstance(taken, Step):
        session.state = taken.state
    try:
        taken = read_step(taken)
        if not taken.done:
            read_observation(taken.observation)
    except EnvError as error:
        session.error = f"EnvError: {error}"
        return
    session.done = taken.done
    session.seen = text_of(taken.observation)
    session.observations.append(taken.observation)
    _earn(session, taken.reward)


async def _end(session: _Session, env: Env, call: Caller, meter: Meter, *, judge: bool = True) -> None:
    """Ask the verifier, and close once."""
    verifier: Any = getattr(env, "verifier", None)
    if verifier is not None and session.error is None and judge:
        trace = Trace(session.prompt, tuple(session.turns), tuple(session.observations), truncated=not session.done)
        of_group = judges_group(verifier, session.task)
        found = await _made(session, verifier, call, meter, session.task, [trace] if of_group else trace)
        if session.error is None:
            _earn(session, found, of_group)
    if not session.begun or getattr(env, "close", None) is None:
        return
    try:
        await call.close(session.state)
    except Failed as error:
        session.found.append(("close", str(error)))


def _earn(session: _Session, verdict: Any, of_group: bool = False) -> None:
    try:
        reward, status = reward_of(verdicts_of(verdict, 1)[0] if of_group else verdict)
    except Exception as error:
        session.error = f"{type(error).__name__}: {error}"
        return
    session.rewards.append(reward or 0.0)
    session.status = status if session.status == "ok" else session.status
