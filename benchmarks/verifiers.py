"""What verifiers cost: `nrl.math_verifier` on integers, on expressions and on hostile answers, and a pool of processes.

    python benchmarks/verifiers.py             # two minutes
    python benchmarks/verifiers.py --quick     # does it run?

``integers``: verdicts a second of one core on integers that all differ, in responses of a sentence, in this process.

``expressions``: verdicts a second of one worker on pairs of expressions that all differ, eight answers to each
reference, of which half are right and none is written as the reference is; the same with a reference for each answer.
Both a second, and a second of the worker's CPU time, in which other programs have no part.

``hostile``: the longest time until an answer of `HOSTILE` is back, each the best of three, and what became of it.

``stall``: the longest time for which the event loop stood still while all answers of `HOSTILE` were asked for at once.

``start``: seconds until the first answer of a process of a pool is back, the median, and the process's memory in MB;
its verifier imports nothing.

``pooled``: seconds for rows whose verifier sleeps 10 ms, in a pool, over the least that they could take.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nrl
from benchmarks._machine import described, watched
from benchmarks._paired import in_units
from nrl.envs import Score, Trace

__all__ = [
    "HOSTILE",
    "comparisons",
    "comparisons_of_an_expression",
    "expressions",
    "hostile",
    "integers",
    "main",
    "options",
    "pairs",
    "rows",
    "stall",
    "start",
]

HOSTILE: dict[str, str] = {
    "a tower": r"\boxed{9^{9^9}}",
    "a tower of letters": r"\boxed{x^{9^{9^{9^9}}}}",
    "a tower below a root": r"\boxed{\sqrt{9^{9^{9}}}}",
    "a tower in a sum": r"$1 + 7^{7^{7^7}}$",
    "a tower in a set": r"\boxed{\{1, 9^{9^9}\}}",
    "a tower in a matrix": r"\boxed{\begin{pmatrix}9^{9^9}&1\end{pmatrix}}",
    "a factorial": r"\boxed{10000!}",
    "a large factorial": r"\boxed{1000000000!}",
    "factorials of factorials": r"\boxed{((((9!)!)!)!)!}",
    "a binomial": r"\boxed{\binom{10^9}{10^8}}",
    "a long sum": r"\boxed{\sum_{k=1}^{10^9} \frac{1}{k}}",
    "an integral": r"\boxed{\int_0^1 \sin(\sin(\sin(\sin(x^{x^x})))) dx}",
    "a power to expand": r"\boxed{(1+x+y+z)^{500}}",
    "powers of powers": r"\boxed{((((2^{99})^{99})^{99})^{99})^{99}}",
    "a large power": r"\boxed{(\sqrt{2}+1)^{1000000000}}",
    "an equation to solve": r"\boxed{x^{17}+\sin(x)^{13}+e^{x^x}=\log(x)}",
    "a long product": "\\boxed{" + "(x+1)" * 190 + "}",
    "boxes in boxes": "\\boxed{" * 10_000 + "5" + "}" * 10_000,
    "boxes without end": "\\boxed{" * 10_000,
    "fractions in fractions": "\\boxed{" + "\\frac{1}{1+" * 70 + "x" + "}" * 71,
    "roots in roots": "\\boxed{" + "\\sqrt{" * 35 + "x" + "}" * 36,
    "parentheses": "\\boxed{" + "(" * 30 + "x" + ")" * 30 + "}",
    "braces": "\\boxed{" + "{" * 5000 + "x" + "}" * 5001,
    "minus signs": "\\boxed{" + "-" * 900 + "x}",
    "a megabyte of letters": "a" * 1_000_000,
    "a megabyte of digits": "\\boxed{" + "9" * 1_000_000 + "}",
    "a megabyte of boxes": "\\boxed{1} " * 100_000,
    "a megabyte of dollars": "$" * 1_000_000,
    "backslashes": "\\" * 65_536,
    "backslashes in a box": "\\boxed{" + "\\" * 900 + "}",
    "carets": "\\boxed{" + "9^" * 450 + "9}",
    "commas": "\\boxed{" + "1," * 450 + "1}",
    "white space": "\\boxed" + " " * 1_000_000 + "{5}",
    "code": r"\boxed{__import__('os').system('sleep 60')}",
    "code in a function": r"\boxed{\operatorname{exec}(\text{'while 1: pass'})}",
    "a file": r"\boxed{\input{/dev/zero}}",
    "nothing": "",
    "an empty box": r"\boxed{}",
    "zero over zero": r"\boxed{\frac{0}{0}}",
    "one over zero": r"\boxed{1/0}",
    "zero over zero, in a line": "0/0",
    "not a number": r"\boxed{\text{NaN}}",
    "infinity": r"\boxed{\infty}",
    "surrogates": "\\boxed{\ud800\udfff}",
    "null": "\\boxed{\0x\0}",
    "the answer": r"\boxed{the answer is the answer}",
    "every candidate": "\\boxed{" + ",".join(map(str, range(250))) + "}",
    "look-alikes": "\\boxed{\u0445+\u0455\u04cf}",
}
"""Responses that are to tire a verifier, mislead it or bring it down, by what they are."""

_RIGHT: Sequence[tuple[str, Sequence[str], Sequence[str]]] = (  # reference, right and wrong answers; of a number
    (r"\frac{\sqrt{3}}{%d}", (r"\frac{3}{%d\sqrt{3}}", r"\sqrt{3}/%d"), (r"\frac{\sqrt{5}}{%d}", r"\frac{2}{%d}")),
    (r"x^2+%dx+1", (r"1+%dx+x^2", r"x(x+%d)+1"), (r"x^2-%dx+1", "x^2+%dx")),
    (r"[%d,\infty)", (r"x \ge %d", r"x \in [%d,\infty)"), (r"(%d,\infty)", r"(-\infty,%d]")),
    (r"\{-1,%d\}", (r"%d,-1", r"-1 \text{ or } %d"), (r"\{1,%d\}", r"-1,%d,2")),
    (r"%d\pi", (r"\frac{%d}{1}\pi", r"\pi\cdot %d"), (r"\frac{%d\pi}{2}", r"%d+\pi")),
    (r"%d\sqrt{2}", (r"\sqrt{2}\cdot %d", r"\frac{2\cdot %d}{\sqrt{2}}"), (r"%d\sqrt{3}", r"\sqrt{%d}")),
    (r"y=%dx+2", (r"y=2+%dx", r"y = %dx + \frac{4}{2}"), (r"y=%dx-2", r"y=%dx")),
    (r"(%d,-3)", (r"\left(%d, \frac{-6}{2}\right)", r"(\frac{%d}{1},-3)"), (r"(%d,3)", r"(-3,%d)")),
    (
        r"\begin{pmatrix}%d\\2\end{pmatrix}",
        (r"\begin{bmatrix}%d\\2\end{bmatrix}",),
        (r"\begin{pmatrix}%d\\3\end{pmatrix}",),
    ),
    (r"2^{%d}", (r"4^{\frac{%d}{2}}", r"2\cdot 2^{%d-1}"), (r"3^{%d}", r"2^{%d+1}")),
)


def pairs(number: int, each: int = 8) -> Iterator[tuple[str, str, bool]]:
    """Reference, answer and whether it is right: as many as asked for, no two the same.

    >>> next(pairs(1))
    ('\\\\frac{\\\\sqrt{3}}{11}', '\\\\frac{3}{11\\\\sqrt{3}}', True)
    """
    for place in range(number):
        task, of_group = divmod(place, each)
        round_, kind = divmod(task, len(_RIGHT))
        reference, right, wrong = _RIGHT[kind]
        good = of_group % 2 == 0 if each > 1 else task % 2 == 0
        forms = right if good else wrong
        form = forms[(of_group // 2 + round_) % len(forms)].replace("%d", str(round_ + 11))
        spare = of_group // (2 * len(forms))  # the same in another way to write it
        yield (
            reference.replace("%d", str(round_ + 11)),
            form + ("+0" if spare and kind in (0, 1, 4, 5, 9) else ""),
            good,
        )


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    >>> options([]).workers
    2
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="little of everything")
    parser.add_argument("--workers", type=int, default=2, help="of the pool that sleeps")
    parser.add_argument("--out", type=Path, help="a file for all numbers")
    return parser.parse_args(words)


def integers(number: int) -> float:
    """Verdicts a second of this process's CPU time."""
    verify: Any = nrl.math_verifier()
    asked = [
        (
            {"answer": str(n)},
            Trace("", [f"There are {n - 7} and 7 more, so there are $\\boxed{{{n}}}$ of them in all."]),
        )
        for n in range(1000, 1000 + number)
    ]

    async def every() -> float:
        began = time.process_time()
        for task, trace in asked:
            assert (await verify(task, trace)).reward == 1.0
        return number / (time.process_time() - began)

    return asyncio.run(every())


