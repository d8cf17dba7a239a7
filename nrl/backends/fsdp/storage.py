"""Tensors in a folder, from any number of processes to any other: each writes, and reads, the parts that it holds.

The files are safetensors, in the form of torch.distributed.checkpoint (DCP). Its usual form has an index that is
unpickled, and so can run code; these are data and nothing else. A process that is alone writes the one file without
DCP, which takes five times as long for small models.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from nrl.backends.fsdp.agreement import Held, Peers
from nrl.backends.models import named_tensors, weight_name
from nrl.errors import ModelError

__all__ = ["read", "write"]

_MODEL, _MOMENTS = "model.", "optimizer."
_KEYS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter."""


type _Wanted = Callable[[str], bool] | None


def write(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None, peers: Peers, wanted: _Wanted = None
) -> None:
    """Write a model, tied weights once, and an optimizer's moments by the names of the parameters; a collective.

    Args:
        folder: where to.
        module: the model.
        optimizer: of its parameters, if that is to be written.
        peers: the processes that hold it.
        wanted: which weights, by name; None: all.

    Raises:
        OSError: the disk does not take it.
    """
    held = Held(peers)
    with held.back():
        if peers.rank == 0:
            for file in folder.glob("*.safetensors"):  # of another number of processes, maybe
                file.unlink()
    held.meet("save")
    tensors = {_MODEL + name: tensor for name, tensor in _weights(module, wanted)}
    if optimizer is not None:
        tensors |= _moments(module, optimizer)
    if peers.mesh is None:
        return _write_alone(folder, tensors)
    try:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        dcp.save(tensors, storage_writer=writer, process_group=peers.mesh.get_group())  # type: ignore[attr-defined]
    except CheckpointException as error:
        raise _first(error) from error


def read(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None, peers: Peers, wanted: _Wanted = None
) -> None:
    """Read into a model, and into a fresh optimizer for it, what `write` wrote with the same arguments; a collective.

    Raises:
        ModelError: what is there is of another model. Nothing has been changed then.
    """
    reader, held, there = HuggingFaceStorageReader(str(folder)), Held(peers), dict[str, tuple[int, ...]]()
    with held.back():
        found: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
        there = {name: tuple(tensor.size) for name, tensor in found.items()}
        own = {name: tuple(tensor.shape) for name, tensor in _weights(module, wanted)}
        _check({name.removeprefix(_MODEL): x for name, x in there.items() if name.startswith(_MODEL)}, own)
    held.meet("restore")
    tensors = {_MODEL + name: tensor for name, tensor in _weights(module, wanted)}
    if optimizer is not None:
        for name, parameter in _parameters(module):
            if f"{_MOMENTS}{name}.step" in there:
                zeros = {key: torch.zeros_like(parameter) for key in _KEYS[1:]}
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                optimizer.state[parameter] = {"step": step, **zeros}
        tensors |= _moments(module, optimizer)
    alone = peers.mesh is None
    group = None if peers.mesh is None else peers.mesh.get_group()
    try:
        with warnings.catch_warnings():  # it says that it is alone
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.load(tensors, storage_reader=reader, process_group=group, no_dist=alone)  # type: ignore[attr-defined]
    except CheckpointException as error:
        raise _first(error) from error


def _moments(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{_MOMENTS}{name}.{key}": optimizer.state[parameter][key]
        for name, parameter in _parameters(module)
        if optimizer.state.get(parameter)
        for key in _KEYS
    }


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((weight_name(name), parameter) for name, parameter in module.named_parameters())


def _write_alone(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "tensors.safetensors")
    except SafetensorError as error:  # what can go wrong is the disk
        raise OSError(str(error)) from error


def _weights(module: nn.Module, wanted: _Wanted) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in named_tensors(module) if wanted is None or wanted(name))


def _check(there: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]]) -> None:
    same = "build both sides from the same Model"
    for name, shape in there.items():
        if name not in own:
            raise ModelError(f"restore: the model has no weight '{name}'; it has {_some(own)}; {same}")
        if own[name] != shape:
            raise ModelError(f"restore: '{name}' has shape {list(shape)}, and here it is {list(own[name])}; {same}")
    if missing := own.keys() - there.keys():
        raise ModelError(f"restore: {len(missing)} weights did not arrive: {_some(sorted(missing))}; {same}")


def _some(names: Iterable[str], most: int = 5) -> str:
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def _first(error: CheckpointException) -> BaseException:
    """What happened, without DCP's wrapping."""
    found: Any = next(iter(error.failures.values()))
    return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]
