"""Sources of several files, compressed files, and JSON arrays."""

import functools
import gzip
import importlib
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nrl import data
from nrl.data.sources import read
from nrl.errors import ArgumentError, DataError

compressed = functools.partial(gzip.compress, mtime=0)  # the same bytes in every process
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(7)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zst(content: bytes) -> bytes:
    return bytes(pa.compress(content, codec="zstd", asbytes=True))


def prompts(source: Any) -> list[Any]:
    return [row["prompt"] for row in data.rows(source, chat=False)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", compressed(LINES)),
        ("a.jsonl.gz", compressed(LINES[:40]) + compressed(LINES[40:])),  # parts behind each other are one file
        ("a.jsonl.zst", zst(LINES)),
        ("a.json.gz", compressed(json.dumps(ROWS).encode())),
        ("a.json", json.dumps(ROWS, indent=2).encode()),
        ("a.json", b"\xef\xbb\xbf\n" + json.dumps(ROWS).encode()),
        ("a.json", LINES),
        ("a.csv.gz", compressed(("prompt,answer\n" + "".join(f"{n}+1=,{n + 1}\n" for n in range(7))).encode())),
        ("a.tsv.zst", zst(("prompt\tanswer\n" + "".join(f"{n}+1=\t{n + 1}\n" for n in range(7))).encode())),
    ],
)
def test_compressed_files_and_arrays_have_the_same_rows(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert data.rows(tmp_path / name) == data.rows(ROWS)
    assert data.tasks(tmp_path / name, seed=3).take(20) == data.tasks(ROWS, seed=3).take(20)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.jsonl.gz", compressed(LINES)[:-20], "read_jsonl: .*a.jsonl.gz cannot be decompressed "),
        ("a.jsonl.gz", LINES, "read_jsonl: .*a.jsonl.gz cannot be decompressed "),
        ("a.jsonl.zst", zst(LINES)[:20], "read_jsonl: .*a.jsonl.zst "),
        ("a.csv.zst", LINES, "read_csv: .*a.csv.zst cannot be decompressed "),
        ("a.json", b"[]", "read_json: .*a.json has no rows; it must be an array of objects"),
        ("a.json", b'[{"prompt": "a"}, 3]', "read_json: .*a.json, entry 1: an int, not an object: 3; it must be an"),
        ("a.json", b'[{"prompt": "a"}', r"read_json: .*a.json: invalid JSON \(Expecting ',' delimiter"),
        ("a.json", b"[" * 100_000, r"read_json: .*a.json: invalid JSON"),
        (
            "a.json",
            b'["\xff"]',
            r"read_json: .*a.json: invalid UTF-8 \(byte 0xff at position 2\); save the file as UTF",
        ),
        ("a.parquet.gz", compressed(LINES), "read_parquet: .*a.parquet.gz is no whole Parquet file"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=match):
        data.rows(tmp_path / name)


def parts(folder: Path) -> list[Path]:
    """The rows in three files of three kinds."""
    (folder / "part-2.jsonl.gz").write_bytes(compressed(LINES[LINES.index(b'{"prompt": "4') :]))
    (folder / "part-0.json").write_text(json.dumps(ROWS[:2]))
    pq.write_table(pa.Table.from_pylist(ROWS[2:4]), folder / "part-1.parquet")
    return sorted(folder.glob("part-*"))


def test_patterns_and_lists_are_their_files_one_after_the_other(tmp_path: Path) -> None:
    files = parts(tmp_path)
    (tmp_path / "part-folder").mkdir()
    for source in (str(tmp_path / "part-*"), tmp_path / "part-?.*", files, [str(file) for file in files]):
        assert prompts(source) == prompts(ROWS)
    assert prompts(files[::-1]) == [row["prompt"] for row in ROWS[4:] + ROWS[2:4] + ROWS[:2]]
    assert prompts([files[0]]) == prompts(ROWS[:2])
    assert prompts([str(tmp_path / "part-[01]*"), files[2]]) == prompts(ROWS)
    (tmp_path / "deep").mkdir()
    files[0].rename(tmp_path / "deep" / "part-0.json")
    assert prompts(str(tmp_path / "**" / "*.json")) == prompts(ROWS[:2])


def test_a_row_is_named_by_its_own_file(tmp_path: Path) -> None:
    parts(tmp_path)
    table = read(str(tmp_path / "part-*"))
    names = [Path(table.place(index)).name for index in range(len(table.rows))]
    assert names[1:5] == ["part-0.json, entry 1", "part-1.parquet, row 0", "part-1.parquet, row 1", names[4]]
    assert names[4:] == [f"part-2.jsonl.gz, line {n}" for n in (1, 2, 3)]
    assert [table.filled(index) for index in range(7)] == [False] * 2 + [True] * 2 + [False] * 3
    assert table.rows[-1] == ROWS[-1]
    with pytest.raises(IndexError):
        table.rows[7]


@pytest.mark.parametrize("cursor", [0, 1, 6, 7, 16])
def test_a_stream_over_several_files_goes_on_where_it_was(tmp_path: Path, cursor: int) -> None:
    parts(tmp_path)
    stream = data.tasks(str(tmp_path / "part-*"), seed=5)
    assert stream.size == 7
    stream.take(cursor)
    again = data.tasks(sorted(tmp_path.glob("part-*")), seed=5)
    again.restore(json.loads(json.dumps(stream.state())))
    assert again.take(15) == stream.take(15)
    assert data.tasks(str(tmp_path / "part-*"), seed=5).take(20) == data.tasks(ROWS, seed=5).take(20)


def test_sources_of_several_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tasks: no file matches the pattern '.*none-\*.jsonl' \(from "):
        data.tasks(str(tmp_path / "none-*.jsonl"))
    (tmp_path / "a.jsonl").write_bytes(LINES)
    with pytest.raises(DataError, match="read_jsonl: there is no file .*b.jsonl"):
        data.tasks([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    with pytest.raises(DataError, match="tasks: a list of files has a dict; give names of files alone, or mappings al"):
        data.tasks([str(tmp_path / "a.jsonl"), ROWS[0]])
    (tmp_path / "[1].jsonl").write_bytes(LINES)
    assert prompts(str(tmp_path / "[1].jsonl")) == prompts(ROWS)  # a file of this name is no pattern


def test_a_table_of_the_datasets_library_may_be_filled(tmp_path: Path) -> None:
    assert read(datasets.Dataset.from_list(ROWS)).filled(0)
    assert not read(ROWS).filled(0)


# --- Tables in memory


TABLE = [{"prompt": "a", "answer": np.array(["1", "2"])}, {"prompt": "b", "extra": {"n": np.int64(3)}}]


@pytest.mark.parametrize("kind", ["pandas", "pyarrow"])
def test_a_table_in_memory_is_a_source(kind: str) -> None:
    plain = [{"prompt": "a", "answer": ["1", "2"], "extra": None}, {"prompt": "b", "answer": None, "extra": {"n": 3}}]
    pandas: Any = importlib.import_module("pandas")  # which has no types
    source: Any = pandas.DataFrame(TABLE, index=[5, 6]) if kind == "pandas" else pa.Table.from_pylist(plain)
    assert data.rows(source, chat=False) == plain
    stream = data.tasks(source, shuffle=False, chat=False)
    assert stream.take(2) == plain
    assert stream.state() == data.tasks(source, shuffle=False, chat=False).state() | {"cursor": 2}


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (datasets.DatasetDict(train=datasets.Dataset.from_list([{"prompt": "a"}])), "give one of its splits, 'train'"),
        ({"prompt": ["a", "b"]}, "the source is a dict.*; give a list of mappings, one for each row"),
        ({1, 2}, "the source is a set.*, which has no rows by number .*; give a list of mappings"),
        ((row for row in TABLE), "the source is a generator, which has no rows by number"),
    ],
)
def test_a_source_without_rows_by_number_is_refused(source: Any, named: str) -> None:
    with pytest.raises(DataError, match=named):
        data.rows(source)
    with pytest.raises(ArgumentError, match="data.tasks: source is "):
        data.tasks(source)


@pytest.mark.parametrize("saved", [5, "a", None, [1]])
def test_a_state_of_something_else_is_refused(saved: Any) -> None:
    stream = data.tasks([{"prompt": "a"}], chat=False)
    with pytest.raises(
        DataError, match="data.tasks: the state has 'data', .*; restore what state() returned".replace("()", r"\(\)")
    ):
        stream.restore({"cursor": 0, "data": saved})
    mixed = data.mixture({"a": (stream, 1), "b": (data.tasks([{"prompt": "b"}], chat=False), 1)})
    with pytest.raises(DataError, match="(mixture|data.tasks): the s"):
        mixed.restore({"cursor": 0, "data": saved})
    assert stream.state()["cursor"] == 0
