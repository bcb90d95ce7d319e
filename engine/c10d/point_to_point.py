"""Messages between two ranks of a group, each over the pair of both.

A message has a name made of its direction, its tag and its number modulo `NAMES`, so that the coordinator knows the
names after the first messages, and messages in both directions and with several tags never wait for one another.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import EngineError, NotInitializedError
from ..host.patience import Patience
from ..native import core
from ..session import runtime
from ..session.registry import ProcessSetRegistry
from .meeting import StoreMeeting
from .outbox import Outbox
from .pairs import Message, Pair, Posting
from .work import EngineWork, expect_host, read_seconds, translate_error

LEAVING = 1.0  # seconds for messages in flight when a group is destroyed
EAGER = 1 << 16  # bytes up to which a message is copied, so that its sender does not wait for the receiver
NAMES = 8  # names for the messages of one direction and tag; more in flight wait for the first of them
_LOOK = 0.5  # seconds between two looks whether the other rank has left
_ARRIVING = 5.0  # seconds for the rest of a message that has begun to arrive when its time-out is over

_Key = tuple[int, int, int]


class Messenger:
    """Messages of one rank of a group."""

    def __init__(self, engine: core.Engine, meeting: StoreMeeting, limit: float) -> None:
        self.limit = limit  # seconds that a wait for a message may last, by default
        self._engine = engine
        self._meeting = meeting
        self._lock = threading.RLock()
        self._closed = False
        self._pairs: dict[tuple[int, int], Pair] = {}  # by sender and receiver
        self._numbers: Counter[_Key] = Counter()  # messages by sender, receiver and tag
        self._names: dict[_Key, list[str]] = {}
        self._postings: dict[tuple[int, int], list[Posting]] = {}  # taken back, by sender and tag, in order
        self._own: dict[int, deque[torch.Tensor]] = {}  # messages to this rank itself, by tag
        self.outbox = Outbox()  # messages that this rank has sent

    # ---- what a group calls

    def send(self, tensor: torch.Tensor, receiver: int, tag: int) -> EngineWork:
        """Start to send a tensor to a rank of the group."""
        expect_host(tensor)
        source, own = _as_plain(tensor), self._engine.rank
        eager = source.nbytes <= EAGER
        with self._lock:
            if receiver == own:
                self._own.setdefault(tag, deque()).append(source.clone().reshape(-1).view(torch.uint8))
                return EngineWork((), [tensor])
            message, _ = self._submit((own, receiver, tag), lambda pair, name: pair.send(source, name, eager))
            work = None
            if not eager:
                said = f"a message of {source.nbytes} bytes to {self.describe_rank(receiver)} with tag {tag}"
                work = _Send(self, message, tensor, receiver, f"{said} to be received")
            crowded = self.outbox.add_message(message, source.nbytes, work)
        self.outbox.watch_messages(crowded)
        return work or EngineWork((), [tensor])

    def receive(self, tensor: torch.Tensor, sender: int, tag: int) -> EngineWork:
        """Start to receive a tensor from a rank of the group."""
        expect_host(tensor)
        with self._lock:
            if sender == self._engine.rank:
                return self._receive_own(tensor, tag)
            output = _as_plain(tensor) if _is_plain(tensor) and (sender, tag) not in self._postings else None
            posting = self._post_receive(sender, tag, output)
        work = _Receive(self, posting, tensor, sender, tag)
        if output is None:
            work.watch_end()  # for who keeps no work: the engine does not store the message itself
        return work

    def receive_from_any(self, tensor: torch.Tensor, tag: int) -> EngineWork:
        """Start to receive a tensor from whichever rank of the group sends first."""
        expect_host(tensor)
        return _AnySource(self, tensor, tag)

    def close(self) -> None:
        """Leave the pairs, after a while for what was sent and not received yet."""
        with self._lock:
            self._closed = True
            pairs, self._pairs = self._pairs, {}
        self.outbox.await_receivers(LEAVING)
        for pair in set(pairs.values()):
            pair.close(0.0 if pair.on_one_host else LEAVING)  # between hosts the last bytes may be under way

    # ---- what works call

    def describe_rank(self, rank: int) -> str:
        """Return the name of a rank of the group in messages: the world's."""
        return f"rank {self._engine.numbers[rank]}"

    def post_to_all(self, tag: int) -> dict[int, Posting]:
        """Start to receive the next message of each other rank; returns them by sender."""
        with self._lock:
            others = (rank for rank in range(self._engine.size) if rank != self._engine.rank)
            postings: dict[int, Posting] = {}
            try:
                for sender in others:
                    postings[sender] = self._post_receive(sender, tag, None)
            except BaseException:
                self.put_back(tag, postings)
                raise
            return postings

    def put_back(self, tag: int, postings: dict[int, Posting]) -> None:
        """Keep places whose messages were not taken, for the next that receives from their senders."""
        with self._lock:
            for sender, posting in postings.items():
                posting.notify(None)
                posting.set_aside(True)
                insort(self._postings.setdefault((sender, tag), []), posting, key=lambda each: each.number)

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has destroyed the group, which it does after it has left its pairs."""
        return bool(self._engine.ranks()[rank]["left"])

    # ---- within

    def _post_receive(self, sender: int, tag: int, output: torch.Tensor | None) -> Posting:
        """Return the first place that nobody receives at: one that was put back, or the next."""
        kept = self._postings.get((sender, tag))
        if not kept:
            key = sender, self._engine.rank, tag
            return Posting(*self._submit(key, lambda pair, name: pair.receive(output, name)))
        posting = kept.pop(0)
        if not kept:
            del self._postings[sender, tag]
        posting.set_aside(False)
        return posting

    def _receive_own(self, tensor: torch.Tensor, tag: int) -> EngineWork:
        waiting = self._own.get(tag)
        if not waiting:
            raise ValueError("engine: a rank that receives from itself has sent before")
        _store(tensor, waiting.popleft())
        return EngineWork((), [tensor], source=self._engine.rank)

    def _submit(self, key: _Key, start: Callable[[Pair, str], Message]) -> tuple[Message, int]:
        """Submit this rank's part of the next message of a direction and tag; return it and its number."""
        if self._closed:
            raise translate_error(NotInitializedError("the process group was destroyed"))
        number = self._numbers[key]
        names = self._names.get(key)
        if names is None:
            sender, receiver, tag = key
            said = f"{self._engine.numbers[sender]}>{self._engine.numbers[receiver]} tag {tag} message"
            names = self._names[key] = [f"{said} {count}" for count in range(NAMES)]
        try:
            message = start(self._find_pair(key[0], key[1]), names[number % NAMES])
        except EngineError as error:
            raise translate_error(error, f"message {names[number % NAMES]!r}") from error
        self._numbers[key] = number + 1
        return message, number

    def _find_pair(self, sender: int, receiver: int) -> Pair:
        """Return this rank's end of the pair that a direction has, which is formed if it is not there.

        On one host each direction has its own, in which the sender coordinates: so a message for which its receiver
        waits takes one wake-up. Between hosts, where a pair is a connection, both have one.
        """
        pair = self._pairs.get((sender, receiver))
        if pair is None:
            sets = runtime.current_session().sets
            numbers = self._engine.numbers
            ends = sender, receiver
            if not sets.are_on_one_host((numbers[sender], numbers[receiver])):
                ends = min(ends), max(ends)
            pair = self._pairs.get(ends) or self._form_pair(sets, ends)
            self._pairs[ends] = self._pairs[sender, receiver] = pair
        return pair

    def _form_pair(self, sets: ProcessSetRegistry, ends: tuple[int, int]) -> Pair:
        ranks = self._engine.numbers[ends[0]], self._engine.numbers[ends[1]]
        pair = Pair(sets, self._engine, ranks, f"pair {ends[0]} and {ends[1]}")
        pair.form_pair(self._meeting, ends.index(self._engine.rank))
        return pair


