"""Messages between two ranks of a group: sets of two ranks, in which a message is an allgather of the sender's bytes.

A pair is formed without waiting for the other rank, when one of both first sends or receives; between hosts, which
have to connect, by a thread, and messages wait for it. Operations have names made of direction, tag and number, so
messages in both directions and with several tags never wait for one another.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch

from ..errors import EngineError
from ..native import core, handles
from ..session import runtime
from ..session.registry import ProcessSetRegistry
from .meeting import StoreMeeting
from .work import EngineWork, expect_host, translate_error

LEAVING = 1.0  # seconds for messages in flight when a group is destroyed
EAGER = 1 << 16  # bytes up to which a message is copied, so that its sender does not wait for the receiver
_PATIENT: dict[str, Any] = {"stall_warning": 0.0, "stall_limit": 0.0}  # a receiver may wait for as long as it likes
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class Messenger:
    """Messages of one rank of a group."""

    def __init__(self, engine: core.Engine, meeting: StoreMeeting) -> None:
        self._engine = engine
        self._meeting = meeting
        self._lock = threading.RLock()
        self._pairs: dict[int, _Pair] = {}
        self._numbers: Counter[tuple[int, int, int]] = Counter()  # messages by sender, receiver and tag
        self._posted: dict[tuple[int, int], deque[_Posted]] = {}  # receives that found another message first
        self._own: dict[int, deque[torch.Tensor]] = {}  # messages to this rank itself, by tag

    def send(self, tensor: torch.Tensor, receiver: int, tag: int) -> EngineWork:
        """Start to send a tensor to a rank of the group."""
        source = _as_bytes(tensor)
        with self._lock:
            if receiver == self._engine.rank:
                self._own.setdefault(tag, deque()).append(source.clone())
                return EngineWork((), [tensor])
            if source.numel() <= EAGER:
                self._submit(self._engine.rank, receiver, tag, source.clone())
                return EngineWork((), [tensor])
            return EngineWork([self._submit(self._engine.rank, receiver, tag, source)], [tensor])

    def receive(self, tensor: torch.Tensor, sender: int, tag: int) -> EngineWork:
        """Start to receive a tensor from a rank of the group."""
        with self._lock:
            if sender == self._engine.rank:
                return self._receive_own(tensor, tag)
            handle = self._next_message(sender, tag)
        return _make_receive(handle, tensor, sender)

    def _next_message(self, sender: int, tag: int) -> Message:
        posted = self._posted.get((sender, tag))
        if not posted:
            return self._submit(sender, self._engine.rank, tag, _NOTHING)
        handle = posted.popleft()
        handle.set_aside(False)
        return handle

    def receive_from_any(self, tensor: torch.Tensor, tag: int) -> EngineWork:
        """Start to receive a tensor from whichever rank of the group sends first."""
        return _AnySource(self, tensor, tag)

    def _receive_own(self, tensor: torch.Tensor, tag: int) -> EngineWork:
        waiting = self._own.get(tag)
        if not waiting:
            raise ValueError("engine: a rank that receives from itself has sent before")
        _store(tensor, waiting.popleft())
        return EngineWork((), [tensor], source=self._engine.rank)

    def post_to_all(self, tag: int) -> dict[int, _Posted]:
        """Start to receive the next message of each other rank; returns them by sender."""
        with self._lock:
            found = {}
            for sender in range(self._engine.size):
                if sender != self._engine.rank:
                    message = self._next_message(sender, tag)
                    found[sender] = message if isinstance(message, _Posted) else _Posted(message)
            return found

    def put_back(self, tag: int, posted: dict[int, _Posted]) -> None:
        """Keep messages that were not taken, for the next that receives from their senders."""
        with self._lock:
            for sender, handle in posted.items():
                handle.set_aside(True)
                self._posted.setdefault((sender, tag), deque()).appendleft(handle)

    def _submit(self, sender: int, receiver: int, tag: int, source: torch.Tensor) -> Message:
        key = sender, receiver, tag
        number = self._numbers[key]
        self._numbers[key] += 1
        other = receiver if sender == self._engine.rank else sender
        name = f"{self._engine.numbers[sender]}>{self._engine.numbers[receiver]} tag {tag} message {number}"
        try:
            return self._find_pair(other).submit(source, name)
        except EngineError as error:
            raise translate_error(error) from error

    def _find_pair(self, other: int) -> _Pair:
        """Return this rank's end of a pair, which is formed if it is not there."""
        pair = self._pairs.get(other)
        if pair is None:
            own = self._engine.rank
            ends = tuple(sorted((own, other)))
            ranks = tuple(self._engine.numbers[rank] for rank in ends)
            pair = self._pairs[other] = _Pair(runtime.current_session().sets, ranks, f"pair {ends[0]} and {ends[1]}")
            pair.form_pair(self._meeting, ends.index(own))
        return pair

    def close(self) -> None:
        """Leave the pairs."""
        for pair in self._pairs.values():
            pair.close()
        self._pairs.clear()


