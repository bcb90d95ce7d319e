"""Checks of a finished wheel, without running it."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from .archive import compute_record_hash
from .elf import LIBC_FAMILY, read_libraries
from .targets import GLIBC, Target

MOST_BYTES = 12 * 2**20
"""Limit of a wheel's size in bytes: more means symbols, debug information or a library that got in."""


class BadWheelError(Exception):
    """A wheel is not what it claims to be; the text lists what is wrong."""


def inspect_wheel(wheel: Path, target: Target, private: list[str]) -> str:
    """Check a wheel and describe it in a line.

    No file may have one of the `private` texts: directories of the machine that built it.

    Raises `BadWheelError` if the wheel is not for this target, would not run on every machine of it, or tells where it
    was built.
    """
    problems = [*_check_files(wheel, private), *_check_libraries(wheel, target)]
    if wheel.stat().st_size > MOST_BYTES:
        problems.append(f"it has {wheel.stat().st_size} bytes, more than {MOST_BYTES}")
    oldest = _ask_auditwheel(wheel)
    if oldest is None or oldest > GLIBC:
        problems.append(f"auditwheel finds that it needs glibc {oldest}, newer than {GLIBC}")
    if problems:
        raise BadWheelError(f"{wheel.name}: " + "; ".join(problems))
    libraries = read_libraries(wheel)
    newest = ".".join(map(str, max(each.glibc for each in libraries)))
    return f"{wheel.stat().st_size / 2**20:.1f} MiB, {len(libraries)} libraries, symbols of glibc up to {newest}"


def _check_files(wheel: Path, private: list[str]) -> list[str]:
    problems = []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [record] = [name for name in names if name.endswith(".dist-info/RECORD")]
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(archive.read(record).decode()))}
        for name in names:
            data = archive.read(name)
            if name != record and rows.get(name) != [compute_record_hash(data), str(len(data))]:
                problems.append(f"RECORD is wrong about {name}")
            problems += [f"{name} has the text {text!r}" for text in private if text.encode() in data]
        if set(rows) != set(names):
            problems.append("RECORD lists other files")
        problems += [f"{name} is bytecode or a cache" for name in names if re.search(r"__pycache__|\.pyc$", name)]
    return problems


def _check_libraries(wheel: Path, target: Target) -> list[str]:
    problems = []
    libraries = read_libraries(wheel)
    if not any(each.name.endswith(target.suffix) for each in libraries):
        problems.append(f"it has no extension module for {target.name}")
    for each in libraries:
        wrong = [
            ("is for another Python", ".cpython-" in each.name and not each.name.endswith(target.suffix)),
            (f"is for {each.machine}", each.machine != target.machine),
            (f"needs glibc {each.glibc}", each.glibc > GLIBC),
            (f"links {each.needed}", not all(map(LIBC_FAMILY.fullmatch, each.needed))),
            (f"searches {each.searched}", bool(each.searched)),
            ("has symbols", any(name == ".symtab" or name.startswith(".debug") for name in each.sections)),
        ]
        problems += [f"{each.name} {what}" for what, is_wrong in wrong if is_wrong]
    return problems


def _ask_auditwheel(wheel: Path) -> tuple[int, int] | None:
    """Return the oldest glibc for which auditwheel calls the wheel fit; None if there is none."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300, check=False)
    text = re.sub(r"\s+", " ", done.stdout)
    found = re.search(r'is consistent with the following platform tag: "manylinux_(\d+)_(\d+)_', text)
    return (int(found[1]), int(found[2])) if found else None
