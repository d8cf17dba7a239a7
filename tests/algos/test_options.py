"""Every option of every public function in `nrl.algos` changes what it returns, or a loss's gradient: none is idle.

The table has to name them all, so that a new one fails here until somebody shows what it does.
"""

import importlib.util
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

import nrl
from nrl import algos
from nrl.algos import logprobs_at, policy_loss, preference_loss
from nrl.batch import Batch

DATA = {
    "advantages", "answers", "batch", "group_ids", "log_ratio", "logprobs", "mask", "other_logprobs", "out", "passed",
    "policy_logprobs", "ref_logprobs", "rewards", "student", "teacher", "values", "x",
}  # fmt: skip
"""Arguments that are no options."""

ELSEWHERE = {
    "by_episode",
    "from_logits",
    "masked",
    "masked_column",
    "name_of",
    "named",
    "needed",
    "needs",
    "ids_column",
    "logprobs_at",
    "output_kind",
    "output_shape",
    "sampled_logprobs",
}
"""What has no numbers: how losses are described, and how a batch is read."""

WORDS, K = 9, 3


def columns() -> dict[str, Tensor]:
    """Rows in groups of 4, of uneven lengths, none of them like another."""
    draw = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    rows, width = 16, 7
    lengths = torch.randint(2, width + 1, (rows, 1), generator=draw)
    mask = (torch.arange(width) < lengths) & (torch.arange(width) > 0)
    old = -noise(rows, width).abs() - 0.05
    words = noise(rows, width, WORDS).log_softmax(-1)
    known, ids = words.topk(K)
    found = {
        "input_ids": torch.randint(0, WORDS, (rows, width), generator=draw),
        "attention_mask": torch.arange(width) < lengths,
        "loss_mask": mask,
        "old_logprobs": old,
        "rollout_logprobs": (old + 0.5 * noise(rows, width)).clamp(max=-0.01),
        "ref_logprobs": (old + 0.5 * noise(rows, width)).clamp(max=-0.01),
        "teacher_logprobs": (old + 0.5 * noise(rows, width)).clamp(max=-0.01),
        "teacher_ids": ids,
        "teacher_topk_logprobs": known,
        "advantages": noise(rows, 1).expand(rows, width),
        "entropy": noise(rows, width).abs(),
        "token_rewards": noise(rows, width),
        "rewards": noise(rows).abs().round(decimals=1),
        "group_ids": torch.arange(rows) // 4,
        "truncated": torch.arange(rows) % 3 == 0,
        "temperature": (torch.arange(rows) % 4 != 0).double(),
        "desirable": torch.arange(rows) % 3 > 0,
        "reference_point": torch.full((rows,), 0.1, dtype=torch.float64),
        "weights": noise(rows).abs(),
        "margin": noise(rows).abs(),
        "values": noise(rows, width),
        "returns": noise(rows, width),
    }
    return found


ROWS = nrl.assign(Batch({}, batch_size=[16]), **columns())
PAIRS = nrl.assign(
    Batch({}, batch_size=[8, 2]),
    **{name: x.unflatten(0, (8, 2)) for name, x in columns().items() if name not in ("group_ids", "rewards")},
)
TWO_REWARDS = nrl.assign(ROWS, rewards=torch.stack([ROWS["rewards"], ROWS["rewards"].flip(0) ** 2], -1))


# -- what a function does, as numbers ---------------------------------------------------------------------------------


