"""Contenders between hosts: the engine, also with other settings, gloo, Open MPI and bare sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.collective.contenders import LAUNCHERS, GroupContender
from benchmarks.common import binding
from benchmarks.common.processes import Group, Launcher
from benchmarks.hosts.places import HostPlaces

PEERS = ("gloo", "mpi", "sockets")
NAMES = ("engine", *PEERS)
_SHARED = 4096  # bytes that the engine's backend shares, which are not used here


@dataclass(frozen=True)
class ContenderVariant:
    """Contender: its backend, environment variables that modify it, and the launcher of its ranks."""

    name: str
    backend: str
    variables: Mapping[str, str] = field(default_factory=dict)
    launcher: Launcher | None = None
    """Launcher of the ranks; None: that of the backend."""

    @classmethod
    def parse(cls, text: str) -> ContenderVariant:
        """Parse an engine with other settings, `NAME:VARIABLE=VALUE,...`; raise ValueError if it is invalid.

        For `NAME@mpirun`, mpirun starts its ranks.

        >>> ContenderVariant.parse("small:ENGINE_CHUNK_BYTES=65536").variables
        {'ENGINE_CHUNK_BYTES': '65536'}
        """
        names, _, given = text.partition(":")
        name, at, launcher = names.partition("@")
        pairs = [pair.partition("=") for pair in given.split(",")]
        if not name or name in NAMES or not all(variable and equals for variable, equals, _ in pairs):
            raise ValueError(f"{text!r} is not NAME:VARIABLE=VALUE,... with a new name")
        if at and launcher != "mpirun":
            raise ValueError(f"{text!r}: ranks are started by mpirun, or by nothing that is named, not by {launcher!r}")
        return cls(name, "engine", {variable: value for variable, _, value in pairs}, "mpi" if at else None)


class HostContender(GroupContender):
    """Contender with its ranks on hosts."""

    def __init__(self, variant: ContenderVariant, places: HostPlaces, cases: Sequence[str] = ("private",)) -> None:
        self.name, self.cases = variant.name, tuple(cases)
        crowd = str(places.ranks)
        arguments = ["--contender", variant.backend, "--largest", str(_SHARED), "--crowd", crowd]
        self.group = Group(
            f"hosts-{variant.name}",
            places.ranks,
            "benchmarks.collective.worker",
            arguments,
            variant.launcher or LAUNCHERS[variant.backend],
            binding.list_processors(),
            variant.variables,
            places,
        )
