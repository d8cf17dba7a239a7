import functools
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nrl.algos import (
    Loss,
    add,
    logprobs_at,
    named,
    needed,
    needs,
    output_shape,
    policy_loss,
    preference_loss,
    reinforce,
    sft_loss,
    token_mean,
)
from nrl.batch import Batch
from nrl.batch.metrics import Mean, Metrics, Sum, finalize
from nrl.errors import MissingColumn

MASK = torch.tensor([[False, True, True], [False, True, False]])
BATCH = Batch({"loss_mask": MASK}, batch_size=[2])
OUT = TensorDict({"logprobs": torch.tensor([[0.0, -1.0, -2.0], [0.0, -4.0, 0.0]])}, batch_size=[2])


@needs("entropy")
def entropy_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    return token_mean(-out["logprobs"], batch["loss_mask"]), {}


def rows_loss(out: TensorDict, batch: Batch) -> tuple[Mean, Metrics]:
    rows = Mean(out["logprobs"].sum(), torch.tensor(float(len(batch))))
    return rows, {"rows": Sum(torch.tensor(len(batch)))}


def terms(loss: Loss) -> tuple[dict[str, tuple[float, float]], Metrics]:
    found, metrics = loss(OUT, BATCH)
    assert isinstance(found, dict)
    return {key: (mean.total.item(), mean.weight.item()) for key, mean in found.items()}, metrics


def test_each_term_keeps_its_own_weight() -> None:
    found, metrics = terms(add((1.0, sft_loss), (0.5, rows_loss), (-2.0, entropy_loss)))
    assert found == {"sft_loss": (7.0, 3.0), "rows_loss": (-3.5, 2.0), "entropy_loss": (-14.0, 3.0)}
    assert finalize(metrics) == {"rows": 2.0}


def test_equal_names_are_told_apart() -> None:
    found, metrics = terms(add((1.0, rows_loss), (2.0, rows_loss), (3.0, rows_loss)))
    assert found == {"rows_loss": (-7.0, 2.0), "rows_loss_2": (-14.0, 2.0), "rows_loss_3": (-21.0, 2.0)}
    assert list(metrics) == ["rows", "rows_2", "rows_3"]


def test_nested_terms_are_flattened() -> None:
    inner = add((2.0, sft_loss), (1.0, rows_loss))
    found, metrics = terms(add((1.0, rows_loss), (0.5, inner)))
    assert found == {"rows_loss": (-7.0, 2.0), "sft_loss": (7.0, 3.0), "rows_loss_2": (-3.5, 2.0)}
    assert list(metrics) == ["rows", "rows_2"]


def test_a_term_that_is_called_like_a_suffix_is_not_lost() -> None:
    other = named("rows_loss_2", "", functools.wraps(rows_loss)(lambda out, batch: rows_loss(out, batch)))
    found, _ = terms(add((1.0, other), (2.0, rows_loss), (3.0, rows_loss)))
    assert list(found) == ["rows_loss_2", "rows_loss", "rows_loss_3"]


def test_a_sum_is_named_by_its_terms() -> None:
    assert getattr(add((1.0, sft_loss), (0.1, entropy_loss)), "__name__", "") == "add(sft_loss, entropy_loss)"


def test_errors_of_add() -> None:
    with pytest.raises(ValueError, match="add: there are no terms"):
        add()
    with pytest.raises(TypeError, match=r"add: term 2 is <function .* give a pair \(coefficient, loss\)"):
        add((1.0, sft_loss), sft_loss)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="add: term 1 is"):
        add((sft_loss, 1.0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the coefficient of term 1 is nan"):
        add((math.nan, sft_loss))


def test_needs_add_up() -> None:
    def plain(*args: Any) -> Any: ...

    assert needed(plain) == needed(None) == needed() == frozenset()
    stacked = needs("values")(needs("entropy")(plain))
    assert stacked is plain
    assert stacked.needs == needed(plain) == {"entropy", "values"}  # type: ignore[attr-defined]
    assert needed(functools.partial(plain, 1)) == {"entropy", "values"}
    assert needed(sft_loss, None, entropy_loss) == {"entropy"}


def test_needs_wants_names() -> None:
    with pytest.raises(TypeError, match=r"@needs\('entropy'\)"):
        needs(sft_loss)  # type: ignore[arg-type]


def test_compositions_need_what_their_parts_need() -> None:
    def part(name: str) -> Any:
        return needs(name)(lambda *args: args[0])

    loss = policy_loss(part("a"), ratio=part("b"), penalty=part("c"), correction=part("d"), aggregate=part("e"))
    assert needed(loss) == {"a", "b", "c", "d", "e"}
    assert needed(policy_loss(reinforce)) == frozenset()
    assert needed(preference_loss(part("a"), part("b"))) == {"a", "b"}
    assert needed(add((1.0, loss), (1.0, add((1.0, entropy_loss))))) == {"a", "b", "c", "d", "e", "entropy"}


def test_outputs_have_the_shapes_that_they_say() -> None:
    ids = torch.ones(2, 2, 5, dtype=torch.int64)
    batch = Batch({"input_ids": ids, "teacher_ids": torch.ones(2, 2, 5, 3, dtype=torch.int64)}, batch_size=[2, 2])
    assert output_shape("entropy", batch) == (2, 2, 5)
    assert output_shape("rewards", batch) == (2, 2)
    assert output_shape(logprobs_at("teacher_ids"), batch) == (2, 2, 5, 3)
    with pytest.raises(MissingColumn, match=r"logprobs_at\(others\) reads the column 'others'"):
        output_shape(logprobs_at("others"), batch)