def of_loss(loss: Any, batch: Batch = ROWS) -> list[Tensor]:
    """Gradients by all outputs."""
    draw = torch.Generator().manual_seed(1)
    noise = torch.randn(batch["old_logprobs"].shape, generator=draw, dtype=torch.float64)
    student = torch.randn(*batch["teacher_ids"].shape[:-1], WORDS, generator=draw, dtype=torch.float64).log_softmax(-1)
    leaves = {
        "logprobs": (batch["old_logprobs"] + 0.4 * noise).clamp(max=-0.01),
        "entropy": batch["entropy"] + 0.1,
        "rewards": noise[..., 0],
        "values": noise,
        logprobs_at("teacher_ids"): student.gather(-1, batch["teacher_ids"]),
    }
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    terms, _ = loss(TensorDict(dict(leaves), batch_size=batch.batch_size), batch)
    means = list(terms.values()) if isinstance(terms, dict) else [terms]
    total = sum(mean.total / mean.weight for mean in means)
    assert isinstance(total, Tensor)
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    assert any(x is not None and bool(x.any()) for x in gradients)
    return [torch.zeros(()) if x is None else x for x in gradients]


def of_pairs(loss: Any) -> list[Tensor]:
    return of_loss(loss, PAIRS)


def of_surrogate(part: Any) -> list[Tensor]:
    return of_loss(policy_loss(part))


def of_ratio(part: Any) -> list[Tensor]:
    return of_loss(policy_loss(algos.clip(math.inf), ratio=part))


def of_penalty(part: Any) -> list[Tensor]:
    return of_loss(policy_loss(algos.clip(0.2), penalty=part))


def of_correction(part: Any) -> list[Tensor]:
    return of_loss(policy_loss(algos.clip(0.2), correction=part))


def of_selection(part: Any) -> list[Tensor]:
    return of_loss(policy_loss(algos.clip(0.2), keep=part))


def of_aggregate(part: Any) -> list[Tensor]:
    return of_loss(policy_loss(algos.clip(0.2), aggregate=part))


def of_distance(part: Any) -> list[Tensor]:
    return of_loss(algos.distillation_loss(part))


def of_score(part: Any) -> list[Tensor]:
    return of_pairs(preference_loss(part, lambda margin: margin.square()))


def of_link(part: Any) -> list[Tensor]:
    return of_pairs(preference_loss(lambda logprobs, batch: logprobs.sum(-1), part))


def of_group_function(part: Any) -> list[Tensor]:
    return [part(ROWS["rewards"], ROWS["group_ids"])]


def of_estimator(part: Any) -> list[Tensor]:
    return [part(ROWS)]


def of_estimator_of_two(part: Any) -> list[Tensor]:
    return [part(TWO_REWARDS)]


def of_shaping(part: Any) -> list[Tensor]:
    return of_batch(part(ROWS))


def of_controller(part: Any) -> list[Tensor]:
    return [torch.tensor([part.init(), part.update(0.3, 1.2, 128)])]


def of_numbers(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, tuple) else [torch.as_tensor(found)]


def of_batch(after: Batch) -> list[Tensor]:
    return [after[name].double() for name in sorted(after.keys()) if isinstance(after[name], Tensor)]


# -- the table --------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """How to call a function, and for each option something else."""

    of: Callable[[Any], list[Tensor]]
    base: Mapping[str, Any]
    other: Mapping[str, Any]
    positional: tuple[Any, ...] = ()


CENTER, NORMALIZE = algos.from_rewards(algos.group_center), algos.from_rewards(algos.group_normalize)
CLIP, KL = algos.clip(0.2), algos.kl(algos.k2, 0.3)

