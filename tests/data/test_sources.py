"""Sources: files that are as they should be, files that are not, folders and names of datasets."""

import csv
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nrl import data, tiny
from nrl.data.sources import read
from nrl.errors import DataError
from tests.draws import draws
from tests.work import calls

ROWS = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(5)]
READERS = {".jsonl": "read_jsonl", ".csv": "read_csv", ".parquet": "read_parquet"}


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `datasets` converts goes here, and its progress bars nowhere."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def write(folder: Path, ending: str) -> Path:
    path = folder / f"rows{ending}"
    if ending == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif ending in {".csv", ".tsv"}:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]), delimiter="," if ending == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


def fault(path: Path, ending: str = "") -> str:
    """The message of a source that cannot be used, which begins with who says it and is short."""
    with pytest.raises(DataError) as caught:
        data.rows(path)
    message = str(caught.value)
    assert message.startswith(READERS[ending or path.suffix] + ": ")
    assert str(path) in message
    assert len(message) - message.count(str(path)) * len(str(path)) < 400
    return message


# files as they should be


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path, ending)
    expected = data.rows(ROWS, chat=False)
    assert data.rows(path, chat=False) == data.rows(str(path), chat=False) == expected
    assert data.tasks(path, seed=3).take(12) == data.tasks(ROWS, seed=3).take(12)
    assert data.tasks(str(path)).size == 5


def test_parquet_has_numbers_lists_and_messages(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "n": 1, "x": 0.5, "tags": ["b"], "none": None},
        {"messages": [{"role": "user", "content": "c"}], "n": 2, "x": 1.5, "tags": [], "none": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=1)
    assert data.rows(tmp_path / "a.parquet") == [{**row, "prompt": row["messages"]} for row in rows]
    assert read(tmp_path / "a.parquet").rows[-1] == rows[1]
    with pytest.raises(IndexError):
        read(tmp_path / "a.parquet").rows[2]


def test_csv_has_quotes_line_ends_and_texts_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfquestion,answer\r\n"a, ""b""\r\nc",1\r\n\r\n\xc3\xa9,\r\n')
    assert data.read_csv(path) == [{"question": 'a, "b"\r\nc', "answer": "1"}, {"question": "é", "answer": ""}]
    assert read(path).place(1) == f"{path}, line 5"


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_csv_has_values_of_any_length(tmp_path: Path, ending: str) -> None:
    """Python's reader alone takes 131,072 characters."""
    path, limit = tmp_path / f"rows{ending}", csv.field_size_limit()
    long, between = "ab, " * 100_000, "," if ending == ".csv" else "\t"
    path.write_text(f'prompt{between}answer\n"{long}"{between}1\n' + long.replace(",", " ") + f"{between}2\n")
    rows = list(read(path).rows)
    assert [row["answer"] for row in rows] == ["1", "2"]
    assert [len(row["prompt"]) for row in rows] == [400_000, 400_000]
    assert csv.field_size_limit() == limit  # other programs' readers are left as they were


def test_rows_are_named_by_where_they_stand(tmp_path: Path) -> None:
    for ending, place in ((".jsonl", "line 2"), (".csv", "line 3"), (".parquet", "row 1")):
        path = write(tmp_path, ending)
        with pytest.raises(DataError, match=rf"tasks: .*rows{ending}, {place}: the format .* raised KeyError: 'none'"):
            data.tasks(path, format=lambda row: row if row["answer"] == "1" else row["none"])


def test_a_table_of_the_datasets_library_is_a_source() -> None:
    assert data.tasks(datasets.Dataset.from_list(ROWS), shuffle=False).take(2) == data.rows(ROWS)[:2]


def test_reading_is_fast_and_a_parquet_file_stays_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    line = json.dumps({"question": "a" * 240, "answer": "b" * 300 + "\n#### 1"}) + "\n"
    path.write_text(line * 7473)
    assert len(data.read_jsonl(path)) == 7473
    assert calls(lambda: data.read_jsonl(path)) < 40 * 7473  # 16 a row
    pq.write_table(pa.table({"question": ["a" * 100] * 50_000}), tmp_path / "a.parquet")
    table = read(tmp_path / "a.parquet")
    assert table.rows[49_999] == {"question": "a" * 100}
    assert not any(isinstance(value, list) for value in vars(table.rows).values())


def test_long_reading_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("nrl.data.task_streams._QUIET", -1.0)
    data.tasks([{"prompt": "a"}, {"prompt": "b"}])
    assert "data: 1 of 2 rows of " in capsys.readouterr().out


