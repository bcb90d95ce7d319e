"""Numbers of the slots of an elastic job, and the hosts that they belong to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from ...elastic.places import Slot


class SlotNumbers:
    """Numbers of slots; `most` is the largest number of workers at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._numbers: dict[Slot, int] = {}
        self._holders: dict[int, str] = {}  # number -> host that used it last
        self._had: dict[str, set[int]] = defaultdict(set)  # host -> numbers that its slots have or had

    def __getitem__(self, slot: Slot) -> int:
        """Return the number of a slot that has one."""
        return self._numbers[slot]

    def assign_number(self, slot: Slot, used: Collection[int]) -> int:
        """Return a slot's number in the job; assign one if it has none.

        A slot keeps its number, unless the numbers run out: then a slot without a worker loses its number to the new
        one. `used` are the numbers of slots that have workers. The first numbers are assigned in the order of the first
        world's ranks.
        """
        number = self._numbers.get(slot)
        if number is None:
            known = set(self._numbers.values())
            number = next((each for each in range(self._most) if each not in known), None)
            if number is None:
                number = next(each for each in range(2 * self._most + len(used)) if each not in used)
                self._numbers = {other: each for other, each in self._numbers.items() if each != number}
            self._numbers[slot] = number
        self._had[slot.host].add(number)
        self._holders[number] = slot.host
        return number

    def written_by(self, host: str) -> Collection[int]:
        """Return the numbers whose files a host may write: those that its slots have, or had.

        A child process may outlive a worker, when the number may belong to another host's slot.
        """
        return self._had.get(host, ())

    def held_by(self, host: str) -> Collection[int]:
        """Return the numbers that a host was the last to use."""
        return [number for number, holder in self._holders.items() if holder == host]
