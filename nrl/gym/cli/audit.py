"""The command ``nrl gym test``: tries a verifier or an environment, and says what it gets wrong."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import attrs
from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nrl.arguments import checked
from nrl.envs import Task
from nrl.envs.builtin import Environments, environments
from nrl.envs.types import TIMEOUT, is_env
from nrl.errors import ConfigError
from nrl.files import resolve_output, without_file_scheme
from nrl.gym.cli import verifier_fuzz
from nrl.gym.cli.findings import FAULTS, Fault, Tried, check_allowed, faults, shortened
from nrl.gym.cli.leak_check import Growth, Usage, usage
from nrl.gym.cli.reference_answers import form_of
from nrl.log import JsonLines, Progress

__all__ = ["Audit", "main"]

_GOLDS = ("answer", "answers", "response")  # columns of right answers
_SHOWN = 3  # answers of a kind that passed and should not have


def _formed(cfg: Any, field: Any, form: str | None) -> None:
    if form is not None:
        form_of(form)


def _named(cfg: Any, field: Any, allow: Sequence[str]) -> None:
    check_allowed(allow)


_least = attrs.validators.ge(1)


@checked("gym test")
@attrs.frozen
class Audit:
    """Give a verifier or an environment what lazy, broken and hostile policies write, and say what it gets wrong."""

    target: str  # number, ...; FILE.py:NAME or MODULE:NAME: a verifier or environment, or what makes one; URL; gym.yaml
    options: dict[str, Any] = attrs.field(factory=dict)  # of the target: options.timeout=3
    data: str | None = None  # a file or a dataset that the target reads; none: its own
    gold: str | None = None  # the column of right answers; a verifier's: answer, answers or response
    form: str | None = attrs.field(default=None, validator=_formed)  # of a response: 'It is {}.'; none: found out
    passing: float = 1.0  # an answer passes where its reward is at least this
    allow: tuple[str, ...] = attrs.field(default=(), validator=_named)  # faults that do not count: allow=mutated,other
    turns: int = attrs.field(default=100, validator=_least)  # of an environment's episode, at most
    sessions: int = attrs.field(default=0, validator=attrs.validators.ge(0))  # more calls, to see what leaks
    slow: float = attrs.field(default=1.0, validator=attrs.validators.gt(0.0))  # seconds that a call may take
    format: str | None = None  # from the rows of a well-known dataset
    chat: bool = True  # false: prompts that are texts stay texts
    limit: int = attrs.field(default=100, validator=_least)  # so many tasks
    shuffle: bool = False  # false: the tasks in the order of the file
    seed: int = 0  # of the order, and of what is chosen by chance
    out: str = "gym_test.jsonl"  # a line for all that was tried, and one for each fault


def main(cfg: Audit) -> int:
    """Try a verifier or an environment, write what came of it, and print a table.

    Args:
        cfg: the configuration.

    Returns:
        The exit status: 1 if there is a fault that is not allowed, else 0.

    Raises:
        ConfigError: there is no such target or option, nothing says where tasks come from, or the file that is to be
            written holds something else.
        DataError: a task cannot be read, or has no right answer.
    """
    how: dict[str, Any] = {"format": cfg.format, "chat": cfg.chat, "shuffle": cfg.shuffle}
    made = environments({cfg.target: cfg.options} if cfg.options else cfg.target, cfg.data, **how)
    tested, tasks = made.graded, _tasks(cfg, made)
    out = _out(cfg)
    forms, grown = dict[str, tuple[int, int]](), None
    before = usage()
    with Progress() as progress:

        def tell(place: int) -> None:
            progress.show("gym test", place, len(tasks), {})

        if is_env(tested):
            from nrl.gym.cli import env_fuzz  # which imports torch

            played = asyncio.run(
                env_fuzz.tried(
                    tested, tasks, gold=cfg.gold, turns=cfg.turns, passing=cfg.passing, seed=cfg.seed,
                    sessions=cfg.sessions, tell=tell,
                )
            )  # fmt: skip
            tried, grown = played.tried, played.grown
        else:
            verifier: Any = tested
            cfg = attrs.evolve(cfg, gold=cfg.gold or _gold(tasks))
            verified = asyncio.run(
                verifier_fuzz.tried(
                    verifier, tasks, gold=cfg.gold, form=cfg.form, passing=cfg.passing, seed=cfg.seed,
                    sessions=cfg.sessions, timeout=getattr(verifier, "timeout", TIMEOUT), tell=tell,
                )
            )  # fmt: skip
            tried, forms, grown = verified.tried, verified.forms, verified.grown
    found = faults(tried, cfg.slow, grown)
    counted = [each for each in found if each.name not in cfg.allow]
    _write(out, cfg, tried, grown, found)
    _show(cfg, tried, forms, grown, before, found)
    print(f"gym test: {_conclusion(cfg, counted)}; {out} has all that was tried", flush=True)
    return int(bool(counted))


def _tasks(cfg: Audit, made: Environments) -> list[Task]:
    from nrl import data  # which imports torch: a target that is not there is told before

    some = data.epoch(made.tasks(cfg.seed), cfg.limit)
    return [{"seed": cfg.seed + place, **task} for place, task in enumerate(some)]


def _gold(tasks: Sequence[Task]) -> str | None:
    """The first column of right answers that a task has."""
    return next((name for name in _GOLDS if any(name in task for task in tasks)), None)


def _out(cfg: Audit) -> Path:
    """The file to write, which is empty now."""
    out = resolve_output("gym test: out", without_file_scheme("gym test: out", cfg.out))
    if not isinstance(out, Path):
        raise ConfigError(f"gym test: out={cfg.out} is in a store; give a file on a disk")
    if out.is_dir():
        raise ConfigError(f"gym test: out={out} is a folder; give a file, such as {out / 'gym_test.jsonl'}")
    if out.is_file():
        with out.open(encoding="utf-8", errors="replace") as file:
            first = file.readline(1000)
            if first and not first.startswith('{"gym_test": '):  # an audit that was interrupted leaves nothing in it
                raise ConfigError(f"gym test: out={out} holds something else; give another file, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(b"")
    return out


def _write(out: Path, cfg: Audit, tried: Sequence[Tried], grown: Growth | None, found: Sequence[Fault]) -> None:
    with JsonLines(out) as lines:
        lines.write({"gym_test": cfg.target, **{key: value for key, value in attrs.asdict(cfg).items() if value}})
        for each in tried:
            lines.write(each.record())
        if grown is not None:
            lines.write(attrs.asdict(grown))
        for fault in found:
            lines.write(
                {"fault": fault.name, "count": fault.count, "what": fault.what, "allowed": fault.name in cfg.allow}
            )


# --- output


def _conclusion(cfg: Audit, counted: Sequence[Fault]) -> str:
    if not counted:
        return f"nothing is wrong with {cfg.target}"
    faults = "1 fault" if len(counted) == 1 else f"{len(counted)} faults"
    return f"{cfg.target} has {faults}: {', '.join(each.name for each in counted)}"


def _show(
    cfg: Audit,
    tried: Sequence[Tried],
    forms: dict[str, tuple[int, int]],
    grown: Growth | None,
    before: Usage,
    found: Sequence[Fault],
) -> None:
    console = Console()
    console.print(_table(cfg, tried))
    if cfg.gold is None and not any(each.turns is not None for each in tried):
        columns = ", ".join(map(repr, _GOLDS))
        print(
            f"no right answers were tried: the tasks have no {columns}; gold=COLUMN names another column. Without them "
            "an answer that is nearly right, and lists of answers, are not tried either"
        )
    if forms:
        read = ", ".join(f"{name} {good} of {of}" for name, (good, of) in forms.items())
        print(f"right answers that pass, by the form of the response: {read}")
    after = usage()
    print(f"memory {before.memory / 2**20:.0f} -> {after.memory / 2**20:.0f} MiB")
    if grown is not None:
        a, b = grown.before, grown.after
        print(
            f"{grown.sessions} sessions: memory {a.memory / 2**20:.0f} -> {b.memory / 2**20:.0f} MiB, files {a.files} "
            f"-> {b.files}, threads {a.threads} -> {b.threads}, processes {a.processes} -> {b.processes}"
        )
    passed = [each for each in tried if each.kind in FAULTS and each.kind != "gold" and each.passed]
    if passed:
        console.print(_passed(cfg, passed))
    for fault in found:
        allowed = ", allowed" if fault.name in cfg.allow else ""
        print(f"{fault.name} ({fault.count}{allowed}): {fault.what}")


def _table(cfg: Audit, tried: Sequence[Tried]) -> Table:
    table = Table("kind", title=f"{cfg.target} on {cfg.data or 'its own tasks'}", title_justify="left", box=ROUNDED)
    for column in ("tried", "passed", "wrong", "raised", "median ms", "worst ms", "MiB"):
        table.add_column(column, justify="right")
    for kind in dict.fromkeys(each.kind for each in tried):
        some = [each for each in tried if each.kind == kind]
        seconds = [each.outcome.seconds for each in some]
        numbers = [
            len(some),
            sum(each.passed for each in some),
            sum(each.wrong for each in some),
            sum(each.outcome.error is not None for each in some),
        ]
        times = [f"{1000 * median(seconds):.3g}", f"{1000 * max(seconds):.3g}"]
        table.add_row(kind, *map(str, numbers), *times, f"{max(each.outcome.memory for each in some) / 2**20:.1f}")
    return table


def _passed(cfg: Audit, passed: Sequence[Tried]) -> Table:
    """The first that passed, of each kind and note some."""
    shown, count = list[Tried](), Counter[tuple[str, str]]()
    for each in sorted(passed, key=lambda each: (bool(each.note), each.kind in cfg.allow)):
        count[each.kind, each.note] += 1
        if count[each.kind, each.note] <= _SHOWN:
            shown.append(each)
    more = f", {len(shown)} of {len(passed)}" if len(passed) > len(shown) else ""
    table = Table("task", "kind", "", title=f"what passed{more}", title_justify="left", box=ROUNDED)
    table.add_column("response", overflow="fold")
    for each in shown:
        note = each.note or ("allowed" if each.kind in cfg.allow else "")
        text = json.dumps(shortened(each.text, 100), ensure_ascii=False)
        table.add_row(str(each.task), each.kind, f"{each.how}{f' ({note})' if note else ''}", Text(text))
    return table