# files that are not


def test_a_source_that_is_long_in_coming_is_said_and_leaves_no_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 3)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.enable_progress_bars()
    data.tasks(str(tmp_path), chat=False)
    assert capfd.readouterr() == ("", "")
    assert not datasets.are_progress_bars_disabled()
    monkeypatch.setattr("nrl.log.slow_wait.SILENCE", 0.3)  # as no line was to come until now

    said = io.StringIO()
    monkeypatch.setattr("sys.stderr", said)  # reading capfd while a thread writes may lose what it writes

    def slow(source: str) -> Any:
        while not said.getvalue().endswith("\n"):  # or the time limit of a test
            time.sleep(0.01)
        return read(source)

    monkeypatch.setattr("nrl.data.task_streams.read", slow)
    data.tasks(str(tmp_path), chat=False)
    line = rf"data: reading {re.escape(str(tmp_path))}, \d+:\d\d so far\n"
    assert re.fullmatch(f"({line})+", said.getvalue())
    assert capfd.readouterr() == ("", "")


def test_the_ending_says_how_a_file_is_read(tmp_path: Path) -> None:
    write(tmp_path, ".parquet").rename(tmp_path / "a.jsonl")
    assert "line 1: invalid" in fault(tmp_path / "a.jsonl")
    write(tmp_path, ".jsonl").rename(tmp_path / "a.parquet")
    assert "is no whole Parquet file (" in fault(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "has no rows; it must hold a line of column names and one row a line"),
        (b"question,answer\n", "has no rows"),
        (b"question,answer\na,1\nb\n", "line 3 has 1 values where the header has 2 columns: 'b'"),
        (b"question,answer\na,1\nb,c,2\n", "line 3 has 3 values where the header has 2 columns: 'b,c,2'; put quotes"),
        (b'question,answer\n"a\nb",1\nc\n', "line 4 has 1 values where"),
        (b'question,answer\na,1\n"b,2\nc,3\n', "line 3: unexpected end of data (a quote that is not closed"),
        (b'question,answer\n"a"b,1\n', "line 2: ',' expected after '\"' (a quote that is not closed"),
        (b"question,answer\na,1\n\xe9,2\n", "line 3: invalid UTF-8 (byte 0xe9); save the file as UTF-8"),
        (b"question,answer\na,1\nb\0,2\n", "line 3: a NUL byte; save the file as text in UTF-8"),
        ("question,answer\na,1\n".encode("utf-16"), "line 1: invalid UTF-8 (byte 0xff)"),
        (b"question,\na,1\n", "line 1: the header has '' as a column name, which is empty or there twice"),
        (b"\nquestion,question\na,1\n", "line 2: the header has 'question' as a column name"),
        (b"question,answer\n" + b"a," * 3_000_000 + b"\n", "line 2 has 3000001 values where the header has 2 columns"),
    ],
)
def test_csv_that_cannot_be_used(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    start = time.process_time()
    assert match in fault(tmp_path / "a.csv")
    assert time.process_time() - start < 60  # linear: below 1; quadratic: hours


@pytest.mark.parametrize(
    "content",
    [
        b"a" * 10_000_000,
        b'{"question": "' + b"a" * 10_000_000,
        b"[" * 10_000_000,
        b'{"a":' * 2_000_000,
        b"1" * 10_000_000,
        b'{"question": "a\0b"}',
        b"\0" * 1_000_000,
        b"\xff" * 10_000_000,
        '{"question": "a"}'.encode("utf-16"),
        b"\xef\xbb\xbf\xef\xbb\xbf{}",
    ],
)
def test_jsonl_that_cannot_be_used_is_said_fast_and_in_short(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"question": "a"}\n' + content)
    start = time.process_time()
    assert "a.jsonl, line 2: " in fault(tmp_path / "a.jsonl")
    assert time.process_time() - start < 60  # linear: below 1; quadratic: hours


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_parquet_file_that_is_cut_off(tmp_path: Path, share: float) -> None:
    whole = write(tmp_path, ".parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: int(len(whole) * share)])
    assert "is no whole Parquet file (" in fault(tmp_path / "a.parquet")


def broken_text() -> list[Any]:
    """The buffers of an array of one text, which is not UTF-8."""
    return [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]


def test_parquet_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"question": pa.array([], pa.string())}), path)
    assert fault(path).endswith("has no rows")
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["q", "q"]), path)
    assert "has two columns of the name 'q'; rename one" in fault(path)
    pq.write_table(pa.table({"question": ["a"], "when": pa.array([2**60], pa.timestamp("ms"))}), path)
    assert "has a value that Python cannot hold" in fault(path)
    pq.write_table(pa.table({"question": pa.Array.from_buffers(pa.string(), 1, broken_text())}), path)
    assert "is no whole Parquet file (" in fault(path)


