"""Numbers of slots, and the output that belongs to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.elastic.places import Slot
from engine.launch.elastic.slots import Slots
from engine.launch.hosts.channel import ChannelError, Message
from engine.launch.process.console import Console


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Slots]:
    with (tmp_path / "shown").open("wb") as shown:
        made = Slots(tmp_path, 1, [Console(shown.fileno())] * 2, timestamps=False)
        yield made
        made.close()


def output(number: int, text: bytes) -> Message:
    return Message("output", {"number": number, "stream": "stdout"}, text)


def test_what_outlives_a_worker_may_write_when_its_slots_number_has_gone_to_another_host(slots, tmp_path):
    """The agent forwards what it reads, and knows nothing of the new slot: its host must not be lost for that."""
    assert slots.number(Slot("old", 0), set()) == 0
    slots.open(0)
    slots.show("old", output(0, b"early\n"))
    assert slots.number(Slot("new", 0), set()) == 0
    slots.show("old", output(0, b"late\n"))
    slots.show("new", output(0, b"new\n"))
    assert (tmp_path / "rank.0" / "stdout").read_bytes() == b"early\nlate\nnew\n"


def test_a_host_that_never_had_a_slot_writes_nothing_there(slots):
    slots.number(Slot("a", 0), set())
    slots.open(0)
    with pytest.raises(ChannelError, match="slot number 0, which is not one of its slots"):
        slots.show("b", output(0, b"x"))


def test_a_file_that_somebody_has_removed_ends_nothing(slots, tmp_path):
    """A cleaner of /tmp does not know of a running job: the next worker of the slot is started all the same."""
    slots.number(Slot("a", 0), set())
    assert slots.open(0) == 0
    slots.show("a", Message("output", {"number": 0, "stream": "stderr"}, b"early\n"))
    for name in ("stdout", "stderr"):
        (tmp_path / "rank.0" / name).unlink()
    assert slots.open(0) == len(b"early\n")
