"""The critic of actor-critic methods: the loss on its values, and how well they predict the returns."""

import torch
from tensordict import TensorDict

from nrl.algos._arguments import positive
from nrl.algos._reductions import aggregate_tokens
from nrl.algos.aggregate import Aggregate, token_mean
from nrl.algos.loss_contract import MeanLoss, named, needs
from nrl.algos.masking import masked, masked_column
from nrl.arguments import checked
from nrl.batch import Batch, require
from nrl.batch.metrics import Mean, Metrics

__all__ = ["explained_variance", "value_loss"]


@checked("value_loss", finite=False)
def value_loss(clip: float | None = None, *, aggregate: Aggregate = token_mean) -> MeanLoss:
    """The squared error of the values against the returns, optionally clipped.

        ½ aggregate( (V_t - R_t)² ),   with clip: ½ aggregate( max((V_t - R_t)², (V°_t + clamp(V_t - V°_t, ±c) - R_t)²))

    V° are the values that the returns were computed with. With the clip, a value gains nothing by moving further from
    V° than c. The larger error counts, so a value that errs on the other side can come back.

    Args:
        clip: c > 0, in units of the return; None: not clipped.
        aggregate: `token_mean`, `seq_mean`, ``seq_sum(L)``, or any ``(x, mask) -> Mean``.

    Returns:
        A loss, which needs the output ``values`` of a model with ``head="value"`` and reads ``returns``, ``loss_mask``
        and, if clipped, ``values``. Metrics: ``value``, the mean V; ``value_clip_fraction`` if clipped, of tokens whose
        gradient that takes away.

    Raises:
        ValueError: ``clip`` is not positive and finite.
        MissingColumn: (when called) the batch lacks a column.

    Source: PPO, https://arxiv.org/abs/1707.06347, eq. 9, which has no ½; clipped: no equation of that paper, but its
    code, https://github.com/openai/baselines (``ppo2/model.py``), with the same ½ and max, as in verl and TRL.
    https://arxiv.org/abs/2005.12729 describes that code and writes min in place of max.

    >>> batch = Batch({"loss_mask": torch.tensor([[False, True]]), "returns": torch.tensor([[9.0, 3.0]])}, [1])
    >>> out = TensorDict({"values": torch.tensor([[0.0, 1.0]])}, batch_size=[1])
    >>> value_loss()(out, batch)[0].total.item()
    2.0
    >>> batch = Batch({**batch, "values": torch.tensor([[0.0, 0.0]])}, [1])
    >>> value_loss(clip=0.5)(out, batch)[0].total.item()  # half of (0 + 0.5 - 3)²
    3.125
    """
    if clip is not None:
        positive("value_loss", "clip", clip)

    @needs("values")
    def value_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
        require(batch, "returns", "loss_mask", reader="value_loss")
        mask, returns = batch["loss_mask"], masked_column(batch, "returns", reader="value_loss")
        values = masked(out["values"], mask)
        error = (values - returns).square()
        metrics: Metrics = {"value": token_mean(values.detach(), mask)}
        if clip is not None:
            old = masked_column(batch, "values", reader="value_loss")
            near = (old + (values - old).clamp(-clip, clip) - returns).square()
            stuck = ((values - old).abs() > clip) & (near > error)
            error = torch.maximum(error, near)
            metrics["value_clip_fraction"] = token_mean(stuck.to(error.dtype), mask)
        return aggregate_tokens(aggregate, error / 2, batch), metrics

    return named("value_loss", "The values of a critic; see `nrl.algos.value_loss`.", value_loss)


def explained_variance(batch: Batch) -> Mean:
    """The share of the returns' variance over the whole batch that the values explain; for the driver.

        1 - Var(R - V) / Var(R)

    1 means all of it; 0, as much as a constant explains; a negative number, less than that.

    Args:
        batch: has ``values``, ``returns`` and ``loss_mask``, ``[*B, T]`` each.

    Returns:
        A metric of weight 1, or of weight 0 where all returns are equal and there is nothing to explain.

    Raises:
        MissingColumn: the batch lacks a column.

    Source: as in OpenAI Baselines, for https://arxiv.org/abs/1707.06347.

    >>> columns = {"values": torch.tensor([[0.0, 0.5, 9.0]]), "returns": torch.tensor([[0.0, 1.0, 0.0]])}
    >>> explained_variance(Batch({**columns, "loss_mask": torch.tensor([[True, True, False]])}, [1])).total.item()
    0.75
    """
    require(batch, "values", "returns", "loss_mask", reader="explained_variance")
    mask = batch["loss_mask"]
    returns, values = batch["returns"].detach()[mask].double(), batch["values"].detach()[mask].double()
    if len(returns) < 2 or bool((returns == returns[0]).all()):
        return Mean(torch.zeros(()), torch.zeros(()))
    unexplained = (returns - values).var(correction=0) / returns.var(correction=0)
    return Mean((1 - unexplained).float(), torch.ones(()))
