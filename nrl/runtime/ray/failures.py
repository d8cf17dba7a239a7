"""Errors of calls on Ray: a process has died, or a function has raised."""

import re
from collections.abc import Callable
from typing import Any

from nrl.errors import FailedStart, LostActor
from nrl.runtime.ray.codec.exceptions import RemoteException

__all__ = ["describe_death", "explain_raised", "get_error", "is_death", "is_lost_value", "make_lost_error", "unwrap"]

_ANSI = re.compile(r"\x1b\[[0-9;]*m")  # Ray writes its tracebacks in colours


def is_death(error: BaseException) -> bool:
    """Return whether an error says that the process itself, or its node, is gone."""
    from ray import exceptions

    gone = exceptions.RayActorError | exceptions.WorkerCrashedError | exceptions.NodeDiedError
    unstarted = exceptions.OutOfMemoryError | exceptions.RuntimeEnvSetupError | exceptions.ActorPlacementGroupRemoved
    return isinstance(error, gone | unstarted) and not isinstance(error, exceptions.RayTaskError)


def is_lost_value(error: BaseException) -> bool:
    """Return whether an error says that an argument of the call is lost, as with the node that held it."""
    from ray import exceptions

    return isinstance(error.cause if isinstance(error, exceptions.RayTaskError) else error, exceptions.ObjectLostError)


def get_error(receipt: Any) -> BaseException | None:
    """Return the error that Ray has in the place of a reply; None: a reply, or nothing by now."""
    import ray

    try:
        ray.get(receipt, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return None
    except ray.exceptions.RayError as error:
        return error
    return None


def unwrap(error: BaseException, where: str) -> BaseException:
    """Return the exception of a function in another process, with its traceback as a note."""
    from ray.exceptions import RayTaskError

    if not isinstance(error, RayTaskError):
        return error
    inner: BaseException | None = error.cause
    remote = inner if isinstance(inner, RemoteException) else None
    text = _ANSI.sub("", str(error)) if remote is None else remote.trace
    result = remote.rebuild() if remote is not None else inner or RuntimeError(text)
    result.add_note(f"{where}:\n{text.rstrip()}")
    return result


def explain_raised(error: BaseException, mesh: str, where: str) -> BaseException:
    """Return the error of a function in a process of a mesh, with notes about the place and the remedy."""
    result = unwrap(error, f"raised in {where}")
    if isinstance(result, ModuleNotFoundError) and result.name:
        package = result.name.partition(".")[0]
        result.add_note(
            f"The environment of mesh '{mesh}' has no package '{package}': name it in the requirements of its "
            "Executable, or use executable='system' if the driver's own interpreter has it"
        )
    return result


def make_lost_error(
    caller: str, mesh: str, rank: int, node: str, error: BaseException, log: Callable[[], str]
) -> LostActor:
    """Make the error for a process that died; ``log`` returns the last lines of its log."""
    if trace := _find_start_traceback(error):
        return FailedStart(caller, mesh, rank, node, f"it raised {trace.splitlines()[-1]}", trace)
    return LostActor(caller, mesh, rank, node, describe_death(error), log())


def _find_start_traceback(error: BaseException) -> str:
    """Find the traceback of an actor's constructor, or of the import of its class; empty if neither raised."""
    text = _ANSI.sub("", str(error)).partition("\nAn unexpected internal error")[0].rstrip()
    _, constructor, tail = text.partition("raised in its creation task, ")
    if constructor:
        return tail[max(tail.find("  File "), 0) :]
    _, mark, trace = text.rpartition("Traceback (most recent call last):")
    return f"{mark}{trace}" if mark else ""


def describe_death(error: BaseException) -> str:
    """Describe why an actor died, on one line: the facts that Ray gives, without its guesses."""
    from ray.exceptions import ActorUnavailableError

    text = str(error)
    process = re.search(r"\bpid: (\d+)", text)
    if "connection error code 2" in text:
        return f"process {process[1] if process else '?'} was killed, or crashed"
    if isinstance(error, ActorUnavailableError):
        return "it cannot be reached any more, as when its node is gone"
    if code := re.search(r"exit code (\d+)", text):
        return f"process {process[1] if process else '?'} ended with exit code {code[1]}"
    for mark in ("Worker exit detail:", "The actor died because", "The actor is dead because"):
        if mark in text:
            text = text[text.index(mark) + (len(mark) if mark.endswith(":") else 0) :]
            break
    text = text.partition("Some common causes include")[0]  # Ray's guesses follow.
    return " ".join(_ANSI.sub("", text).split())[:500].rstrip(".")
