"""Where running gyms are: a file of each, which only its user can read, with the address of its head and its token."""

import json
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import attrs

__all__ = ["Place", "places", "told"]


def _texts(given: Iterable[str]) -> tuple[str, ...]:
    return tuple(given)


def _boot() -> str:
    """What is another one after a restart of this machine, which gives process numbers anew; empty: it is not known."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@attrs.frozen
class Place:
    """A running gym.

    Args:
        url: of its head.
        token: that its servers ask for; None: they ask for none.
        pid: of the process that supervises it.
        files: its configurations, as absolute paths.
        host: where this process is; hosts may share the folder.
        boot: since which start of that host.
    """

    url: str
    token: str | None = attrs.field(repr=False)
    pid: int
    files: tuple[str, ...] = attrs.field(converter=_texts)
    host: str = attrs.field(factory=socket.gethostname)
    boot: str = attrs.field(factory=_boot)


def _folder() -> Path:
    given = os.environ.get("NRL_GYM_DIR")
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return Path(given).expanduser().absolute() if given else state / "nrl" / "gyms"


@contextmanager
def told(place: Place) -> Iterator[Path]:
    """Within the block, the programs of this user on this machine find the gym.

    The folder is ``NRL_GYM_DIR``, by default ``~/.local/state/nrl/gyms``.
    """
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{quote(place.host, '')}-{place.pid}.json"
    with suppress(FileNotFoundError):
        path.unlink()  # of an earlier process of this number, and so that the new file is ours alone
    fresh = path.with_suffix(".new")
    with suppress(FileNotFoundError):
        fresh.unlink()
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(attrs.asdict(place), file)
    fresh.rename(path)  # nobody reads half of it
    try:
        yield path
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


def places() -> list[Place]:
    """The gyms of this user that run on this machine; files of those that were killed here are removed."""
    found, host, boot = [], socket.gethostname(), _boot()
    for path in sorted(_folder().glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            place = Place(**json.loads(path.read_text()))
            if place.host != host:  # whose processes cannot be seen here
                continue
            if place.boot == boot and _lives(place.pid):
                found.append(place)
            else:
                path.unlink()
    return found


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's by now
        return False
    return True
