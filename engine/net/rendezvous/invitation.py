"""Invitation of rank 0 to ranks on other hosts, where the launcher told them neither a secret nor an address.

It travels by whatever reaches all ranks already: MPI, or torch's store.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from ...config.forms import MOST_PORTS
from ...config.hub_address import HubAddress
from ...errors import RendezvousError
from ...host import network
from ...text.bounded_reader import get_text, get_whole, parse_json
from ..frames import MALFORMED

ADDRESSES = 16  # most addresses of rank 0's host that are sent


@dataclass(frozen=True)
class Invitation:
    """Key, secret and address by which ranks meet."""

    job: str  # key of the job, drawn anew
    secret: str
    hub: HubAddress | None  # address of rank 0; None on one host


def write_invitation(hub: HubAddress | None) -> bytes:
    """Return a new invitation to an address of rank 0, with a key and a secret that nobody else knows."""
    hosts, port = ((), 0) if hub is None else ((hub.host, *hub.others), hub.port)
    told = {"job": secrets.token_hex(8), "secret": secrets.token_hex(32), "hosts": hosts, "port": port}
    return json.dumps(told).encode()


def read_invitation(text: bytes, origin: str) -> Invitation:
    """Read an invitation; `origin` says where the text is from, in errors.

    It raises a RendezvousError if the text is no invitation, or says why there is none.
    """
    try:
        found = parse_json(text)
        if "failure" in found:
            raise RendezvousError(get_text(found, "failure"))
        hosts, job, secret = found["hosts"], get_text(found, "job"), get_text(found, "secret")
        if type(hosts) is not list or len(hosts) > ADDRESSES or any(type(host) is not str for host in hosts):
            raise ValueError("its hosts are no list of addresses")
        port = get_whole(found, "port", 1 if hosts else 0, MOST_PORTS)
    except MALFORMED as error:
        raise RendezvousError(f"{origin} is no invitation to its world: {error}") from None
    return Invitation(job, secret, HubAddress(hosts[0], port, others=tuple(hosts[1:])) if hosts else None)


def exchange_invitation(
    rank: int,
    hub: HubAddress | None,
    listen: Callable[[], HubAddress] | None,
    exchange: Callable[[bytes], bytes],
    origin: str,
) -> Invitation:
    """Return rank 0's invitation on all ranks. Collective.

    `hub` is the address that this rank knows already. Without one, `listen` opens rank 0's listening socket; both are
    None if all ranks are on one host. `exchange` takes what rank 0 has said, and returns it on all ranks. `origin`
    describes the text in errors. If rank 0 cannot listen, which all ranks are told, or if its invitation does not
    arrive, a RendezvousError is raised.
    """
    said, opened = b"", None
    if rank == 0:
        try:
            if hub is None and listen is not None:
                hub = opened = listen()
            said = write_invitation(hub)
        except RendezvousError as error:
            said = json.dumps({"failure": str(error)}).encode()
    try:
        found = read_invitation(exchange(said), origin)
    except BaseException:
        if opened is not None and opened.descriptor is not None:
            os.close(opened.descriptor)
        raise
    return found if hub is None else replace(found, hub=hub)


def open_hub(rank: int, interface: str | None) -> HubAddress:
    """Open rank 0's listening socket, and return its port and addresses.

    `interface` is an interface or an address of this host; None: all of them.
    """
    try:
        chosen = None if interface is None else network.interface_address(interface)
        with network.listen(chosen, 0, backlog=256) as listener:
            port = listener.getsockname()[1]
            addresses = network.own_addresses()[:ADDRESSES] if chosen is None else [chosen]
            if not addresses:
                raise ValueError("this host has no address that others could reach")
            return HubAddress(addresses[0], port, listener.detach(), tuple(addresses[1:]))
    except ValueError as error:
        raise RendezvousError(f"rank {rank}: ENGINE_INTERFACE: {error}") from None
    except OSError as error:
        raise RendezvousError(f"rank {rank} can open no socket for the other hosts: {error.strerror}") from None
