"""The batch before a step: adding columns, measuring its lag, finding values that are not finite or teach nothing."""

import sys
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from nrl.algos import LogitsOutput, Loss, episode_shares, output_kind
from nrl.backends.training.loss.loss_terms import global_weights
from nrl.backends.training.outputs.output_heads import PROVIDES
from nrl.batch import Batch, assign, lengths
from nrl.batch.handles import handle_of
from nrl.batch.metrics import Mean, Metrics
from nrl.batch.values import memoize
from nrl.errors import BatchError, MissingColumn, MissingOutput, NotFinite
from nrl.runtime import Future

__all__ = [
    "check_finite",
    "check_needs",
    "check_sampled",
    "lag",
    "warn_of_frozen_token",
    "warn_of_long_rows",
    "warn_of_no_advantages",
    "with_columns",
    "with_shares",
]


def with_columns(batch: Batch, columns: Mapping[str, Tensor | Future[Tensor]]) -> Batch:
    """Add columns to a batch, as handles where other processes compute them."""
    return assign(batch, **{name: handle_of(value) for name, value in columns.items()}) if columns else batch


def with_shares(batch: Batch) -> Batch:
    """Add ``episode_shares`` to a batch in which an episode has several rows, which shards and micro-batches part.

    They are computed anew in each step, since tokens or rows may have been left out meanwhile. Other batches go without
    the column, and are what they were.
    """
    if "episode_shares" in batch.keys():
        batch = batch.exclude("episode_shares").lock_()
    if not {"episode_ids", "loss_mask"} <= set(batch.keys()):
        return batch
    ids = batch["episode_ids"].flatten()
    return batch if len(ids.unique()) == len(ids) else assign(batch, episode_shares=episode_shares(batch))


def check_needs(caller: str, needs: Collection[str], provides: Collection[str], name: str) -> None:
    """Check that a trainer computes the needed outputs.

    Args:
        caller: the name of the caller in errors.
        needs: names of outputs.
        provides: the kinds that the trainer computes.
        name: of the trainer.

    Raises:
        MissingOutput: an output is missing, or cannot be computed together with the others.
    """
    top_k_needs = sorted(need for need in needs if output_kind(need) == "top_k")
    if len(top_k_needs) > 1:
        raise MissingOutput(
            f"{caller}: it needs {' and '.join(top_k_needs)}, and one of them at a time can be computed"
        )
    missing = sorted(need for need in needs if output_kind(need) not in provides)
    if missing:
        unknown = [need for need in missing if not any(output_kind(need) in kinds for kinds in PROVIDES.values())]
        remedy = "another Model(..., head=...) computes other things"
        if unknown:
            offers = ", ".join(f"{', '.join(sorted(kinds))} (head='{head}')" for head, kinds in PROVIDES.items())
            remedy = f"no model computes {', '.join(unknown)}; there are {offers}"
        raise MissingOutput(
            f"{caller}: it needs {', '.join(missing)}, and {name} provides {', '.join(sorted(provides))}; {remedy}"
        )
    for need in needs:
        if output_kind(need) == "from_logits" and not isinstance(need, LogitsOutput):
            raise MissingOutput(
                f"{caller}: '{need}' is a name without its function; give what nrl.algos.from_logits(fn) returns"
            )


def check_sampled(caller: str, batch: Batch) -> None:
    """Check that a rollout is trained only on tokens of the policy.

    Args:
        caller: the name of the caller in errors.
        batch: with ``turns`` and ``loss_mask``; others are no rollouts.

    Raises:
        BatchError: one is.
    """
    if not {"turns", "loss_mask"} <= set(batch.keys()):
        return
    if bool((strange := batch["loss_mask"] & (batch["turns"] < 0)).any()):
        row, position = strange.flatten(0, -2).nonzero()[0].tolist()
        raise BatchError(
            f"{caller}: row {row} is trained on its token {position}, which the policy did not sample; loss_mask may "
            "leave tokens out, and not add any"
        )


def lag(version: int, batch: Batch) -> Metrics:
    """Compute the metric ``lag``: the publishes between the weights and a row's, as a mean over trained rows."""
    if "version" not in batch.keys() or "loss_mask" not in batch.keys():
        return {}
    rows = batch["loss_mask"].any(-1)
    return {"lag": Mean(((version - batch["version"]) * rows).sum().float(), rows.sum().float())}


