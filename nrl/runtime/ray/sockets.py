"""Choice of the network interface of a mesh's processes."""

import os
from collections.abc import MutableMapping

__all__ = ["choose_interface", "find_interface"]


def find_interface(address: str) -> str | None:
    """Return the name of this machine's interface with an IPv4 or IPv6 address, or None.

    >>> find_interface("127.0.0.1") in ("lo", "lo0"), find_interface("192.0.2.1")
    (True, None)
    """
    import ray  # noqa: F401  # which brings psutil
    import psutil  # type: ignore[import-untyped]  # isort: skip

    names = [
        name
        for name, entries in psutil.net_if_addrs().items()
        if address in {a.address.partition("%")[0] for a in entries}
    ]
    return names[0] if names else None


def choose_interface(address: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Let gloo and NCCL use the interface with the node's address, unless the user has chosen one.

    gloo takes the address of the host's own name. On many machines ``/etc/hosts`` maps that to 127.0.1.1, where no
    other machine finds it. NCCL takes the first interface. Where no interface has the address, as behind a translation
    of addresses, both choose by themselves.

    Args:
        address: the address by which other nodes know this one.
        environ: gets ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME``.

    >>> environ = {"GLOO_SOCKET_IFNAME": "eth1"}
    >>> choose_interface("127.0.0.1", environ)
    >>> environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"][:3]
    ('eth1', '=lo')
    """
    if name := find_interface(address):
        environ.setdefault("GLOO_SOCKET_IFNAME", name)
        # Without the sign NCCL takes any interface with this prefix.
        environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
