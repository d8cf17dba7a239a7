"""A reward model as a verifier: `scored_by` of params that there are, `reward_model` of a folder."""

import asyncio
import copy
import math
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import attrs
import torch

from nrl.arguments import checked, with_article
from nrl.backends import Model, Params, adamw, fsdp
from nrl.backends.models.loading import load_config, load_tokenizer
from nrl.backends.models.positions import count_positions
from nrl.batch import Batch, assign, concatenate
from nrl.data import supervised
from nrl.envs import Task, Trace
from nrl.errors import ArgumentError, EnvError, ModelError
from nrl.runtime import Mesh, Slots
from nrl.runtime.mesh.local import LocalCluster

__all__ = ["reward_model", "scored_by"]

type _Scorer = Callable[[Task, Trace], Coroutine[Any, Any, float]]


@checked("reward_model")
def reward_model(
    model: str | Path | Model,
    place: Slots | Mesh | None = None,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    max_length: int | None = None,
    max_tokens: int = 16_384,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> _Scorer:
    """A verifier whose reward is a reward model's number for the answer, as `scored_by` describes it.

    Args:
        model: a folder that ``examples/reward_model.py`` has exported, a folder or a name on the Hugging Face hub that
            transformers' sequence classification with one label reads, or a `nrl.Model` with ``head="reward"``.
        place: slots of a cluster, or a mesh, whose processes share each batch; None: this process.
        dtype: what it computes in, where ``model`` is a name.
        max_length: tokens of prompt and answer together, at most. None: as many as the model has positions, or as
            ``max_tokens``, if these are fewer.
        max_tokens: of a micro-batch, padding counted.
        device: ``"cpu"``, ``"cuda"``; None: a GPU if there is one.
        trust_remote_code: as that of `nrl.Model`, where ``model`` is a name.

    Raises:
        ModelError: there is no such model, or it has no reward head, or no tokenizer.
        PlacementError: the slots cannot make a mesh.
        ValueError: ``max_length`` is not positive or longer than a row may be, or the `nrl.Model` has another head.

    >>> from nrl import tiny
    >>> verify = reward_model(tiny.model(head="reward"))
    >>> asyncio.run(verify({"prompt": "1+1="}, Trace("1+1=", ["2"])))  # a head that has not been trained says 0
    0.0
    """
    if not isinstance(model, Model):
        model = Model(str(model), head="reward", dtype=dtype, trust_remote_code=trust_remote_code)
    if model.head != "reward":
        raise ArgumentError(f'reward_model: the model has the head "{model.head}"; give Model(..., head="reward")')
    config, _ = load_config(model)
    kinds = getattr(config, "architectures", None)  # a config without, such as that of a new model, says nothing
    if isinstance(model.source, str) and kinds:
        classifies, labels = any(kind.endswith("SequenceClassification") for kind in kinds), config.num_labels
        if not classifies or labels != 1:
            what = f"{labels} labels, and a reward is one" if classifies else "no reward head"
            raise ModelError(
                f"reward_model: {model.source} is {with_article(', '.join(kinds))}, which has {what}; give what "
                "examples/reward_model.py has exported, or another model for sequence classification with one label"
            )
    most = min(max_tokens, count_positions(config) or max_tokens)
    if max_length is not None and not 1 <= max_length <= most:
        raise ArgumentError(
            f"reward_model: max_length is {max_length}; give from 1 to {most}, the fewer of the model's positions and "
            f"max_tokens={max_tokens}"
        )
    where = LocalCluster("local").reserve(1) if place is None else place
    trainer = fsdp.trainer(where, model, adamw(lr=1e-6), max_tokens=max_tokens, device=device)  # it never steps
    return scored_by(trainer.load(), load_tokenizer(model), max_length=max_length or most)


@checked("scored_by")
def scored_by(params: Params, tokenizer: Any, *, max_length: int | None = None) -> _Scorer:
    """A verifier whose reward is a reward model's number for the answer.

    One forward scores all answers that wait at the same moment, while the next ones gather. The model reads prompt,
    answer and the token that ends it, as `nrl.data.preferences` trained it to. What an answer spells is text: it cannot
    write special tokens, such as those that end a turn.

    Args:
        params: of a trainer for ``Model(..., head="reward")``, frozen or of a train state.
        tokenizer: of that model; the policy may have another one.
        max_length: tokens of prompt and answer together, at most; what is longer is read to there, so that length
            is not a way to have no reward. None: what the trainer takes.

    Returns:
        An ``async`` verifier, for `nrl.envs.single_turn`. It passes the trainer's errors on to all answers that were
        scored together. It has no timeout of its own (``timeout=None``): the first call waits for a mesh to start, and
        the cluster's deadline bounds all of them.

    Raises:
        EnvError: (when called) the task has no ``"prompt"``, or one that fills ``max_length``, or the model's number is
            not finite: the row of this answer alone is invalid then.

    >>> import nrl
    >>> from nrl.envs import Trace
    >>> from nrl import tiny
    >>> from nrl.backends import adamw, fsdp
    >>> with nrl.cluster("local") as cluster:
    ...     judge = fsdp.trainer(cluster.reserve(1), tiny.model(head="reward"), adamw(lr=1e-3))
    ...     verify = scored_by(judge.load(), tiny.tokenizer())
    ...     asyncio.run(verify({"prompt": "1+1="}, Trace("1+1=", ["2"])))  # a head that has not been trained says 0
    0.0
    """
    everybody: WeakKeyDictionary[Any, _Desk] = WeakKeyDictionary()  # by their loop
    # Splitting special tokens is a setting of the tokenizer, and others use it at the same time
    literal = copy.deepcopy(tokenizer)

    def rewards(rows: list[Batch]) -> list[float]:
        found: list[float] = params.trainer.rewards(params, concatenate(rows)).result().tolist()
        return found

    async def verify(task: Task, trace: Trace) -> float:
        if "prompt" not in task:
            raise EnvError(f"scored_by: the task has no 'prompt', only {', '.join(map(repr, task)) or 'nothing'}")
        row = _row(task, trace.answer, tokenizer, literal, max_length)
        loop = asyncio.get_running_loop()
        reward = await everybody.setdefault(loop, _Desk(rewards)).ask(row)
        if not math.isfinite(reward):
            raise EnvError(f"scored_by: the reward model's number is {reward}; look for weights that are not finite")
        return reward

    verify.timeout = None  # type: ignore[attr-defined]
    return verify


@attrs.define(eq=False)
class _Desk:
    """Where answers of one event loop wait until the model has time for all of them together."""

    rewards: Callable[[list[Batch]], list[float]]
    waiting: list[tuple[Batch, "asyncio.Future[float]"]] = attrs.field(factory=list)
    work: "asyncio.Task[None] | None" = None

    async def ask(self, row: Batch) -> float:
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.waiting.append((row, answer))
        if self.work is None:
            self.work = asyncio.create_task(self.serve())
        return await answer

    async def serve(self) -> None:
        try:
            while asked := [(row, answer) for row, answer in self.waiting if not answer.done()]:  # others are cancelled
                self.waiting.clear()
                try:
                    found = await asyncio.to_thread(self.rewards, [row for row, _ in asked])
                except Exception as error:
                    for _, answer in asked:
                        if not answer.done():
                            answer.set_exception(error)
                    continue
                for (_, answer), reward in zip(asked, found, strict=True):
                    if not answer.done():
                        answer.set_result(reward)
        finally:
            self.work = None
            self.waiting.clear()


def _row(task: Task, text: str, tokenizer: Any, literal: Any, most: int | None) -> Batch:
    """A row of so many tokens at most, as `supervised` makes it, but for special tokens that the text only spells."""
    empty = supervised([{"prompt": task["prompt"], "response": ""}], tokenizer)
    text = text.encode(errors="replace").decode()  # halves of surrogate pairs have no encoding
    own = literal.encode(text, add_special_tokens=False, split_special_tokens=True) if text else []
    ids, end = empty["input_ids"][0], empty["loss_mask"][0]
    if most is not None and len(ids) >= most:
        raise EnvError(
            f"scored_by: the prompt has {len(ids)} tokens, and the reward model is to read {most} at most, with an "
            "answer; leave long prompts out"
        )
    own = own if most is None else own[: most - len(ids)]
    at = int(end.int().argmax())
    ids = torch.cat([ids[:at], torch.tensor(own, dtype=ids.dtype), ids[at:]])
    mask = torch.arange(len(ids)) >= at
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(mask), "loss_mask": mask}
    return assign(Batch({}, batch_size=[1]), **{name: column[None] for name, column in columns.items()})
