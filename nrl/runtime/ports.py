"""Ports that a firewall lets through: those of ``NRL_PORTS``, or any."""

import errno
import os
import random
import re
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from nrl.errors import PlacementError

__all__ = ["NRL_PORTS", "first_free", "ports", "store"]

NRL_PORTS = "NRL_PORTS"
"""The variable that holds a range, such as ``20000-20999``."""

_BACKLOG = 2048  # processes that may connect at once


def ports(environ: Mapping[str, str] = os.environ) -> range | None:
    """Return the ports that nrl may open, or None for any free port.

    Raises:
        PlacementError: the variable is no range of ports.

    >>> ports({"NRL_PORTS": "20000-20999"})
    range(20000, 21000)
    """
    value = environ.get(NRL_PORTS, "")
    if not value:
        return None
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", value.strip())
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 0 < first <= last < 2**16:
        raise PlacementError(
            f"{NRL_PORTS} is '{value}'; give the first and the last of the ports that nrl may open, such as 20000-20999"
        )
    return range(first, last + 1)


def first_free[T](bind: Callable[[int], T], environ: Mapping[str, str] = os.environ) -> T:
    """Return ``bind(port)`` for the first free port of the range; without a range, ``bind(0)``.

    Args:
        bind: opens a port, or raises the `OSError` that says that it is taken or kept from this process.
        environ: has the range.

    Raises:
        PlacementError: none of them is to be had.

    >>> first_free(lambda port: port, {"NRL_PORTS": "20000-20000"})
    20000
    """
    allowed = ports(environ)
    if allowed is None:
        return bind(0)
    refused, setting = 0, f"{NRL_PORTS}={environ[NRL_PORTS]}"
    # A random order, so that processes on one host seldom collide.
    for port in random.Random().sample(allowed, len(allowed)):
        try:
            return bind(port)
        except PermissionError:
            refused += 1
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    if refused:
        taken = f", and the other {len(allowed) - refused} are taken" if refused < len(allowed) else ""
        raise PlacementError(
            f"this process may not open {refused} ports of {setting} on host {socket.gethostname()}{taken}; name "
            "others: most systems keep those below 1024 for root"
        )
    raise PlacementError(
        f"all ports of {setting} are taken on host {socket.gethostname()}; name more of them: a mesh takes one, and so "
        "does each mesh that sends weights from GPU to GPU"
    )


def store(host: str, timeout: timedelta) -> Any:
    """Open a ``torch.distributed.TCPStore`` for the rendezvous of processes.

    Args:
        host: by which others know this host.
        timeout: of its operations.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    def open_store(port: int) -> Any:
        if port == 0:
            return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        # torch would write warnings about a taken port: bind it here.
        dual_stack = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual_stack else socket.AF_INET
        listening = socket.create_server(
            ("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual_stack
        ).detach()
        return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listening)

    return first_free(open_store)
