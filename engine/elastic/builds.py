"""Which newcomers cannot work with the others of a job: those of another build, or with settings that must be equal."""

from __future__ import annotations

from collections.abc import Mapping

Build = Mapping[str, str | int]
"""What ranks must have in common, by name; settings under the names of their variables."""


SOURCES = ("protocol", "layout", "sources")
"""What two builds of one version may differ in: those of the native engine's sources."""


class Builds:
    """What the members of a job have in common: that of the first world whose members have met."""

    def __init__(self) -> None:
        self._common: Build = {}

    def met(self, build: Build) -> None:
        """Note the build of a member that has met the others."""
        self._common = self._common or build

    def differs(self, build: Build) -> str:
        """In what a newcomer differs from the job, and what mends it; empty if nothing is known to differ."""
        return "; ".join(
            f"it has {name} {value}, the job has {self._common[name]}: "
            + ("set it alike" if name.isupper() else "install the same " + ("build" if name in SOURCES else "version"))
            for name, value in build.items()
            if value != self._common.get(name, value)
        )
