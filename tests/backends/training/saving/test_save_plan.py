"""What a process writes is what it held at the save, whether it is written then or later."""

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nrl.backends.training.saving import save_plan
from nrl.backends.training.saving.save_plan import SavePlan
from nrl.files import Written
from nrl.ops.plan import fake_cuda
from nrl.ops.plan.op_counter import OpCounter
from tests.children import child
from tests.faked import faked


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    spare: list[Tensor] = []
    monkeypatch.setattr(save_plan, "_CHUNK", 64)
    monkeypatch.setattr(save_plan, "_spare", spare)
    return spare


def tensors() -> list[Tensor]:
    """Of all sizes around that of a chunk, scalars, views and other orders of their numbers."""
    wide = torch.arange(400, dtype=torch.float32).view(20, 20)
    return [
        wide.T,
        wide[3:5, 1:7],
        torch.tensor(7.0),
        torch.arange(64, dtype=torch.uint8),
        wide[:0],
        wide[:4].bfloat16(),
    ]


def content(parts: list[Any]) -> bytes:
    return b"".join(
        x.contiguous().flatten().view(torch.uint8).numpy().tobytes() if isinstance(x, Tensor) else x for x in parts
    )


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 200])
def test_a_copy_is_written_as_what_it_is_of(tmp_path: Path, size: int) -> None:
    first, second = [b"x" * size, *tensors()], [b"y" * 3]
    files: dict[str, Any] = {"first": first, "second": second, "empty": []}
    held = SavePlan(files, {"step": 3})
    expected = {name: content(parts) for name, parts in files.items()}
    told = {name: Written(len(x), hashlib.sha256(x).hexdigest()) for name, x in expected.items()}
    for number, made in enumerate((held, held.copy_to_host())):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        saved = made.write(folder)
        assert saved.files == told
        assert saved.record == {"step": 3}
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected


def test_a_copy_does_not_change_and_what_is_no_copy_does(tmp_path: Path) -> None:
    tensor, buffer = torch.zeros(100), bytearray(b"zeros")
    held = SavePlan({"file": [buffer, tensor]}, {})
    copied = held.copy_to_host()
    tensor += 1.0
    buffer[:] = b"fives"
    copied.write(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"zeros" + bytes(400)
    held.write(tmp_path)
    assert (tmp_path / "file").read_bytes() == content([b"fives", torch.ones(100)])


def test_the_memory_of_a_copy_is_used_again(tmp_path: Path, small_chunks: list[Tensor]) -> None:
    held = SavePlan({"file": [torch.arange(50)]}, {})
    held.copy_to_host().write(tmp_path)
    before = {chunk.data_ptr() for chunk in small_chunks}
    assert len(before) == 7  # 400 bytes
    copied = held.copy_to_host()
    assert small_chunks == []
    copied.write(tmp_path)
    assert {chunk.data_ptr() for chunk in small_chunks} == before


def test_the_memory_comes_back_while_it_is_written(
    tmp_path: Path, small_chunks: list[Tensor], monkeypatch: Any
) -> None:
    """Each chunk is free when the next one is asked for."""
    held, there = SavePlan({"file": [torch.arange(50)]}, {}).copy_to_host(), list[int]()

    def writes(path: Path, parts: Any) -> Written:
        there.extend(len(small_chunks) for _ in parts)
        return Written(0, "")

    monkeypatch.setattr(save_plan, "write_file", writes)
    held.write(tmp_path)
    assert there == [0, 1, 2, 3, 4, 5, 6]


def on_a_gpu() -> None:
    """On a fake one: it is copied without a wait, into memory that the device writes by itself, and then waited for."""
    waits = OpCounter()
    fake_cuda.install((9, 0), 80 * 10**9, waits.count_wait)
    copies, pinned, at_once, empty, copy = list[bool](), list[bool](), list[int](), torch.empty, Tensor.copy_

    def allocated(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        pinned.append(pin_memory)
        return empty(*args, pin_memory=pin_memory, **kwargs)

    def copied(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        copies.append(non_blocking)
        at_once.append(sum(count for (kind, _), count in waits.waits.items() if kind == "Stream.synchronize"))
        return copy(self, source, non_blocking)

    with waits:
        held = SavePlan({"file": [b"header", *(torch.ones(n, device="cuda") for n in (3, 100, 1000))]}, {})
        torch.empty, Tensor.copy_ = allocated, copied  # type: ignore[assignment,method-assign]
        memory = waits.now
        waits.forget()
        made = held.copy_to_host()
        torch.empty, Tensor.copy_ = empty, copy  # type: ignore[method-assign]
    kinds = [kind for (kind, _), count in waits.waits.items() for _ in range(count)]
    assert kinds.count("copy to the host") == 3
    assert kinds.count("Stream.synchronize") == 1
    assert at_once == [0] * 4
    assert copies == [True] * 4
    assert pinned == [True]
    assert waits.peak == memory  # the device needs nothing more
    assert sum(map(len, made.files["file"])) == 6 + 4 * 1103


@faked
def test_on_a_gpu_one_wait_is_for_all_copies() -> None:
    assert child(on_a_gpu) == 0


def test_two_threads_take_each_their_own(tmp_path: Path, small_chunks: list[Tensor]) -> None:
    """Two trainers of a program on the local cluster save at the same time."""

    def saves(number: int) -> None:
        for turn in range(50):
            made = SavePlan({f"{number}": [torch.full((333,), number, dtype=torch.uint8)]}, {}).copy_to_host()
            made.write(tmp_path)
            assert (tmp_path / f"{number}").read_bytes() == bytes([number]) * 333, turn

    errors = list[Any]()
    hook, threading.excepthook = threading.excepthook, errors.append
    try:
        threads = [threading.Thread(target=saves, args=(number,)) for number in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.excepthook = hook
    assert errors == []
    assert len(small_chunks) <= 12
