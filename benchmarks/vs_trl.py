"""Compare nrl's GRPO step with TRL's, on a CPU, in turns.

    python benchmarks/vs_trl.py                                # 0.8M parameters, both regimes of lengths: a few minutes
    python benchmarks/vs_trl.py --sizes 0.8M 5M --out times.json
    python benchmarks/vs_trl.py --quick                        # does it run?

Both sides load one folder: a Qwen3-shaped model with float32 weights, and a tokenizer. Both read the same prompts in
the same order (32 a step, 8 samples each), and take one AdamW step a batch with the same learning rate and clipping, no
penalty, and the same reward. Each is a process of its own with the same number of threads. They take turns, and the
ratio is taken within each pair of steps (see `_paired.py`). A shared machine disturbs CPU seconds least.

**Lengths.** In the regime ``short`` the model never ends a sequence, so every completion has 8 tokens. In ``skewed``
its weights make the length of a completion a draw from a known distribution: one prompt in 32 asks for long answers
(geometric with mean 400), all others for the sum of two geometric draws with mean 17; the limit is 256. That is a mean
of about 39, a 95th percentile of about 96, and one row in sixty at the limit. Both sides sample for themselves. If
means differ by more than ``--tolerance`` (or 95th percentiles by twice that), the benchmark takes up to as many steps
again. If they still differ, it prints no ratio.

**TRL** is `GRPOTrainer` of TRL 1.16 with torch and transformers of nrl's versions, in a virtual environment that uv
makes once, in the user's cache. It has the fastest settings found here: no logging, saving or progress bar, no
checkpointing of activations, no reference model; all rows of a step in one forward for short rows and 64 for skewed
ones (``--trl-rows``; 32 and 256 are slower), transformers' dynamic cache (``--trl-cache static`` is slower). With one
update a batch it computes no old log-probabilities: the benchmark counts passes, and a pass that training does not need
is an error. Its total is the time between its callbacks at the beginning and at the end of a step, which leaves out
fetching prompts.

**nrl** is the loop of ``examples/grpo.py``, with that example's defaults. Its total is all of it, with the wait for the
prompts, writing weights to the sampler, and logging.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import _trl
from benchmarks._paired import Clock, Worker, disagreement, lengths_of, pair, replies, table

__all__ = [
    "SIZES",
    "check_passes",
    "compare",
    "environment",
    "main",
    "make_model",
    "nrl_worker",
    "options",
    "prompts",
    "report",
]

ROOT = Path(__file__).resolve().parent.parent
TRL = "1.16.0"
SIZES = {"0.8M": (128, 4), "5M": (256, 6), "tiny": (64, 1)}
"""Width and layers by name; the name is the number of parameters.

