"""What ``nrl doctor`` has on each node of a Ray cluster: it says what the node is, and whom it reaches.

It travels by value, and needs the standard library alone.
"""

import errno
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from nrl.runtime.node.machine import Facts, facts, python_with_torch
from nrl.runtime.node.shared_fs_probe import answer

__all__ = ["Probe"]

_REFUSALS = {
    errno.EADDRINUSE: "taken",
    errno.EACCES: "kept from this process, as those below 1024 are from all but root",
}


class Probe:
    """An actor on a node, in the Python that Ray runs there."""

    def __init__(self) -> None:
        self._servers = list[socket.socket]()

    def facts(self, ray: str) -> Facts:
        """What the node is, and which of its interpreters has torch and this version of Ray."""
        return {**facts(), "python_with_torch": python_with_torch(ray)}

    def time(self) -> float:
        """Seconds since the epoch, by this node's clock."""
        return time.time()

    def listen(self, address: str, ports: Sequence[int] = (0,)) -> int:
        """Listen at the node's address, as processes of a mesh do; the port, the first that is to be had.

        Args:
            address: of the node.
            ports: which to try; 0: one that the system picks.

        Raises:
            OSError: none is to be had, or the address is not this node's.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        met = set[str]()
        for port in ports:
            try:
                self._servers.append(socket.create_server((address, port), family=family))
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                met.add(_REFUSALS[error.errno])
            else:
                return int(self._servers[-1].getsockname()[1])
        raise OSError(errno.EADDRINUSE, f"all of them are {' or '.join(sorted(met))}")

    def reaches(self, address: str, port: int, seconds: float) -> str:
        """Why another node's port cannot be reached from this one; empty: it can."""
        try:
            socket.create_connection((address, port), timeout=seconds).close()
        except OSError as error:
            return str(error)
        return ""

    def sees(self, folder: str, note: str, name: str) -> str:
        """Answer the program's note in a folder; why this node has another folder; empty: it answered."""
        return answer(Path(folder), note, name)
