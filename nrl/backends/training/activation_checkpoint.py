"""Activation checkpointing: the choice of activations to keep for the backward pass."""

from typing import Any, Literal

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

__all__ = ["Checkpointing", "options_of"]

type Checkpointing = bool | Literal["selective"]
"""Activation checkpointing by layer: none, all of a layer, or the selection of `options_of`."""

_ATTENTION = ("_varlen_attn", "_scaled_dot_product")
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}


def options_of(checkpointing: Checkpointing) -> dict[str, Any]:
    """Return the arguments of ``torch.utils.checkpoint.checkpoint``.

    ``"selective"`` keeps, beside a layer's input, what attention gives, and the matrix products that make nothing
    wider: of a Transformer the projections of attention and the one out of the MLP. Those into the MLP, which hold the
    most, and all that is done number by number are computed again. (After Korthikanti et al., arXiv 2205.05198, section
    5, where the cheapest to compute are recomputed for what they hold; FlashAttention does that for scores.)
    """
    if checkpointing == "selective":
        return {"use_reentrant": False, "context_fn": _contexts}
    return {"use_reentrant": False}


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().partition("::")[2].partition(".")[0]
    is_kept = name.startswith(_ATTENTION) or (name in _PRODUCTS and not _widens(name, args))
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _widens(name: str, args: Any) -> bool:
    """Return whether a product has more numbers a row than its input."""
    first, second = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
    widens: bool = second.shape[-1] > first.shape[-1]
    return widens
