"""Messages between ranks of torch.distributed: orders, sizes, threads, time-outs, and ranks that leave or die."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..waiting import let_pass, until

SHORT = timedelta(seconds=1.5)
LARGE = 300_000  # elements of a message that is not sent before it is received
ENDLESS = 100_000_000  # elements of a message that takes long enough to send its receiver a signal meanwhile
PEERS: list[int] = []  # processes of other ranks


def many_in_flight(rank: int, size: int) -> None:
    """Thousands of messages, sent before the first is received; tags received in another order than they were sent."""
    if rank == 0:
        for number in range(2000):
            dist.isend(torch.tensor([number, number * 2]), 1, tag=number % 2)
        dist.isend(torch.tensor(7.0), 1, tag=9)
    elif rank == 1:
        last = torch.tensor(0.0)
        dist.recv(last, 0, tag=9)
        assert last.item() == 7.0
        for tag in (1, 0):
            for number in range(tag, 2000, 2):
                target = torch.zeros(2, dtype=torch.int64)
                dist.recv(target, 0, tag=tag)
                assert target.tolist() == [number, number * 2]


def many_posted(rank: int, size: int) -> None:
    """Hundreds of receives, posted before the first message is sent."""
    if rank == 1:
        targets = [torch.zeros(3) for _ in range(300)]
        works = [dist.irecv(target, 0) for target in targets]
        dist.send(torch.zeros(1), 0)
        for number, work in enumerate(works):
            work.wait()
            assert (targets[number] == number).all()
    elif rank == 0:
        dist.recv(torch.zeros(1), 1)
        for number in range(300):
            dist.send(torch.full((3,), float(number)), 1)


def both_directions(rank: int, size: int) -> None:
    """Large messages both ways at once, in rounds, and small ones between them under the same tag."""
    other = rank ^ 1
    for count in (LARGE, 3, 4 * LARGE, 0) if other < size else ():
        sent, target = torch.full((count,), rank + 1.0), torch.zeros(count)
        works = [dist.isend(sent, other), dist.irecv(target, other)]
        for work in works:
            work.wait()
        assert (target == other + 1).all()


def kinds_of_tensors(rank: int, size: int) -> None:
    """Tensors that do not lie in one piece, or are of dtypes that the engine does not know."""
    whole = torch.arange(48.0).view(6, 8)
    tensors = [
        whole[::2, 1::3],
        whole.t(),
        torch.nn.Parameter(torch.ones(5)),
        torch.tensor(3, dtype=torch.int16),
        torch.arange(4.0).to(torch.complex64) * (1 + 2j),
        (torch.arange(4.0).to(torch.complex64) * (1 + 2j)).conj().imag,
        torch.zeros(0),
        torch.ones(9, dtype=torch.bool),
        torch.arange(7.0).to(torch.float8_e5m2),
        torch.ones(1, 70_000)[:, ::2],
    ]
    for tag, tensor in enumerate(tensors):
        if rank == 0:
            dist.send(tensor, 1, tag=tag)
        elif rank == 1:
            target = torch.zeros_like(tensor.detach())
            dist.recv(target, 0, tag=tag)
            assert torch.equal(target.to(torch.complex64), tensor.detach().to(torch.complex64)), tag
            rows = torch.zeros(3, 40_000)[:, ::4] if tensor.shape == (1, 35_000) else None
            assert rows is None or rows.sum() == 0


def works_that_nobody_keeps(rank: int, size: int) -> None:
    """Dropped handles, also of a target that the engine cannot store into itself."""
    plain, strided = torch.zeros(LARGE), torch.zeros(10, 2)[:, 0]
    if rank == 1:
        dist.irecv(plain, 0)
        dist.irecv(strided, 0, tag=1)
    gc.collect()
    if rank == 0:
        dist.isend(torch.ones(LARGE), 1)
        dist.isend(torch.ones(10), 1, tag=1)
        dist.send(torch.ones(1), 1, tag=2)
    elif rank == 1:
        last = dist.irecv(torch.zeros(1), 0, tag=2)
        last.get_future().wait()
        dist.recv(torch.zeros(1), 0, tag=3)
    gc.collect()
    if rank == 0:
        dist.send(torch.ones(1), 1, tag=3)
    dist.barrier()
    if rank == 1:
        until(lambda: bool((plain == 1).all()) and bool((strided == 1).all()), "messages of works that nobody keeps")


def threads_with_tags(rank: int, size: int) -> None:
    """Threads that exchange messages at the same time, each with a tag of its own."""
    errors: list[BaseException] = []

    def exchange(tag: int) -> None:
        try:
            for number in range(40):
                target = torch.zeros(100 * tag + 1)
                if rank == 0:
                    dist.send(torch.full_like(target, float(number)), 1, tag=tag)
                    dist.recv(target, 1, tag=tag)
                else:
                    dist.recv(target, 0, tag=tag)
                    dist.send(target, 0, tag=tag)
                assert (target == number).all()
        except BaseException as error:
            errors.append(error)

    if rank < 2:
        running = [threading.Thread(target=exchange, args=(tag,)) for tag in range(1, 5)]
        for each in running:
            each.start()
        for each in running:
            each.join()
    assert not errors


def messages_of_another_size(rank: int, size: int) -> list[str]:
    """A message that does not fit its target leaves that alone, and the next message comes."""
    texts = []
    for count in (3, LARGE):
        target = torch.zeros(count + 1)
        if rank == 0:
            dist.send(torch.ones(count), 1)
            dist.send(torch.ones(2), 1)
        elif rank == 1:
            try:
                dist.recv(target, 0)
            except ValueError as error:
                texts.append(str(error))
            assert target.sum() == 0
            dist.recv(target[:2], 0)
            assert target[:2].sum() == 2
    return texts


def receives_without_a_message(rank: int, size: int) -> list[str]:
    """A receive that times out: only that fails, its tensor is left alone, and the next receive gets the message."""
    texts, group = [], dist.new_group(timeout=SHORT)
    if rank == 1:
        for sender in (0, None):
            late = torch.zeros(3)
            try:
                dist.recv(late, sender, group, 4)
            except dist.DistBackendError as error:
                texts.append(str(error))
        work = dist.irecv(late, 0, group, 5)
        try:
            work.wait(timedelta(seconds=0.2))
        except dist.DistBackendError as error:
            texts.append(str(error))
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(3), 1, group, 4)
        dist.send(torch.full((3,), 2.0), 1, group, 5)
    elif rank == 1:
        target = torch.zeros(3)
        dist.recv(target, 0, group, 4)
        assert target.tolist() == [1, 1, 1] and late.tolist() in ([0, 0, 0], [2, 2, 2])
        work.wait()
        assert late.tolist() == [2, 2, 2]
    dist.destroy_process_group(group)
    return texts


def sends_without_a_receiver(rank: int, size: int) -> list[str]:
    """A large send that times out: the tensor may change, and who receives later gets what it held."""
    texts, group = [], dist.new_group(timeout=SHORT)
    if rank == 0:
        tensor = torch.ones(LARGE)
        try:
            dist.send(tensor, 1, group, 6)
        except dist.DistBackendError as error:
            texts.append(str(error))
        tensor.fill_(5)
    dist.barrier()
    if rank == 1:
        target = torch.zeros(LARGE)
        dist.recv(target, 0, group, 6)
        assert (target == 1).all()
    dist.barrier()
    dist.destroy_process_group(group)
    return texts


def group_destroyed_under_a_receive(rank: int, size: int) -> list[str]:
    """A rank leaves a group in which another waits for its message: that receive fails, and the world goes on."""
    texts, group = [], dist.new_group([0, 1])
    if rank == 1:
        dist.send(torch.ones(1), 0, group)
        dist.destroy_process_group(group)
    elif rank == 0:
        dist.recv(torch.zeros(1), 1, group)
        for sender in (1, None):
            try:
                dist.recv(torch.zeros(1), sender, group, 3)
            except dist.DistBackendError as error:
                texts.append(str(error))
        try:
            dist.send(torch.zeros(LARGE), 1, group, 3)
        except dist.DistBackendError as error:
            texts.append(str(error))
        dist.destroy_process_group(group)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert (tensor == size).all()
    return texts


def group_destroyed_with_a_receive_posted(rank: int, size: int) -> None:
    """Ranks leave with receives for which no message has come."""
    group = dist.new_group()
    works = [dist.irecv(torch.zeros(2), (rank + 1) % size, group), dist.irecv(torch.zeros(LARGE), None, group, 1)]
    dist.destroy_process_group(group)
    for work in works:
        try:
            work.wait(timedelta(seconds=20))
        except dist.DistBackendError:
            continue
        raise AssertionError("a receive without a message has ended well")
    dist.barrier()


def exits_in_a_callback(rank: int, size: int) -> None:
    """The interpreter ends while a callback of a future runs, and while nobody has met the other rank of some pairs."""
    if rank == 0:
        for tag in range(5):
            dist.irecv(torch.zeros(2), None, dist.new_group(), tag)
        started, ending = threading.Event(), threading.Event()
        atexit.register(ending.set)

        def call_back(_future: object) -> None:
            started.set()
            ending.wait(60)
            for _ in range(300):
                let_pass(0.005)

        dist.irecv(torch.zeros(1), 1, tag=9).get_future().then(call_back)
        assert started.wait(60)
    else:
        for _ in range(5):
            dist.new_group()
        dist.send(torch.ones(1), 0, tag=9)


def peer_dies_before_its_message(rank: int, size: int) -> tuple[str, float]:
    if rank == 1:
        dist.send(torch.ones(1), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    return _time_error(lambda: (dist.recv(torch.zeros(1), 1), dist.recv(torch.zeros(3), 1)))


def peer_dies_in_its_message(rank: int, size: int) -> tuple[str, float]:
    """The sender ends while chunks of its message are under way."""
    if rank == 1:
        dist.send(torch.tensor([os.getpid()]), 0)
        dist.send(torch.ones(ENDLESS), 0)
    told = torch.zeros(1, dtype=torch.int64)
    dist.recv(told, 1)
    work = dist.irecv(torch.zeros(ENDLESS), 1)
    _await_beginning(dist.group.WORLD, 1, 0)
    os.kill(int(told), signal.SIGKILL)
    return _time_error(work.wait)


def peer_dies_unmet(rank: int, size: int) -> tuple[str, float]:
    """The sender ends before any message was exchanged with it."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return _time_error(lambda: dist.recv(torch.zeros(3), 1))


