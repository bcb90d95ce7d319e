"""Fuzzer of the frames between hosts: `python -m tests.hosts.fuzz_frames --count 100000 --seed 1`.

Two engines on two "hosts" of this process run a few operations, and a proxy between them changes frames by their
grammar: one number of a header, a word, a request, an entry or data becomes hostile, or a frame is repeated, dropped or
sent at the wrong time. Each change counts as one hostile frame. The outcome must be a result or an error of the engine,
in limited time; never a crash, another exception or a hang. It finds most under the address sanitizer.
"""

from __future__ import annotations

import random
import struct
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import numpy as np

import engine
from engine.errors import EngineError
from engine_ext.bindings import gradients

from .. import fuzzing
from ..hostile_numbers import hostile_number, hostile_text
from ..parallel.thread_world import ThreadWorld
from .middle import (
    CALL,
    CLOCK,
    HERE,
    LEFT,
    MESSAGE,
    PROGRESS,
    REQUESTS,
    SCHEDULE,
    SLOT,
    VERDICT,
    WORD,
    WORDS,
    Frame,
    Middle,
)

META = [(0, 1), (1, 1), (2, 1), (3, 1), (4, 4), (8, 8), (16, 8), (24, 8), (32, 1), (33, 1), (34, 1), (40, 4), (44, 4)]
META += [(48 + 8 * dim, 8) for dim in range(13)]
REQUEST_META, REQUEST_BYTES = 40, 192
REQUEST = [(0, 4), (4, 2), (6, 2), (8, 8), (16, 8), (24, 4), (28, 4), (32, 4)]
REQUEST += [(REQUEST_META + at, width) for at, width in META]
ENTRY_META, ENTRY_BYTES = 104, 256
ENTRY = [(0, 4), (4, 1), (5, 1), (6, 1), (7, 1), (8, 4), (12, 4), (16, 8), (24, 8), (32, 8), (40, 8), (48, 4), (52, 4)]
ENTRY += [(56, 1), (57, 1), (58, 1), (59, 1), (64, 4), (72, 4), (76, 4), (80, 8), (88, 8), (96, 8)]
ENTRY += [(ENTRY_META + at, width) for at, width in META]
PAGE_BYTES, COORDINATOR_BYTES = 270_000, 2200  # upper bounds of the offsets of words
LONG = 0.3  # seconds after which connections are cut, since a hostile frame may only keep ranks waiting
HANG = 60.0  # seconds from the cut to a hang


