"""Measure memory and time of `fused_logprobs` against ``log_softmax`` and ``gather`` on the whole matrix.

    python benchmarks/linear_logprobs.py                        # the README's row: a few minutes on two CPU cores
    python benchmarks/linear_logprobs.py --tokens 512           # a quick look
    python benchmarks/linear_logprobs.py --device cuda

The functions are those of `nrl.backends.training.outputs.fused_logprobs`. Each variant runs in its own process, so that
none inherits another's memory. The peak is the memory of a forward and a backward above hidden states, weight and
targets (their gradients included): resident memory on a CPU (Linux only), memory given out by torch's allocator on a
GPU. Seconds are the process's CPU seconds on a CPU, and wall-clock seconds on a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from nrl.backends.training.outputs.fused_logprobs import linear_logprobs

__all__ = ["main", "measure", "table"]

MIB = 2**20
COLUMNS = ("peak_mib", "forward_s", "backward_s")


def main() -> None:
    """Run every variant in a process of its own and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--chunk", type=int, default=None, help="the most tokens in a chunk (default: chosen by nrl)")
    parser.add_argument("--repeats", type=int, default=1, help="the fastest counts, after one that does not")
    parser.add_argument("--variant", choices=["naive", "fused"], help="measure this one here and print JSON")
    parser.add_argument("--entropy", action="store_true", help="with --variant: with entropy")
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args)))
        return
    results: dict[tuple[str, bool], dict[str, float]] = {}
    for entropy in (False, True):
        for variant in ("naive", "fused"):
            command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant, *["--entropy"] * entropy]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results[variant, entropy] = json.loads(done.stdout)
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"hidden {args.hidden}, vocabulary {args.vocabulary:,}, {args.tokens:,} tokens, {args.dtype}, {where}")
    print(table(results))


def table(results: dict[tuple[str, bool], dict[str, float]]) -> str:
    """One Markdown table: a row a variant, and a row of ratios fused / naive.

    Args:
        results: what `measure` returned, by variant and whether with entropy.

    >>> one = {"peak_mib": 512.0, "forward_s": 1.0, "backward_s": 2.0}
    >>> two = {"peak_mib": 128.0, "forward_s": 1.5, "backward_s": 2.0}
    >>> print(table({("naive", e): one for e in (False, True)} | {("fused", e): two for e in (False, True)}))
    | entropy | variant | peak above inputs, MiB | forward, s | backward, s | both, s |
    |---|---|---|---|---|---|
    | without | naive | 512 | 1.000 | 2.000 | 3.000 |
    | without | fused | 128 | 1.500 | 2.000 | 3.500 |
    | without | ratio | 0.25 | 1.50 | 1.00 | 1.17 |
    | with | naive | 512 | 1.000 | 2.000 | 3.000 |
    | with | fused | 128 | 1.500 | 2.000 | 3.500 |
    | with | ratio | 0.25 | 1.50 | 1.00 | 1.17 |
    """
    lines = [
        "| entropy | variant | peak above inputs, MiB | forward, s | backward, s | both, s |",
        "|---|---|---|---|---|---|",
    ]
    for entropy in (False, True):
        numbers = {}
        for variant in ("naive", "fused"):
            peak, *seconds = (results[variant, entropy][column] for column in COLUMNS)
            numbers[variant] = (peak, *seconds, sum(seconds))
        cells = {name: [f"{row[0]:.0f}", *(f"{x:.3f}" for x in row[1:])] for name, row in numbers.items()}
        cells["ratio"] = [
            f"{fused / naive:.2f}" for fused, naive in zip(numbers["fused"], numbers["naive"], strict=True)
        ]
        lines += [f"| {'with' if entropy else 'without'} | {name} | {' | '.join(row)} |" for name, row in cells.items()]
    return "\n".join(lines)


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Run one variant in this process and return its peak above the inputs, in MiB, and its seconds."""
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    generator = torch.Generator(device).manual_seed(0)

    def inputs(tokens: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden = torch.randn(tokens, args.hidden, generator=generator, device=device, dtype=dtype)
        weight = torch.randn(vocabulary, args.hidden, generator=generator, device=device, dtype=dtype) * 0.02
        targets = torch.randint(0, vocabulary, (tokens,), generator=generator, device=device)
        advantages = torch.randn(tokens, generator=generator, device=device)
        return hidden.requires_grad_(), weight.requires_grad_(), targets, advantages

    step(args, *inputs(32, 256))  # loads kernels and starts threads, whose memory is not the subject
    given = inputs(args.tokens, args.vocabulary)
    base = reset_peak(device)
    forward, backward = step(args, *given)
    result = {"peak_mib": (peak(device) - base) / MIB}
    if args.repeats > 1:
        times = [step(args, *given) for _ in range(args.repeats)]
        forward, backward = min(times, key=sum)
    return result | {"forward_s": forward, "backward_s": backward}


def step(
    args: argparse.Namespace, hidden: Tensor, weight: Tensor, targets: Tensor, advantages: Tensor
) -> tuple[float, float]:
    """Seconds of a forward and of a backward of one loss."""
    hidden.grad = weight.grad = None
    start = clock(hidden.device)
    entropy: Tensor | None = None
    if args.variant == "fused":
        logprobs, entropy = linear_logprobs(hidden, weight, targets, entropy=args.entropy, chunk=args.chunk)
    else:
        everything = torch.log_softmax((hidden @ weight.t()).float(), -1)
        logprobs = everything.gather(-1, targets[:, None]).squeeze(-1)
        if args.entropy:
            entropy = -(everything.exp() * everything).sum(-1)
        del everything
    loss = (logprobs * advantages).sum() if entropy is None else (logprobs * advantages + 1e-3 * entropy).sum()
    middle = clock(hidden.device)
    loss.backward()
    return middle - start, clock(hidden.device) - middle


def clock(device: torch.device) -> float:
    """Seconds: of CPU time, or on a GPU, once it has done what it was given, of wall-clock time."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak(device: torch.device) -> int:
    """Forget the peak so far; returns the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if not os.access("/proc/self/clear_refs", os.W_OK):
        raise SystemExit(
            "linear_logprobs: this system has no /proc/self/clear_refs; measure on Linux, or with --device cuda"
        )
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peak(device: torch.device) -> int:
    """The most bytes in use since `reset_peak`."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else resident("VmHWM")


def resident(field: str) -> int:
    """A field of this process's status, in bytes (the kernel gives KiB)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


if __name__ == "__main__":
    main()
