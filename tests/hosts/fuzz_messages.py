"""Fuzzer of the JSON messages of authenticated peers: `python -m tests.hosts.fuzz_messages --count 100000 --seed 1`.

A valid message of each kind is changed by its grammar: a field is missing, has another type, or is at a limit or beyond
it; a list is too long or holds other values. The reader must answer as it would an honest peer, or with its one error.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from typing import Any

from engine.config.world import World
from engine.elastic.worker.gate import _lists_of, _place_of
from engine.errors import RendezvousError
from engine.host.network import Address
from engine.host.patience import Patience
from engine.launch.elastic.worker_messages import WorkerMessageError, check, event_of
from engine.launch.hosts.channel import ChannelError, Decoder
from engine.net import frames
from engine.net.rendezvous.hub import Host, Hub
from engine.net.rendezvous.inter_host import HubDecision
from engine.net.rendezvous.messages import Hello, expect_welcome
from engine.spark.record import RankRecord

from .. import fuzzing
from ..hostile_numbers import hostile_number
from .meeting import BUILD, worlds

VALUES = (None, True, -1, 0, 1.5, 1e18, "", "x", "\x1b]0;x", "\udc80", "9" * 5000, [], {}, [[]], [1, [2]], {"a": 1})
SECONDS = 1.0  # limit for one message


def changed(dice: random.Random, value: Any) -> Any:
    """Value with one hostile change."""
    if isinstance(value, dict | list) and value and dice.random() < 0.85:
        key = dice.choice(list(value)) if isinstance(value, dict) else dice.randrange(len(value))
        kind = dice.randrange(8)
        if kind == 0:
            del value[key]
        elif kind == 1 and isinstance(value, list):
            value *= dice.choice((2, 100))
        elif kind == 1:
            value[dice.choice(("", "x", "-1", "\u0663", str(hostile_number(dice, 1))))] = value.pop(key)
        else:
            value[key] = changed(dice, value[key])
        return value
    if type(value) is int and dice.random() < 0.6:
        return hostile_number(dice, value) - (1 << 63) * dice.randrange(2)
    return copy.deepcopy(dice.choice(VALUES))


@cache
def _world() -> World:
    return worlds([[0], [1]])[0]


def hub() -> Hub:
    """Hub of two hosts with a rank each, whose own rank has already come."""
    made = Hub(_world(), Patience(10.0), 10.0, None, 1)
    made.own.hellos = [Hello(0, 2, 1, [0], BUILD, ["avx2"])]
    return made


HELLO = Hello(1, 2, 17, [0, 1], BUILD, ["avx2"], 1, "").to_message()
TERMS = HubDecision([0, 1], ["a", "b"], [None, Address("127.0.0.1", 5)], [1, 2], [[0], [1]], None, 10.0, 1)
END = {  # in the form of `RankRecord.head`
    "rank": 1, "host": "a", "code": 1, "age": 0.5, "by_launcher": False, "files": {"failure.json": 4, "stderr": 6},
}  # fmt: skip
WELCOME = {
    "pids": [11, 12, 13], "processors": [[0], [1, 2], []], "hosts": [0, 0, 1], "host": 0, "kernels": None,
    "generation": 4, "crew": [0, 1], "trunks": [2], "lanes": [2], "sockets": 2, "descriptors": 7,
}  # fmt: skip
PLACE = {
    "world": 3, "rank": 1, "size": 2, "local_rank": 0, "local_size": 1, "cross_rank": 1, "cross_size": 2,
    "slot": ["b", 0],
}  # fmt: skip
READY = {
    "kind": "ready", "world": 0, "why": "NEW", "text": "", "culprit": None, "commit": None, "stalled": False,
    "build": {"version": "1"}, "port": 0,
}  # fmt: skip


def hear(message: Any) -> None:
    """Hand the hub a leader's message."""
    if isinstance(message, dict):  # else `Connection.receive_message` has refused it
        made = hub()
        made.hosts.append(host := Host(1, 17, "b", 1, pids={1: 17}))
        try:
            made._handle_leader_message(host, message)
        finally:
            made.loop.close()


def say(message: Any) -> None:
    """Hand the gate a worker's message."""
    event_of(0, check(message))


def send(message: Any) -> None:
    """Decode an agent's message, and read its fields."""
    head = json.dumps(message).encode()
    content = len(head).to_bytes(4, "big") + head
    for each in Decoder().feed(frames.wrap(content)):
        for read in (each.get_number, each.get_numbers, each.get_seconds, each.get_text, each.get_bool):
            for name in ("at", "worker", "line"):
                with contextlib.suppress(ChannelError):
                    read(name)


def meet(message: Any) -> None:
    """Read the description of a world as a rank does, which its leader sends."""
    if isinstance(message, dict):
        expect_welcome(message, 3)
        assert message["descriptors"] < 1 << 12


def place(message: Any) -> None:
    """Read a worker's place, which its agent sends."""
    if isinstance(message, dict):
        _lists_of(message, _place_of(message.get("place")).size)


def leave(message: Any) -> None:
    """Read a task's report of how its rank has ended."""
    if isinstance(message, dict):
        RankRecord.read_explanation(message, b"x" * 10)


KINDS: dict[str, tuple[Any, Callable[[Any], object], tuple[type[Exception], ...]]] = {
    "come": ({"come": [[1, 17]], "failures": {"1": "boom"}}, hear, (RendezvousError,)),
    "crew": ({"crew": [HELLO], "lane_address": ["127.0.0.1", 5]}, hear, (RendezvousError,)),
    "refused": ({"refused": "MismatchError", "message": "boom"}, hear, (RendezvousError,)),
    "hello": (HELLO, Hello.read, (ValueError,)),
    "terms": (asdict(TERMS), HubDecision.read, (ValueError,)),
    "ready": (READY, say, (WorkerMessageError,)),
    "committed": ({"kind": "committed", "world": 1, "commit": 3}, say, (WorkerMessageError,)),
    "welcome": (WELCOME, meet, (ValueError,)),
    "place": ({"place": PLACE, "members": [4, 7], "hosts": ["a", "b"]}, place, (ValueError,)),
    "channel": (["beat", {"at": 1.5, "worker": 3, "line": "x"}], send, (ChannelError,)),
    "end": (END, leave, (ValueError,)),
}  # fmt: skip


def one(dice: random.Random, kind: str) -> str:
    """Send one hostile message; return the fault found."""
    good, read, errors = KINDS[kind]
    told = copy.deepcopy(good)
    for _ in range(dice.choice((1, 1, 2, 3))):
        told = changed(dice, told)
    try:
        data = json.dumps(told)
    except (ValueError, RecursionError):
        return ""
    begun = time.thread_time()
    try:
        read(frames.parse(data.encode()))
    except (frames.FrameError, *errors):
        pass
    except Exception as error:
        return f"{data[:300]}: {type(error).__name__}: {error}"
    took = time.thread_time() - begun
    return "" if took < SECONDS else f"{data[:300]}: {took:.1f} s"


def run(count: int, seed: int) -> fuzzing.Drawn:
    """Send hostile messages of all kinds, as `fuzzing.draw` does."""
    return fuzzing.draw(count, seed, {kind: partial(one, kind=kind) for kind in KINDS})


if __name__ == "__main__":
    sys.exit(fuzzing.main(run, "Fuzz what proven peers say.", "hostile messages"))
