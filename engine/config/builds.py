"""Detection of newcomers that cannot work with the job: another build, or different settings that must be equal."""

from __future__ import annotations

from collections.abc import Mapping

Build = Mapping[str, str | int]
"""Values that must be equal on all ranks, by name; settings by the names of their variables."""


SOURCES = ("protocol", "layout", "sources")
"""Values that depend on the native engine's sources: two builds of one version may differ in them."""


class Builds:
    """Values that all members of a job share: those of the first world whose members have met."""

    def __init__(self) -> None:
        self._common: Build = {}

    def record_build(self, build: Build) -> None:
        """Record the build of a member that has met the others."""
        self._common = self._common or build

    def describe_difference(self, build: Build) -> str:
        """Return how a newcomer differs from the job, and how to fix it; empty if no difference is known."""
        return "; ".join(
            f"it has {name} {value}, the job has {self._common[name]}: "
            + ("set it alike" if name.isupper() else "install the same " + ("build" if name in SOURCES else "version"))
            for name, value in build.items()
            if value != self._common.get(name, value)
        )
