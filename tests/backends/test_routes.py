"""How weights get to engines where slots are GPUs: here CPUs are said to be some, and gloo stands for NCCL."""

import os
import signal
from collections.abc import Callable
from functools import partial

import pytest
import torch

import nrl
from nrl import tiny
from nrl.backends import Params, Sampling, adamw, fsdp
from nrl.backends.hf.hf_engine import HfEngine
from nrl.backends.sampling.pool import EnginePool
from nrl.backends.training import weight_stream
from nrl.batch import Batch
from nrl.errors import CorruptedTransfer, TransferError
from nrl.runtime import Cluster, Mesh, P, shard_map, transfer
from nrl.runtime.mesh.current_process import Process, enter_process
from nrl.runtime.mesh.local import LocalCluster
from nrl.runtime.mesh.processes import Out
from tests.gpus import with_gpus
from tests.processes import settled

PROMPT = [5, 6, 7]


def params(mesh: Mesh, seed: int) -> Params:
    model = tiny.model(seed=seed, initializer_range=0.2)
    return fsdp.trainer(mesh, model, adamw(lr=1e-3)).init().params


def check_agreement(sampler: EnginePool, weights: Params) -> None:
    """Every engine computes what the trainer does."""
    rows = sampler.everywhere(PROMPT, Sampling(temperature=0, max_new_tokens=4)).result(100)
    for row in rows:
        ids = torch.tensor([[*PROMPT, *row.token_ids.tolist()]])
        batch = Batch({"input_ids": ids, "attention_mask": ids > -1}, batch_size=[1])
        (found,) = weights.trainer.logprobs(weights, batch.lock_()).result()
        torch.testing.assert_close(row.logprobs, found[3:], atol=1e-5, rtol=0)


def inside(mesh: Mesh, fn: Callable[[], int]) -> int:
    """Call something in the process of a mesh."""
    return int(shard_map(fn, mesh, (), P())().result())


def engines(meshes: list[Mesh]) -> EnginePool:
    make, model = partial(HfEngine, tiny.model()), tiny.model()
    return EnginePool("hf.sampler", meshes, make, model, Sampling(max_new_tokens=4))


def many_buckets() -> int:
    weight_stream._BUCKET = 20_000
    return 0


def groups() -> int:
    return len(transfer._GROUPS)


def dies_when_it_receives() -> int:
    transfer._receive_broadcast = lambda parcel: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,return-value]
    return 0


def casts(cluster: Cluster) -> None:
    """All buckets, twice over the same process group; and when an engine dies of it, by value, and cast again.

    Two processes share the model, and put each bucket together before the first one casts it.
    """
    slots = cluster.reserve(4)
    mesh = slots[:2].mesh(executable="system", name="routes: trainer")
    sampler = engines([slots[i].mesh(executable="system", name=f"routes: engine {i}") for i in (2, 3)])
    inside(mesh, many_buckets)
    for seed in (1, 2):
        weights = params(mesh, seed)
        nrl.publish(weights, sampler)
        check_agreement(sampler, weights)
    assert [inside(replica.mesh, groups) for replica in sampler._replicas] == [1, 1]

    inside(sampler._replicas[0].mesh, dies_when_it_receives)
    weights = params(mesh, 3)
    with pytest.warns(UserWarning, match="the weights go by value now, which is slower: "):
        nrl.publish(weights, sampler)
    check_agreement(sampler, weights)
    settled(
        lambda: any(replica.state == "starting" for replica in sampler._replicas), 200
    )  # until it has been started again
    weights = params(mesh, 4)
    nrl.publish(weights, sampler)
    check_agreement(sampler, weights)
    assert [inside(replica.mesh, groups) for replica in sampler._replicas] == [1, 1]


