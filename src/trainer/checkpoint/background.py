"""One write in the background at a time, whose failure is raised where it is waited for.

Owns the thread, nothing of what runs in it.
"""

import threading
from collections.abc import Callable


class BackgroundWrite:
    """Runs one function at a time on a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, function: Callable[[], None]) -> None:
        """Run `function` on a thread; the one before must have been waited for."""
        assert self._thread is None, "a write is still to be waited for"
        # A daemon: a run that fails otherwise must not wait for ranks that are gone.
        self._thread = threading.Thread(
            target=self._run, args=(function,), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the write, if there is one, and raise what it raised."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # handed to the thread that waits
            self._failure = error
