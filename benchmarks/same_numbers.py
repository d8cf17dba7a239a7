"""Whether two commits compute the same numbers, bit for bit: metrics, samples, exported weights and moments.

    python benchmarks/same_numbers.py BASE                  # against the tree that this file is in
    python benchmarks/same_numbers.py BASE HEAD --parts local --only grpo ppo
    python benchmarks/same_numbers.py BASE --keep ~/same    # what BASE computed is kept there, and not computed again

The examples run at both commits in turns, small, on a tiny model: SFT, DPO, GRPO and PPO locally and on Ray with dp=2,
GRPO with vLLM on CPUs, and SFT on Megatron with tp=2. CPUs differ, so nothing is recorded for other machines. The exit
status is 1 where anything differs, and the table has the first difference of each run. A run that could not show one
fails, too.

What is compared: each line of each ``*.jsonl`` of a run, but what the clock says, each tensor, exported or in a
checkpoint, and each option in config.yaml that BASE had. Checkpoints may lay theirs out in another way; the table says
so. Environments that Ray's processes run in stay in the user's cache until ``nrl venvs prune``.

Where HEAD has another name for something, ``renames.toml`` says which; the options of the examples stand here as BASE
takes them. An entry of that table that occurs in no run of BASE fails the comparison.
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
import yaml
from safetensors.torch import load_file
from torch import Tensor

from benchmarks._renames import Renames, read_renames

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
    "megatron": "cluster=ray trainer=megatron layout.tp=2",
}
ONE_EXAMPLE = {"vllm": "grpo", "megatron": "sft"}  # parts that take one example each
RUNS = [(part, name) for part in PARTS for name in EXAMPLES if ONE_EXAMPLE.get(part, name) == name]
RENAMES = ROOT / "benchmarks" / "renames.toml"
NO_RENAMES = Renames({})
CLOCK = re.compile(r"^time/|^device/|^tokens_per_second$")  # metrics that differ between runs of one commit: no others


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["main", "--only", "grpo"]).parts
    ['local', 'ray', 'vllm', 'megatron']
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a git revision")
    parser.add_argument("head", nargs="?", default=None, help="another; none: the tree that this file is in")
    parser.add_argument("--only", nargs="+", default=list(EXAMPLES), choices=list(EXAMPLES))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--keep", type=Path, default=None, help="a folder for the runs of BASE; none: a temporary one")
    parser.add_argument("--renames", type=Path, default=RENAMES, help="a table of names that differ; see there")
    return parser.parse_args(words)


def main() -> None:
    """Run both sides in turns and print a row for each run."""
    args, failed = options(), False
    renames = read_renames(args.renames)
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
                run(head, name, renames.rename_words(words), other)
                numbers, tensors, result = compare(one, other, renames)
                if why := blunt(one):
                    result = f"shows nothing: {why}; {result}"
                failed |= not result.startswith("same")
                print(
                    f"| {name}, {part} | {numbers} | {tensors} | {result} | {time.monotonic() - began:.0f} |",
                    flush=True,
                )
    if unused := renames.list_unused():
        failed = True
        print(
            f"same_numbers: {args.renames}: no run of BASE has {', '.join(unused)}; remove the entry, or compare the "
            "--parts and --only that have it",
            file=sys.stderr,
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


def compare(base: Path, head: Path, renames: Renames = NO_RENAMES) -> tuple[int, int, str]:
    """Return how many numbers and tensors two runs have, and the first difference, or "same".

    Raises:
        RenamesError: where two names of BASE become one.
    """
    renames.rename_all("files", (str(file.relative_to(base)) for file in base.rglob("*") if file.is_file()))
    numbers = _numbers(base, renames), _numbers(head)
    configs = _config(base, renames), _config(head, file=renames.rename("files", "config.yaml"))
    numbers[0].update(configs[0])
    numbers[1].update({name: value for name, value in configs[1].items() if name in configs[0]})  # others are new
    sides = _tensors(base, renames), _tensors(head, folder=renames.rename("files", "checkpoints"))
    exported, saved = zip(*sides, strict=True)
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
    if not rows or not _tensors(side)[0]:
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


def _numbers(side: Path, renames: Renames = NO_RENAMES) -> dict[str, Any]:
    """Return what logs say, by file, step and key; numbers as the texts that they are written as, which are exact."""
    numbers: dict[str, Any] = {}
    for file in sorted(side.glob("*.jsonl")):
        name = renames.rename("files", file.name)
        rename = renames.rename_columns if file.name == "rollouts.jsonl" else renames.rename_metrics
        for line in file.read_text().splitlines():
            row = json.loads(line, parse_float=str, parse_int=str)
            pairs = zip(_leaves(row), _leaves(rename(row)), strict=True)
            values = {key: value for (old, _), (key, value) in pairs if not CLOCK.search(old)}
            numbers |= {f"{name}, step {row['step']}, {key}": value for key, value in values.items()}
    return numbers


def _config(side: Path, renames: Renames = NO_RENAMES, file: str = "config.yaml") -> dict[str, Any]:
    """Return the options of a run, by file and dotted name, but the folder; values as the texts that they are."""
    if not (side / file).exists():
        return {}
    config = yaml.load((side / file).read_text(), yaml.BaseLoader)
    values = {name.replace("/", "."): value for name, value in _leaves(config) if name != "out"}
    name = renames.rename("files", file)
    return {f"{name}, {key}": value for key, value in renames.rename_options(values).items()}


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict | list):
        yield name, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(item, f"{name}/{key}" if name else str(key))


def _tensors(
    side: Path, renames: Renames = NO_RENAMES, folder: str = "checkpoints"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return tensors by file and name: those that were exported, and those in the folder of checkpoints."""
    exported: dict[str, Tensor] = {}
    saved: dict[str, Tensor] = {}
    for file in sorted(side.rglob("*.safetensors")):
        path = file.relative_to(side)
        tensors = saved if path.is_relative_to(folder) else exported
        name = renames.rename("files", str(path))
        tensors |= {f"{name}, {key}": tensor for key, tensor in load_file(file).items()}
    return exported, saved


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
