"""A checkpoint is whole or not there, comes back as it was, and says so where it does not."""

import collections
import enum
import hashlib
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict

import nrl
from nrl import ahead, tiny
from nrl.algos import sft_loss
from nrl.backends import TrainState, adamw, fsdp, hf
from nrl.batch import Batch
from nrl.data import Source, counting
from nrl.errors import CheckpointError, ConsumedState, ModelError
from nrl.files import write_manifest
from nrl.run import checkpoint
from nrl.run.checkpoint import Checkpoint, Checkpoints, check, checkpoints, load, newest, save, store, verify
from nrl.runtime import Slots
from tests.children import child
from tests.disks import small_disk_at, transferred
from tests.weights import assert_equal, weights

KEEP = Checkpoints(every=1, keep=2)


def one_more(made: int) -> int:
    return made + 1


class Pair(NamedTuple):
    a: Any
    b: Any


@attrs.frozen
class Controller:
    target: float
    _value: Any = None
    made: int = attrs.field(default=0, converter=one_more)  # a second time through would be seen


class Colour(enum.IntEnum):
    RED = 1


def same(x: Any, y: Any) -> bool:
    """Equal, of the same types, to the last bit."""
    if type(x) is not type(y):
        return False
    if isinstance(x, torch.Tensor):
        return bool(x.dtype == y.dtype and x.shape == y.shape and x.numpy().tobytes() == y.numpy().tobytes())
    if isinstance(x, np.ndarray | np.generic):
        return bool(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes())
    if isinstance(x, TensorDict):
        alike = bool((set(x.keys()), x.batch_size, x.is_locked) == (set(y.keys()), y.batch_size, y.is_locked))
        return alike and all(same(value, y[key]) for key, value in x.items())
    if attrs.has(type(x)):
        return all(same(getattr(x, f.name), getattr(y, f.name)) for f in attrs.fields(type(x)))
    if isinstance(x, dict):
        pairs = zip(x.items(), y.items(), strict=True)  # in the same order
        return len(x) == len(y) and all(same(a, b) and same(v, w) for (a, v), (b, w) in pairs)
    if isinstance(x, list | tuple):
        return len(x) == len(y) and all(map(same, x, y))
    return bool(x == y) or (isinstance(x, float) and math.isnan(x) and math.isnan(y))


def hidden(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def names(root: Path) -> list[str]:
    return [found.folder.name for found in checkpoints(root)]


# --- plain data


DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@st.composite
def tensors(draw: st.DrawFn, leading: tuple[int, ...] = ()) -> torch.Tensor:
    shape = (*leading, *draw(st.lists(st.integers(0, 3), max_size=2)))
    numbers = torch.tensor(draw(st.lists(st.integers(-3, 3), min_size=math.prod(shape), max_size=math.prod(shape))))
    tensor = numbers.reshape(shape).to(draw(st.sampled_from([x for x in DTYPES if x is not torch.bfloat16])))
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.ndim > 1 and draw(st.booleans()) else tensor


@st.composite
def batches(draw: st.DrawFn, leading: tuple[int, ...] = (), depth: int = 1) -> TensorDict:
    size = (*leading, *draw(st.lists(st.integers(0, 3), max_size=2 - len(leading))))
    columns: dict[str, Any] = draw(st.dictionaries(st.sampled_from("abc"), tensors(size), max_size=3))
    if depth and draw(st.booleans()):
        columns["media"] = draw(batches(size, depth=depth - 1))
    made = TensorDict(columns, batch_size=size)
    return made.lock_() if draw(st.booleans()) else made


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**63, -(2**63), 2**64, 10**1000]),
    st.floats(),
    st.text(),
    st.binary(),
    tensors(),
    batches(),
    st.floats(width=32).map(np.float32),
    st.integers(0, 9).map(np.int64),
    st.lists(st.floats(), max_size=3).map(np.array),
    st.floats().map(np.array),
)
KEYS = st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.tuples(st.integers(), st.text(max_size=2)))
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Controller, st.floats(), inner),
    ),
    max_leaves=8,
)


