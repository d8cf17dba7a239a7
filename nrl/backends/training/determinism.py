"""The same bits each time: torch's deterministic kernels, and a clear error where an operation has none."""

import contextlib
import os
from collections.abc import Iterator

import torch

from nrl.errors import ConfigError, NotDeterministic

__all__ = ["explain_refusals", "make_deterministic"]

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")
"""Workspaces for which cuBLAS promises the same bits (its documentation, section Results Reproducibility)."""


def make_deterministic() -> None:
    """Let this process compute the same bits each time, until it ends: torch has one setting for all threads.

    Raises:
        ConfigError: the environment sets CUBLAS_WORKSPACE_CONFIG to what is not deterministic.
    """
    if (workspace := os.environ.setdefault(_CUBLAS, _WORKSPACES[0])) not in _WORKSPACES:
        raise ConfigError(
            f"deterministic=true: the environment has {_CUBLAS}={workspace}, with which cuBLAS is not deterministic; "
            f"unset it, or set it to {' or '.join(_WORKSPACES)}"
        )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # nothing of nrl's reads memory before it writes it
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


@contextlib.contextmanager
def explain_refusals(caller: str) -> Iterator[None]:
    """Explain the remedy where torch refuses an operation for `make_deterministic`.

    Args:
        caller: how the error begins.

    Raises:
        NotDeterministic: an operation has no deterministic kernel.
    """
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        name = str(error).split(" does not have", 1)[0]
        raise NotDeterministic(
            f"{caller}: under deterministic=true torch refuses {name}, which has no deterministic kernel on this "
            "device; compute it in another way (if it is of a loss, with gather, index_select or sort), or take "
            "deterministic=false"
        ) from error
