"""What a cluster does for an elastic job that has its own means to tell hosts and to start processes on them."""

from __future__ import annotations

from typing import Protocol

from ..elastic.places import Slot
from .discovery import Discovery
from .remote import RemoteHost


class Cluster(Protocol):
    """Takes the place of `-H`, a script and ssh.

    Attributes
    ----------
    discovery : Discovery
        Its hosts are named `NAME@ADDRESS`: by that address other hosts reach one.
    """

    @property
    def discovery(self) -> Discovery: ...

    def agent(self, number: int, host: str) -> RemoteHost:
        """The launcher's end of an agent of a host, which has not been started."""
        ...

    def variables(self, slot: Slot) -> dict[str, str]:
        """Variables of a worker in a slot, such as the GPUs that are set aside for it."""
        ...

    def logged(self, value: str) -> None:
        """Take what a program has logged."""
        ...
