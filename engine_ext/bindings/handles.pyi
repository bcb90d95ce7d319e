"""What a call of the engine returns."""

from collections.abc import Callable
from typing import Any

class Handle:
    """One submitted operation. It owns its tensors until the engine has let go of them."""

    @property
    def name(self) -> str: ...
    @property
    def done(self) -> bool:
        """Whether `wait` would return at once. Never blocks; raises nothing."""
    @property
    def output(self) -> Any:
        """The tensor that holds, or will hold, the result; None for allgather and barrier."""
    @property
    def gathered(self) -> tuple[Any, tuple[int, ...]]:
        """Allgather or alltoall, after `wait`: the bytes, writable and owned, and the rows of each rank.

        The bytes are a memoryview; of a tensor on a GPU what `room` has made for them; None if they are in `output`.
        """
    @property
    def gathered_group(self) -> list[tuple[Any, tuple[int, ...], int]]:
        """Allgather of a group, after `wait`: of each tensor the bytes, writable and owned, the rows of each rank, and
        the bytes of a row.
        """
    def notify(self, told: Callable[[], object]) -> None:
        """Call `told` once the operation is done, whatever has come of it: at once if it is, else on another thread.

        Once for each handle. What `told` raises is raised here if it is called at once, else printed. It may use any
        engine of this process.
        """
    def set_aside(self, on: bool) -> None:
        """Say whether nobody minds if the operation is never done: then ranks that it needs may leave."""
    def release_tensor(self) -> bool:
        """Have a message that has not begun use memory of its own, and not its tensor; return whether it does.

        Of what is sent that is a copy. What is received is in `gathered` then.
        """
    def wait(self) -> None:
        """Drive the engine until the operation is done; raise what went wrong. May be called again."""
    def wait_within(self, seconds: float) -> bool:
        """As `wait`, for at most so many seconds, suspensions left out; return whether the operation is done."""

def end_notifications(seconds: float = 5.0) -> bool:
    """Notify nobody from now on, and wait until functions that handles have notified are done, at most so many seconds;
    return whether they are. Called as the interpreter ends.
    """

def forget_tellers() -> None:
    """Forget threads that a forked child does not have."""
