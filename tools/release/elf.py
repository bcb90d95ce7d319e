"""Shared libraries in a wheel: what they need, and what they say of the machine that compiled them."""

from __future__ import annotations

import io
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

LIBC_FAMILY = re.compile(r"(lib(c|m|pthread|rt|dl)|ld-linux-[\w-]+)\.so\.\d+")
_MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}


@dataclass(frozen=True)
class SharedLibrary:
    """One shared library."""

    name: str  # path in the wheel
    machine: str  # processor as `uname -m` prints it
    needed: tuple[str, ...]  # libraries that it links
    glibc: tuple[int, ...]  # newest version of glibc of which it uses a symbol
    searched: tuple[str, ...]  # directories that it names for the libraries (RPATH and RUNPATH)
    sections: tuple[str, ...]  # names of the sections


def read_libraries(wheel: Path) -> list[SharedLibrary]:
    """Return the shared libraries of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        return [_read_library(name, archive.read(name)) for name in names]


def _read_library(name: str, data: bytes) -> SharedLibrary:
    elf = ELFFile(io.BytesIO(data))
    dynamic: Any = elf.get_section_by_name(".dynamic")
    tags = list(dynamic.iter_tags())
    versions: list[tuple[int, ...]] = [(0,)]
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            found = [version.name for _, entries in section.iter_versions() for version in entries]
            versions += [tuple(map(int, each[6:].split("."))) for each in found if re.match(r"GLIBC_\d", each)]
    return SharedLibrary(
        name=name,
        machine=_MACHINES.get(elf["e_machine"], elf["e_machine"]),
        needed=tuple(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"),
        glibc=max(versions),
        searched=tuple(
            getattr(tag, tag.entry.d_tag[3:].lower()) for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")
        ),
        sections=tuple(section.name for section in elf.iter_sections()),
    )