def expressions(number: int, each: int) -> tuple[float, float]:
    """Verdicts a second of one worker, and a second of its CPU time."""
    verify: Any = nrl.math_verifier(workers=1)

    async def one(reference: str, answer: str, good: bool) -> bool:
        score = await verify({"answer": reference}, Trace("", [f"It is $\\boxed{{{answer}}}$."]))
        return bool(score.reward == float(good))

    async def every() -> tuple[float, float]:
        await verify({"answer": "a"}, Trace("", [r"\boxed{b+1}"]))  # starts the worker
        before, began = _seconds_below(os.getpid()), time.perf_counter()
        found = await asyncio.gather(*(one(*pair) for pair in pairs(number, each)))
        took = time.perf_counter() - began
        assert all(found), [pair for pair, good in zip(pairs(number, each), found, strict=True) if not good][:5]
        return number / took, number / (_seconds_below(os.getpid()) - before)

    return asyncio.run(every())


def comparisons(number: int) -> float:
    """Comparisons of two such expressions a second of this process's CPU time by sympy alone, from their texts."""
    import sympy

    first = time.perf_counter_ns()  # sympy remembers what it has seen
    began = time.process_time()
    for each in range(first, first + number):
        assert sympy.simplify(sympy.sympify(f"sqrt(3)/{each}") - sympy.sympify(f"3/({each}*sqrt(3))")) == 0
    return number / (time.process_time() - began)


