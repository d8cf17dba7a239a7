"""The vocabulary of batches: what each column is for, its shape and dtype, and whether it is heavy.

A column has one entry for each row, one for each token, or as many entries a row as that row needs (ragged). Its name
says which: it stands in `COLUMNS`, or a program declares it. A shape says nothing, because ``[B, K]`` may be K numbers
a row or one number for each of K tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict

from nrl.batch.ragged import is_ragged
from nrl.errors import ColumnError

__all__ = ["COLUMNS", "DROPPED_TOKENS", "Column", "Kind", "declare", "declaring", "get_declarations", "kind_of"]

type Kind = Literal["row", "token", "ragged"]
"""What a column has entries for: each row, each token, or whatever a row has several of."""


class Column(NamedTuple):
    """A column of the vocabulary: what it has entries for, its dtype, how to get it, its default, and its weight.

    >>> COLUMNS["advantages"].per, COLUMNS["advantages"].dtype
    ('token', torch.float32)
    """

    per: Kind
    dtype: torch.dtype | None
    """None: any."""
    hint: str
    default: bool | int | float | None = None
    """The value of an absent column; None: its absence has no meaning."""
    entry: tuple[int, int] = (0, 0)
    """How many dimensions an entry may have, from and to."""
    heavy: bool = False
    """Whether there is so much of it that a batch has a handle of what other processes have computed."""
    padding: int = 0
    """What stands where a row is padded."""


def _from_trainer(call: str, column: str) -> str:
    return f"Add it with assign(batch, {column}={call})."


_DATA = "Data and rollout write it."
COLUMNS: dict[str, Column] = {
    "input_ids": Column("token", torch.int64, _DATA),
    "attention_mask": Column("token", torch.bool, _DATA),
    "loss_mask": Column(
        "token",
        torch.bool,
        "Data and rollout write it; true for the tokens that are trained on.",
    ),
    "rollout_logprobs": Column("token", torch.float32, "rollout writes it."),
    "temperature": Column("row", torch.float32, "rollout writes it.", 1.0),
    "old_logprobs": Column(
        "token",
        torch.float32,
        "Add it with assign(batch, old_logprobs=batch['rollout_logprobs']) or, exactly, "
        "assign(batch, old_logprobs=trainer.logprobs(state.params, batch)).",
    ),
    "ref_logprobs": Column(
        "token",
        torch.float32,
        _from_trainer("trainer.logprobs(reference, batch)", "ref_logprobs"),
    ),
    "teacher_logprobs": Column(
        "token",
        torch.float32,
        _from_trainer("teacher.logprobs(params, batch)", "teacher_logprobs"),
    ),
    "entropy": Column(
        "token",
        torch.float32,
        "Add it with assign(batch, entropy=trainer.forward(state.params, batch, {'entropy'})['entropy']); in nats, "
        "of the policy that sampled.",
    ),
    "values": Column(
        "token",
        torch.float32,
        _from_trainer("critic.values(state.params, batch)", "values") + " V before each token.",
    ),
    "teacher_ids": Column(
        "token",
        torch.int64,
        _from_trainer("teacher.top_k(params, batch, k)['teacher_ids']", "teacher_ids"),
        entry=(1, 1),
        heavy=True,
    ),
    "teacher_topk_logprobs": Column(
        "token",
        torch.float32,
        _from_trainer("teacher.top_k(params, batch, k)['teacher_topk_logprobs']", "teacher_topk_logprobs"),
        entry=(1, 1),
        heavy=True,
    ),
    "media": Column("ragged", None, "Data writes it, for inputs that are not tokens."),
    "info": Column("ragged", None, "rollout writes it, where the environment reports numbers."),
    "components": Column("ragged", None, "rollout writes it, where rewards are made of named components."),
    "rewards": Column("row", torch.float32, "The environment writes it, in rollout.", entry=(0, 1)),
    "token_rewards": Column(
        "token", torch.float32, "rollout writes it, and nrl.algos.token_rewards(batch, penalty) adds what is missing."
    ),
    "advantages": Column("token", torch.float32, "Add it with nrl.algos.advantages(batch)."),
    "returns": Column("token", torch.float32, "Add it with nrl.algos.gae."),
    "group_ids": Column(
        "row",
        torch.int64,
        "rollout writes it; rows that answer one prompt share a number.",
    ),
    "episode_ids": Column(
        "row",
        torch.int64,
        "Add it with assign(batch, episode_ids=...) where several rows are one episode; absent, every row is one.",
    ),
    "episode_shares": Column(
        "row",
        torch.float32,
        "A training step computes it, where an episode has several rows; for parts of a batch that you make, "
        "assign(batch, episode_shares=nrl.algos.episode_shares(batch)).",
        1.0,
    ),
    "version": Column("row", torch.int64, "rollout writes it."),
    "versions": Column(
        "token",
        torch.int64,
        "rollout writes it, where weights may change in an episode; -1 where not sampled.",
        padding=-1,
    ),
    "turns": Column(
        "token",
        torch.int16,
        "rollout writes it; in which turn of the policy a token was sampled, from 0, else -1.",
        padding=-1,
    ),
    "routes": Column(
        "token",
        torch.int16,
        "rollout writes it, with a sampler(..., routes=True): [*B, T, layers, k], of the layers that have a router, in "
        "order; -1 where a token has no route.",
        entry=(2, 2),
        heavy=True,
        padding=-1,
    ),
    "asked_again": Column("row", torch.int64, "rollout writes it, with a sampler that streams.", 0),
    "valid": Column("row", torch.bool, "rollout writes it.", True),
    "status": Column("row", torch.int64, "rollout writes it; its name is nrl.envs.STATUSES[status].", 0),
    "forked": Column(
        "row",
        torch.int64,
        "rollout writes it; why a later row of an episode began: nrl.rollout.bridges.FORKS[forked].",
        0,
    ),
    "cut": Column("row", torch.bool, "cut writes it; true for episodes that were ended early.", False),
    "left_out": Column("row", torch.int64, "oversample writes it.", 0),
    "truncated": Column("row", torch.bool, "rollout writes it.", False),
    "reasoning_ended": Column(
        "row", torch.bool, "rollout writes it; false where the last turn's reasoning was not closed.", True
    ),
    "source": Column("row", torch.int64, "Data writes it where task sources are mixed.", 0),
    "sampled": Column("row", torch.int64, "rollout writes it; how many tokens were sampled for a row."),
    "dropped": Column("row", torch.int64, "drop_uniform and fresh write it.", 0),
    "dropped_invalid": Column("row", torch.int64, "drop_uniform and fresh write it.", 0),
    "dropped_tokens/uniform": Column("row", torch.int64, "drop_uniform writes it.", 0),
    "dropped_tokens/filtered": Column("row", torch.int64, "filtered writes it.", 0),
    "dropped_tokens/stale": Column("row", torch.int64, "fresh writes it.", 0),
    "dropped_tokens/left_out": Column("row", torch.int64, "oversample writes it.", 0),
    "dropped_cut": Column("row", torch.int64, "drop_uniform and fresh write it, of a stream that is cut.", 0),
    "dropped_rewards": Column("row", torch.float32, "drop_uniform and fresh write it.", 0.0),
    "desirable": Column("row", torch.bool, "data.labelled writes it."),
    "reference_point": Column(
        "row",
        torch.float32,
        "Add it with assign(batch, reference_point=nrl.algos.reference_point(...).expand(len(batch))).",
    ),
    "margin": Column("row", torch.float32, "Preference data writes it; that of a pair is its chosen row's.", 0.0),
    "weights": Column("row", torch.float32, "Add it with assign(batch, weights=...); how much a row counts."),
}
"""The vocabulary of columns. ``float32`` columns may be ``float64``, which is what the laws are tested in.

