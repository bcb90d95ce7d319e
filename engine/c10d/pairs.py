"""Pairs of ranks, over which messages pass: sets of two, in which a message is an allgather of the sender's bytes.

A pair is formed without waiting for the other rank, when one of both first sends or receives; between hosts, which
have to connect, by a thread, and messages wait for it.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..errors import EngineError, NotInitializedError, RendezvousError
from ..errors.formatting import format_exception
from ..host.patience import Patience
from ..native import core, handles
from ..session.registry import ProcessSetRegistry
from .meeting import StoreMeeting

# A receiver may wait for as long as its group's time-out says, and a rank that leaves ends the pair alone.
_SETTINGS: dict[str, Any] = {"stall_warning": 0.0, "stall_limit": 0.0, "ends_alone": True}
_LEAVING_STORE = 2.0  # seconds in which threads that wait for other ranks end with the interpreter
_exiting = threading.Event()
_connecting: set[threading.Thread] = set()


def _end_connecting() -> None:
    """Have no thread in torch's store as the interpreter ends: its C++ would end the process by SIGABRT."""
    _exiting.set()
    patience = Patience(_LEAVING_STORE)
    for thread in _connecting.copy():
        thread.join(patience.seconds_left())


atexit.register(_end_connecting)


class Pair:
    """This rank's end of a set of two ranks, which may not be formed yet.

    `ranks` has both world ranks. The first coordinates; between hosts it has the lower number in the group. The engine
    of the group fails with the world. `name` is that of the pair in its group.
    """

    def __init__(self, sets: ProcessSetRegistry, group: core.Engine, ranks: tuple[int, ...], name: str) -> None:
        self._sets, self._group, self._ranks, self._name = sets, group, ranks, name
        self._lock = threading.Lock()
        self._engine: core.Engine | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._waiting: list[LateMessage] = []

    @property
    def on_one_host(self) -> bool:
        """Return whether both ranks share a host."""
        return self._sets.are_on_one_host(self._ranks)

    def form_pair(self, meeting: StoreMeeting, end: int) -> None:
        """Form the pair: at once on one host, else on a thread, since it takes both ranks."""
        if self.on_one_host:
            offset = meeting.find_number(self._name)
            if offset is None:
                offset = meeting.agree_on_number(self._name, self._sets.claim_segment(2))
            self._engine = self._sets.enter(self._ranks, offset, **_SETTINGS)
        else:
            thread = threading.Thread(target=self._connect, args=(meeting, end), name="engine-pair", daemon=True)
            _connecting.add(thread)
            thread.start()

    def _connect(self, meeting: StoreMeeting, end: int) -> None:
        """Form the pair as soon as the other rank comes, however late, and submit what waits for it."""
        engine: core.Engine | None = None
        error: BaseException | None = None
        try:
            aside = meeting.meet_aside(self._name, end, 2, self._is_unwanted)
            engine = self._sets.form_among(self._ranks, f"{self._name} {aside.key}", aside.exchange_texts, **_SETTINGS)
        except EngineError as failure:
            error = self._group.failure or failure
        except Exception as failure:  # most of torch's store, which ends with the process of rank 0
            error = self._group.failure or RendezvousError(
                f"the {self._name} was not formed: {format_exception(failure)}"
            )
        with self._lock:
            if engine is not None and self._closed:
                self._sets.leave_set(engine, 0.0)
                error = NotInitializedError("the process group was destroyed")
            else:
                self._engine = engine
            self._error = error
            waiting, self._waiting = self._waiting, []
            if self._engine is not None:
                for each in waiting:
                    each.submit_now(self._engine)
        for each in waiting:
            each.let_go_on(error)
        _connecting.discard(threading.current_thread())

    def _is_unwanted(self) -> bool:
        """Return whether nobody waits for the other rank any more."""
        return self._closed or _exiting.is_set() or self._group.failure is not None

    def send(self, tensor: torch.Tensor, name: str, copy: bool) -> Message:
        """Send what a tensor holds: a `copy` that is made now, or else the tensor, until the message is done."""
        with self._lock:
            if self._engine is not None:
                return self._engine.send_bytes(tensor, name, copy)
            return self._submit_late(LateMessage(name, tensor.clone() if copy else tensor, True))

    def receive(self, output: torch.Tensor | None, name: str) -> Message:
        """Receive the next message of a name, into `output` if it is as long; else the message has it."""
        with self._lock:
            if self._engine is not None:
                return self._engine.receive_bytes(output, name)
            return self._submit_late(LateMessage(name, output, False))

    def _submit_late(self, message: LateMessage) -> LateMessage:
        """Have a message submitted as soon as the pair is formed."""
        if self._error is not None:
            raise self._error.with_traceback(None)  # it is raised again and again
        self._waiting.append(message)
        return message

    def close(self, seconds: float) -> None:
        """Leave the pair. What is in flight has so many seconds; then it ends, such as a receive without a message."""
        with self._lock:
            self._closed, engine = True, self._engine
        if engine is not None:
            self._sets.leave_set(engine, seconds)