def form_pair(rank: int) -> Any:
    """Form a group of the first two ranks, or of a later one alone: torch names groups by how many a rank has made."""
    return dist.new_group([0, 1] if rank < 2 else [rank], use_local_synchronization=True)


def sent_messages_are_let_go(rank: int, size: int) -> tuple[int, int]:
    """Many messages that were received, after which their sender sends no other; return the bytes that it keeps."""
    group: Any = form_pair(rank)
    found = 0, 0
    if rank == 0:
        for tag in (0, 1, 2):
            dist.isend(torch.ones(1 << 14), 1, group, 99)  # which is received last
            for _ in range(60):
                dist.isend(torch.ones(1 << 14), 1, group, tag)
        large = torch.ones(LARGE)
        kept = weakref.ref(large.untyped_storage())
        dist.isend(large, 1, group, 3)
        del large
        dist.send(torch.ones(1), 1, group, 4)
        dist.recv(torch.ones(1), 1, group, 4)
        until(lambda: (gc.collect(), kept() is None)[1], "the tensor of a large message is let go", 20.0)
        until(lambda: group.membership.messenger.outbox.watched_count == 0, "messages that a thread watches are let go")
        outbox = group.membership.messenger.outbox
        found = outbox.kept_bytes, outbox.watched_count
    elif rank == 1:
        for tag, count, elements in ((4, 1, 1), (0, 60, 1 << 14), (1, 60, 1 << 14), (2, 60, 1 << 14), (3, 1, LARGE)):
            for _ in range(count):
                dist.recv(torch.zeros(elements), 0, group, tag)
        for _ in range(3):
            dist.recv(torch.zeros(1 << 14), 0, group, 99)
        dist.send(torch.ones(1), 0, group, 4)
    dist.barrier()
    return found


