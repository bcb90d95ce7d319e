"""Wheels that a release has: one for each supported Python and each machine."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.14t", "3.15")
OTHER_PYTHONS = ("3.13t",)
"""Pythons whose wheels are built for trials alone, when asked for by name: CPython calls this one experimental."""
MACHINES = ("x86_64", "aarch64")
GLIBC = (2, 28)
"""Oldest C library on which the wheels run: Debian 10, RHEL 8, Ubuntu 18.10."""


@dataclass(frozen=True)
class Target:
    """One wheel."""

    python: str  # version of CPython as "3.14"; "3.14t" is the free-threaded build
    machine: str  # processor as `uname -m` prints it

    @property
    def version(self) -> str:
        """Version of CPython without the letter of the build: "3.14"."""
        return self.python.removesuffix("t")

    @property
    def free_threaded(self) -> bool:
        """True for the build of CPython that can run without a GIL."""
        return self.python.endswith("t")

    @property
    def abi(self) -> str:
        """ABI tag: "cp314" or "cp314t"."""
        return "cp" + self.python.replace(".", "")

    @property
    def suffix(self) -> str:
        """End of an extension module's file name."""
        return f".cpython-{self.abi.removeprefix('cp')}-{self.machine}-linux-gnu.so"

    @property
    def platform(self) -> str:
        """Platform tag: "manylinux_2_28_x86_64"."""
        return "manylinux_{}_{}_{}".format(*GLIBC, self.machine)

    @property
    def tag(self) -> str:
        """Compatibility tag of the wheel."""
        return f"cp{self.version.replace('.', '')}-{self.abi}-{self.platform}"

    @property
    def name(self) -> str:
        """Name on the command line: "cp314t-aarch64"."""
        return f"{self.abi}-{self.machine}"


def _list_targets(pythons: tuple[str, ...]) -> dict[str, Target]:
    targets = [Target(python, machine) for machine in MACHINES for python in pythons]
    return {target.name: target for target in targets}


TARGETS = _list_targets(PYTHONS)
OTHER_TARGETS = _list_targets(OTHER_PYTHONS)


def add_names(parser: argparse.ArgumentParser) -> None:
    """Add the names of wheels to the arguments of a command; they are read as `names`."""
    parser.add_argument(
        "names", nargs="*", metavar="WHEEL",
        help="a wheel (cp311-x86_64), a Python (cp314t, for both machines) or a machine (aarch64, for all Pythons); "
        "default: every wheel of a release",
    )  # fmt: skip


def select_targets(names: list[str]) -> list[Target]:
    """Return the targets of the given names, Pythons (`cp311`) or machines (`aarch64`); all of a release without one.

    The name of one of the other targets has to be given whole. Raises ValueError if no target has such a name.
    """
    chosen = []
    for name in names or ["all"]:
        found = [each for each in TARGETS.values() if name in ("all", each.name, each.abi, each.machine)]
        found += [OTHER_TARGETS[name]] if name in OTHER_TARGETS else []
        if not found:
            known = ", ".join([*TARGETS, *OTHER_TARGETS])
            raise ValueError(f"there is no wheel {name!r}; there are: {known}, and parts of the names of a release's")
        chosen += found
    return list(dict.fromkeys(chosen))
