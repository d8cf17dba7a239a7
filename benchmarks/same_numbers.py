"""Whether two commits compute the same numbers, bit for bit: metrics, samples, exported weights, moments.

    python benchmarks/same_numbers.py BASE                  # against the tree that this file is in
    python benchmarks/same_numbers.py BASE HEAD --parts local --only grpo ppo
    python benchmarks/same_numbers.py BASE --keep /tmp/same     # runs of a commit are kept, and not made again

The examples run from a checkout of each commit in turns, small, on a tiny model: SFT, DPO, GRPO and PPO locally and on
Ray with dp=2, and GRPO with vLLM on CPUs. Nothing is recorded for later: CPUs differ, so both sides run here and now.
The exit status is 1 where anything differs; the table has the first difference. A run that could not show one, as
where gradients are 0, fails, too.

What is compared: every line of every ``*.jsonl`` of a run but what the clock says, and every tensor, exported or in a
checkpoint. Those of checkpoints may lie in other files and under other names; the table says so. Environments that
runs on Ray build stay in the user's cache, until ``nrl venvs prune``.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["Compared", "blunt", "checkout", "compare", "main", "options", "run"]

ROOT = Path(__file__).parents[1]
EXAMPLES = {  # several micro-batches a shard, several updates a batch (else nothing is clipped), and evaluation
    "sft": "rows=16 max_tokens=128 evaluate_every=5 evaluate_rows=32",
    "dpo": "pairs=16 max_tokens=128 evaluate_every=5 evaluate_pairs=32",
    "grpo": "prompts=8 updates=2 max_tokens=256 evaluate_every=5 evaluate_prompts=32",
    "ppo": "prompts=64 max_tokens=256",
}
PARTS = {
    "local": "cluster=local dp=2",
    "ray": "cluster=ray dp=2",
    "vllm": "cluster=ray dp=2 sampler=vllm-cpu engine.kv_cache_memory_bytes=134217728",
}
RUNS = [(part, name) for part in PARTS for name in EXAMPLES if part != "vllm" or name == "grpo"]
CLOCK = re.compile(
    r"(^|/)time/|tokens_per_second$"
)  # metrics that depend on the clock, all that differ from run to run


class Compared(NamedTuple):
    """How many lines and tensors of two runs were compared, the first difference, and what else is to be said."""

    lines: int
    tensors: int
    difference: str | None
    note: str = ""


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["main", "--only", "grpo"]).parts
    ['local', 'ray', 'vllm']
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a git revision")
    parser.add_argument("head", nargs="?", default=None, help="another; none: the tree that this file is in, as it is")
    parser.add_argument("--only", nargs="+", default=list(EXAMPLES), choices=list(EXAMPLES))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--keep", type=Path, default=None, help="a folder for the runs of commits; none: a temporary one"
    )
    return parser.parse_args(words)


def main() -> None:
    """Run both sides in turns and print a row for each run."""
    args, failed = options(), False
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()  # where uv can link its files from
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=cache)))
        sides = [stack.enter_context(checkout(revision, temporary)) for revision in (args.base, args.head)]
        print("| run | lines | tensors | result | seconds |\n|---|---|---|---|---|", flush=True)
        for part, name in RUNS:
            if part in args.parts and name in args.only:
                began = time.monotonic()
                words = [f"steps={args.steps}", *EXAMPLES[name].split(), *PARTS[part].split()]
                base, head = (run(*side, name, words, args.keep or temporary) for side in sides)
                found = compare(base, head)
                result = found.difference or blunt(head) or f"same{found.note}"
                failed |= not result.startswith("same")
                took = time.monotonic() - began
                print(f"| {name}, {part} | {found.lines} | {found.tensors} | {result} | {took:.0f} |", flush=True)
    sys.exit(int(failed))


@contextmanager
def checkout(revision: str | None, temporary: Path) -> Iterator[tuple[str, Path, str]]:
    """A name for its runs, a folder with the commit, and an interpreter that imports it; without one, what is here."""
    if revision is None:
        yield "here", ROOT, sys.executable
        return
    commit = _git("rev-parse", "--verify", f"{revision}^{{commit}}").strip()
    folder = Path(tempfile.mkdtemp(dir=temporary)) / "nrl"
    _git("worktree", "add", "--quiet", "--detach", str(folder), commit)
    try:
        subprocess.run(["uv", "sync", "--locked", "--no-dev", "--quiet"], cwd=folder, env=_environment(), check=True)
        yield commit, folder, str(folder / ".venv" / "bin" / "python")
    finally:
        _git("worktree", "remove", "--force", str(folder))


def run(side: str, folder: Path, python: str, name: str, words: Sequence[str], kept: Path) -> Path:
    """The folder that an example has written, now or, for a commit, when it last ran with the same words."""
    out = kept / side / f"{name}-{hashlib.sha256(' '.join(words).encode()).hexdigest()[:12]}"
    if side == "here" or not (out / "done").exists():
        shutil.rmtree(out, ignore_errors=True)  # a run that is there is gone on with
        command = [python, f"examples/{name}.py", *words, f"out={out.absolute()}"]
        done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=1800)
        if done.returncode != 0:
            raise RuntimeError(
                f"same_numbers: {side}: {' '.join(command)} failed:\n{done.stdout[-500:]}{done.stderr[-3000:]}"
            )
        (out / "done").touch()
    return out


def compare(base: Path, head: Path) -> Compared:
    """The first difference between the folders of two runs: in a line, an exported tensor, or one of a checkpoint."""
    files = sorted({file.name for side in (base, head) for file in side.glob("*.jsonl")})
    lines = [_lines(side, files) for side in (base, head)]
    exported, saved = ([_tensors(side / kind) for side in (base, head)] for kind in ("model", "checkpoints"))
    moved = [Counter(_bits(one[name]) for name in one.keys() - other.keys()) for one, other in (saved, saved[::-1])]
    common = [{name: side[name] for name in saved[0].keys() & saved[1].keys()} for side in saved]
    sides = saved if moved[0] != moved[1] else common
    found = _first(*lines) or _first(*exported) or _first(*sides)
    note = f"; {moved[0].total()} tensors of checkpoints lie elsewhere" if moved[0] and moved[0] == moved[1] else ""
    return Compared(len({key[:2] for key in lines[0]}), len(exported[0]) + len(saved[0]), found, note)


def blunt(side: Path) -> str | None:
    """Why a run would not show a difference if there was one.

    >>> blunt(Path("there/is/none"))
    'shows nothing: no metrics or no exported weights'
    """
    rows = [json.loads(line) for file in side.glob("metrics.jsonl") for line in file.read_text().splitlines()]
    if not rows or not _tensors(side / "model"):
        return "shows nothing: no metrics or no exported weights"
    last = rows[-1]
    if len({row["loss"] for row in rows}) == 1:
        return f"shows nothing: the loss is {last['loss']} in every step"
    if still := [key for key in last if key.endswith("grad_norm") and not (last[key] or 0) > 0]:
        return f"shows nothing: in the last step {still[0]} is {last[still[0]]}"
    if "reward" in last and last["reward"] == last["reward/max"]:
        return f"shows nothing: in the last step every reward is {last['reward']}"
    if not any(row.get("clip_fraction", 1) for row in rows):
        return "shows nothing: no step clips a ratio"
    return None


def _first(base: dict[Any, Any], head: dict[Any, Any]) -> str | None:
    for name in sorted(base.keys() | head.keys()):
        if name not in base or name not in head:
            return f"{_said(name)}: only in {'HEAD' if name in head else 'BASE'}"
        one, other = base[name], head[name]
        if isinstance(one, Tensor) and _bits(one) != _bits(other):
            if (one.dtype, one.shape) != (other.dtype, other.shape):
                return f"{name}: {one.dtype} {list(one.shape)} -> {other.dtype} {list(other.shape)}"
            bits = (tensor.reshape(-1, 1).view(torch.uint8) for tensor in (one, other))
            at = torch.ne(*bits).any(-1).nonzero().flatten().tolist()
            values = (tensor.flatten()[at[0]].item() for tensor in (one, other))
            return f"{name}, element {at[0]}: {' -> '.join(map(repr, values))}; {len(at)} of {one.numel()} differ"
        if not isinstance(one, Tensor) and one != other:
            return f"{_said(name)}: {one} -> {other}"
    return None


def _said(name: Any) -> str:
    return name if isinstance(name, str) else "{}, line {}, {}".format(*name)


def _lines(side: Path, files: Sequence[str]) -> dict[tuple[str, int, str], str | bool | None]:
    """Each value by its file, line and key; numbers are the texts that they are written as, which are exact."""
    found = {}
    for file in files:
        for i, line in enumerate((side / file).read_text().splitlines() if (side / file).exists() else ()):
            leaves = _leaves(json.loads(line, parse_float=str, parse_int=str), "")
            found |= {(file, i, key): value for key, value in leaves if not CLOCK.search(key)}
    return found


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{name}/{key}" if name else str(key))
    else:
        yield name, value


def _tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{file.relative_to(folder.parent)} {name}": x for file in files for name, x in load_file(file).items()}


def _bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _environment() -> dict[str, str]:
    """One thread, and an interpreter and bytecode of each checkout's own."""
    left_out = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if name not in left_out} | {"OMP_NUM_THREADS": "1"}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
