"""Log-probabilities under top-k and top-p."""

import warnings

from nrl.backends.base import Sampling

__all__ = ["truncates", "warn_of_truncation"]


def truncates(sampling: Sampling, vocabulary: int) -> bool:
    """Whether top-k or top-p leave out any of so many tokens.

    >>> truncates(Sampling(top_k=9), 8), truncates(Sampling(top_k=7), 8)
    (False, True)
    """
    return 0 < sampling.top_k < vocabulary or sampling.top_p < 1


def warn_of_truncation(who: str, sampling: Sampling, vocabulary: int, stacklevel: int = 3) -> bool:
    """Warn if log-probabilities of what is sampled are not to be compared with a trainer's; whether it did.

    >>> warn_of_truncation("hf.sampler", Sampling(temperature=0.7), 8)
    False
    """
    if not truncates(sampling, vocabulary) or sampling.temperature == 0:
        return False
    warnings.warn(
        f"{who}: with top_k={sampling.top_k}, top_p={sampling.top_p} the rollout_logprobs are those of the "
        "truncated distribution q, renormalised over the kept tokens. A trainer's p is over all tokens, so E[p/q] "
        "is the kept mass and not 1, and ratios to rollout_logprobs are biased. To train on these rollouts sample "
        "with top_k=0 and top_p=1, or take old_logprobs from trainer.logprobs",
        UserWarning,
        stacklevel=stacklevel,
    )
    return True
