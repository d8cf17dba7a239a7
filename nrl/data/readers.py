"""Files as rows: JSON Lines, JSON arrays, CSV and Parquet; texts may be compressed by gzip or Zstandard.

Every fault of a file is a `DataError` that names the file, the line or row, and the fault.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from nrl.data.checks import kind, shown
from nrl.envs.types import Task
from nrl.errors import DataError

__all__ = ["Table", "read_csv", "read_file", "read_jsonl", "read_parquet"]


class Table(NamedTuple):
    """The rows of a source, and where each of them stands; a row may be read only when it is asked for.

    Args:
        name: of the source.
        rows: by index from 0.
        place: from an index to the words that errors name the row by.
        filled: from an index to whether null may stand for a field that the row does not have, as in Arrow, where all
            rows have the fields of any row.
    """

    name: str
    rows: Sequence[Any]
    place: Callable[[int], str]
    filled: Callable[[int], bool] = lambda index: False


def read_file(path: Path) -> Table:
    """Open a file as a table: ``.parquet``, ``.csv``, ``.tsv`` or ``.json`` by its ending, anything else as JSON Lines.

    The ending stands before ``.gz`` or ``.zst``. A ``.json`` file that begins with ``[`` is an array of objects.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    inner = path.with_suffix("") if path.suffix.lower() in _COMPRESSIONS else path
    match inner.suffix.lower():
        case ".parquet":
            return read_parquet(path)
        case ".csv":
            return _listed(path, _separated(path, ","))
        case ".tsv":
            return _listed(path, _separated(path, "\t"))
        case ".json":
            content = _content(path, "read_json", "of a JSON array, or of one JSON object a line")
            if content.lstrip()[:1] == b"[":
                return _array(path, content)
    return _listed(path, _lines(path))


_COMPRESSIONS: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd"}
"""How a file is compressed, by the ending of its name."""


def _array(path: Path, content: bytes) -> Table:
    """Read a JSON array, whose rows errors name by their number."""
    try:
        rows = json.loads(content.decode())
    except UnicodeDecodeError as error:
        found = f"invalid UTF-8 (byte {content[error.start]:#04x} at position {error.start}); save the file as UTF-8"
        raise DataError(f"read_json: {path}: {found}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"read_json: {path}: invalid JSON ({error}); it must be one array of objects") from None
    if not rows:
        raise DataError(f"read_json: {path} has no rows; it must be an array of objects")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            found = f"{kind(row)}, not an object: {shown(repr(row))}"
            raise DataError(f"read_json: {path}, entry {number}: {found}; it must be an array of objects")
    return Table(str(path), rows, lambda index: f"{path}, entry {index}")


def _listed(path: Path, found: Sequence[tuple[int, Task]]) -> Table:
    return Table(str(path), [row for _, row in found], lambda index: f"{path}, line {found[index][0]}")


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file: UTF-8, one object a line. Blank lines are passed over.

    Args:
        path: of the file.

    Returns:
        A dict for each row, in order.

    Raises:
        DataError: no file that can be read, no rows, or a line that is no JSON object in UTF-8; it names the line.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "sums.jsonl"
    ...     _ = path.write_text('{"question": "1+1=", "answer": "2"}\\n')
    ...     read_jsonl(path)
    [{'question': '1+1=', 'answer': '2'}]
    """
    return [row for _, row in _lines(path)]


def _lines(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """Read JSON Lines: each row with the number of its line."""
    content = _content(path, "read_jsonl", "one JSON object a line")
    found = [
        (number, _object(line, f"{path}, line {number}"))
        for number, line in enumerate(content.split(b"\n"), 1)
        if line.strip()
    ]
    if not found:
        raise DataError(f"read_jsonl: {path} has no rows; it must hold one JSON object a line")
    return found


def _content(path: str | Path, reader: str, holding: str, most: int = -1) -> bytes:
    try:
        if Path(path).is_dir():
            raise DataError(f"{reader}: {path} is a folder; give a file, {holding}")
        with Path(path).open("rb") as file:
            content = file.read(most) if most >= 0 else _decompressed(file.read(), Path(path))
    except _Damaged as error:
        raise DataError(f"{reader}: {path} cannot be decompressed ({error}); copy it again") from None
    except FileNotFoundError:
        raise DataError(f"{reader}: there is no file {path} (looked in {Path.cwd()})") from None
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or error
        raise DataError(f"{reader}: {path} cannot be read: {found}") from error
    return content.removeprefix(b"\xef\xbb\xbf")  # some editors begin a file with a byte-order mark


class _Damaged(Exception):
    """A compressed file that cannot be read to its end."""


def _decompressed(content: bytes, path: Path) -> bytes:
    method = _COMPRESSIONS.get(path.suffix.lower())
    if method is None:
        return content
    import pyarrow as pa

    try:  # this reads several compressed parts behind each other, too
        with pa.input_stream(pa.BufferReader(content), compression=method) as stream:
            return bytes(stream.read())
    except (OSError, pa.ArrowException) as error:
        raise _Damaged(shown(str(error))) from None


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        text = line.decode().strip()
        row = json.loads(text)
    except UnicodeDecodeError as error:
        found = f"invalid UTF-8 (byte {line[error.start]:#04x} at position {error.start}); save the file as UTF-8"
        raise DataError(f"read_jsonl: {place}: {found}") from None
    except (ValueError, RecursionError) as error:
        found = f"invalid JSON ({error}): {shown(text)}; each line must be one JSON object"
        raise DataError(f"read_jsonl: {place}: {found}") from None
    if not isinstance(row, dict):
        found = f"{kind(row)}, not an object: {shown(text)}; each line must be one JSON object"
        found += " (`jq -c '.[]'` makes that of a list)" if isinstance(row, list) else ""
        raise DataError(f"read_jsonl: {place}: {found}")
    return row


def read_csv(path: str | Path, delimiter: str = ",") -> list[dict[str, str]]:
    """The rows of a CSV file: UTF-8, the first line names the columns, and every value is a text.

    Values that hold the delimiter, a quote or a line end stand in double quotes, in which a quote is doubled. Blank
    lines are passed over.

    Args:
        path: of the file.
        delimiter: between values.

    Raises:
        DataError: no file that can be read, no rows, columns without a name of their own, a line with another number
            of values, or quotes that do not match; it names the line.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "sums.csv"
    ...     _ = path.write_text("question,answer\\n1+1=,2\\n")
    ...     read_csv(path)
    [{'question': '1+1=', 'answer': '2'}]
    """
    return [row for _, row in _separated(path, delimiter)]


def _separated(path: str | Path, delimiter: str) -> list[tuple[int, dict[str, str]]]:
    """Read CSV: each row with the number of the line that it begins on."""
    content = _content(path, "read_csv", "one row a line")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        found = f"invalid UTF-8 (byte {content[error.start]:#04x}); save the file as UTF-8"
        raise DataError(f"read_csv: {path}, line {line}: {found}") from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise DataError(f"read_csv: {path}, line {line}: a NUL byte; save the file as text in UTF-8")
    begin, columns, found_rows = 1, list[str](), list[tuple[int, dict[str, str]]]()
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    most = csv.field_size_limit(len(text))  # of Python's, for all of its readers: no value is longer than the file
    try:
        for values in reader:
            place = f"{path}, line {begin}"
            if values and not columns:
                columns = _columns(values, place)
            elif values and len(values) != len(columns):
                raise DataError(
                    f"read_csv: {place} has {len(values)} values where the header has {len(columns)} columns: "
                    f"{shown(repr(delimiter.join(values)))}; put quotes around values that hold a '{delimiter}'"
                )
            elif values:
                found_rows.append((begin, dict(zip(columns, values, strict=True))))
            begin = reader.line_num + 1
    except csv.Error as error:
        near = shown(repr(next(islice(io.StringIO(text, newline=""), begin - 1, None), "")[:60]))
        fault = f"{error} (a quote that is not closed, or not doubled inside of quotes, reads so)"
        raise DataError(f"read_csv: {path}, line {begin}: {fault}: {near}") from None
    finally:
        csv.field_size_limit(most)
    if not found_rows:
        raise DataError(f"read_csv: {path} has no rows; it must hold a line of column names and one row a line")
    return found_rows


def _columns(names: Sequence[str], place: str) -> list[str]:
    unnamed = [name for name in names if not name.strip() or names.count(name) > 1]
    if unnamed:
        found = f"the header has {shown(repr(unnamed[0]))} as a column name"
        raise DataError(f"read_csv: {place}: {found}, which is empty or there twice; give each column a name")
    return list(names)


class _ArrowRows(Sequence[Any]):
    """The rows of an Arrow table, each made into Python values when it is asked for."""

    def __init__(self, table: Any, path: str | Path) -> None:
        self._table, self._path = table, path

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        return self._values(self._table.slice(range(len(self))[index], 1))[0]

    def __iter__(self) -> Iterator[Any]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from self._values(batch)

    def _values(self, part: Any) -> list[Any]:
        try:
            return cast(list[Any], part.to_pylist())
        except (ValueError, OverflowError) as error:  # such as a date that Python does not have
            raise DataError(f"read_parquet: {self._path} has a value that Python cannot hold: {error}") from error


def read_parquet(path: str | Path) -> Table:
    """The rows of a Parquet file, which stay as columns in memory; a row is made when it is asked for.

    Args:
        path: of the file.

    Raises:
        DataError: no file that can be read, none in the Parquet format or a damaged one, or no rows.

    >>> import tempfile, pyarrow, pyarrow.parquet
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "sums.parquet"
    ...     pyarrow.parquet.write_table(pyarrow.table({"question": ["1+1="], "answer": [2]}), path)
    ...     read_parquet(path).rows[0]
    {'question': '1+1=', 'answer': 2}
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    _content(path, "read_parquet", "in the Parquet format", most=4)
    try:
        table = pq.ParquetFile(path, memory_map=True).read()
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        found = shown(str(error).splitlines()[0]) if str(error) else type(error).__name__
        raise DataError(
            f"read_parquet: {path} is no whole Parquet file ({found}); it may be cut off, damaged, or of another "
            "format; copy it again"
        ) from None
    names = table.column_names
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DataError(f"read_parquet: {path} has two columns of the name {shown(repr(twice[0]))}; rename one")
    if not table.num_rows:
        raise DataError(f"read_parquet: {path} has no rows")
    return Table(str(path), _ArrowRows(table, path), lambda index: f"{path}, row {index}", lambda index: True)
