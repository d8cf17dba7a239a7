"""Comparing two answers in a process that may be killed at any time.

A worker of a pool imports what it needs once and forks. The fork reads what models wrote, one pair after the other; the
worker itself never does. Where a pair takes too long, or too much memory, the fork is killed, also if it holds the
interpreter (``9 ** 9 ** 9``), and the next pair has another one, milliseconds later.
"""

import functools
import logging
import signal
import sys
import time
from typing import Literal

from nrl.envs.pool.fork_worker import Crashed, Fork, Late
from nrl.errors import EnvError

__all__ = ["Outcome", "compare"]

type Outcome = Literal["right", "wrong", "unread", "late", "crashed", "starved"]
"""Whether the answer equals the reference; or it cannot be read; it took all of its time, or brought the process down;
or the machine was too busy to give it its time."""

_REQUESTS = 20_000  # of a fork: two for each pair
_WARM = (
    *(r"\frac{\sqrt{3}}{2}+1", r"\frac{3}{2\sqrt{3}}", r"\sqrt[3]{2}-x", r"3.5\cdot 10^{-5}", r"50\%", "y=2x+1"),
    *(r"(0,1)\cup[2,\infty)", "(1,-2)", r"\{1,-2\}", r"1 \text{ or } 2", r"x\in[1,2]", r"1<x\le 2", r"\pm 1", "n!"),
    *(r"\sin(x)+\cos x", r"\log_{2}8", "e^{x}", r"90^{\circ}", r"5\text{ cm}", r"\text{Monday}", "A", "1+2i", "3:4"),
    *(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\binom{5}{2}", r"\int_0^1 x dx"),
)


def compare(reference: str, answer: tuple[str | None, float]) -> tuple[Outcome | None, str]:
    """Compare an answer with a reference, in a fork of this process.

    Args:
        reference: the right answer, as `nrl.envs.library.mathematics.words.tidying.tidy` writes it.
        answer: the answer, written so too, and seconds that both together may take, half of them for the reference;
            None: the reference alone is read.

    Returns:
        What became of the answer ("right" where there is none), and nothing. Or None, if the reference cannot be used,
        and the reason.

    Raises:
        EnvError: math-verify is not installed, or something else ended the fork.
    """
    text, seconds = answer
    fork = _fork()
    fork.ready(2)  # neither half pays for starting it
    began = time.monotonic()
    try:
        why = fork.ask((reference, None), seconds / 2)
        if why is None:  # Reading it raised an error, such as of memory.
            return None, "which cannot be read as mathematics"
        if why:
            return None, why
    except Late as late:  # of the processor: on a busy machine, a right answer may need more time than it was given
        if not late.busy(seconds / 2):
            return "starved", ""
        return None, f"which was not read within {seconds / 2:g} s"
    except Crashed as crashed:
        return None, f"which ended the process that read it (status {crashed.signal})"
    if text is None:
        return "right", ""
    try:
        return fork.ask((reference, text), began + seconds - time.monotonic()) or "unread", ""
    except Late as late:  # likewise
        return ("late" if late.busy(seconds / 2) else "starved"), ""
    except Crashed as crashed:
        if crashed.signal == signal.SIGKILL:  # not by this process
            raise EnvError("math_verifier: its process was killed; is there enough memory?") from None
        return "crashed", ""


@functools.cache
def _fork() -> Fork:
    try:
        _prepare()
    except ImportError as error:
        raise EnvError(
            f"math_verifier: {sys.executable} has no math-verify ({error}); use executable='gym', or another one "
            "with nrl's extra 'gym'"
        ) from error
    return Fork(_told, most=_REQUESTS)


# --- In the fork alone.


def _told(request: tuple[str, str | None]) -> str:
    """Return why a reference cannot be used, empty if it can; or with an answer, what becomes of that."""
    from nrl.envs.library.mathematics.comparing import is_right, unusable
    from nrl.envs.library.mathematics.nodes import UnreadableError

    reference, answer = request
    if answer is None:
        return unusable(reference)
    try:
        return "right" if is_right(reference, answer) else "wrong"
    except UnreadableError:
        return "unread"


def _prepare() -> None:
    """Import everything and use it once: math-verify's parser learns its grammar as it goes."""
    import math_verify

    assert math_verify
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    for text in _WARM:
        _told((text, None))
        _told((text, text.replace("1", "5")))