def threads_that_time_out_together(rank: int, size: int) -> list[str]:
    """Two threads wait for one receive until its time-out; the next two receives get the next two messages."""
    texts: list[str] = []
    group = dist.new_group(timeout=SHORT)
    if rank == 1:
        work = dist.irecv(torch.zeros(3), 0, group, 4)

        def wait() -> None:
            try:
                work.wait()
            except dist.DistBackendError as error:
                texts.append(str(error))

        waiting = [threading.Thread(target=wait) for _ in range(4)]
        for each in waiting:
            each.start()
        for each in waiting:
            each.join()
    dist.barrier()
    if rank == 0:
        for number in (1.0, 2.0):
            dist.send(torch.full((3,), number), 1, group, 4)
    elif rank == 1:
        for number in (1, 2):
            target = torch.zeros(3)
            dist.recv(target, 0, group, 4)
            assert target.tolist() == [number] * 3
    dist.barrier()
    dist.destroy_process_group(group)
    return texts


class Interruption(Exception):
    """Exception of a signal handler."""


def wait_interrupted_by_a_signal(rank: int, size: int) -> int:
    """A signal handler raises in the wait for a message; the next wait gets it, and the engine works on."""
    interrupted = 0
    if rank == 1:

        def interrupt(_number: int, _frame: object) -> None:
            raise Interruption

        former = signal.signal(signal.SIGALRM, interrupt)
        for elements in (3, LARGE):
            target = torch.zeros(elements)
            works = [dist.irecv(target, 0), dist.isend(target + 1, 0, tag=1)]
            for work in works if elements == LARGE else works[:1]:  # a small message does not wait
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                try:
                    work.wait()
                except Interruption:
                    interrupted += 1
            dist.send(torch.ones(1), 0, tag=2)
            dist.irecv(torch.zeros(0), 0, tag=3).wait()
            assert (target == 0).all()
            dist.send(torch.ones(1), 0, tag=2)
            until(lambda target=target: bool((target == 5).all()), "the message of the interrupted receive")
        signal.signal(signal.SIGALRM, former)
    elif rank == 0:
        for elements in (3, LARGE):
            target = torch.zeros(elements)
            dist.recv(torch.zeros(1), 1, tag=2)
            dist.send(torch.zeros(0), 1, tag=3)
            dist.recv(torch.zeros(1), 1, tag=2)
            dist.send(torch.full((elements,), 5.0), 1)
            dist.recv(target, 1, tag=1)
            assert (target == 1).all()
    return interrupted