@settings(max_examples=150)
@given(value=TREES)
def test_plain_data_comes_back_as_it_was(value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("plain")
    made = save(root / "000001", 0, {"value": value})
    (again,) = load(made.folder, value=value)
    assert same(again, value)
    shutil.rmtree(root)


def test_same_sees_differences() -> None:
    for x, y in [(1, True), (1.0, 1), ((1,), [1]), (Pair(1, 2), (1, 2)), (np.float32(1), np.float64(1)), ({}, [])]:
        assert not same(x, y)
    one = TensorDict({"a": torch.ones(1)}, batch_size=[1])
    assert not same(one, one.clone().lock_())
    assert not same(torch.tensor(0.0), torch.tensor(-0.0))
    assert same(torch.tensor(math.nan), torch.tensor(math.nan))


def test_fields_are_set_and_not_made_again(tmp_path: Path) -> None:
    value = Controller(0.5, 0.25, 0)
    assert value.made == 1
    made = save(tmp_path / "000001", 0, {"kl": value})
    assert load(made.folder, kl=Controller(9.0)) == [value]


def test_a_list_of_instances_may_have_grown(tmp_path: Path) -> None:
    value = [Pair(1, 2), Pair(3, 4), Pair(5, 6)]
    made = save(tmp_path / "000001", 0, {"pairs": value})
    assert same(load(made.folder, pairs=[Pair(0, 0)])[0], value)


def test_a_view_does_not_bring_its_storage(tmp_path: Path) -> None:
    whole = torch.arange(1_000_000)
    made = save(tmp_path / "000001", 0, {"some": whole[10:13], "batch": Batch({"a": whole[:2]}, batch_size=[2])})
    assert (made.folder / "some.pt").stat().st_size < 5000
    assert (made.folder / "batch.pt").stat().st_size < 5000
    assert load(made.folder, some=None, batch=None)[0].tolist() == [10, 11, 12]


def test_bfloat16(tmp_path: Path) -> None:
    value = torch.tensor([1.5, -0.0, math.inf], dtype=torch.bfloat16)
    (again,) = load(save(tmp_path / "000001", 0, {"x": value}).folder, x=None)
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.view(torch.int16), value.view(torch.int16))


@pytest.mark.parametrize(
    ("value", "path", "kind"),
    [
        ({1}, "x", "a set"),
        ([0, {"deep": {1}}], r"x\[1\].deep", "a set"),
        (Controller(1.0, object()), "x._value", "an object"),
        (Pair(1, Path()), "x.b", "a PosixPath"),
        (Colour.RED, "x", "a Colour"),
        ({(1, Colour.RED): 1}, r"x, key \(1, .*\)\[1\]", "a Colour"),
        (collections.Counter("aa"), "x", "a Counter"),
        (collections.OrderedDict(), "x", "an OrderedDict"),
        (torch.Size([1]), "x", "a Size"),
        (1j, "x", "a complex"),
        (np.array(["a"]), "x", "a NumPy <U1"),
        (np.array([object()]), "x", "a NumPy object"),
        (random.Random(0), "x", "a Random"),
        (len, "x", "a builtin_function_or_method"),
    ],
)
def test_what_cannot_be_held_is_refused_before_anything_is_written(
    value: Any, path: str, kind: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=rf"^save: '{path}' is {kind}, which a checkpoint cannot hold; give "):
        save(tmp_path / "deep" / "000001", 0, {"x": value})
    assert list(tmp_path.iterdir()) == []


def test_a_stream_holds_no_instances_for_nobody_would_have_an_example(tmp_path: Path) -> None:
    early = ahead(counting(lambda index: Pair(index, index)), 1)
    early.take(1)
    message = r"save: 'stream.pending\[0\]' is a Pair, .*; in the state of a stream give a dict in its place"
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "000001", 0, {"stream": early})


@pytest.mark.parametrize("name", ["", "a/b", "..", "random generators", "a b"])
def test_a_name_is_an_identifier(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"save: '{name}' cannot name a value; give a Python name"):
        save(tmp_path / "000001", 0, {name: 1})


def test_any_identifier_will_do(tmp_path: Path) -> None:
    named = {"random": 1, "manifest": 2, "json": 3, "self": 4, "folder": 5}
    assert load(save(tmp_path / "000001", 0, named).folder, **dict.fromkeys(named)) == [1, 2, 3, 4, 5]


def test_a_trainer_is_no_value() -> None:
    with nrl.cluster("local") as cluster:
        trainer = fsdp.trainer(cluster.reserve(1), tiny.model(), adamw(lr=1e-3))
        with pytest.raises(CheckpointError, match="save: 'policy' is a trainer; give its train state"):
            check({"policy": trainer})


