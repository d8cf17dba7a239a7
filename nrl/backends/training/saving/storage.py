"""Reading and writing sharded tensors in a folder: each process handles its own pieces, for any number of processes.

The files are safetensors, one a process, in the form of torch.distributed.checkpoint (DCP), with the offsets of each
piece in its whole tensor. DCP's own writer does not compute checksums, so this module says what is in the files, and
`nrl.backends.training.saving.save_plan` writes them. See docs/decisions/0024-checksums-are-computed-by-the-writer.md.

The weights of a model are ``model.`` and their Hugging Face name; the state of an optimizer ``optimizer.``, that
name, and what the optimizer calls it, such as one of `KEYS`. So any engine reads what any other has written.
"""

import json
import math
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor

from nrl.backends.models import safetensors
from nrl.backends.models.named_weights import SAME, a_few, check_weight
from nrl.backends.models.shards import Joining, apart, fill
from nrl.backends.training.collectives import HeldError, Peers
from nrl.backends.training.saving.save_plan import ToSave
from nrl.backends.types import Piece
from nrl.errors import CheckpointError, ModelError
from nrl.files import NOT_FINITE, Buffer, Folder, check_parts, part_name, read_saved

__all__ = ["KEYS", "MODEL", "MOMENTS", "NUMBER", "check_optimizer", "read", "to_save", "weights", "written_by"]

