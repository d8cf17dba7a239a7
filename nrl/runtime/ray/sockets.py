"""Choosing the network interface over which the processes of a mesh meet."""

import os
from collections.abc import MutableMapping

__all__ = ["bind", "interface_of"]


def interface_of(address: str) -> str | None:
    """The name of the interface of this machine that has an address, of IPv4 or IPv6; None: none has.

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
    """Let gloo and NCCL use the interface that has the node's address, where nobody has said which one.

    gloo takes the address that the host's own name has, and on many machines ``/etc/hosts`` says that this is
    127.0.1.1, where no other machine finds it. NCCL takes what it finds first. Where no interface has the address, as
    behind a translation of addresses, both are left to themselves.

    Args:
        address: of this node, by which others know it.
        environ: where ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` are set.

    >>> environ = {"GLOO_SOCKET_IFNAME": "eth1"}
    >>> bind("127.0.0.1", environ)
    >>> environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"][:3]
    ('eth1', '=lo')
    """
    if name := interface_of(address):
        environ.setdefault("GLOO_SOCKET_IFNAME", name)
        environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # this one, and not those whose names begin so
