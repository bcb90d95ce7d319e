"""Work of torch.distributed: what a collective returns, by which callers wait, poll and chain callbacks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..errors import EngineError, RankStalledError, UnsupportedTensorError
from ..errors.formatting import format_exception
from ..host.patience import Patience

KEPT = 4096  # bytes of the tensors of a work up to which it is kept when nobody has waited for it
PROMPT_BYTES = 1 << 16  # bytes of the tensors of a work up to which whoever asks for a future waits first
PROMPT_SECONDS = 50e-6  # for at most so long, which is less than waking the threads that would complete the future

Finish = Callable[[], object]
_Future: Any = torch._C.Future  # what torch's own backends return
_unclaimed: deque[EngineWork] = deque(maxlen=16)


class Operation(Protocol):
    """Operation of the engine that was submitted, or will be: native handles are such."""

    @property
    def name(self) -> str:
        """Name on every rank."""

    @property
    def done(self) -> bool:
        """Return whether `wait` would return at once."""

    def wait(self) -> None:
        """Wait for the end; raise the operation's error."""

    def wait_within(self, seconds: float) -> bool:
        """Wait for the end, at most so many seconds, and return whether it has come; raise the operation's error."""

    def notify(self, told: Callable[[], object]) -> None:
        """Call `told` at the end, once."""


class EngineWork(dist.Work):
    """One operation of torch, on one or several of the engine.

    Its end does not depend on `wait`: with a `finish`, or if a future was asked for, a thread of the engine calls
    `conclude_work`. That thread holds no lock while callbacks run, so they may wait for other operations.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        tensors: Sequence[torch.Tensor],
        finish: Finish | None = None,
        source: int = -1,
        earlier: Sequence[EngineWork] = (),
    ) -> None:
        super().__init__()
        self._operations = operations
        self._tensors = tensors  # hold the result once the work is done
        self._finish = finish  # stores the result in the tensors, once the operations are done; called once
        self._earlier = earlier  # works that `wait` waits for, too, so that their results lie in their tensors
        self._lock = threading.Lock()
        self._over = False
        self._error: BaseException | None = None
        self._end: Any = None  # completes the future, if one was asked for
        self._future: Any = None
        self._watched = False
        self._claimed = False
        self.source = source  # rank in the group from which the tensors were received; -1: they were not

    def __del__(self) -> None:
        """Keep a work that nobody has waited for: C++ may hold it alone, without the methods of this class.

        So does DDP in a `Join` context, whose work sums a single number.
        """
        if not self._claimed and _count_bytes(self._tensors) <= KEPT:
            _unclaimed.append(self)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the operation; raise its error. A `timeout` other than 0 limits this wait alone."""
        self._claimed = True
        patience = Patience(seconds) if (seconds := read_seconds(timeout)) else None
        for work in (self, *self._earlier):  # without this work's lock: their callbacks may ask for it
            if not work._over:
                if patience is not None:
                    work._wait_within(patience.seconds_left(), seconds)
                work.conclude_work()
        self._earlier = ()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._over and all(each.done for each in self._operations):
            self.conclude_work()
        return self._over

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    @property
    def over(self) -> bool:
        """Return whether the work is concluded; unlike `is_completed`, without a look at its operations."""
        return self._over

    def result(self) -> list[torch.Tensor]:
        return list(self._tensors)

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        self._claimed = True
        if self._future is None and not self._over:
            self.try_promptly()
        with self._lock:
            if self._future is not None:
                return self._future
            self._end = _Future([])
            self._future = self._end.then(self._tell_result)
            over = self._over
        if over:
            self._end.set_result(None)
        else:
            self.watch_end()
        return self._future

    def try_promptly(self) -> None:
        """Conclude a small work here if its operations are done within a moment."""
        if not self._operations or _count_bytes(self._tensors) > PROMPT_BYTES:
            return
        patience = Patience(PROMPT_SECONDS)
        with suppress(EngineError):  # raised again when the work is concluded
            if not all(each.wait_within(patience.seconds_left()) for each in self._operations):
                return
        self.conclude_work()

    def watch_end(self) -> None:
        """Have the work concluded by a thread of the engine as soon as its operations are done."""
        with self._lock:
            if self._watched:
                return
            self._watched = True
        _Countdown(self).start(self._operations)

    def conclude_work(self) -> None:
        """Wait for the operations, store the result and complete the future; does nothing the second time."""
        error: BaseException | None = None
        try:
            for each in self._operations:
                each.wait()
        except Exception as failure:  # a future that is never completed would hide it
            error = self.explain_failure(failure) if isinstance(failure, EngineError) else failure
        with self._lock:
            if self._over:
                return
            if error is None and self._finish is not None:
                try:
                    self._finish()
                except Exception as failure:  # an output of the wrong size, which torch has not checked
                    error = failure
            self._error, self._over, self._finish = error, True, None
            self._operations, end = (), self._end
        if end is not None:
            end.set_result(None)

    def explain_failure(self, failure: EngineError) -> BaseException:
        """Return torch's exception for an operation that has failed."""
        return translate_error(failure)

    def settle_work(self, error: BaseException | None, provided: Callable[[], bool] | None = None) -> bool:
        """Complete the work from outside, unless it is complete: with an error, or with None for success.

        `provided` is asked first, while no other thread can complete the work. Return False if it has said no.
        """
        with self._lock:
            if self._over:
                return True
            if provided is not None and not provided():
                return False
            self._error, self._over, self._finish, end = error, True, None, self._end
        if end is not None:
            end.set_result(None)
        return True

    def _tell_result(self, _end: Any) -> list[torch.Tensor]:
        """Return the result of the future, or raise its error, which C++ sees only if a callback has raised it."""
        if self._error is not None:
            raise self._error
        return list(self._tensors)

    def _wait_within(self, left: float, seconds: float) -> None:
        """Wait for the operations for the time that is left of a time-out of so many seconds; raise if it passes."""
        patience = Patience(left)
        for each in self._operations:
            try:
                ended = each.wait_within(patience.seconds_left())
            except EngineError:  # raised again when the work is concluded
                return
            if not ended:
                names = ", ".join(repr(each.name) for each in self._operations)
                raise dist.DistBackendError(
                    f"engine: {names} has not ended within {seconds:g} s, the time-out of this wait"
                )


