"""The plan of a process's files for a checkpoint, which are written at once, or copied and written later.

A copy lies in the memory of the host, which is page-locked where there is a GPU, so that the device copies into it by
itself. It is kept from one save to the next, since the system takes as long to give it as the copy takes. See
docs/decisions/0065-a-step-waits-for-the-copy.md.
"""

from collections.abc import Iterable, Iterator, Mapping
from threading import Lock
from typing import Any

import attrs
import torch
from torch import Tensor

from nrl.batch.raw import flat_bytes
from nrl.files import Buffer, Folder, Saved, flush
from nrl.files import write as write_file

__all__ = ["SavePlan"]

_CHUNK = 1 << 26  # bytes: a power of two, to which torch rounds page-locked memory up
_spare: list[Tensor] = []
_guard = Lock()


@attrs.frozen
class SavePlan:
    """Files that are not written yet, and a record for the manifest.

    Args:
        files: by their names in the folder; of each what it consists of, in order. A tensor stands for its bytes.
        record: JSON, what is to be remembered besides.

    >>> import tempfile
    >>> from pathlib import Path
    >>> SavePlan({"numbers": [b"ab", torch.tensor([99, 100], dtype=torch.uint8)]}, {}).write(Path(tempfile.mkdtemp()))
    Saved(files={'numbers': Written(size=4, sha256='88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589')}\
, record={})
    """

    files: Mapping[str, Iterable[Buffer | Tensor]]
    record: Mapping[str, Any]

    def write(self, folder: Folder) -> Saved:
        """Write the files, a tensor after the other; they and their names are on the disk when it returns.

        Raises:
            OSError: the disk does not take it. A store may raise errors of its own.
        """
        files = {name: write_file(folder / name, map(_bytes, parts)) for name, parts in self.files.items()}
        flush(folder)
        return Saved(files, self.record)

    def copy_to_host(self) -> "SavePlan":
        """Copy the contents to the host, so that later steps do not change them; the copy can be written once."""
        copies, devices = {name: _Copy() for name in self.files}, set[torch.device]()
        for name, parts in self.files.items():
            for part in parts:
                content = flat_bytes(part.detach()) if isinstance(part, Tensor) else _tensor(part)
                copies[name].add(content)
                devices.add(content.device)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()  # once, for all copies
        return SavePlan(copies, self.record)


class _Copy:
    """The bytes of a file in chunks of the host's memory; each is freed when the next is read."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._room = 0  # bytes of the last chunk

    def add(self, content: Tensor) -> None:
        offset = 0
        while offset < len(content):
            if not self._room:
                self._chunks.append(_chunk())
                self._room = _CHUNK
            count = min(len(content) - offset, self._room)
            begin = _CHUNK - self._room
            self._chunks[-1][begin : begin + count].copy_(content[offset : offset + count], non_blocking=True)
            offset, self._room = offset + count, self._room - count

    def __iter__(self) -> Iterator[memoryview]:
        self._chunks.reverse()
        while self._chunks:
            chunk = self._chunks.pop()
            end = _CHUNK if self._chunks else _CHUNK - self._room
            try:
                yield memoryview(chunk.numpy())[:end]
            finally:
                with _guard:
                    _spare.append(chunk)


def _chunk() -> Tensor:
    with _guard:
        if _spare:
            return _spare.pop()
    return torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())


def _bytes(part: Buffer | Tensor) -> Buffer:
    return memoryview(flat_bytes(part.detach().cpu()).numpy()) if isinstance(part, Tensor) else part


def _tensor(part: Buffer) -> Tensor:
    return torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8)