# --- what load is told


def test_other_names(tmp_path: Path) -> None:
    made = save(tmp_path / "000001", 0, {"kl": 1, "stream": counting()})
    message = r"load: .*000001 holds kl, stream, and the program asks for kl, policy; give the same names to restore"
    with pytest.raises(CheckpointError, match=message):
        load(made.folder, kl=0, policy=0)
    with pytest.raises(CheckpointError, match="holds kl, stream, and the program asks for nothing"):
        load(made.folder)


@pytest.mark.parametrize(
    ("saved", "like", "message"),
    [
        (counting(), 0, "'x' was saved as a stream, and restore was given an int"),
        (0, counting(), "'x' was saved as plain data, and restore was given a Source"),
        (
            Pair(1, 2),
            None,
            "'x' was saved as a Pair with the fields a, b, and the program has a NoneType with no fields",
        ),
        ([Pair(1, 2)], [], r"'x\[0\]' was saved as a Pair"),
        (
            Pair(1, 2),
            Controller(1.0),
            "saved as a Pair with .* has a Controller with target, _value, made in its place",
        ),
        (Controller(1.0), {}, "saved as a Controller with the fields target, _value, made"),
    ],
)
def test_another_kind_under_a_name(saved: Any, like: Any, message: str, tmp_path: Path) -> None:
    made = save(tmp_path / "000001", 0, {"x": saved})
    with pytest.raises(CheckpointError, match=f"^load: .*{message}"):
        load(made.folder, x=like)


class Evil:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return Path.touch, (self.proof,)


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path) -> None:
    made = save(tmp_path / "000001", 0, {"x": 1})
    torch.save(Evil(tmp_path / "proof"), tmp_path / "000001" / "x.pt")
    with pytest.raises(CheckpointError, match="load: .*x.pt holds something that is no data; .* nothing of it was run"):
        load(made.folder, x=0)
    (made.folder / "x.pt").write_bytes(pickle.dumps(Evil(tmp_path / "proof"), protocol=2))
    with pytest.raises(CheckpointError, match="holds something that is no data"):
        load(made.folder, x=0)
    assert not (tmp_path / "proof").exists()
    pickle.loads(pickle.dumps(Evil(tmp_path / "proof")))
    assert (tmp_path / "proof").exists()  # it would have


def test_random_generators_go_on(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(),
            float(np.random.random()),
            float(np.random.normal()),
            float(torch.rand(1)),
        ]

    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()
    made = save(tmp_path / "000001", 0, {})
    expected = [draw(), draw()]
    load(made.folder)
    assert [draw(), draw()] == expected


def test_streams_go_on_after_what_was_consumed(tmp_path: Path) -> None:
    calls: list[int] = []

    def item(index: int) -> Batch:
        calls.append(index)
        return Batch({"a": torch.tensor([index]), "of": torch.tensor([len(calls)])}, batch_size=[1])

    def stream() -> Source[Batch]:
        return ahead(counting(item), 2)

    first = stream()
    first.take(3)
    made = save(tmp_path / "000001", 0, {"stream": first})
    calls.append(-1)  # what is pending is not made again: it would know
    second = stream()
    (again,) = load(made.folder, stream=second)
    assert again is second
    assert [int(batch["a"]) for batch in second.take(3)] == [3, 4, 5]
    assert [int(batch["of"]) for batch in load(made.folder, stream=stream())[0].take(2)] == [4, 5]
    assert all(batch.is_locked for batch in second.state()["pending"]) == all(x.is_locked for x in first.take(1))


# --- damage


