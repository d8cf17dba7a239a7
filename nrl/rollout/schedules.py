"""Transforms of `nrl.rollouts` that give up that a rollout is a function of the cursor alone, for speed.

What they hand out depends on the clock. Each task is still handed out exactly once, also by a run that was killed and
goes on; but its episodes may then be others. All are off by default.
"""

from typing import Any

from nrl.arguments import checked
from nrl.batch import Batch
from nrl.data.cursors import Source, Stream
from nrl.errors import DataError

__all__ = ["cut", "oversample", "partial", "refill"]


@checked("cut", finite=False)
def cut(stream: Stream[Batch], seconds: float) -> Source[Batch]:
    """End the episodes that are not over after so many seconds of a ``take``. They are not valid.

    Their environments are closed, and the sampler forgets what it was asked. The column ``cut`` marks them, and their
    status is ``"timeout"``. A group's statistics are then over its quicker episodes, so `nrl.summary` has, beside
    ``cut``, their number, ``cut/length``, the mean number of tokens that they had sampled by the end of their last
    turn, ``cut/groups``, the fraction of groups that lost some, and ``cut/share``, the fraction that these lost.

    A sampler that does not stream is cut between two of its calls. A function of an environment that does not return
    is left behind, as where it is late. A group whose verdict over the whole is not there in time is cut whole.

    Args:
        stream: of `nrl.rollouts`.
        seconds: from the beginning of a ``take``.

    Raises:
        DataError: ``seconds`` is not positive, or the stream is none of `nrl.rollouts`.

    >>> import time
    >>> import nrl
    >>> from nrl import tiny
    >>> from nrl.backends import hf
    >>> from nrl.envs import single_turn
    >>> tasks = nrl.data.counting(lambda index: {"prompt": "1+1=", "index": index})
    >>> env = single_turn(lambda task, trace: time.sleep(5 * task["index"]) or 1.0)
    >>> with nrl.cluster("local") as cluster:
    ...     sampler = hf.sampler(cluster.reserve(1), tiny.model(), nrl.Sampling(max_new_tokens=3))
    ...     groups = nrl.cut(nrl.rollouts(sampler, env, tasks, n=2), 2.0).take(2)
    >>> [group["cut"].tolist() for group in groups]
    [[False, False], [True, True]]
    """
    if not seconds > 0:
        raise DataError(f"cut: seconds is {seconds}; it must be positive")
    return _scheduled("cut", stream, deadline=float(seconds))


@checked("oversample")
def oversample(stream: Stream[Batch], m: int) -> Source[Batch]:
    """Of the ``n`` episodes of each group, keep the first ``m`` that end, and end the others.

    Short episodes are kept more often than long ones, so rewards that depend on the length are biased: the column
    ``left_out`` has, at the first row of each group, how many episodes it lost, and ``dropped_tokens`` how many tokens
    these had sampled by the end of their last turn. Failed episodes are kept only where there are too few others.

    Args:
        stream: of `nrl.rollouts`, whose ``n`` is that of the episodes that begin.
        m: how many are kept.

    Raises:
        DataError: ``m`` is not positive, or more than ``n``, or the stream is none of `nrl.rollouts`.

    >>> import nrl
    >>> from nrl import data, tiny
    >>> from nrl.backends import hf
    >>> from nrl.envs import exact, single_turn
    >>> with nrl.cluster("local") as cluster:
    ...     sampler = hf.sampler(cluster.reserve(1), tiny.model(), nrl.Sampling(max_new_tokens=3))
    ...     groups = nrl.rollouts(sampler, single_turn(exact), data.tasks("arithmetic"), n=4)
    ...     [len(group) for group in nrl.oversample(groups, 3).take(2)]
    [3, 3]
    """
    if m < 1:
        raise DataError(f"oversample: m is {m}; at least one episode has to be kept")
    return _scheduled("oversample", stream, keep=m)


@checked("partial")
def partial(stream: Stream[Batch], extra: int) -> Source[Batch]:
    """Hand out the groups that end first, and carry the others on into the next ``take``.

    So many groups more than are asked for are under way. What is carried on keeps its tokens, each with the version of
    the weights that sampled it (``versions``), so a row may be older than one publish; `nrl.fresh` drops those that are
    too old. Publish with ``inflight="keep"`` or ``"abort"``: ``"wait"`` lets all requests end first. Groups of short
    episodes come first, so batches are biased towards them while a run is short.

    Between two takes requests go on in engines of other processes, and environments rest; `nrl.ahead` takes again at
    once. A state holds the tasks of what is under way, which begins anew.

    Args:
        stream: of `nrl.rollouts`.
        extra: how many groups are carried on.

    Raises:
        DataError: ``extra`` is not positive, or the stream is none of `nrl.rollouts`.

    >>> import nrl
    >>> from nrl import data, tiny
    >>> from nrl.backends import hf
    >>> from nrl.envs import exact, single_turn
    >>> with nrl.cluster("local") as cluster:
    ...     sampler = hf.sampler(cluster.reserve(1), tiny.model(), nrl.Sampling(max_new_tokens=3))
    ...     groups = partial(nrl.rollouts(sampler, single_turn(exact), data.tasks("arithmetic"), n=2), 2)
    ...     len(groups.take(2)), len(groups.state()["begun"])
    (2, 2)
    """
    if extra < 1:
        raise DataError(f"partial: extra is {extra}; at least one group has to be carried on")
    return _scheduled("partial", stream, extra=extra, in_order=False)


@checked("refill")
def refill(stream: Stream[Batch], extra: int) -> Source[Batch]:
    """Let an engine's idle tail take groups of the next batches, while the last episodes of this one end.

    So many groups more than are asked for are under way. Groups are handed out in the order of their tasks, whoever
    ends first, so no batch is biased; those that began early are up to ``extra`` groups older. `partial` says how
    publishes, takes and states go with that.

    Args:
        stream: of `nrl.rollouts`.
        extra: how many groups may begin early; twice as many as a batch has keep an engine nearly full.

    Raises:
        DataError: ``extra`` is not positive, or the stream is none of `nrl.rollouts`.

    >>> import nrl
    >>> from nrl import data, tiny
    >>> from nrl.backends import hf
    >>> from nrl.envs import exact, single_turn
    >>> with nrl.cluster("local") as cluster:
    ...     sampler = hf.sampler(cluster.reserve(1), tiny.model(), nrl.Sampling(max_new_tokens=3))
    ...     groups = refill(nrl.rollouts(sampler, single_turn(exact), data.tasks("arithmetic"), n=2), 2)
    ...     [int(group["group_ids"][0]) for group in [*groups.take(2), *groups.take(2)]]
    [0, 1, 2, 3]
    """
    if extra < 1:
        raise DataError(f"refill: extra is {extra}; at least one group has to begin early")
    return _scheduled("refill", stream, extra=extra, in_order=True)


def _scheduled(who: str, stream: Any, **how: Any) -> Source[Batch]:
    if getattr(stream, "scheduled", None) is None:
        raise DataError(
            f"{who}: the stream is none of nrl.rollouts, or was made of one; put {who} around nrl.rollouts(...) itself"
        )
    found: Source[Batch] = stream.scheduled(who, **how)
    return found
