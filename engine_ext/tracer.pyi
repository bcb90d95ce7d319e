"""Recording for a timeline. `engine.trace` wraps it; users do not import it."""

from typing import Self

from engine_ext.core import Engine

class Tracer:
    """The recording of one engine, drawn as the process `track`. All but `drain` may be called from any thread."""

    def __new__(cls, engine: Engine, track: int) -> Self: ...
    left_out: int
    """Records of this recording that would have gone beyond the file's limit."""
    @property
    def closed(self) -> bool:
        """Whether the engine was: what it has recorded is all there will be."""
    @property
    def clocked(self) -> bool:
        """Whether times in the file are those of the clock of rank 0's host; if not, they are of this host's."""
    def start(self, rate: int, saved: float) -> None:
        """Begin a recording of at most `rate` lines a second in the mean, with what `saved` seconds allow in hand. On
        the engine's first rank it decides for all its ranks which entries are recorded.
        """
    def stop(self) -> None: ...
    def set_rate(self, rate: int) -> None: ...
    def drain(self, fd: int, offset: int, limit: int, cycles: bool) -> int:
        """Append what is recorded to a file of `offset` bytes, up to `limit`; its new size. `cycles`: with an instant
        for each batch closed. Raises OSError; the file then ends with a whole line.
        """
    def totals(self) -> dict[str, int]:
        """Of the recording: since_ns and now_ns (monotonic), entries, tensors, bytes, steps, busy_ns (in entries),
        wait_ns (some caller was blocked), exposed_ns (both), dropped (records for which there was no room).
        """