class _Countdown:
    """Conclusion of a work when the last of its operations is done."""

    def __init__(self, work: EngineWork) -> None:
        self._work = work
        self._left = 1
        self._lock = threading.Lock()

    def start(self, operations: Sequence[Operation]) -> None:
        self._left += len(operations)
        for each in operations:
            each.notify(self._count_one)
        self._count_one()

    def _count_one(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._work.conclude_work()


def _count_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of all elements, of sparse tensors too, which lack `nbytes`."""
    return sum(each.numel() * each.element_size() for each in tensors)


def read_seconds(timeout: timedelta | None) -> float:
    """Return the seconds of a time-out; 0.0: there is none."""
    return max(0.0, timeout.total_seconds()) if timeout else 0.0


def expect_host(tensor: torch.Tensor) -> None:
    """Raise UnsupportedTensorError unless a tensor is on the CPU."""
    if not tensor.is_cpu:
        raise UnsupportedTensorError(
            f"a tensor is on {tensor.device}, and the backend 'engine' takes tensors of the CPU: use another backend "
            "for this device, such as init_process_group('nccl')"
        )


def translate_error(error: EngineError, what: str = "") -> BaseException:
    """Return torch's exception for an error of the engine, which is its cause; `what` has failed by it."""
    # Programs look for the word of torch's argument, by which they know that no rank has failed.
    late = isinstance(error, RankStalledError)
    reason = "the timeout of init_process_group or new_group (or ENGINE_STALL_LIMIT) has passed: " if late else ""
    failed = what and f"{what} failed: "
    translated = dist.DistBackendError(f"engine: {reason}{failed}{format_exception(error)}")
    translated.__cause__ = error
    return translated