CASES: dict[str, Case] = {
    # losses of policies
    "policy_loss": Case(
        of_loss,
        {"surrogate": CLIP},
        {
            "surrogate": algos.cispo(0.2),
            "ratio": algos.sequence_ratio,
            "penalty": KL,
            "correction": algos.truncate(1.0),
            "keep": algos.opsm(0.01),
            "aggregate": algos.seq_mean,
        },
    ),
    "dr_grpo_loss": Case(of_loss, {"norm": 5}, {"norm": 6}),
    "clip": Case(of_surrogate, {"low": 0.2}, {"low": 0.1, "high": 0.4, "dual": 1.1}),
    "cispo": Case(of_surrogate, {"high": 0.2}, {"high": 0.3, "low": 0.1}),
    "sapo": Case(of_surrogate, {}, {"positive": 2.0, "negative": 2.0}),
    "dppo": Case(of_surrogate, {"low": 0.05}, {"low": 0.1, "high": 0.2, "divergence": algos.binary_kl, "cap": 1.1}),
    "vespo": Case(of_surrogate, {}, {"positive": (1.0, 1.0), "negative": (1.0, 1.0)}),
    "geometric_ratio": Case(of_ratio, {"low": 0.2}, {"low": 0.1, "high": 0.1}),
    "product_ratio": Case(of_ratio, {"ratio": algos.token_ratio}, {"ratio": algos.rollout_ratio}),
    "truncate": Case(of_correction, {"c": 1.1}, {"c": 1.2}),
    "icepop": Case(of_correction, {"low": 0.7, "high": 1.3}, {"low": 0.9, "high": 1.1}),
    "importance_mask": Case(of_correction, {"c": 1.1}, {"c": 1.5}),
    "sequence_truncate": Case(of_correction, {"c": 1.1}, {"c": 1.2}),
    "sequence_mask": Case(of_correction, {"low": 0.8, "high": 1.2}, {"low": 0.99, "high": 1.01}),
    "opsm": Case(of_selection, {"delta": 0.01}, {"delta": 10.0}),
    "kl": Case(of_penalty, {"estimator": algos.k2, "coef": 0.1}, {"estimator": algos.k3, "coef": 0.2}),
    "importance_weighted": Case(
        of_penalty, {"penalty": KL}, {"penalty": algos.kl(algos.k3, 0.3), "ratio": algos.on_policy_ratio}
    ),
    "adaptive_kl": Case(
        of_controller, {"init": 0.1, "target": 1.0, "horizon": 1000}, {"init": 0.2, "target": 1.1, "horizon": 2000}
    ),
    "seq_mean": Case(of_numbers, {}, {"shares": torch.arange(16) / 16}, (ROWS["token_rewards"], ROWS["loss_mask"])),
    "seq_sum": Case(of_aggregate, {"norm": 5}, {"norm": 6}),
    # distillation
    "jsd": Case(of_distance, {"beta": 0.5}, {"beta": 0.4}),
    "distillation_loss": Case(of_loss, {}, {"distance": algos.jsd(0.5), "aggregate": algos.seq_mean}),
    # preferences
    "preference_loss": Case(
        of_pairs,
        {"score": lambda logprobs, batch: logprobs.sum(-1), "link": lambda margin: margin.square()},
        {"score": lambda logprobs, batch: logprobs.sum(-1) * 2, "link": lambda margin: -margin},
    ),
    "dpo_loss": Case(of_pairs, {"beta": 0.1}, {"beta": 0.2}),
    "simpo_loss": Case(of_pairs, {"beta": 2.0, "gamma": 0.5}, {"beta": 2.1, "gamma": 0.6}),
    "length_normalized_dpo_loss": Case(of_pairs, {"beta": 2.0}, {"beta": 2.1}),
    "cdpo_loss": Case(of_pairs, {"beta": 0.1, "smoothing": 0.1}, {"beta": 0.2, "smoothing": 0.2}),
    "robust_dpo_loss": Case(of_pairs, {"beta": 0.1, "smoothing": 0.1}, {"beta": 0.2, "smoothing": 0.2}),
    "ipo_loss": Case(of_pairs, {"beta": 0.1}, {"beta": 0.2}),
    "length_normalized_ipo_loss": Case(of_pairs, {"beta": 0.1}, {"beta": 0.2}),
    "hinge_loss": Case(of_pairs, {"beta": 0.1}, {"beta": 0.2}),
    "cpo_loss": Case(of_pairs, {"beta": 0.1}, {"beta": 0.2, "alpha": 0.5, "aggregate": algos.seq_mean}),
    "orpo_loss": Case(of_pairs, {"coef": 0.1}, {"coef": 0.2, "aggregate": algos.token_mean}),
    "rpo_loss": Case(of_pairs, {"beta": 0.1}, {"beta": 0.2, "alpha": 0.5, "aggregate": algos.token_mean}),
    "chosen_nll": Case(of_pairs, {}, {"aggregate": algos.seq_mean}),
    "implicit_reward": Case(of_score, {"beta": 0.1}, {"beta": 0.2}),
    "mean_implicit_reward": Case(of_score, {"beta": 0.1}, {"beta": 0.2}),
    "log_likelihood": Case(of_score, {"beta": 0.1}, {"beta": 0.2}),
    "mean_log_likelihood": Case(of_score, {"beta": 0.1}, {"beta": 0.2}),
    "log_sigmoid": Case(of_link, {}, {"margin": 1.0, "smoothing": 0.1}),
    "robust_log_sigmoid": Case(of_link, {"smoothing": 0.1}, {"smoothing": 0.2}),
    "squared": Case(of_link, {"target": 1.0}, {"target": 2.0}),
    "hinge": Case(of_link, {}, {"margin": 2.0}),
    "bradley_terry_loss": Case(of_pairs, {"centering": 0.1}, {"centering": 0.2}),
    "kto_loss": Case(of_loss, {"beta": 0.1}, {"beta": 0.2, "desirable": 2.0, "undesirable": 2.0}),
    # advantages
    "advantages": Case(of_batch, {}, {"estimator": CENTER}, (ROWS,)),
    "from_rewards": Case(of_estimator, {"fn": algos.group_center}, {"fn": algos.group_normalize}),
    "from_token_rewards": Case(of_estimator, {}, {"gamma": 0.9}),
    "whitened": Case(of_estimator, {"estimator": CENTER}, {"estimator": NORMALIZE}),
    "per_group": Case(of_group_function, {"fn": lambda x: x - x.mean()}, {"fn": lambda x: x - x.max()}),
    "gdpo": Case(of_estimator_of_two, {}, {"weights": (1.0, 3.0)}),
    "gae": Case(
        of_numbers,
        {"gamma": 1.0, "lam": 1.0},
        {"gamma": 0.9, "lam": 0.9},
        (ROWS["token_rewards"], ROWS["values"], ROWS["loss_mask"]),
    ),
    "episode_gae": Case(of_numbers, {"gamma": 1.0, "lam": 1.0}, {"gamma": 0.9, "lam": 0.9}, (ROWS,)),
    "discounted_returns": Case(of_numbers, {"gamma": 1.0}, {"gamma": 0.9}, (ROWS["token_rewards"], ROWS["loss_mask"])),
    "token_rewards": Case(of_batch, {}, {"penalty": KL}, (ROWS,)),
    "penalized_rewards": Case(of_batch, {"penalty": KL}, {"penalty": algos.kl(algos.k1, 0.1)}, (ROWS,)),
    # measures
    "pass_at_k": Case(of_numbers, {"k": 1}, {"k": 2}, (ROWS["rewards"] > ROWS["rewards"].median(), ROWS["group_ids"])),
    # shaping
    "scale_rewards": Case(of_shaping, {"factor": 2.0}, {"factor": 3.0, "offset": 1.0}),
    "clip_rewards": Case(of_shaping, {"low": 0.2, "high": 0.8}, {"low": 0.5, "high": 0.6}),
    "overlong_penalty": Case(of_shaping, {"limit": 5, "buffer": 3}, {"limit": 6, "buffer": 2}),
    "stop_properly": Case(of_shaping, {"coef": 0.5}, {"coef": 0.4}),
    "value_loss": Case(of_loss, {}, {"clip": 0.1, "aggregate": algos.seq_mean}),
    "length_penalty": Case(of_shaping, {"weight": 1.0}, {"weight": 0.5, "threshold": 0.5}),
    "top_entropy": Case(of_shaping, {"fraction": 0.2}, {"fraction": 0.5}),
    "keep_at_least": Case(of_shaping, {"threshold": 0.2}, {"threshold": 0.9}),
}
SEVERAL: dict[str, tuple[Callable[[Any], list[Tensor]], tuple[Any, ...], tuple[Any, ...]]] = {
    "add": (of_loss, ((1.0, algos.grpo_loss),), ((1.0, algos.grpo_loss), (0.1, algos.entropy_loss))),
    "times": (of_correction, (algos.truncate(1.1),), (algos.truncate(1.1), algos.sequence_mask(0.9, 1.1))),
    "weighted_sum": (of_estimator, ((1.0, CENTER),), ((1.0, CENTER), (0.5, NORMALIZE))),
}
"""Functions that take as many as there are."""