def damages(folder: Path) -> Iterator[tuple[str, Callable[[], object], str]]:
    """Every file of a checkpoint, cut short, emptied, with a flipped bit, and gone."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data, name = path.read_bytes(), str(path.relative_to(folder))
        broken = "manifest.json is missing or was altered" if name == "manifest.json" else f"the file {name} "
        yield f"{name} short", partial(path.write_bytes, data[:-1]), broken
        yield f"{name} empty", partial(path.write_bytes, b""), broken
        for at in (0, len(data) // 3, len(data) // 2, len(data) - 3):
            flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            yield f"{name} flipped at {at}", partial(path.write_bytes, flipped), broken
        yield f"{name} gone", path.unlink, broken


def test_every_damage_is_found_said_and_set_aside(tmp_path: Path) -> None:
    original = tmp_path / "original"
    for step in (0, 1):
        save(original / f"{step + 1:06}", step, {"x": torch.arange(100) + step}, {"metrics": {"loss": 1.5}})
    kinds = [kind for kind, _, _ in damages(original / "000002")]
    assert len(kinds) == 3 * 7
    for i, kind in enumerate(kinds):
        root = tmp_path / "root"
        shutil.copytree(original, root)
        _, damage, message = list(damages(root / "000002"))[i]
        damage()
        with pytest.raises(CheckpointError, match=message):
            verify(root / "000002")
        said: list[str] = []
        found = newest(root, said.append)
        assert found is not None, kind
        assert (found.folder.name, found.step, found.meta) == ("000001", 0, {"metrics": {"loss": 1.5}})
        assert len(said) == 1
        assert message in said[0]
        assert said[0].endswith("it is now 000002.damaged, and 000001 is used")
        assert sorted(path.name for path in root.iterdir()) == ["000001", "000002.damaged"]
        assert newest(root, said.append) == found
        assert len(said) == 1
        save(root / "000002", 1, {"x": 1})  # its name is free again
        assert newest(root) is not None
        shutil.rmtree(root)


def test_a_manifest_whose_numbers_were_changed(tmp_path: Path) -> None:
    made = save(tmp_path / "000010", 9, {"x": 1}, {"files": {"metrics.jsonl": 100}})
    text = (made.folder / "manifest.json").read_text()
    (made.folder / "manifest.json").write_text(text.replace('"step": 9', '"step": 8'))
    with pytest.raises(CheckpointError, match="manifest.json is missing or was altered"):
        verify(made.folder)


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"sha256": 1}', "\xff"])
def test_a_manifest_that_is_none(text: str, tmp_path: Path) -> None:
    made = save(tmp_path / "000010", 9, {"x": 1})
    (made.folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"000010: its manifest.json is missing or was altered"):
        verify(made.folder)
    assert checkpoints(tmp_path) == [Checkpoint(made.folder, 9, {})]


def test_all_damaged_is_an_error_the_second_time_too(tmp_path: Path) -> None:
    for step in (0, 1):
        (save(tmp_path / f"{step + 1:06}", step, {"x": 1}).folder / "x.pt").write_bytes(b"")
    for _ in range(2):  # a program that is simply started again must not begin from nothing
        with pytest.raises(CheckpointError) as caught:
            newest(tmp_path)
        assert str(caught.value).startswith(f"{tmp_path}: none of its 2 checkpoints is what was written (")
        assert "000002: the file x.pt has 0 bytes, and had" in str(caught.value)
        assert str(caught.value).endswith(f"mend the newest, or remove {tmp_path} to start from the beginning")
    assert names(tmp_path) == ["000001", "000002"]


# --- retention


def fill(root: Path, metrics: list[float | None], keep: Checkpoints) -> None:
    for step, value in enumerate(metrics):
        store(root, step, {"x": step}, keep, {"metrics": {} if value is None else {"eval/reward": value}})


@pytest.mark.parametrize(
    ("metrics", "keep", "left"),
    [
        ([None] * 4, Checkpoints(keep=1), [4]),
        ([None] * 4, Checkpoints(keep=3), [2, 3, 4]),
        ([0.5, 0.1, 0.2, 0.3], Checkpoints(keep=2), [3, 4]),
        ([0.1, 0.5, 0.2, 0.3], Checkpoints(keep=1, best="eval/reward"), [2, 4]),
        ([0.1, 0.5, 0.2, 0.3], Checkpoints(keep=1, best="eval/reward", mode="min"), [1, 4]),
        ([0.1, 0.5, 0.5, 0.3], Checkpoints(keep=1, best="eval/reward"), [2, 4]),  # of equal ones the first
        ([0.1, math.nan, 0.0, None], Checkpoints(keep=1, best="eval/reward"), [1, 4]),
        ([0.1, math.inf, 0.0, None], Checkpoints(keep=1, best="eval/reward"), [1, 4]),
        ([0.1, 0.2, 0.3, 0.4], Checkpoints(keep=1, best="eval/reward"), [4]),
        ([0.1, 0.2, 0.3, 0.4], Checkpoints(keep=1, best="eval/loss"), [4]),
    ],
)
def test_what_is_kept(metrics: list[float | None], keep: Checkpoints, left: list[int], tmp_path: Path) -> None:
    fill(tmp_path, metrics, keep)
    assert [found.step + 1 for found in checkpoints(tmp_path)] == left
    assert hidden(tmp_path) == []


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (999_998, 999_999, 1_000_000):
        store(tmp_path, step, {"x": step}, KEEP, {})
    assert names(tmp_path) == ["1000000", "1000001"]
    found = newest(tmp_path)
    assert found is not None
    assert found.step == 1_000_000


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes", "000001.damaged", ".hidden", "2 of mine"):
        (tmp_path / name).mkdir()
    fill(tmp_path, [None] * 4, Checkpoints(keep=1))
    newest(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".hidden",
        "000001.damaged",
        "000004",
        "2 of mine",
        "notes",
    ]


# --- crashes


CRASH = 9
OPERATIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.scandir", "shutil.rmtree"}


def crash_at(nth: int) -> None:
    """End this process, as a SIGKILL would, before its n-th operation on a file; deletions are relative to a folder."""
    left = nth

    def count(event: str, _: tuple[Any, ...]) -> None:
        nonlocal left
        if event in OPERATIONS:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


def prepared(case: str, root: Path) -> tuple[set[int], int]:
    """What a crash while the checkpoint of the returned step is stored may leave, besides its new value, 1000."""
    steps = {"first": 0, "next": 1, "replace": 2, "retention": 2, "best": 2, "leftovers": 1}[case]
    for step in range(steps):
        store(root, step, {"x": step}, Checkpoints(keep=9), {"metrics": {"m": float(-step)}})
    if case == "leftovers":
        for name in (".000002.writing/deep", ".000001.old", ".000007.gone/deep"):
            (root / name).mkdir(parents=True)
    return ({steps - 1} if steps else set()), (steps - 1 if case == "replace" else steps)


def crash_everywhere(case: str, folder: Path) -> None:
    """In a process of its own, for it forks."""
    torch.set_num_threads(1)
    keep = Checkpoints(keep=1, best="m" if case == "best" else None)
    seen: collections.Counter[int] = collections.Counter()
    for nth in range(1, 1000):
        root = folder / str(nth)
        root.mkdir()
        olds, step = prepared(case, root)
        pid = os.fork()
        if pid == 0:
            crash_at(nth)
            store(root, step, {"x": 1000}, keep, {"metrics": {"m": -9.0}})
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        for listed in checkpoints(root):  # before anything is tidied
            verify(listed.folder)
        said: list[str] = []
        found = newest(root, said.append)
        assert said == []  # nothing is damaged
        assert hidden(root) == []
        if found is None:
            assert olds == set()
            value = -1
        else:
            verify(found.folder)
            (value,) = load(found.folder, x=0)
            assert value in olds | {1000}
            assert found.step == (step if value == 1000 else step if case == "replace" else step - 1)
        if case == "best":
            assert "000001" in names(root)
        seen[value] += 1
        store(root, step, {"x": 2000}, keep, {"metrics": {"m": -9.0}})  # and all goes on
        assert load(root / f"{step + 1:06}", x=0) == [2000]
        assert hidden(root) == []
        assert names(root) == sorted({f"{step + 1:06}"} | ({"000001"} if case == "best" else set()))
        shutil.rmtree(root)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    print(f"{case}: {nth} operations")
    assert nth > 10, nth
    assert sum(seen.values()) == nth
    assert set(seen) == (olds or {-1}) | {1000}  # there were crashes before and after


@pytest.mark.parametrize("case", ["first", "next", "replace", "retention", "best", "leftovers"])
def test_a_crash_at_every_operation_leaves_the_old_or_the_new(case: str, tmp_path: Path) -> None:
    assert child(crash_everywhere, case, tmp_path) == 0


# --- full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk_at(tmp_path / "disk", megabytes=1) as disk:
        yield disk


def ballast(disk: Path, free: int) -> Path:
    """A file that leaves so many bytes."""
    path = disk / "ballast"
    path.write_bytes(b"")
    path.write_bytes(b"\0" * (shutil.disk_usage(disk).free - free))
    return path


def test_a_full_disk(small_disk: Path) -> None:
    root = small_disk / "checkpoints"
    good = save(root / "000001", 0, {"x": torch.arange(20_000)})
    failed = 0
    for free in range(0, 400_000, 4096):  # wherever it is that there is no more room
        heavy = ballast(small_disk, free)
        try:
            made = save(root / "000002", 1, {"x": torch.arange(20_000), "y": b"y" * 100_000})
        except CheckpointError as error:
            failed += 1
            message = str(error)
            assert message.startswith(f"save: the checkpoint {root / '000002'} could not be written after ")
            assert "No space left on device" in message or "the disk took no more" in message
            assert f"MB are free in {root}" in message
            assert message.endswith("The last good one is 000001. Make room, and start the same command again")
            assert [path.name for path in root.iterdir()] == ["000001"]
            verify(good.folder)
        else:
            verify(made.folder)
            shutil.rmtree(str(made.folder))
        heavy.unlink()
    assert 50 < failed < 98
    assert load(save(root / "000002", 1, {"x": 3}).folder, x=0) == [3]


def limited(root: Path, size: int) -> None:
    """A limit on the size of files, as a quota would: EFBIG in place of ENOSPC."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError, match=r"could not be written .* The last good one is 000001. Make room"):
        save(root / "000002", 1, {"x": torch.arange(100_000), "y": b"y" * 100_000})
    assert [path.name for path in root.iterdir()] == ["000001"]
    with pytest.raises(CheckpointError, match=r"could not be written .* There is none before it. Make room"):
        save(root / "other" / "000002", 1, {"y": b"y" * 100_000})


