"""Addresses of this host and of others: names, interfaces, listening sockets."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import NamedTuple

_NO_PORT = 9  # where a way to a host is asked for, and nothing sent
_SIOCGIFADDR = 0x8915  # ioctl of an interface's IPv4 address (netdevice(7))


class Address(NamedTuple):
    """Where a TCP socket is reached: an address in numbers, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def resolve(host: str, port: int) -> list[Address]:
    """The addresses of a host, by name or in numbers, those on the loopback last.

    A machine's own name often stands for 127.0.1.1 in its /etc/hosts, beside an address that others can use.

    Parameters
    ----------
    host : str
    port : int

    Returns
    -------
    list of Address

    Raises
    ------
    OSError
        The name is not known.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(address_of(entry[4]) for entry in found)
    return sorted(addresses, key=lambda address: is_loopback(address.host))


def address_of(name: tuple[object, ...]) -> Address:
    """What `getsockname`, `getpeername` or `getaddrinfo` tell; an IPv4 address in IPv6's clothes as what it is."""
    host, port = str(name[0]), int(str(name[1]))
    mapped = ipaddress.ip_address(host).version == 6 and ipaddress.IPv6Address(host).ipv4_mapped
    return Address(str(mapped) if mapped else host, port)


def read_address(told: object) -> Address:
    """An address that a peer tells, as a list of its host in numbers and its port.

    Raises
    ------
    ValueError
        It is none.
    """
    if not isinstance(told, list) or len(told) != 2 or type(told[1]) is not int or not 0 < told[1] < 1 << 16:
        raise ValueError("no address")
    return Address(str(ipaddress.ip_address(str(told[0]))), told[1])


def is_loopback(host: str) -> bool:
    """Whether an address in numbers never leaves its host."""
    return ipaddress.ip_address(host).is_loopback


def family(host: str) -> socket.AddressFamily:
    """The family of an address in numbers."""
    return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET


def interface_address(wanted: str) -> str:
    """The address of an interface of this host.

    Parameters
    ----------
    wanted : str
        The interface's name, such as `eth0`, or an address of this host.

    Returns
    -------
    str
        In numbers. An interface's IPv4 address comes before its IPv6 addresses, of which link-local ones do not count,
        since they mean nothing elsewhere.

    Raises
    ------
    ValueError
        This host has no such interface or address; the text says what it has.
    """
    try:
        host = str(ipaddress.ip_address(wanted))
    except ValueError:
        return _address_of_interface(wanted)
    with socket.socket(family(host), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ValueError(f"this host has no address {wanted} ({error.strerror}); it has {_interfaces()}") from None
    return host


def own_address(other: str) -> str | None:
    """The address under which another host would see this one.

    Parameters
    ----------
    other : str
        Its name or address.

    Returns
    -------
    str or None
        In numbers. None if the name is not known here, there is no way to it, or the way is the loopback.
    """
    try:
        known = resolve(other, _NO_PORT)
    except (OSError, UnicodeError):
        return None
    for address in known:
        with socket.socket(family(address.host), socket.SOCK_DGRAM) as probe:  # nothing is sent
            try:
                probe.connect(address)
            except OSError:
                continue
            own = address_of(probe.getsockname()).host
            if not is_loopback(own):
                return own
    return None


def own_addresses() -> list[str]:
    """The addresses of this host's interfaces, in numbers: IPv4's, then IPv6's, and none of the loopback."""
    found = [address for _, name in socket.if_nameindex() for address in _addresses(name) if not is_loopback(address)]
    return sorted(found, key=lambda address: ":" in address)


def is_own_name(host: str) -> bool:
    """Whether a name or address is this host's, as far as whatever resolves names here knows."""
    try:
        found = {address.host for address in resolve(host, _NO_PORT)}
    except (OSError, UnicodeError):
        return False
    own = own_addresses()
    return any(is_loopback(address) or address in own for address in found)


def _address_of_interface(name: str) -> str:
    if addresses := _addresses(name):
        return addresses[0]
    known = name in [each for _, each in socket.if_nameindex()]
    lack = f"interface {name} has no address" if known else f"this host has no interface {name}"
    raise ValueError(f"{lack}; it has {_interfaces()}")


def _interfaces() -> str:
    """This host's interfaces that have addresses, with the first of each."""
    known = {name: _addresses(name) for _, name in socket.if_nameindex()}
    return ", ".join(f"{name} ({addresses[0]})" for name, addresses in known.items() if addresses) or "none"


def _addresses(name: str) -> list[str]:
    """The addresses of an interface: IPv4's, then IPv6's."""
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
    """Have the kernel end an idle connection whose other side has not answered for so many seconds.

    The other side's kernel answers, whatever its process does. A busy connection is not watched: TCP_USER_TIMEOUT would
    also end one whose other side takes nothing, because its process is stopped.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, silence)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def listen(host: str | None, port: int, backlog: int) -> socket.socket:
    """Listen on a TCP port.

    Parameters
    ----------
    host : str or None
        An address in numbers; None: all of this host's, IPv4's and IPv6's.
    port : int
        0: any that is free.
    backlog : int
        Connections that may wait to be accepted.

    Returns
    -------
    socket.socket
        Non-blocking, and close-on-exec.

    Raises
    ------
    OSError
        The port is taken, or the address is not this host's.
    """
    if host is not None:
        kind = family(host)
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
