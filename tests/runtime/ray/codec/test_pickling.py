"""What is sent to other processes, without any: packed here, opened here or in a fresh interpreter."""

import functools
import importlib
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from nrl.batch import Batch
from nrl.errors import MutatedBatch, ShippingError
from nrl.runtime.ray.codec.pickling import deserialize, num_bytes, serialize

BIG = 5000  # more than what travels inside of the pickle


def there_and_back(value: Any, *, copy: bool = False) -> Any:
    return deserialize(serialize(value, "test"), copy=copy)[0]


@pytest.mark.parametrize("n", [0, 1, 7, BIG])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8, torch.complex64]
)
@pytest.mark.parametrize("copy", [True, False])
def test_tensors_arrive_as_they_are(n: int, dtype: torch.dtype, copy: bool) -> None:
    tensor = torch.arange(n).to(dtype)
    found = there_and_back({"x": tensor}, copy=copy)["x"]
    assert found.dtype == dtype
    assert torch.equal(found, tensor)


def test_shapes_strides_and_scalars() -> None:
    for tensor in (torch.tensor(3.5), torch.arange(12).view(3, 4).T, torch.zeros(2, 0, 3), torch.ones(100, 100)[::7]):
        found = there_and_back(tensor)
        assert found.shape == tensor.shape
        assert torch.equal(found, tensor)


def test_one_entry_of_a_column_arrives_whatever_its_stride() -> None:
    """torch calls it contiguous."""
    column = torch.arange(6.0).view(2, 3)[:1, 1]
    assert column.stride() == (3,)
    assert torch.equal(there_and_back(column), torch.tensor([1.0]))
    batch = Batch({"rewards": column}, batch_size=[1])
    assert torch.equal(there_and_back(batch)["rewards"], torch.tensor([1.0]))


def test_parameters_and_gradients() -> None:
    parameter = nn.Parameter(torch.ones(3), requires_grad=False)
    leaf = torch.ones(2, requires_grad=True)
    found, other = there_and_back((parameter, leaf))
    assert isinstance(found, nn.Parameter)
    assert not found.requires_grad
    assert other.requires_grad
    assert not there_and_back(leaf * 2).requires_grad  # a graph is not sent


def test_a_view_does_not_bring_what_it_is_a_view_of() -> None:
    assert num_bytes(serialize(torch.zeros(1_000_000)[:BIG], "test")) < 5 * BIG


def test_batches_stay_locked_and_nested() -> None:
    batch = Batch({"input_ids": torch.ones(2, BIG).long(), "media": {"x": torch.zeros(2)}}, batch_size=[2]).lock_()
    found = there_and_back(batch)
    assert type(found) is TensorDict
    assert found.is_locked
    assert found.batch_size == batch.batch_size
    assert torch.equal(found["input_ids"], batch["input_ids"])
    assert torch.equal(found["media", "x"], batch["media", "x"])
    assert not there_and_back(TensorDict({"x": torch.zeros(2)}, batch_size=[2])).is_locked


def test_large_tensors_travel_beside_the_pickle_and_once() -> None:
    tensor = torch.ones(BIG)
    head, *buffers = serialize([tensor, tensor], "test")
    assert len(head) < 1000
    assert [len(buffer) for buffer in buffers] == [4 * BIG]


def test_what_is_opened_lies_where_it_came() -> None:
    parts = serialize(torch.zeros(BIG), "test")
    found, shared = deserialize(parts)
    assert found.data_ptr() == parts[1].ctypes.data
    assert len(shared.tensors) == 1
    copied, nothing = deserialize(parts, copy=True)
    assert copied.data_ptr() != parts[1].ctypes.data
    assert not nothing.tensors


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x[:1].zero_(), lambda x: x.view(-1).mul_(2)])
def test_a_write_into_shared_memory_is_found(write: Any) -> None:
    found, shared = deserialize(serialize({"x": torch.ones(BIG)}, "test"))
    found["x"] + 1
    shared.check("my_function")
    write(found["x"])
    with pytest.raises(MutatedBatch, match=r"my_function wrote into its arguments, .* out-of-place"):
        shared.check("my_function")


