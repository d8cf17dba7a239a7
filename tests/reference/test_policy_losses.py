"""Every ready-made policy loss against a loop over plain numbers, written from its paper.

A loop gets theta twice: to differentiate, and as the constant that a stop-gradient makes of it. Its gradient is taken
by differences.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from tensordict import TensorDict

from nrl.algos import (
    MeanLoss,
    cispo_loss,
    clip,
    dapo_loss,
    decoupled_ppo_loss,
    dppo,
    dppo_loss,
    dr_grpo_loss,
    gmpo_loss,
    grpo_loss,
    gspo_loss,
    icepop,
    importance_mask,
    importance_weighted,
    k3,
    kl,
    opsm,
    policy_loss,
    reinforce_loss,
    rollout_ratio,
    sapo_loss,
    sequence_mask,
    sequence_truncate,
    times,
    truncate,
    vespo_loss,
)
from nrl.algos.divergences import binary_kl
from nrl.batch import Batch


class Token(NamedTuple):
    theta: float
    fixed: float
    """Theta, without a gradient."""
    old: float
    rollout: float
    ref: float
    advantage: float

    @property
    def ratio(self) -> float:
        return math.exp(self.theta - self.old)

    @property
    def constant(self) -> float:
        return math.exp(self.fixed - self.old)

    @property
    def mismatch(self) -> float:
        return math.exp(self.old - self.rollout)


type Row = list[Token]
type Loop = Callable[[list[Row]], float]


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def over_tokens(objective: Callable[[Token], float]) -> Loop:
    return lambda rows: -sum(objective(t) for row in rows for t in row) / sum(map(len, rows))


def over_rows(objective: Callable[[Token], float]) -> Loop:
    return lambda rows: -mean([mean([objective(t) for t in row]) for row in rows])


def grpo(rows: list[Row]) -> float:
    """2402.03300, eq. 3."""
    return -mean([mean([clipped(t.ratio, t.advantage, 0.2, 0.2) for t in row]) for row in rows])


def dapo(rows: list[Row]) -> float:
    """2503.14476, eq. 8."""
    return -sum(clipped(t.ratio, t.advantage, 0.2, 0.28) for row in rows for t in row) / sum(map(len, rows))


def dr_grpo(rows: list[Row]) -> float:
    """2503.20783, section 3.2, with a constant of 7 in place of |o|."""
    return -mean([sum(clipped(t.ratio, t.advantage, 0.2, 0.2) for t in row) / 7 for row in rows])


def gspo(rows: list[Row]) -> float:
    """2507.18071, eq. 5 and 7."""
    objectives = []
    for row in rows:
        s = math.exp(mean([t.theta - t.old for t in row]))
        objectives.append(mean([clipped(s, t.advantage, 3e-4, 4e-4) for t in row]))
    return -mean(objectives)


def cispo(rows: list[Row]) -> float:
    """2506.13585, eq. 4 and 5; the weight has no gradient."""
    return over_tokens(lambda t: min(t.constant, 5.0) * t.advantage * t.theta)(rows)


def reinforce(rows: list[Row]) -> float:
    """2402.14740, eq. 6: the log-probability of a whole row."""
    return -mean([sum(t.advantage * t.theta for t in row) for row in rows])


def gmpo(rows: list[Row]) -> float:
    """2507.20673, eq. 4, as a product."""
    objectives = []
    for row in rows:
        (advantage,) = {t.advantage for t in row}
        product = 1.0
        for t in row:
            low, high = math.exp(-0.4), math.exp(0.4)
            product *= abs(min(t.ratio * advantage, min(max(t.ratio, low), high) * advantage) / (abs(advantage) or 1))
        objectives.append(product ** (1 / len(row)) * advantage)
    return -mean(objectives)


def sapo(rows: list[Row]) -> float:
    """2511.20347, eq. 5 and 6."""

    def gate(t: Token) -> float:
        tau = 1.0 if t.advantage > 0 else 1.05
        return 4 / tau / (1 + math.exp(-tau * (t.ratio - 1)))

    return over_rows(lambda t: gate(t) * t.advantage)(rows)


def of_dppo(divergence: Callable[[float, float], float], delta: float, cap: float) -> Loop:
    """2602.04879, eq. 12 to 14 and 23."""

    def objective(t: Token) -> float:
        pi, mu = math.exp(t.fixed), math.exp(t.rollout)
        away = (t.advantage > 0 and pi > mu) or (t.advantage < 0 and pi < mu)
        if away and divergence(mu, pi) > delta:
            return 0.0
        return min(pi / mu, cap) * t.advantage * t.theta

    return over_tokens(objective)


def tv(mu: float, pi: float) -> float:
    return abs(mu - pi)


def binary(mu: float, pi: float) -> float:
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def vespo(rows: list[Row]) -> float:
    """2602.10693, eq. 17 and 20."""
    total = 0.0
    for row in rows:
        w = math.exp(sum(t.fixed - t.rollout for t in row))
        for t in row:
            a, b = (3, 2) if t.advantage < 0 else (2, 3)
            total -= w**a * math.exp(b * (1 - w)) * t.advantage * t.theta
    return total / sum(map(len, rows))


def decoupled(rows: list[Row]) -> float:
    """2110.00641: the proximal policy is old, the behaviour policy rollout."""
    return over_tokens(lambda t: t.mismatch * clipped(t.ratio, t.advantage, 0.2, 0.2))(rows)


def corrected(weight: Callable[[Token, Row], float]) -> Loop:
    def loop(rows: list[Row]) -> float:
        total = sum(weight(t, row) * clipped(t.ratio, t.advantage, 0.2, 0.2) for row in rows for t in row)
        return -total / sum(map(len, rows))

    return loop


def product(row: Row) -> float:
    return math.prod(t.mismatch for t in row)


def geometric(row: Row) -> float:
    return math.exp(mean([math.log(t.mismatch) for t in row]))


def left_behind(t: Token, row: Row) -> float:
    """2512.02556, eq. 8 and 9."""
    return 0.0 if t.advantage < 0 and mean([s.rollout - s.fixed for s in row]) > 0.1 else 1.0


def with_unbiased_kl(rows: list[Row]) -> float:
    """2512.02556, eq. 7: ratio times k3."""

    def cost(t: Token) -> float:
        x = t.ref - t.theta
        return t.ratio * (math.exp(x) - 1 - x)

    return over_tokens(lambda t: clipped(t.ratio, t.advantage, 0.2, 0.2) - 0.3 * cost(t))(rows)


def small(correction: object) -> MeanLoss:
    return policy_loss(clip(0.2), correction=correction)  # type: ignore[arg-type]


CASES: dict[str, tuple[MeanLoss, Loop]] = {
    "GRPO": (grpo_loss, grpo),
    "DAPO": (dapo_loss, dapo),
    "Dr. GRPO": (dr_grpo_loss(7), dr_grpo),
    "GSPO": (gspo_loss, gspo),
    "CISPO": (cispo_loss, cispo),
    "REINFORCE": (reinforce_loss, reinforce),
    "GMPO": (gmpo_loss, gmpo),
    "SAPO": (sapo_loss, sapo),
    "DPPO": (dppo_loss, of_dppo(tv, 0.2, math.inf)),
    "DPPO, binary KL": (
        policy_loss(dppo(0.05, divergence=binary_kl, cap=1.5), ratio=rollout_ratio),
        of_dppo(binary, 0.05, 1.5),
    ),
    "VESPO": (vespo_loss, vespo),
    "decoupled PPO": (decoupled_ppo_loss, decoupled),
    "TIS": (small(truncate(1.3)), corrected(lambda t, row: min(t.mismatch, 1.3))),
    "IcePop": (small(icepop(0.7, 1.5)), corrected(lambda t, row: t.mismatch if 0.7 <= t.mismatch <= 1.5 else 0.0)),
    "masked IS": (small(importance_mask(1.2)), corrected(lambda t, row: t.mismatch if t.mismatch <= 1.2 else 0.0)),
    "sequence TIS": (small(sequence_truncate(1.3)), corrected(lambda t, row: min(product(row), 1.3))),
    "geometric": (small(sequence_mask(0.8, 1.1)), corrected(lambda t, row: float(0.8 <= geometric(row) <= 1.1))),
    "geometric, with TIS": (
        small(times(sequence_mask(0.8, 1.1), truncate(1.3))),
        corrected(lambda t, row: min(t.mismatch, 1.3) * (0.8 <= geometric(row) <= 1.1)),
    ),
    "OPSM": (policy_loss(clip(0.2), keep=opsm(0.1)), corrected(left_behind)),
    "unbiased KL": (policy_loss(clip(0.2), penalty=importance_weighted(kl(k3, 0.3))), with_unbiased_kl),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_is_what_its_paper_says(name: str, seed: int) -> None:
    loss, loop = CASES[name]
    draw = torch.Generator().manual_seed(seed)
    width, lengths = 6, [5, 1, 3, 4, 2, 5, 3, 4]
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):  # not all in a piece, and never at the same place
        mask[row, torch.randperm(width, generator=draw)[:length]] = True

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(mask.shape, generator=draw, dtype=torch.float64)

    theta = -noise(1.0).abs() - 0.4
    columns = {name: (theta + noise(0.35)).clamp(max=-0.05) for name in ("old_logprobs", "rollout_logprobs")}
    columns["ref_logprobs"] = (theta + noise(0.35)).clamp(max=-0.05)
    signs = torch.randn(len(lengths), 1, generator=draw, dtype=torch.float64)
    columns |= {"advantages": signs.expand(mask.shape), "loss_mask": mask}
    batch = Batch(columns, batch_size=[len(lengths)])

    def rows(values: torch.Tensor) -> list[Row]:
        names = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages")
        return [
            [
                Token(*(x[i, t].item() for x in (values, theta, *(batch[n] for n in names))))
                for t in range(width)
                if mask[i, t]
            ]
            for i in range(len(lengths))
        ]

    leaf = theta.clone().requires_grad_()
    found, _ = loss(TensorDict({"logprobs": leaf}, batch_size=batch.batch_size), batch)
    value = found.total / found.weight
    assert value.item() == pytest.approx(loop(rows(theta)), rel=1e-9)
    (gradient,) = torch.autograd.grad(value, leaf)
    assert not gradient[~mask].any()
    step = 1e-6
    for i, t in mask.nonzero().tolist():
        moved = torch.zeros_like(theta)
        moved[i, t] = step
        slope = (loop(rows(theta + moved)) - loop(rows(theta - moved))) / (2 * step)
        assert gradient[i, t].item() == pytest.approx(slope, rel=1e-4, abs=1e-7)
