"""Background writing of checkpoints, one at a time, whose errors are raised in the program."""

from collections.abc import Callable
from concurrent.futures import Future

from nrl.files import Folder, to_folder
from nrl.log import wait_for

__all__ = ["AsyncCheckpointer"]


class AsyncCheckpointer:
    """Write one checkpoint at a time in the background and re-raise its error; on exit, wait for it."""

    def __init__(self) -> None:
        self._future: Future[Folder] | None = None
        self._folder = to_folder("")

    def begin(self, folder: Folder, start: Callable[[], Future[Folder]]) -> None:
        """Start to write a checkpoint after the previous one is complete.

        Raises:
            CheckpointError: the one before, or this one, cannot be written.
        """
        self.wait(f"before {folder.name} is copied")
        self._future, self._folder = start(), folder

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written; does not wait."""
        if self._future is not None and self._future.done():
            self.wait()

    def wait(self, reason: str = "before the program goes on") -> None:
        """Wait for the pending checkpoint, and report a long wait.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        if self._future is not None:
            folder = self._folder
            wait_for(self._future, lambda seconds: f"save: {folder} is still being written, {reason} ({seconds:.0f} s)")
            future, self._future = self._future, None
            future.result()

    def __enter__(self) -> "AsyncCheckpointer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.wait("before the run ends")
        except Exception as error:
            if kind is None:
                raise
            print(f"save: {self._folder} is not complete: {error}", flush=True)
