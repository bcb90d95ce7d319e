"""A process that goes from world to world: a minimal `elastic.run` for tests of worlds.

It is forked from a process that has imported the tests' modules (`tests/elastic/worlds.py`), and gets its places over
a socket. The program of a world's members is a function of `tests/elastic/programs.py`, or of another module.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from engine.config.world import World
from engine.errors import CalledOff, EngineError, RendezvousError, WorldError
from engine.net.rendezvous import CancellationToken
from engine.session import runtime

LIMIT = 1 << 20


class Member:
    """Worker's end of a packet socket, whose other end is the test."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.worlds = 0  # number of worlds that the member has entered
        self.world: World | None = None
        self._connection = connection
        self._void: set[int] = set()
        self._places: list[dict[str, Any]] = []

    def say(self, kind: str, **told: Any) -> None:
        """Send the test a message, with the time."""
        self._connection.send(json.dumps({"kind": kind, "time": time.monotonic(), **told}).encode())

    def run(self, body: Callable[[Member], Any]) -> None:
        """Call `body` in each world until it returns, or the test has no more places."""
        while (world := self._place()) is not None:
            self.world = world
            cancel = CancellationToken(self._connection.fileno(), lambda number=world.number: self._called_off(number))
            self.say("entering", world=world.number)
            try:
                runtime.enter_world(world, cancel)
                self.worlds += 1
                self.say("entered", world=world.number)
                self.say("returned", world=world.number, value=body(self))
            except CalledOff:
                self.say("called_off", world=world.number)
            except BaseException as error:
                failure = runtime.world_failure(2.0)
                # A world that fails at its start is already gone when its error is raised.
                if failure is None and not isinstance(error, RendezvousError | WorldError):
                    self.say("raised", text=f"{type(error).__name__}: {error}")
                    raise
                told = None if failure is None else failure.culprit
                self.say(
                    "failed", world=world.number, culprit=told, text=str(error) if failure is None else failure.text
                )
                traceback.clear_frames(error.__traceback__)
            gc.collect()

    def _place(self) -> World | None:
        """Return the next place, or None if there is none."""
        while not self._places:
            if not self._read():
                return None
        return World(**{**(place := self._places.pop(0)), "workers": tuple(place["workers"])})

    def _called_off(self, number: int) -> bool:
        while number not in self._void and self._read(socket.MSG_DONTWAIT):
            pass
        return number in self._void

    def _read(self, flags: int = 0) -> bool:
        """Read one packet; return whether there was one."""
        try:
            data = self._connection.recv(LIMIT, flags)
        except BlockingIOError:
            return False
        if not data:
            if flags:
                raise EngineError("the test has ended")
            return False
        message = json.loads(data)
        if "void" in message:
            self._void.add(message["void"])
        else:
            self._places.append(message)
        return True


def main(number: int, connection: socket.socket, program: str, environ: dict[str, str]) -> None:
    """Run a member until there are no more places."""
    os.environ.update(environ)
    module, _, function = program.rpartition(":")
    member = Member(number, connection)
    try:
        getattr(importlib.import_module(module or "tests.elastic.programs"), function)(member)
        runtime.shutdown()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise
