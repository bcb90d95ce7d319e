"""C headers of the Pythons that wheels are built for, taken from Debian's packages or from an interpreter here.

No interpreter of the target has to run: a file tells what a build asks of one (PEP 739). One Python builds all wheels.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .debian import PYTHON_RELEASES, NoDebianError, PackageSource, unpack_package
from .pythons import find_interpreter
from .targets import Target


class NoHeadersError(Exception):
    """The headers of a Python cannot be had; the text says why."""


@dataclass(frozen=True)
class Headers:
    """Headers of one Python."""

    version: str  # full version, as PY_VERSION has it: "3.14.8"
    folders: tuple[Path, ...]  # directories in which a compiler looks, in order; the first has `Python.h`
    origin: str  # Debian's package with its version, or the interpreter


def find_headers(target: Target, work: Path) -> Headers:
    """Return the headers of a target's Python; fetch Debian's, or else take those of an interpreter on PATH.

    Debian's are kept in `work`. Raises `NoHeadersError` if neither has them.
    """
    reasons = []
    for find in (_find_in_debian, _find_beside_interpreter):
        try:
            headers = find(target, work)
        except (NoDebianError, NoHeadersError) as error:
            reasons.append(str(error))
        else:
            return headers
    raise NoHeadersError(f"no headers of Python {target.python} for {target.machine}: {'; '.join(reasons)}")


def _find_in_debian(target: Target, work: Path) -> Headers:
    release = PYTHON_RELEASES.get(target.version)
    if release is None:
        raise NoHeadersError("no release of Debian has them")
    [package] = PackageSource(work / "debian", release, target.machine).fetch_packages(
        [f"libpython{target.version}-dev"]
    )
    root = work / "headers" / package.stem
    if not root.exists():
        partial = root.with_name(root.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        unpack_package(package, partial)
        partial.rename(root)
    include = root / "usr/include"
    # Debian's pyconfig.h includes that of the machine, whose directory lies beside Python's.
    return Headers(_read_version(include / f"python{target.version}"), (include / f"python{target.version}", include),
                   f"Debian {release}, {package.stem}")  # fmt: skip


def _find_beside_interpreter(target: Target, _work: Path) -> Headers:
    """Return the headers of an interpreter here. They fit both machines: all sizes of C's types are equal."""
    program = find_interpreter(target.version)
    if program is None:
        raise NoHeadersError(f"there is no python{target.version} on PATH or in pyenv")
    asked = "import sysconfig; print(sysconfig.get_path('include'))"
    include = Path(subprocess.run([program, "-c", asked], text=True, capture_output=True, check=True).stdout.strip())
    if not (include / "Python.h").exists():
        raise NoHeadersError(f"{program} has no headers")
    version = _read_version(include)
    return Headers(version, (include, include.parent), f"interpreter python{version}")


def _read_version(include: Path) -> str:
    text = (include / "patchlevel.h").read_text()
    found = re.search(r'^#define PY_VERSION\s+"([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise NoHeadersError(f"{include / 'patchlevel.h'} tells no version")
    return found[1]


def write_build_details(target: Target, headers: Headers, path: Path) -> None:
    """Write what meson asks of the target's Python, by PEP 739."""
    details = {
        "schema_version": "1.0",
        "base_prefix": "/usr",
        "platform": f"linux-{target.machine}",
        "language": {"version": target.version},
        "implementation": {"name": "cpython"},
        "abi": {
            "flags": ["t"] if target.free_threaded else [],
            "extension_suffix": target.suffix,
            "stable_abi_suffix": ".abi3.so",
        },
        "libpython": {"link_extensions": False},
        "c_api": {"headers": str(headers.folders[0])},
    }
    path.write_text(json.dumps(details, indent=2))
