"""Interface of a cluster that discovers the hosts of an elastic job and starts processes on them by its own means."""

from __future__ import annotations

from typing import Protocol

from ...elastic.places import Slot
from ..hosts.remote import RemoteHost
from .discovery import Discovery


class ClusterBackend(Protocol):
    """Replacement of `-H`, the discovery script and ssh."""

    @property
    def discovery(self) -> Discovery: ...  # names hosts `NAME@ADDRESS`; other hosts reach a host at that address

    def make_agent(self, number: int, host: str) -> RemoteHost:
        """Return the launcher's end of a host's agent, which has not been started."""
        ...

    def list_variables(self, slot: Slot) -> dict[str, str]:
        """Return environment variables of a worker in a slot, such as the GPUs reserved for it."""
        ...

    def take_logged_value(self, value: str) -> None:
        """Take a value that the program has logged."""
        ...