def comparisons_of_an_expression() -> float:
    """How many comparisons by sympy alone cost a core as much as a verdict."""
    return in_units(lambda: comparisons(150), lambda: expressions(2400, 8)[1])


def _seconds_below(pid: int) -> float:
    """CPU seconds of all processes below one, as Linux has them; elsewhere not a number."""
    total = 0.0
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            words = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            total += (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK") + _seconds_below(child)
    return total if Path("/proc").exists() else float("nan")


def hostile(times: int = 3) -> dict[str, tuple[float, Score]]:
    """Seconds until each answer of `HOSTILE` is back, the least of several, and its score."""
    found: dict[str, tuple[float, Score]] = {}
    for name, text in HOSTILE.items():
        took: list[float] = []
        for _ in range(times):
            verify: Any = _VERIFIER[0] if _VERIFIER else nrl.math_verifier(workers=1)
            _VERIFIER[:] = [verify]

            async def one(verify: Any = verify, text: str = text, spare: int = len(took)) -> Score:
                # Another reference each time: outcomes are kept
                await verify({"answer": "a"}, Trace("", [rf"\boxed{{b_{{{spare}}}+{len(found)}}}"]))
                began = time.perf_counter()
                score: Score = await verify({"answer": f"x-{123 + spare}"}, Trace("How much is it?", [text]))
                took.append(time.perf_counter() - began)  # noqa: B023
                return score

            score = asyncio.run(one())
        found[name] = (min(took), score)
    return found


_VERIFIER: list[Any] = []


def stall(workers: int = 1) -> float:
    """Seconds for which an event loop stood still at most while it verified all of `HOSTILE` at once."""
    verify: Any = nrl.math_verifier(workers=workers)
    longest = 0.0

    async def watch(done: asyncio.Event) -> None:
        nonlocal longest
        while not done.is_set():
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - began - 0.001)

    async def every() -> None:
        done = asyncio.Event()
        await verify({"answer": "a"}, Trace("", [r"\boxed{b+1}"]))
        watching = asyncio.create_task(watch(done))
        every = [verify({"answer": "x-321"}, Trace("How much is it?", [text])) for text in HOSTILE.values()]
        await asyncio.gather(*every)
        done.set()
        await watching

    gc.collect()
    asyncio.run(every())
    return longest


