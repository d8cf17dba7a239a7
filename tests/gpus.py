"""A cluster whose slots are GPUs, as Ray is told; torch finds none, so what runs there runs on CPUs."""

import os
from collections.abc import Callable

import nrl
from nrl.runtime import Cluster
from tests.children import server

__all__ = ["with_gpus"]


def with_gpus(*programs: Callable[[Cluster], None]) -> None:
    """Run programs there, one after the other, in a process of their own."""
    child = server().Process(target=_main, args=(programs,))
    child.start()
    child.join(500)
    assert child.exitcode == 0, "what it raised is on the standard error"


def _main(programs: tuple[Callable[[Cluster], None], ...]) -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"  # read when Ray is imported; a cluster before it may have set another
    import ray

    ray.init("local", num_cpus=5, num_gpus=5, include_dashboard=False)
    with nrl.cluster("ray", deadline=300) as cluster:
        for program in programs:
            program(cluster)
