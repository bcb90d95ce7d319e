"""Host specifications, `name:slots,name:slots`. So far all ranks run on this host."""

from __future__ import annotations

from collections.abc import Collection

from .errors import LaunchError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def parse_hosts(text: str) -> list[tuple[str, int]]:
    """Read `name:slots,name:slots`; a name without slots has one.

    Parameters
    ----------
    text : str
        What `--hosts` was given.

    Returns
    -------
    list of (str, int)
        Names and slots, in the order given.

    Raises
    ------
    LaunchError
        If a part is empty or its slots are not a positive integer.
    """
    hosts = []
    for part in text.split(","):
        name, colon, slots = part.strip().rpartition(":")
        if not colon:
            name, slots = slots, "1"
        if not name or not slots.isdecimal() or int(slots) < 1:
            raise LaunchError(f"--hosts: {part!r} is not 'name:slots' with at least one slot, as in 'localhost:4'")
        hosts.append((name, int(slots)))
    return hosts


def read_hostfile(text: str) -> str:
    """Turn a host file, lines of `name slots=N`, into what `--hosts` takes.

    Parameters
    ----------
    text : str
        The file's content; `#` begins a comment.

    Returns
    -------
    str
        `name:slots,name:slots`.
    """
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return ",".join(
        ":".join([fields[0], *(field.removeprefix("slots=") for field in fields[1:])]) for fields in lines if fields
    )


def slots_here(text: str, names: Collection[str]) -> int:
    """Count the slots of `--hosts` when all of them are on this host.

    Parameters
    ----------
    text : str
        What `--hosts` was given.
    names : collection of str
        Names of this host besides the loopback's.

    Returns
    -------
    int
        Slots in all.

    Raises
    ------
    LaunchError
        If a host is another machine.
    """
    hosts = parse_hosts(text)
    for name, _ in hosts:
        if name not in LOOPBACK and name not in names:
            raise LaunchError(
                f"--hosts: {name!r} is another host, and ranks can only be started on this one: leave it out"
            )
    return sum(slots for _, slots in hosts)
