"""Fuzzer of authenticated streams: `python -m tests.net.fuzz_stream --count 100000 --seed 1`.

An honest conversation is drawn, and what one side sends is changed by its grammar: lengths at limits, lying lengths,
half frames, changed bytes, frames that are repeated, dropped, swapped or sent back, before and after the proof. It
comes in parts of any size. The other side must return the honest messages in their order, and then at most one
`StreamError`; it must hold no more bytes than its limit.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from engine.net import frames
from engine.net.stream import CLIENT, MAC, OPENING, SERVER, AuthenticatedStream, StreamError

from .. import fuzzing
from ..hostile_numbers import hostile_number

KEY = b"key of the job"
LIMITS = (frames.UNPROVEN, 1 << 14, 1 << 20)
CHANGES = ("none", "length", "bytes", "cut", "junk", "repeat", "drop", "swap", "send back", "another key", "line")


@dataclass
class Conversation:
    """Conversation of which one side is attacked."""

    attacked: AuthenticatedStream  # side that has received nothing yet
    parts: list[bytes] = field(default_factory=list)  # opening and frames that the honest other side sends, in order
    honest: list[dict[str, Any]] = field(default_factory=list)  # messages that these hold
    own: list[bytes] = field(default_factory=list)  # frames that the attacked side sends


def message(dice: random.Random, longest: int) -> dict[str, Any]:
    """Draw a message whose JSON has at most so many bytes, often just as many."""
    empty = len(json.dumps({"x": ""}))
    return {"x": "y" * (dice.choice((0, 1, longest - empty, dice.randrange(longest))) % (longest - empty + 1))}


def converse(dice: random.Random, limit: int, attack_server: bool, key: bytes = KEY) -> Conversation:
    """Let two honest sides talk, and record what the one that attacks later sends."""
    server, client = AuthenticatedStream(KEY, SERVER, limit), AuthenticatedStream(key, CLIENT, limit)
    opening = server.open(seconds=1)
    greeting = message(dice, 3000)
    client.feed(opening)
    client.receive()
    talk = Conversation(server if attack_server else AuthenticatedStream(KEY, CLIENT, limit))
    sent = client.encode(greeting)
    if attack_server:
        talk.parts, talk.honest = [sent], [greeting]
        talk.parts += [client.encode(each) for each in _more(dice, limit, talk)]
        return talk
    server.feed(sent)
    answer = message(dice, 3000)
    # The attacked client has the nonce of the recorded one, as if it had sent that greeting.
    talk.attacked = client
    if server.receive() is None or key != KEY:
        return talk
    talk.parts, talk.honest = [server.encode(answer)], [answer]
    talk.parts += [server.encode(each) for each in _more(dice, limit, talk)]
    talk.own = [sent]
    return talk


def _more(dice: random.Random, limit: int, talk: Conversation) -> list[dict[str, Any]]:
    more = [message(dice, limit) for _ in range(dice.randrange(4))]
    talk.honest += more
    return more


def change(dice: random.Random, kind: str, talk: Conversation) -> bytes:
    """Return the bytes of a conversation with one change."""
    parts = [*talk.parts]
    at = dice.randrange(len(parts))
    part = parts[at]
    if kind == "length":
        parts[at] = struct.pack(">I", hostile_number(dice, len(part) - 4, 32)) + part[4:]
    elif kind == "bytes":
        place = dice.randrange(len(part))
        parts[at] = part[:place] + bytes([part[place] ^ 1 << dice.randrange(8)]) + part[place + 1 :]
    elif kind == "cut":
        parts[at:] = [part[: dice.randrange(len(part))]]
    elif kind == "junk":
        parts.insert(at, dice.randbytes(dice.choice((1, 3, 4, 5, 36, 37, 5000))))
    elif kind == "repeat":
        parts.insert(at, part)
    elif kind == "drop":
        del parts[at]
    elif kind == "swap":
        dice.shuffle(parts)
    elif kind == "send back":
        parts.insert(at, (talk.own or [frames.wrap(bytes(MAC) + b"{}")])[0])
    elif kind == "line":
        parts.insert(at, OPENING)
    return b"".join(parts)


def one(dice: random.Random, kind: str) -> str:
    """Attack one side with one kind of change; return the fault found."""
    limit, attack_server = dice.choice(LIMITS), dice.random() < 0.5
    talk = converse(dice, limit, attack_server, b"another" if kind == "another key" and attack_server else KEY)
    if not talk.parts:
        return ""
    data, found, step = change(dice, kind, talk), [], dice.choice((1, 7, 4096, 1 << 20))
    refused = False
    begun = time.thread_time()
    for at in range(0, min(len(data), 3000 * step), step):
        try:
            talk.attacked.feed(data[at : at + step])
            while (each := talk.attacked.receive()) is not None:
                found.append(each)
            talk.attacked.missing_bytes()
        except StreamError:
            refused = True
            break
        held = len(talk.attacked._buffer)
        if held > step + 4 + (limit + MAC if talk.attacked.authenticated else frames.UNPROVEN):
            return f"{held} bytes are held"
    if kind == "another key" and attack_server and found:
        return "a stranger is heard"
    if found != talk.honest[: len(found)]:
        return f"{len(found)} messages are not the honest ones"
    if kind in ("length", "bytes", "junk", "swap") and not refused and len(found) == len(talk.honest):
        return "" if data == b"".join(talk.parts) else f"{kind} went unnoticed"
    if kind == "none" and (refused or (len(found) < len(talk.honest) and len(data) <= 3000 * step)):
        return "an honest peer is refused"
    took = time.thread_time() - begun
    return "" if took < 2.0 else f"{took:.1f} s"


def run(count: int, seed: int) -> fuzzing.Drawn:
    """Attack streams by all kinds of changes, as `fuzzing.draw` does."""
    return fuzzing.draw(count, seed, {kind: partial(one, kind=kind) for kind in CHANGES})


if __name__ == "__main__":
    sys.exit(fuzzing.main(run, "Fuzz authenticated streams.", "conversations"))
