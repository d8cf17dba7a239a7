"""How bytes in several parts go through a socket. It travels by value, as `nrl.envs.pool.subprocess_worker` does."""

import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["framed", "unframed"]

_LENGTH = "!Q"  # no Struct: it cannot be pickled


def framed(parts: Sequence[Any]) -> bytes:
    """Bytes in several parts as one text that `unframed` reads: how many there are, and each with its length."""
    found = [bytes(part) for part in parts]
    return struct.pack(_LENGTH, len(found)) + b"".join(struct.pack(_LENGTH, len(part)) + part for part in found)


def unframed(file: Any) -> list[bytes]:
    """Read the parts.

    Raises:
        EOFError: there is no more.

    >>> import io
    >>> unframed(io.BytesIO(framed([b"one", b"", b"two"])))
    [b'one', b'', b'two']
    """

    def exactly(size: int) -> bytes:
        found: bytes = file.read(size)
        if len(found) < size:
            raise EOFError
        return found

    def number() -> int:
        (found,) = struct.unpack(_LENGTH, exactly(struct.calcsize(_LENGTH)))
        return int(found)

    return [exactly(number()) for _ in range(number())]