@pytest.mark.parametrize("size", [1, 4096, 100_000])
def test_files_that_may_not_grow(size: int, tmp_path: Path) -> None:
    good = save(tmp_path / "000001", 0, {"x": 1})
    assert child(limited, tmp_path, size) == 0
    verify(good.folder)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"could not be written after 0.0 MB \((Not a directory|File exists); "):
        save(tmp_path / "file" / "000001", 0, {"x": 1})


def test_an_error_of_the_program_is_its_own_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="JSON serializable"):
        save(tmp_path / "000001", 0, {"x": 1}, {"odd": object()})
    assert list(tmp_path.iterdir()) == []


# --- train states and params


def rows(seed: int) -> Batch:
    ids = torch.randint(3, 20, (4, 6), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(4, 6, dtype=torch.bool)
    return Batch({"input_ids": ids, "attention_mask": mask, "loss_mask": mask}, batch_size=[4])


def stepped(trainer: Any, state: TrainState, seeds: range) -> TrainState:
    step = trainer.train_step(sft_loss)
    for seed in seeds:
        state, _ = step(state, rows(seed))
    return state


def make(slots: Slots, **changes: Any) -> Any:
    return fsdp.trainer(slots[:1], attrs.evolve(tiny.model(), **changes), adamw(lr=1e-2, betas=(0.9, 0.95)))


def test_a_train_state_goes_on_to_the_last_bit(slots: Slots, tmp_path: Path) -> None:
    trainer, sampler = make(slots), hf.sampler(slots[1:2], tiny.model())
    state = stepped(trainer, trainer.init(), range(3))
    nrl.publish(state.params, sampler)
    nrl.publish(state.params, sampler)
    made = save(tmp_path / "000003", 2, {"policy": state})
    whole = stepped(trainer, state, range(3, 6))
    other = make(slots)
    (again,) = load(made.folder, policy=other)
    assert (again.step, again.version, again.params.published) == (3, 1, True)
    fresh = hf.sampler(slots[1:2], tiny.model())
    assert nrl.publish(again.params, fresh) == 1  # published already: under the version it had
    assert fresh.version == 1
    again = stepped(other, again, range(3, 6))
    assert nrl.publish(again.params, fresh) == 2
    assert_equal(weights(again), weights(whole))


def test_settings_of_the_optimizer_are_those_of_the_configuration(slots: Slots, tmp_path: Path) -> None:
    def after(**settings: Any) -> torch.Tensor:
        trainer = fsdp.trainer(slots[:1], tiny.model(), adamw(**({"lr": 1e-2} | settings)))
        (state,) = load(made.folder, policy=trainer)
        return torch.cat([tensor.flatten() for tensor in weights(stepped(trainer, state, range(3, 4))).values()])

    trainer = fsdp.trainer(slots[:1], tiny.model(), adamw(lr=1e-2))
    made = save(tmp_path / "000003", 2, {"policy": stepped(trainer, trainer.init(), range(3))})
    same_again = after()
    assert torch.equal(same_again, after())
    for other in ({"weight_decay": 0.5}, {"betas": (0.5, 0.5)}, {"eps": 1e-2}, {"lr": 1e-3}):
        assert not torch.equal(same_again, after(**other)), other


def test_a_template_state_is_donated(slots: Slots, tmp_path: Path) -> None:
    trainer = make(slots)
    template = stepped(trainer, trainer.init(), range(1))
    made = save(tmp_path / "000001", 0, {"policy": template})
    params = template.params
    (state,) = load(made.folder, policy=template)
    assert state.step == 1
    for use in (
        lambda: template.params,
        lambda: params.tensors("read").__next__(),
        lambda: stepped(trainer, template, range(1)),
    ):
        with pytest.raises(ConsumedState, match="consumed by restore"):
            use()
    with pytest.raises(ConsumedState):
        load(made.folder, policy=template)


def test_a_consumed_state_cannot_be_saved(slots: Slots, tmp_path: Path) -> None:
    trainer = make(slots)
    old = trainer.init()
    stepped(trainer, old, range(1))
    with pytest.raises(ConsumedState, match="save: this train state was consumed by train_step"):
        save(tmp_path / "000001", 0, {"policy": old})
    assert list(tmp_path.iterdir()) == []


def test_frozen_params_come_back_with_their_version(slots: Slots, tmp_path: Path) -> None:
    trainer, sampler = make(slots), hf.sampler(slots[1:2], tiny.model())
    state = stepped(trainer, trainer.init(), range(2))
    nrl.publish(state.params, sampler)
    published, never = trainer.freeze(state.params), trainer.load()
    made = save(tmp_path / "000001", 0, {"ref": published, "first": never})
    expected = weights(published)
    stepped(trainer, state, range(2, 3))
    ref, first = load(made.folder, ref=trainer.load(), first=trainer.load())
    assert (ref.version, ref.published, first.version, first.published) == (1, True, 0, False)
    assert_equal(weights(ref), expected)
    assert nrl.publish(ref, hf.sampler(slots[1:2], tiny.model())) == 1
    assert torch.equal(trainer.logprobs(ref, rows(0)).result(), trainer.logprobs(published, rows(0)).result())


def test_a_trainer_of_another_model(slots: Slots, tmp_path: Path) -> None:
    trainer = make(slots)
    made = save(tmp_path / "000001", 0, {"policy": trainer.init(), "ref": trainer.load()})
    source = dict(tiny.model().source)  # type: ignore[arg-type]
    other = make(slots, source=source | {"intermediate_size": source["intermediate_size"] * 2})
    message = r"'.*mlp.*' has shape \[\d+, \d+\], and here it is \[\d+, \d+\]; build both sides from the same Model"
    with pytest.raises(ModelError, match=message):
        load(made.folder, policy=other, ref=trainer.load())
    with pytest.raises(ModelError, match=f"^restore: {message}"):
        load(made.folder, policy=trainer, ref=other.load())


@pytest.mark.parametrize(("saved", "like"), [("state", "plain"), ("plain", "state"), ("state", "stream")])
def test_a_state_where_there_is_none(saved: str, like: str, slots: Slots, tmp_path: Path) -> None:
    trainer = make(slots)
    values = {"state": trainer.init(), "plain": 0, "stream": counting()}
    made = save(tmp_path / "000001", 0, {"x": values[saved]})
    with pytest.raises(
        CheckpointError, match=r"load: 'x' was saved as .*, and restore was given an? .*; give the same"
    ):
        load(made.folder, x=values[like])


def test_weights_are_read_as_data_only(slots: Slots, tmp_path: Path) -> None:
    trainer = make(slots)
    made = save(tmp_path / "000001", 0, {"policy": trainer.init()})
    weights = tmp_path / "000001" / "policy" / "00001-of-00001.safetensors"
    torch.save(Evil(tmp_path / "proof"), weights)
    told = json.loads((made.folder / "manifest.json").read_text())
    told["files"][f"policy/{weights.name}"][0] = weights.stat().st_size
    write_manifest(made.folder, told["files"], told["values"], step=0, meta={})
    with pytest.raises(CheckpointError, match=r"00001-of-00001.safetensors is not what a trainer saved \(Safetensor"):
        load(made.folder, policy=trainer)
    assert not (tmp_path / "proof").exists()


def test_a_full_disk_under_a_train_state(slots: Slots, small_disk: Path) -> None:
    trainer = make(slots)
    with pytest.raises(CheckpointError, match=r"could not be written after \d\.\d MB .* There is none before it"):
        save(small_disk / "000001", 0, {"a": trainer.init(), "b": trainer.init(), "c": trainer.init()})
    assert list(small_disk.iterdir()) == []


def test_nothing_is_read_back_to_be_hashed(slots: Slots, tmp_path: Path) -> None:
    state = make(slots).init()
    read, wrote = transferred()
    made = save(tmp_path / "000001", 0, {"policy": state, "x": torch.zeros(500_000), "text": b"y" * 1_000_000})
    size = sum(path.stat().st_size for path in made.folder.rglob("*") if path.is_file())
    read, wrote = (after - before for after, before in zip(transferred(), (read, wrote), strict=True))
    assert size > 4e6
    assert wrote >= size
    assert read < size / 20
    verify(made.folder)


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    made = checkpoint.store(tmp_path, 4, {"b": 1, "a": 2}, KEEP, {"metrics": {"loss": 0.5}})
    manifest = json.loads((made / "manifest.json").read_text())
    assert (manifest["step"], manifest["meta"]) == (4, {"metrics": {"loss": 0.5}})
    assert manifest["values"] == {"a": None, "b": None}
    assert sorted(manifest["files"]) == ["a.pt", "b.pt", "random generators.pt"]


def test_a_state_has_no_manifest_of_its_own(slots: Slots, tmp_path: Path) -> None:
    trainer = make(slots)
    state = trainer.init()
    made = save(tmp_path / "000001", 0, {"policy": state, "count": 1})
    assert [path.parent for path in tmp_path.rglob("manifest.json")] == [tmp_path / "000001"]
    again = trainer.restore(made.folder / "policy")
    assert same(dict(again.params.tensors()), dict(state.params.tensors()))
    with pytest.raises(FileNotFoundError, match="restore: nothing that a trainer saved is in .*/count"):
        trainer.restore(made.folder / "count")


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (lambda name: not name.endswith(".safetensors"), "nothing is there of what processes wrote"),
        (lambda name: True, "of what 2 processes wrote, 00002-of-00002.safetensors is missing"),
    ],
)
def test_a_manifest_that_lists_too_few_files(
    slots: Slots, tmp_path: Path, kept: Callable[[str], bool], message: str
) -> None:
    """Its checksums are right, and all that it lists is there: as where one host of two sees another disk."""
    trainer = make(slots)
    for step in (0, 1):
        made = save(tmp_path / f"{step + 1:06}", step, {"policy": trainer.init(), "count": step})
    parts = (tmp_path / "000002" / "policy" / f"00001-of-0000{count}.safetensors" for count in (1, 2))
    next(parts).rename(next(parts))
    told = json.loads((made.folder / "manifest.json").read_text())
    listed = {name.replace("of-00001", "of-00002"): x for name, x in told["files"].items()}
    listed = {name: x for name, x in listed.items() if kept(name)}
    write_manifest(made.folder, listed, told["values"], step=1, meta={})
    said, message = list[str](), f"{made.folder}/policy: {message}"
    for use in (verify, lambda folder: load(folder, policy=trainer, count=0)):
        with pytest.raises(CheckpointError, match=f"^{message}"):
            use(made.folder)
    found = newest(tmp_path, said.append)
    assert found is not None
    assert (found.step, said) == (0, [f"checkpoint: {message}; it is now 000002.damaged, and 000001 is used"])


def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    made = save(tmp_path / "000010", 9, {"count": 1})
    old = {"step": 9, "names": ["count"], "meta": {}}
    sealed = old | {"sha256": hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()}
    (made.folder / "manifest.json").write_text(json.dumps(sealed))
    with pytest.raises(CheckpointError, match=f"load: {made.folder} was written by an earlier version .*start in"):
        load(made.folder, count=0)
