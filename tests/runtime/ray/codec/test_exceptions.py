"""Exceptions that travel between processes, and lines that reach the driver's terminal; without Ray."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from nrl.errors import LostActor, MissingColumn
from nrl.runtime.clusters import _RAY_SETTINGS
from nrl.runtime.ray.actor import tail
from nrl.runtime.ray.codec.exceptions import RemoteException, wrap_exceptions
from nrl.runtime.ray.logs import Echo
from tests.work import calls


class Odd(Exception):
    """Its constructor wants other arguments than those that it keeps."""

    def __init__(self, number: int, *, text: str) -> None:
        super().__init__(f"{text} {number}")
        self.number = number


class Stubborn(Exception):
    """It cannot be made again."""

    def __new__(cls, *args: Any) -> "Stubborn":
        if not args:
            raise RuntimeError("never")
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        self.args = ()


def sent(error: Exception) -> tuple[BaseException, RemoteException]:
    with pytest.raises(RemoteException) as caught, wrap_exceptions("example"):
        raise error
    return caught.value.rebuild(), caught.value


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        KeyError("key"),
        FileNotFoundError(2, "No such file", "/nowhere"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ExceptionGroup("several", [ValueError("one"), KeyError("two")]),
        MissingColumn("loss", "advantages", ["rewards"]),
        LostActor("step", "trainer", 1, "10.0.0.3", "killed", "log"),
        Odd(3, text="odd"),
    ],
)
def test_an_exception_arrives_as_itself(error: Exception) -> None:
    found, on_its_way = sent(error)
    assert (type(found), str(found), repr(found.args)) == (type(error), str(error), repr(error.args))
    assert vars(found) == vars(error)
    assert ", in sent\n" in on_its_way.trace


def test_a_traceback_begins_with_the_users_code_also_in_a_folder_named_ray() -> None:
    _, on_its_way = sent(ValueError("no"))
    assert "ray" in Path(__file__).parts
    assert on_its_way.trace.startswith(f'Traceback (most recent call last):\n  File "{__file__}"')


def test_what_hangs_on_it_and_cannot_be_sent_stays_behind() -> None:
    error = Odd(3, text="odd")
    error.add_note("a note")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    found, _ = sent(error)
    left = "Left behind in the process that raised this: lock (it cannot be sent)"
    assert (type(found), str(found), vars(found)) == (Odd, "odd 3", {"number": 3, "__notes__": ["a note", left]})


LARGE = 20_000_000


def test_data_that_hang_on_it_stay_behind() -> None:
    error = Odd(3, text="odd")
    error.add_note("a note")
    error.batch = b"x" * LARGE  # type: ignore[attr-defined]
    found, on_its_way = sent(error)
    assert (type(found), str(found), sorted(vars(found))) == (Odd, "odd 3", ["__notes__", "number"])
    assert found.__notes__ == ["a note", "Left behind in the process that raised this: batch (20,000,009 bytes)"]
    assert sum(map(len, on_its_way.parts or [])) < 10_000


@pytest.mark.parametrize("text", ["x" * LARGE, "x\n" * (LARGE // 2), b"x" * LARGE])
def test_a_message_that_nobody_reads_to_its_end_is_cut(text: str | bytes) -> None:
    error = ValueError(text)
    error.__cause__ = KeyError(text)
    error.add_note(str(text))
    arrived = list[Any]()
    work = calls(lambda: arrived.extend(sent(error)))
    found, on_its_way = arrived
    (kept,) = found.args
    assert type(found) is ValueError
    assert type(kept) is type(text)
    assert "(19,950,000 characters were left out)" in str(kept)
    for part in (*on_its_way.args[1:], *found.__notes__, str(kept)):
        assert len(part) < 250_000
        assert "characters were left out)" in part
    assert work < 2_000_000  # and not several for each line


def test_an_argument_that_is_data_is_named() -> None:
    found, _ = sent(ValueError("no such row", torch.zeros(LARGE // 4)))
    assert type(found) is ValueError
    assert found.args[0] == "no such row"
    assert re.fullmatch(r"<Tensor of 20,000,\d{3} bytes, which were left out>", found.args[1])


def test_one_whose_message_raises_arrives() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("never")

    found, on_its_way = sent(Mute(3))
    assert (type(found).__name__, found.args) == ("Mute", (3,))
    assert on_its_way.summary.endswith("Mute: <exception str() failed>")


def test_what_cannot_arrive_has_a_stand_in() -> None:
    for error in (Stubborn("x"), ValueError(threading.Lock())):
        found, on_its_way = sent(error)
        assert type(found) is RuntimeError
        assert str(found) == on_its_way.summary
        assert type(error).__name__ in str(found)


def test_a_line_is_said_as_often_as_the_rank_that_says_it_most(capsys: pytest.CaptureFixture[str]) -> None:
    other: list[Any] = []
    echo = Echo(other.append)

    def say(who: str, *lines: str, err: bool = False, ip: str = "here") -> None:
        echo({"actor_name": who, "lines": list(lines), "is_err": err, "ip": ip, "localhost": "here"})

    say("trainer[0]", "step", "mine")
    say("trainer[1]", "step", "step")
    say("trainer[0]", "step")
    say("sampler[0]", "step", ip="10.0.0.3")
    say("trainer[1]", "step", err=True)
    say("provide", "building")
    say("trainer[1]", "[W] [c10d] The hostname of the client socket cannot be retrieved. err=-3")
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "(trainer[0]) step",
        "(trainer[0]) mine",
        "(trainer[1]) step",
        "(sampler[0], 10.0.0.3) step",
    ]
    assert err == "(trainer[1]) step\n"
    assert [data["lines"] for data in other] == [["building"]]


def test_what_ray_guesses_of_what_died_is_not_shown_and_what_programs_say_is() -> None:
    from ray._private.ray_logging import LogDeduplicator

    theirs = [
        "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot ...",
        "(raylet) worker.cc:123: A worker died",
        'Traceback (most recent call last):\n  File "python/ray/_raylet.pyx", line 1, in ray._raylet.task_execution',
        "Raylet is terminated. Termination is unexpected. Possible reasons include: ... Last 20 lines of the Raylet",
    ]
    shown = ['Traceback (most recent call last):\n  File "train.py", line 3, in <module>', "a worker died, he said"]
    filtered = LogDeduplicator(5, None, _RAY_SETTINGS["RAY_DEDUP_LOGS_SKIP_REGEX"])
    (batch,) = filtered.deduplicate({"ip": "10.0.0.1", "pid": "raylet", "lines": [*theirs, *shown]})
    assert batch["lines"] == shown


def test_the_last_lines_of_logs_are_those_that_a_process_wrote(tmp_path: Path) -> None:
    (tmp_path / "out").write_text(":actor_name:trainer[0]\none\ntwo\nthree\n")
    files = [str(tmp_path / "gone"), str(tmp_path / "out")]
    assert tail(files, 2) == "two\nthree\n"
    assert tail(files, 9) == "one\ntwo\nthree\n"