@pytest.mark.parametrize("ending", READERS)
def test_files_that_cannot_be_opened(tmp_path: Path, ending: str) -> None:
    assert f"there is no file {tmp_path / 'none'}{ending} (looked in {Path.cwd()})" in fault(tmp_path / f"none{ending}")
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / f"a{ending}"
    assert "cannot be read: Not a directory" in fault(inside) or "there is no file" in fault(inside)
    loop = tmp_path / f"loop{ending}"
    loop.symlink_to(loop)
    assert "cannot be read: Too many levels of symbolic links" in fault(loop)


@pytest.mark.parametrize("ending", READERS)
def test_files_that_may_not_be_read(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, ending)
    path.chmod(0)
    tmp_path.chmod(0)
    monkeypatch.chdir("/")
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything, nobody may not
    try:
        assert "cannot be read: Permission denied" in fault(path)
        with pytest.raises(DataError, match="cannot be read: Permission denied"):
            data.tasks(str(path))
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)


def outcome(use: Callable[[], Any]) -> Any:
    try:
        return use()
    except DataError as error:
        return error


NAMES = st.text(min_size=1, max_size=300)


@settings(max_examples=draws(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NAMES)
def test_any_name_is_a_source_or_a_data_error(name: str) -> None:
    if ":" in name and "/" in name:  # what may be a name of the hub
        return
    assert len(str(outcome(lambda: data.tasks(name)))) < 1500


BYTES = st.one_of(
    st.binary(max_size=200),
    st.lists(
        st.sampled_from([b'{"question": "a"}', b"\n", b"\r", b"\xff", b"\0", b'"', b",", b"{", b"}", b"question"])
    ).map(b"".join),
)


@pytest.mark.parametrize("ending", READERS)
@settings(max_examples=draws(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(BYTES)
def test_any_bytes_are_rows_or_a_data_error(tmp_path: Path, ending: str, content: bytes) -> None:
    path = tmp_path / f"fuzzed{ending}"
    path.write_bytes(content)
    for use in (lambda: list(read(path).rows), lambda: data.tasks(path).take(3)):
        match outcome(use):
            case DataError() as error:
                assert str(path) in str(error)
                assert len(str(error)) < len(str(path)) + 400
            case found:
                assert found
                assert all(isinstance(row, dict) for row in found)


@settings(max_examples=draws(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_to_a_parquet_file_is_rows_or_a_data_error(tmp_path: Path, choose: st.DataObject) -> None:
    whole = bytearray(write(tmp_path, ".parquet").read_bytes())
    for _ in range(choose.draw(st.integers(1, 4))):
        whole[choose.draw(st.integers(0, len(whole) - 1))] = choose.draw(st.integers(0, 255))
    path = tmp_path / "damaged.parquet"
    path.write_bytes(whole)
    match outcome(lambda: list(read(path).rows)):
        case DataError() as error:
            assert str(path) in str(error)
        case found:
            assert all(isinstance(row, dict) for row in found)


WORDS = ["user", "tool", "text", "thinking", "tool_use", "tool_result", "redacted_thinking"]
KEYS = [
    "role",
    "content",
    "prompt",
    "messages",
    "from",
    "value",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "type",
    "text",
    "input",
]
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=12,
)
FIELDS_OF_MESSAGES = (
    *("tool_calls", "reasoning", "thinking", "weight", "name"),
    *("train", "thought", "reasoning_details", "refusal", "images"),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | VALUES, "content": VALUES},
        optional=dict.fromkeys(FIELDS_OF_MESSAGES, VALUES),
    ),
    max_size=4,
)
FIELDS = [
    "prompt",
    "messages",
    "question",
    "response",
    "chosen",
    "rejected",
    "answer",
    "answers",
    "context",
    "response1",
    "system",
    "tools",
    "conversations",
    "instruction",
    "completion",
    "chat_template_kwargs",
    "history",
    "completions",
    "query",
    "reasoning",
]
CHATS = tiny.bpe(["user assistant"], vocab_size=270)


@settings(max_examples=draws(400))
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES | MESSAGES, max_size=5), st.sampled_from([None, *data.FORMATS]))
def test_any_row_is_used_or_a_data_error(row: dict[str, Any], format: str | None) -> None:
    for use in (
        lambda: data.tasks([row], format=format).take(1),
        lambda: data.tasks([row], format=format, tokenizer=CHATS, max_tokens=50).take(1),
        lambda: data.supervised([row], CHATS),
        lambda: data.preferences([row], CHATS),
    ):
        found = outcome(use)
        assert not isinstance(found, DataError) or len(str(found)) < 700


