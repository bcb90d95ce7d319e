"""Names, interfaces and listening sockets of this host."""

from __future__ import annotations

import socket

import pytest

from engine.host import network


def test_an_interface_or_an_address_of_this_host_is_found() -> None:
    assert network.interface_address("lo") == "127.0.0.1"
    assert network.interface_address("127.0.0.1") == "127.0.0.1"
    assert network.interface_address("::1") == "::1"


@pytest.mark.parametrize("wanted", ["nosuch0", "192.0.2.1", "an-interface-with-a-very-long-name-indeed"])
def test_what_this_host_has_not_is_refused_with_what_it_has(wanted: str) -> None:
    with pytest.raises(ValueError, match=r"this host has no .*it has .*lo \(127\.0\.0\.1\)"):
        network.interface_address(wanted)


def test_addresses_of_the_loopback_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 5)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 5, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 5)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 5)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert [address.host for address in network.resolve("node1", 5)] == ["10.0.0.1", "127.0.1.1", "::1"]


def test_an_ipv4_address_in_ipv6_is_what_it_is() -> None:
    assert network.address_of(("::ffff:10.0.0.1", 5, 0, 0)) == ("10.0.0.1", 5)
    assert network.address_of(("fe80::1%eth0", 5, 0, 2)) == ("fe80::1%eth0", 5)
    assert str(network.address_of(("10.0.0.1", 5))) == "10.0.0.1:5"
    assert str(network.address_of(("fd00::1", 5, 0, 0))) == "[fd00::1]:5"


def test_a_port_is_open_on_all_addresses_or_on_one() -> None:
    with network.listen(None, 0, 1) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.1",):
            socket.create_connection((host, port), 5).close()
    with network.listen("127.0.0.1", 0, 1) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert not listener.getblocking()
        with pytest.raises(OSError, match="in use"):
            network.listen("127.0.0.1", listener.getsockname()[1], 1)