MODEL, MOMENTS = "model.", "optimizer."
KEYS = ("step", "exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter."""
NUMBER = ":number"
"""What follows a name of an optimizer's state that is a number of Python, and no tensor."""

_SHARDS = "DCP_SHARDING_INFO"
"""The field with DCP's offsets in the header of a file; nrl adds the whole shapes, and names where they differ."""


def to_save(pieces: Callable[[], Iterable[Piece]], peers: Peers, record: Mapping[str, Any]) -> ToSave:
    """Return the file of this process, of which all processes together have each number once; a collective.

    Args:
        pieces: gives those of this process; all processes call it together.
        peers: the processes.
        record: JSON for the manifest, to which `NOT_FINITE` is added.
    """
    held, spoken = HeldError(peers), list[Piece]()
    with held.back():
        spoken = [piece for piece in pieces() if piece.tensor.numel()]
    held.meet("save")
    return ToSave(
        {part_name(peers.rank, peers.count): _safetensors(spoken)}, {**record, NOT_FINITE: _not_finite(spoken)}
    )


def _not_finite(pieces: Iterable[Piece]) -> list[str]:
    """Return the names of the pieces that have NaN or infinite numbers."""
    flags: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in ((piece.name, piece.tensor.detach()) for piece in pieces if piece.tensor.is_floating_point()):
        # The extremes are infinite or NaN where any number is, and they take no memory, unlike tensor.isfinite()
        finite = torch.stack(torch.aminmax(tensor)).isfinite().all()
        held = flags.setdefault(tensor.device, {})
        held[name] = finite & held[name] if name in held else finite
    found = []
    for held in flags.values():  # a device is waited for once
        found += [name for name, finite in zip(held, torch.stack([*held.values()]).tolist(), strict=True) if not finite]
    return found


def read(
    folder: Folder,
    shapes: Mapping[str, tuple[int, ...]],
    pieces: Callable[[Mapping[str, Tensor]], Iterable[Piece]],
    peers: Peers,
) -> None:
    """Fill pieces with what was written of `to_save`; a collective.

    Args:
        folder: with the files of all processes that wrote.
        shapes: of the weights of the model, by name, tied ones once.
        pieces: gives those of this process, for all tensors that are there, by name; they take no memory.
        peers: the processes.

    Raises:
        ModelError: the files are of another model. Nothing has been changed then.
        CheckpointError: a part is missing, or a file is not one of `to_save`. Nothing has been changed then, either.
    """
    with ExitStack() as files:
        held, there = HeldError(peers), dict[str, list[Piece]]()
        with held.back():
            there = _pieces(folder, files)
            whole = {name: pieces[0].shape for name, pieces in there.items()}
            _check({name.removeprefix(MODEL): x for name, x in whole.items() if name.startswith(MODEL)}, shapes)
        held.meet("restore")
        with held.back():
            own = list(pieces({name: _empty(several[0]) for name, several in there.items()}))
            if lost := sorted({piece.name for piece in own} - there.keys()):
                raise CheckpointError(f"restore: {folder} has nothing of {a_few(lost)}; use another checkpoint")
            for piece in own:
                fill({piece.name: piece}, there[piece.name], who="restore")
        held.meet("restore")


def weights(folder: Folder) -> Iterator[tuple[str, Tensor]]:
    """The whole weights of the model that was written of `to_save`, one after the other, by the names that files have.

    Args:
        folder: with the files of all processes that wrote.

    Raises:
        CheckpointError: a part is missing, or a file is not one of `to_save`.
    """
    with ExitStack() as files:
        for name, found in _pieces(folder, files).items():
            if name.startswith(MODEL):
                read = [attrs.evolve(each, name=name.removeprefix(MODEL), tensor=each.tensor[:]) for each in found]
                yield from Joining().add(read)


def written_by(optimizer: str) -> dict[str, str]:
    """What the record of a checkpoint says of the optimizer whose state it has; of AdamW nothing.

    >>> written_by("adamw"), written_by("sgd")
    ({}, {'optimizer': 'sgd'})
    """
    return {} if optimizer == "adamw" else {"optimizer": optimizer}


def check_optimizer(record: Mapping[str, Any], optimizer: str) -> None:
    """Check that the state in a checkpoint is of this optimizer.

    Raises:
        CheckpointError: it is of another one.
    """
    if (there := record.get("optimizer", "adamw")) != optimizer:
        raise CheckpointError(
            f"restore: the checkpoint is of the optimizer '{there}', and here it is '{optimizer}', which keeps another "
            "state; go on with the same optimizer, or begin another run with the model as trainer.export writes it"
        )


def _empty(piece: Piece) -> Tensor:
    dtype = safetensors.DTYPES[piece.tensor.get_dtype()]  # type: ignore[attr-defined]  # it is still in its file
    return torch.empty(piece.shape, dtype=dtype, device="meta")


def _safetensors(pieces: Sequence[Piece]) -> list[Buffer | Tensor]:
    """The content of a file: a header, and then one piece after the other."""
    pieces = sorted(pieces, key=lambda piece: -piece.tensor.element_size())  # so that each is aligned
    keys, seen = list[str](), Counter[str]()
    for piece in pieces:
        keys.append(f"{piece.name}#{seen[piece.name]}" if seen[piece.name] else piece.name)
        seen[piece.name] += 1
    info = {
        key: {"saved_offsets": [at.start for at in x.index], "shape": list(x.shape)}
        | ({} if key == x.name else {"name": x.name})
        for key, x in zip(keys, pieces, strict=True)
    }
    about = {"format": "pt", _SHARDS: json.dumps(info)}
    header = safetensors.header(
        {key: (x.tensor.dtype, x.tensor.shape) for key, x in zip(keys, pieces, strict=True)}, about
    )
    return [header, *(piece.tensor for piece in pieces)]


def _pieces(folder: Folder, files: ExitStack) -> dict[str, list[Piece]]:
    """What is in a folder by tensor, if it makes whole tensors; read from ``files``, which stay open, when indexed."""
    from safetensors import SafetensorError

    found: dict[str, list[Piece]] = {}
    saved = read_saved(folder)  # a file that its manifest does not list is none of the checkpoint's
    paths: list[Folder] = [path for path in folder.glob("*.safetensors") if saved is None or path.name in saved.files]
    paths.sort(key=lambda path: path.name)
    try:
        check_parts(folder, [path.name for path in paths])
    except CheckpointError as error:
        raise CheckpointError(
            f"restore: {error}, as host {socket.gethostname()} sees it. Bring all files there, or use another "
            "checkpoint"
        ) from None
    for path in paths:
        try:
            file = files.enter_context(safetensors.opened(path))
            info = json.loads(file.metadata()[_SHARDS])
        except (SafetensorError, TypeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"restore: {path} is not what a trainer saved ({type(error).__name__}: {error}); use another checkpoint"
            ) from error
        for key, about in info.items():
            lazy, name = file.get_slice(key), about.get("name", key)
            index = tuple(
                slice(first, first + size) for first, size in zip(about["saved_offsets"], lazy.get_shape(), strict=True)
            )
            found.setdefault(name, []).append(Piece(name, tuple(about["shape"]), index, lazy))
    for name, pieces in found.items():
        have = sum(math.prod(at.stop - at.start for at in piece.index) for piece in pieces)
        all_of_it = math.prod(pieces[0].shape)
        if have != all_of_it or not apart([piece.index for piece in pieces]):
            raise CheckpointError(
                f"restore: {folder} has {have} of the {all_of_it} numbers of '{name}', in "
                f"{a_few([path.name for path in paths])}; use another checkpoint"
            )
    return found


def _check(there: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in there.items():
        check_weight(name, shape, own, "restore")
    if missing := own.keys() - there.keys():
        raise ModelError(f"restore: {len(missing)} weights did not arrive: {a_few(sorted(missing))}; {SAME}")