def test_two_threads_open_at_once() -> None:
    parts = serialize([torch.ones(BIG) for _ in range(20)], "test")
    seen: list[tuple[int, int]] = []

    def often(copy: bool) -> None:
        seen.extend((int(copy), len(deserialize(parts, copy=copy)[1].tensors)) for _ in range(50))

    threads = [threading.Thread(target=often, args=(copy,)) for copy in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(seen) == {(1, 0), (0, 20)}


HERE = 10


def scaled(x: int) -> int:
    return HERE * x


def test_the_users_functions_need_not_be_importable(tmp_path: Path) -> None:
    """This module is one of the user's own: a fresh interpreter elsewhere knows nothing of it."""
    offset = torch.full((BIG,), 2.0)

    def closure(x: int) -> float:
        return scaled(x) + float(offset.sum())

    (tmp_path / "parts").write_bytes(pickle.dumps(serialize(closure, "test")))
    program = "import pickle; from nrl.runtime.ray.codec import pickling\n"
    program += "print(pickling.deserialize(pickle.load(open('parts', 'rb')))[0](3))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(done.stdout) == 30 + 2 * BIG


def test_functions_of_installed_packages_travel_by_name() -> None:
    assert num_bytes(serialize(torch.nn.functional.relu, "test")) < 200
    assert num_bytes(serialize(serialize, "test")) < 200  # nrl is installed wherever nrl runs


def test_what_an_installer_put_into_a_folder_travels_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as by `pip install --target`; what lies beside it, or has a record of sources alone, is the user's own."""
    record = tmp_path / "put_here-1.0.dist-info"
    sources = tmp_path / "own_project.egg-info"
    for folder in (record, sources):
        folder.mkdir()
        (folder / ("METADATA" if folder is record else "PKG-INFO")).write_text("Name: some\nVersion: 1.0\n")
    (record / "RECORD").write_text("put_here/__init__.py,,\nput_here_alone.py,,\n")
    (sources / "SOURCES.txt").write_text("own_project.py\n")
    (tmp_path / "put_here").mkdir()
    for file in ("put_here/__init__.py", "put_here_alone.py", "own_project.py", "beside.py"):
        (tmp_path / file).write_text("def found(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ["put_here", "put_here_alone", "own_project", "beside"]
    parts = [serialize(importlib.import_module(name).found, "test")[0] for name in names]
    assert [len(part) > 200 for part in parts] == [False, False, True, True]


class Mine:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_a_class_that_comes_back_is_the_same_class() -> None:
    assert type(there_and_back(Mine(1))) is Mine


def lock() -> Any:
    return threading.Lock()


def test_what_cannot_be_sent_is_named() -> None:
    held = lock()

    def captures() -> Any:
        return held

    with pytest.raises(ShippingError, match=r"f: an object of type _thread\.lock, .*'held' of .*captures") as caught:
        serialize(captures, "f")
    assert "Create it inside of the function" in str(caught.value)


def test_what_cannot_be_sent_is_found_deep_inside() -> None:
    value = {"config": [1, Mine({"handle": lock()})]}
    with pytest.raises(ShippingError, match=r"\['config'\] -> \[1\] -> \.value -> \['handle'\]"):
        serialize(value, "f")


def test_what_cannot_be_sent_is_found_behind_a_partial_and_a_method() -> None:
    with pytest.raises(ShippingError, match=r"_thread\.lock.*its arguments -> \[0\]"):
        serialize(functools.partial(scaled, lock()), "f")


GLOBAL = lock()


def uses_a_global() -> Any:
    return GLOBAL


def test_a_global_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(ShippingError, match=r"_thread\.lock.*'GLOBAL', a global of uses_a_global"):
        serialize(uses_a_global, "f")


class Refuses:
    """Cannot be sent, whatever it holds."""

    def __init__(self) -> None:
        self.held = lock()

    def __reduce__(self) -> Any:
        raise TypeError("it stays here")


def test_an_object_that_refuses_is_named_and_not_what_it_holds() -> None:
    with pytest.raises(
        ShippingError, match=r"f: an object of type .*Refuses, .*\[0\], cannot be sent.*: it stays here"
    ):
        serialize([Refuses()], "f")