def receiver_dies_in_its_message(rank: int, size: int) -> tuple[str, float]:
    """The receiver is killed while chunks of a message are under way to it."""
    if rank == 1:
        work = dist.irecv(torch.zeros(ENDLESS), 0, tag=7)
        dist.send(torch.tensor([os.getpid()]), 0)
        work.wait()
    work = _send_to_process(dist.group.WORLD, signal.SIGKILL)
    found = _time_error(work.wait)
    again = _time_error(lambda: dist.send(torch.ones(1), 1, tag=8)), _time_error(lambda: dist.all_reduce(torch.ones(1)))
    assert all("rank 1 died" in text for text, _ in again), again
    return found


def receiver_stops_in_its_message(rank: int, size: int) -> tuple[str, float]:
    """The receiver is stopped while chunks of a message are under way, for longer than the time-out of the group."""
    group = dist.new_group(timeout=SHORT)
    found = "", 0.0
    if rank == 1:
        target = torch.zeros(ENDLESS)
        work = dist.irecv(target, 0, group, 7)
        dist.send(torch.tensor([os.getpid()]), 0)
        work.wait(timedelta(seconds=60))
        assert (target == 1).all()
    elif rank == 0:
        work = _send_to_process(group, signal.SIGSTOP)
        found = _time_error(work.wait)
        os.kill(PEERS[0], signal.SIGCONT)
    dist.barrier()
    dist.destroy_process_group(group)
    return found


def receiver_stops_for_a_while(rank: int, size: int) -> None:
    """The receiver is stopped while chunks of a message are under way, and goes on before the time-out."""
    if rank == 1:
        target = torch.zeros(ENDLESS)
        work = dist.irecv(target, 0, tag=7)
        dist.send(torch.tensor([os.getpid()]), 0)
        work.wait()
        assert (target == 1).all()
    elif rank == 0:
        work = _send_to_process(dist.group.WORLD, signal.SIGSTOP)
        let_pass(1.5)
        still = work.is_completed()
        os.kill(PEERS[0], signal.SIGCONT)
        assert not still
        work.wait()
    dist.barrier()


def _send_to_process(group: Any, number: int) -> Any:
    """Send a message to rank 1, which tells its process first, and in the middle of it a signal to that process."""
    told = torch.zeros(1, dtype=torch.int64)
    dist.recv(told, 1)
    PEERS[:] = [int(told)]
    work = dist.isend(torch.ones(ENDLESS), 1, group, 7)
    _await_beginning(group, 0, 1)
    os.kill(PEERS[0], number)
    assert not work.is_completed()
    return work


def _await_beginning(group: Any, sender: int, receiver: int) -> None:
    """Wait until chunks of a message between two ranks are under way."""
    pair = group.membership.messenger._pairs[sender, receiver]
    until(lambda: pair._engine is not None and any(_is_under_way(each) for each in pair._engine.history()), "a message")


def _is_under_way(entry: dict[str, Any]) -> bool:
    return entry["ended"] is None and entry["bytes"] >= 4 * ENDLESS


def _time_error(call: Callable[[], object]) -> tuple[str, float]:
    """Return the text of the error that a call raises, and the seconds that it has taken."""
    begun = time.monotonic()
    try:
        call()
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - begun
    return "", 0.0


def wrong_halves(rank: int, size: int) -> None:
    """Ranks that both send, or both receive, under one name: neither's tensor is written to."""
    engine = form_pair(rank).engine
    if rank > 1:
        return
    tensor = torch.full((5,), rank + 1.0)
    handle = engine.send_bytes(tensor, "both", False)
    assert handle.wait_within(30.0)
    data, rows = handle.gathered
    assert rows == (20, 20) and (tensor == rank + 1).all()
    assert torch.frombuffer(data, dtype=torch.float32).tolist() == [1.0] * 5 + [2.0] * 5
    handle = engine.receive_bytes(tensor, "neither")
    assert handle.wait_within(30.0) and handle.gathered[1] == (0, 0)
    assert (tensor == rank + 1).all()


def every_name() -> list[str]:
    """Return the names of the programs that return nothing."""
    return (
        "many_in_flight many_posted both_directions kinds_of_tensors works_that_nobody_keeps threads_with_tags "
        "group_destroyed_with_a_receive_posted wrong_halves receiver_stops_for_a_while"
    ).split()