def warn_of_no_advantages(
    caller: str, loss: Loss, batch: Batch, always: Collection[str], widths: Mapping[str, int]
) -> bool:
    """Print that all advantages are 0, if the loss reads them; return whether later steps need no look.

    It prints to the standard error instead of warning, since a healthy run may have such a step.
    """
    if not {"advantages", "loss_mask"} <= set(batch.keys()):
        return False
    if bool((batch["loss_mask"] & (batch["advantages"] != 0)).any()):
        return False
    try:
        global_weights(loss, batch.exclude("advantages"), always=always, widths=widths)
        return True  # it does not read them
    except MissingColumn:
        pass
    reason = "See what computed the column."
    if "group_ids" in batch.keys():
        _, rows = batch["group_ids"][batch["loss_mask"].flatten(1).any(1)].unique(return_counts=True)
        reason = (
            f"In each of its {len(rows)} groups all rewards are equal. Now and then that is so where a model has "
            "learned its tasks; where it lasts, they are too hard or too easy, or a verifier says the same of every "
            "answer: look at some rows, or leave such groups out with nrl.drop_uniform."
        )
        if int(rows.max()) == 1:
            reason = (
                f"Each of its {len(rows)} groups has one row, which has nothing to be compared with: sample several "
                "answers a prompt (group_size, or n of nrl.rollouts), or use an estimator that needs no group."
            )
    text = f"{caller}: all advantages are 0 at the tokens that are trained on, so this step learns nothing from them."
    print(f"{text} {reason} (This is said once.)", file=sys.stderr, flush=True)  # noqa: T201
    return True


def warn_of_frozen_token(caller: str, batch: Batch, token: int | None) -> bool:
    """Print that rows hold the token whose input embedding is not trained; return whether later steps need no look.

    Args:
        caller: how the message begins.
        batch: with ``input_ids`` ``[*B, T]``.
        token: of `nrl.backends.engine.TrainEngine.frozen_token`; None: all embeddings are trained.
    """
    if token is None:
        return True
    # The last token of a row is predicted and never looked up.
    ids = batch["input_ids"]
    inputs = torch.arange(ids.shape[-1]) < lengths(batch).unsqueeze(-1) - 1
    held = (inputs & (ids == token)).flatten(0, -2).nonzero()
    if len(held) == 0:
        return False
    row, position = held[0].tolist()
    text = (
        f"{caller}: row {row} holds the model's pad token {token} as a token of its own (position {position}). As in "
        f"transformers (nn.Embedding(padding_idx={token})), its input embedding is frozen; all else is trained. Pass "
        "Model(..., train_pad_embedding=True) to train it too."
    )
    print(f"{text} (This is said once.)", file=sys.stderr, flush=True)  # noqa: T201
    return True


def warn_of_long_rows(caller: str, batch: Batch, positions: int | None) -> bool:
    """Print that a row has more tokens than the model has positions; return whether later steps need no look.

    Args:
        caller: how the message begins.
        batch: with ``input_ids`` ``[*B, T]``.
        positions: of the model; None: unknown.
    """
    if positions is None:
        return True
    if batch["input_ids"].shape[-1] <= positions or (longest := int(lengths(batch).max())) <= positions:
        return False
    text = (
        f"{caller}: a row has {longest} tokens, more than the {positions} positions of the model "
        "(max_position_embeddings), of which it has learned nothing beyond. Leave long rows out: give data.tasks "
        "positions=trainer.positions, or a smaller max_tokens."
    )
    print(f"{text} (This is said once.)", file=sys.stderr, flush=True)  # noqa: T201
    return True


def check_finite(caller: str, batch: Batch) -> None:
    """Check that columns are finite at trained tokens; other values would poison the weights.

    Raises:
        NotFinite: a column is not.
    """
    if "loss_mask" not in batch.keys():
        return
    mask = batch["loss_mask"]
    trained = memoize(mask, "trained", lambda: mask.flatten().nonzero()[:, 0])
    for column, value in batch.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == mask.shape:
            bad = ~torch.isfinite(value.flatten()[trained])
            if bool(bad.any()):
                rows = (trained[bad] // mask[0].numel()).unique().tolist()
                raise NotFinite(
                    f"{caller}: the column '{column}' is NaN or infinite at tokens that are trained on, in rows "
                    f"{rows[:10]}; mark such rows with assign(batch, valid=...), or mend what computed the column"
                )
