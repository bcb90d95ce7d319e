"""Messages of the native engine: what their callers do themselves, and what a forked child must not."""

from __future__ import annotations

import mmap
import os

import numpy as np

import engine
from engine.errors import ForkedError

from ..on_ranks import on_ranks
from ..waiting import measured, until
from .thread_world import ThreadWorld

pytestmark = on_ranks(2, world=None)
LONG = 1 << 37  # bytes that take longer than a time slice of another thread, though nobody reads them
CHILD_REFUSED = 7  # exit code


def test_a_caller_moves_short_messages_and_leaves_long_ones_to_the_engine(rank: int, size: int) -> None:
    """A message in a world of one rank is done as soon as somebody has moved it."""

    mapped = mmap.mmap(-1, LONG, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)  # takes no memory
    long = np.frombuffer(mapped, np.uint8)

    def send_both() -> None:
        with ThreadWorld(1, chunk_bytes=4096) as world:
            native = world.engines[0]
            for name in ("new", "known", "known again"):
                assert native.send_bytes(np.ones(1000), name[:5], False).done
                handle = native.send_bytes(long, f"long {name[:5]}", False)
                assert not handle.done, "the caller has moved all of a long message"
                until(lambda handle=handle: handle.done, "the engine's thread moves a long message")

    if rank == 0:
        measured(send_both)


def test_a_forked_child_cannot_release_a_tensor(rank: int, size: int) -> None:
    engine.init()
    native, tensor = engine.session.runtime.current_engine(), np.ones(1000)
    if rank == 0:
        handle = native.send_bytes(tensor, "message", False)
        child = os.fork()
        if child == 0:
            try:
                handle.release_tensor()
            except ForkedError:
                os._exit(CHILD_REFUSED)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == CHILD_REFUSED
        assert handle.release_tensor()
        tensor[:] = 2
        native.barrier("released").wait()
    else:
        native.barrier("released").wait()
        handle = native.receive_bytes(None, "message")
    handle.wait()
    assert rank == 0 or (np.frombuffer(handle.gathered[0]) == 1).all()
    engine.shutdown()