>>> SIZES["5M"]
(256, 6)
"""
LIMITS = {"short": 8, "skewed": 256}
PHASES = ("total", "rollout", "generate", "forward", "backward", "optimizer", "publish", "other")
LONG, TURN = 400, 17  # means of the geometric draws


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options(["--quick"]).sizes
    ['tiny']
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["0.8M"])
    parser.add_argument("--regimes", nargs="+", choices=list(LIMITS), default=list(LIMITS))
    parser.add_argument("--steps", type=int, nargs="+", default=[16, 5], help="pairs of steps: short, skewed")
    parser.add_argument("--warmup", type=int, default=2, help="pairs that do not count")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="samples a prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=0.05, help="how far mean lengths may differ, as a fraction")
    parser.add_argument(
        "--trl-rows", type=int, nargs="+", default=[256, 64], help="of a forward of TRL's: short, skewed"
    )
    parser.add_argument("--trl-cache", default=None, help="TRL's cache_implementation, such as 'static'")
    parser.add_argument("--trl-python", default=None, help="an interpreter that has TRL; default: one is made")
    parser.add_argument("--out", type=Path, default=None, help="write every pair as JSON")
    parser.add_argument("--quick", action="store_true", help="tiny, two steps: shows that it runs, measures nothing")
    args = parser.parse_args(words)
    if args.quick:
        args.sizes, args.steps, args.warmup, args.prompts, args.group = ["tiny"], [2, 2], 1, 4, 4
    return args


def main() -> None:
    """Compare every size in every regime and print the tables."""
    args = options()
    python = args.trl_python or environment()
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for size in args.sizes:
            for regime in args.regimes:
                folder = Path(scratch) / f"{size}-{regime}"
                parameters = make_model(folder, *SIZES[size], ends=regime == "skewed", seed=args.seed)
                result = compare(args, folder, regime, python) | {"size": size, "parameters": parameters}
                found.append(result)
                print(f"\n## {size} ({parameters:,} parameters), {regime}\n\n{report(result)}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"settings": vars(args), "results": found}, default=str, indent=1))


def environment() -> str:
    """An interpreter with TRL, and torch and transformers of the versions here; uv makes it where it is not there."""
    pins = [f"trl=={TRL}", *(f"{name}=={version(name).split('+')[0]}" for name in ("torch", "transformers"))]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nrl-benchmarks"
    folder = cache / "-".join(pins).replace("==", "-")
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(f"making an environment with {', '.join(pins)} in {folder}", flush=True)
        base = getattr(sys, "_base_executable", sys.executable)
        subprocess.run(["uv", "venv", "--quiet", "--clear", "--python", base, str(folder)], check=True)
        subprocess.run(["uv", "pip", "install", "--quiet", "--python", str(python), *pins], check=True)
        (folder / "complete").touch()
    return str(python)


def prompts(count: int) -> list[dict[str, str]]:
    """Sums to be answered; every 32nd ends in a question mark, which the model of `make_model` answers at length.

    >>> [prompt["prompt"] for prompt in prompts(2)]
    ['57+25=', '94+78?']
    """
    sums = [(f"{(index * 37 + 47) % 90 + 10}", f"{(index * 53 + 15) % 90 + 10}") for index in range(count)]
    return [{"prompt": f"{a}+{b}{'?' if index % 32 == 1 else '='}"} for index, (a, b) in enumerate(sums)]


def make_model(folder: Path, width: int, layers: int, *, ends: bool, seed: int = 0) -> int:
    """Write a model whose lengths are known, its tokenizer and its prompts; returns the number of parameters.

    Three dimensions of the residual stream belong to the embeddings alone, and say which kind of token one is; the head
    reads transition probabilities off them. Lower-case letters follow each other until an upper-case one comes (one in
    17), after which the sequence ends (one in 17 again); digits follow each other, and one in 400 times the sequence
    ends. All other weights are random, so that it costs what any model of its shape costs.

    Args:
        folder: where to.
        width: of the residual stream.
        layers: their number.
        ends: False: the sequence never ends.
        seed: of the random weights.
    """
    import torch

    from nrl import tiny
    from nrl.backends.models.loading import build

    tokenizer = tiny.tokenizer()
    model = tiny.model(
        seed=seed, hidden_size=width, num_hidden_layers=layers, intermediate_size=3 * width, head_dim=width // 4,
        tie_word_embeddings=False,
    )  # fmt: skip
    module: Any = build(model)
    starts = tokenizer.convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))
    middles = tokenizer.convert_tokens_to_ids(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    longs = tokenizer.convert_tokens_to_ids(list("0123456789"))
    kinds = [starts, middles, longs, [tokenizer.eos_token_id]]
    never, turn, long = 1e-9, 1 / TURN, 1 / LONG
    end = (turn, long) if ends else (never, never)
    chances = torch.tensor(
        [[1 - turn, turn, never, never], [never, 1 - end[0], never, end[0]], [never, never, 1 - end[1], end[1]]]
    )
    with torch.no_grad():
        embedding, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
        embedding.normal_(generator=torch.Generator().manual_seed(seed))
        embedding[:, :3] = 0
        of = torch.zeros(len(embedding), dtype=torch.long)  # a token of no kind, such as '=', counts as a start
        of[middles], of[[*longs, *tokenizer.convert_tokens_to_ids(["?"])]] = 1, 2
        embedding[torch.arange(len(of)), of] = width**0.5
        for layer in module.model.layers:  # what they write is left out of the three dimensions
            layer.self_attn.o_proj.weight[:3] = 0
            layer.mlp.down_proj.weight[:3] = 0
        head.normal_(std=0.3 / width**0.5, generator=torch.Generator().manual_seed(seed + 1))
        head[tokenizer.eos_token_id] = 0  # how likely the end is depends on the kind alone
        head[:, :3] = torch.log(torch.tensor(never))
        for column, tokens in enumerate(kinds):
            head[tokens, :3] = (chances[:, column] / len(tokens)).log()
        head[:, :3] /= _scale(module, starts, width)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = "".join(json.dumps(row) + "\n" for row in prompts(4096))
    (folder / "prompts.jsonl").write_text(rows)
    return sum(parameter.numel() for parameter in module.parameters())


def _scale(module: Any, tokens: list[int], width: int) -> float:
    """What a token's own dimension is after the last norm, on average over contexts."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor(tokens)[torch.randint(len(tokens), (64, 32), generator=generator)]
    return float(module.model(input_ids=ids, use_cache=False).last_hidden_state[..., 0].mean())


