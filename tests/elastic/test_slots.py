"""Numbers of slots, and who may write the output that belongs to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.elastic.places import Slot
from engine.launch.elastic.slots import SlotNumbers
from engine.launch.errors import LaunchError
from engine.launch.hosts.channel import pack_message
from engine.launch.process.console import Console
from engine.launch.process.output import RankOutput

from .fake_agents import drive, ready


@pytest.fixture
def output(tmp_path: Path) -> Iterator[RankOutput]:
    with (tmp_path / "shown").open("wb") as shown:
        made = RankOutput(tmp_path, [Console(shown.fileno())] * 2, timestamps=False)
        yield made
        made.close()


def test_what_outlives_a_worker_may_write_when_its_slots_number_has_gone_to_another_host():
    """The agent forwards what it reads, and knows nothing of the new slot: its host must not be lost for that."""
    slots = SlotNumbers(1)
    assert slots.assign_number(Slot("old", 0), set()) == 0
    assert slots.assign_number(Slot("new", 0), set()) == 0
    assert 0 in slots.written_by("old")
    assert 0 in slots.written_by("new")
    assert (list(slots.held_by("old")), list(slots.held_by("new"))) == ([], [0])


def test_a_host_that_never_had_a_slot_writes_nothing_there(tmp_path):
    """Its agent is given up, as one that does not speak as an agent does."""
    assert 0 not in SlotNumbers(1).written_by("b")
    output = pack_message("output", b"x", number=1, stream="stdout")
    with pytest.raises(
        LaunchError, match=r"a: its agent .* speaks of number 1, which is not one of its ranks or slots"
    ):
        drive(tmp_path, {"a": [ready(), output]}, until="was lost")


def test_a_file_that_somebody_has_removed_ends_nothing(output, tmp_path):
    """A cleaner of /tmp does not know of a running job: the next worker of the slot is started all the same."""
    assert output.open(0)["stderr"].taken == 0
    output.open(0)["stderr"].write_output(b"early\n")
    for name in ("stdout", "stderr"):
        (tmp_path / "rank.0" / name).unlink()
    assert output.open(0)["stderr"].taken == len(b"early\n")
