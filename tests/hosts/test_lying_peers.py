"""An authenticated peer that sends impossible numbers: the error names it, and memory stays intact.

Ranks are threads of this process, so that `make sanitize` sees what they read and write. The frames between their
"hosts" pass through a proxy that changes them.
"""

from __future__ import annotations

import random
import resource
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.errors import ArgumentError, EngineError, RendezvousError
from engine.native import setup
from engine.net.rendezvous.hub import Host
from engine_ext.tracer import Tracer

from ..parallel.thread_world import ThreadWorld
from .fuzz_frames import HookedParameter, one_world
from .fuzz_messages import HELLO, hub, run
from .middle import (
    CALL,
    CLOCK,
    LEFT,
    PROGRESS,
    REQUESTS,
    SCHEDULE,
    SLOT,
    VERDICT,
    WORD,
    WORDS,
    Change,
    Frame,
    Middle,
)

ENTRY_BYTES, REQUEST_RING, BATCH = 256, 1 << 18, 1  # engine_ext/shared/layout.h
UNNAMED, WAITS_UNNAMED = 192, 240  # offsets in rank_page of that header
LIMIT = 20.0  # s


def errors_of(size: int, work: Callable[[int], Any], change: Change, *, hosts: tuple[int, ...] = (0, 1)) -> list[str]:
    """Run `work` on each rank while `change` alters frames between hosts; return each rank's error."""
    middle = Middle(change)
    world = ThreadWorld(size, hosts, middle.connect)
    middle.start()
    said = [""] * size

    def attempt(rank: int) -> None:
        try:
            work(rank)
        except EngineError as error:
            said[rank] = f"{type(error).__name__}: {error}"

    begun = time.monotonic()
    world.run(attempt)
    took = time.monotonic() - begun
    world.end(1.0)
    middle.stop()
    assert took < LIMIT, f"{took:.0f} s: {said}"
    return said


def once(when: Callable[[Frame], bool], what: Callable[[Frame], Iterable[Frame]]) -> Change:
    """Change the first frame for which `when` is true."""
    done: list[bool] = []

    def change(frame: Frame) -> Iterable[Frame]:
        if not done and when(frame):
            done.append(True)
            return what(frame)
        return [frame]

    return change


def entry_of(frame: Frame, kind: str) -> int:
    """Offset of the first BATCH entry of that kind in a frame of the schedule, or -1."""
    kinds, at = setup.codes()["operations"], 0
    while frame.type == SCHEDULE and at < len(frame.payload):
        if frame.payload[at + 4] == BATCH and kinds[frame.payload[at + 5]] == kind:
            return at
        at += 8 * struct.unpack_from("=I", frame.payload, at)[0]
    return -1


def put(frame: Frame, at: int, number: int) -> list[Frame]:
    """Write a word of the payload."""
    struct.pack_into("=Q", frame.payload, at, number % (1 << 64))
    return [frame]


# ---- the four cases in which a number reached memory


@pytest.mark.parametrize("position", [(1 << 64) - REQUEST_RING, (1 << 64) - 512, (1 << 63), REQUEST_RING])
def test_requests_whose_position_wraps_end_with_the_rank_that_sent_them(position: int) -> None:
    def move(frame: Frame) -> list[Frame]:
        return [Frame(REQUESTS, 1, 0, position, bytearray(512), frame.sender, frame.link), frame]

    change = once(lambda frame: frame.type == REQUESTS and frame.sender == 1, move)
    said = errors_of(2, lambda rank: engine.allreduce(np.ones(3), name="a"), change)
    assert "rank 1 failed: it has sent what no rank can mean" in said[0], said


ALGORITHM, CHUNK, META_DTYPE, META_OP, META_WIRE, META_DEVICE = 6, 64, 105, 106, 136, 138  # offsets in engine_entry
ARRIVAL = 96  # likewise