TESTED = {"check_mismatch"}
"""Whose options decide whether they raise, which their own tests show."""


def options() -> Iterator[tuple[str, str]]:
    """All of them, found by looking."""
    for name in algos.__all__:
        value = getattr(algos, name)
        if not inspect.isfunction(value) or name in ELSEWHERE | TESTED:
            continue
        for parameter in inspect.signature(value).parameters.values():
            if parameter.name not in DATA:
                yield name, "*" if parameter.kind is parameter.VAR_POSITIONAL else parameter.name


def differs(a: list[Tensor], b: list[Tensor]) -> bool:
    return any(x.shape != y.shape or not torch.allclose(x, y, rtol=1e-6, atol=1e-9) for x, y in zip(a, b, strict=False))


@pytest.mark.parametrize(("name", "option"), list(options()))
def test_an_option_changes_something(name: str, option: str) -> None:
    function = getattr(algos, name)
    if option == "*":
        of, one, other = SEVERAL[name]
        assert differs(of(function(*one)), of(function(*other)))
        return
    assert name in CASES, f"say in CASES how {name} is called"
    case = CASES[name]
    assert option in case.other, f"say in CASES what else '{option}' of {name} could be"
    base = case.of(function(*case.positional, **case.base))
    again = case.of(function(*case.positional, **case.base))
    changed = case.of(function(*case.positional, **{**case.base, option: case.other[option]}))
    assert not differs(base, again)
    assert differs(base, changed)