def compare(args: argparse.Namespace, folder: Path, regime: str, python: str) -> dict[str, Any]:
    """Have both sides take turns on one model."""
    steps, size = (given[0] if regime == "short" else given[-1] for given in (args.steps, args.trl_rows))
    rows = args.prompts * args.group
    if rows % min(rows, size):
        raise SystemExit(f"vs_trl: --trl-rows {size} does not divide the {rows} rows of a step; give a divisor")
    cfg = {key: vars(args)[key] for key in ("prompts", "group", "threads", "lr", "seed", "trl_cache")}
    cfg |= {"folder": str(folder), "data": str(folder / "prompts.jsonl"), "new_tokens": LIMITS[regime]}
    cfg |= {"passes": rows // min(rows, size)}
    env = os.environ | {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads),
        "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    sides: list[Worker] = []
    try:
        for name, command in (
            ("nrl", [sys.executable, __file__, "--worker"]),
            ("TRL", [python, "-m", "benchmarks._trl"]),
        ):
            sides.append(Worker(name, [*command, json.dumps(cfg)], folder / f"{name}.log", env))
        for side in sides:
            side.read()
        pairs: list[tuple[Any, Any]] = []
        for number in range(args.warmup + 2 * steps):
            both = pair(sides[0].step, sides[1].step, number)
            if number < args.warmup:
                continue
            pairs.append(both)
            lengths = _lengths(pairs, LIMITS[regime])
            apart = disagreement(*lengths, args.tolerance)
            if len(pairs) >= steps and apart is None:
                break
    finally:
        for side in sides:
            side.close()
    check_passes([trl["forwards"] for _, trl in pairs], cfg["passes"])
    return {
        "regime": regime,
        "lengths": dict(zip(("nrl", "TRL"), lengths, strict=True)),
        "disagreement": apart,
        "peak_mib": {name: max(each[side]["peak_mib"] for each in pairs) for side, name in enumerate(("nrl", "TRL"))},
        "pairs": [{"nrl": one["times"], "TRL": other["times"]} for one, other in pairs],
    }


def check_passes(counted: Sequence[int], needed: int) -> None:
    """Refuse a comparison with a TRL that computes log-probabilities more often than its training needs.

    Raises:
        RuntimeError: in some step it made another number of passes.

    >>> check_passes([4, 4], 4)
    """
    found = sorted(set(counted))
    if found != [needed]:
        raise RuntimeError(
            f"vs_trl: TRL made {found} passes for log-probabilities in a step, and training needs {needed}; see what "
            "this version of it computes besides, and set it up without"
        )


def _lengths(pairs: list[tuple[Any, Any]], limit: int) -> tuple[dict[str, float], dict[str, float]]:
    one, other = (lengths_of([x for both in pairs for x in both[side]["lengths"]], limit) for side in (0, 1))
    return one, other


def report(result: dict[str, Any]) -> str:
    """What is printed of a result: lengths, then the table, or why there is none."""
    said = [
        f"{name}: lengths mean {found['mean']:.1f}, p95 {found['p95']:.0f}, at the limit {found['limit']:.1%}; "
        f"peak memory {result['peak_mib'][name]:.0f} MiB"
        for name, found in result["lengths"].items()
    ]
    if result["disagreement"]:
        return "\n".join([*said, f"no ratio: {result['disagreement']}"])
    pairs = [(each["nrl"], each["TRL"]) for each in result["pairs"]]
    return "\n".join([*said, f"{len(pairs)} pairs of steps", "", table(("nrl", "TRL"), pairs, PHASES)])


def nrl_worker(cfg: dict[str, Any]) -> None:
    """Be nrl's side: the loop of ``examples/grpo.py``, which waits for its turn before it pulls a batch."""
    answer = replies()
    import attrs
    import torch

    import nrl
    from nrl import data
    from nrl.algos import advantages, grpo_loss
    from nrl.backends import Model, Sampling, adamw, fsdp, hf
    from nrl.data import Source
    from nrl.envs import single_turn

    torch.set_num_threads(cfg["threads"])
    clock = Clock()
    _trl.time_torch(clock)

    @attrs.frozen
    class Config:
        steps: int = 1_000_000
        out: str = str(Path(cfg["folder"]) / "nrl")

    with nrl.run(Config()) as run, nrl.cluster("local") as cluster:
        slots = cluster.reserve(2)
        model = Model(cfg["folder"])
        trainer = fsdp.trainer(slots[:1], model, adamw(lr=cfg["lr"]))
        sampler: Any = hf.sampler(slots[1:], model, Sampling(max_new_tokens=cfg["new_tokens"]))
        sampler.generate = clock.wrap("generate", sampler.generate)
        step = clock.wrap("train", trainer.train_step(grpo_loss))
        tasks = data.tasks(cfg["data"], seed=cfg["seed"], shuffle=False, chat=False)
        env = single_turn(lambda task, trace: _trl.reward(trace.text))
        groups = nrl.rollouts(sampler, env, tasks, n=cfg["group"], seed=cfg["seed"])
        stream = nrl.ahead(nrl.batched(groups, cfg["prompts"]), 0)
        last: dict[str, Any] | None = None
        whole = clock("total")

        def take(n: int) -> list[Any]:
            nonlocal whole
            answer(last)
            clock.take()
            whole = clock("total")
            whole.__enter__()
            with clock("rollout"):
                return stream.take(n)

        state = trainer.init()
        nrl.publish(state.params, sampler)
        for i, batch in run.steps(Source(take, stream.state, stream.restore)):
            batch = nrl.assign(advantages(batch), old_logprobs=batch["rollout_logprobs"])
            state, metrics = step(state, batch)
            with clock("publish"):
                nrl.publish(state.params, sampler)
            run.log(i, metrics, nrl.summary(batch))
            whole.__exit__(None, None, None)
            times = clock.take()
            for kind in ("wall", "cpu"):
                train = times.pop(f"{kind}/train")
                times[f"{kind}/forward"] = train - times[f"{kind}/backward"] - times[f"{kind}/optimizer"]
                times[f"{kind}/other"] = times[f"{kind}/total"] - times[f"{kind}/rollout"] - train
                times[f"{kind}/other"] -= times[f"{kind}/publish"]
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            last = {"times": times, "lengths": batch["loss_mask"].sum(-1).tolist(), "peak_mib": peak}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        nrl_worker(json.loads(sys.argv[2]))
    else:
        main()
