"""The output of processes on the driver's terminal: each line with its mesh and rank, printed once."""

import logging
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Echo", "install_echo", "silence_ray"]

_KNOWN = 10_000  # lines that are remembered
_NAMELESS = "The hostname of the client socket cannot be retrieved"  # torch logs this for addresses without a name
_ACTOR = re.compile(r"(?P<mesh>.+)\[\d+\]")


class Echo:
    """A writer of processes' lines to this process's streams; a line that all ranks of a mesh write appears once.

    A line appears as often as the rank with the most copies has written it.

    Args:
        other: gets lines that are not from a mesh.

    >>> install_echo = Echo(print)
    >>> for rank in (1, 0):
    ...     install_echo({"actor_name": f"trainer[{rank}]", "lines": ["ready"], "is_err": False})
    (trainer[1]) ready
    """

    def __init__(self, other: Callable[[Any], None]) -> None:
        self._other = other
        self._written: OrderedDict[tuple[str, bool, str], dict[str, int]] = OrderedDict()

    def __call__(self, data: Mapping[str, Any]) -> None:
        """Write lines in the form in which Ray's driver gets them."""
        actor = str(data.get("actor_name") or "")
        match = _ACTOR.fullmatch(actor)
        if match is None:
            self._other(data)
            return
        stream = sys.stderr if data["is_err"] else sys.stdout
        away = data.get("ip") != data.get("localhost")
        prefix = f"({actor}, {data['ip']})" if away else f"({actor})"
        if stream.isatty():
            prefix = f"\x1b[36m{prefix}\x1b[0m"
        for line in filter(_is_shown, data["lines"]):
            if self._count_line((match["mesh"], bool(data["is_err"]), line), actor):
                print(prefix, line, file=stream, flush=True)

    def _count_line(self, key: tuple[str, bool, str], actor: str) -> bool:
        times = self._written.setdefault(key, {})
        self._written.move_to_end(key)
        seen = max(times.values(), default=0)
        times[actor] = times.get(actor, 0) + 1
        if len(self._written) > _KNOWN:
            self._written.popitem(last=False)
        return times[actor] > seen


def _is_shown(line: str) -> bool:
    return _NAMELESS not in line


def install_echo() -> None:
    """Let Ray, once connected, write lines of processes through `Echo`."""
    from ray._private import ray_logging

    streams = ray_logging.global_worker_stdstream_dispatcher
    name = "ray_print_logs"  # Ray's own, which it removes when it is left
    ours = [handler for handler_name, handler in streams.handlers if handler_name == name]
    for handler in ours:
        streams.remove_handler(name)
        streams.add_handler(name, Echo(handler))


def silence_ray() -> None:
    """Switch off messages of Ray that users cannot act on; call this before connecting."""
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # a cluster of one's own has a token
    if not sys.stdout.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