class _Pair:
    """This rank's end of a set of two ranks, which may not be formed yet."""

    def __init__(self, sets: ProcessSetRegistry, ranks: tuple[int, ...], name: str) -> None:
        self._sets, self._ranks, self._name = sets, ranks, name
        self._lock = threading.Lock()
        self._engine: core.Engine | None = None
        self._error: EngineError | None = None
        self._waiting: list[_Later] = []

    def form_pair(self, meeting: StoreMeeting, end: int) -> None:
        """Form the pair: at once on one host, else on a thread, since it takes both ranks."""
        if self._sets.are_on_one_host(self._ranks):
            offset = meeting.find_number(self._name)
            if offset is None:
                offset = meeting.agree_on_number(self._name, self._sets.claim_segment(2))
            self._engine = self._sets.enter(self._ranks, offset, **_PATIENT)
        else:
            threading.Thread(target=self._connect, args=(meeting, end), name="engine-pair", daemon=True).start()

    def _connect(self, meeting: StoreMeeting, end: int) -> None:
        try:
            aside = meeting.meet_aside(self._name, end, 2)
            engine = self._sets.form_among(self._ranks, f"{self._name} {aside.key}", aside.exchange_texts, **_PATIENT)
        except EngineError as error:
            with self._lock:
                self._error = error
                waiting, self._waiting = self._waiting, []
        else:
            with self._lock:
                self._engine = engine
                waiting, self._waiting = self._waiting, []
                for each in waiting:
                    each.submit_now(engine)
        for each in waiting:
            each.let_go_on(self._error)

    def submit(self, source: torch.Tensor, name: str) -> Message:
        """Submit this rank's part of a message, now or as soon as the pair is formed."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._engine is not None:
                return self._engine.allgather(source, name)
            later = _Later(source, name)
            self._waiting.append(later)
            return later

    def close(self) -> None:
        """Leave the pair. What is still in flight, a receive that no message has come for, ends."""
        if self._engine is not None:
            self._sets.leave_set(self._engine, LEAVING)


class _Later:
    """Handle of a message that is submitted when its pair is formed."""

    def __init__(self, source: torch.Tensor, name: str) -> None:
        self.name = name
        self._source = source
        self._lock = threading.Lock()
        self._settled = threading.Event()
        self._handle: handles.Handle | None = None
        self._error: EngineError | None = None
        self._told: Callable[[], object] | None = None
        self._aside = False

    def submit_now(self, engine: core.Engine) -> None:
        try:
            with self._lock:
                self._handle = engine.allgather(self._source, self.name)
                self._handle.set_aside(self._aside)
        except EngineError as error:
            self._error = error

    def let_go_on(self, error: EngineError | None) -> None:
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

    @property
    def done(self) -> bool:
        return self._settled.is_set() and (self._handle is None or self._handle.done)

    @property
    def gathered(self) -> tuple[Any, tuple[int, ...]]:
        assert self._handle is not None
        return self._handle.gathered

    def wait(self) -> None:
        self._settled.wait()
        if self._error is not None:
            raise self._error
        assert self._handle is not None
        self._handle.wait()


class _Posted:
    """Receive whose message may be wanted by one work after another: the last one that asks is notified."""

    def __init__(self, message: handles.Handle | _Later) -> None:
        self._message = message
        self._lock = threading.Lock()
        self._arrived = False
        self._told: Callable[[], object] | None = None
        message.notify(self._note_arrival)

    def _note_arrival(self) -> None:
        with self._lock:
            self._arrived, told = True, self._told
        if told is not None:
            told()

    def notify(self, told: Callable[[], object] | None) -> None:
        """Call `told` at the end, and nobody who asked before."""
        with self._lock:
            self._told = told
            arrived = self._arrived
        if arrived and told is not None:
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

    def set_aside(self, on: bool) -> None:
        self._message.set_aside(on)


Message = handles.Handle | _Later | _Posted


class _AnySource(EngineWork):
    """Work that receives a message of any rank."""

    def __init__(self, messenger: Messenger, tensor: torch.Tensor, tag: int) -> None:
        super().__init__((), [tensor])
        self._messenger, self._tensor, self._tag = messenger, tensor, tag
        self._posted = messenger.post_to_all(tag)
        self._found = threading.Event()
        self._taking = threading.Lock()
        for sender, handle in list(self._posted.items()):
            if not self._found.is_set():
                handle.notify(self._make_taker(sender))

    def _make_taker(self, sender: int) -> Callable[[], None]:
        return lambda: self._take_from(sender)

    def _take_from(self, sender: int) -> None:
        with self._taking:
            if self._found.is_set():
                return
            handle = self._posted.pop(sender)
            for each in self._posted.values():
                each.notify(None)
            self._messenger.put_back(self._tag, self._posted)
            self.source = sender
            error: BaseException | None = None
            try:
                handle.wait()
                _take_message(handle, self._tensor)
            except EngineError as failure:
                error = translate_error(failure)
            except ValueError as failure:
                error = failure
            self.settle_work(error)
            self._found.set()

    def wait(self, timeout: Any = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._found.wait(seconds or None):
            raise translate_error(EngineError(f"no rank has sent a message with tag {self._tag} within {seconds:g} s"))
        return super().wait()

    def is_completed(self) -> bool:
        return self._found.is_set()


def _make_receive(handle: Message, tensor: torch.Tensor, sender: int) -> EngineWork:
    work = EngineWork([handle], [tensor], lambda: _take_message(handle, tensor), sender)
    work.watch_end()
    return work


def _take_message(handle: Message, tensor: torch.Tensor) -> None:
    data, _ = handle.gathered
    _store(tensor, torch.frombuffer(data, dtype=torch.uint8) if data.nbytes else _NOTHING)


def _store(tensor: torch.Tensor, message: torch.Tensor) -> None:
    wanted = tensor.numel() * tensor.element_size()
    if message.numel() != wanted:
        raise ValueError(f"engine: a message of {message.numel()} bytes was received for a tensor of {wanted}")
    if wanted:
        tensor.detach().copy_(message.view(tensor.dtype).view(tensor.shape))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in row-major order as bytes."""
    expect_host(tensor)
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else _NOTHING
