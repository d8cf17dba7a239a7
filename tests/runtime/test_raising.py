"""Exceptions that travel between processes, and lines that reach the driver's terminal; without Ray."""

import threading
from typing import Any

import pytest

from nrl.errors import LostActor, MissingColumn
from nrl.runtime.raising import Raised, carried
from nrl.runtime.ray_logs import Echo


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


def sent(error: Exception) -> tuple[BaseException, Raised]:
    with pytest.raises(Raised) as caught, carried("example"):
        raise error
    return caught.value.original(), caught.value


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


def test_what_hangs_on_it_and_cannot_be_sent_stays_behind() -> None:
    error = Odd(3, text="odd")
    error.add_note("a note")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    found, _ = sent(error)
    assert (type(found), str(found), vars(found)) == (Odd, "odd 3", {})


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
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "(trainer[0]) step",
        "(trainer[0]) mine",
        "(trainer[1]) step",
        "(sampler[0], 10.0.0.3) step",
    ]
    assert err == "(trainer[1]) step\n"
    assert [data["lines"] for data in other] == [["building"]]
