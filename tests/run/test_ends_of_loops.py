"""The end of a loop: no step waits for items that are made early and that nobody takes."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import nrl
from nrl import ahead, batched, filtered, fresh
from nrl.batch import Batch
from nrl.data import Source, counting
from nrl.run.checkpoint import Checkpoints


def noting(made: list[int]) -> Source[Any]:
    """Numbers, each of which is noted when it is made."""

    def item(index: int) -> int:
        made.append(index)
        return index

    return counting(item)


@attrs.frozen
class Looped:
    out: str
    steps: int
    checkpoints: Checkpoints = Checkpoints(every=100)


def looped(cfg: Looped, stream: Source[Any]) -> list[Any]:
    with nrl.run(cfg) as entered:
        seen, stream = entered.restore(seen=[], stream=stream)
        for i, item in entered.steps(stream):
            seen = [*seen, item]
            entered.log(i, {})
            entered.save(i, seen=seen, stream=stream)
        return list(seen)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_a_loop_makes_no_item_early_that_it_does_not_take(n: int, tmp_path: Path) -> None:
    """Where other processes make them. The state is the cursor after what was taken; a longer run goes on from it."""
    made: list[int] = []

    def source() -> Source[Any]:
        return noting(made)._replace(remote=True)

    assert looped(Looped(str(tmp_path), 4), ahead(source(), n)) == [0, 1, 2, 3]
    assert made == [0, 1, 2, 3]
    assert looped(Looped(str(tmp_path), 7), ahead(source(), n)) == [*range(7)]
    assert made == [*range(7)]
    early = ahead(source(), n)
    looped(Looped(str(tmp_path / "again"), 2), early)
    early.take(1)  # after the loop it is as before
    assert len(early.state()["pending"]) == n


def even(batch: Batch) -> bool:
    return int(batch["input_ids"].sum()) % 2 == 0


class Present:
    version = 9


def two(stream: Source[Any]) -> Source[Any]:
    return batched(stream, 2, collate=tuple)  # type: ignore[arg-type]


TRANSFORMS: dict[str, tuple[Callable[[Source[Any]], Source[Any]], int]] = {
    "batched": (two, 6),
    "fresh": (lambda early: fresh(early, 9, Present()), 3),
    "filtered": (lambda early: filtered(early, even), 5),
    "fresh(filtered)": (lambda early: fresh(filtered(early, even), 9, Present()), 5),
    "batched(filtered)": (lambda early: two(filtered(early, even)), 11),
}


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize(("transform", "needed"), TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_a_loop_over_a_transform_makes_no_item_early_that_it_does_not_take(
    transform: Callable[[Source[Any]], Source[Any]], needed: int, n: int, tmp_path: Path
) -> None:
    made: list[int] = []

    def item(index: int) -> Batch:
        made.append(index)
        return Batch({"input_ids": torch.tensor([[index]]), "version": torch.tensor([9])}, batch_size=[1])

    stream = transform(ahead(counting(item)._replace(remote=True), n))
    with nrl.run(Looped(str(tmp_path), 3)) as entered:
        for _ in entered.steps(stream):
            pass
    assert made == [*range(needed)]
    stream.take(1)  # after the loop it is as before
    assert len(stream.state()["pending"]) == n


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_step_waits_for_no_item_that_is_under_way(fails: bool, tmp_path: Path) -> None:
    """Of a stream that knows nothing of the loop, such as one that takes from the one ahead."""
    going, hangs = threading.Event(), True

    def item(index: int) -> int:
        if index >= 3 and hangs:
            if fails:
                raise ValueError("there are no more tasks")
            going.wait(60)
        return index

    def through(early: Source[Any]) -> Source[Any]:
        return Source(early.take, early.state, early.restore, remote=True)

    began = time.monotonic()
    source = counting(item)._replace(remote=True)
    assert looped(Looped(str(tmp_path), 3), through(ahead(source, 2))) == [0, 1, 2]
    assert time.monotonic() - began < 30
    going.set()
    hangs = False
    assert looped(Looped(str(tmp_path), 6), through(ahead(counting(item)._replace(remote=True), 2))) == [*range(6)]


def test_here_items_are_early_to_the_end(tmp_path: Path) -> None:
    """In this process their lag is exact, also that of items which a run with more steps takes later."""
    made: list[int] = []
    assert looped(Looped(str(tmp_path), 2), ahead(noting(made), 2)) == [0, 1]
    assert made == [0, 1, 2, 3]