def lends_memory() -> int:
    """As if it were a GPU's."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    transfer._is_lendable = lambda tensor: True
    return 0


def lends(cluster: Cluster) -> None:
    """Neither rests meanwhile, and the trainer does when the engine decodes."""
    slots = cluster.reserve(1)
    mesh = slots.mesh(executable="system", name="routes: lender")
    sampler = engines([slots.mesh(executable="system", name="routes: borrower")])
    inside(mesh, lends_memory)
    for seed in (1, 2):
        weights = params(mesh, seed)
        nrl.publish(weights, sampler)
        check_agreement(sampler, weights)


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_weights_go_between_gpus() -> None:
    with_gpus(lends, casts)


def test_which_way_weights_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with nrl.cluster("local") as here:
        slots = here.reserve(4)
        trainer, same, part, other = slots[:2].mesh(), slots[1:2].mesh(), slots[1:3].mesh(), slots[2:].mesh()
        assert transfer.choose_route(trainer, [other]) == (transfer.by_value, Out.all, False)
        monkeypatch.setattr(LocalCluster, "are_gpus", lambda cluster, indices: True)
        assert transfer.choose_route(trainer, []) == (transfer.by_value, Out.all, False)
        lend = transfer.choose_route(trainer, [same])
        assert lend == (transfer._Lend(frozenset([1])), Out.per_shard, True)
        assert transfer.choose_route(trainer, [slots[:1].mesh(), same]).send == transfer._Lend(frozenset([0, 1]))
        assert transfer.choose_route(trainer, [part]) == transfer.choose_route(trainer, [same, other])
        assert transfer.choose_route(trainer, [part]) == (transfer.by_value, Out.all, False)
        cast = transfer.choose_route(trainer, [other])
        assert cast == transfer.choose_route(trainer, [other])  # they meet once
        assert cast not in (transfer.choose_route(trainer, [slots[2:].mesh()]), (transfer.by_value, Out.all, False))


def test_a_process_lends_nothing_that_nobody_borrows(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA gives memory back when the borrower has, so what nobody opens is held for good."""
    monkeypatch.setattr(transfer, "_is_lendable", lambda tensor: True)
    tensors, send = {"x": torch.ones(2)}, transfer._Lend(frozenset([1]))
    sent = []
    for rank in (0, 1):
        with enter_process(Process(rank, 2)):
            sent.append(transfer.send_tensors(send, tensors))
    assert sent[0][0] == {}
    assert sent[0][1] == {"x": transfer.checksum(tensors["x"])}  # the first one's, for all
    assert transfer.receive_tensors(sent)["x"].tolist() == [1, 1]
    monkeypatch.undo()  # a tensor that is not on a GPU goes by value, from the first
    with enter_process(Process(0, 2)):
        assert send(tensors) == tensors


def test_a_checksum_is_that_of_the_bits_wherever_they_lie() -> None:
    whole = torch.arange(9.0)
    for part, words in ((whole[1:], torch.int64), (whole[1:4], torch.int32), (whole[1:2].half(), torch.uint8)):
        expected = part.clone().view(words).sum(dtype=torch.int64)
        assert transfer.checksum(part) == int(expected)


def test_what_cannot_be_received_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "_is_lendable", lambda tensor: True)
    lent = transfer.send_tensors(transfer.lend, {"x": torch.ones(2)})
    monkeypatch.setattr(transfer, "_device_id", lambda: "GPU-7")
    with pytest.raises(TransferError, match="tensors were lent on cpu, and this process is on GPU-7"):
        transfer.receive_tensors([lent])
    monkeypatch.setattr(transfer, "_SECONDS", 0.1)
    nobody = transfer._Parcel(("127.0.0.1", 9), 1, (("x", torch.float32, (2,)),))
    with pytest.raises(TransferError, match="receive: weights were not cast to all engines"):
        transfer.receive_tensors([(nobody, {})])
    damaged = {"x": torch.ones(2)}
    with pytest.raises(CorruptedTransfer, match=r"'x' did not arrive as it was sent \(checksum 4575657222473777152"):
        transfer.receive_tensors([(damaged, {"x": 7})])


def test_what_is_on_no_gpu_goes_by_value() -> None:
    x = torch.ones(1)
    assert transfer.lend({"x": x}) == {"x": x}


def test_a_sample_bears_checksums() -> None:
    """The same tensors each time, at least one of them, of any dtype and size."""
    tensors = {f"layer.{i}": torch.full((3,), float(i)) for i in range(64)}
    _, sample = transfer.send_tensors(transfer.by_value, tensors)
    assert 2 < len(sample) < 20
    assert sample == transfer.send_tensors(transfer.by_value, tensors)[1]
    for odd in (torch.ones(3, dtype=torch.bfloat16), torch.ones(5, dtype=torch.uint8), torch.ones(0), torch.ones(())):
        assert transfer.receive_tensors([transfer.send_tensors(transfer.by_value, {"odd": odd})])["odd"] is odd