>>> sorted(COLUMNS)[:3]
['advantages', 'attention_mask', 'desirable']
"""

DROPPED_TOKENS = {name.partition("/")[2]: name for name in COLUMNS if name.startswith("dropped_tokens/")}
"""The columns of tokens that were dropped, by the reason."""

_DECLARED: dict[str, Kind] = {}


def declare(**kinds: Kind) -> None:
    """Say what columns of your own have entries for; needed where a shape could mean two things.

    A column that nobody declares is per row. If it has the shape of one that is per token, ``[*B, T, ...]``, functions
    that would have to know raise. A declaration holds in this program and in the processes that it calls.

    Args:
        **kinds: ``"row"``, ``"token"`` (shape ``[*B, T, ...]``; cut and padded with the tokens) or ``"ragged"`` (a
            jagged nested tensor ``[B, j, ...]``, or a nested batch of them), by the names of the columns.

    Raises:
        ColumnError: nrl knows the column, or it has been declared to be something else.

    >>> declare(sentence_scores="row", token_scores="token")
    """
    for name, kind in kinds.items():
        if kind not in ("row", "token", "ragged"):
            raise ColumnError(f"declare: '{name}' is declared as {kind!r}; a column is 'row', 'token' or 'ragged'")
        declared_kind = COLUMNS[name].per if name in COLUMNS else _DECLARED.get(name, kind)
        if declared_kind != kind:
            raise ColumnError(
                f"declare: the column '{name}' is '{declared_kind}' already, and cannot be '{kind}'; take another name"
            )
    _DECLARED.update({name: kind for name, kind in kinds.items() if name not in COLUMNS})


def get_declarations() -> dict[str, Kind]:
    """Return the declarations of this program."""
    return dict(_DECLARED)


def declaring(kinds: Mapping[str, Kind], fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function under the declarations of another program."""
    declare(**kinds)
    return fn(*args)


def kind_of(name: str, value: Any, dim: int, width: int | None, caller: str) -> Kind:
    """Return the kind of entries that a column has.

    Args:
        name: of the column.
        value: the column.
        dim: the number of dimensions of the batch size.
        width: width of the batch in tokens; None: no column is per token.
        caller: how errors name the caller.

    Raises:
        ColumnError: neither nrl nor the program says so, and the shape allows two.
    """
    if name in COLUMNS:
        return COLUMNS[name].per
    if name in _DECLARED:
        return _DECLARED[name]
    if is_ragged(value):
        return "ragged"
    if isinstance(value, TensorDict) or width is None or value.ndim <= dim or value.shape[dim] != width:
        return "row"
    raise ColumnError(
        f"{caller}: column '{name}' has shape {list(value.shape)}, and the batch is {width} tokens wide, so it may "
        f"hold an entry for each token or {width} numbers for each row; say which, once in your program: "
        f"nrl.declare({name}='token') or nrl.declare({name}='row')"
    )
