"""Choosing the network interface over which the processes of a mesh meet."""

import os
from collections.abc import MutableMapping

__all__ = ["bind", "interface_of"]


def interface_of(address: str) -> str | None:
    """The name of this machine's interface with an IPv4 or IPv6 address; None: no interface has it.

    >>> interface_of("127.0.0.1") in ("lo", "lo0"), interface_of("192.0.2.1")
    (True, None)
    """
    import ray  # noqa: F401  # which brings psutil
    import psutil  # type: ignore[import-untyped]  # isort: skip

    found = [
        name for name, each in psutil.net_if_addrs().items() if address in {a.address.partition("%")[0] for a in each}
    ]
    return found[0] if found else None


def bind(address: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Let gloo and NCCL use the interface with the node's address, unless the user has chosen one.

    gloo takes the address of the host's own name. On many machines ``/etc/hosts`` maps that to 127.0.1.1, where no
    other machine finds it. NCCL takes the first interface. Where no interface has the address, as behind a translation
    of addresses, both choose by themselves.

    Args:
        address: of this node, by which others know it.
        environ: gets ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``.

    >>> environ = {"GLOO_SOCKET_IFNAME": "eth1"}
    >>> bind("127.0.0.1", environ)
    >>> environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"][:3]
    ('eth1', '=lo')
    """
    if name := interface_of(address):
        environ.setdefault("GLOO_SOCKET_IFNAME", name)
        environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without the sign, any interface whose name begins so
