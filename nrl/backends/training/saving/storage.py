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
from nrl.backends.models.shards import ShardAssembler, are_disjoint, fill
from nrl.backends.training.collectives import DeferredError, ProcessGroup
from nrl.backends.training.saving.save_plan import SavePlan
from nrl.backends.types import Piece
from nrl.errors import CheckpointError, ModelError
from nrl.files import NOT_FINITE, Buffer, Folder, check_parts, part_name, read_saved

__all__ = [
    "KEYS",
    "MODEL",
    "MOMENTS",
    "NUMBER",
    "check_optimizer",
    "iter_weights",
    "load_shards",
    "plan_save",
    "record_optimizer",
]

MODEL, MOMENTS = "model.", "optimizer."
KEYS = ("step", "exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter."""
NUMBER = ":number"
"""The suffix of the name of an optimizer's state that is a number of Python, and no tensor."""

_SHARDS = "DCP_SHARDING_INFO"
"""The field with DCP's offsets in the header of a file; nrl adds the whole shapes, and names where they differ."""


def plan_save(pieces: Callable[[], Iterable[Piece]], peers: ProcessGroup, record: Mapping[str, Any]) -> SavePlan:
    """Return the file of this process, of which all processes together have each number once; a collective.

    Args:
        pieces: gives those of this process; all processes call it together.
        peers: the processes.
        record: JSON for the manifest, to which `NOT_FINITE` is added.
    """
    deferred, owned = DeferredError(peers), list[Piece]()
    with deferred.capture():
        owned = [piece for piece in pieces() if piece.tensor.numel()]
    deferred.gather_or_raise("save")
    return SavePlan(
        {part_name(peers.rank, peers.count): _safetensors(owned)}, {**record, NOT_FINITE: _find_not_finite(owned)}
    )


def _find_not_finite(pieces: Iterable[Piece]) -> list[str]:
    """Return the names of the pieces that have NaN or infinite numbers."""
    flags: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in ((piece.name, piece.tensor.detach()) for piece in pieces if piece.tensor.is_floating_point()):
        # The extremes are infinite or NaN where any number is, and they take no memory, unlike tensor.isfinite()
        finite = torch.stack(torch.aminmax(tensor)).isfinite().all()
        flags_of_device = flags.setdefault(tensor.device, {})
        flags_of_device[name] = finite & flags_of_device[name] if name in flags_of_device else finite
    names = []
    for flags_of_device in flags.values():  # a device is waited for once
        names += [
            name
            for name, finite in zip(flags_of_device, torch.stack([*flags_of_device.values()]).tolist(), strict=True)
            if not finite
        ]
    return names


def load_shards(
    folder: Folder,
    shapes: Mapping[str, tuple[int, ...]],
    pieces: Callable[[Mapping[str, Tensor]], Iterable[Piece]],
    peers: ProcessGroup,
) -> None:
    """Fill pieces from the files of a `plan_save`; a collective.

    Args:
        folder: with the files of all processes that wrote.
        shapes: of the weights of the model, by name, tied ones once.
        pieces: gives those of this process, for all tensors that are there, by name; they take no memory.
        peers: the processes.

    Raises:
        ModelError: the files are of another model. Nothing has been changed then.
        CheckpointError: a part is missing, or a file is not one of `plan_save`. Nothing has been changed then, either.
    """
    with ExitStack() as files:
        deferred, stored = DeferredError(peers), dict[str, list[Piece]]()
        with deferred.capture():
            stored = _pieces(folder, files)
            stored_shapes = {name: pieces[0].shape for name, pieces in stored.items()}
            _check({name.removeprefix(MODEL): x for name, x in stored_shapes.items() if name.startswith(MODEL)}, shapes)
        deferred.gather_or_raise("restore")
        with deferred.capture():
            targets = list(pieces({name: _empty(blocks[0]) for name, blocks in stored.items()}))
            if lost := sorted({piece.name for piece in targets} - stored.keys()):
                raise CheckpointError(f"restore: {folder} has nothing of {a_few(lost)}; use another checkpoint")
            for piece in targets:
                fill({piece.name: piece}, stored[piece.name], caller="restore")
        deferred.gather_or_raise("restore")


def iter_weights(folder: Folder) -> Iterator[tuple[str, Tensor]]:
    """Yield the full weights of a model that `plan_save` wrote, one after the other, by their names in files.

    Args:
        folder: with the files of all processes that wrote.

    Raises:
        CheckpointError: a part is missing, or a file is not one of `plan_save`.
    """
    with ExitStack() as files:
        for name, blocks in _pieces(folder, files).items():
            if name.startswith(MODEL):
                read = [attrs.evolve(block, name=name.removeprefix(MODEL), tensor=block.tensor[:]) for block in blocks]
                yield from ShardAssembler().add(read)


def record_optimizer(optimizer: str) -> dict[str, str]:
    """Return the entry of a checkpoint's record for the optimizer whose state it has; AdamW has none.

    >>> record_optimizer("adamw"), record_optimizer("sgd")
    ({}, {'optimizer': 'sgd'})
    """
    return {} if optimizer == "adamw" else {"optimizer": optimizer}


def check_optimizer(record: Mapping[str, Any], optimizer: str) -> None:
    """Check that the state in a checkpoint is of this optimizer.

    Raises:
        CheckpointError: it is of another one.
    """
    if (stored := record.get("optimizer", "adamw")) != optimizer:
        raise CheckpointError(
            f"restore: the checkpoint is of the optimizer '{stored}', and here it is '{optimizer}', which keeps "
            "another state; go on with the same optimizer, or begin another run with the model as trainer.export "
            "writes it"
        )


def _empty(piece: Piece) -> Tensor:
    dtype = safetensors.DTYPES[piece.tensor.get_dtype()]  # type: ignore[attr-defined]  # it is still in its file
    return torch.empty(piece.shape, dtype=dtype, device="meta")


def _safetensors(pieces: Sequence[Piece]) -> list[Buffer | Tensor]:
    """Return the content of a file: a header, and then one piece after the other."""
    # Wider dtypes first keep each tensor aligned.
    pieces = sorted(pieces, key=lambda piece: -piece.tensor.element_size())
    keys, seen = list[str](), Counter[str]()
    for piece in pieces:
        keys.append(f"{piece.name}#{seen[piece.name]}" if seen[piece.name] else piece.name)
        seen[piece.name] += 1
    info = {
        key: {"saved_offsets": [dim.start for dim in x.index], "shape": list(x.shape)}
        | ({} if key == x.name else {"name": x.name})
        for key, x in zip(keys, pieces, strict=True)
    }
    about = {"format": "pt", _SHARDS: json.dumps(info)}
    header = safetensors.header(
        {key: (x.tensor.dtype, x.tensor.shape) for key, x in zip(keys, pieces, strict=True)}, about
    )
    return [header, *(piece.tensor for piece in pieces)]


def _pieces(folder: Folder, files: ExitStack) -> dict[str, list[Piece]]:
    """Return the pieces in a folder by tensor, and check that they are complete; indexing reads from open ``files``."""
    from safetensors import SafetensorError

    blocks: dict[str, list[Piece]] = {}
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
            file = files.enter_context(safetensors.open_file(path))
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
            blocks.setdefault(name, []).append(Piece(name, tuple(about["shape"]), index, lazy))
    for name, pieces in blocks.items():
        have = sum(math.prod(dim.stop - dim.start for dim in piece.index) for piece in pieces)
        all_of_it = math.prod(pieces[0].shape)
        if have != all_of_it or not are_disjoint([piece.index for piece in pieces]):
            raise CheckpointError(
                f"restore: {folder} has {have} of the {all_of_it} numbers of '{name}', in "
                f"{a_few([path.name for path in paths])}; use another checkpoint"
            )
    return blocks


def _check(stored: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in stored.items():
        check_weight(name, shape, expected, "restore")
    if missing := expected.keys() - stored.keys():
        raise ModelError(f"restore: {len(missing)} weights did not arrive: {a_few(sorted(missing))}; {SAME}")
