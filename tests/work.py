"""Work that is counted, for tests of how much of it there is: seconds depend on the machine and its other work."""

import sys
from collections.abc import Callable

__all__ = ["calls"]


def calls(fn: Callable[[], object]) -> int:
    """How many functions are called while ``fn`` runs in this thread, those written in C included.

    >>> calls(lambda: [abs(each) for each in range(9)]) in range(9, 15)
    True
    """
    count = 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return count
