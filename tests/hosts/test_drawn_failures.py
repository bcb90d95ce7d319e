"""Randomly drawn failures (drawn_failures.py): a few of those of `make failures`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..netns import Hosts, need_hosts
from . import drawn_failures
from .drawn_failures import Failure, play

need_hosts()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(len(drawn_failures.CREWS)) as made:
        yield made


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "moment", "victims", "where"),
    [
        ("coordinator", "forming", [0], [0]),
        ("host killed", "idle", [2, 3], [1]),
        ("host unplugged", "busy", [4], [2]),
        ("pair cut", "busy", [2, 3, 4], [1, 2]),
        ("pair cut", "idle", [2, 3, 4], [1, 2]),
    ],
)
def test_all_survivors_name_one_culprit(
    hosts: Hosts, kind: str, moment: str, victims: list[int], where: list[int]
) -> None:
    """Checks the culprit alone; `make failures` checks the time until detection, on an otherwise idle machine."""
    outcome = play(hosts, Failure(0, kind, moment, victims, where, 0.3))
    if any(each.startswith("several culprits") for each in outcome.complaints):
        # A host that rank 0's leaves without an answer for a second, as on a machine with other work, believes itself.
        outcome = play(hosts, Failure(0, kind, moment, victims, where, 0.3))
    assert not [each for each in outcome.complaints if not each.startswith("later")], outcome.told