@pytest.mark.parametrize(
    ("coded", "at", "form", "value"),
    [
        *((True, ALGORITHM, "=B", number) for number in (1, 3, 4, 5, 6, 7, 8, 10, 255)),
        *((True, META_WIRE, "=B", wire) for wire in (0, 1, 2, 4, 200, 254, 255)),
        *((True, META_OP, "=B", op) for op in (2, 3, 4, 5)),
        *((True, CHUNK, "=I", nbytes) for nbytes in (0, 64, 4096, 65_537, (1 << 20) + 4096, 1 << 31)),
        *((True, META_DTYPE, "=B", dtype) for dtype in (8, 10, 16)),
        (True, META_DEVICE, "=B", 1),
        *((False, ALGORITHM, "=B", number) for number in (9, 10)),
        (False, META_WIRE, "=B", 3),
    ],
)
def test_a_coded_entry_that_cannot_be_ends_the_world(coded: bool, at: int, form: str, value: int) -> None:
    """Algorithm and wire belong together: kernels have no row for a dtype that only travels."""

    def work(rank: int) -> None:
        compression = engine.Compression.fp8 if coded else None
        for turn in range(200):
            engine.allreduce(np.ones(50_000, np.float32), engine.Sum, f"{turn % 3}", compression=compression)

    def forge(frame: Frame) -> list[Frame]:
        struct.pack_into(form, frame.payload, entry_of(frame, "allreduce") + at, value)
        return [frame]

    change = once(lambda frame: entry_of(frame, "allreduce") >= 0, forge)
    for said in errors_of(2, work, change):
        wrong = "what no rank can mean" in said or "an entry that does not go with what this rank has submitted" in said
        assert wrong or "its connection ended" in said, said


@pytest.mark.parametrize("rows", [0, 2, 5, 1000, 1 << 40, (1 << 47) - 1])
def test_rows_of_an_entry_that_are_not_the_rank_s_own_name_the_coordinator(rows: int) -> None:
    def change_rows(frame: Frame) -> list[Frame]:
        return put(
            frame, entry_of(frame, "allgather") + ENTRY_BYTES + 8 + 8, rows
        )  # after the single ID: rows of rank 0, then of rank 1

    change = once(lambda frame: entry_of(frame, "allgather") >= 0, change_rows)
    said = errors_of(2, lambda rank: engine.allgather(np.ones((3, 8)), "a"), change)
    assert said[1].startswith("RankRaisedError: rank 0 failed: "), said
    assert "rank 0" in said[0] or said[0] == "", said


