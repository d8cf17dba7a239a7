"""The timeline of a run: what is in it, whatever happens to the run, and what viewers need of it."""

import itertools
import json
import os
import signal
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import nrl
from nrl.batch.metrics import Sum
from nrl.data import counting
from nrl.errors import LostActor
from nrl.runtime.trace import timeline
from tests.children import child
from tests.disks import small_disk_at
from tests.work import calls


def read(path: Path) -> list[dict[str, Any]]:
    """As viewers read it: the array may lack its end, be it a bracket or a part of an event."""
    text = path.read_text().rstrip()
    assert text.startswith("[\n{")
    if not text.endswith("]"):
        text = text[: text.rindex("}") + 1] + "]"
    events: list[dict[str, Any]] = json.loads(text)
    return events


def rows(path: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The events of each row, by the names that viewers show."""
    events = read(path)
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"].endswith("_name")
    }
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for event in events:
        if event["ph"] != "M":
            mesh = names["process_name", event["pid"], 0]
            row = names["thread_name", event["pid"], event["tid"]]
            found.setdefault(mesh, {}).setdefault(row, []).append(event)
    return found


def called(events: list[dict[str, Any]]) -> list[str]:
    return [event["name"] for event in events]


@attrs.frozen
class Config:
    out: str
    steps: int = 3


def program(cfg: Config, lose_at: int = -1) -> None:
    with nrl.run(cfg) as run:
        total, stream = run.restore(total=0, stream=counting())
        for i, number in run.steps(stream):
            assert timeline.current() == i
            timeline.record("trainer", 0, "train_step", time.time(), time.time())
            for j, _ in run.steps(counting(), 1, name="eval"):
                assert timeline.current() == i
                run.log(j, {"x": Sum(torch.tensor(1.0))})
            if i == lose_at:
                raise LostActor("train_step", "trainer", 0, "here", "killed")
            total += number
            run.log(i, {"total": Sum(torch.tensor(total))})
            run.save(i, total=total, stream=stream)
        assert timeline.current() is None


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_is_set_changes_no_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    """Whenever somebody asks what time it is, it has been set meanwhile."""
    clock = itertools.count(2e9, jump)
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    before = timeline.seconds_spent("publish")
    with timeline.recording(tmp_path) as path:
        for _ in range(3):
            with timeline.span("publish"):
                time.sleep(0.001)
        with nrl.cluster("local") as cluster:
            mesh = cluster.reserve(1).mesh(name="trainer")
            nrl.shard_map(lambda x: x, mesh, nrl.P("dp"), nrl.P("dp"))(torch.zeros(2)).result()
    assert 0.003 <= timeline.seconds_spent("publish") - before < 60
    events = [event for event in read(path) if event["ph"] == "X"]
    assert len(events) == 4
    assert all(0 <= event["dur"] < 60e6 for event in events)
    assert all(abs(event["ts"] / 1e6 - 2e9) <= 20 * 3600 for event in events)  # they are where the clock was


# --- of a run


def test_a_run_has_a_row_for_each_rank_and_one_for_the_driver(tmp_path: Path) -> None:
    with timeline.recording(tmp_path) as path:
        start = time.time()
        timeline.record("trainer", 0, "train_step", start, start + 0.25)
        timeline.record("trainer", 1, "train_step", start, start + 0.5)
        timeline.record("sampler", 0, "generate", start + 1, start + 2)
        with timeline.span("publish"):
            pass
    found = rows(path)
    assert {mesh: sorted(each) for mesh, each in found.items()} == {
        "trainer": ["rank 0", "rank 1"],
        "sampler": ["rank 0"],
        "driver": ["driver"],
    }
    (event,) = found["trainer"]["rank 1"]
    assert event["name"] == "train_step"
    assert event["ts"] == round(start * 1e6)
    assert event["dur"] == 500_000


def test_the_drivers_row_has_the_steps_and_what_is_within_them(tmp_path: Path) -> None:
    program(Config(str(tmp_path)))
    events = rows(tmp_path / "timeline.json")["driver"]["driver"]
    inner = ["take", "take", "log", "eval 0", "log", "save"]
    assert called(events) == ["restore", *inner, "train 0", *inner, "train 1", *inner, "train 2"]
    steps = [event for event in events if event.get("cat") == "train"]
    for (before, step), rest in zip(itertools.pairwise([None, *steps]), range(1, 4), strict=True):
        within = events[1 + (rest - 1) * 7 : rest * 7]
        assert all(step["ts"] <= each["ts"] and end(each) <= end(step) for each in within if step)
        assert before is None or step is None or end(before) <= step["ts"]


def end(event: dict[str, Any]) -> int:
    return int(event["ts"] + event["dur"])


def test_publish_is_on_it(tmp_path: Path) -> None:
    from nrl import tiny
    from nrl.backends import adamw, fsdp, hf

    with timeline.recording(tmp_path) as path, nrl.cluster("local") as cluster:
        slots = cluster.reserve(2)
        trainer = fsdp.trainer(slots[:1], tiny.model(), adamw(lr=1e-3))
        nrl.publish(trainer.init().params, hf.sampler(slots[1:], tiny.model(), nrl.Sampling()))
    assert "publish" in called(rows(path)["driver"]["driver"])


def test_a_resumed_run_adds_to_it_with_a_mark(tmp_path: Path) -> None:
    cfg = Config(str(tmp_path))
    with pytest.raises(LostActor):
        program(cfg, lose_at=1)
    before = read(tmp_path / "timeline.json")
    program(cfg)
    after = read(tmp_path / "timeline.json")
    assert after[: len(before)] == before
    assert [event["name"] for event in after if event["ph"] == "i"] == ["resumed"]
    assert {event["pid"] for event in before} == {event["pid"] for event in after}  # the same rows
    assert sum(event["name"] == "train_step" for event in after) == 2 + 3


def test_a_run_without_events_leaves_none(tmp_path: Path) -> None:
    with nrl.run(Config(str(tmp_path))):
        pass
    assert not (tmp_path / "timeline.json").exists()


def test_a_step_that_is_left_late_is_not_in_the_next_run(tmp_path: Path) -> None:
    def left(cfg: Config) -> Iterator[Any]:
        with nrl.run(cfg) as run:
            for _ in (loop := run.steps(counting())):
                break
            return loop

    loop = left(Config(str(tmp_path / "a")))
    assert timeline.current() is None
    with timeline.recording(tmp_path) as path:
        loop.close()  # type: ignore[attr-defined]
        timeline.record("trainer", 0, "x", 0.0, 1.0)
    assert "driver" not in rows(path)


def test_runs_within_runs_record_in_their_own(tmp_path: Path) -> None:
    with timeline.recording(tmp_path / ".") as outer:
        timeline.record("a", 0, "before", 0.0, 1.0)
        (tmp_path / "inner").mkdir()
        with timeline.recording(tmp_path / "inner") as inner:
            timeline.record("a", 0, "within", 0.0, 1.0)
        timeline.record("a", 0, "after", 0.0, 1.0)
    assert called(rows(outer)["a"]["rank 0"]) == ["before", "after"]
    assert called(rows(inner)["a"]["rank 0"]) == ["within"]


# --- whatever happens


def killed_while_it_writes(folder: str) -> None:
    with timeline.recording(Path(folder)):
        timeline.record("trainer", 0, "first", 0.0, 1.0)
        timeline.record("trainer", 0, "second", 1.0, 2.0)
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_it_can_be_read_and_added_to(tmp_path: Path) -> None:
    assert child(killed_while_it_writes, str(tmp_path)) == -signal.SIGKILL
    path = tmp_path / "timeline.json"
    assert called(rows(path)["trainer"]["rank 0"]) == ["first", "second"]
    whole, found = path.read_bytes(), []
    for cut in (0, 1, 20, 60, 400):
        path.write_bytes(whole[: len(whole) - cut])  # as a machine that loses power would leave it
        with timeline.recording(tmp_path):
            timeline.record("trainer", 0, "third", 2.0, 3.0)
        found.append([event["name"] for event in json.loads(path.read_text()) if event["ph"] == "X"])
    assert found == [["first", "second", "third"], *[["first", "third"]] * 3, ["third"]]


def test_a_file_without_a_whole_event_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text('[\n{"ph":"M","na')
    with timeline.recording(tmp_path):
        timeline.record("trainer", 0, "x", 2.0, 3.0)
    assert [event["name"] for event in json.loads(path.read_text()) if event["ph"] != "M"] == ["x"]


def test_a_very_long_run_stops_writing_and_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with timeline.recording(tmp_path, limit=5000) as path:
        for i in range(1000):
            timeline.record("trainer", 0, "x", float(i), i + 0.5)
    events = json.loads(path.read_text())
    assert 5000 <= path.stat().st_size < 5600
    marks = [event for event in events if event["ph"] == "i"]
    assert [mark["name"] for mark in marks] == ["the timeline ends here: 5,000 bytes"]
    last = [event for event in events if event["ph"] == "X"][-1]
    assert marks[0]["ts"] == end(last)
    (said,) = capsys.readouterr().out.splitlines()
    assert said == f"run: {path} has {path.stat().st_size - len('\n]\n'):,} bytes, so no more is written"


def test_a_full_disk_ends_the_timeline_and_not_the_run(tmp_path: Path) -> None:
    def fill(disk: Path) -> None:
        (disk / "ballast").write_bytes(b"\0" * 4_000_000)

    def calls() -> None:
        for i in range(2000):
            timeline.record("trainer", 0, "x", float(i), i + 0.5)

    with small_disk_at(tmp_path / "disk", megabytes=2) as disk, timeline.recording(disk) as path:
        timeline.record("trainer", 0, "first", 0.0, 1.0)
        with pytest.raises(OSError, match="No space"):
            fill(disk)
        with pytest.warns(UserWarning, match=r"timeline.json could not be written \(No space .*without a timeline"):
            calls()
        calls()  # which says nothing
        assert called(rows(path)["trainer"]["rank 0"])[0] == "first"


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    with timeline.recording(tmp_path / "gone"), pytest.warns(UserWarning, match="No such file"):
        timeline.record("trainer", 0, "x", 0.0, 1.0)


def test_secrets_in_names_are_masked(tmp_path: Path) -> None:
    key = "AKIA" + "ABCDEFGHIJKLMNOP"
    with timeline.recording(tmp_path) as path:
        timeline.record(f"mesh {key}", 0, f"call {key}", 0.0, 1.0)
    assert called(rows(path)["mesh ***"]["rank 0"]) == ["call ***"]


# --- what viewers need


def test_calls_that_overlap_get_rows_of_their_own(tmp_path: Path) -> None:
    with timeline.recording(tmp_path) as path:
        calls = {"a": (0, 4), "b": (2, 6), "c": (5, 7), "in d": (6.5, 7.5), "d": (6, 8), "all": (0, 9)}
        for name, (start, stop) in calls.items():
            timeline.record("sampler", 0, name, start, stop)
    assert {row: called(events) for row, events in rows(path)["sampler"].items()} == {
        "rank 0": ["a", "c", "all"],
        "rank 0 (2)": ["b", "in d", "d"],
    }


@pytest.mark.parametrize("late", [False, True])
def test_in_any_row_events_lie_within_each_other_or_apart(late: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with timeline.recording(tmp_path) as path:
        calls = [(start, start + length) for start, length in (torch.rand(300, 2) * torch.tensor([50.0, 5.0])).tolist()]
        if not late:
            calls.sort(key=lambda call: call[1])
        for start, stop in calls:
            timeline.record("sampler", 3, "x", start, stop)
    found = rows(path)["sampler"]
    assert sum(map(len, found.values())) == 300
    assert len(found) < 60
    for events in found.values():
        for a, b in itertools.combinations(events, 2):
            apart = end(a) <= b["ts"] or end(b) <= a["ts"]
            within = (a["ts"] <= b["ts"] and end(b) <= end(a)) or (b["ts"] <= a["ts"] and end(a) <= end(b))
            assert apart or within


def test_from_many_threads(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        for i in range(200):
            timeline.record("trainer", rank, f"call {i}", float(i), i + 1.0)

    with timeline.recording(tmp_path) as path:
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = rows(path)["trainer"]
    assert {row: called(events) for row, events in found.items()} == {
        f"rank {rank}": [f"call {i}" for i in range(200)] for rank in range(8)
    }


# --- how busy


def test_the_share_is_of_the_time_of_the_steps(tmp_path: Path) -> None:
    with timeline.recording(tmp_path) as path:
        timeline.record("trainer", 0, "x", 0.0, 12.0)  # 2 s of it within the first step
        timeline.record("trainer", 0, "y", 11.0, 13.0)  # at the same time, which counts once
        timeline.record("trainer", 1, "x", 31.0, 32.0)
        timeline.record("sampler", 0, "x", 20.0, 30.0)  # between the steps
        timeline.record("driver", 0, "train 0", 10.0, 20.0, loop="train")
        timeline.record("driver", 0, "train 1", 30.0, 40.0, loop="train")
    assert timeline.busy_shares(path) == {"train": {"trainer": pytest.approx((3 / 20 + 1 / 20) / 2), "sampler": 0.0}}


# --- what it costs


def test_nothing_is_allocated_where_nobody_records() -> None:
    def peak() -> int:
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            for _ in itertools.repeat(None, 1000):
                timeline.record("trainer", 0, "x", 0.0, 1.0)
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()

    timeline.record("trainer", 0, "x", 0.0, 1.0)
    assert min(peak() for _ in range(20)) < 500  # the loop's own; a thread of another test may allocate meanwhile


def test_a_call_costs_little(tmp_path: Path) -> None:
    """Forty functions that it calls, which take ten microseconds."""

    def record() -> None:
        for i in range(1000):
            timeline.record("trainer", i % 8, "train_step(grpo_loss)", float(i), i + 0.5)

    with timeline.recording(tmp_path):
        record()
        assert calls(record) < 80 * 1000
