"""Invitation of rank 0 to ranks on other hosts, where the launcher told them neither a secret nor an address.

It travels by whatever reaches all ranks already: MPI, or torch's store.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

from ...config.forms import MOST_PORTS
from ...config.hub_address import HubAddress
from ...errors import RendezvousError
from ...host import network
from ...text.bounded_reader import get_text, get_whole, parse_json

ADDRESSES = 16  # most addresses of rank 0's host that are sent


@dataclass(frozen=True)
class Invitation:
    """Key, secret and address by which ranks meet.

    Attributes
    ----------
    job : str
        Key of the job, drawn anew.
    secret : str
    hub : HubAddress or None
        Address of rank 0; None on one host.
    """

    job: str
    secret: str
    hub: HubAddress | None


def write_invitation(hub: HubAddress | None) -> bytes:
    """Return a new invitation to an address of rank 0, with a key and a secret that nobody else knows."""
    hosts, port = ((), 0) if hub is None else ((hub.host, *hub.others), hub.port)
    told = {"job": secrets.token_hex(8), "secret": secrets.token_hex(32), "hosts": hosts, "port": port}
    return json.dumps(told).encode()


def read_invitation(text: bytes, origin: str) -> Invitation:
    """Read an invitation; `origin` says where the text is from, in errors."""
    found = parse_json(text, origin)
    hosts, port = [str(host) for host in found["hosts"]], get_whole(found, "port", 0, MOST_PORTS)
    hub = HubAddress(hosts[0], port, others=tuple(hosts[1:])) if hosts else None
    return Invitation(get_text(found, "job"), get_text(found, "secret"), hub)


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
