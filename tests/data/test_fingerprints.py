"""Whether a stream that is restored reads the rows that it read before."""

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import nrl
from nrl import batched, data, tiny
from nrl.batch import Batch
from nrl.data.fingerprints import accept_changed_rows, fingerprint_of
from nrl.envs import Task
from nrl.envs.seeds import shuffled
from nrl.errors import DataError
from nrl.run.checkpoint import Checkpoints

ROWS = [{"prompt": letter, "answer": str(number)} for number, letter in enumerate("abcdefg")]
CHANGED: dict[str, list[dict[str, Any]]] = {
    "added": [*ROWS, {"prompt": "h", "answer": "7"}],
    "removed": ROWS[:-1],
    "changed": [*ROWS[:3], {"prompt": "d", "answer": "4"}, *ROWS[4:]],
    "reordered": [*ROWS[1:], ROWS[0]],
    "another key": [{**ROWS[0], "note": None}, *ROWS[1:]],
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def tasks(source: Any) -> data.Tasks:
    return data.tasks(source, seed=3, chat=False)


@pytest.mark.parametrize("change", CHANGED)
def test_other_rows_are_refused_unless_they_are_accepted(change: str, capsys: pytest.CaptureFixture[str]) -> None:
    before, now = tasks(ROWS), tasks(CHANGED[change])
    before.take(4)
    with pytest.raises(DataError, match=r"checkpoints\.data_changed=accept") as refused:
        now.restore(before.state())
    assert (f"has {len(CHANGED[change])} rows, and had 7" in str(refused.value)) == (change in ("added", "removed"))
    assert now.state()["cursor"] == 0
    with accept_changed_rows():
        now.restore(before.state())
    assert "going on with these" in capsys.readouterr().out
    assert now.state()["cursor"] == 4
    tasks(CHANGED[change]).restore(now.state())  # what is saved from now on is of the new rows
    assert capsys.readouterr().out == ""


def test_the_rows_count_and_neither_their_file_nor_its_format(tmp_path: Path) -> None:
    state = tasks(ROWS).state()
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    spaced = tmp_path / "spaced.jsonl"
    spaced.write_text("\n\n".join(json.dumps(dict(reversed(row.items())), indent=None) for row in ROWS))
    for source in (write(tmp_path / "a.jsonl", ROWS), tmp_path / "rows.parquet", spaced):
        stream = tasks(source)
        stream.restore(state)
        assert stream.state() == state


def test_the_same_rows_of_which_others_are_kept_are_refused() -> None:
    def at_most(max_tokens: int) -> data.Tasks:
        long = [*ROWS, {"prompt": "1+1=" * 5, "answer": "2"}]
        return data.tasks(long, seed=3, chat=False, tokenizer=tiny.tokenizer(), max_tokens=max_tokens)

    before = at_most(30)
    before.take(4)
    with pytest.raises(DataError, match="7 tasks of the 8 rows of .* are kept, and 8 were at the checkpoint"):
        at_most(8).restore(before.state())
    at_most(40).restore(before.state())


def test_a_state_without_a_fingerprint_is_restored() -> None:
    stream = tasks(ROWS)
    stream.restore({"cursor": 5})
    assert stream.state()["cursor"] == 5


def test_rows_that_json_does_not_know_are_told_apart_and_equal_in_every_process() -> None:
    class Picture:
        """Its text holds its address, as that of any object without `__str__`."""

    def fingerprint(*rows: Any) -> Any:
        return fingerprint_of(rows)

    pairs: list[tuple[Any, Any]] = [
        (date(2026, 1, 1), date(2026, 1, 2)),
        (b"ab", b"ac"),
        (np.arange(3), np.arange(3) + 1),
        (np.float32(0.5), np.float32(0.25)),
        ({1: "a", "b": 2}, {1: "a", "b": 3}),
        (float("nan"), 0.0),
        ("\ud800", "\ud801"),
        ((1, 2), (1, 3)),
    ]
    for one, other in pairs:
        assert fingerprint({"x": one}) == fingerprint({"x": one})
        assert fingerprint({"x": one}) != fingerprint({"x": other})
    assert fingerprint({"x": Picture()}) == fingerprint({"x": Picture()})
    assert fingerprint({"x": 1}, {"y": 2}) != fingerprint({"x": 1, "y": 2})


def test_rows_that_come_with_an_environment_are_compared() -> None:
    stream = data.tasks(shuffled(lambda: ROWS), seed=1)
    stream.take(3)
    data.tasks(shuffled(lambda: ROWS), seed=1).restore(stream.state())
    with pytest.raises(DataError, match="has 8 rows, and had 7"):
        data.tasks(shuffled(lambda: CHANGED["added"]), seed=1).restore(stream.state())


def test_each_source_of_a_mixture_is_compared() -> None:
    def mixed(*sources: list[dict[str, Any]]) -> data.Tasks:
        parts = {f"{number}": (tasks(rows), 1.0) for number, rows in enumerate(sources)}
        return data.mixture({**parts, "arithmetic": 2.0})

    stream = mixed(ROWS, ROWS[:2])
    stream.take(5)
    state, expected = json.loads(json.dumps(stream.state())), stream.take(9)
    again = mixed(ROWS, ROWS[:2])
    again.restore(state)
    assert again.take(9) == expected
    with pytest.raises(DataError, match="has 3 rows, and had 2"):
        mixed(ROWS, ROWS[:3]).restore(state)
    with pytest.raises(DataError, match="the saved state is of 3 streams, and there are 2; give the same ones"):
        mixed(ROWS).restore(state)
    with accept_changed_rows():
        mixed(ROWS, ROWS[:3]).restore(state)
    nested = data.mixture({"both": (stream, 1), "one": (tasks(ROWS), 1)})
    with pytest.raises(DataError, match="has 6 rows, and had 7"):
        data.mixture({"both": (mixed(ROWS[:6], ROWS[:2]), 1), "one": (tasks(ROWS), 1)}).restore(nested.state())


@attrs.frozen
class Config:
    out: str
    data: str
    steps: int = 4
    checkpoints: Checkpoints = Checkpoints(every=1)


def letters(rows: Sequence[Task]) -> Batch:
    return Batch({"letters": torch.tensor([ord(row["prompt"]) for row in rows])}, batch_size=[len(rows)])


def seen(cfg: Config, steps: int) -> list[list[int]]:
    batches = []
    with nrl.run(attrs.evolve(cfg, steps=steps)) as run:
        stream = run.restore(stream=batched(tasks(cfg.data), 2, collate=letters))
        for i, batch in run.steps(stream):
            batches.append(batch["letters"].tolist())
            run.log(i)
            run.save(i, stream=stream)
    return batches


def test_a_run_goes_on_with_changed_rows_only_where_its_configuration_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    cfg = Config(str(tmp_path / "run"), str(file))
    whole = seen(Config(str(tmp_path / "whole"), str(file)), 4)
    assert seen(cfg, 2) == whole[:2]
    write(file, CHANGED["added"])
    with pytest.raises(DataError, match=r"rows.jsonl has 8 rows, and had 7 at the checkpoint"):
        seen(cfg, 4)
    write(file, ROWS)
    assert seen(cfg, 3) == whole[2:3]  # the refused start has left everything as it was
    write(file, CHANGED["added"])
    capsys.readouterr()
    assert len(seen(attrs.evolve(cfg, checkpoints=Checkpoints(every=1, data_changed="accept")), 4)) == 1
    assert "rows.jsonl has 8 rows, and had 7 at the checkpoint; going on" in capsys.readouterr().out
