"""The checkpoint of a run that is on its way to the disk: one at a time, whose error the program gets."""

from collections.abc import Callable
from concurrent.futures import Future

from nrl.files import Folder, at
from nrl.log import wait_for

__all__ = ["OnItsWay"]


class OnItsWay:
    """At most one checkpoint, written beside the program; used as a context manager, which waits for it at its end."""

    def __init__(self) -> None:
        self._future: Future[Folder] | None = None
        self._folder = at("")

    def begin(self, folder: Folder, start: Callable[[], Future[Folder]]) -> None:
        """Start to write a checkpoint, when the one before is on the disk.

        Raises:
            CheckpointError: the one before, or this one, cannot be written.
        """
        self.wait(f"before {folder.name} is copied")
        self._future, self._folder = start(), folder

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written; does not wait."""
        if self._future is not None and self._future.done():
            self.wait()

    def wait(self, why: str = "before the program goes on") -> None:
        """Wait until nothing is on its way, and say so where it takes long.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._future is not None:
            folder = self._folder
            wait_for(self._future, lambda seconds: f"save: {folder} is still being written, {why} ({seconds:.0f} s)")
            future, self._future = self._future, None
            future.result()

    def __enter__(self) -> "OnItsWay":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait("before the run ends")
        except Exception as error:
            if kind is None:
                raise
            print(f"save: {self._folder} is not complete: {error}", flush=True)
