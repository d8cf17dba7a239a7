"""The values of a checkpoint, as bytes and back: plain data, streams, and the global random generators.

Train states and frozen params are saved by the trainer that made them, each process its part.
"""

import io
import pickle
import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch

from nrl.arguments import with_article
from nrl.backends.training.states import Params, TrainState
from nrl.backends.training.trainer import Trainer
from nrl.errors import CheckpointError
from nrl.files import Folder
from nrl.run.checkpoint.serialization import decode, encode

__all__ = [
    "RANDOM",
    "check",
    "load_file",
    "random_state",
    "read_value",
    "seed_generators",
    "set_random_state",
    "to_bytes",
    "trainers",
]

RANDOM = "random generators"
"""The entry of the global ones; no value can have this name."""


def check(values: Mapping[str, Any]) -> dict[str, Any]:
    """Encode the plain data and the streams among ``values`` as `save` does, without writing them.

    Raises:
        CheckpointError: a checkpoint cannot hold a name or a kind of value.
    """
    for name in values:
        if not name.isidentifier():
            raise CheckpointError(f"save: '{name}' cannot name a value; give a Python name, such as average")
    return {
        name: _encode_value(value, name) for name, value in values.items() if not isinstance(value, TrainState | Params)
    }


def trainers(values: Mapping[str, Any]) -> dict[str, Trainer]:
    """Return the trainers of the values that live on a mesh, by name."""
    return {
        name: value if isinstance(value, Trainer) else cast(Trainer, value.trainer)
        for name, value in values.items()
        if isinstance(value, Trainer | TrainState | Params)
    }


def _is_stream(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("take", "state", "restore"))


def _encode_value(value: Any, name: str) -> Any:
    if isinstance(value, Trainer):
        raise CheckpointError(f"save: '{name}' is a trainer; give its train state, which the last step returned")
    return {"stream": encode(value.state(), name, classes=False)} if _is_stream(value) else encode(value, name)


def read_value(path: Folder, like: Any) -> Any:
    """Read a value of a checkpoint, of which ``like`` is an example: see `nrl.run.checkpoint.load`."""
    trained, file = isinstance(like, Trainer | TrainState | Params), path.with_name(f"{path.name}.pt")
    stored: Any = None if path.is_dir() else load_file(file)
    streamed = isinstance(stored, dict) and "stream" in stored
    if (path.is_dir(), streamed) != (trained, _is_stream(like)):
        kind = "a train state or params" if path.is_dir() else "a stream" if streamed else "plain data"
        raise CheckpointError(
            f"load: '{path.name}' was saved as {kind}, and restore was given {with_article(type(like).__name__)}; "
            "give the same values to restore and save"
        )
    if isinstance(like, TrainState):  # state is linear: there is never a second copy of it
        like.handle.donate(like.handle.owner, "restore")
    if trained:
        return (like if isinstance(like, Trainer) else like.trainer).restore(path)
    if streamed:
        like.restore(decode(stored["stream"], None, path.name))
        return like
    return decode(stored, like, path.name)


def to_bytes(value: Any) -> bytes:
    """Serialize an encoded value to the bytes of a file."""
    file = io.BytesIO()  # into the file itself torch would seek
    torch.save(value, file)
    return file.getvalue()  # a view of its memory in a cycle, such as of a traceback, ends CPython 3.12


def load_file(path: Folder) -> Any:
    """Load a value that `to_bytes` has serialized.

    Raises:
        CheckpointError: the file has other objects than data.
    """
    try:
        with path.open("rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"load: {path} holds something that is no data; it was not read, and nothing of it was run. nrl did not "
            "write it: look where it came from, and use another checkpoint"
        ) from error


def random_state() -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Let the global generators go on from a state.

    >>> before = random_state()
    >>> drawn = random.random()
    >>> set_random_state(before)
    >>> random.random() == drawn
    True
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    # Fewer devices may exist than before.
    for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator, device)


def seed_generators(seed: int) -> None:
    """Seed the global generators, for the program's own draws: nrl's randomness has explicit seeds.

    >>> seed_generators(3)
    >>> drawn = float(np.random.normal())
    >>> seed_generators(3)
    >>> float(np.random.normal()) == drawn
    True
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
