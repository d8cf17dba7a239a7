"""A second host, or two: network namespaces, with a slow, lossy cable. They need root, Linux, iproute2.

As a program this file is the cable. It makes the namespaces, holds them, and carries packets between two TUN devices,
in user space: few kernels have netem. Or it carries frames between two TAP devices of the namespace that it runs in.
All of it is gone with its process, which ends with its standard input.
"""

import fcntl
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

__all__ = ["FIRST", "SECOND", "Host", "cable", "hosts"]

FIRST, SECOND = "198.18.0.1", "198.18.0.2"  # of a network that is kept for tests of networks
_TUNSETIFF, _TUN, _TAP = 0x400454CA, 0x1001, 0x1002  # devices whose packets, or frames, have no header before them
_PACKET = 2**16


class Host(NamedTuple):
    """A host, on one end of a cable.

    Args:
        address: at which the other one reaches it.
        enter: the words before a command that is run there; none: it is this one.
    """

    address: str
    enter: tuple[str, ...]


@contextmanager
def hosts(milliseconds: float, percent: float, *, here: bool = False) -> Iterator[tuple[Host, Host]]:
    """Two hosts, until the block is left; skips the test where there cannot be any.

    Args:
        milliseconds: that a packet takes, each way.
        percent: of packets that are lost, each way.
        here: whether the first one is this host, which has another cable.
    """
    if missing := [each for each in ("ip", "nsenter") if shutil.which(each) is None]:
        pytest.skip(f"a second host needs the command {missing[0]}, of iproute2 and util-linux")
    with _running(milliseconds, percent, ["here" if here else "there"]) as (pid, found):
        enter = [() if each is None else ("nsenter", f"--net=/proc/{pid}/fd/{each}") for each in found]
        yield Host(FIRST, enter[0]), Host(SECOND, enter[1])


@contextmanager
def cable(milliseconds: float, percent: float, ends: tuple[str, str], enter: Sequence[str] = ()) -> Iterator[None]:
    """A cable for frames, until the block is left: two devices for bridges.

    Args:
        milliseconds: that a frame takes, each way.
        percent: of frames that are lost, each way.
        ends: the names that the devices get.
        enter: the words that enter the network that they are in.
    """
    with _running(milliseconds, percent, ends, enter):
        yield


@contextmanager
def _running(
    milliseconds: float, percent: float, what: Sequence[str], enter: Sequence[str] = ()
) -> Iterator[tuple[int, Any]]:
    """The process of a cable, and what it says."""
    words = [*enter, sys.executable, __file__, str(milliseconds), str(percent), *what]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        if isinstance(found, str):
            pytest.skip(f"a slow cable needs network namespaces and TUN devices: {found}")
        yield process.pid, found


def _end(name: str, kind: int) -> tuple[int, str]:
    """A new device in the network of this thread, as a file, and its name."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    made = fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", name.encode(), kind))
    return end, made[:16].rstrip(b"\0").decode()


def _plugged(address: str) -> int:
    """The end of the cable in the network of this thread."""
    end, name = _end("nrl%d", _TUN)
    for words in (
        ["addr", "add", f"{address}/30", "dev", name],
        ["link", "set", name, "up"],
        ["link", "set", "lo", "up"],
    ):
        subprocess.run(["ip", *words], check=True, capture_output=True)
    return end


def _ends(here: bool) -> tuple[list[int], list[int | None]]:
    """Both ends, and descriptors of their networks."""
    ends, networks = list[int](), list[int | None]()
    for address, apart in ((FIRST, not here), (SECOND, True)):
        if apart:
            os.unshare(os.CLONE_NEWNET)
        ends.append(_plugged(address))
        networks.append(os.open("/proc/self/ns/net", os.O_RDONLY) if apart else None)
    return ends, networks


def _carry(ends: list[int], delay: float, loss: float) -> None:
    """Until the standard input ends."""
    under_way = {end: deque[tuple[float, bytes]]() for end in ends}
    other, chance = dict(zip(ends, reversed(ends), strict=True)), random.Random(0)
    while True:
        due = min((packets[0][0] for packets in under_way.values() if packets), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        ready = select.select([0, *ends], [], [], wait)[0]
        if 0 in ready and not os.read(0, 1):
            return
        for end in ends:
            while end in ready:
                try:
                    packet = os.read(end, _PACKET)
                except BlockingIOError:
                    break
                if chance.random() >= loss:
                    under_way[other[end]].append((time.monotonic() + delay, packet))
        for end, packets in under_way.items():
            while packets and packets[0][0] <= time.monotonic():
                os.write(end, packets.popleft()[1])


def _main(milliseconds: str, percent: str, *what: str) -> None:
    try:
        ends, networks = _ends(what == ("here",)) if len(what) == 1 else ([_end(name, _TAP)[0] for name in what], [])
    except (OSError, AttributeError, subprocess.CalledProcessError) as error:
        print(json.dumps(f"{error}"), flush=True)
        return
    print(json.dumps(networks), flush=True)
    _carry(ends, float(milliseconds) / 1000, float(percent) / 100)


if __name__ == "__main__":
    _main(*sys.argv[1:])