def test_halves_of_characters_are_said() -> None:
    with pytest.raises(DataError, match=r"render: 'a.ud800' has a half of a surrogate pair, which is no character"):
        data.render(json.loads('"a\\ud800"'), CHATS)


# folders and names of datasets


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    assert data.tasks(tmp_path / "one", seed=1).take(5) == data.tasks(ROWS, seed=1).take(5)
    with pytest.raises(DataError, match=r"tasks: .*one is one dataset without splits; leave ':train' out"):
        data.tasks(f"{tmp_path / 'one'}:train")
    datasets.DatasetDict(train=table, test=table.select([2])).save_to_disk(tmp_path / "two")
    assert data.tasks(f"{tmp_path / 'two'}:test").size == 1
    with pytest.raises(DataError, match=r"tasks: .*two has several splits; name one of test, train: '.*two:...'"):
        data.tasks(tmp_path / "two")
    with pytest.raises(DataError, match=r"tasks: .*two:dev has no split 'dev'; name one of test, train"):
        data.tasks(f"{tmp_path / 'two'}:dev")
    datasets.DatasetDict(train=table).save_to_disk(tmp_path / "three")
    assert data.rows(tmp_path / "three") == data.rows(ROWS)


def test_a_folder_of_data_files(tmp_path: Path) -> None:
    write(tmp_path, ".jsonl").rename(tmp_path / "train.jsonl")
    (tmp_path / "test.jsonl").write_text(json.dumps(ROWS[3]) + "\n")
    assert data.tasks(f"{tmp_path}:train", seed=1).take(5) == data.tasks(ROWS, seed=1).take(5)
    assert data.rows(f"{tmp_path}:test") == data.rows(ROWS[3:4])
    assert data.rows(f"{tmp_path}:train[1:3]") == data.rows(ROWS[1:3])
    with pytest.raises(DataError, match=rf"tasks: datasets.load_dataset\('{tmp_path}', split='dev'\) failed with"):
        data.tasks(f"{tmp_path}:dev")
    with pytest.raises(DataError, match=r"tasks: .*split='train\[:0\]'.* corresponds to no data!; check the files"):
        data.tasks(f"{tmp_path}:train[:0]")


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"tasks: datasets.load_dataset\('{tmp_path}'\) failed with"):
        data.tasks(tmp_path)
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"tasks: datasets.load_from_disk\('.*one'\) failed with"):
        data.tasks(tmp_path / "one")
    path = write(tmp_path, ".jsonl")
    with pytest.raises(DataError, match=r"tasks: .*rows.jsonl is a file, which has no splits; leave ':train' out"):
        data.tasks(f"{path}:train")


@pytest.mark.parametrize(
    ("name", "tried"),
    [
        ("rajpurkar/squad:train", r"'rajpurkar/squad', split='train'"),
        ("openai/gsm8k/main:train[:100]", r"'openai/gsm8k', 'main', split='train[:100]'"),
        ("squad:validation", r"'squad', split='validation'"),
    ],
)
def test_a_hub_that_is_not_reached_is_said_with_what_was_tried(name: str, tried: str) -> None:
    with pytest.raises(DataError) as caught:
        data.tasks(name)
    message = str(caught.value)
    assert message.startswith(f"tasks: datasets.load_dataset({tried}) failed with ")
    assert "HF_HUB_OFFLINE is set, so the hub is not asked; check the name" in message


@pytest.mark.parametrize(
    "name", ["openai/gsm8k:", ":train", "a b/c:train", "a/b/c/d:train", "a\0b:c", "x" * 5000 + ":y"]
)
def test_what_is_no_name_of_a_dataset(name: str) -> None:
    with pytest.raises(
        DataError, match="tasks: .* is neither a file or folder .* nor the name of a dataset with its spl"
    ):
        data.tasks(name)
    with pytest.raises(
        DataError, match="a dataset of the Hugging Face hub is named with its split, 'owner/name:train'"
    ):
        data.tasks("openai/gsm8k")