# ---- works


class _MessageWork(EngineWork):
    """Work of one message, whose wait ends with the group's time-out, and of which errors say what was waited for."""

    def __init__(
        self, messenger: Messenger, message: Message | Posting, tensor: torch.Tensor, other: int, what: str
    ) -> None:
        super().__init__([message], [tensor])
        self._messenger = messenger
        self._message = message
        self._other = other
        self._what = what

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._over:
            given = read_seconds(timeout)
            limit = given or self._messenger.limit
            if not self._await_end(limit):
                if given:
                    raise overdue_error(self._what, given, "the time-out of this wait")
                self._end_overdue(limit)
        return super().wait()

    def _await_end(self, seconds: float) -> bool:
        """Wait for the message, at most so many seconds; return whether it has ended, or the other rank has left."""
        patience = Patience(seconds)
        try:
            while not self._message.wait_within(min(patience.seconds_left(), _LOOK)):
                if self._over:  # by another thread: the message may be another work's now
                    return True
                if self._messenger.has_left(self._other) and not self._message.wait_within(_LOOK):
                    self.settle_work(left_error(self._what, self._messenger.describe_rank(self._other)))
                    return True
                if not patience.seconds_left():
                    return False
        except EngineError:  # raised again when the work is concluded
            pass
        return True

    def _end_overdue(self, limit: float) -> None:
        """End this work after the group's time-out, if it can be, without a message that is under way being written.

        Only one of the threads that wait for the work takes its message back, and none if it has ended meanwhile.
        """
        late = overdue_error(self._what, limit, "the time-out of its process group")
        if not self.settle_work(late, self._withdraw_tensor) and not self._await_end(_ARRIVING):
            what = f"the rest of {self._what}, which has come in part"
            self.settle_work(overdue_error(what, limit + _ARRIVING, "the time-out of its process group"))

    def _withdraw_tensor(self) -> bool:
        """Have the engine leave the tensor alone; return False if the message is under way, or done."""
        raise NotImplementedError

    def explain_failure(self, failure: EngineError) -> BaseException:
        return translate_error(failure, self._what)