class Liar:
    """Proxy that changes the frames of one world."""

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.kinds = dice, Counter[str]()
        self.share = dice.choice((0.02, 0.1, 0.3))
        self.sides = dice.choice(((0,), (1,), (0, 1)))
        self.seen: list[Frame] = []

    def change(self, frame: Frame) -> Iterable[Frame]:
        self.seen = [*self.seen[-20:], Frame(**vars(frame) | {"payload": bytearray(frame.payload)})]
        if frame.sender not in self.sides or self.dice.random() > self.share:
            return [frame]
        kind = self.dice.choice(("header", "payload", "payload", "payload", "payload", "again", "never", "another"))
        self.kinds[f"{kind} {frame.type}"] += 1
        if kind == "never":
            return []
        if kind == "again":
            old = self.dice.choice([each for each in self.seen if each.sender == frame.sender] or [frame])
            return [frame, self._with_header(Frame(**vars(old) | {"payload": bytearray(old.payload)}))]
        if kind == "another":
            return self.dice.choice(([frame, self._another(frame)], [self._another(frame), frame]))
        if kind == "payload" and frame.payload:
            self._spoil(frame)
            return [frame]
        return [self._with_header(frame)]

    def _number(self, honest: int, width: int) -> int:
        return hostile_number(self.dice, honest, 8 * width)

    def _with_header(self, frame: Frame) -> Frame:
        field = self.dice.choice(("position", "position", "position", "offset", "rank", "rank", "type", "length"))
        if field == "position":
            frame.position = self._number(frame.position, 8)
        elif field == "offset":
            frame.offset = self._number(frame.offset, 4)
        elif field == "rank":
            (frame.rank,) = struct.unpack("=i", struct.pack("=I", self._number(frame.rank, 4)))
        elif field == "type":
            frame.type = self.dice.choice((0, *range(1, 13), 65_535))
        else:
            frame.length = self._number(len(frame.payload), 4)
        return frame

    def _another(self, frame: Frame) -> Frame:
        """Frame of a random type that is valid, has a hostile number, or has a changed header."""
        kind = self.dice.choice((LEFT, SLOT, PROGRESS, REQUESTS, WORDS, VERDICT, CLOCK, MESSAGE, CALL, HERE))
        lengths = {
            LEFT: 0,
            PROGRESS: 24,
            VERDICT: 8 + 1024,
            CLOCK: 24,
            MESSAGE: 0,
            CALL: 0,
            HERE: 0,
            WORDS: 16,
            SLOT: 64,
        }
        made = Frame(kind, frame.rank, frame.offset, frame.position, sender=frame.sender, link=frame.link)
        if kind == REQUESTS:
            made.payload = self._request()
        else:
            made.payload = bytearray(lengths[kind])
            if made.payload:
                self._spoil(made)
        return made if self.dice.random() < 0.5 else self._with_header(made)

    def _request(self) -> bytearray:
        """Complete request of a name that no rank has submitted."""
        name = hostile_text(self.dice, 1024)
        length = (REQUEST_BYTES + len(name) + 7) & ~7
        request = bytearray(length)
        struct.pack_into("=IH", request, 0, length, len(name) & 0xFFFF)
        struct.pack_into("=ddq", request, REQUEST_META + 8, 1.0, 1.0, -1)
        struct.pack_into("=I", request, REQUEST_META + 40, 1)
        request[REQUEST_BYTES : REQUEST_BYTES + len(name)] = name
        if self.dice.random() < 0.7:
            self._write(request, 0, self.dice.choice(REQUEST))
        return request

    def _write(self, payload: bytearray, begin: int, field: tuple[int, int]) -> None:
        at, width = begin + field[0], field[1]
        if at + width <= len(payload):
            honest = int.from_bytes(payload[at : at + width], "little")
            payload[at : at + width] = self._number(honest, width).to_bytes(width, "little")

    def _spoil(self, frame: Frame) -> None:
        payload, dice = frame.payload, self.dice
        for _ in range(dice.choice((1, 1, 1, 2))):
            if frame.type == WORDS and len(payload) >= WORD.size:
                begin = WORD.size * dice.randrange(len(payload) // WORD.size)
                if dice.random() < 0.5:
                    self._write(payload, begin, (8, 8))
                elif dice.random() < 0.7:
                    top = COORDINATOR_BYTES if frame.rank == -1 else PAGE_BYTES
                    low = dice.choice((0, 64, 128, 192, 256, 1024)) if dice.random() < 0.6 else dice.randrange(top)
                    struct.pack_into("=I", payload, begin, (low + 4 * dice.randrange(12)) & ~3)
                else:
                    self._write(payload, begin, dice.choice(((0, 4), (4, 4))))
            elif frame.type == REQUESTS:
                self._write(payload, 0, dice.choice(REQUEST))
            elif frame.type == SCHEDULE:
                self._spoil_entry(payload)
            elif frame.type == VERDICT:
                self._write(payload, 0, dice.choice(((0, 2), (2, 2), (4, 4))))
            else:  # data, progress, times
                words = max(1, len(payload) // 8)
                self._write(payload, 8 * dice.randrange(min(words, dice.choice((4, 8, words)))), (0, 8))

    def _spoil_entry(self, payload: bytearray) -> None:
        begins, at = [], 0
        while at + 8 <= len(payload):
            begins.append(at)
            at += 8 * max(1, struct.unpack_from("=I", payload, at)[0])
        begin = self.dice.choice(begins)
        words = struct.unpack_from("=I", payload, begin)[0]
        behind = 8 * words - ENTRY_BYTES
        if behind > 0 and self.dice.random() < 0.3:  # ids, rows, a name
            width = self.dice.choice((1, 4, 8))
            self._write(payload, begin + ENTRY_BYTES, (width * self.dice.randrange(max(1, behind // width)), width))
        else:
            self._write(payload, begin, self.dice.choice(ENTRY))


class HookedParameter:
    """Parameter that gets a gradient, sparse or dense, with the binding of its group."""

    def __init__(self) -> None:
        self.memory = np.zeros((10, 4), np.float32)
        self.grad: Any = None
        self.group = gradients.GradientGroup(engine.session.runtime.current_engine(), cast(Any, self), 0)
        self.hook = self.group.add(self, "weight", None)

    def reduce(self, without: bool, dense: bool = False) -> None:
        """Run one pass; this rank may be `without` a gradient."""
        if not without:
            self.grad = self.memory if dense else np.zeros(1, np.float32)  # a dense gradient of another size
            self.hook(self)
        self.group.finish()

    def memory_of(self, _parameter: object) -> Any:
        return self.memory

    def begin_pass(self) -> None:
        pass

    def shares_memory(self, _gradient: object) -> bool:
        return False

    def replace(self, *_: object) -> Any:
        return np.array([[1], [2], [3]]), np.ones((3, 4), np.float32), [10, 4], None


def operations(dice: random.Random) -> list[str]:
    kinds = [
        "allreduce",
        "group",
        "adasum",
        "gather",
        "gathers",
        "scatter",
        "to all",
        "broadcast",
        "barrier",
        "again",
        "join",
        "gradient",
        "sparse gradient",
    ]
    return [dice.choice(kinds) for _ in range(dice.choice((2, 4, 8)))]


def bring(kind: str, rank: int, number: int, size: int) -> Any:
    """Submit one operation, and wait for it."""
    name = "again" if kind == "again" else f"{kind} {number}"
    if kind in ("allreduce", "again"):
        return engine.allreduce(np.ones((3, 50) if kind == "again" else 20_000), name=name)
    if kind == "group":
        return engine.grouped_allreduce([np.ones(10), np.ones(7, np.float32)], name=name)
    if kind == "adasum":
        return engine.allreduce(np.ones(20_000, np.float32), engine.Adasum, name)
    if kind == "gather":
        return engine.allgather(np.ones((rank + 2, 30)), name)
    if kind == "gathers":
        return engine.grouped_allgather([np.ones((rank + 1, 3)), np.ones((4, 2), np.float16)], name)
    if kind == "scatter":
        return engine.grouped_reducescatter([np.ones((5, 3)), np.ones(9, np.float32)], engine.Sum, name)
    if kind == "to all":
        return engine.alltoall(np.ones((2 * size, 3)), [2] * size, name)
    if kind == "broadcast":
        return engine.broadcast(np.ones(5000, np.int64), size - 1, name)
    if kind.endswith("gradient"):
        gradient = HookedParameter()
        for turn in range(2):
            gradient.reduce(without=rank == (number + turn) % size, dense=kind == "gradient")
        return None
    if kind == "join":
        if rank == 0:
            engine.join()
        engine.grouped_reducescatter([np.ones((4, 2)), np.ones(6)], engine.Sum, name)
        return engine.join() if rank else None
    return engine.barrier(name)


def one_world(dice: random.Random) -> fuzzing.Drawn:
    """Run one world with hostile frames; return how often each kind was sent, and the faults found."""
    liar, problems = Liar(dice), []
    middle = Middle(liar.change)
    hosts = dice.choice(((0, 1), (0, 1), (0, 0, 1, 1)))
    world = ThreadWorld(len(hosts), hosts, middle.connect, stall_limit=5.0)
    middle.start()
    plan = operations(dice)
    if len(hosts) > 2:
        plan = [kind for kind in plan if kind != "join"]

    def work(rank: int) -> None:
        try:
            for number, kind in enumerate(plan):
                bring(kind, rank, number, len(hosts))
            engine.session.runtime.current_engine().history()
        except (EngineError, MemoryError):
            pass
        except Exception as error:
            problems.append(f"rank {rank}: {type(error).__name__}: {error}")

    ends = threading.Thread(target=world.run, args=(work,), daemon=True)
    ends.start()
    ends.join(LONG)
    middle.cut() if ends.is_alive() else None
    ends.join(HANG)
    ended = world.end(0.05, HANG)
    if ends.is_alive() or not ended:
        problems.append(f"a rank hangs: {plan}, {dict(liar.kinds)}")
    middle.stop()
    return liar.kinds, problems


def run(count: int, seed: int) -> fuzzing.Drawn:
    """Run worlds until that many hostile frames were sent, or a world shows a fault."""
    kinds, worlds = Counter[str](), 0
    while kinds.total() < count:
        number = seed * 1_000_000 + worlds
        if worlds % 100 == 0:  # a crash is in one of the next hundred
            print(f"world {number}, after {kinds.total()} hostile frames", file=sys.stderr, flush=True)
        more, problems = one_world(random.Random(number))
        kinds, worlds = kinds + more, worlds + 1
        if problems:
            return kinds, [f"world {number}: {problem}" for problem in problems]
    return kinds, []


if __name__ == "__main__":
    sys.exit(fuzzing.main(run, "Fuzz the frames between hosts.", "hostile frames"))
