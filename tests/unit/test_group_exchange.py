"""Agreement of ranks that form a group, and invitations to a world: lies, failures, and sockets left open."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import pytest

from engine.config.hub_address import HubAddress
from engine.errors import EngineError, RendezvousError
from engine.net.rendezvous.invitation import exchange_invitation, read_invitation, write_invitation
from engine.session.group_exchange import GroupExchange

RANKS = (2, 5)
GOOD: dict[str, Any] = {"ranks": list(RANKS), "offset": 4096, "failure": ""}


def answered(*answers: object) -> GroupExchange:
    """Exchange in which this rank, 2, says what it says, and rank 5 one of these answers after the other."""
    left = [answer if isinstance(answer, bytes) else json.dumps(answer).encode() for answer in answers]
    return GroupExchange(RANKS, lambda text: [text, left.pop(0)])


def test_ranks_agree_on_the_place_that_their_leader_has_said() -> None:
    assert answered(GOOD).agree_on_place(5, 0, "") == 4096
    assert answered(GOOD).agree_on_place(2, 8192, "") == 8192


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"", "rank 5 has sent what no rank sends"),
        (b"\xff", "rank 5 has sent what no rank sends"),
        (b"[1]", "rank 5 has sent what no rank sends"),
        ({}, "'failure' is missing"),
        (GOOD | {"failure": 1}, "a text is expected"),
        (GOOD | {"failure": "no memory"}, "rank 5 has failed: no memory"),
        (GOOD | {"ranks": [2, 6]}, r"forms one of the ranks \[2, 6\]"),
        (GOOD | {"ranks": None}, "forms one of the ranks None"),
        (GOOD | {"offset": -1}, "rank 5 has said that 'offset' is -1"),
        (GOOD | {"offset": 1 << 63}, "rank 5 has said that 'offset'"),
        (GOOD | {"offset": True}, "rank 5 has said that 'offset'"),
    ],
)
def test_a_rank_that_says_something_else_is_named(answer: object, text: str) -> None:
    with pytest.raises(EngineError, match=rf"ranks \[2, 5\] cannot be formed: .*{text}"):
        answered(answer).agree_on_place(5, 0, "")


def test_this_rank_s_own_failure_is_raised_here_too() -> None:
    with pytest.raises(EngineError, match="rank 2 has failed: no thread"):
        answered({"failure": ""}).agree_on_success("no thread")


def test_an_exchange_that_has_failed_is_known_to_be_broken() -> None:
    def fail(text: bytes) -> list[bytes]:
        raise RendezvousError("rank 5 is late")

    forming = GroupExchange(RANKS, fail)
    assert not forming.broken
    with pytest.raises(RendezvousError):
        forming.agree_on_success("")
    assert forming.broken


def test_an_invitation_is_read_as_it_was_written() -> None:
    found = read_invitation(write_invitation(HubAddress("192.0.2.1", 4711, others=("192.0.2.2",))), "it")
    assert found.hub == HubAddress("192.0.2.1", 4711, others=("192.0.2.2",))
    assert read_invitation(write_invitation(None), "it").hub is None


@pytest.mark.parametrize(
    "change",
    [
        {"hosts": None},
        {"hosts": "192.0.2.1"},
        {"hosts": [1]},
        {"hosts": ["192.0.2.1"] * 17},
        {"hosts": ["192.0.2.1"], "port": 0},
        {"hosts": ["192.0.2.1"], "port": 1 << 16},
        {"port": "4711"},
        {"job": 1},
        {"secret": None},
    ],
)
def test_what_is_no_invitation_is_refused(change: dict[str, object]) -> None:
    told = json.loads(write_invitation(None)) | change
    with pytest.raises(RendezvousError, match="what rank 0 has said is no invitation"):
        read_invitation(json.dumps(told).encode(), "what rank 0 has said")


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"\xff", b"{}"])
def test_other_texts_are_refused(text: bytes) -> None:
    with pytest.raises(RendezvousError, match="it is no invitation"):
        read_invitation(text, "it")


def test_a_rank_0_that_cannot_listen_tells_the_others() -> None:
    said: list[bytes] = []

    def listen() -> HubAddress:
        raise RendezvousError("rank 0: ENGINE_INTERFACE: there is no eth7")

    def exchange(text: bytes) -> bytes:
        said.append(text)
        return said[0]

    for rank in (0, 1):
        with pytest.raises(RendezvousError, match="ENGINE_INTERFACE: there is no eth7"):
            exchange_invitation(rank, None, listen, exchange, "it")


def test_an_invitation_that_does_not_arrive_leaves_no_socket() -> None:
    listener = socket.socket()
    descriptor = listener.detach()

    def fail(text: bytes) -> bytes:
        raise RendezvousError("rank 1 is late")

    with pytest.raises(RendezvousError, match="rank 1 is late"):
        exchange_invitation(0, None, lambda: HubAddress("192.0.2.1", 1, descriptor), fail, "it")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
