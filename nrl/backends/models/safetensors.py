"""The format of safetensors files, for tensors that are written one at a time.

The library's own writer needs all tensors of a file in memory.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from nrl.batch.raw import flat_bytes

__all__ = ["DTYPES", "content", "header"]

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
    """The beginning of a file, which the `content` of all tensors follows, in the same order.

    Args:
        tensors: the dtype and shape of each, those of wider dtypes first, so that each is aligned.
        about: what there is to say besides.

    >>> header({"x": (torch.float32, [2])}, {"format": "pt"})[8:]
    b'{"__metadata__": {"format": "pt"}, "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}  '
    """
    found, end = dict[str, dict[str, Any]](__metadata__=dict(about)), 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        found[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(found).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def content(tensor: Tensor) -> memoryview:
    """The bytes of a tensor.

    >>> bytes(content(torch.tensor([1], dtype=torch.int16)))
    b'\\x01\\x00'
    """
    return memoryview(flat_bytes(tensor.detach().cpu()).numpy())
