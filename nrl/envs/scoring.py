"""A reward model as a verifier."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any
from weakref import WeakKeyDictionary

from nrl.backends import Params
from nrl.batch import Batch, concatenate
from nrl.data import supervised
from nrl.envs import Task, Trace
from nrl.errors import EnvError

__all__ = ["scored_by"]


def scored_by(params: Params, tokenizer: Any) -> Callable[[Task, Trace], Coroutine[Any, Any, float]]:
    """A verifier whose reward is a reward model's number for the answer.

    One forward scores the answers of all episodes that have one at the same moment; all episodes of the rollout wait
    for it. The model reads prompt, answer and the token that ends it, as `nrl.data.preferences` trained it to.

    Args:
        params: of a trainer for ``Model(..., head="reward")``, frozen or of a train state.
        tokenizer: of that model; the policy may have another one.

    Returns:
        An ``async`` verifier, for `nrl.envs.single_turn`. It passes the trainer's errors on, such as a row longer than
        its micro-batches, to all answers that were scored together. It has no timeout of its own (``timeout=None``):
        the first call waits for a mesh to start, and the cluster's deadline bounds all of them.

    Raises:
        EnvError: (when called) the task has no ``"prompt"``.

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
    everybody: WeakKeyDictionary[Any, list[tuple[Batch, asyncio.Future[float]]]] = WeakKeyDictionary()  # by their loop

    def score(waiting: list[tuple[Batch, asyncio.Future[float]]]) -> None:
        asked = [(row, answer) for row, answer in waiting if not answer.done()]  # others have been cancelled
        waiting.clear()
        if not asked:
            return
        try:
            rewards = params.trainer.rewards(params, concatenate([row for row, _ in asked])).result().tolist()
        except Exception as error:
            for _, answer in asked:
                answer.set_exception(error)
            return
        for (_, answer), reward in zip(asked, rewards, strict=True):
            answer.set_result(reward)

    async def verify(task: Task, trace: Trace) -> float:
        if "prompt" not in task:
            raise EnvError(f"scored_by: the task has no 'prompt', only {', '.join(map(repr, task)) or 'nothing'}")
        row = supervised([{"prompt": task["prompt"], "response": trace.text}], tokenizer)
        loop = asyncio.get_running_loop()
        waiting = everybody.setdefault(loop, [])
        if not waiting:
            loop.call_soon(score, waiting)
        answer: asyncio.Future[float] = loop.create_future()
        waiting.append((row, answer))
        return await answer

    verify.timeout = None  # type: ignore[attr-defined]
    return verify
