"""Whether two commits compute the same numbers, bit for bit: metrics, samples, exported weights and moments.

    python benchmarks/same_numbers.py BASE                  # against the tree that this file is in
    python benchmarks/same_numbers.py BASE HEAD --parts local --only grpo ppo
    python benchmarks/same_numbers.py BASE --keep ~/same    # what BASE computed is kept there, and not computed again

The examples run at both commits in turns, small, on a tiny model: SFT, DPO, GRPO and PPO locally and on Ray with dp=2,
and GRPO with vLLM on CPUs. CPUs differ, so nothing is recorded for other machines. The exit status is 1 where anything
differs, and the table has the first difference of each run. A run that could not show one fails, too.

What is compared: each line of each ``*.jsonl`` of a run, but what the clock says, and each tensor, exported or in a
checkpoint. Checkpoints may lay theirs out in another way; the table says so. Environments that Ray's processes run in
stay in the user's cache until ``nrl venvs prune``.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["blunt", "checkout", "compare", "main", "options", "run"]

ROOT = Path(__file__).parents[1]
EXAMPLES = {  # several micro-batches a shard, several updates a batch (else nothing is clipped), and evaluation
    "sft": "rows=16 max_tokens=128 evaluate_every=5 evaluate_rows=32",
    "dpo": "pairs=16 max_tokens=128 evaluate_every=5 evaluate_pairs=32",
    "grpo": "prompts=8 updates=2 max_tokens=256 evaluate_every=5 evaluate_prompts=32",
    "ppo": "prompts=64 updates=2 max_tokens=256",
}
PARTS = {
    "local": "cluster=local dp=2",
    "ray": "cluster=ray dp=2",
    "vllm": "cluster=ray dp=2 sampler=vllm-cpu engine.kv_cache_memory_bytes=134217728",
}
RUNS = [(part, name) for part in PARTS for name in EXAMPLES if part != "vllm" or name == "grpo"]
CLOCK = re.compile(r"^time/|^device/|^tokens_per_second$")  # metrics that differ between runs of one commit: no others


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["main", "--only", "grpo"]).parts
    ['local', 'ray', 'vllm']
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a git revision")
    parser.add_argument("head", nargs="?", default=None, help="another; none: the tree that this file is in")
    parser.add_argument("--only", nargs="+", default=list(EXAMPLES), choices=list(EXAMPLES))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--keep", type=Path, default=None, help="a folder for the runs of BASE; none: a temporary one")
    return parser.parse_args(words)


def main() -> None:
    """Run both sides in turns and print a row for each run."""
    args, failed = options(), False
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()  # where uv can link its files from
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=cache)))
        base, head = (stack.enter_context(checkout(revision, temporary)) for revision in (args.base, args.head))
        kept = (args.keep or temporary).absolute() / _git("rev-parse", f"{args.base}^{{commit}}").strip()
        print("| run | numbers | tensors | result | seconds |\n|---|---|---|---|---|", flush=True)
        for part, name in RUNS:
            if part in args.parts and name in args.only:
                began, words = time.monotonic(), f"steps={args.steps} {EXAMPLES[name]} {PARTS[part]}"
                one = kept / f"{name}-{hashlib.sha256(words.encode()).hexdigest()[:12]}"
                other = temporary / f"{name}-{part}"
                if not (one / "done").exists():
                    run(base, name, words, one)
                run(head, name, words, other)
                numbers, tensors, result = compare(one, other)
                if why := blunt(other):
                    result = f"shows nothing: {why}; {result}"
                failed |= not result.startswith("same")
                print(
                    f"| {name}, {part} | {numbers} | {tensors} | {result} | {time.monotonic() - began:.0f} |",
                    flush=True,
                )
    sys.exit(int(failed))


@contextmanager
def checkout(revision: str | None, temporary: Path) -> Iterator[Path]:
    """A folder with a commit and an environment of its own; without a revision, the tree that this file is in."""
    if revision is None:
        yield ROOT
        return
    tree = Path(tempfile.mkdtemp(dir=temporary)) / "nrl"
    _git("worktree", "add", "--quiet", "--detach", str(tree), revision)
    try:
        subprocess.run(["uv", "sync", "--locked", "--no-dev", "--quiet"], cwd=tree, env=_environment(), check=True)
        yield tree
    finally:
        _git("worktree", "remove", "--force", str(tree))


def run(tree: Path, name: str, words: str, out: Path) -> None:
    """Run an example; ``done`` in its folder says that it is whole."""
    shutil.rmtree(out, ignore_errors=True)  # the example would go on with what is there
    python = sys.executable if tree == ROOT else str(tree / ".venv" / "bin" / "python")
    command = [python, f"examples/{name}.py", *words.split(), f"out={out}"]
    done = subprocess.run(command, cwd=tree, env=_environment(), capture_output=True, text=True, timeout=1800)
    if done.returncode != 0:
        raise RuntimeError(
            f"same_numbers: {' '.join(command)} failed in {tree}:\n{done.stdout[-500:]}{done.stderr[-3000:]}"
        )
    (out / "done").touch()


def compare(base: Path, head: Path) -> tuple[int, int, str]:
    """How many numbers and tensors two runs have, and the first difference, or "same"."""
    sides = base, head
    numbers, exported, saved = ([read(side) for side in sides] for read in (_numbers, _exported, _saved))
    result = _first(*numbers) or _first(*exported)
    if result is None and saved[0].keys() != saved[1].keys():  # names and files of checkpoints may change, no value may
        one, other = (Counter(map(_bits, side.values())) for side in saved)
        result = "same; checkpoints name their tensors otherwise" if one == other else None
    return len(numbers[0]), len(exported[0]) + len(saved[0]), result or _first(*saved) or "same"


def blunt(side: Path) -> str | None:
    """Why a run would show no difference if there was one.

    >>> blunt(Path("there/is/none"))
    'there are no metrics or no exported weights'
    """
    rows = [json.loads(line) for file in side.glob("metrics.jsonl") for line in file.read_text().splitlines()]
    if not rows or not _exported(side):
        return "there are no metrics or no exported weights"
    last = rows[-1]
    still = [key for key in last if key.endswith("grad_norm") and not (last[key] or 0) > 0]
    reasons = {
        f"the loss is {last['loss']} in each step": len({row["loss"] for row in rows}) == 1,
        f"{', '.join(still)} of the last step is not above 0": still,
        "all rewards of the last step are equal": "reward" in last and last["reward"] == last["reward/max"],
        "no step clips a ratio": not any(row.get("clip_fraction", 1) for row in rows),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _first(base: Mapping[str, Any], head: Mapping[str, Any]) -> str | None:
    for name in dict.fromkeys([*base, *head]):
        if name not in base or name not in head:
            return f"{name}: only in {'BASE' if name in base else 'HEAD'}"
        one, other = base[name], head[name]
        if not isinstance(one, Tensor):
            if one != other:
                return f"{name}: {one} -> {other}"
        elif (one.dtype, one.shape) != (other.dtype, other.shape):
            return f"{name}: {one.dtype}, {list(one.shape)} -> {other.dtype}, {list(other.shape)}"
        elif _bits(one) != _bits(other):
            raw = [tensor.reshape(-1, 1).view(torch.uint8) for tensor in (one, other)]
            at = int(raw[0].ne(raw[1]).any(-1).nonzero()[0])
            return f"{name}, element {at}: {one.flatten()[at].item()!r} -> {other.flatten()[at].item()!r}"
    return None


def _numbers(side: Path) -> dict[str, Any]:
    """What logs say, by file, step and key; numbers as the texts that they are written as, which are exact."""
    found: dict[str, Any] = {}
    for file in sorted(side.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line, parse_float=str, parse_int=str)
            values = {key: value for key, value in _leaves(row) if not CLOCK.search(key)}
            found |= {f"{file.name}, step {row['step']}, {key}": value for key, value in values.items()}
    return found


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict | list):
        yield name, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, f"{name}/{key}" if name else str(key))


def _exported(side: Path) -> dict[str, Tensor]:
    return _tensors(side, "model/*.safetensors")


def _saved(side: Path) -> dict[str, Tensor]:
    return _tensors(side, "checkpoints/**/*.safetensors")


def _tensors(side: Path, pattern: str) -> dict[str, Tensor]:
    files = sorted(side.glob(pattern))
    return {f"{file.relative_to(side)}, {name}": tensor for file in files for name, tensor in load_file(file).items()}


def _bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def _environment() -> dict[str, str]:
    """One thread; the interpreter and the bytecode of a tree are its own."""
    left_out = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    return {name: value for name, value in os.environ.items() if name not in left_out} | {"OMP_NUM_THREADS": "1"}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