class LateMessage:
    """Handle of a message that is submitted when its pair is formed."""

    def __init__(self, name: str, tensor: torch.Tensor | None, sends: bool) -> None:
        self.name = name
        self._tensor, self._sends = tensor, sends
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._handle: handles.Handle | None = None
        self._error: BaseException | None = None
        self._told: Callable[[], object] | None = None
        self._aside = False

    def submit_now(self, engine: core.Engine) -> None:
        try:
            with self._lock:
                start = partial(engine.send_bytes, copy=False) if self._sends else engine.receive_bytes
                self._handle = start(self._tensor, self.name)
                self._handle.set_aside(self._aside)
        except Exception as error:  # such as no memory: waiters raise it
            self._error = error

    def let_go_on(self, error: BaseException | None) -> None:
        """Let waiters go on: the message is submitted, or cannot be."""
        with self._lock:
            self._error = self._error or error
            self._settled.set()
            told = self._told
        if told is not None:
            self._pass_on(told)

    def _pass_on(self, told: Callable[[], object]) -> None:
        if self._handle is None:
            told()
        else:
            self._handle.notify(told)

    def notify(self, told: Callable[[], object]) -> None:
        with self._lock:
            if not self._settled.is_set():
                self._told = told
                return
        self._pass_on(told)

    def set_aside(self, on: bool) -> None:
        with self._lock:
            self._aside = on
            if self._handle is not None:
                self._handle.set_aside(on)

    def release_tensor(self) -> bool:
        with self._lock:
            if self._handle is not None:
                return self._handle.release_tensor()
            self._tensor = self._tensor.clone() if self._sends and self._tensor is not None else None
            return self._error is None

    @property
    def done(self) -> bool:
        return self._settled.is_set() and (self._handle is None or self._handle.done)

    @property
    def gathered(self) -> tuple[Any, tuple[int, ...]]:
        assert self._handle is not None
        return self._handle.gathered

    def wait(self) -> None:
        self._settled.wait()
        self._find_handle().wait()

    def wait_within(self, seconds: float) -> bool:
        patience = Patience(seconds)
        return self._settled.wait(seconds) and self._find_handle().wait_within(patience.seconds_left())

    def _find_handle(self) -> handles.Handle:
        if self._error is not None:
            raise self._error
        assert self._handle is not None
        return self._handle


Message = handles.Handle | LateMessage


class Posting:
    """Place of this rank in the messages of one sender and tag, at which the next of them is received.

    One work after another may want it, such as one that waits for any sender: the last that asks is notified.
    """

    def __init__(self, message: Message, number: int) -> None:
        self.number = number  # number of the message, among those of its sender and tag
        self._message = message
        self._lock = threading.Lock()
        self._asked = self._arrived = False
        self._told: Callable[[], object] | None = None

    def _note_arrival(self) -> None:
        with self._lock:
            self._arrived, told = True, self._told
        if told is not None:
            told()

    def notify(self, told: Callable[[], object] | None) -> None:
        """Call `told` at the end, and nobody who asked before."""
        with self._lock:
            self._told = told
            arrived, first = self._arrived, told is not None and not self._asked
            self._asked = self._asked or first
        if first:
            self._message.notify(self._note_arrival)
        elif arrived and told is not None:
            told()

    @property
    def name(self) -> str:
        return self._message.name

    @property
    def done(self) -> bool:
        return self._message.done

    @property
    def gathered(self) -> tuple[Any, tuple[int, ...]]:
        return self._message.gathered

    def wait(self) -> None:
        self._message.wait()

    def wait_within(self, seconds: float) -> bool:
        return self._message.wait_within(seconds)

    def set_aside(self, on: bool) -> None:
        self._message.set_aside(on)

    def release_tensor(self) -> bool:
        return self._message.release_tensor()
