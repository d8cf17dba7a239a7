"""Rows that hold pictures, films or sounds are refused, as no model of nrl reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from nrl import data, tiny
from nrl.errors import DataError

PICTURE = Image.new("RGB", (2, 2))
STORED = {"bytes": b"\x89PNG", "path": "cat.png"}

HELD: list[tuple[str, Any]] = [
    ("image", "cat.png"),
    ("image", PICTURE),
    ("image", STORED),
    ("image", b"\x89PNG"),
    ("images", [PICTURE]),
    ("images", ["a.png", "b.png"]),
    ("Image", "cat.png"),
    ("image_url", "https://example.com/cat.png"),
    ("image_1", "cat.png"),
    ("img_path", "cat.png"),
    ("video", "cat.mp4"),
    ("videos", [{"bytes": b"0", "path": None}]),
    ("audio", {"array": [0.0], "sampling_rate": 16_000, "path": None}),
    ("audio_path", "cat.wav"),
    ("pixel_values", np.zeros((3, 2, 2))),
    ("multi_modal_data", {"image": ["cat.png"]}),
    ("image", "data:image/png;base64,iVBORw0KGgo="),
    ("image_base64", "iVBORw0KGgo" * 30),
    ("screenshot", "s3://bucket/0001"),
    ("image", "Holiday/IMG_0001.JPG"),
    ("speech", "a.flac"),
    ("figure", STORED),
    ("panel", PICTURE),
]
IGNORED: list[tuple[str, Any]] = [
    ("image", None),
    ("images", []),
    ("images", [None]),
    ("image", ""),
    ("audio", {}),
    ("image_width", 640),
    ("image", "a cat on a mat"),
    ("image", [[0, 1], [1, 0]]),
    ("speech", "Four score and seven years ago"),
    ("video", "a title"),
    ("media", "The Guardian"),
    ("image_id", "a-7"),
    ("imaginary", "part"),
    ("video_count", 0),
    ("image", 7),
    ("has_image", False),
    ("metadata", {"license": "mit"}),
    ("clipping", "yes"),
    ("id", b"\x00"),
]


@pytest.mark.parametrize(("column", "value"), HELD)
def test_tasks_refuse_a_row_that_holds_some(column: str, value: Any) -> None:
    with pytest.raises(DataError, match=f"tasks: row 1 has '{column}'.* nothing here reads it: models of nrl see text"):
        data.tasks([{"prompt": "1+1="}, {"prompt": "What is this?", column: value}])


@pytest.mark.parametrize(("column", "value"), IGNORED)
def test_other_columns_are_ignored(column: str, value: Any) -> None:
    (task,) = data.tasks([{"prompt": "1+1=", column: value}]).take(1)
    assert task[column] is value


def test_every_reader_of_rows_refuses_it() -> None:
    tokenizer = tiny.tokenizer()
    rows: list[dict[str, Any]] = [{"prompt": "a", "response": "b", "chosen": "b", "rejected": "c", "image": "cat.png"}]
    with pytest.raises(DataError, match="supervised: row 0 has 'image'"):
        data.supervised(rows, tokenizer)
    with pytest.raises(DataError, match="preferences: row 0 has 'image'"):
        data.preferences(rows, tokenizer)
    with pytest.raises(DataError, match="row 0 has 'image'"):
        data.labelled([rows[0] | {"label": True}], tokenizer)
    with pytest.raises(DataError, match="row 0 has 'image'"):
        data.rows(rows)


def test_a_file_of_pictures_is_refused(tmp_path: Path) -> None:
    table = pa.table({"question": ["What is this?"], "answer": ["a cat"], "image": [STORED]})
    pq.write_table(table, tmp_path / "cats.parquet")
    with pytest.raises(DataError, match=r"cats.parquet, row 0 has 'image', a dict, and nothing here reads it"):
        data.tasks(str(tmp_path / "cats.parquet"))


def test_a_format_may_leave_it_out() -> None:
    rows = [{"prompt": "1+1=", "image": "cat.png"}]
    kept = data.tasks(rows, format=lambda row: {key: row[key] for key in row if key != "image"})
    assert "image" not in kept.take(1)[0]


def test_a_template_may_write_it() -> None:
    (row,) = data.rows([{"image": "a cat on a mat"}], template="Describe: {image}", chat=False)
    assert row["prompt"] == "Describe: a cat on a mat"
