import copy
import inspect
import pickle
import re

import pytest

from nrl import errors
from nrl.errors import LostActor, MissingColumn, MissingOutput, NrlError, RolloutMismatch

CLASSES = [getattr(errors, name) for name in errors.__all__]
MESSAGE = "my_loss: 'rewards' is wrong; do this instead"


def build(cls: type[NrlError]) -> NrlError:
    if cls is MissingColumn:
        return MissingColumn("my_loss", "rewards", ["input_ids", "valid"], "Add it.")
    if issubclass(cls, LostActor):
        return cls("train_step(my_loss)", "trainer", 1, "10.0.0.3", "killed by signal 9", "loading\n")
    if cls is RolloutMismatch:
        return RolloutMismatch(0.5, 0.25, 6.0, 2.0, 0.1, "Sample with less lag.")
    return cls(MESSAGE)


def test_all_is_what_the_module_defines() -> None:
    defined = {name for name, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__}
    assert set(errors.__all__) == defined
    assert errors.__all__ == sorted(errors.__all__)


def test_the_tree_in_the_docstring_is_the_real_tree() -> None:
    drawn = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│├└─ ]*)([A-Z]\w+)(?: \(([\w, ]+)\))?(?:  |$)", line)
        if match:
            prefix, name, mixins = match.groups()
            path = [*path[: len(prefix) // 4], name]
            drawn[name] = {path[-2] if len(path) > 1 else "Exception", *(mixins.split(", ") if mixins else ())}
    real = {cls.__name__: {base.__name__ for base in cls.__bases__} for cls in CLASSES}
    assert drawn == real


@pytest.mark.parametrize("cls", CLASSES)
def test_the_root_catches_it(cls: type[NrlError]) -> None:
    with pytest.raises(NrlError):
        raise build(cls)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("cls", CLASSES)
def test_it_survives_pickling(cls: type[NrlError], protocol: int) -> None:
    error = build(cls)
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is cls
    assert str(back) == str(error)
    assert back.args == error.args
    assert vars(back) == vars(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_it_can_be_copied(cls: type[NrlError]) -> None:
    assert str(copy.deepcopy(build(cls))) == str(build(cls))


OF_PARTS = MissingColumn | LostActor | RolloutMismatch


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if not issubclass(cls, OF_PARTS)])
def test_the_message_is_printed_as_it_was_given(cls: type[NrlError]) -> None:
    assert str(cls(MESSAGE)) == MESSAGE


@pytest.mark.parametrize("cls", CLASSES)
def test_it_says_when_it_is_raised(cls: type[NrlError]) -> None:
    assert cls.__doc__
    assert "__doc__" in vars(cls)


def test_missing_column_says_who_reads_what_and_what_is_there() -> None:
    error = MissingColumn("grpo_loss", "advantages", ["input_ids", "rewards"], "Call advantages(batch).")
    assert str(error) == (
        "grpo_loss reads the column 'advantages', which this batch does not have. It has: input_ids, rewards. "
        "Call advantages(batch)."
    )
    assert (error.reader, error.column, error.hint) == ("grpo_loss", "advantages", "Call advantages(batch).")
    assert error.present == ("input_ids", "rewards")


def test_missing_column_of_an_empty_batch() -> None:
    assert str(MissingColumn("f", "rewards")) == (
        "f reads the column 'rewards', which this batch does not have. It has: no columns."
    )


def test_missing_column_takes_an_iterator_of_columns() -> None:
    error = MissingColumn("f", "x", iter(["a", "b"]))
    assert "It has: a, b." in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_missing_output_without_a_message() -> None:
    assert str(MissingOutput()) == ""


def test_a_lost_actor_without_a_rank_or_a_log() -> None:
    assert str(LostActor("generate", "sampler", None, "10.0.0.3", "the node left the cluster")) == (
        "generate: a rank of mesh 'sampler' on node 10.0.0.3 is lost: the node left the cluster."
    )


def test_a_lost_actor_knows_its_place() -> None:
    error = LostActor("generate", "sampler", 2, "10.0.0.3", "killed by signal 9", "a\nb\n")
    assert (error.who, error.mesh, error.rank, error.node) == ("generate", "sampler", 2, "10.0.0.3")
    assert (error.cause, error.log) == ("killed by signal 9", "a\nb\n")
    assert str(error).endswith("The last lines of its log:\n    a\n    b")


def test_a_rollout_mismatch_has_its_numbers() -> None:
    error = RolloutMismatch(0.5, 0.25, 6.0, None, 0.1, "Look here.")
    assert (error.kl, error.ess, error.max_abs, error.lag, error.bound) == (0.5, 0.25, 6.0, None, 0.1)
    assert str(error) == (
        "check_mismatch: trainer and sampler disagree: mismatch/kl is 0.5 nats a token, and the bound is 0.1 "
        "(mismatch/ess 0.25, mismatch/max_abs 6 nats, lag unknown). Look here."
    )
