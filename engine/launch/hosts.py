"""Host specifications, `name:slots,name:slots` and files of hosts, and which ranks each host gets."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..bounded_reader import shorten
from .errors import LaunchError

MOST_SLOTS = 1 << 20  # of a host; more is a mistake in a file or a script
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_PART = re.compile(r"(?P<name>\[[^\]]+\]|[^:]+)(?::(?P<slots>[0-9]+))?")
_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_:][\w.:%-]*")


@dataclass(frozen=True)
class Place:
    """The ranks of one host.

    Attributes
    ----------
    name : str
        As the user gave it.
    ranks : tuple of int
        In ascending order.
    local : bool
        Whether it is this machine.
    """

    name: str
    ranks: tuple[int, ...]
    local: bool

    @property
    def address(self) -> str:
        """The name without a user's, as other hosts look it up."""
        return self.name.rpartition("@")[2]


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """Read `name:slots,name:slots`; a name without slots has one. An IPv6 address stands in brackets.

    Parameters
    ----------
    text : str
        What `--hosts` was given.

    Returns
    -------
    list of (str, int)
        Names and slots, in the order given; a name that is given twice has the slots of both.

    Raises
    ------
    LaunchError
        If a part is empty, its slots are not a positive integer, or its name is none.
    """
    hosts: dict[str, int] = {}
    for part in text.split(","):
        found = _part(part)
        if found is None:
            raise LaunchError(f"--hosts: {part!r} is not 'name:slots' with at least one slot, as in 'localhost:4'")
        name, slots = found
        if not _NAME.fullmatch(name):
            raise LaunchError(f"--hosts: {name!r} is no name or address of a host")
        hosts[name] = hosts.get(name, 0) + slots
    return list(hosts.items())


def _part(text: str) -> tuple[str, int] | None:
    """Name and slots of `name:slots`; None if it is not of that form. Whether the name can be one is not looked at."""
    found = _PART.fullmatch(text.strip())
    slots = _count(found["slots"] or "1") if found else 0
    return None if found is None or not 1 <= slots <= MOST_SLOTS else (found["name"].strip("[]"), slots)


def _count(digits: str) -> int:
    """Read a number of slots; whatever is beyond `MOST_SLOTS` reads as one more, however many digits it has."""
    significant = digits.lstrip("0")
    return min(int(significant or "0"), MOST_SLOTS + 1) if len(significant) < 10 else MOST_SLOTS + 1


def read_hostfile(text: str) -> list[tuple[str, int]]:
    """Read a host file.

    Parameters
    ----------
    text : str
        The file's content: lines of `name slots=N`, as Horovod and Open MPI write them, or of `name:N`; a name without
        slots has one. `#` begins a comment. What Open MPI has beside the slots, such as `max_slots=8`, is passed over.

    Returns
    -------
    list of (str, int)
        As of `parse_hosts`.

    Raises
    ------
    LaunchError
        A line that is neither.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        told = line.partition("#")[0].strip()
        fields = re.sub(r"\s*=\s*", "=", told).split()
        if not fields:
            continue
        settings = dict(field.partition("=")[::2] for field in fields[1:])
        name = f"[{fields[0]}]" if fields[0].count(":") > 1 and not fields[0].startswith("[") else fields[0]
        found = _part(f"{name}:{settings['slots']}" if "slots" in settings else name)
        known = set(settings) <= {"slots", "max_slots", "max-slots"}
        if found is None or not known or not _NAME.fullmatch(found[0]):
            shown = shorten(told, 200)
            raise LaunchError(
                f"--hostfile: line {number} is {shown!r}, and 'name slots=N' with at least one slot is expected"
            )
        hosts[found[0]] = hosts.get(found[0], 0) + found[1]
    return list(hosts.items())


def read_discovered(text: str, slots: int) -> dict[str, int]:
    """Read what a discovery script has printed: lines of `name:slots`, or of `name`. The order means nothing.

    Parameters
    ----------
    text : str
    slots : int
        Of a host that is named without.

    Returns
    -------
    dict of str to int
        Slots by host; of a host that is named twice, the slots of both.

    Raises
    ------
    ValueError
        A line that is neither.
    """
    hosts: dict[str, int] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        found = _PART.fullmatch(line.strip())
        name = found["name"].strip("[]") if found else ""
        if found is None or not _NAME.fullmatch(name):
            raise ValueError(f"it printed {line.strip()[:200]!r}, and 'name:slots' or 'name' is expected in each line")
        hosts[name] = hosts.get(name, 0) + (
            slots if found["slots"] is None else min(_count(found["slots"]), MOST_SLOTS)
        )
    return hosts


def is_here(name: str, names: Collection[str]) -> bool:
    """Tell whether a host is this machine, without asking a name server.

    Parameters
    ----------
    name : str
        A name or an address.
    names : collection of str
        Names of this machine besides the loopback's.

    Returns
    -------
    bool
        Of an address, whether one of this machine's interfaces has it.
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
    """Return a host's name as name servers compare it: case and a final dot mean nothing."""
    return name.lower().removesuffix(".")


def own_names() -> set[str]:
    """The names of this machine, with and without its domain."""
    names = {socket.gethostname(), socket.getfqdn()}
    return names | {name.partition(".")[0] for name in names}


def lay_out(hosts: Sequence[tuple[str, int]], size: int, names: Collection[str] | None) -> list[Place]:
    """Give ranks to hosts, in order: each is filled before the next.

    Parameters
    ----------
    hosts : sequence of (str, int)
        Names and slots, with as many slots as ranks or more.
    size : int
        Number of ranks.
    names : collection of str or None
        Names of this machine besides the loopback's; None: no name is this machine's, not even the loopback's.

    Returns
    -------
    list of Place
        Those that get ranks. All names of this machine are one host, and stand where the first of them does.
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
    return [Place(name, tuple(numbers), name == here) for name, numbers in ranks.items()]


def without_ranks(hosts: Sequence[tuple[str, int]], size: int, names: Collection[str] | None) -> tuple[str, ...]:
    """The hosts to which `lay_out` gives no rank. Parameters as there."""
    having = {place.name for place in lay_out(hosts, size, names)}
    every = lay_out([(name, 1) for name, _ in hosts], len(hosts), names)
    return tuple(place.name for place in every if place.name not in having)


def told_idle(idle: Sequence[str], size: int) -> list[str]:
    """The line on hosts that get no rank; none if there are no such hosts."""
    if not idle:
        return []
    ranks = "the rank" if size == 1 else f"all {size} ranks"
    return [f"no rank runs on {', '.join(idle)}: the other hosts have slots for {ranks}"]