def _sleeps(task: Any, trace: Trace) -> float:
    time.sleep(0.01)
    return float(os.getpid())


def rows(number: int, workers: int) -> float:
    """Seconds for rows in a pool over the least that they could take."""
    verify: Any = nrl.pooled(_sleeps, workers=workers)

    async def every() -> float:
        there = set[float]()
        while len(there) < workers:
            there |= set(await asyncio.gather(*(verify({}, Trace("", ["4"])) for _ in range(8 * workers))))
        began = time.perf_counter()
        await asyncio.gather(*(verify({}, Trace("", ["4"])) for _ in range(number)))
        return time.perf_counter() - began

    return asyncio.run(every()) / (number * 0.01 / workers)


def _memory(task: Any, trace: Trace) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1000  # since its exec, of kB


def start(times: int) -> tuple[float, float]:
    """Seconds until a new process has answered, and MB that it has, each the median of so many."""
    found = []
    for _ in range(times):
        verify: Any = nrl.pooled(_memory, workers=1)
        began = time.perf_counter()
        memory = asyncio.run(verify({}, Trace("", ["4"])))
        found.append((time.perf_counter() - began, memory))
    seconds, memories = zip(*found, strict=True)
    return statistics.median(seconds), statistics.median(memories)


def main(given: argparse.Namespace) -> dict[str, Any]:
    """Measure, print a table, and return the numbers."""
    quick = given.quick
    with watched() as machine:
        found: dict[str, Any] = {
            "integers": integers(200 if quick else 20_000),
            "expressions": expressions(80 if quick else 2400, 8),
            "expressions_alone": expressions(20 if quick else 600, 1),
            "start": start(3 if quick else 20),
            "rows": rows(64 if quick else 8192, given.workers),
        }
        if not quick:
            back = hostile()
            found["hostile"] = {name: (seconds, score.status, score.reward) for name, (seconds, score) in back.items()}
            found["stall"] = stall()
    print("| | |\n|---|---|")
    print(f"| integers a second, a core | {found['integers']:,.0f} |")
    for name, of in (("expressions", "eight"), ("expressions_alone", "one")):
        wall, cpu = found[name]
        print(f"| expressions a second of a worker, {of} to a reference | {wall:,.0f} |")
        print(f"| the same, a second of its CPU time | {cpu:,.0f} |")
    print(f"| a process of a pool starts in, ms | {1000 * found['start'][0]:,.0f} |")
    print(f"| its memory, MB | {found['start'][1]:,.0f} |")
    print(f"| rows of 10 ms in {given.workers} processes, of the least time | {found['rows']:.2f} |")
    if not quick:
        name, (seconds, _, _) = max(found["hostile"].items(), key=lambda item: item[1][0])
        print(f"| hostile answers: the longest ({name}), ms | {1000 * seconds:,.0f} |")
        print(f"| the event loop stood still for at most, ms | {1000 * found['stall']:.0f} |")
        print(f"\n{dict(Counter((status, reward) for _, status, reward in found['hostile'].values()))}")
    print(f"\nThe machine: {described(machine)}.")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main(options())
