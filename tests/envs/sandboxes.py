"""Sandboxes as tests use them: made by this process, and by one that is no root."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from nrl.envs.sandbox import Finished, Limits, bubblewrap

__all__ = ["USER", "become_user", "probed"]

USER = 45678  # whom no file belongs to


def become_user() -> None:
    """Give up root, for good; what is imported later has to be readable by everybody."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)


def _python() -> str:
    """An interpreter that this user can read: this one, or that of the system."""
    own = Path(getattr(sys, "_base_executable", sys.executable))
    try:
        own.stat()
    except PermissionError:
        return "/usr/bin/python3"
    return str(own)


def probed(program: str, stdin: bytes, files: Mapping[str, bytes], limits: Limits) -> Finished:
    """A program in the sandbox that this process makes."""
    return bubblewrap(python=_python())(["python", "-c", program], stdin, files, limits)
