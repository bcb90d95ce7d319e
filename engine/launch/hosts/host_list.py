"""Host specifications (`name:slots,name:slots`, host files) and the assignment of ranks to hosts."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ...text.bounded_reader import parse_natural, shorten_text
from ..errors import LaunchError

MOST_SLOTS = 1 << 20  # most slots of a host; more is a mistake in a file or a script
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_PART = re.compile(r"(?P<name>\[[^\]]+\]|[^:]+)(?::(?P<slots>[0-9]+))?")
_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_:][\w.:%-]*")


@dataclass(frozen=True)
class HostRanks:
    """The ranks of one host."""

    name: str  # name as the user gave it
    ranks: tuple[int, ...]  # ascending
    local: bool  # whether it is this machine

    @property
    def address(self) -> str:
        """Name without the user (`user@`), which other hosts can resolve."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """Parse `name:slots,name:slots`; a name without slots has one. IPv6 addresses are in brackets.

    Names and slots are in the order given; the slots of a name that is given twice are added. A `LaunchError` is raised
    if a part is empty, its slots are not a positive integer, or its name is invalid.
    """
    hosts: dict[str, int] = {}
    for part in text.split(","):
        found = _parse_part(part)
        if found is None:
            raise LaunchError(f"--hosts: {part!r} is not 'name:slots' with at least one slot, as in 'localhost:4'")
        name, slots = found
        if not _NAME.fullmatch(name):
            raise LaunchError(f"--hosts: {name!r} is no name or address of a host")
        hosts[name] = hosts.get(name, 0) + slots
    return list(hosts.items())


def _parse_part(text: str) -> tuple[str, int] | None:
    """Parse `name:slots`; return None if the text has another form. The name itself is not validated."""
    found = _PART.fullmatch(text.strip())
    slots = parse_natural(found["slots"] or "1", MOST_SLOTS) if found else None
    return (found["name"].strip("[]"), slots) if found and slots else None


def read_hostfile(text: str) -> list[tuple[str, int]]:
    """Parse the content of a host file; its result is that of `parse_hosts`.

    Lines are `name slots=N`, as in Horovod and Open MPI, or `name:N`; a name without slots has one. `#` begins a
    comment. Open MPI's `max_slots=8` is ignored. A `LaunchError` is raised if a line has another form.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        told = line.partition("#")[0].strip()
        fields = re.sub(r"\s*=\s*", "=", told).split()
        if not fields:
            continue
        settings = dict(field.partition("=")[::2] for field in fields[1:])
        name = f"[{fields[0]}]" if fields[0].count(":") > 1 and not fields[0].startswith("[") else fields[0]
        found = _parse_part(f"{name}:{settings['slots']}" if "slots" in settings else name)
        known = set(settings) <= {"slots", "max_slots", "max-slots"}
        if found is None or not known or not _NAME.fullmatch(found[0]):
            shown = shorten_text(told, 200)
            raise LaunchError(
                f"--hostfile: line {number} is {shown!r}, and 'name slots=N' with at least one slot is expected"
            )
        hosts[found[0]] = hosts.get(found[0], 0) + found[1]
    return list(hosts.items())


def read_discovered(text: str, slots: int) -> dict[str, int]:
    """Parse the output of a discovery script: lines of `name:slots` or `name`, in any order.

    A host that is named without a number has `slots` slots; those of a host that is named twice are added. A
    `ValueError` is raised if a line has another form.
    """
    hosts: dict[str, int] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        found = _PART.fullmatch(line.strip())
        name = found["name"].strip("[]") if found else ""
        if found is None or not _NAME.fullmatch(name):
            raise ValueError(f"it printed {line.strip()[:200]!r}, and 'name:slots' or 'name' is expected in each line")
        told = slots if found["slots"] is None else parse_natural(found["slots"], MOST_SLOTS)
        hosts[name] = hosts.get(name, 0) + (MOST_SLOTS if told is None else told)
    return hosts


def is_here(name: str, names: Collection[str]) -> bool:
    """Return whether a host is this machine, without asking a name server.

    `name` is a name, or an address, which an interface of this machine must have. `names` are this machine's, besides
    the loopback's.
    """
    plain = plain_name(name)
    if plain in LOOPBACK or plain in map(plain_name, names):
        return True
    try:
        version = ipaddress.ip_address(name).version
    except ValueError:
        return False
    with socket.socket(socket.AF_INET if version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((name, 0))
        except OSError:
            return False
    return True


def plain_name(name: str) -> str:
    """Return a host's name in lower case and without a final dot, for comparison."""
    return name.lower().removesuffix(".")


def own_names() -> set[str]:
    """Return the names of this machine, with and without its domain."""
    names = {socket.gethostname(), socket.getfqdn()}
    return names | {name.partition(".")[0] for name in names}


def lay_out(hosts: Sequence[tuple[str, int]], size: int, names: Collection[str] | None) -> list[HostRanks]:
    """Assign ranks to hosts in order, each host filled before the next; return the hosts that get ranks.

    `hosts` are names and slots, with at least `size` slots, the number of ranks. `names` are those of this machine
    besides the loopback's; None: no host counts as this machine, not even the loopback. All names of this machine are
    one host, at the position of the first of them.
    """
    ranks: dict[str, list[int]] = {}
    here = None
    first = 0
    for name, slots in hosts:
        local = names is not None and is_here(name, names)
        if local:
            here = name if here is None else here
        known = here if local and here is not None else name
        given = range(first, min(first + slots, size))
        if given:
            ranks.setdefault(known, []).extend(given)
        first += slots
    return [HostRanks(name, tuple(numbers), name == here) for name, numbers in ranks.items()]


def without_ranks(hosts: Sequence[tuple[str, int]], size: int, names: Collection[str] | None) -> tuple[str, ...]:
    """Return the hosts to which `lay_out` assigns no rank; it has the same parameters."""
    having = {place.name for place in lay_out(hosts, size, names)}
    every = lay_out([(name, 1) for name, _ in hosts], len(hosts), names)
    return tuple(place.name for place in every if place.name not in having)


def told_idle(idle: Sequence[str], size: int) -> list[str]:
    """Return a line on hosts that get no rank; empty if there are no such hosts."""
    if not idle:
        return []
    ranks = "the rank" if size == 1 else f"all {size} ranks"
    return [f"no rank runs on {', '.join(idle)}: the other hosts have slots for {ranks}"]


def reachable_address(place: HostRanks, own_addresses: Iterable[str | None]) -> str | None:
    """Return the name or address by which other hosts reach one; None if no address is known.

    `own_addresses` are those of this machine as other hosts see it, for a host that is named as `localhost`.
    """
    if not place.local or place.address not in LOOPBACK:
        return place.address
    return next(filter(None, own_addresses), None)
