"""Expert load balance: a metric of how evenly routers spread tokens over experts."""

import torch
from torch import Tensor

from nrl.batch.metrics import Mean, Metrics

__all__ = ["balance"]


def balance(loads: Tensor) -> Metrics:
    """Compute the maximal violation of balance, averaged over layers.

    ``experts/max_violation`` is ``max_i load_i / mean_i load_i - 1``: 0 where all experts get as many tokens, and the
    number of experts less one where one gets all.

    Args:
        loads: ``[layers, experts]``, for how many outputs that are read the expert was one of those chosen.

    Source: Wang et al., 2024 (2408.15664), equation 4.

    >>> balance(torch.tensor([[3.0, 1.0], [2.0, 2.0]]))["experts/max_violation"].total
    tensor(0.2500)
    """
    loads = loads.float()
    mean = loads.mean(-1).clamp(min=torch.finfo(loads.dtype).tiny)  # a batch may have nothing that is read
    return {"experts/max_violation": Mean((loads.amax(-1) / mean - 1).clamp(min=0).mean(), torch.ones(()))}
