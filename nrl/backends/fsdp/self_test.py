"""Checks at construction that the torch engine computes a model's own numbers; models that fail are rejected.

transformers has hundreds of architectures, and many silently ignore arguments that they do not know. So there is no
list of names: small forwards show whether the engine computes the model's own numbers. They are forwards of a
miniature on the host (`nrl.backends.models.tiny_config`), so that a large model is never run, or even read, for them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import linear

from nrl.backends.fsdp import attention
from nrl.backends.models.named_weights import head_weight
from nrl.backends.models.tiny_config import miniature
from nrl.backends.training.layout import packed_attention
from nrl.batch.packed_rows import Packing
from nrl.batch.packing import pack
from nrl.errors import ModelError

__all__ = ["check", "check_head", "check_packing", "check_positions"]

_TOLERANCE = 1e-4
"""A fraction of the deviation of logits or hidden states; rounding is a hundredth of it."""


def check(module: Any, packing: Packing | None, *, head: bool) -> None:
    """Refuse a model whose numbers the engine would not compute, by a miniature of it.

    Args:
        module: the model; its parameters need not take memory, and are not read.
        packing: the form of rows; None: rows are padded.
        head: whether it is a head of words, whose logits are not computed.

    Raises:
        ModelError: as `check_positions`, `check_head` and `check_packing`.
    """
    check_positions(module)
    small = miniature(module)
    if head:
        check_head(small)
    if packing is not None:
        check_packing(small, packing)


def check_positions(module: Any) -> None:
    """Refuse positions that depend on the longest row of a batch: a row's numbers would depend on its neighbours.

    Raises:
        ModelError: the config has dynamic or longrope positions.
    """
    dynamic = _rope_types(getattr(module.config, "rope_parameters", None)) & {"dynamic", "longrope"}
    if dynamic:
        raise ModelError(
            f"{type(module).__name__}: its '{dynamic.pop()}' positions depend on the longest row of a micro-batch, so "
            "that a row's log-probabilities would depend on its neighbours; set rope_parameters to another type"
        )


def _rope_types(parameters: Any) -> set[str]:
    if not isinstance(parameters, Mapping):
        return set()
    kinds = {str(parameters.get("rope_type", "default"))}
    return kinds.union(*map(_rope_types, parameters.values()))


def check_head(module: Any) -> None:
    """Compare the model's logits with those of its head alone, on large hidden states, which show caps and scales.

    Raises:
        ModelError: the logits differ: fused log-probabilities would be wrong; or the model has no linear head.
    """
    hidden: list[Tensor] = []

    def amplify(_: nn.Module, inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * 1e3
        hidden.append(output.last_hidden_state)
        return output

    hook = module.base_model.register_forward_hook(amplify)
    try:
        with torch.no_grad():
            logits = module.eval()(input_ids=torch.tensor([[1, 2]]), use_cache=False).logits
            plain = linear(hidden[0], *head_weight(module))
    except (AttributeError, IndexError, TypeError, RuntimeError) as error:
        raise ModelError(
            f"{type(module).__name__}: the model is not a body whose last hidden state goes through a linear head "
            f"({error}), which is what this backend trains"
        ) from error
    finally:
        hook.remove()
    if not _alike(logits, plain):
        raise ModelError(
            f"{type(module).__name__}: the model caps or scales its logits, which fused log-probabilities do not; "
            "it cannot be trained by this backend"
        )


def check_packing(module: Any, packing: Packing) -> None:
    """Switch to the attention of packed rows, and compare last hidden states with the model's own, of rows of a batch.

    The rows are packed twice: each row whole, and with common first tokens laid out once.

    Args:
        module: it is changed.
        packing: the form of the rows.

    Raises:
        ModelError: the states differ: a layer looks across rows, or does not use the attention of packed rows.
    """
    rows = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 5, 6], [1, 2, 3, 9]]) % module.config.vocab_size
    module.eval()
    with torch.no_grad():
        expected = module.base_model(input_ids=rows, use_cache=False).last_hidden_state.flatten(0, 1)
        module.set_attn_implementation(attention.register_attention())
        packed_states = []
        for share in (False, True):
            tokens = pack(TensorDict({"input_ids": rows}, batch_size=[len(rows)]), packing=packing, share=share)
            hidden = module.base_model(
                input_ids=tokens.input_ids[None],
                position_ids=tokens.position_ids[None],
                use_cache=False,
                nrl_attention=packed_attention.make_attention(tokens.rows),
            ).last_hidden_state[0]
            packed_states.append(hidden[tokens.place])
    packed = max(packed_states, key=lambda hidden: float((expected - hidden).abs().max()))
    if not all(_alike(expected, hidden) for hidden in packed_states):
        raise ModelError(
            f"{type(module).__name__}: packed rows give hidden states that differ from the model's own by up to "
            f"{float((expected - packed).abs().max()):.3g}; it has parts that look across rows. Use "
            "fsdp.trainer(..., packing=None)"
        )


def _alike(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= _TOLERANCE * a.std())  # false for NaN
