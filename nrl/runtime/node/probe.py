"""The actor of ``nrl doctor`` on each node of a Ray cluster: it reports facts of the node, and reachable ports.

The module travels by value, and needs the standard library alone.
"""

import errno
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from nrl.runtime.node.machine import Facts, collect_facts, find_python_with_torch
from nrl.runtime.node.shared_fs_probe import answer_note

__all__ = ["Probe"]

_REFUSALS = {
    errno.EADDRINUSE: "taken",
    errno.EACCES: "kept from this process, as those below 1024 are from all but root",
}


class Probe:
    """An actor on a node, in the Python that Ray runs there."""

    def __init__(self) -> None:
        self._servers = list[socket.socket]()

    def collect_facts(self, ray: str) -> Facts:
        """Collect the node's facts, and its interpreter with torch and this version of Ray."""
        return {**collect_facts(), "python_with_torch": find_python_with_torch(ray)}

    def read_clock(self) -> float:
        """Return the seconds since the epoch, by this node's clock."""
        return time.time()

    def listen(self, address: str, ports: Sequence[int] = (0,)) -> int:
        """Listen at the node's address, as processes of a mesh do; return the port, the first that is free.

        Args:
            address: the address of the node.
            ports: ports to try; 0: a port that the system picks.

        Raises:
            OSError: no port is free, or the address is not this node's.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        refusals = set[str]()
        for port in ports:
            try:
                self._servers.append(socket.create_server((address, port), family=family))
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                refusals.add(_REFUSALS[error.errno])
            else:
                return int(self._servers[-1].getsockname()[1])
        raise OSError(errno.EADDRINUSE, f"all of them are {' or '.join(sorted(refusals))}")

    def check_reachable(self, address: str, port: int, seconds: float) -> str:
        """Return why another node's port cannot be reached from this one; empty: it can."""
        try:
            socket.create_connection((address, port), timeout=seconds).close()
        except OSError as error:
            return str(error)
        return ""

    def check_folder(self, folder: str, note: str, name: str) -> str:
        """Answer the program's note in a folder; return why this node cannot, or an empty text."""
        return answer_note(Path(folder), note, name)
