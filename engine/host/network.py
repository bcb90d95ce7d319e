"""Addresses of this host and of others: names, interfaces, listening sockets."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import NamedTuple

_NO_PORT = 9  # port for looking up a route to a host; nothing is sent
_SIOCGIFADDR = 0x8915  # ioctl of an interface's IPv4 address (netdevice(7))


class Address(NamedTuple):
    """Address of a TCP socket: a numeric host address and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def resolve(host: str, port: int) -> list[Address]:
    """Resolve a host's name or address to its addresses, loopback addresses last; OSError if the name is unknown.

    A machine's own name often resolves to 127.0.1.1 through its /etc/hosts, beside an address that others can use.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(address_of(entry[4]) for entry in found)
    return sorted(addresses, key=lambda address: is_loopback(address.host))


def address_of(name: tuple[object, ...]) -> Address:
    """Convert a result of `getsockname`, `getpeername` or `getaddrinfo`; an IPv4-mapped IPv6 address becomes IPv4."""
    host, port = str(name[0]), int(str(name[1]))
    mapped = ipaddress.ip_address(host).version == 6 and ipaddress.IPv6Address(host).ipv4_mapped
    return Address(str(mapped) if mapped else host, port)


def read_address(told: object) -> Address:
    """Parse an address sent by a peer, a list of its numeric host address and its port; ValueError if it is none."""
    if not isinstance(told, list) or len(told) != 2 or type(told[1]) is not int or not 0 < told[1] < 1 << 16:
        raise ValueError("no address")
    return Address(str(ipaddress.ip_address(str(told[0]))), told[1])


def is_loopback(host: str) -> bool:
    """Return whether a numeric address is a loopback address."""
    return ipaddress.ip_address(host).is_loopback


def get_address_family(host: str) -> socket.AddressFamily:
    """Return the family of a numeric address."""
    return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET


def interface_address(wanted: str) -> str:
    """Return the numeric address of an interface, such as `eth0`, or check an address of this host.

    An interface's IPv4 address precedes its IPv6 addresses. Link-local ones are ignored, because they mean nothing on
    other hosts. If there is no such interface or address, the text of the ValueError lists those of this host.
    """
    try:
        host = str(ipaddress.ip_address(wanted))
    except ValueError:
        return _address_of_interface(wanted)
    with socket.socket(get_address_family(host), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ValueError(
                f"this host has no address {wanted} ({error.strerror}); it has {_format_interfaces()}"
            ) from None
    return host


def own_address(other: str) -> str | None:
    """Return the numeric address under which another host, given by name or address, would see this one.

    It is None if the name is unknown here, there is no route to it, or the route is the loopback.
    """
    try:
        known = resolve(other, _NO_PORT)
    except (OSError, UnicodeError):
        return None
    for address in known:
        with socket.socket(get_address_family(address.host), socket.SOCK_DGRAM) as probe:  # nothing is sent
            try:
                probe.connect(address)
            except OSError:
                continue
            own = address_of(probe.getsockname()).host
            if not is_loopback(own):
                return own
    return None


def own_addresses() -> list[str]:
    """Return the numeric addresses of this host's interfaces without loopback: IPv4 first, then IPv6."""
    found = [
        address for _, name in socket.if_nameindex() for address in _list_addresses(name) if not is_loopback(address)
    ]
    return sorted(found, key=lambda address: ":" in address)


def is_own_name(host: str) -> bool:
    """Return whether a name or address is this host's, as far as this host's name resolution knows."""
    try:
        found = {address.host for address in resolve(host, _NO_PORT)}
    except (OSError, UnicodeError):
        return False
    own = own_addresses()
    return any(is_loopback(address) or address in own for address in found)


def _address_of_interface(name: str) -> str:
    if addresses := _list_addresses(name):
        return addresses[0]
    known = name in [each for _, each in socket.if_nameindex()]
    lack = f"interface {name} has no address" if known else f"this host has no interface {name}"
    raise ValueError(f"{lack}; it has {_format_interfaces()}")


def _format_interfaces() -> str:
    """Format this host's interfaces that have addresses, each with its first address."""
    known = {name: _list_addresses(name) for _, name in socket.if_nameindex()}
    return ", ".join(f"{name} ({addresses[0]})" for name, addresses in known.items() if addresses) or "none"


def _list_addresses(name: str) -> list[str]:
    """Return the addresses of an interface: IPv4 first, then IPv6."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            found.append(socket.inet_ntoa(answer[20:24]))
        except OSError as error:
            if error.errno not in (errno.ENODEV, errno.EADDRNOTAVAIL):
                raise
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except FileNotFoundError:  # IPv6 is switched off.
        lines = []
    for line in lines:
        digits, *_, interface = line.split()
        address = ipaddress.IPv6Address(bytes.fromhex(digits))
        if interface == name and not address.is_link_local:
            found.append(str(address))
    return found


def keep_watch(connection: socket.socket, silence: int) -> None:
    """Let the kernel end an idle connection whose other side has not answered for `silence` seconds.

    The other side's kernel answers, whatever its process does. A busy connection is not watched: TCP_USER_TIMEOUT would
    also end one whose receiving process is merely stopped.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, silence)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def listen(host: str | None, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens on a TCP port: non-blocking, closed on exec.

    `host` is numeric; None: all addresses of this host, IPv4 and IPv6. Port 0 is any free one. An OSError says that the
    port is taken or the address is not this host's.
    """
    if host is not None:
        kind = get_address_family(host)
    else:
        host, kind = ("::", socket.AF_INET6) if socket.has_dualstack_ipv6() else ("0.0.0.0", socket.AF_INET)
    listener = socket.socket(kind, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        listener.listen(backlog)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
