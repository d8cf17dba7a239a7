"""What is lost, and how long it takes, when a trainer's rank, a sampler's engine, or a host dies in a GRPO run on Ray.

    python benchmarks/healing.py                    # some minutes
    python benchmarks/healing.py --only rank host

A Ray cluster of several nodes on this machine: a head, and two nodes with three slots each. A trainer of two processes
and a sampler of two engines run GRPO on the tiny model, with a checkpoint each five steps, under `nrl.retrying`. After
step 12 one thing is killed: of hosts that of the trainer, and with ``spare`` a node joins as soon as it is gone. A row
says how many seconds the run stood still, how many steps were done again, how many engines there were at the end, and
how long a step took. A node that is killed closes its connections; one that loses its power or its cable is noticed by
Ray after 30 to 65 seconds more.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import attrs

__all__ = ["CASES", "healed", "main", "options", "trained"]

EVERY, KILLED_AFTER, STEPS = 5, 12, 25
CASES = ("engine", "rank", "host", "spare")
"""What dies: an engine of the sampler, a rank of the trainer, its host; its host, and another one replaces that."""

type Kill = Callable[[Sequence[tuple[int, int]]], None]
"""Kills what a case says. It gets the number of each process, the trainer's first, and that of its node."""

_DIGITS = 15  # of a node's Ray id that are compared, in hexadecimal


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["--only", "rank"]).only
    ['rank']
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    return parser.parse_args(words)


def trained(address: str, out: str) -> None:
    """The program: it prints a line of JSON when it has its processes, and one for each step."""
    import ray
    import torch

    import nrl
    from nrl import data, tiny
    from nrl.algos import advantages, grpo_loss
    from nrl.backends import Sampling, adamw, fsdp, hf
    from nrl.envs import single_turn
    from nrl.run.checkpoint import Checkpoints
    from nrl.runtime import P, shard_map

    @attrs.frozen
    class Config:
        out: str
        steps: int = STEPS
        checkpoints: Checkpoints = Checkpoints(every=EVERY)

    def say(**words: Any) -> None:
        print(json.dumps({"at": time.time(), **words}), flush=True)

    def place(x: torch.Tensor) -> torch.Tensor:
        node = ray.get_runtime_context().get_node_id()
        return torch.tensor([[os.getpid(), int(node[:_DIGITS], 16)]]).expand(len(x), -1)

    def program(cfg: Config) -> None:
        with nrl.run(cfg) as run, nrl.cluster(address, deadline=300) as cluster:
            slots = cluster.reserve(4, least=3)
            trainer = fsdp.trainer(slots[:2], tiny.model(), adamw(lr=1e-3))
            sampler = hf.sampler(slots[2:], tiny.model(), Sampling(max_new_tokens=4))
            meshes = (trainer.mesh, *sampler.meshes)
            places = [shard_map(place, mesh, P("dp"), P("dp"))(torch.zeros(mesh.size)).result() for mesh in meshes]
            say(places=torch.cat(places).tolist())
            groups = nrl.rollouts(sampler, single_turn(digits), data.tasks("arithmetic"), n=4)
            step = trainer.train_step(grpo_loss)
            state, stream = run.restore(policy=trainer, stream=nrl.batched(groups, 4))
            nrl.publish(state.params, sampler)
            for i, batch in run.steps(stream):
                state, metrics = step(state, nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"]))
                nrl.publish(state.params, sampler)
                run.log(i, metrics)
                run.save(i, policy=state, stream=stream)
                say(step=i, engines=len(sampler.meshes))

    nrl.retrying(program)(Config(out))


def digits(task: Any, trace: Any) -> float:
    """A reward that random weights get now and then."""
    return float(sum(character.isdigit() for character in trace.text))


def healed(case: str, folder: Path, kill: Kill, address: str) -> dict[str, float]:
    """Run the program, kill something after a step, and say what that cost.

    Args:
        case: of `CASES`.
        folder: for its run.
        kill: what the case says.
        address: of the Ray cluster.
    """
    words = [sys.executable, "-m", "benchmarks.healing", "--program", address, str(folder / case)]
    log = (folder / f"{case}.log").open("w")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True) as running:
        assert running.stdout is not None
        places, steps, gone = list[tuple[int, int]](), list[dict[str, Any]](), 0.0
        for line in running.stdout:
            said = json.loads(line) if line.startswith("{") else {}
            places = said.get("places", places)
            if "step" in said:
                steps.append(said)
                if said["step"] == KILLED_AFTER and not gone:
                    gone = time.time()
                    kill(places)
        if running.wait() or not gone:
            raise RuntimeError(f"healing: '{case}' ended with {running.returncode}; see {log.name}")
    before = [each for each in steps if each["at"] <= gone]
    after = [each for each in steps if each["at"] > gone]
    took = [later["at"] - each["at"] for each, later in itertools.pairwise(before)]
    longest = max(later["at"] - each["at"] for each, later in itertools.pairwise(after))
    return {
        "seconds": max(after[0]["at"] - gone, longest),
        "again": len(steps) - STEPS,
        "engines": after[-1]["engines"],
        "step": median(took),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    given = options(words)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="healing-") as name:
        cluster = Cluster(initialize_head=True, connect=False, head_node_args={"num_cpus": 0})
        nodes = [cluster.add_node(num_cpus=3) for _ in range(2)]

        def lose(node: int, *, replaced: bool) -> None:
            lost = next(each for each in nodes if int(each.node_id[:_DIGITS], 16) == node)
            nodes.remove(lost)
            cluster.remove_node(lost, allow_graceful=False)
            if replaced:
                nodes.append(cluster.add_node(num_cpus=3))

        kill: dict[str, Kill] = {
            "engine": lambda places: os.kill(places[-1][0], signal.SIGKILL),
            "rank": lambda places: os.kill(places[0][0], signal.SIGKILL),
            "host": lambda places: lose(places[0][1], replaced=False),
            "spare": lambda places: lose(places[0][1], replaced=True),
        }
        try:
            print(f"{'killed':8} {'seconds':>8} {'again':>6} {'engines':>8} {'a step':>7}")
            for case in given.only:
                while len(nodes) < 2:
                    nodes.append(cluster.add_node(num_cpus=3))
                found = healed(case, Path(name), kill[case], cluster.address)
                numbers = f"{found['seconds']:8.1f} {found['again']:6} {found['engines']:8} {found['step']:7.2f}"
                print(f"{case:8} {numbers}", flush=True)
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--program"]:
        trained(*sys.argv[2:])
    else:
        main()