class _Send(_MessageWork):
    """Work of a message that is too large to be sent before it is received."""

    def _withdraw_tensor(self) -> bool:
        """Send a copy in place of the tensor, which the program may change from now on."""
        return self._message.release_tensor()

    def conclude_work(self) -> None:
        super().conclude_work()
        self._messenger.outbox.remove_message(self._message)


class _Receive(_MessageWork):
    """Work that receives a message of one rank."""

    def __init__(self, messenger: Messenger, posting: Posting, tensor: torch.Tensor, sender: int, tag: int) -> None:
        what = f"a message of {messenger.describe_rank(sender)} with tag {tag}"
        super().__init__(messenger, posting, tensor, sender, what)
        self._posting, self._tag = posting, tag
        self._finish = lambda: _take_message(posting, tensor)
        self.source = sender

    def _withdraw_tensor(self) -> bool:
        if not self._posting.release_tensor():
            return False
        self._messenger.put_back(self._tag, {self.source: self._posting})
        return True


class _AnySource(EngineWork):
    """Work that receives a message of any rank."""

    def __init__(self, messenger: Messenger, tensor: torch.Tensor, tag: int) -> None:
        super().__init__((), [tensor])
        self._messenger, self._tensor, self._tag = messenger, tensor, tag
        self._what = f"a message of any rank with tag {tag}"
        self._postings = messenger.post_to_all(tag)
        self._found = threading.Event()
        self._taking = threading.RLock()  # a message that is there is taken by this very thread
        with self._taking:  # a place that was put back is not to tell this work, in place of the next, of a message
            for sender, posting in list(self._postings.items()):
                if not self._found.is_set():
                    posting.notify(self._make_taker(sender))

    def _make_taker(self, sender: int) -> Callable[[], None]:
        return lambda: self._take_from(sender)

    def _take_from(self, sender: int) -> None:
        with self._taking:
            if self._found.is_set():
                return
            posting = self._postings.pop(sender)
            self.source = sender
            error: BaseException | None = None
            try:
                posting.wait()
                _take_message(posting, self._tensor)
            except EngineError as failure:
                error = translate_error(failure, self._what)
            except Exception as failure:  # a message of another size; raised in `wait`, not on the engine's thread
                error = failure
            self._end_work(error)

    def _end_work(self, error: BaseException | None) -> None:
        """End the work, and leave the places of other ranks to those that receive next. The caller holds the lock."""
        self._messenger.put_back(self._tag, self._postings)
        self._postings = {}
        self.settle_work(error)
        self._found.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        given = read_seconds(timeout)
        limit = given or self._messenger.limit
        patience = Patience(limit)
        while not self._found.wait(min(patience.seconds_left(), _LOOK)):
            gone = [rank for rank in list(self._postings) if self._messenger.has_left(rank)]
            if gone and not self._found.wait(_LOOK):
                self._give_up(left_error(self._what, self._messenger.describe_rank(gone[0])))
            elif not patience.seconds_left():
                if given:
                    raise overdue_error(self._what, given, "the time-out of this wait")
                self._give_up(overdue_error(self._what, limit, "the time-out of its process group"))
        return super().wait()

    def watch_end(self) -> None:
        """Leave the end to the message that is taken: there is no one operation to watch."""

    def _give_up(self, error: BaseException) -> None:
        with self._taking:
            if not self._found.is_set():
                self._end_work(error)

    def is_completed(self) -> bool:
        return self._found.is_set()


def left_error(what: str, rank: str) -> BaseException:
    return dist.DistBackendError(f"engine: {what} failed: {rank} has left the process group")


def overdue_error(what: str, seconds: float, why: str) -> BaseException:
    return dist.DistBackendError(f"engine: this rank has waited {seconds:g} s for {what}: {why}")


# ---- tensors

_SEEN = frozenset(  # dtypes that the engine reads; tensors of others are handed over as bytes
    (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor are in its memory, in row-major order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same elements in row-major order: itself if they lie so."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not _is_plain(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor if tensor.dtype in _SEEN else tensor.view(-1).view(torch.uint8)


def _take_message(posting: Posting, tensor: torch.Tensor) -> None:
    """Store a message that has come, unless the engine has stored it."""
    data, _ = posting.gathered
    if data is not None:
        message = torch.frombuffer(data, dtype=torch.uint8) if data.nbytes else tensor.new_empty(0, dtype=torch.uint8)
        _store(tensor, message)


def _store(tensor: torch.Tensor, message: torch.Tensor) -> None:
    if message.numel() != tensor.nbytes:
        raise ValueError(f"engine: a message of {message.numel()} bytes was received for a tensor of {tensor.nbytes}")
    if tensor.nbytes:
        tensor.detach().copy_(message.view(tensor.dtype).view(tensor.shape))
