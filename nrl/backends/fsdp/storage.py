"""Reading and writing sharded tensors in a folder: each process handles its own parts, for any number of processes.

The files are safetensors, one a process, in the form of torch.distributed.checkpoint (DCP), with the offsets of each
part in its whole tensor. DCP's own writer copies all parts in memory, and does not compute checksums, so this module
writes the files. See docs/decisions/0024-checksums-are-computed-by-the-writer.md.
"""

import json
import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from nrl.backends.base import Piece
from nrl.backends.fsdp import sharding
from nrl.backends.models import safetensors
from nrl.backends.models.named_weights import SAME, a_few, check_weight, named_tensors, weight_name
from nrl.backends.models.pieces import apart, fill
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


type _Wanted = Callable[[str], bool] | None


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
        spoken = [sharding.spoken(peers, name, x) for name, x in tensors.items()]
        name = f"{peers.rank + 1:05}-of-{peers.count:05}.safetensors"
        found[name] = write_file(folder / name, _safetensors([x for x in spoken if x.tensor.numel()]))
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
        held, there = HeldError(peers), dict[str, list[Piece]]()
        with held.back():
            there = _pieces(folder, files)
            whole = {name: pieces[0].shape for name, pieces in there.items()}
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
                fill({name: sharding.piece(name, tensor.detach())}, there[name], who="restore")
        held.meet("restore")


def _safetensors(pieces: Sequence[Piece]) -> Iterator[Buffer]:
    """The bytes of a file, one piece after the other, so that only one at a time is copied from its device."""
    pieces = sorted(pieces, key=lambda piece: -piece.tensor.element_size())  # so that each is aligned
    info = {x.name: {"saved_offsets": [at.start for at in x.index], "shape": list(x.shape)} for x in pieces}
    about = {"format": "pt", _SHARDS: json.dumps(info)}
    yield safetensors.header({x.name: (x.tensor.dtype, x.tensor.shape) for x in pieces}, about)
    yield from (safetensors.content(piece.tensor) for piece in pieces)


def _pieces(folder: Path, files: ExitStack) -> dict[str, list[Piece]]:
    """What is in a folder by tensor, if it makes whole tensors; read from ``files``, which stay open, when indexed."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, list[Piece]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            file = files.enter_context(safe_open(path, "pt"))
            info = json.loads(file.metadata()[_SHARDS])
        except (SafetensorError, TypeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"restore: {path} is not what a trainer saved ({type(error).__name__}: {error}); use another checkpoint"
            ) from error
        for name, about in info.items():
            lazy = file.get_slice(name)
            index = tuple(
                slice(first, first + size) for first, size in zip(about["saved_offsets"], lazy.get_shape(), strict=True)
            )
            found.setdefault(name, []).append(Piece(name, tuple(about["shape"]), index, lazy))
    for name, pieces in found.items():
        have = sum(math.prod(at.stop - at.start for at in piece.index) for piece in pieces)
        all_of_it = math.prod(pieces[0].shape)
        if have != all_of_it or not apart([piece.index for piece in pieces]):
            raise CheckpointError(
                f"restore: {folder} on host {socket.gethostname()} has {have} of the {all_of_it} numbers of '{name}': "
                f"of the files that were written there is {', '.join(sorted(x.name for x in folder.iterdir()))}. Bring "
                "the others there, or use another checkpoint"
            )
    return found


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
