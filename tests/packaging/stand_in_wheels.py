"""Stand-ins for wheels of other projects: empty ones, by whose names a resolver is content without a network."""

from __future__ import annotations

import zipfile
from importlib.metadata import version
from pathlib import Path


def write_stand_in(directory: Path, name: str, outer: Path | None = None) -> Path:
    """Write an empty wheel with the name of an installed distribution, and its version.

    `outer` is a directory that Python searches, too, where the wheel is installed: there the real package is found.
    """
    stem = f"{name}-{version(name).partition('+')[0]}"
    files = {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {stem.partition('-')[2]}\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if outer is not None:
        files[f"outer_{name}.pth"] = f"{outer}\n"
    record = f"{stem}.dist-info/RECORD"
    path = directory / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(record, "".join(f"{file},,\n" for file in [*files, record]))
    return path
