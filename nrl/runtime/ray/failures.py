"""Why a call on Ray failed: a process has died, or a function has raised."""

import re
from collections.abc import Callable
from typing import Any

from nrl.errors import FailedStart, LostActor
from nrl.runtime.ray.codec.exceptions import Raised

__all__ = ["cause", "error_of", "is_death", "is_of_a_lost_value", "lost", "original", "raised"]

_ANSI = re.compile(r"\x1b\[[0-9;]*m")  # Ray writes its tracebacks in colours


def is_death(error: BaseException) -> bool:
    """Whether an error says that the process itself, or its node, is gone."""
    from ray import exceptions

    gone = exceptions.RayActorError | exceptions.WorkerCrashedError | exceptions.NodeDiedError
    unstarted = exceptions.OutOfMemoryError | exceptions.RuntimeEnvSetupError | exceptions.ActorPlacementGroupRemoved
    return isinstance(error, gone | unstarted) and not isinstance(error, exceptions.RayTaskError)


def is_of_a_lost_value(error: BaseException) -> bool:
    """Whether an error says that a value which the call was given is gone, as with the node that held it."""
    from ray import exceptions

    return isinstance(error.cause if isinstance(error, exceptions.RayTaskError) else error, exceptions.ObjectLostError)


def error_of(receipt: Any) -> BaseException | None:
    """The error that Ray has in the place of a receipt; None: a receipt, or nothing by now."""
    import ray

    try:
        ray.get(receipt, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return None
    except ray.exceptions.RayError as error:
        return error
    return None


def original(error: BaseException, where: str) -> BaseException:
    """The exception of a function in another process, with its traceback as a note."""
    from ray.exceptions import RayTaskError

    if not isinstance(error, RayTaskError):
        return error
    cause: BaseException | None = error.cause
    raised = cause if isinstance(cause, Raised) else None
    text = _ANSI.sub("", str(error)) if raised is None else raised.trace
    found = raised.original() if raised is not None else cause or RuntimeError(text)
    found.add_note(f"{where}:\n{text.rstrip()}")
    return found


def raised(error: BaseException, mesh: str, where: str) -> BaseException:
    """What a function raised in a process of a mesh, with notes that say where, and what to do about it."""
    found = original(error, f"raised in {where}")
    if isinstance(found, ModuleNotFoundError) and found.name:
        package = found.name.partition(".")[0]
        found.add_note(
            f"The environment of mesh '{mesh}' has no package '{package}': name it in the requirements of its "
            "Executable, or use executable='system' if the driver's own interpreter has it"
        )
    return found


def lost(who: str, mesh: str, rank: int, node: str, error: BaseException, log: Callable[[], str]) -> LostActor:
    """The error that says of a process that it died; ``log`` has the last lines that it wrote."""
    if trace := _raised_at_start(error):
        return FailedStart(who, mesh, rank, node, f"it raised {trace.splitlines()[-1]}", trace)
    return LostActor(who, mesh, rank, node, cause(error), log())


def _raised_at_start(error: BaseException) -> str:
    """The traceback of an actor's constructor, or of the import of its class; empty if neither raised."""
    text = _ANSI.sub("", str(error)).partition("\nAn unexpected internal error")[0].rstrip()
    _, constructor, raised = text.partition("raised in its creation task, ")
    if constructor:
        return raised[max(raised.find("  File "), 0) :]
    _, found, trace = text.rpartition("Traceback (most recent call last):")
    return f"{found}{trace}" if found else ""


def cause(error: BaseException) -> str:
    """Why an actor died, on one line: the facts that Ray gives, without its guesses."""
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
    text = text.partition("Some common causes include")[0]  # guesses begin here
    return " ".join(_ANSI.sub("", text).split())[:500].rstrip(".")
