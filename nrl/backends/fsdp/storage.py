"""Reading and writing sharded tensors in a folder: each process handles its own parts, for any number of processes.

The files are safetensors, one a process, in the form of torch.distributed.checkpoint (DCP), with the offsets of each
part in its whole tensor. DCP's own writer copies all parts in memory, and does not compute checksums, so this module
writes the files. See docs/decisions/0024-checksums-are-computed-by-the-writer.md.
"""

import json
import math
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from nrl.backends.models.named_weights import SAME, a_few, check_weight, named_tensors, weight_name
from nrl.backends.training.agreement import HeldError, Peers
from nrl.errors import CheckpointError, ModelError
from nrl.files import Buffer, Written, flush
from nrl.files import write as write_file

__all__ = ["read", "write"]

_MODEL, _MOMENTS = "model.", "optimizer."
_KEYS = ("step", "exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter."""

_SHARDS = "DCP_SHARDING_INFO"
"""The field with DCP's offsets in the header of a file; nrl adds the whole shapes."""

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


type _Wanted = Callable[[str], bool] | None


class _Part(NamedTuple):
    """A block of a tensor: in this process, or in a file."""

    offsets: Sequence[int]
    shape: Sequence[int]
    whole: Sequence[int]  # the shape of the tensor
    where: Any  # the block itself, or its file


def write(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None, peers: Peers, wanted: _Wanted = None
) -> dict[str, Written]:
    """Write a model, tied weights once, and an optimizer's moments by the names of the parameters; a collective.

    Args:
        folder: for the files.
        module: the model.
        optimizer: of its parameters; None: the model alone.
        peers: the processes that hold it.
        wanted: whether to write a weight of this name; None: all weights.

    Returns:
        The file of this process, by its name.

    Raises:
        OSError: the disk does not take it.
    """
    held, found = HeldError(peers), dict[str, Written]()
    with held.back():
        if peers.rank == 0:
            for file in folder.glob("*.safetensors"):  # another number of processes may have left them
                file.unlink()
    held.meet("save")
    with held.back():
        tensors = {_MODEL + name: tensor for name, tensor in _weights(module, wanted)}
        if optimizer is not None:
            tensors |= _moments(module, optimizer)
        own = ((name, _local(x, peers)) for name, x in tensors.items())
        parts = {name: part for name, part in own if part is not None}
        name = f"{peers.rank + 1:05}-of-{peers.count:05}.safetensors"
        found[name] = write_file(folder / name, _safetensors(parts))
        flush(folder)
    held.meet("save")  # when one process returns, all have written
    return found


def read(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None, peers: Peers, wanted: _Wanted = None
) -> None:
    """Read files of `write` into a model, and into a fresh optimizer for it; a collective. Arguments as there.

    Raises:
        ModelError: the files are of another model. Nothing has been changed then.
        CheckpointError: a part is missing, or a file is not one of `write`. Nothing has been changed then, either.
    """
    with ExitStack() as files:
        held, there = HeldError(peers), dict[str, list[_Part]]()
        with held.back():
            there = _parts(folder, files)
            whole = {name: tuple(parts[0].whole) for name, parts in there.items()}
            own = {name: tuple(tensor.shape) for name, tensor in _weights(module, wanted)}
            _check({name.removeprefix(_MODEL): x for name, x in whole.items() if name.startswith(_MODEL)}, own)
        held.meet("restore")
        tensors = {_MODEL + name: tensor for name, tensor in _weights(module, wanted)}
        if optimizer is not None:
            for name, parameter in _parameters(module):
                if f"{_MOMENTS}{name}.step" in there:
                    zeros = {key: torch.zeros_like(parameter) for key in _KEYS[1:]}
                    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    optimizer.state[parameter] = {"step": step, **zeros}
            tensors |= _moments(module, optimizer)
        with held.back():
            if lost := sorted(tensors.keys() - there.keys()):
                raise CheckpointError(f"restore: {folder} has nothing of {a_few(lost)}; use another checkpoint")
            for name, tensor in tensors.items():
                _fill(name, tensor, there[name])
        held.meet("restore")


def _local(tensor: Tensor, peers: Peers) -> _Part | None:
    """The part of a tensor that this process writes; None: it has none, or another process writes the same."""
    if not isinstance(tensor, DTensor):
        return _Part([0] * tensor.ndim, tensor.shape, tensor.shape, tensor) if peers.rank == 0 else None
    mesh, placements, local = tensor.device_mesh, tensor.placements, tensor.to_local()
    copies = [place for at, place in zip(placements, mesh.get_coordinate() or (), strict=True) if at.is_replicate()]
    if any(copies) or not local.numel():
        return None
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return _Part(offsets, shape, tensor.shape, local)


def _safetensors(parts: Mapping[str, _Part]) -> Iterator[Buffer]:
    """The bytes of a file, one tensor after the other, so that only one at a time is copied from its device."""
    parts = dict(sorted(parts.items(), key=lambda pair: -pair[1].where.element_size()))  # so that each is aligned
    end, header = 0, dict[str, Any]()
    info = {name: {"saved_offsets": list(x.offsets), "shape": list(x.whole)} for name, x in parts.items()}
    header["__metadata__"] = {"format": "pt", _SHARDS: json.dumps(info)}
    for name, part in parts.items():
        begin, end = end, end + part.where.numel() * part.where.element_size()
        dtype = _DTYPES[part.where.dtype]
        header[name] = {"dtype": dtype, "shape": list(part.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for part in parts.values():
        yield memoryview(part.where.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def _parts(folder: Path, files: ExitStack) -> dict[str, list[_Part]]:
    """The parts in a folder by tensor, if they make whole tensors; ``files`` keeps their files open."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, list[_Part]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            file = files.enter_context(safe_open(path, "pt"))
            info = json.loads(file.metadata()[_SHARDS])
        except (SafetensorError, TypeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"restore: {path} is not what a trainer saved ({type(error).__name__}: {error}); use another checkpoint"
            ) from error
        for name, about in info.items():
            shape = file.get_slice(name).get_shape()
            found.setdefault(name, []).append(_Part(about["saved_offsets"], shape, about["shape"], file))
    for name, parts in found.items():
        have, all_of_it = sum(math.prod(part.shape) for part in parts), math.prod(parts[0].whole)
        if have != all_of_it:
            raise CheckpointError(
                f"restore: {folder} on host {socket.gethostname()} has {have} of the {all_of_it} numbers of '{name}': "
                f"of the files that were written there is {', '.join(sorted(x.name for x in folder.iterdir()))}. Bring "
                "the others there, or use another checkpoint"
            )
    return found


def _fill(name: str, tensor: Tensor, parts: Iterable[_Part]) -> None:
    """Fill this process's part of a tensor from the parts in files."""
    own = tensor.detach()
    offsets: Sequence[int] = [0] * own.ndim
    if isinstance(own, DTensor):
        _, offsets = compute_local_shape_and_global_offset(own.shape, own.device_mesh, own.placements)
        own = own.to_local()
    for part in parts:
        begin = [max(pair) for pair in zip(offsets, part.offsets, strict=True)]
        ends = (start + size for start, size in zip(offsets, own.shape, strict=True))
        theirs = (start + size for start, size in zip(part.offsets, part.shape, strict=True))
        end = [min(pair) for pair in zip(ends, theirs, strict=True)]
        if all(a < b for a, b in zip(begin, end, strict=True)):
            here, there = (
                tuple(slice(a - first, b - first) for a, b, first in zip(begin, end, firsts, strict=True))
                for firsts in (offsets, part.offsets)
            )
            own[here].copy_(part.where.get_slice(name)[there])


def _moments(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{_MOMENTS}{name}.{key}": optimizer.state[parameter][key]
        for name, parameter in _parameters(module)
        if optimizer.state.get(parameter)
        for key in _KEYS
    }


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((weight_name(name), parameter) for name, parameter in module.named_parameters())


def _weights(module: nn.Module, wanted: _Wanted) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in named_tensors(module) if wanted is None or wanted(name))


def _check(there: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in there.items():
        check_weight(name, shape, own, "restore")
    if missing := own.keys() - there.keys():
        raise ModelError(f"restore: {len(missing)} weights did not arrive: {a_few(sorted(missing))}; {SAME}")
