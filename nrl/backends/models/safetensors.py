"""The format of safetensors files, for tensors that are written one at a time.

The library's own writer needs all tensors of a file in memory, and its reader has to have the file on a disk.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nrl.batch.raw import flat_bytes
from nrl.files import Folder

__all__ = ["DTYPES", "content", "header", "open_file"]

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
"""By the names that files have."""


def header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], about: Mapping[str, str]) -> bytes:
    """Return the beginning of a file, before the `content` of all tensors in the same order.

    Args:
        tensors: the dtype and shape of each, those of wider dtypes first, so that each is aligned.
        about: what there is to say besides.

    >>> header({"x": (torch.float32, [2])}, {"format": "pt"})[8:]
    b'{"__metadata__": {"format": "pt"}, "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}  '
    """
    entries, end = dict[str, dict[str, Any]](__metadata__=dict(about)), 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def content(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor.

    >>> bytes(content(torch.tensor([1], dtype=torch.int16)))
    b'\\x01\\x00'
    """
    return memoryview(flat_bytes(tensor.detach().cpu()).numpy())


@contextmanager
def open_file(path: Folder) -> Iterator[Any]:
    """Open a file that gives parts of its tensors, as `safetensors.safe_open` does; of a store only these are read.

    Raises:
        SafetensorError: it is no such file; of one in a store ValueError.
    """
    if isinstance(path, Path):
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            yield file
    else:
        yield _InStore(path)


class _InStore:
    """A file in a store, of which tensors are read by ranges of its bytes."""

    def __init__(self, path: Any) -> None:
        self._path = path
        size = int.from_bytes(self.read_range(0, 8), "little")
        if size > path.stat().st_size:
            raise ValueError("the length of its header is that of no header")
        self._about: dict[str, Any] = json.loads(self.read_range(8, 8 + size))
        self.begin = 8 + size

    def read_range(self, begin: int, end: int) -> bytes:
        content: bytes = self._path.fs.cat_file(self._path.path, start=begin, end=end)
        if len(content) != end - begin:
            raise ValueError(f"it ends within bytes {begin} to {end}")
        return content

    def metadata(self) -> Any:
        return self._about["__metadata__"]

    def get_slice(self, key: str) -> "_Slice":
        return _Slice(self, self._about[key])


class _Slice:
    """A tensor in a store: rows, one after the other, are read at once, and columns cut out of them."""

    def __init__(self, file: _InStore, about: Mapping[str, Any]) -> None:
        self._file, self._about = file, about

    def get_shape(self) -> list[int]:
        return list(self._about["shape"])

    def get_dtype(self) -> str:
        return str(self._about["dtype"])

    def __getitem__(self, index: Any) -> Tensor:
        shape, (begin, end) = self.get_shape(), self._about["data_offsets"]
        index = index if isinstance(index, tuple) else (index,)
        if not shape:
            rows, index = slice(0, 1), ()
        else:
            rows = slice(*index[0].indices(shape[0])[:2])
        row = (end - begin) // max(1, shape[0] if shape else 1)
        read = self._file.read_range(
            *(self._file.begin + begin + row_index * row for row_index in (rows.start, rows.stop))
        )
        dtype = DTYPES[self.get_dtype()]
        rows_read = torch.frombuffer(bytearray(read), dtype=dtype) if read else torch.empty(0, dtype=dtype)
        return rows_read.view([rows.stop - rows.start, *shape[1:]] if shape else [])[
            (slice(None), *index[1:])[: len(shape)]
        ]
