"""Thread that works beside the program until it is told to end."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundThread:
    """Daemon thread that calls `work` with an event, and ends when `work` returns.

    `work` has to return soon after the event is set.
    """

    def __init__(self, name: str, work: Callable[[threading.Event], None]) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=work, args=(self._over,), name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if the system allows no further one."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Set the event, and wait at most `seconds` for the end of the thread, if it was started."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(seconds)