@pytest.mark.parametrize("rows", [-1, 1 << 62, (1 << 61) - 1, 1 << 47, -(1 << 63), (1 << 64) // 24])
def test_counts_of_an_all_to_all_that_wrap_name_the_rank_that_told_them(rows: int) -> None:
    change = once(lambda frame: frame.type == SLOT and frame.sender == 1, lambda frame: put(frame, 0, rows))
    said = errors_of(2, lambda rank: engine.alltoall(np.ones((4, 3)), [2, 2], "a"), change)
    assert "rank 1" in said[0] and "numbers of rows" in said[0], said


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("number", [-1, 1 << 40, 1 << 62, 7, 0])
def test_counts_in_a_gathered_group_that_are_not_its_bytes_name_the_rank(place: int, number: int) -> None:
    change = once(lambda frame: frame.type == SLOT and frame.sender == 1, lambda frame: put(frame, 8 * place, number))
    tensors = [np.ones((3, 5)), np.ones((2, 9), np.float32)]
    said = errors_of(2, lambda rank: engine.grouped_allgather(tensors, "a"), change)
    assert "rank 1" in said[0] and "numbers of rows" in said[0], said


@pytest.mark.parametrize("place", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("number", [-1, 1 << 40, 1 << 62, 99])
def test_tensors_of_a_group_told_to_a_joined_rank_that_cannot_be_name_who_told_them(place: int, number: int) -> None:
    def work(rank: int) -> None:
        if rank == 0:
            engine.join()
        engine.grouped_reducescatter([np.ones((3, 5)), np.ones((4, 2))], engine.Sum, "a")
        engine.join()

    change = once(lambda frame: frame.type == SLOT and frame.sender == 1, lambda frame: put(frame, 8 * place, number))
    said = errors_of(2, work, change)
    assert "rank 1" in said[0] and "numbers of rows" in said[0], said


@pytest.mark.parametrize(("place", "number"), [(0, 1 << 30), (1, 1 << 62), (1, 16), (2, 2), (3, 8), (3, -1)])
def test_counts_of_a_sparse_gradient_that_are_not_its_bytes_name_the_rank(place: int, number: int) -> None:
    """The reading rank has no gradient, and so has not declared the operation a group itself."""

    def is_payload(frame: Frame) -> bool:
        return frame.type == SLOT and frame.sender == 1 and frame.payload[:32] == struct.pack("=4Q", 3, 8, 3, 16)

    change = once(is_payload, lambda frame: put(frame, 8 * place, number))
    said = errors_of(2, lambda rank: HookedParameter().reduce(without=rank == 0), change)
    assert "rank 1" in said[0] and "numbers of rows" in said[0], said


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_sparse_gradient_that_is_no_group_of_two_ends_with_who_defined_it(number: int) -> None:
    """A rank without a gradient reads the data as indices and values, since the name is defined as sparse."""
    group = ENTRY_BYTES - 13 * 8 - 4  # offset in an entry's metadata

    def change(frame: Frame) -> Iterable[Frame]:
        begin = 0
        while frame.type == SCHEDULE and begin < len(frame.payload):
            if struct.unpack_from("=I", frame.payload, begin + group)[0] == 2:
                struct.pack_into("=I", frame.payload, begin + group, number)
            begin += 8 * struct.unpack_from("=I", frame.payload, begin)[0]
        return [frame]

    said = errors_of(2, lambda rank: HookedParameter().reduce(without=rank == 1), change)
    assert "rank 0 failed: it has sent what no rank can mean" in said[1], said


def test_a_gradient_of_another_shape_than_its_parameter_s_names_the_coordinator() -> None:
    """A rank without a gradient takes the others' dtype, but not their shape."""

    def change(frame: Frame) -> Iterable[Frame]:
        at = frame.payload.find(struct.pack("=2Q", 10, 4)) if frame.type == SCHEDULE else -1
        while at >= 0:
            struct.pack_into("=Q", frame.payload, at, 20)
            at = frame.payload.find(struct.pack("=2Q", 10, 4), at)
        return [frame]

    def work(rank: int) -> None:
        HookedParameter().reduce(without=rank == 1, dense=True)

    said = errors_of(2, work, change)
    assert said[1].startswith("RankRaisedError: rank 0 failed: its schedule has an entry that does not go with"), said


@pytest.mark.parametrize("nbytes", [1, 191, 200])
def test_a_gathered_group_whose_part_is_not_aligned_names_the_rank_or_the_coordinator(nbytes: int) -> None:
    """The numbers after that part are read as words."""

    def change_rows(frame: Frame) -> list[Frame]:
        return put(frame, entry_of(frame, "allgather") + ENTRY_BYTES + 8, nbytes)  # after the one ID: bytes of rank 0

    change = once(lambda frame: entry_of(frame, "allgather") >= 0, change_rows)
    tensors = [np.ones((3, 5)), np.ones((2, 9), np.float32)]
    said = errors_of(2, lambda rank: engine.grouped_allgather(tensors, "a"), change)
    assert said[1].startswith("RankRaisedError: rank 0 failed: it has reported numbers of rows"), said


# ---- well-formed lies


@pytest.mark.parametrize("rows", [1 << 46, (1 << 47) - 1])
def test_more_rows_than_memory_can_have_name_the_rank_that_tells_them(rows: int) -> None:
    at = 8  # offset of `rows` in engine_request

    def change_rows(frame: Frame) -> list[Frame]:
        return put(frame, at, rows)

    change = once(lambda frame: frame.type == REQUESTS and frame.sender == 1, change_rows)
    said = errors_of(2, lambda rank: engine.allgather(np.ones((3, 8)), "a"), change)
    assert "rank 1 failed: it has reported a number of rows" in said[0], said


@pytest.mark.parametrize("field", ["dtype", "op", "kind", "items", "chunk", "knobs", "id"])
def test_an_entry_that_is_not_what_was_submitted_names_the_coordinator(field: str) -> None:
    places = {"kind": 5, "items": 8, "knobs": 57, "chunk": 64, "dtype": 105, "op": 106, "id": ENTRY_BYTES}

    def spoil(frame: Frame) -> list[Frame]:
        frame.payload[entry_of(frame, "allreduce") + places[field]] ^= 7 if field == "knobs" else 3
        return [frame]

    change = once(lambda frame: entry_of(frame, "allreduce") >= 0, spoil)
    said = errors_of(2, lambda rank: engine.allreduce(np.ones(100_000), name="a"), change)
    assert "rank 0" in said[1], said


@pytest.mark.parametrize("number", [1 << 20, 1 << 40, (1 << 62) - 1, 1 << 63, (1 << 64) - 1])
def test_operations_without_a_name_that_a_rank_cannot_have_submitted_name_it(number: int) -> None:
    """Otherwise a rank would create a substitute for each of them after the barrier."""
    words = bytearray(WORD.pack(UNNAMED, 8, number))

    def add_words(frame: Frame) -> list[Frame]:
        return [frame, Frame(WORDS, 1, 0, 0, words, frame.sender, frame.link)]

    change = once(lambda frame: frame.type == WORDS and frame.sender == 1, add_words)

    def work(rank: int) -> None:
        for _ in range(3):
            engine.barrier()

    said = errors_of(2, work, change)
    assert "rank 1 failed: it has reported a number of unnamed operations" in said[0], said


def test_operations_without_a_name_that_an_entry_makes_up_name_the_coordinator() -> None:
    at = ENTRY_BYTES - 13 * 8  # offset of `dims` in an entry's metadata
    change = once(lambda frame: entry_of(frame, "barrier") >= 0, lambda f: put(f, entry_of(f, "barrier") + at, 1 << 40))

    def work(rank: int) -> None:
        for _ in range(3):
            engine.barrier()

    said = errors_of(2, work, change)
    assert "rank 0 failed: it has reported a number of unnamed operations" in said[1], said


def test_a_rank_that_waits_for_an_operation_of_an_absurd_number_is_named() -> None:
    words = bytearray(WORD.pack(WAITS_UNNAMED, 8, 1 << 56 | 1 << 40))
    change = once(
        lambda frame: frame.type == WORDS and frame.sender == 1,
        lambda frame: [frame, Frame(WORDS, 1, 0, 0, words, frame.sender, frame.link)],
    )

    def work(rank: int) -> None:
        if rank == 0:
            engine.allreduce(np.ones(3))  # rank 1 never submits it
        else:
            engine.barrier("other")

    said = errors_of(2, work, change)
    assert "rank 1 failed: it has reported a number of unnamed operations" in said[0], said


def test_a_recorded_entry_whose_last_rank_does_not_exist_ends_with_who_sent_it(tmp_path: Path) -> None:
    """The renderer of the timeline relies on that rank."""

    def spoil(frame: Frame) -> list[Frame]:
        words = struct.unpack_from("=I", frame.payload, entry_of(frame, "allreduce"))[0]
        return put(frame, entry_of(frame, "allreduce") + 8 * words - 8, 4000)

    def work(rank: int) -> None:
        tracer = Tracer(engine.session.runtime.current_engine(), rank)
        tracer.start(1000, 10.0)
        engine.barrier("both record")
        try:
            for _ in range(3):
                engine.allreduce(np.ones(3), name="a")
        finally:
            tracer.stop()
            with (tmp_path / f"{rank}").open("wb") as file:
                tracer.drain(file.fileno(), 0, 1 << 20, False)

    def is_recorded(frame: Frame) -> bool:
        at = entry_of(frame, "allreduce")
        return at >= 0 and struct.unpack_from("=Q", frame.payload, at + 80)[0] != 0

    said = errors_of(2, work, once(is_recorded, spoil))
    assert "rank 0 failed: it has sent what no rank can mean" in said[1], said


def test_an_entry_whose_last_rank_does_not_exist_ends_with_who_sent_it() -> None:
    """Counters by rank rely on that rank."""
    change = once(
        lambda frame: entry_of(frame, "allreduce") >= 0,
        lambda frame: put(frame, entry_of(frame, "allreduce") + ARRIVAL, 4000),
    )
    said = errors_of(2, lambda rank: engine.allreduce(np.ones(3), name="a"), change)
    assert "rank 0 failed: it has sent what no rank can mean" in said[1], said


def test_a_verdict_without_a_cause_ends_with_who_sent_it() -> None:
    verdict = bytearray(struct.pack("=Q", 1 | 999 << 16 | 1 << 32) + bytes(1024))
    change = once(
        lambda frame: frame.type == REQUESTS and frame.sender == 1,
        lambda frame: [Frame(VERDICT, 0, 0, 0, verdict, frame.sender, frame.link)],
    )
    said = errors_of(2, lambda rank: engine.allreduce(np.ones(3), name="a"), change)
    assert "rank 1 failed: it has sent what no rank can mean" in said[0], said


def test_a_coordinator_that_leaves_without_saying_that_its_schedule_is_over_keeps_nobody_waiting() -> None:
    left = threading.Event()

    def change(frame: Frame) -> Iterable[Frame]:
        if frame.sender == 0 and frame.type == WORDS and frame.rank == -1:
            return []  # also drops the message that the world has ended
        if frame.sender == 0 and frame.type == LEFT:
            left.set()
        return [frame]

    def work(rank: int) -> None:
        engine.barrier("both")
        if rank == 0:
            engine.session.runtime.current_engine().close(1.0)
        else:
            left.wait(LIMIT)
            engine.allreduce(np.ones(3), name="alone")

    said = errors_of(2, work, change)
    assert said[1].startswith("RankLeftError: rank 0 left"), said


def test_a_word_twice_as_wide_as_its_field_ends_with_who_sent_it() -> None:
    words = bytearray(WORD.pack(8, 4, 1))  # writes half of `waits`

    change = once(
        lambda frame: frame.type == WORDS and frame.sender == 1,
        lambda frame: [Frame(WORDS, 1, 0, 0, words, frame.sender, frame.link), frame],
    )
    said = errors_of(2, lambda rank: engine.allreduce(np.ones(3), name="a"), change)
    assert "rank 1 failed: it has sent what no rank can mean" in said[0], said


@pytest.mark.parametrize(("seen", "question"), [(PROGRESS, Frame(CALL, 0, 0, 1)), (WORDS, Frame(CLOCK, 0, 0, 0))])
def test_a_peer_that_asks_on_and_on_and_never_reads_makes_nothing_grow(seen: int, question: Frame) -> None:
    links: list[int] = []
    reads = threading.Event()
    reads.set()

    def change(frame: Frame) -> Iterable[Frame]:
        if frame.type == seen:
            links.append(frame.link)
        reads.wait()
        return [frame]

    middle = Middle(change)
    world = ThreadWorld(2, (0, 1), middle.connect)
    middle.start()
    world.run(lambda rank: engine.allreduce(np.ones(20_000), name="x"))
    reads.clear()
    question.payload = bytearray(24 if question.type == CLOCK else 0)
    told = question.packed() * 1000
    before = resident()
    for _ in range(300):
        middle.ends(links[0])[0].sendall(told)
    assert resident() - before < 4 << 20  # 300,000 pending answers would take 37 MiB
    middle.cut()
    reads.set()
    world.end(1.0)
    middle.stop()


# ---- what only looks like a lie

EMPTY = [(0, 1 << 45), (0, 1 << 59), (1 << 50, 0), (0, 1 << 20, 1 << 20, 1 << 18), (0, *[1] * 12, 1 << 30, 1 << 20)]


@pytest.mark.parametrize("shape", EMPTY, ids=str)
@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=str)
def test_tensors_without_elements_may_have_dimensions_that_no_memory_has(
    shape: tuple[int, ...], hosts: tuple[int, ...]
) -> None:
    def work(rank: int) -> None:
        tensor = np.lib.stride_tricks.as_strided(np.empty(0, np.float32), shape, [4] * len(shape))
        rows = shape[0]
        if len(shape) < 13:  # larger ones are joined
            assert engine.allgather(tensor, "gather").shape == (2 * rows, *shape[1:])
        assert engine.allreduce(tensor, name="reduce").shape == shape
        both = engine.grouped_allgather([tensor, np.full(3, rank)], "gathers")
        assert both[0].shape == (2 * rows, *shape[1:]) and both[1].tolist() == [0] * 3 + [1] * 3
        assert engine.reducescatter(tensor, engine.Sum, "scatter").shape == (rows // 2, *shape[1:])
        parts = engine.grouped_reducescatter([tensor, np.ones(2)], engine.Sum, "scatters")
        assert parts[0].shape == (rows // 2, *shape[1:]) and parts[1].tolist() == [2.0]
        if rows == 0:
            assert engine.alltoall(tensor, [0, 0], "to all")[0].shape == shape

    with ThreadWorld(2, hosts) as world:
        world.run(work)


def test_more_rows_for_a_rank_than_received_splits_can_tell_are_refused() -> None:
    def work(rank: int) -> None:
        rows = (1 << 31) - 1
        _, received = engine.alltoall(np.empty((2 * rows, 0)), [rows, rows], "most")
        assert received.tolist() == [rows, rows]
        with pytest.raises(ArgumentError, match="each rank gets 2147483647 rows at most"):
            engine.alltoall(np.empty((2 * rows, 0)), [rows + 1, rows - 1], "more")

    with ThreadWorld(2, (0, 1)) as world:
        world.run(work)


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=str)
def test_a_joined_rank_takes_part_in_such_tensors(hosts: tuple[int, ...]) -> None:
    def work(rank: int) -> None:
        tensor = np.empty((0, 1 << 45))
        if rank:
            engine.reducescatter(tensor, engine.Sum, "scatter")
            engine.grouped_reducescatter([tensor, np.ones(2)], engine.Sum, "scatters")
        engine.join()

    with ThreadWorld(2, hosts) as world:
        world.run(work)


# ---- messages


def test_messages_drawn_at_random_end_in_an_answer_or_the_one_error_of_who_reads_them() -> None:
    sent, problems = run(4000, 1)
    assert not problems, "\n".join(problems[:5])
    assert min(sent.values()) > 300


@pytest.mark.parametrize(
    "message",
    [
        {"crew": 5, "lane_address": ["127.0.0.1", 5]},
        {"crew": [], "lane_address": []},
        {"crew": [{**HELLO, "rank": 0}], "lane_address": ["127.0.0.1", 5]},
        {"crew": [HELLO, HELLO], "lane_address": ["127.0.0.1", 5]},
        {"crew": []},
        {"come": [[1, 17]], "failures": 5},
        {"come": [[1, 17]], "failures": {"x": "boom"}},
        {"come": {"a": 1}},
    ],
)
def test_a_leader_that_says_what_none_says_is_named_by_the_hub(message: dict[str, Any]) -> None:
    made = hub()
    made.hosts.append(host := Host(1, 17, "b", 1, pids={1: 17}))
    with pytest.raises(
        RendezvousError, match=r"rank 1 \(pid 17\), which leads the ranks on b, says what no leader says"
    ):
        made._handle_leader_message(host, message)
    made.loop.close()


def resident() -> int:
    """Resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_hostile_frames_drawn_at_random_end_in_a_result_or_an_error() -> None:
    """A part of `make fuzz`, with a fixed seed."""
    sent = 0
    for seed in range(40):
        kinds, problems = one_world(random.Random(seed))
        assert not problems, (seed, problems, kinds)
        sent += kinds.total()
    assert sent > 40, "hardly any frame was changed"
