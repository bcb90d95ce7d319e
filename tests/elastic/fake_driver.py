"""Scripted driver for tests of workers at the gate: it sends what the test asks, and records workers' messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engine.elastic.places import Slot, assign_ranks
from engine.launch.elastic.worker_server import WorkerServer
from engine.launch.process.reader_loop import ReaderLoop

from ..waiting import until

SECRET = "5ec2e7" * 8


class FakeDriver:
    """Worker server on a thread of its own, to be used as a context manager.

    `several` tells workers that they may be on several hosts; at most `most` workers may connect at once.
    """

    def __init__(self, several: bool = False, most: int = 1) -> None:
        self.heard: list[tuple[int, dict[str, Any]]] = []  # worker's number and message, in order of arrival
        self.said: list[str] = []  # lines that a user would see
        self._loop = ReaderLoop()
        self._open = True
        self.server = WorkerServer(SECRET, several, most, self._loop, self)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> FakeDriver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self.vanish()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._loop.close()

    def environment(self, worker: int, slot: int = 0) -> dict[str, str]:
        """Return the environment variables of a worker."""
        return {
            "ENGINE_GATE": self.server.name,
            "ENGINE_SECRET": SECRET,
            "ENGINE_WORKER": str(worker),
            "ENGINE_SLOT": str(slot),
        }

    def wait_for(self, kind: str, worker: int, times: int = 1) -> dict[str, Any]:
        """Wait until a worker has sent this many messages of a kind, and return the last one."""

        def found() -> dict[str, Any] | None:
            matching = [message for number, message in self.heard if number == worker and message["kind"] == kind]
            return matching[times - 1] if len(matching) >= times else None

        found_message = until(found, f"{kind} number {times} of worker {worker}")
        assert found_message is not None
        return found_message

    def place(self, world: int, workers: Sequence[int], hosts: Mapping[int, str] | None = None, hub: str = "") -> None:
        """Give workers at the gate places in a world, with ranks in this order unless they are on several hosts."""
        host_of = dict.fromkeys(workers, "here") if hosts is None else hosts
        ages = {host: age for age, host in enumerate(dict.fromkeys(host_of[worker] for worker in workers))}
        slots = {worker: Slot(host_of[worker], number) for number, worker in enumerate(workers)}
        places = assign_ranks(world, slots, ages.__getitem__)
        for worker, place in places.items():
            self.tell(
                worker,
                "place",
                place=asdict(place),
                members=list(places),
                hosts=[each.slot.host for each in places.values()],
                hub=hub,
                reason="the test wants it",
            )

    def tell(self, worker: int, kind: str, /, **fields: Any) -> None:
        """Send a message to a worker."""
        self.do(lambda: self.server.send(worker, kind, **fields))

    def vanish(self) -> None:
        """Close everything at once, like an agent that is killed."""

        def close() -> None:
            self.server.close()
            self._open = False

        self.do(close)

    def worker_said(self, worker: int, message: dict[str, Any]) -> None:
        """Implement `WorkerListener`."""
        self.heard.append((worker, message))

    def show_line(self, line: str) -> None:
        """Implement `WorkerListener`."""
        self.said.append(line)

    def do(self, act: Callable[[], None]) -> None:
        """Run a function on the thread that serves, and wait for it."""
        done = threading.Event()
        self._loop.wake(lambda: (act(), done.set()))  # type: ignore[func-returns-value,return-value]
        assert done.wait(10)

    def _serve(self) -> None:
        while self._open:
            self._loop.step(None)
