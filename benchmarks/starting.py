"""Seconds until `nrl --help` has printed, and until a server of an environment is ready, in turns.

    python benchmarks/starting.py             # half a minute
    python benchmarks/starting.py --turns 3

Both are programs of their own, from the call that starts them. The first turn, which reads files from the disk, is left
out. It prints medians, with the smallest and the largest.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks._machine import described, watched
from benchmarks._paired import pair, spread

__all__ = ["helped", "main", "options", "ready"]

ROOT = Path(__file__).resolve().parent.parent


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options([]).turns
    16
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=16, help="of each, the first of which is left out")
    return parser.parse_args(words)


def helped() -> float:
    """Seconds that ``nrl --help`` takes."""
    began = time.perf_counter()
    subprocess.run([Path(sys.executable).with_name("nrl"), "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def ready() -> float:
    """Seconds until a server says that it is ready.

    Raises:
        RuntimeError: it did not start.
    """
    began = time.perf_counter()
    command = [sys.executable, "-m", "nrl.gym.http.process"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        started.stdin.write(json.dumps({"environment": "number"}) + "\n")
        started.stdin.flush()
        line = started.stdout.readline()
        seconds = time.perf_counter() - began
    if not line:
        raise RuntimeError(f"the server ended with exit code {started.returncode}; what it said is above")
    return seconds


def main(given: argparse.Namespace) -> None:
    """Measure, and print."""
    with watched() as machine:
        found = [pair(helped, ready, number) for number in range(given.turns)][1:]
    for name, seconds in zip(("nrl --help", "a server is ready"), zip(*found, strict=True), strict=True):
        print(f"{name}: {spread(seconds)} s")
    print(f"the machine: {described(machine)}")


if __name__ == "__main__":
    main(options())