def test_the_table_names_nothing_else() -> None:
    found = set(options())
    assert {(name, option) for name, case in CASES.items() for option in case.other} <= found
    assert {name for name, option in found if option == "*"} == SEVERAL.keys()


def test_an_inert_option_would_be_found() -> None:
    def inert(strength: float) -> Any:
        return CLIP

    assert not differs(of_surrogate(inert(1.0)), of_surrogate(inert(2.0)))


# -- what the documentation composes ----------------------------------------------------------------------------------


def recipes() -> dict[str, tuple[str, str, str]]:
    path = Path(__file__).parents[2] / "docs" / "make_losses.py"
    spec = importlib.util.spec_from_file_location("make_losses", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, tuple[str, str, str]] = module.RECIPES
    return found


@pytest.mark.parametrize("method", recipes())
def test_a_recipe_of_the_documentation_has_a_gradient(method: str) -> None:
    texts = recipes()[method][:2]
    estimator, loss = (eval(text, vars(algos)) if text else None for text in texts)
    batch = TWO_REWARDS if method == "GDPO" else ROWS
    batch = nrl.assign(batch, rollout_logprobs=1.0001 * batch["old_logprobs"])  # a sampler that computes well
    if estimator:
        batch = nrl.assign(batch, rewards=(batch["rewards"] > 0.5).double()) if method == "MaxRL" else batch
        batch = algos.advantages(batch, estimator)
        assert bool(batch["advantages"].any())
        assert not bool(batch["advantages"][~batch["loss_mask"]].any())
    assert all(bool(x.isfinite().all()) for x in of_loss(loss, batch))
