"""A driver for tests of what stands at the gate: it says what the test has it say, and keeps what workers say."""

from __future__ import annotations

import selectors
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engine.elastic.places import Slot, assign
from engine.launch.gatehouse import Gatehouse

from ..waiting import until

SECRET = "5ec2e7" * 8


class FakeDriver:
    """A gatehouse on a thread of its own; use it in a `with`.

    Parameters
    ----------
    several : bool
        Whether workers are told that they may be on several hosts.
    most : int
        Workers that may come at once.

    Attributes
    ----------
    heard : list of (int, dict)
        What workers have said, in that order: number and message.
    said : list of str
        Lines that a user would be shown.
    """

    def __init__(self, several: bool = False, most: int = 1) -> None:
        self.heard: list[tuple[int, dict[str, Any]]] = []
        self.said: list[str] = []
        self._selector = selectors.DefaultSelector()
        self._asked: list[Callable[[], None]] = []
        self._open = True
        self.gatehouse = Gatehouse(SECRET, several, most, self, lambda *said: self.heard.append(said), self.said.append)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> FakeDriver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self.vanish()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._selector.close()

    def environment(self, worker: int, slot: int = 0) -> dict[str, str]:
        """The variables of a worker."""
        return {
            "ENGINE_GATE": self.gatehouse.name,
            "ENGINE_SECRET": SECRET,
            "ENGINE_WORKER": str(worker),
            "ENGINE_SLOT": str(slot),
        }

    def wait_for(self, kind: str, worker: int, times: int = 1) -> dict[str, Any]:
        """The message of a kind that a worker has sent, the last of so many."""

        def found() -> dict[str, Any] | None:
            matching = [message for number, message in self.heard if number == worker and message["kind"] == kind]
            return matching[times - 1] if len(matching) >= times else None

        found_message = until(found, f"{kind} number {times} of worker {worker}")
        assert found_message is not None
        return found_message

    def place(self, world: int, workers: Sequence[int], hosts: Mapping[int, str] | None = None, hub: str = "") -> None:
        """Give workers at the gate places in a world: ranks in this order, unless they are on several hosts."""
        host_of = dict.fromkeys(workers, "here") if hosts is None else hosts
        ages = {host: age for age, host in enumerate(dict.fromkeys(host_of[worker] for worker in workers))}
        slots = {worker: Slot(host_of[worker], number) for number, worker in enumerate(workers)}
        places = assign(world, slots, ages.__getitem__)
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
        self.do(lambda: self.gatehouse.send(worker, kind, **fields))

    def vanish(self) -> None:
        """Be gone, as an agent that is killed."""

        def close() -> None:
            self.gatehouse.close()
            self._open = False

        self.do(close)

    # What the gatehouse asks of whoever listens for it.

    def hear(self, descriptor: int, act: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, act)

    def forget(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def do(self, act: Callable[[], None]) -> None:
        """Have something done on the thread that listens."""
        done = threading.Event()
        self._asked.append(lambda: (act(), done.set()))  # type: ignore[func-returns-value,return-value]
        assert done.wait(10)

    def _serve(self) -> None:
        while self._open:
            for key, _ in self._selector.select(0.005):
                key.data()
            while self._asked:
                self._asked.pop(0)()
